//! The control groups of a node's jobs, by which the kernel holds each job to its memory. Makes and
//! removes them; starts no process in them, which is for the agents.
//!
//! Each job with a limit has a group below the node's own, and all processes of the job are in it.
//! Its agent is not: what it has in memory is not the job's. Pages of files are charged to the
//! group, too, but the kernel drops them before it ends a process.
//!
//! The node holds a lock (flock(2)) on the directory of a group while it lives. So whoever can lock
//! one knows that its node is dead, and may remove it: the agent of the job, and the next node.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bafs_proto::ids::ExecutionId;
use rustix::fs::{FlockOperation, flock};

use super::group_location::{GroupLocation, GroupObstacle, GroupVersion};

/// How the name of a job's group begins.
const GROUP_PREFIX: &str = "bafs-job-";

/// Limit of a group without processes, which shows whether groups can be made.
const PROBE_BYTES: u64 = 1 << 30;

/// Another node that starts may remove a group before its lock is held.
const CREATE_ATTEMPTS: u32 = 3;

/// The kernel keeps a group for a moment after the end of its last process.
const REMOVE_PAUSE: Duration = Duration::from_millis(5);
const REMOVE_ATTEMPTS: u32 = 400;

/// Makes the groups of the jobs of one node.
#[derive(Debug)]
pub(super) struct ControlGroups {
    location: GroupLocation,
    /// The groups that exist.
    existing: Mutex<BTreeSet<PathBuf>>,
}

/// What a group used up to now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct GroupUsage {
    /// Memory that the kernel cannot drop, in bytes.
    pub(super) bytes: u64,
    /// The most memory at once, with pages of files, in bytes; `u64::MAX` if the kernel does not
    /// say it.
    pub(super) bytes_max: u64,
    /// Whether the kernel ended a process because the group was full.
    pub(super) is_exceeded: bool,
}

impl ControlGroups {
    /// Finds out whether this node can make groups, and removes those of dead nodes. Blocks.
    ///
    /// # Errors
    /// What is in the way.
    pub(super) fn open() -> Result<Arc<Self>, GroupObstacle> {
        let location = GroupLocation::find()?;
        location.prepare()?;
        remove_abandoned_groups(&location.directory);
        let groups = Arc::new(Self {
            location,
            existing: Mutex::default(),
        });
        // Dropping it removes it.
        let tried = groups.create(ExecutionId(rand::random()), PROBE_BYTES);
        let probed = tried.and_then(|group| group.read_usage());
        probed.map_err(|error| groups.location.refusal(error))?;
        Ok(groups)
    }

    /// Where the groups are, for people.
    pub(super) fn describe(&self) -> String {
        self.location.describe()
    }

    /// The group of one execution, which may have so many bytes of memory. Blocks.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn create(
        self: &Arc<Self>,
        execution: ExecutionId,
        memory_bytes: u64,
    ) -> io::Result<JobGroup> {
        let name = format!("{GROUP_PREFIX}{execution}");
        let path = self.location.directory.join(name);
        let mut attempts_left = CREATE_ATTEMPTS;
        let lock = loop {
            attempts_left -= 1;
            match create_locked(&path) {
                Err(_) if attempts_left > 0 => {}
                made => break made?,
            }
        };
        self.existing().insert(path.clone());
        let group = JobGroup {
            path,
            groups: self.clone(),
            _lock: lock,
        };
        // Dropping it removes it.
        set_limit(group.path(), self.location.version, memory_bytes)?;
        Ok(group)
    }

    /// Removes the groups that are left, as soon as their jobs have ended: two seconds at most.
    pub(super) async fn remove_all(&self) {
        for _ in 0..REMOVE_ATTEMPTS {
            let left: Vec<_> = self.existing().iter().cloned().collect();
            if left.is_empty() {
                return;
            }
            for path in left {
                self.try_remove(&path);
            }
            tokio::time::sleep(REMOVE_PAUSE).await;
        }
        tracing::warn!("control groups of jobs are left; the next node removes them");
    }

    /// Removes an empty group; answers whether it is gone.
    fn try_remove(&self, path: &Path) -> bool {
        let is_gone = match remove_empty_group(path) {
            Ok(()) => true,
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        };
        if is_gone {
            self.existing().remove(path);
        }
        is_gone
    }

    fn existing(&self) -> MutexGuard<'_, BTreeSet<PathBuf>> {
        self.existing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The group of one job. Dropping it removes it if the job has no process any more.
#[derive(Debug)]
pub(super) struct JobGroup {
    path: PathBuf,
    groups: Arc<ControlGroups>,
    /// Says that the node lives.
    _lock: File,
}

impl JobGroup {
    /// Its directory.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What its processes used up to now. Blocks for a moment.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn read_usage(&self) -> io::Result<GroupUsage> {
        let read = |name: &str| fs::read_to_string(self.path.join(name));
        let number = |name: &str| {
            let text = read(name)?;
            text.trim().parse::<u64>().map_err(io::Error::other)
        };
        let statistics = read("memory.stat")?;
        match self.groups.location.version {
            GroupVersion::Unified => {
                let events = read("memory.events")?;
                let happened = |key| find_value(&events, key).unwrap_or(0) > 0;
                let bytes = ["anon", "shmem"].map(|key| find_value(&statistics, key));
                Ok(GroupUsage {
                    bytes: bytes.iter().flatten().sum(),
                    // Kernels before 5.19 do not count it.
                    bytes_max: number("memory.peak").unwrap_or(u64::MAX),
                    // A process of a group is also ended where the whole machine is full.
                    is_exceeded: happened("oom") && happened("oom_kill"),
                })
            }
            GroupVersion::Memory => {
                let control = read("memory.oom_control")?;
                let ended = find_value(&control, "oom_kill");
                let ended = ended.ok_or(io::ErrorKind::Unsupported)?;
                let bytes_max = number("memory.max_usage_in_bytes")?;
                let room = number("memory.limit_in_bytes")?.saturating_sub(bytes_max);
                let bytes = ["total_rss", "total_shmem"].map(|key| find_value(&statistics, key));
                Ok(GroupUsage {
                    bytes: bytes.iter().flatten().sum(),
                    bytes_max,
                    // Linux 6.18 does not count refusals (`memory.failcnt`).
                    is_exceeded: ended > 0 && room < room_of_full_group(),
                })
            }
        }
    }

    /// Removes it as soon as its last process is gone: two seconds later at most.
    pub(super) async fn remove(&self) {
        for _ in 0..REMOVE_ATTEMPTS {
            if self.groups.try_remove(&self.path) {
                return;
            }
            tokio::time::sleep(REMOVE_PAUSE).await;
        }
        let path = self.path.display();
        tracing::warn!(%path, "the control group of a job still has processes");
    }
}

impl Drop for JobGroup {
    fn drop(&mut self) {
        // Where it has processes yet, the end of the node removes it, or the next node.
        self.groups.try_remove(&self.path);
    }
}

/// A full group had less room than this once, in bytes: the kernel ends processes only for requests
/// of up to eight pages (`PAGE_ALLOC_COSTLY_ORDER`).
fn room_of_full_group() -> u64 {
    8 * rustix::param::page_size() as u64
}

/// Makes a group, and locks it.
fn create_locked(path: &Path) -> io::Result<File> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let lock = File::open(path)?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
    // Somebody may have removed it before it was locked.
    fs::metadata(path)?;
    Ok(lock)
}

/// Bounds the memory of a group, so that swap space adds nothing.
fn set_limit(group: &Path, version: GroupVersion, bytes: u64) -> io::Result<()> {
    let write = |name: &str, value: u64| fs::write(group.join(name), value.to_string());
    let optional = |name: &str, value| match write(name, value) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        written => written.map(|()| true),
    };
    match version {
        GroupVersion::Unified => {
            write("memory.max", bytes)?;
            optional("memory.swap.max", 0)?;
        }
        GroupVersion::Memory => {
            write("memory.limit_in_bytes", bytes)?;
            // Without it the kernel does not count swap space, but can do without.
            if !optional("memory.memsw.limit_in_bytes", bytes)? {
                optional("memory.swappiness", 0)?;
            }
        }
    }
    Ok(())
}

/// Removes groups whose nodes are dead, and that have no process.
fn remove_abandoned_groups(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if !name.to_string_lossy().starts_with(GROUP_PREFIX) {
            continue;
        }
        let Ok(lock) = File::open(entry.path()) else {
            continue;
        };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok()
            && let Err(error) = remove_empty_group(&entry.path())
        {
            tracing::debug!(%error, path = %entry.path().display(), "a control group stays");
        }
    }
}

/// Removes a group without processes, and those that a job made in it: its files are the kernel's.
fn remove_empty_group(path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_empty_group(&entry.path())?;
        }
    }
    fs::remove_dir(path)
}

/// The number after a key, where each line has both.
fn find_value(text: &str, key: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.split_once(' '));
    let (_, value) = lines.find(|(name, _)| *name == key)?;
    value.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    fn groups() -> Option<Arc<ControlGroups>> {
        ControlGroups::open()
            .inspect_err(|obstacle| println!("skipped: {obstacle}"))
            .ok()
    }

    /// Runs a Python program in a group, from its start.
    fn run_inside(group: &JobGroup, program: &str) -> Child {
        Command::new("sh")
            .args([
                "-c",
                "echo $$ > \"$0/cgroup.procs\" && exec python3 -c \"$1\"",
            ])
            .arg(group.path())
            .arg(program)
            .stdout(Stdio::null())
            .spawn()
            .expect("it starts")
    }

    #[tokio::test]
    async fn kernel_ends_processes_at_their_limit() {
        const LIMIT: u64 = 100_000_000;
        let Some(groups) = groups() else { return };
        let group = groups.create(ExecutionId(u128::MAX - 1), LIMIT);
        let group = group.expect("a group");
        let ended = run_inside(&group, "x = b'x' * 500_000_000").wait();
        assert!(!ended.expect("it ends").success());
        let used = group.read_usage().expect("usage");
        assert!(used.is_exceeded, "{used:?}");
        assert!((90_000_000..=LIMIT).contains(&used.bytes_max), "{used:?}");
        let path = group.path().to_owned();
        group.remove().await;
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn files_do_not_exceed_a_limit() {
        let Some(groups) = groups() else { return };
        let group = groups.create(ExecutionId(u128::MAX - 2), 50_000_000);
        let group = group.expect("a group");
        let directory = tempfile::tempdir().expect("directory");
        let file = directory.path().join("large");
        let program = format!(
            "block = b'x' * 1_000_000\nwith open('{0}', 'wb') as file:\n    for k in range(300): \
             file.write(block)\nwith open('{0}', 'rb') as file:\n    while file.read(1_000_000): \
             pass",
            file.display()
        );
        let ended = run_inside(&group, &program).wait();
        assert!(ended.expect("it ends").success());
        let used = group.read_usage().expect("usage");
        assert!(!used.is_exceeded, "{used:?}");
        assert!(
            used.bytes_max > 40_000_000,
            "pages of files count: {used:?}"
        );
        group.remove().await;
    }

    #[test]
    fn groups_of_dead_nodes_are_removed() {
        let Some(groups) = groups() else { return };
        let alive = groups.create(ExecutionId(u128::MAX - 3), 50_000_000);
        let alive = alive.expect("a group");
        let name = format!("{GROUP_PREFIX}{}", ExecutionId(u128::MAX - 4));
        let dead = groups.location.directory.join(name);
        // A job may have made groups of its own.
        fs::create_dir_all(dead.join("of-the-job")).expect("groups");
        remove_abandoned_groups(&groups.location.directory);
        assert!(alive.path().exists() && !dead.exists());
    }

    #[test]
    fn values_are_found_by_whole_keys() {
        let text = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n";
        assert_eq!(find_value(text, "oom_kill"), Some(3));
        assert_eq!(find_value(text, "oom"), None);
    }
}
