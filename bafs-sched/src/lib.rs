//! The scheduler: every policy of BAFS. Table of contents; decides nothing itself.
//!
//! [`workflow`] reads what the user wrote, [`logic`] decides, [`io`] and [`driver`] do what was
//! decided. [`world`] runs the same decisions against servers that fail, [`sim`] against servers
//! whose data take time.

pub mod dice;
pub mod driver;
mod exact;
pub mod goodput;
pub mod io;
pub mod logic;
pub mod past;
pub mod planner;
#[cfg(test)]
mod refusals;
pub mod replay;
pub mod report;
pub mod sim;
pub mod timeline;
pub mod workflow;
pub mod world;
