//! A scratch volume of this machine whose directory itself is shown to the job: the kernel does the
//! rest, no operation comes here but the question what it holds. The server keeps the lease,
//! watches the space, and may want the volume back. What nobody counts is looked at here: what the
//! disk had free at the least, and whether anything is not as it was when the job began.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bafs_proto::ErrorCode;
use bafs_proto::file_op::{FileOp, FileReply, FileResult, TreeStat};
use bafs_tree::{TreeFingerprint, measure_use, tree_fingerprint};
use rustix::fs::statvfs;
use tokio::task::JoinHandle;

use super::{Completion, RemoteTree};
use crate::errno::errno_of;
use crate::fd_passing::HandoffConnection;
use crate::limits::{COMPARED_FILES_MAX, DISK_POLL_INTERVAL, FILE_TIME_TICK};
use crate::volume_health::VolumeHealth;

/// A directory that is shown to the job.
#[derive(Debug)]
pub struct BindMountTree {
    directory: PathBuf,
    lease: RemoteTree,
    /// Open for as long as something of the job may write.
    lock: Mutex<Option<OwnedFd>>,
    revocation_task: JoinHandle<()>,
    minimum_free: Arc<MinimumFreeSpace>,
    sampling_task: JoinHandle<()>,
    /// How it was before the job; nothing where that takes too long to find out.
    initial_marks: Option<TreeFingerprint>,
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

    fn sample(&self, directory: &Path) {
        let Ok(disk) = statvfs(directory) else {
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

impl BindMountTree {
    /// Watches over a directory that will be bound. Must be called within a tokio runtime.
    pub(super) async fn new(
        directory: PathBuf,
        lease: RemoteTree,
        lock: Option<OwnedFd>,
        connection: HandoffConnection,
        health: VolumeHealth,
    ) -> Self {
        // The loss has the job killed; what was handed over is given back when it is dead.
        let watching = tokio::spawn(async move {
            health.mark_lost(connection.wait_until_revoked().await);
            std::future::pending::<()>().await;
        });
        let before = collect_marks(&directory).await;
        if let Some(wait) = before.and_then(wait_until_distinct) {
            tokio::time::sleep(wait).await;
        }
        let least = Arc::new(MinimumFreeSpace::new());
        let looking = tokio::spawn(sample_forever(Arc::clone(&least), directory.clone()));
        Self {
            directory,
            lease,
            lock: Mutex::new(lock),
            revocation_task: watching,
            minimum_free: least,
            sampling_task: looking,
            initial_marks: before,
        }
    }

    /// Where the directory is.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Whether anything there is not as it was, or nobody knows.
    pub(super) async fn is_changed(&self) -> bool {
        let Some(before) = self.initial_marks else {
            return true;
        };
        collect_marks(&self.directory).await != Some(before)
    }

    /// Answers what the directory holds, which is counted for that; nothing else is asked here.
    pub(super) fn run(&self, op: &FileOp, done: Completion) {
        if !matches!(op, FileOp::StatFs) {
            return done(Err(errno_of(ErrorCode::Unsupported)), &[]);
        }
        let (directory, least) = (self.directory.clone(), Arc::clone(&self.minimum_free));
        // Nobody waits for it but who asked.
        drop(tokio::task::spawn_blocking(move || {
            least.sample(&directory);
            done(count_contents(&directory, &least), &[]);
        }));
    }

    /// Gives the directory back and ends the session, when nobody uses it any more.
    pub(super) async fn close(&self, keep_ms: u64) {
        drop(
            self.lock
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take(),
        );
        self.revocation_task.abort();
        self.sampling_task.abort();
        self.lease.close(keep_ms).await;
    }
}

impl Drop for BindMountTree {
    fn drop(&mut self) {
        self.revocation_task.abort();
        self.sampling_task.abort();
    }
}

/// Looks at the disk for ever: a program that finds it full may remove what it wrote, and end.
async fn sample_forever(least: Arc<MinimumFreeSpace>, directory: PathBuf) {
    loop {
        let (seen, at) = (Arc::clone(&least), directory.clone());
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

async fn collect_marks(directory: &Path) -> Option<TreeFingerprint> {
    let directory = directory.to_owned();
    let marked =
        tokio::task::spawn_blocking(move || tree_fingerprint(&directory, COMPARED_FILES_MAX));
    marked.await.ok()?.ok()?
}

/// How long to wait until a change has another time than the latest one before.
#[expect(
    clippy::disallowed_methods,
    reason = "compared with times that the kernel gives files"
)]
fn wait_until_distinct(before: TreeFingerprint) -> Option<Duration> {
    let now_ns = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    let since_ns = i128::try_from(now_ns.as_nanos()).ok()? - before.latest_change_ns;
    // Times of another clock tell nothing.
    let since = Duration::from_nanos(u64::try_from(since_ns).ok()?);
    FILE_TIME_TICK.checked_sub(since)
}

/// What a directory holds, as a volume that has no room beyond it: nobody knows here how much it
/// may hold.
fn count_contents(directory: &Path, least: &MinimumFreeSpace) -> FileResult {
    let (bytes, files) = measure_use(directory).map_err(|_| errno_of(ErrorCode::ServerFault))?;
    Ok(FileReply::StatFs(TreeStat {
        size_bytes: bytes,
        free_bytes: 0,
        size_files: files,
        free_files: 0,
        disk_free_bytes: MinimumFreeSpace::sampled(&least.bytes),
        disk_free_files: MinimumFreeSpace::sampled(&least.files),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_of_a_bind_mounted_volume_are_counted() {
        let directory = tempfile::tempdir().expect("directory");
        std::fs::write(directory.path().join("a"), [1; 8192]).expect("write");
        std::fs::create_dir(directory.path().join("d")).expect("directory");
        let least = MinimumFreeSpace::new();
        let Ok(FileReply::StatFs(held)) = count_contents(directory.path(), &least) else {
            panic!("it is there");
        };
        assert_eq!((held.size_files, held.free_files), (2, 0));
        assert!((8192..65_536).contains(&held.size_bytes) && held.free_bytes == 0);
        assert!(count_contents(&directory.path().join("absent"), &least).is_err());
    }

    #[test]
    fn the_least_free_space_is_reported() {
        let directory = tempfile::tempdir().expect("directory");
        let least = MinimumFreeSpace::new();
        assert_eq!(MinimumFreeSpace::sampled(&least.bytes), None);
        least.bytes.store(5, Ordering::Relaxed);
        least.sample(directory.path());
        assert_eq!(MinimumFreeSpace::sampled(&least.bytes), Some(5));
    }
}
