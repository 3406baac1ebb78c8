//! The BAFS agent: shows a job its volumes as files, runs the job, and reports how it ended.
//!
//! One agent process serves one job (`bafs agent`, `bafs exec`) or one mount on the host
//! (`bafs mount`). It takes no policy decision. The scheduler decides what is mounted where, and
//! what a data loss means for the workflow.
//!
//! ```text
//!  program ─ system call ─▶ kernel ─ FUSE request ─▶ fuse ─▶ volume::Volume ─▶ tree::Tree
//!                                                             counts, owners      │
//!            Remote: calls to a server ◀──────────────────────────────────────────┤
//!            Cache:  blocks of this machine, or of the node ◀─────────────────────┤
//!            Inline: the directory itself, handed over by the node ◀──────────────┤
//!            BindMount: the kernel alone; no operation comes here ◀───────────────┘
//! ```
//!
//! * [`entry_points`] has what the commands call, and [`job`] the life of one job.
//! * [`agent`] opens volumes, and chooses the tree for each.
//! * [`fuse`] turns kernel requests into operations. [`tree`] runs these.
//! * [`sandbox`] gives the job its private name space, processes and root directory.
//! * [`volume_health`] records the first data loss of a volume. From then on every operation fails,
//!   and the job is killed.
//! * [`logic`] is pure: no clock, no I/O.
//!
//! **Errors.** A failed operation gives the program an errno. A failed server does not: the agent
//! retries until the deadline of the operation (30 s by default). Then the volume is lost, and the
//! job ends with `EnvironmentFailed`. The program sees no wrong byte.
//!
//! **Concurrency.** Kernel requests come on threads or rings. Calls run on a tokio runtime with two
//! workers. Data in memory is bounded over all volumes ([`memory`], 256 MiB by default).
//!
//! **End.** Mounts and processes of a job end with the agent, even after `kill -9`, and the agent
//! ends with its node. On the host a mount watchdog does the same.
//!
//! Reading order: [`volume`], [`tree`], [`fuse`], [`sandbox`], [`job`], [`entry_points`].

pub mod agent;
mod agent_input;
pub mod agent_spawner;
mod clock;
pub mod connection_end;
pub mod control_group;
pub mod doctor;
pub mod entry_points;
mod errno;
pub mod fd_passing;
pub mod fuse;
mod heartbeat;
pub mod job;
mod job_environment;
mod kernel;
mod limits;
pub mod logic;
pub mod memory;
mod mount_watchdog;
mod output;
mod own_process;
mod report_limits;
pub mod sandbox;
mod set_id_files;
pub mod signals;
mod trace_recorder;
pub mod traced_command;
pub mod tree;
pub mod usage;
pub mod volume;
pub mod volume_health;
mod volume_mode;
