//! Tells whether a job read files of a directory that it works on itself, where no operation comes
//! to the agent: each directory has an inotify watch until the first file is read. Ordinary users
//! may use it, unlike a fanotify mark on a mount. Counts nothing.
//!
//! The kernel closes an inotify descriptor only after a grace period: 8 to 16 ms on a machine with
//! work to do (Linux 6.18). So a directory without files has no watch, and nobody waits for a close
//! but the end of the process.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::limits::WATCHED_DIRECTORIES_MAX;

/// Room for the events of one read, in bytes: several of the longest names.
const EVENT_BYTES: usize = 4096;

/// Watches the files of a directory until one is read.
#[derive(Debug)]
pub(super) struct ReadWatch {
    watched: Arc<WatchedTree>,
    task: JoinHandle<()>,
}

/// Directories with a watch each.
#[derive(Debug)]
struct WatchedTree {
    /// Taken out when it is closed.
    events: Option<AsyncFd<OwnedFd>>,
    /// By the number of the watch.
    directories: BTreeMap<i32, PathBuf>,
    first_read: OnceLock<String>,
}

impl ReadWatch {
    /// Waits for the first read. Must be called within a tokio runtime.
    pub(super) fn begin((events, directories): ArmedWatches) -> Option<Self> {
        #[expect(deprecated, reason = "sound for a descriptor that it owns")]
        let events = AsyncFd::new(events).ok()?;
        let watched = Arc::new(WatchedTree {
            events: Some(events),
            directories,
            first_read: OnceLock::new(),
        });
        let task = tokio::spawn(Arc::clone(&watched).wait_for_read());
        Some(Self { watched, task })
    }

    /// Path of the first file that was read so far; nothing if none was.
    pub(super) fn first_read(&self) -> Option<String> {
        // What the task did not look at yet.
        let _ = self.watched.find_read();
        self.watched.first_read.get().cloned()
    }

    /// The job is over: later reads are others'.
    pub(super) fn stop(&self) {
        let _ = self.watched.find_read();
        self.watched.remove_watches();
    }
}

impl Drop for ReadWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Drop for WatchedTree {
    fn drop(&mut self) {
        let Some(events) = self.events.take() else {
            return;
        };
        // Calls of servers must not wait in this thread meanwhile.
        let events = events.into_inner();
        if let Ok(runtime) = Handle::try_current() {
            drop(runtime.spawn_blocking(move || drop(events)));
        }
    }
}

impl WatchedTree {
    async fn wait_for_read(self: Arc<Self>) {
        let Some(events) = &self.events else { return };
        while let Ok(mut ready) = events.readable().await {
            match self.find_read() {
                Err(rustix::io::Errno::AGAIN) => ready.clear_ready(),
                // One is enough, and each event costs the job time.
                Ok(()) | Err(_) => {
                    self.remove_watches();
                    break;
                }
            }
        }
    }

    fn remove_watches(&self) {
        let Some(events) = &self.events else { return };
        for watch in self.directories.keys() {
            // That of a removed directory is gone.
            let _ = inotify::remove_watch(events.get_ref(), *watch);
        }
    }

    /// Takes note of the first read among the events that are there.
    fn find_read(&self) -> rustix::io::Result<()> {
        let Some(events) = &self.events else {
            return Ok(());
        };
        let mut room = [MaybeUninit::<u8>::uninit(); EVENT_BYTES];
        let mut reader = inotify::Reader::new(events.get_ref(), &mut room);
        while self.first_read.get().is_none() {
            let event = reader.next()?;
            let flags = event.events();
            let is_read = flags.intersects(ReadFlags::ACCESS | ReadFlags::CLOSE_NOWRITE);
            if let (true, Some(name)) = (
                is_read && !flags.contains(ReadFlags::ISDIR),
                event.file_name(),
            ) {
                let directory = self.directories.get(&event.wd()).cloned();
                let path = directory.unwrap_or_default();
                let path = path.join(OsStr::from_bytes(name.to_bytes()));
                let _ = self.first_read.set(path.to_string_lossy().into_owned());
            }
        }
        Ok(())
    }
}

/// Watches, and the directory of each by its number.
pub(super) type ArmedWatches = (OwnedFd, BTreeMap<i32, PathBuf>);

/// Watches all directories; nothing where there are too many, or the kernel has no watch left for
/// this user. A sole writer's tree without files has no watches: the job changes it before it can
/// read anything.
pub(super) fn watch_directories(root: &Path, is_sole_writer: bool) -> Option<ArmedWatches> {
    // The names are found before anything is watched, as these listings are no use of the job.
    let (directories, has_files) = list_directories(root)?;
    if is_sole_writer && !has_files {
        return None;
    }
    let events = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).ok()?;
    // The close of a file that was only read tells of one that was read by mapped memory.
    let flags = WatchFlags::ACCESS
        | WatchFlags::CLOSE_NOWRITE
        | WatchFlags::ONLYDIR
        | WatchFlags::DONT_FOLLOW
        | WatchFlags::EXCL_UNLINK;
    let mut watched = BTreeMap::new();
    for relative in directories {
        let watch = inotify::add_watch(&events, root.join(&relative), flags).ok()?;
        watched.insert(watch, relative);
    }
    Some((events, watched))
}

/// The directories of a tree, relative to its root, and whether there is anything else in it;
/// nothing where there are too many.
fn list_directories(root: &Path) -> Option<(Vec<PathBuf>, bool)> {
    let (mut directories, mut pending) = (Vec::new(), vec![PathBuf::new()]);
    let mut has_files = false;
    while let Some(relative) = pending.pop() {
        if directories.len() >= WATCHED_DIRECTORIES_MAX {
            return None;
        }
        for entry in std::fs::read_dir(root.join(&relative)).ok()? {
            let entry = entry.ok()?;
            match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                true => pending.push(relative.join(entry.file_name())),
                false => has_files = true,
            }
        }
        directories.push(relative);
    }
    Some((directories, has_files))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;

    async fn first_read_after(directory: &Path, act: impl FnOnce()) -> Option<String> {
        let armed = watch_directories(directory, true).expect("it is there");
        let watch = ReadWatch::begin(armed).expect("it watches");
        act();
        for _ in 0..50 {
            if watch.first_read().is_some() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        watch.first_read()
    }

    #[tokio::test]
    async fn reads_of_a_shown_directory_are_noticed() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path();
        fs::create_dir_all(path.join("d/e")).expect("directories");
        fs::write(path.join("d/e/f"), "x").expect("write");
        let read = first_read_after(path, || drop(fs::read(path.join("d/e/f"))));
        assert_eq!(read.await.as_deref(), Some("d/e/f"));
        // Neither a listing nor a write is a read.
        let other = first_read_after(path, || {
            fs::write(path.join("g"), "y").expect("write");
            fs::read_dir(path).expect("listing").for_each(drop);
        });
        assert_eq!(other.await, None);
    }

    #[test]
    fn trees_without_files_have_no_watches() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path();
        fs::create_dir_all(path.join("d/e")).expect("directories");
        assert!(watch_directories(path, true).is_none());
        // Another job may write what this one reads.
        assert_eq!(watch_directories(path, false).expect("watches").1.len(), 3);
        fs::write(path.join("d/e/f"), "x").expect("write");
        assert_eq!(watch_directories(path, true).expect("watches").1.len(), 3);
    }
}
