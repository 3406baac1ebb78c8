//! The BAFS agent: shows a job its volumes as files, runs the job, and reports how it ended.
//! Takes no policy decision: what is mounted where, and what a loss means, others decide.
//!
//! Reading order: [`volume`], [`tree`], [`fuse`], [`sandbox`], [`job`], [`entry_points`].

pub mod agent;
mod clock;
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
mod report_limits;
pub mod sandbox;
mod set_id_files;
pub mod signals;
pub mod tree;
pub mod usage;
pub mod volume;
pub mod volume_health;
