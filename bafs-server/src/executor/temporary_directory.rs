//! Temporary files of jobs: a directory on the node's disk for each execution, which its agent
//! shows to the job as `/tmp` and `/var/tmp`; watched, and removed at the end. Mounts nothing.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bafs_proto::ids::ExecutionId;
use bafs_proto::message::{JobOutcome, JobReport, JobSpec};
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode};
use bafs_tree::measure_use;
use rustix::fs::statvfs;

use super::spare_directories::SpareDirectories;
use super::unlinked_files::UnlinkedFiles;
use crate::clock;
use crate::full_disk::FreeSpace;
use crate::storage::remove_tree;

/// How often the free space of the file system is looked at.
const FREE_SPACE_POLL: Duration = Duration::from_millis(20);

/// Shortest and longest time between two walks where nothing speaks for much growth, in
/// milliseconds.
const WALK_MS_MIN: u64 = 2_000;
const WALK_MS_MAX: u64 = 30_000;

/// A walk is repeated after so many times its duration, whatever the disk's usage.
const WALK_PAUSE_FACTOR: u64 = 20;

/// Directories that an agent makes here for its job, in place of those of the host.
const OWN_DIRECTORIES: u64 = 2;

/// How long the end of a job waits for the removal of its files; the rest is removed in the
/// background.
const REMOVAL_MAX: Duration = Duration::from_secs(2);

/// The least that each slot has, in bytes and files, also where the disk has nothing left beside
/// what volumes may take.
const BYTES_MIN: u64 = 64 << 20;
const FILES_MIN: u64 = 10_000;

/// Jobs get this percentage of the free space of a disk beside volumes: other programs write there,
/// too, and a job's writes between two checks must fit.
const DISK_PERCENT: u64 = 50;

/// Of a machine's memory jobs may share this part by name, in percent, as on the host.
const MEMORY_PERCENT: u64 = 50;

/// Quota of each slot of a node for temporary files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TemporaryQuota {
    /// Bytes on disk.
    pub bytes: u64,
    /// Files on disk.
    pub files: u64,
    /// Bytes of memory below `/dev/shm`.
    pub memory_bytes: u64,
}

/// Space of a disk, in bytes and files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskSpace {
    all_bytes: u64,
    free_bytes: u64,
    /// `None` where the file system counts no files.
    free_files: Option<u64>,
}

impl DiskSpace {
    /// Looks at the disk of a directory. Blocks.
    ///
    /// # Errors
    /// The disk does not say it.
    pub fn measure(directory: &Path) -> io::Result<Self> {
        let disk = statvfs(directory)?;
        Ok(Self {
            all_bytes: disk.f_blocks.saturating_mul(disk.f_frsize),
            free_bytes: disk.f_bavail.saturating_mul(disk.f_frsize),
            free_files: (disk.f_files > 0).then_some(disk.f_favail),
        })
    }
}

impl TemporaryQuota {
    /// The quota of each of so many slots: an equal part of the free space beside volumes, which
    /// may have `offered` bytes in all and reserve `unreserved` of them later.
    #[must_use]
    pub fn beside_volumes_quota(
        disk: DiskSpace,
        offered: u64,
        unreserved: u64,
        slots: u32,
    ) -> Self {
        let now = disk.free_bytes.saturating_sub(unreserved);
        // Volumes may not use all their reserved space yet.
        let later = disk.all_bytes.saturating_sub(offered);
        let slots = u64::from(slots.max(1));
        let share = |whole: u64, percent: u64| whole / 100 * percent / slots;
        Self {
            bytes: share(now.min(later), DISK_PERCENT).max(BYTES_MIN),
            files: share(disk.free_files.unwrap_or(u64::MAX), DISK_PERCENT).max(FILES_MIN),
            memory_bytes: share(machine_memory_bytes(), MEMORY_PERCENT),
        }
    }
}

impl TemporaryQuota {
    /// The quota of a job: what it asks for, if a slot has that.
    ///
    /// # Errors
    /// `TemporaryFull` if it asks for more than a slot has.
    pub(super) fn for_job(self, job: &JobSpec) -> Result<Self, Error> {
        let Some(bytes) = job.limits.temporary_bytes else {
            return Ok(self);
        };
        if bytes <= self.bytes {
            return Ok(Self { bytes, ..self });
        }
        let text = format!(
            "job '{}' asks for {} MB in /tmp (request_disk), and a slot of this node has {} MB; \
             start the node with a larger --tmp, or ask for less",
            job.name,
            bytes.div_ceil(1_000_000),
            self.bytes / 1_000_000
        );
        Err(Error::new(ErrorCode::TemporaryFull, text))
    }
}

/// The memory of this machine, or of its container, in bytes.
#[must_use]
pub fn machine_memory_bytes() -> u64 {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let kib: u64 = line?.trim().trim_end_matches("kB").trim().parse().ok()?;
        Some(kib * 1_024)
    });
    let container = fs::read_to_string("/sys/fs/cgroup/memory.max");
    let container = container.ok().and_then(|text| text.trim().parse().ok());
    // Without a known limit, little space is certain.
    machine
        .unwrap_or(1 << 30)
        .min(container.unwrap_or(u64::MAX))
}

/// The directory of one execution, gone when this is dropped.
#[derive(Debug)]
pub(super) struct TemporaryDirectory {
    path: PathBuf,
    limit: TemporaryQuota,
    job: String,
    /// The result of a check that found the disk full. Others that fail give space back at once,
    /// and this job may fail a moment later.
    full: OnceLock<FreeSpace>,
    spares: Arc<SpareDirectories>,
}

/// How a job ended, for its temporary files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LastUse {
    /// No process of the job is left.
    Over,
    /// Processes of the job may die at this moment.
    Uncertain,
}

/// Usage at the last check.
#[derive(Debug, Clone, Copy)]
struct TemporaryUsage {
    used: Used,
    free: FreeSpace,
    /// No walk before that, and one at once after the other.
    walk_after: Time,
    walk_by: Time,
}

impl TemporaryUsage {
    fn unknown() -> Self {
        Self {
            used: Used::default(),
            free: FreeSpace {
                bytes: 0,
                files: None,
            },
            walk_after: Time::default(),
            walk_by: Time::default(),
        }
    }

    /// Whether other programs and the job have used half of the job's remaining quota.
    fn may_exceed(&self, limit: TemporaryQuota, free: FreeSpace) -> bool {
        let taken = self.free.bytes.saturating_sub(free.bytes);
        let files = self.free.files.zip(free.files);
        let files = files.map_or(0, |(before, now)| before.saturating_sub(now));
        taken > limit.bytes.saturating_sub(self.used.bytes) / 2
            || files > limit.files.saturating_sub(self.used.files) / 2
    }
}

/// The usage of a job's temporary directories.
#[derive(Debug, Clone, Copy, Default)]
struct Used {
    bytes: u64,
    files: u64,
    /// Of these bytes those of open files without a name.
    unlinked_bytes: u64,
}

impl TemporaryDirectory {
    /// Makes the directory of an execution, or takes a spare one, and replaces an older one of that
    /// name.
    pub(super) fn create(
        parent: &Path,
        execution: ExecutionId,
        job: &str,
        limit: TemporaryQuota,
        spares: &Arc<SpareDirectories>,
    ) -> Result<Self, Error> {
        let path = parent.join(execution.to_string());
        let made = remove_tree(&path).and_then(|()| {
            if spares.take(&path) {
                return Ok(());
            }
            fs::create_dir_all(parent)?;
            fs::DirBuilder::new().mode(0o700).create(&path)
        });
        made.map_err(|error| {
            let text = format!(
                "a directory for temporary files, {}: {error}",
                path.display()
            );
            Error::new(ErrorCode::ServerFault, text)
        })?;
        let job = job.to_owned();
        Ok(Self {
            path,
            limit,
            job,
            full: OnceLock::new(),
            spares: Arc::clone(spares),
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        self.limit.memory_bytes
    }

    /// Watches the job's usage until it exceeds the quota. Walks whole directories, so it checks
    /// seldom while the disk has plenty of space.
    pub(super) async fn wait_for_overflow(&self, unlinked: UnlinkedFiles) -> Error {
        let mut look = TemporaryUsage::unknown();
        loop {
            tokio::time::sleep(FREE_SPACE_POLL).await;
            match self.sample_usage(look, &unlinked).await {
                Ok(next) => {
                    look = next;
                    if look.used.bytes > self.limit.bytes || look.used.files > self.limit.files {
                        return self.quota_exceeded_error(look.used);
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, path = %self.path.display(), "not watched");
                    look.walk_after = clock::now().plus_ms(WALK_MS_MIN);
                }
            }
        }
    }

    async fn sample_usage(
        &self,
        last: TemporaryUsage,
        unlinked: &UnlinkedFiles,
    ) -> io::Result<TemporaryUsage> {
        let start = clock::now();
        let free = self.free_space().await?;
        let is_due = start >= last.walk_by || last.may_exceed(self.limit, free);
        if start < last.walk_after || !is_due {
            return Ok(last);
        }
        let (path, unlinked) = (self.path.clone(), unlinked.clone());
        let used = tokio::task::spawn_blocking(move || measure_all(&path, &unlinked));
        let used = used.await.map_err(io::Error::other)??;
        let took = clock::now().ms_since(start);
        let pause = took.saturating_mul(WALK_PAUSE_FACTOR);
        Ok(TemporaryUsage {
            used,
            free,
            walk_after: start.plus_ms(pause),
            walk_by: start.plus_ms(pause.clamp(WALK_MS_MIN, WALK_MS_MAX.max(took))),
        })
    }

    /// A disk that hangs holds up no thread of the runtime.
    async fn free_space(&self) -> io::Result<FreeSpace> {
        let path = self.path.clone();
        let measured = tokio::task::spawn_blocking(move || FreeSpace::measure(&path));
        let free = measured.await.map_err(io::Error::other)??;
        if free.is_full() {
            let _ = self.full.set(free);
        }
        Ok(free)
    }

    fn quota_exceeded_error(&self, used: Used) -> Error {
        let unlinked = match used.unlinked_bytes.div_ceil(1_000_000) {
            0 => String::new(),
            megabytes => format!(" ({megabytes} MB of it removed, but still open)"),
        };
        let text = format!(
            "job '{}' has {} MB in {} files in /tmp and /var/tmp{unlinked}, and may have {} MB in \
             {}; let it remove what it needs no more, put the files into a scratch volume, ask \
             for more with request_disk, or start the node with a larger --tmp",
            self.job,
            used.bytes.div_ceil(1_000_000),
            used.files,
            self.limit.bytes / 1_000_000,
            self.limit.files
        );
        Error::new(ErrorCode::TemporaryFull, text)
    }

    /// A job that failed with files here, on a full disk, did not fail by itself: returns the
    /// disk's free space. Volumes on it report their own failures.
    pub(super) async fn disk_full_error(&self, report: &JobReport) -> Option<Error> {
        let has_failed = match report.outcome {
            JobOutcome::Exited(code) => code != 0,
            JobOutcome::Signaled(_) => true,
            _ => false,
        };
        let is_told = report.volumes.iter().any(|used| used.no_space_errors > 0);
        if !has_failed || is_told {
            return None;
        }
        let _now = self.free_space().await;
        let free = *self.full.get()?;
        // It may hold millions of files.
        let path = self.path.clone();
        let held = tokio::task::spawn_blocking(move || measure_use(&path));
        let (bytes, files) = held.await.ok()?.ok()?;
        let holds = holds_some(bytes, files, free);
        holds.then(|| Error::new(ErrorCode::ServerFault, describe_full_disk(free)))
    }

    /// Removes the directory, or leaves it to the next job. A slow removal continues after the end
    /// of the job.
    pub(super) async fn remove(mut self, last_use: LastUse) {
        let path = std::mem::take(&mut self.path);
        let spares = Arc::clone(&self.spares);
        let removing = tokio::task::spawn_blocking(move || {
            if last_use == LastUse::Uncertain || !spares.keep(&path) {
                remove_by_thread(&path);
            }
        });
        let _ = tokio::time::timeout(REMOVAL_MAX, removing).await;
    }
}

impl Drop for TemporaryDirectory {
    /// The agent was abandoned: a thread, or the next incarnation of the node, removes its job's
    /// files.
    fn drop(&mut self) {
        let path = std::mem::take(&mut self.path);
        if !path.as_os_str().is_empty() {
            std::thread::spawn(move || remove_by_thread(&path));
        }
    }
}

fn remove_by_thread(path: &Path) {
    if let Err(error) = remove_tree(path) {
        tracing::warn!(%error, path = %path.display(), "temporary files of a job stay");
    }
}

/// Usage of files with a name and without. Blocks.
fn measure_all(path: &Path, unlinked: &UnlinkedFiles) -> io::Result<Used> {
    let (bytes, files) = measure_use(path)?;
    let (unlinked_bytes, unlinked_files) = unlinked.measure(fs::metadata(path)?.dev());
    Ok(Used {
        bytes: bytes + unlinked_bytes,
        files: files + unlinked_files,
        unlinked_bytes,
    })
}

/// Whether a job holds some of the space that its disk lacks.
fn holds_some(bytes: u64, files: u64, free: FreeSpace) -> bool {
    match free.lacks_files() {
        true => files > OWN_DIRECTORIES,
        false => bytes > 0,
    }
}

fn describe_full_disk(free: FreeSpace) -> String {
    if let Some(files) = free.files.filter(|_| free.lacks_files()) {
        return format!(
            "the disk of the node has no files (inodes) left, nor has /tmp: {files} were free; \
             remove files from it, or start the node on another disk"
        );
    }
    format!(
        "the disk of the node is full, and with it /tmp: {} bytes were free; free some of it, or \
         start the node with a smaller --size",
        free.bytes
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(all_bytes: u64, free_bytes: u64) -> DiskSpace {
        let free_files = Some(1_000_000);
        DiskSpace {
            all_bytes,
            free_bytes,
            free_files,
        }
    }

    #[test]
    fn slots_share_the_disk_space_beside_volumes() {
        const GB: u64 = 1_000_000_000;
        let share =
            TemporaryQuota::beside_volumes_quota(disk(100 * GB, 80 * GB), 40 * GB, 40 * GB, 4);
        assert_eq!((share.bytes, share.files), (5 * GB, 125_000));
        let reserved = TemporaryQuota::beside_volumes_quota(disk(100 * GB, 80 * GB), 40 * GB, 0, 4);
        assert!(reserved.bytes * 4 <= 60 * GB, "{reserved:?}");
        let none = TemporaryQuota::beside_volumes_quota(disk(GB, GB), 2 * GB, 2 * GB, 4);
        assert_eq!(none.bytes, BYTES_MIN);
    }

    #[test]
    fn slots_share_half_of_the_memory() {
        let one = TemporaryQuota::beside_volumes_quota(disk(1, 1), 0, 0, 1);
        let four = TemporaryQuota::beside_volumes_quota(disk(1, 1), 0, 0, 4);
        assert!(one.memory_bytes > 0 && four.memory_bytes * 4 <= one.memory_bytes);
    }

    #[tokio::test]
    async fn the_overflow_error_names_tmp_and_its_limit() {
        let parent = tempfile::tempdir().unwrap();
        let limit = TemporaryQuota {
            bytes: 1_000_000,
            files: 100,
            memory_bytes: 0,
        };
        let id = ExecutionId(7);
        let directory =
            TemporaryDirectory::create(parent.path(), id, "j", limit, &Arc::default()).unwrap();
        fs::write(directory.path().join("f"), vec![1; 2_000_000]).unwrap();
        let nobody = UnlinkedFiles::of_agent(None, Vec::new());
        let error =
            tokio::time::timeout(Duration::from_secs(20), directory.wait_for_overflow(nobody));
        let error = error.await.expect("it is watched");
        assert_eq!(error.code, ErrorCode::TemporaryFull);
        for word in ["job 'j'", "/tmp", "may have 1 MB", "--tmp"] {
            assert!(error.detail.contains(word), "{error}");
        }
        directory.remove(LastUse::Over).await;
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn a_disk_that_was_full_is_blamed() {
        let parent = tempfile::tempdir().unwrap();
        let limit = TemporaryQuota {
            bytes: 1_000_000,
            files: 100,
            memory_bytes: 0,
        };
        let directory =
            TemporaryDirectory::create(parent.path(), ExecutionId(8), "j", limit, &Arc::default())
                .unwrap();
        fs::write(directory.path().join("f"), "x").unwrap();
        let report = |outcome| JobReport {
            outcome,
            ..super::super::minimal_report(JobOutcome::Killed)
        };
        let failed = report(JobOutcome::Exited(2));
        assert_eq!(directory.disk_full_error(&failed).await, None);
        // Others have given it back since.
        let full = FreeSpace {
            bytes: 5,
            files: None,
        };
        directory.full.set(full).unwrap();
        let error = directory.disk_full_error(&failed).await.expect("blamed");
        assert!(error.detail.contains("5 bytes were free"), "{error}");
        let done = report(JobOutcome::Exited(0));
        assert_eq!(directory.disk_full_error(&done).await, None);
    }

    #[test]
    fn a_full_disk_is_told_by_what_it_lacks() {
        let free = |bytes, files| FreeSpace {
            bytes,
            files: Some(files),
        };
        // A directory takes bytes on many disks; empty files take none.
        assert!(!holds_some(8_192, OWN_DIRECTORIES, free(1 << 40, 0)));
        assert!(holds_some(8_192, 946, free(1 << 40, 0)));
        assert!(holds_some(0, 946, free(1 << 40, 0)));
        assert!(!holds_some(0, 946, free(0, 1_000_000)));
        assert!(describe_full_disk(free(1 << 40, 0)).contains("no files (inodes) left"));
        assert!(describe_full_disk(free(5, 1_000_000)).contains("5 bytes were free"));
    }

    #[test]
    fn walks_are_repeated_as_the_disk_fills() {
        let limit = TemporaryQuota {
            bytes: 1_000,
            files: 1_000,
            memory_bytes: 0,
        };
        let free = |bytes, files| FreeSpace {
            bytes,
            files: Some(files),
        };
        let last = TemporaryUsage {
            used: Used {
                bytes: 200,
                files: 200,
                unlinked_bytes: 0,
            },
            free: free(10_000, 10_000),
            ..TemporaryUsage::unknown()
        };
        assert!(!last.may_exceed(limit, free(9_600, 9_600)));
        assert!(last.may_exceed(limit, free(9_599, 9_600)));
        assert!(last.may_exceed(limit, free(9_600, 9_599)));
    }
}
