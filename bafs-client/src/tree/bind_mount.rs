//! A scratch volume of this machine whose directory itself is shown to the job: the kernel does the
//! rest, no operation comes here but the question what it holds. The server keeps the lease,
//! watches the space, and may want the volume back. What nobody counts is looked at here: whether
//! anything is not as it was when the job began.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bafs_proto::ErrorCode;
use bafs_proto::file_op::{FileOp, FileReply, FileResult, TreeStat};
use bafs_tree::{TreeFingerprint, measure_use, tree_fingerprint};
use rustix::fs::statfs;
use rustix::system::uname;
use tokio::task::JoinHandle;

use super::completion::Completion;
use super::disk_watch::DiskWatch;
use super::read_watch::{ArmedWatches, ReadWatch, watch_directories};
use super::remote::RemoteTree;
use crate::errno::errno_of;
use crate::fd_passing::HandoffConnection;
use crate::limits::{COMPARED_FILES_MAX, FILE_TIME_TICK};
use crate::volume_health::VolumeHealth;

/// A directory that is shown to the job.
#[derive(Debug)]
pub struct BindMountTree {
    directory: PathBuf,
    lease: RemoteTree,
    /// Open for as long as something of the job may write.
    lock: Mutex<Option<OwnedFd>>,
    revocation_task: JoinHandle<()>,
    disk_watch: Arc<DiskWatch>,
    /// How it was before the job; nothing where that takes too long to find out, or nobody can know
    /// it at all.
    initial_marks: Option<TreeFingerprint>,
    /// Nothing where nobody can know what is read.
    read_watch: Option<ReadWatch>,
}

/// File systems that give a file another time whenever a program writes to it by mapped memory,
/// by the numbers of `statfs(2)`: ext2 to ext4, XFS, Btrfs. A tree in memory does not.
const TIMED_FILE_SYSTEMS: [u32; 3] = [0xef53, 0x5846_5342, 0x9123_683e];

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
        let Prepared {
            marks,
            disk_watch,
            armed,
        } = prepare(&directory, lock.is_some()).await;
        if let Some(wait) = marks.and_then(wait_until_distinct) {
            tokio::time::sleep(wait).await;
        }
        Self {
            directory,
            lease,
            lock: Mutex::new(lock),
            revocation_task: watching,
            disk_watch,
            initial_marks: marks,
            read_watch: armed.and_then(ReadWatch::begin),
        }
    }

    /// Path of the first file that the job read, if it read one and that could be watched.
    pub(super) fn first_read(&self) -> Option<String> {
        self.read_watch.as_ref().and_then(ReadWatch::first_read)
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

    /// The job is over: who reads from here on does so for us.
    pub(super) fn stop_watching_reads(&self) {
        if let Some(watch) = &self.read_watch {
            watch.stop();
        }
    }

    /// Answers what the directory holds, which is counted for that; nothing else is asked here.
    pub(super) fn run(&self, op: &FileOp, done: Completion) {
        if !matches!(op, FileOp::StatFs) {
            return done(Err(errno_of(ErrorCode::Unsupported)), &[]);
        }
        let (directory, watch) = (self.directory.clone(), Arc::clone(&self.disk_watch));
        // Nobody waits for it but who asked.
        drop(tokio::task::spawn_blocking(move || {
            done(count_contents(&directory, &watch), &[]);
        }));
    }

    /// Gives the directory back and ends the session, when nobody uses it any more.
    pub(super) async fn close(&self, keep_ms: u64) {
        // The kernel ends the watches meanwhile.
        self.stop_watching_reads();
        drop(
            self.lock
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take(),
        );
        self.revocation_task.abort();
        self.lease.close(keep_ms).await;
    }
}

impl Drop for BindMountTree {
    fn drop(&mut self) {
        self.revocation_task.abort();
    }
}

/// What is known of a directory before a job works on it.
struct Prepared {
    marks: Option<TreeFingerprint>,
    disk_watch: Arc<DiskWatch>,
    armed: Option<ArmedWatches>,
}

/// Opening the directory may wait for its disk: one thread does it all.
async fn prepare(directory: &Path, is_sole_writer: bool) -> Prepared {
    let at = directory.to_owned();
    let preparing = tokio::task::spawn_blocking(move || Prepared {
        marks: read_marks(&at),
        disk_watch: DiskWatch::of_directory(&at),
        armed: watch_directories(&at, is_sole_writer),
    });
    preparing.await.unwrap_or_else(|_| Prepared {
        marks: None,
        disk_watch: Arc::new(DiskWatch::of_nothing()),
        armed: None,
    })
}

async fn collect_marks(directory: &Path) -> Option<TreeFingerprint> {
    let directory = directory.to_owned();
    let marked = tokio::task::spawn_blocking(move || read_marks(&directory));
    marked.await.ok()?
}

fn read_marks(directory: &Path) -> Option<TreeFingerprint> {
    // The numbers have 32 bits, whatever the type is on this machine.
    let kind = statfs(directory).ok()?.f_type as u32;
    let is_timed = TIMED_FILE_SYSTEMS.contains(&kind);
    let marks = is_timed.then(|| tree_fingerprint(directory, COMPARED_FILES_MAX));
    marks?.ok()?
}

/// How long to wait until a change has another time than the latest one before.
#[expect(
    clippy::disallowed_methods,
    reason = "compared with times that the kernel gives files"
)]
fn wait_until_distinct(before: TreeFingerprint) -> Option<Duration> {
    if has_distinct_times() {
        return None;
    }
    let now_ns = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    let since_ns = i128::try_from(now_ns.as_nanos()).ok()? - before.latest_change_ns;
    // Times of another clock tell nothing.
    let since = Duration::from_nanos(u64::try_from(since_ns).ok()?);
    FILE_TIME_TICK.checked_sub(since)
}

/// Whether the kernel gives a change another time than any that somebody looked at before: ext4,
/// XFS and Btrfs do so since Linux 6.13 (`FS_MGTIME`).
fn has_distinct_times() -> bool {
    let told = uname();
    let release = told.release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map(|part| part.parse::<u32>());
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= (6, 13),
        _ => false,
    }
}

/// What a directory holds, as a volume that has no room beyond it: nobody knows here how much it
/// may hold.
fn count_contents(directory: &Path, watch: &DiskWatch) -> FileResult {
    let (bytes, files) = measure_use(directory).map_err(|_| errno_of(ErrorCode::ServerFault))?;
    let (disk_free_bytes, disk_free_files) = watch.least_now(directory);
    Ok(FileReply::StatFs(TreeStat {
        size_bytes: bytes,
        free_bytes: 0,
        size_files: files,
        free_files: 0,
        disk_free_bytes,
        disk_free_files,
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
        let least = DiskWatch::of_nothing();
        let Ok(FileReply::StatFs(held)) = count_contents(directory.path(), &least) else {
            panic!("it is there");
        };
        assert_eq!((held.size_files, held.free_files), (2, 0));
        assert!((8192..65_536).contains(&held.size_bytes) && held.free_bytes == 0);
        assert!(count_contents(&directory.path().join("absent"), &least).is_err());
    }

    #[tokio::test]
    async fn trees_in_memory_count_as_changed() {
        let disk = tempfile::tempdir().expect("directory");
        let is_timed = statfs(disk.path()).is_ok_and(|it| it.f_type == 0xef53);
        assert_eq!(collect_marks(disk.path()).await.is_some(), is_timed);
        let Ok(memory) = tempfile::tempdir_in("/dev/shm") else {
            return;
        };
        assert_eq!(collect_marks(memory.path()).await, None);
    }
}
