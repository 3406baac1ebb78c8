//! Entries of a source tree as they travel, whoever shows it: home or a volume. Opens no file.

use std::os::fd::{BorrowedFd, OwnedFd};

use bafs_proto::limits::HEAD_BYTES_MAX;
use bafs_proto::message::{SourceEntry, SourceIdentity, SourceKind};
use rustix::fs::{FileType, Mode, OFlags, Stat, openat};
use rustix::io::Errno;

/// Most bytes of entries in one page, by [`entry_bytes`]: a page must fit a header together with
/// what is around it.
pub(crate) const PAGE_BYTES_MAX: usize = HEAD_BYTES_MAX as usize * 3 / 4;

/// Bytes of an encoded entry, at most.
pub(crate) fn entry_bytes(entry: &SourceEntry) -> usize {
    // Two lengths, a kind, size, two times and mode take 58.
    const NUMBERS: usize = 64;
    let target = match &entry.kind {
        SourceKind::Symlink(target) => target.len(),
        SourceKind::File | SourceKind::Directory | SourceKind::UnreadableDirectory => 0,
    };
    NUMBERS + entry.path.len() + target
}

/// What makes a file another one. Only a file has a size and a time of its last change: the size
/// of a directory differs between file systems and says nothing. The modification time alone is
/// not enough: copying programs set it to that of the file which they replace.
pub(crate) fn source_identity(stat: &Stat) -> SourceIdentity {
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    let size = if is_file { stat.st_size } else { 0 };
    let ctime_ns = nanoseconds(
        stat.st_ctime,
        i64::try_from(stat.st_ctime_nsec).unwrap_or(0),
    );
    SourceIdentity {
        size: u64::try_from(size).unwrap_or(0),
        mtime_ns: nanoseconds(
            stat.st_mtime,
            i64::try_from(stat.st_mtime_nsec).unwrap_or(0),
        ),
        ctime_ns: if is_file { ctime_ns } else { 0 },
    }
}

/// What identifies the content of an open file.
pub(crate) fn file_identity(file: &std::fs::File) -> std::io::Result<SourceIdentity> {
    Ok(source_identity(&rustix::fs::fstat(file)?))
}

fn nanoseconds(seconds: i64, fraction: i64) -> i64 {
    seconds
        .saturating_mul(1_000_000_000)
        .saturating_add(fraction)
}

/// A file as a listing shows it; `None` for what has no content to copy: a FIFO, a socket, a
/// device. `target` reads a symbolic link.
pub(crate) fn source_entry(
    path: &str,
    stat: &Stat,
    target: impl FnOnce() -> rustix::io::Result<Vec<u8>>,
) -> rustix::io::Result<Option<SourceEntry>> {
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => SourceKind::File,
        FileType::Directory => SourceKind::Directory,
        FileType::Symlink => SourceKind::Symlink(target()?),
        _ => return Ok(None),
    };
    Ok(Some(SourceEntry {
        path: path.to_owned(),
        kind,
        identity: source_identity(stat),
        mode: stat.st_mode & 0o7777,
    }))
}

/// A directory of a source, as whoever shows it may use it.
pub(crate) enum OpenedDirectory {
    /// It may be listed, and what is in it looked at.
    Readable(OwnedFd),
    /// It may not.
    Unreadable,
}

/// Opens the directory `name` in `parent` for listing, unless it is a link.
///
/// # Errors
/// What the system says, but not that it may not be read.
pub(crate) fn open_directory(
    parent: BorrowedFd<'_>,
    name: &[u8],
) -> rustix::io::Result<OpenedDirectory> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = openat(parent, name, flags | OFlags::RDONLY, Mode::empty()).and_then(|opened| {
        // Whoever may list a directory may perhaps not go into it.
        openat(&opened, c".", flags | OFlags::PATH, Mode::empty())?;
        Ok(opened)
    });
    match opened {
        Ok(opened) => Ok(OpenedDirectory::Readable(opened)),
        Err(Errno::ACCESS | Errno::PERM) => Ok(OpenedDirectory::Unreadable),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::PermissionsExt;

    use bafs_proto::codec;
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    use super::*;

    #[test]
    fn encoded_entries_never_exceed_their_size_estimate() {
        for kind in [
            SourceKind::File,
            SourceKind::Directory,
            SourceKind::Symlink(vec![b'x'; 4_000]),
        ] {
            let entry = SourceEntry {
                path: "y".repeat(4_000),
                kind,
                identity: SourceIdentity {
                    size: u64::MAX,
                    mtime_ns: i64::MIN,
                    ctime_ns: i64::MIN,
                },
                mode: u32::MAX,
            };
            let encoded = codec::encode(&entry).expect("encode");
            assert!(encoded.len() <= entry_bytes(&entry));
        }
    }

    #[test]
    fn unlistable_directories_are_unreadable() {
        let root = tempfile::tempdir().expect("directory");
        for (name, mode) in [("open", 0o500), ("listed", 0o400), ("entered", 0o100)] {
            let path = root.path().join(name);
            std::fs::create_dir(&path).expect("mkdir");
            let bits = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(path, bits).expect("chmod");
        }
        let at = root.path().to_owned();
        let act = move || {
            // As anybody but root.
            let mut own = capabilities(None).expect("capabilities");
            let all = CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
            own.effective.remove(all);
            set_capabilities(None, own).expect("give up");
            let parent = rustix::fs::open(at, OFlags::PATH, Mode::empty()).expect("open");
            ["open", "listed", "entered"].map(|name| {
                let opened = open_directory(parent.as_fd(), name.as_bytes()).expect("opened");
                matches!(opened, OpenedDirectory::Readable(_))
            })
        };
        let readable = std::thread::spawn(act).join().expect("join");
        assert_eq!(readable, [true, false, false]);
    }

    #[test]
    fn directories_have_no_size() {
        let directory = tempfile::tempdir().expect("directory");
        let stat = rustix::fs::stat(directory.path()).expect("stat");
        assert!(stat.st_size > 0);
        assert_eq!(source_identity(&stat).size, 0);
    }
}
