//! The BAFS agent: shows a job its volumes as files, runs the job, and reports how it ended.
//! Takes no policy decision: what is mounted where, and what a loss means, others decide.
//!
//! Reading order: [`volume`], [`tree`], [`fuse`], [`sandbox`], [`job`], [`entry`].

pub mod agent;
mod clock;
pub mod doctor;
pub mod fd_passing;
pub mod entry_points;
mod job_environment;
mod errno;
pub mod volume_health;
pub mod fuse;
pub mod job;
mod mount_watchdog;
mod kernel;
mod limits;
pub mod logic;
pub mod memory;
mod output;
mod set_id_files;
mod heartbeat;
mod report_limits;
pub mod sandbox;
pub mod signals;
pub mod tree;
pub mod usage;
pub mod volume;
