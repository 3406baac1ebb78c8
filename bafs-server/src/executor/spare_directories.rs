//! Directories for temporary files that jobs left as they got them, for the next jobs. A directory
//! costs more to make than a short job may take: ext4 passes over the number of each one that was
//! removed within the last minute. Removes nothing.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{Dir, Mode, OFlags, flistxattr, fstat, ioctl_getflags, open};
use rustix::process::geteuid;

/// Most directories that wait for a job. More end at once only on the largest machines.
const SPARES_MAX: usize = 64;

/// Modes of a job's directory, which only its node may enter, and of those in it, which are the
/// job's.
const OUTER_MODE: u32 = 0o700;
const INNER_MODE: u32 = 0o1777;

/// A larger directory has held many files.
const DIRECTORY_BYTES_MAX: i64 = 4096;

/// The flag of a file whose blocks are in extents, which ext4 gives each (`EXT4_EXTENTS_FL`).
const EXTENTS_FLAG: u32 = 0x8_0000;

/// Room for names of attributes. More than that is an error, and that is as good as one name.
const NAMES_BYTES: usize = 256;

/// What was left by jobs that made no temporary files.
#[derive(Debug, Default)]
pub(super) struct SpareDirectories(Mutex<Vec<PathBuf>>);

impl SpareDirectories {
    /// Moves a spare directory to `path`; whether there was one.
    pub(super) fn take(&self, path: &Path) -> bool {
        while let Some(spare) = self.lock().pop() {
            if fs::rename(spare, path).is_ok() {
                return true;
            }
        }
        false
    }

    /// Keeps the directory of a job of which no process is left, if another job can have it;
    /// whether it does.
    pub(super) fn keep(&self, path: &Path) -> bool {
        if self.lock().len() >= SPARES_MAX || !is_untouched(path).unwrap_or(false) {
            return false;
        }
        self.lock().push(path.to_owned());
        true
    }

    fn lock(&self) -> MutexGuard<'_, Vec<PathBuf>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a job's directory shows nothing of the job: no file, and no rights or attributes that
/// directories are not made with.
fn is_untouched(path: &Path) -> io::Result<bool> {
    let Some(inner) = list_plain_directory(path, OUTER_MODE)? else {
        return Ok(false);
    };
    for name in inner {
        match list_plain_directory(&path.join(name), INNER_MODE)? {
            Some(entries) if entries.is_empty() => {}
            _ => return Ok(false),
        }
    }
    Ok(true)
}

/// The names in a directory; nothing where it is not one that was just made with this mode.
fn list_plain_directory(path: &Path, mode: u32) -> io::Result<Option<Vec<PathBuf>>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = open(path, flags, Mode::empty())?;
    let found = fstat(&directory)?;
    let is_plain = found.st_mode & 0o7777 == mode
        && found.st_uid == geteuid().as_raw()
        && found.st_size <= DIRECTORY_BYTES_MAX
        && ioctl_getflags(&directory)?.bits() & !EXTENTS_FLAG == 0
        && flistxattr(&directory, &mut [0_u8; NAMES_BYTES])? == 0;
    if !is_plain {
        return Ok(None);
    }
    let mut names = Vec::new();
    for entry in Dir::read_from(&directory)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name != "." && name != ".." {
            names.push(PathBuf::from(name));
        }
    }
    Ok(Some(names))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt};

    use super::*;

    fn make_directory(path: &Path, mode: u32) {
        fs::DirBuilder::new().mode(mode).create(path).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    /// Whether the directory of a job that did this is kept.
    fn is_kept(act: impl FnOnce(&Path)) -> bool {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("1");
        make_directory(&path, OUTER_MODE);
        make_directory(&path.join("tmp"), INNER_MODE);
        act(&path.join("tmp"));
        let spares = SpareDirectories::default();
        let is_kept = spares.keep(&path);
        let next = parent.path().join("2");
        assert_eq!(spares.take(&next), is_kept);
        assert_eq!(next.join("tmp").is_dir(), is_kept);
        is_kept
    }

    #[test]
    fn only_untouched_directories_are_used_again() {
        let place = tempfile::tempdir().unwrap();
        let has_flags = open(place.path(), OFlags::RDONLY, Mode::empty())
            .is_ok_and(|directory| ioctl_getflags(directory).is_ok());
        assert_eq!(is_kept(|_| {}), has_flags);
        assert!(!is_kept(|tmp| fs::write(tmp.join("f"), "x").unwrap()));
        let restrict = |tmp: &Path| fs::set_permissions(tmp, fs::Permissions::from_mode(0o700));
        assert!(!is_kept(|tmp| restrict(tmp).unwrap()));
        assert!(!is_kept(|tmp| {
            let name = "user.left";
            let flags = rustix::fs::XattrFlags::empty();
            // Where there are no attributes, another change stands for them.
            if rustix::fs::setxattr(tmp, name, b"x", flags).is_err() {
                restrict(tmp).unwrap();
            }
        }));
    }
}
