//! The kernel's table of mounts, read as text: it tells of every mount without touching any, so
//! nothing that hangs can hang the reader.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// Kind of every file system that this program mounts.
pub const FILE_SYSTEM_KIND: &str = "fuse.bafs";

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// Number of the mount while it lasts.
    pub id: u64,
    /// Device of the file system, major and minor; the minor one of a FUSE file system is the
    /// number of its connection.
    pub device: (u32, u32),
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// Options of this mount, separated by commas.
    pub options: Vec<u8>,
    /// Kind of file system, such as `fuse.bafs`.
    pub kind: String,
    /// What is mounted, such as `bafs:work`.
    pub source: String,
}

impl MountEntry {
    /// Whether this program mounted it.
    pub fn is_ours(&self) -> bool {
        self.kind == FILE_SYSTEM_KIND
    }
}

/// Reads `/proc/PID/mountinfo`, in its order: of several mounts on one point the last is on top.
/// Lines that make no sense are left out.
pub fn parse_mount_table(table: &[u8]) -> Vec<MountEntry> {
    table
        .split(|&byte| byte == b'\n')
        .filter_map(parse_line)
        .collect()
}

fn parse_line(line: &[u8]) -> Option<MountEntry> {
    // man 5 proc_pid_mountinfo: id, parent, device, root, point, options, tags…, -, kind, source
    let mut fields = line.split(|&byte| byte == b' ');
    let text = |field: &[u8]| String::from_utf8_lossy(&unescape(field)).into_owned();
    let id = text(fields.next()?).parse().ok()?;
    let device = text(fields.nth(1)?);
    let (major, minor) = device.split_once(':')?;
    let device = (major.parse().ok()?, minor.parse().ok()?);
    let point = PathBuf::from(OsString::from_vec(unescape(fields.nth(1)?)));
    let options = fields.next()?.to_vec();
    let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
    let kind = rest.next().map(text).unwrap_or_default();
    let source = rest.next().map(text).unwrap_or_default();
    Some(MountEntry {
        id,
        device,
        mount_point: point,
        options,
        kind,
        source,
    })
}

/// Undoes the kernel's `\040` for blank, tab, newline and backslash.
pub fn unescape(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, tail)) = rest.split_first() {
        let code = tail.get(..3).filter(|_| first == b'\\');
        let byte = code
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        plain.push(byte.unwrap_or(first));
        rest = if byte.is_some() { &tail[3..] } else { tail };
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_table_is_parsed() {
        let table = b"1 0 0:1 / / rw,relatime shared:1 master:2 - ext4 /dev/vda rw\n\
            22 1 0:47 / /a\\040b rw,nosuid - fuse.bafs bafs:work rw,user_id=0\n\
            nonsense\n";
        let found = parse_mount_table(table);
        assert_eq!(found.len(), 2);
        assert!(!found[0].is_ours() && found[1].is_ours());
        let MountEntry {
            id,
            device,
            mount_point: point,
            source,
            ..
        } = &found[1];
        assert_eq!((*id, *device), (22, (0, 47)));
        assert_eq!(point, &PathBuf::from("/a b"));
        assert_eq!(source, "bafs:work");
    }

    #[test]
    fn a_lone_backslash_stays() {
        assert_eq!(unescape(b"a\\04"), b"a\\04");
        assert_eq!(unescape(b"\\134\\"), b"\\\\");
    }
}
