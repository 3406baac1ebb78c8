//! The control group in which an agent starts its job: the node made it, with the limit of the
//! job's memory. The agent stays outside. Sets no limit.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};

/// The kernel keeps a group for a moment after the end of its last process.
const REMOVE_PAUSE: Duration = Duration::from_millis(5);
const REMOVE_ATTEMPTS: u32 = 200;

/// The group of this agent's job.
static JOB_GROUP: OnceLock<PathBuf> = OnceLock::new();

/// Says in which group the job of this process starts. Only the first call counts.
pub fn set_job_group(directory: PathBuf) {
    let _ = JOB_GROUP.set(directory);
}

/// Moves a process into the group of the job, with all that it starts from now on.
///
/// # Errors
/// The kernel's.
pub(crate) fn enter_job_group(process: u32) -> io::Result<()> {
    let Some(group) = JOB_GROUP.get() else {
        return Ok(());
    };
    fs::write(group.join("cgroup.procs"), process.to_string()).map_err(|error| {
        let text = format!("control group {}: {error}", group.display());
        io::Error::new(error.kind(), text)
    })
}

/// Removes the group of a job that has ended, if the node is dead: else the node does, which has
/// its directory locked.
pub(crate) fn remove_orphaned_group() {
    let Some(group) = JOB_GROUP.get() else {
        return;
    };
    let Ok(lock) = File::open(group) else {
        return;
    };
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        return;
    }
    for _ in 0..REMOVE_ATTEMPTS {
        match fs::remove_dir(group) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => thread::sleep(REMOVE_PAUSE),
            _ => return,
        }
    }
}
