//! A directory that its owner, who runs this, may not read or enter: it has other bits for as long
//! as it is used. Finds no path by itself that is not beneath its root.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use rustix::fs::{Mode, OFlags, chmod, fstat, openat};
use rustix::io::Errno;

/// Bits that the owner needs.
const OWNER_ACCESS: Mode = Mode::RUSR.union(Mode::XUSR);

/// Held while directories have other bits: who came between would take those for their own.
static MODE_LOCK: Mutex<()> = Mutex::new(());

/// Looks at [`MODE_LOCK`], and the pause between them: it is held for a few calls of the system.
const TRIES_MAX: u32 = 5_000;
const PAUSE: Duration = Duration::from_millis(1);

/// An open directory.
#[derive(Debug)]
pub(super) struct UnlockedDirectory {
    directory: OwnedFd,
    /// Directories on the way, this one perhaps included, with the bits that they get back.
    saved_modes: Vec<(OwnedFd, Mode)>,
    /// Ends after the bits are as they were.
    _mode_lock: Option<MutexGuard<'static, ()>>,
}

impl From<OwnedFd> for UnlockedDirectory {
    fn from(directory: OwnedFd) -> Self {
        Self {
            directory,
            saved_modes: Vec::new(),
            _mode_lock: None,
        }
    }
}

impl AsFd for UnlockedDirectory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

impl Drop for UnlockedDirectory {
    fn drop(&mut self) {
        // From the innermost out, as the outer ones lead to it.
        for (directory, mode) in self.saved_modes.drain(..).rev() {
            if let Err(error) = chmod(descriptor_path(&directory), mode) {
                tracing::warn!(%error, "a directory of a volume keeps bits that it had not");
            }
        }
    }
}

impl UnlockedDirectory {
    /// Opens the directory at `path` below `root`, through directories that nobody may enter, and
    /// no symbolic link.
    ///
    /// # Errors
    /// Permission denied where it is not of whoever runs this; what the system says otherwise.
    pub(super) fn open_unlocked(root: &OwnedFd, path: &[u8]) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut inside = Self {
            directory: root.try_clone()?,
            saved_modes: Vec::new(),
            _mode_lock: Some(lock_modes()?),
        };
        inside.grant_access()?;
        let names = path.split(|byte| *byte == b'/');
        for name in names.filter(|name| !name.is_empty()) {
            inside.directory = openat(&inside.directory, name, flags, Mode::empty())?;
            inside.grant_access()?;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        inside.directory = openat(&inside.directory, c".", flags, Mode::empty())?;
        Ok(inside)
    }

    /// Gives the directory the bits that its owner needs.
    fn grant_access(&mut self) -> io::Result<()> {
        let bits = Mode::from_raw_mode(fstat(&self.directory)?.st_mode & 0o7777);
        if bits.contains(OWNER_ACCESS) {
            return Ok(());
        }
        // Whose it is not, may not.
        let refused = |_| io::Error::from(Errno::ACCESS);
        let changed = self.directory.try_clone()?;
        chmod(descriptor_path(&changed), bits | OWNER_ACCESS).map_err(refused)?;
        self.saved_modes.push((changed, bits));
        Ok(())
    }
}

/// A path that leads to what is held, and nowhere else.
fn descriptor_path(held: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", held.as_raw_fd())
}

fn lock_modes() -> io::Result<MutexGuard<'static, ()>> {
    for _ in 0..TRIES_MAX {
        match MODE_LOCK.try_lock() {
            Ok(alone) => return Ok(alone),
            Err(TryLockError::Poisoned(alone)) => return Ok(alone.into_inner()),
            Err(TryLockError::WouldBlock) => std::thread::sleep(PAUSE),
        }
    }
    let text = "other directories of volumes are being opened all the time";
    Err(io::Error::new(io::ErrorKind::WouldBlock, text))
}
