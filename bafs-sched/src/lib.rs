//! The scheduler: every policy of BAFS, and what it needs to run, predict and test it.
//!
//! `bafs run` takes a workflow, decides where its data live and when its jobs run, and records each
//! step in a journal. The core is one deterministic function. Everything else feeds it or obeys it:
//!
//! ```text
//!  text ─▶ workflow ─▶ Workflow ─┐          ┌─▶ Action ─▶ io ─▶ calls to nodes and homes
//!                                ▼          │                    │
//!           planner ─▶ Settings ─▶ logic::Scheduler::step ◀── Event, journaled first
//!                                           ▲
//!    driver: the real cluster ──────────────┤
//!    sim: a cluster whose data take time ───┤
//!    simulated_cluster: a cluster that fails┘
//! ```
//!
//! * [`bafs_workflow`] reads what the user wrote, and returns a checked workflow or a list of
//!   errors.
//! * [`planner`] predicts each strategy by a model, and [`sim`] by simulation.
//! * [`logic`] decides. It has no clock, no I/O and no random numbers, so the same events lead to
//!   the same decisions.
//! * [`driver`] and [`io`] run the decisions: the journal, calls, waiting.
//! * [`simulated_cluster`] tests the core against seeded faults in virtual time.
//! * [`report`], [`replay`], [`timeline`] and [`goodput`] say what a run did and why, from its
//!   journal.
//! * [`past_runs`] reads recorded runs, to simulate them again.
//!
//! **Errors.** A wrong workflow is rejected with a list of diagnostics. A failed job, node or home
//! is an event, and the core decides what to do about it. Only a run that cannot go on ends with an
//! error, for example because its journal is damaged.
//!
//! **Units.** Times are milliseconds (microseconds in [`sim`]), sizes bytes and numbers of files.
//! Floating point serves predictions only, with functions that give the same bits on every machine
//! (`deterministic_math`).
//!
//! The ideas are from J. Bent, *Data-Driven Batch Scheduling* (2005).
//! `docs/explanation/scheduling.md`, `planning.md` and `recovery.md` explain the policies.

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
