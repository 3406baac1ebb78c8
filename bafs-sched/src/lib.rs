//! The scheduler: every policy of BAFS. Table of contents; decides nothing itself.
//!
//! [`workflow`] reads what the user wrote, [`logic`] decides, [`io`] and [`driver`] do what was
//! decided. [`simulated_cluster`] runs the same decisions against servers that fail, [`sim`]
//! against servers whose data take time.

mod deterministic_math;
pub mod driver;
pub mod goodput;
pub mod io;
pub mod logic;
pub mod past_runs;
pub mod planner;
#[cfg(test)]
mod rejection_cases;
pub mod replay;
pub mod report;
pub mod seeded_rng;
pub mod sim;
pub mod simulated_cluster;
pub mod timeline;
pub mod workflow;
