//! Temporary directories that say whether their owner lives, and removal of those whose owner was
//! killed. Ends no process.

use std::fmt;
use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use bafs_proto::ErrorCode;
use nix::fcntl::OFlag;
use nix::sys::statvfs::statvfs;
use nix::unistd::geteuid;
use tempfile::TempDir;

/// First part of the names of all directories.
const NAME_PREFIX: &str = "bafs-";

/// File that its owner holds locked; the kernel unlocks it when the owner dies in any way.
const OWNER_LOCK_NAME: &str = "owner.lock";

/// Why there is no temporary directory: what failed, why, and what to do.
#[derive(Debug)]
pub(crate) struct TemporaryDirectoryError {
    place: PathBuf,
    error: io::Error,
}

impl TemporaryDirectoryError {
    /// What went wrong, for programs.
    pub(crate) fn code(&self) -> ErrorCode {
        match self.error.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory => ErrorCode::NotFound,
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => ErrorCode::RightMissing,
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => ErrorCode::NoSpaceBytes,
            _ => ErrorCode::ServerFault,
        }
    }
}

impl fmt::Display for TemporaryDirectoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = self.place.display();
        match self.code() {
            ErrorCode::NotFound => write!(
                f,
                "cannot create a directory in {place}: no such directory; set TMPDIR to a \
                 directory that is there"
            ),
            ErrorCode::RightMissing => write!(
                f,
                "cannot create a directory in {place}: this user may not write there; set TMPDIR \
                 to a directory where it may"
            ),
            ErrorCode::NoSpaceBytes => f.write_str(&full_disk_text(&self.place, &self.error)),
            _ => write!(
                f,
                "cannot create a directory in {place}: {}; set TMPDIR to another directory",
                self.error
            ),
        }
    }
}

impl std::error::Error for TemporaryDirectoryError {}

fn full_disk_text(place: &Path, error: &dyn fmt::Display) -> String {
    format!(
        "the disk of {} is full: {error}; make room there, or set TMPDIR to a directory on another \
         disk",
        place.display()
    )
}

/// Says of a failure that the disk of a temporary directory is full, if it is.
pub(crate) fn explain_full_disk(directory: &Path, error: anyhow::Error) -> anyhow::Error {
    let is_full = statvfs(directory).is_ok_and(|disk| {
        disk.blocks_available() == 0 || (disk.files() > 0 && disk.files_available() == 0)
    });
    let place = directory.parent().unwrap_or(directory);
    match is_full {
        true => anyhow::anyhow!(full_disk_text(place, &format_args!("{error:#}"))),
        false => error,
    }
}

/// A temporary directory of this process, removed when it is dropped.
#[derive(Debug)]
pub(crate) struct LockedDirectory {
    // Dropped first: who finds the lock free must find nothing to remove.
    directory: TempDir,
    _owner_lock: Option<File>,
}

impl LockedDirectory {
    /// Makes a directory, and removes those that dead processes of this user left beside it. One
    /// that shall be kept is never removed by anybody.
    ///
    /// # Errors
    /// An I/O error, naming the place.
    pub(crate) fn create(purpose: &str, keep: bool) -> Result<Self> {
        remove_stale_directories();
        Self::create_only(purpose, keep)
    }

    /// As [`Self::create`]; whoever calls it removes what dead processes left.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub(crate) fn create_only(purpose: &str, keep: bool) -> Result<Self> {
        let place = std::env::temp_dir();
        let prefix = format!("{NAME_PREFIX}{purpose}-{}-", std::process::id());
        let mut directory = tempfile::Builder::new()
            .prefix(&prefix)
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(&place)
            .map_err(|error| TemporaryDirectoryError { place, error })?;
        directory.disable_cleanup(keep);
        let owner = if keep {
            None
        } else {
            let owner = create_lock(directory.path()).context("cannot lock a directory");
            Some(owner.map_err(|error| explain_full_disk(directory.path(), error))?)
        };
        Ok(Self {
            directory,
            _owner_lock: owner,
        })
    }

    /// From now on nobody removes it.
    ///
    /// # Errors
    /// An I/O error: then it is removed as before.
    pub(crate) fn keep_files(&mut self) -> Result<()> {
        let owner = self.directory.path().join(OWNER_LOCK_NAME);
        if owner.exists() {
            fs::remove_file(&owner).with_context(|| owner.display().to_string())?;
        }
        self.directory.disable_cleanup(true);
        Ok(())
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// The lock exists under its name only when it is held.
fn create_lock(directory: &Path) -> io::Result<File> {
    let draft = directory.join("owner.draft");
    let file = File::create_new(&draft)?;
    file.lock()?;
    fs::rename(draft, directory.join(OWNER_LOCK_NAME))?;
    Ok(file)
}

/// Removes the directories that dead processes of this user left.
pub(crate) fn remove_stale_directories() {
    remove_stale(&std::env::temp_dir());
}

/// Removes what dead owners left. What cannot be looked at or removed stays: it may be another's.
fn remove_stale(place: &Path) {
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        // Nothing of what others put there is opened.
        let is_ours = entry.file_name().to_string_lossy().starts_with(NAME_PREFIX)
            && entry
                .metadata()
                .is_ok_and(|found| found.is_dir() && found.uid() == geteuid().as_raw());
        if !is_ours {
            continue;
        }
        let path = entry.path();
        let Some(owner) = open_lock(&path.join(OWNER_LOCK_NAME)) else {
            continue;
        };
        if owner.try_lock().is_ok() {
            match fs::remove_dir_all(&path) {
                Ok(()) => tracing::info!(path = %path.display(), "removed the files of a dead run"),
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "cannot remove the files of a \
                        dead run");
                }
            }
        }
    }
}

/// Opens the lock of a directory, if it is a file as `lock` makes it: a pipe, for instance, would
/// be waited for until somebody writes to it.
fn open_lock(path: &Path) -> Option<File> {
    let flags = OFlag::O_NONBLOCK | OFlag::O_NOFOLLOW;
    let mut options = File::options();
    let file = options.read(true).custom_flags(flags.bits()).open(path);
    file.ok()
        .filter(|file| file.metadata().is_ok_and(|found| found.is_file()))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    #[test]
    fn temporary_directory_errors_say_what_to_do() {
        for (kind, code, cause, remedy) in [
            (
                ErrorKind::NotFound,
                ErrorCode::NotFound,
                "cannot create a directory in /t: no such directory",
                "; set TMPDIR to a directory that is there",
            ),
            (
                ErrorKind::PermissionDenied,
                ErrorCode::RightMissing,
                "cannot create a directory in /t: this user may not write there",
                "; set TMPDIR to a directory where it may",
            ),
            (
                ErrorKind::StorageFull,
                ErrorCode::NoSpaceBytes,
                "the disk of /t is full: ",
                "; make room there, or set TMPDIR to a directory on another disk",
            ),
        ] {
            let (place, error) = (PathBuf::from("/t"), kind.into());
            let told = TemporaryDirectoryError { place, error };
            assert_eq!(told.code(), code);
            let text = told.to_string();
            assert!(text.starts_with(cause) && text.ends_with(remedy), "{text}");
        }
    }

    #[test]
    fn only_directories_of_dead_owners_are_removed() {
        let place = tempfile::tempdir().expect("directory");
        let make = |name: &str| {
            let path = place.path().join(name);
            fs::create_dir(&path).expect("directory");
            path
        };
        let (dead, live) = (make("bafs-demo-1-a"), make("bafs-demo-1-b"));
        let (unmarked, other) = (make("bafs-demo-1-c"), make("other-1-d"));
        drop(create_lock(&dead).expect("lock"));
        drop(create_lock(&other).expect("lock"));
        let held = create_lock(&live).expect("lock");
        remove_stale(place.path());
        assert!(!dead.exists() && live.exists() && unmarked.exists() && other.exists());
        drop(held);
        remove_stale(place.path());
        assert!(!live.exists());
    }

    #[test]
    fn fifo_in_place_of_a_lock_blocks_nothing() {
        let place = tempfile::tempdir().expect("directory");
        for name in ["bafs-demo-1-a", "other-1-b"] {
            let path = place.path().join(name);
            fs::create_dir(&path).expect("directory");
            mkfifo(&path.join(OWNER_LOCK_NAME), Mode::S_IRWXU).expect("pipe");
        }
        let (swept, done) = channel();
        let path = place.path().to_owned();
        std::thread::spawn(move || {
            remove_stale(&path);
            swept.send(())
        });
        let waited = done.recv_timeout(Duration::from_secs(20));
        waited.expect("it waits for a pipe");
        assert_eq!(fs::read_dir(place.path()).expect("list").count(), 2);
    }
}
