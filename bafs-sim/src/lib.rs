//! Predicts and tests what the scheduler does: the planner, the simulator and the simulated cluster
//! around the same core as real runs.
//!
//! ```text
//!  Workflow ─▶ planner ─▶ Plan ──────────┐
//!                │   model               ▼
//!                ├──▶ simulator ─▶ times ─▶ SimulatedPlan ─▶ strategy_selector ─▶ core
//!  past_runs ────┘   a cluster whose data take time
//!                     simulated_cluster: a cluster that fails
//! ```
//!
//! * [`planner`] predicts each strategy by a model, and [`simulator`] by simulation.
//! * [`strategy_selector`] is the strategy selector of a scheduler, by model and simulation. The
//!   core knows only its trait.
//! * [`simulated_cluster`] tests the core against seeded faults in virtual time.
//! * [`past_runs`] reads recorded runs, to simulate them again.
//!
//! **Errors.** A wrong environment or table is an error with its line. A simulated run that makes
//! no progress ends with an error, after a bounded number of records.
//!
//! **Units.** Times are microseconds in [`simulator`], milliseconds in [`simulated_cluster`], and
//! seconds in [`planner`]; sizes are bytes and numbers of files. Floating point serves predictions
//! only, with functions that give the same bits on every machine (`deterministic_math`).
//!
//! The ideas are from J. Bent, *Data-Driven Batch Scheduling* (2005).
//! `docs/explanation/planning.md` explains the model and the simulator.

mod deterministic_math;
pub mod past_runs;
pub mod planner;
#[cfg(test)]
mod rejection_cases;
pub mod seeded_rng;
pub mod simulated_cluster;
pub mod simulator;
pub mod strategy_selector;
