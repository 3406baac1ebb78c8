//! What the disks below a job's volumes had free at the least: looked at once for each file system,
//! however many volumes lie on it.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::fs::fstatvfs;
use tokio::task::AbortHandle;

use crate::limits::DISK_POLL_INTERVAL;

/// The disks that are watched, by the number of their file system.
static WATCHES: Mutex<BTreeMap<u64, Weak<DiskWatch>>> = Mutex::new(BTreeMap::new());

/// Looks at a file system until it is dropped.
#[derive(Debug)]
pub(super) struct DiskWatch {
    least: Arc<MinimumFreeSpace>,
    sampling_task: Option<AbortHandle>,
}

impl DiskWatch {
    /// The watch of the disk of a directory, which other volumes may have as well: then it tells
    /// what was free since the first of them was opened. Must be called within a tokio runtime.
    pub(super) fn of_directory(directory: &Path) -> Arc<Self> {
        let opened = File::open(directory).and_then(|disk| Ok((disk.metadata()?.dev(), disk)));
        let Ok((device, disk)) = opened else {
            return Arc::new(Self::of_nothing());
        };
        let mut watches = WATCHES.lock().unwrap_or_else(PoisonError::into_inner);
        watches.retain(|_, watch| watch.strong_count() > 0);
        if let Some(watch) = watches.get(&device).and_then(Weak::upgrade) {
            return watch;
        }
        let least = Arc::new(MinimumFreeSpace::new());
        let sampling = tokio::spawn(sample_forever(Arc::clone(&least), Arc::new(disk)));
        let watch = Arc::new(Self {
            least,
            sampling_task: Some(sampling.abort_handle()),
        });
        watches.insert(device, Arc::downgrade(&watch));
        watch
    }

    /// One that knows only what it is asked.
    pub(super) fn of_nothing() -> Self {
        Self {
            least: Arc::new(MinimumFreeSpace::new()),
            sampling_task: None,
        }
    }

    /// What was free at the least, in bytes and files, this moment included. Blocks.
    pub(super) fn least_now(&self, directory: &Path) -> (Option<u64>, Option<u64>) {
        if let Ok(disk) = File::open(directory) {
            self.least.sample(&disk);
        }
        (
            MinimumFreeSpace::sampled(&self.least.bytes),
            MinimumFreeSpace::sampled(&self.least.files),
        )
    }
}

impl Drop for DiskWatch {
    fn drop(&mut self) {
        if let Some(sampling) = &self.sampling_task {
            sampling.abort();
        }
    }
}

/// What the disk had free at the least.
#[derive(Debug)]
struct MinimumFreeSpace {
    bytes: AtomicU64,
    files: AtomicU64,
}

impl MinimumFreeSpace {
    fn new() -> Self {
        let unknown = || AtomicU64::new(u64::MAX);
        Self {
            bytes: unknown(),
            files: unknown(),
        }
    }

    fn sample(&self, disk: &File) {
        let Ok(disk) = fstatvfs(disk) else {
            return;
        };
        let bytes = disk.f_bavail.saturating_mul(disk.f_frsize);
        self.bytes.fetch_min(bytes, Ordering::Relaxed);
        // Some file systems count no files.
        if disk.f_files > 0 {
            self.files.fetch_min(disk.f_favail, Ordering::Relaxed);
        }
    }

    fn sampled(amount: &AtomicU64) -> Option<u64> {
        Some(amount.load(Ordering::Relaxed)).filter(|amount| *amount < u64::MAX)
    }
}

/// Looks at the disk for ever: a program that finds it full may remove what it wrote, and end.
async fn sample_forever(least: Arc<MinimumFreeSpace>, disk: Arc<File>) {
    loop {
        let (seen, at) = (Arc::clone(&least), Arc::clone(&disk));
        // A disk that hangs holds up no thread of the runtime.
        if tokio::task::spawn_blocking(move || seen.sample(&at))
            .await
            .is_err()
        {
            return;
        }
        tokio::time::sleep(DISK_POLL_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_free_space_is_reported() {
        let directory = tempfile::tempdir().expect("directory");
        let watch = DiskWatch::of_nothing();
        assert_eq!(
            watch.least_now(&directory.path().join("absent")),
            (None, None)
        );
        watch.least.bytes.store(5, Ordering::Relaxed);
        assert_eq!(watch.least_now(directory.path()).0, Some(5));
    }

    #[tokio::test]
    async fn volumes_of_one_disk_share_its_watch() {
        let (one, two) = (tempfile::tempdir(), tempfile::tempdir());
        let (one, two) = (one.expect("directory"), two.expect("directory"));
        let first = DiskWatch::of_directory(one.path());
        let second = DiskWatch::of_directory(two.path());
        assert!(Arc::ptr_eq(&first, &second));
        let shared_memory = Path::new("/dev/shm");
        if shared_memory.is_dir() {
            assert!(!Arc::ptr_eq(
                &first,
                &DiskWatch::of_directory(shared_memory)
            ));
        }
        let sampling = first.sampling_task.clone().expect("it looks");
        drop((first, second));
        while !sampling.is_finished() {
            tokio::task::yield_now().await;
        }
    }
}
