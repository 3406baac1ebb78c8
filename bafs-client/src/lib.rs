//! The BAFS agent: shows a job its volumes as files, runs the job, and reports how it ended.
//! Takes no policy decision: what is mounted where, and what a loss means, others decide.
//!
//! Reading order: [`volume`], [`tree`], [`fuse`], [`sandbox`], [`job`], [`entry`].

pub mod agent;
mod clock;
pub mod doctor;
pub mod door;
pub mod entry;
mod environment;
mod errno;
pub mod fate;
pub mod fuse;
pub mod job;
mod keeper;
mod kernel;
mod limits;
pub mod logic;
pub mod memory;
mod output;
mod privileged;
mod pulse;
mod report;
pub mod sandbox;
pub mod signals;
pub mod tree;
pub mod usage;
pub mod volume;
