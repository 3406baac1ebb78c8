//! What a directory holds, counted by looking at all of it: of trees whose operations nobody
//! counts.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat, fstat, open, openat, statat};
use rustix::io::Errno;

/// Bytes and files below a directory, of one file system. What comes and goes meanwhile, or is
/// closed to this user, may be missed; links lead nowhere.
///
/// # Errors
/// The directory cannot be looked at, or there are no descriptors left to look below it: then
/// nobody knows what it holds.
pub fn measure_use(root: &Path) -> io::Result<(u64, u64)> {
    let (mut bytes, mut files) = (0, 0);
    let _whole = walk_files(root, &mut |stat| {
        bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        files += 1;
        ControlFlow::Continue(())
    })?;
    Ok((bytes, files))
}

/// How the files of a directory were at a time: what is created, removed, renamed, written or given
/// other attributes since makes another one of it. Reading makes none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeFingerprint {
    files: u64,
    sum: u64,
    /// The time of the latest change, in nanoseconds since 1970.
    pub latest_change_ns: i128,
}

/// [`TreeFingerprint`] of a directory and all below it; nothing where there are more files than
/// `files_max`.
///
/// # Errors
/// As [`measure_use`].
pub fn tree_fingerprint(root: &Path, files_max: u64) -> io::Result<Option<TreeFingerprint>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let top = fstat(open(root, flags, Mode::empty())?)?;
    let mut marks = TreeFingerprint {
        files: 0,
        sum: 0,
        latest_change_ns: i128::MIN,
    };
    marks.add(&top);
    let is_whole = walk_files(root, &mut |stat| {
        marks.add(stat);
        match marks.files > files_max {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    })?;
    Ok(is_whole.then_some(marks))
}

impl TreeFingerprint {
    fn add(&mut self, stat: &Stat) {
        let changed_ns = i128::from(stat.st_ctime) * 1_000_000_000 + i128::from(stat.st_ctime_nsec);
        let mut hasher = DefaultHasher::new();
        (stat.st_ino, changed_ns).hash(&mut hasher);
        self.files += 1;
        // In whatever order they come.
        self.sum = self.sum.wrapping_add(hasher.finish());
        self.latest_change_ns = self.latest_change_ns.max(changed_ns);
    }
}

/// Gives what is told of each file below a directory, until that is enough; answers whether these
/// were all.
fn walk_files(root: &Path, look: &mut dyn FnMut(&Stat) -> ControlFlow<()>) -> io::Result<bool> {
    let mut seen = BTreeSet::new();
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
            if look(&stat).is_break() {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;

    #[test]
    fn a_walk_counts_each_file_once() {
        let directory = tempfile::tempdir().expect("directory");
        let root = directory.path();
        std::fs::create_dir(root.join("d")).expect("directory");
        std::fs::write(root.join("d/f"), [1; 8192]).expect("write");
        std::fs::hard_link(root.join("d/f"), root.join("g")).expect("link");
        std::os::unix::fs::symlink("/", root.join("l")).expect("link");
        let (bytes, files) = measure_use(root).expect("walk");
        assert_eq!(files, 3);
        assert!((8192..65_536).contains(&bytes), "{bytes}");
        // What cannot be looked at is not empty.
        assert!(measure_use(&root.join("absent")).is_err());
    }

    #[test]
    fn marks_reflect_changes_but_not_reads() {
        let directory = tempfile::tempdir().expect("directory");
        let root = directory.path();
        std::fs::create_dir(root.join("d")).expect("directory");
        std::fs::write(root.join("d/f"), [1; 8192]).expect("write");
        std::fs::write(root.join("g"), "g").expect("write");
        // Times of files move on in ticks of the kernel.
        let tick = || std::thread::sleep(std::time::Duration::from_millis(20));
        let marks = || {
            tree_fingerprint(root, 100)
                .expect("walk")
                .expect("few files")
        };
        let is_new = |change: &dyn Fn()| {
            let before = marks();
            tick();
            change();
            marks() != before
        };
        let in_place = || {
            let file = std::fs::OpenOptions::new().write(true).open(root.join("g"));
            io::Write::write_all(&mut file.expect("open"), b"h").expect("write");
        };
        assert!(!is_new(&|| drop(
            std::fs::read(root.join("d/f")).expect("read")
        )));
        assert!(!is_new(&|| {
            let listed = std::fs::read_dir(root.join("d")).expect("list");
            assert!(listed.count() > 0);
        }));
        assert!(is_new(&in_place), "as many bytes");
        assert!(is_new(
            &|| std::fs::rename(root.join("g"), root.join("h")).expect("rename")
        ));
        assert!(is_new(
            &|| std::fs::create_dir(root.join("d/e")).expect("directory")
        ));
        assert!(is_new(
            &|| std::fs::remove_file(root.join("d/f")).expect("remove")
        ));
        assert_eq!(tree_fingerprint(root, 3).expect("walk"), None, "too many");
    }

    #[test]
    fn a_walk_without_descriptors_fails() {
        let directory = tempfile::tempdir().expect("directory");
        std::fs::create_dir_all(directory.path().join("a/b/c")).expect("directory");
        let before = getrlimit(Resource::Nofile);
        let last = std::fs::File::open("/dev/null").expect("open");
        let lowest = Rlimit {
            current: u64::try_from(last.as_raw_fd()).ok().map(|last| last + 2),
            maximum: before.maximum,
        };
        setrlimit(Resource::Nofile, lowest).expect("limit");
        let walked = measure_use(directory.path());
        setrlimit(Resource::Nofile, before).expect("limit");
        assert!(walked.is_err(), "{walked:?}");
    }
}
