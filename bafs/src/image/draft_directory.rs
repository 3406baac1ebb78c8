//! The directory in which an image is unpacked before it gets its name. It goes with the import,
//! also when a signal ends that; what a killed one left goes with the next.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use anyhow::Result;
use bafs_client::signals::wait_for_stop_signal;
use nix::fcntl::OFlag;
use nix::unistd::geteuid;
use tempfile::TempDir;

/// What is being written may keep a directory from being removed for a moment.
const REMOVALS_MAX: u32 = 1_000;

/// A directory that its owner holds locked; the kernel unlocks it when the owner dies in any way.
pub(super) struct DraftDirectory {
    // Dropped first: who finds the lock free must find nothing to remove.
    directory: TempDir,
    _lock: File,
}

impl DraftDirectory {
    /// Makes one whose name begins with a prefix, and removes those that dead owners left.
    ///
    /// # Errors
    /// An I/O error.
    pub(super) fn create(parent: &Path, prefix: &str) -> io::Result<Self> {
        remove_stale(parent, prefix);
        let directory = tempfile::Builder::new().prefix(prefix).tempdir_in(parent)?;
        let lock = File::open(directory.path())?;
        lock.lock()?;
        Ok(Self {
            directory,
            _lock: lock,
        })
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// Works until it is done. A signal that asks this process to end removes the draft first.
///
/// # Errors
/// There can be no thread.
pub(super) fn run_until_stopped<T: Send + 'static>(
    draft: &DraftDirectory,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let asked = wait_for_stop_signal();
        tokio::select! {
            done = tokio::task::spawn_blocking(work) => Ok(done?),
            signal = asked => {
                for _ in 0..REMOVALS_MAX {
                    if fs::remove_dir_all(draft.path()).is_ok() || !draft.path().exists() {
                        break;
                    }
                }
                std::process::exit(signal.exit_code())
            }
        }
    })
}

/// Removes drafts of this user that nobody holds. What cannot be removed stays.
fn remove_stale(parent: &Path, prefix: &str) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let is_draft = entry.file_name().to_string_lossy().starts_with(prefix)
            && entry
                .metadata()
                .is_ok_and(|found| found.is_dir() && found.uid() == geteuid().as_raw());
        if !is_draft {
            continue;
        }
        let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW;
        let mut options = File::options();
        let opened = options.read(true).custom_flags(flags.bits());
        let is_free = opened
            .open(entry.path())
            .is_ok_and(|draft| draft.try_lock().is_ok());
        if is_free && let Err(error) = fs::remove_dir_all(entry.path()) {
            tracing::warn!(path = %entry.path().display(), %error, "a former import is left");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_import_removes_drafts_of_dead_ones() {
        let parent = tempfile::tempdir().expect("a directory");
        let at = |name: &str| parent.path().join(name);
        for name in [".i.import-dead", ".j.import-other", "i"] {
            fs::create_dir(at(name)).expect("mkdir");
            fs::write(at(name).join("f"), "x").expect("write");
        }
        let held = DraftDirectory::create(parent.path(), ".i.import-").expect("made");
        let next = DraftDirectory::create(parent.path(), ".i.import-").expect("made");
        assert!(held.path().exists() && next.path().exists());
        assert!(!at(".i.import-dead").exists());
        assert!(at(".j.import-other").exists() && at("i").exists());
        let place = held.path().to_owned();
        drop(held);
        assert!(!place.exists());
    }
}
