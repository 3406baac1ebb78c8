//! What a directory holds, counted by looking at all of it: of trees whose operations nobody
//! counts.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::io;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, fstat, open, openat, statat};
use rustix::io::Errno;

/// Bytes and files below a directory, of one file system. What comes and goes meanwhile, or is
/// closed to this user, may be missed; links lead nowhere.
///
/// # Errors
/// The directory cannot be looked at, or there are no descriptors left to look below it: then
/// nobody knows what it holds.
pub fn held_below(root: &Path) -> io::Result<(u64, u64)> {
    let (mut bytes, mut files, mut seen) = (0, 0, BTreeSet::new());
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let top = open(root, flags, Mode::empty())?;
    let device = fstat(&top)?.st_dev;
    let mut pending = vec![(Arc::new(top), CString::from(c"."))];
    while let Some((parent, name)) = pending.pop() {
        let directory = match openat(&*parent, &*name, flags, Mode::empty()) {
            Ok(directory) => directory,
            Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => return Err(error.into()),
            Err(_) => continue,
        };
        drop(parent);
        // It is read through a descriptor of its own, for which there must be one too.
        let entries = match Dir::read_from(&directory) {
            Ok(entries) => entries,
            Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => return Err(error.into()),
            Err(_) => continue,
        };
        let directory = Arc::new(directory);
        for entry in entries.flatten() {
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let Ok(stat) = statat(&*directory, name, AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            if stat.st_dev != device || (stat.st_nlink > 1 && !seen.insert(stat.st_ino)) {
                continue;
            }
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                pending.push((directory.clone(), name.to_owned()));
            }
            bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
            files += 1;
        }
    }
    Ok((bytes, files))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;

    #[test]
    fn a_walk_counts_what_is_there_once() {
        let directory = tempfile::tempdir().expect("directory");
        let root = directory.path();
        std::fs::create_dir(root.join("d")).expect("directory");
        std::fs::write(root.join("d/f"), [1; 8192]).expect("write");
        std::fs::hard_link(root.join("d/f"), root.join("g")).expect("link");
        std::os::unix::fs::symlink("/", root.join("l")).expect("link");
        let (bytes, files) = held_below(root).expect("walk");
        assert_eq!(files, 3);
        assert!((8192..65_536).contains(&bytes), "{bytes}");
        // What cannot be looked at is not empty.
        assert!(held_below(&root.join("absent")).is_err());
    }

    #[test]
    fn a_walk_without_descriptors_is_no_small_volume() {
        let directory = tempfile::tempdir().expect("directory");
        std::fs::create_dir_all(directory.path().join("a/b/c")).expect("directory");
        let before = getrlimit(Resource::Nofile);
        let last = std::fs::File::open("/dev/null").expect("open");
        let lowest = Rlimit {
            current: u64::try_from(last.as_raw_fd()).ok().map(|last| last + 2),
            maximum: before.maximum,
        };
        setrlimit(Resource::Nofile, lowest).expect("limit");
        let walked = held_below(directory.path());
        setrlimit(Resource::Nofile, before).expect("limit");
        assert!(walked.is_err(), "{walked:?}");
    }
}
