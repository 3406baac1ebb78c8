//! Says to other processes that a server uses the own directory of an export, and removes one that
//! nobody uses. Knows nothing of what is in it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags, Stat, flock, fstat, stat};
use rustix::io::Errno;

use super::export::OWN_DIRECTORY;

/// Looks at a directory that somebody removes right now, and the pause between them: it is small.
const OPEN_TRIES_MAX: u32 = 500;
const PAUSE: Duration = Duration::from_millis(10);

/// A directory that is in use as long as this lives. Several servers may use the same.
#[derive(Debug)]
pub(super) struct DirectoryUse {
    path: PathBuf,
    /// Locked, unless the file system knows no locks: then it is never removed either.
    directory: File,
}

/// The user of files whose owner is not known.
const NOBODY: u32 = 65_534;

impl DirectoryUse {
    /// Makes a directory if it is not there, but none above it, and uses it. If nobody else does,
    /// `recover` runs first: whoever comes meanwhile waits.
    ///
    /// # Errors
    /// What the system says; `WouldBlock` when somebody goes on removing it.
    pub(super) fn open(path: &Path, mut recover: impl FnMut()) -> io::Result<Self> {
        for _ in 0..OPEN_TRIES_MAX {
            make_private_directory(path)?;
            let directory = match open_locked(path, OFlags::NOFOLLOW) {
                // It was removed since.
                Err(Errno::NOENT) => continue,
                opened => opened?,
            };
            let entered = Self {
                path: path.to_owned(),
                directory,
            };
            let lock = |operation| flock(&entered.directory, operation);
            // Whoever removed it between the two calls could not know of this lock.
            if lock(FlockOperation::NonBlockingLockExclusive).is_ok() && entered.is_in_place() {
                recover();
            }
            if lock(FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK) {
                std::thread::sleep(PAUSE);
                continue;
            }
            if entered.is_in_place() {
                return Ok(entered);
            }
        }
        let text = "another process removes it all the time";
        Err(io::Error::new(io::ErrorKind::WouldBlock, text))
    }

    /// Whether the directory is still where it was entered.
    pub(super) fn is_in_place(&self) -> bool {
        let same =
            |held: Stat, named: Stat| (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino);
        let named = stat(&self.path);
        fstat(&self.directory).is_ok_and(|held| named.is_ok_and(|named| same(held, named)))
    }
}

/// Removes the home server's own directory from an export, with all that is in it: uploads under
/// way, receipts, the server's id. It stays while any server uses it; whether it is gone.
///
/// # Errors
/// What the system says.
pub fn remove_unused_directory(export: &Path) -> io::Result<bool> {
    let path = export.join(OWN_DIRECTORY);
    let directory = match open_locked(&path, OFlags::NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(true),
        opened => opened?,
    };
    match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => return Ok(false),
        locked => locked?,
    }
    fs::remove_dir_all(&path)?;
    Ok(true)
}

/// Makes a directory that only this user writes, if it is not there; what somebody else put there
/// is refused, as a home of root would write where a link leads.
///
/// # Errors
/// `PermissionDenied` for another user's; what the system says.
pub(super) fn make_private_directory(path: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => return made,
    }
    let found = match fs::symlink_metadata(path) {
        // It was removed since.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    let own = rustix::process::geteuid().as_raw();
    // Where root's files on a server of NFS become nobody's.
    let is_squashed = own == 0 && found.uid() == NOBODY;
    let is_own = found.uid() == own || is_squashed;
    if found.is_dir() && is_own && found.mode() & 0o002 == 0 {
        return Ok(());
    }
    let text = format!(
        "'{}' is a link, another user's, or open to everybody: remove it, or export \
         another directory",
        path.display()
    );
    Err(io::Error::new(io::ErrorKind::AlreadyExists, text))
}

fn open_locked(path: &Path, more: OFlags) -> rustix::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | more;
    rustix::fs::open(path, flags, Mode::empty()).map(File::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_as_own_directory_is_refused() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let (export, elsewhere) = (tempfile::tempdir(), tempfile::tempdir());
        let (export, elsewhere) = (export.expect("directory"), elsewhere.expect("directory"));
        let own = export.path().join(OWN_DIRECTORY);
        symlink(elsewhere.path(), &own).expect("link");
        let refused = DirectoryUse::open(&own, || ())
            .expect_err("a link")
            .to_string();
        assert!(refused.contains("is a link"), "{refused}");
        fs::remove_file(&own).expect("remove");
        fs::create_dir(&own).expect("directory");
        let open = fs::Permissions::from_mode(0o777);
        fs::set_permissions(&own, open).expect("chmod");
        assert!(DirectoryUse::open(&own, || ()).is_err());
        fs::remove_dir(&own).expect("remove");
        drop(DirectoryUse::open(&own, || ()).expect("enter"));
        let mode = fs::metadata(&own).expect("it is there").mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn an_occupied_directory_is_not_removed() {
        let export = tempfile::tempdir().expect("directory");
        let own = export.path().join(OWN_DIRECTORY);
        let remove = || remove_unused_directory(export.path()).expect("removed or not");
        assert!(remove(), "there is none");
        let one = DirectoryUse::open(&own, || ()).expect("enter");
        let two = DirectoryUse::open(&own, || ()).expect("enter");
        fs::write(own.join("server-id"), b"mine").expect("write");
        drop(one);
        assert!(!remove());
        assert_eq!(fs::read(own.join("server-id")).expect("read"), b"mine");
        drop(two);
        assert!(remove() && !own.exists());
    }

    #[test]
    fn an_entry_during_removal_creates_a_new_directory() {
        let export = tempfile::tempdir().expect("directory");
        let own = export.path().join(OWN_DIRECTORY);
        fs::create_dir(&own).expect("mkdir");
        let removing = open_locked(&own, OFlags::empty()).expect("open");
        flock(&removing, FlockOperation::LockExclusive).expect("lock");
        let path = own.clone();
        let coming = std::thread::spawn(move || DirectoryUse::open(&path, || ()));
        std::thread::sleep(5 * PAUSE);
        fs::remove_dir(&own).expect("rmdir");
        drop(removing);
        let entered = coming.join().expect("join").expect("enter");
        assert!(entered.is_in_place());
        assert!(!remove_unused_directory(export.path()).expect("it stays"));
    }

    #[test]
    fn removal_does_not_follow_links() {
        let export = tempfile::tempdir().expect("directory");
        let elsewhere = tempfile::tempdir().expect("directory");
        fs::write(elsewhere.path().join("kept"), b"mine").expect("write");
        let link = export.path().join(OWN_DIRECTORY);
        std::os::unix::fs::symlink(elsewhere.path(), link).expect("link");
        assert!(remove_unused_directory(export.path()).is_err());
        assert!(elsewhere.path().join("kept").exists());
    }
}
