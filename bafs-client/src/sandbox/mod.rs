//! Runs a job in a name space of its own where each volume is at the job's path. Knows nothing
//! of volumes beyond a directory each, and serves no file system.
//!
//! ```text
//! bafs exec   enter_private()     own mounts; FUSE sessions go on Sandbox::mount_point()
//!   │ one socket pair: order, requests, reports; its end is the agent's death
//!   └ bafs job-init outer         makes mount, process and IPC name spaces; waits
//!       └ bafs job-init inner     process 1: builds the root, gives up rights, reaps
//!           └ the job
//! ```
//!
//! What holds, however a process ends:
//!
//! * No mount outlives the agent and its jobs, and none is visible on the host.
//! * No process of a job outlives its init, the outer stage, or the agent: the kernel kills
//!   the rest of a process name space together with its process 1.
//! * Nothing stays on the host. A mount point that does not exist there is made for as long as jobs
//!   use it, so that the directory above stays what it is. Where it cannot be made, and in `/`,
//!   a stand-in in memory takes the place of that directory: it has the host's own entries, and
//!   the job can make none in it.
//! * The job's processes have ids that no other job of the machine has, as far as that is possible,
//!   and `/tmp`, `/var/tmp` and `/dev/shm` are its own.
//!
//! The order of calls: [`dispatch_job_init`] first in `main`, then [`enter_private`], both
//! with one thread; [`Sandbox::create_directories`]; mount; [`Sandbox::start_job`].

mod check;
mod control;
mod executable;
mod job_user;
mod limits;
mod mount_layout;
mod mount_point_holder;
mod mount_points;
mod mounts;
mod outcome;
mod plan;
mod privilege;
mod probe;
mod process_ids;
mod root;
mod running;
mod stages;
mod temporary_directories;

pub use check::{Check, CheckStatus, check_host};
pub use limits::{KILL_MAX, SHADOWED_ENTRIES_MAX, VOLUMES_MAX};
pub use mount_point_holder::DirectoryRemover;
pub use outcome::{JobUsage, NotStarted, NotStartedReason, SandboxOutcome, SandboxReport};
pub use plan::{
    Access, InputSource, JobPlan, JobSession, JobStreams, JobUser, OutputTarget, PlanError,
    VolumeBind, job_environment,
};
pub use privilege::{EnterError, Privilege, enter_private, is_root_of_machine};
pub use running::{JobControl, RunningJob, Sandbox, StartError, StillAlive};
pub(crate) use stages::{MOUNT_WATCHDOG, OWN_EXECUTABLE, PROBE_MOUNT, SUBCOMMAND};
pub use stages::{dispatch_job_init, job_init_main};
pub use temporary_directories::{TEMPORARY_VARIABLES, TemporaryDirectories, find_named_paths};
