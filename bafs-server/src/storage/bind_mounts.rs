//! Which processes of this machine have the tree of a volume mounted, where no agent counts what
//! they write. Ends no process.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use bafs_proto::ids::Epoch;

/// Whose processes may still have a watched tree mounted, where they may write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MountedBy {
    /// Those of an earlier life of this server, or of an agent that was killed.
    Anybody,
    /// The job of this session, and nobody else.
    Session(Epoch),
    /// No process.
    Nobody,
}

/// Whether a process of this machine still sees the directory, or one in it, where it may write:
/// the tables of mounts of its threads say so until none of its system calls runs any more. A table
/// that this user may not read belongs to nobody that was let in at the door.
pub(super) fn is_bind_mounted(root: &Path) -> bool {
    let Some(part) = root.to_str().and_then(volume_path_suffix) else {
        return true;
    };
    // Without this table nothing can be known.
    let Ok(processes) = std::fs::read_dir("/proc") else {
        return true;
    };
    // The first thread of a process may have ended long before the others.
    let threads = processes.flatten().flat_map(|process| {
        let threads = std::fs::read_dir(process.path().join("task"));
        threads.into_iter().flatten().flatten()
    });
    // Threads of one name space have one table; the kernel takes long to write one.
    let mut seen = BTreeSet::new();
    threads.into_iter().any(|thread| {
        let name_space = std::fs::metadata(thread.path().join("ns/mnt"));
        let name_space = name_space.ok().map(|file| file.ino());
        if name_space.is_some_and(|known| seen.contains(&known)) {
            return false;
        }
        let Ok(table) = std::fs::read_to_string(thread.path().join("mountinfo")) else {
            return false;
        };
        seen.extend(name_space);
        table.lines().any(|line| is_writable_mount(line, part))
    })
}

/// Whether a line of a table of mounts, proc_pid_mountinfo(5), is a directory with this part, or
/// one in it, and may be written there: its fourth field is the directory, the sixth are the
/// options.
fn is_writable_mount(line: &str, part: &str) -> bool {
    let mut fields = line.split(' ').skip(3);
    let (directory, options) = (fields.next(), fields.nth(1));
    let is_ours = directory.is_some_and(|directory| {
        let mut ends = directory.match_indices(part).map(|(at, _)| at + part.len());
        ends.any(|end| directory[end..].is_empty() || directory[end..].starts_with('/'))
    });
    is_ours && options.is_some_and(|options| options.split(',').any(|option| option == "rw"))
}

/// The last parts of a volume's path, which no other volume has.
fn volume_path_suffix(root: &str) -> Option<&str> {
    let start = root.rmatch_indices('/').nth(1)?.0;
    root.get(start..)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writable_bind_mounts_are_found_in_mount_tables() {
        let line = |root: &str, options: &str| {
            format!("36 35 98:0 {root} /mnt {options},noatime master:1 - ext4 /dev/x rw")
        };
        let part = volume_path_suffix("/store/volumes/7/tree").expect("a path");
        assert_eq!(part, "/7/tree");
        for (root, options, expected) in [
            ("/store/volumes/7/tree", "rw", true),
            ("/volumes/7/tree/work", "rw", true),
            ("/store/volumes/7/tree", "ro", false),
            ("/store/volumes/7/trees", "rw", false),
            ("/store/volumes/17/tree", "rw", false),
            ("/", "rw", false),
        ] {
            let found = is_writable_mount(&line(root, options), part);
            assert_eq!(found, expected, "{root} {options}");
        }
        assert!(!is_writable_mount("", part));
    }
}
