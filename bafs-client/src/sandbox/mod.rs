//! Runs a job in a name space of its own, where each volume is at the job's path.
//!
//! The sandbox knows a directory for each volume and nothing else of volumes. It serves no file
//! system.
//!
//! ```text
//! bafs exec   enter_private()     own mounts; FUSE sessions go on Sandbox::mount_point()
//!   │ one socket pair: order, requests, reports; its end is the agent's death
//!   └ outer stage                 makes mount, process and IPC name spaces; waits
//!       └ inner stage             process 1: builds the root, gives up rights, reaps
//!           └ the job
//! ```
//!
//! The agent makes a [`JobPlan`]: volumes at paths, program, environment, streams and user. The
//! stages read it from the socket. [`RunningJob`] waits for the end, [`JobControl`] signals and
//! kills, and a [`SandboxReport`] tells how the job ended and what it used.
//!
//! These properties hold, however a process ends:
//!
//! * No mount outlives the agent and its jobs, and none is visible on the host.
//! * No process of a job outlives its init, the outer stage, or the agent. The kernel kills the
//!   rest of a process name space together with its process 1 (pid_namespaces(7)).
//! * Nothing stays on the host. A missing mount point is made while jobs use it. Where it cannot be
//!   made, and in `/`, a copy of the directory in memory takes its place. The copy has the host's
//!   own entries, and the job can make none in it.
//! * The ids of the job's processes differ from those of other jobs on the machine, as far as
//!   possible. `/tmp`, `/var/tmp` and `/dev/shm` are the job's own, unless it shares those of the
//!   host.
//!
//! **Errors.** [`EnterError`] explains why there is no private name space, and what to do.
//! [`PlanError`] is a plan that no machine can run. [`NotStarted`] separates faults of the job (no
//! such program) from faults of the machine (no name space left).
//!
//! **Privilege.** As root the agent mounts directly. An ordinary user gets a user name space
//! (user_namespaces(7)), in which one user exists. No helper with privileges is involved.
//!
//! **Concurrency.** [`dispatch_job_init`] comes first in `main`, then [`enter_private`]. Both need
//! a process with one thread. Afterwards come `Sandbox::create_directories`, the mounts, and
//! `Sandbox::start_job`.
//!
//! **Limits.** `limits.rs` has them: 1,024 volumes ([`VOLUMES_MAX`]), and two seconds until a kill
//! is complete ([`KILL_MAX`]). See `docs/decisions/0008-one-name-space-per-job.md`.

mod agent_watch;
mod check;
mod completed_environment;
mod control;
mod executable;
mod forked_process;
mod image_root;
mod job_init;
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
mod user_names;

pub use check::{Check, CheckStatus, check_host};
pub use forked_process::ReservedStage;
pub use limits::{KILL_MAX, SHADOWED_ENTRIES_MAX, VOLUMES_MAX};
pub use mount_point_holder::DirectoryRemover;
pub use outcome::{JobUsage, NotStarted, NotStartedReason, SandboxOutcome, SandboxReport};
pub use plan::{
    Access, InputSource, JobPlan, JobSession, JobStreams, JobUser, OutputTarget, PlanError,
    VolumeBind, job_environment,
};
pub use privilege::{EnterError, Privilege, enter_private, is_root_of_machine};
pub use running::{Cleanup, JobControl, RunningJob, Sandbox, StartError, StillAlive};
pub use stages::{dispatch_job_init, job_init_main, reserve_stage};
pub use temporary_directories::{TEMPORARY_VARIABLES, TemporaryDirectories, find_named_paths};
