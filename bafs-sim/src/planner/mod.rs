//! Planning: which data exist when, and in which order jobs run, decided by a model before the run.
//!
//! Storage on the nodes is often too small for all data of a workflow. Then data must be fetched
//! again, fewer pipelines run, or all pipelines wait for the slowest. A [`Strategy`] is one way to
//! choose between these prices.
//!
//! ```text
//!  Workflow or CanonicalWorkload ─▶ Shape ──┐
//!                                           ├─▶ plan_workload ─▶ Plan: candidates and choice
//!  Environment (nodes, links; TOML) ────────┘
//! ```
//!
//! * [`Shape`] has a workload's properties that strategies need: width, depth, sizes, run time. For
//!   a canonical workload (thesis, section 4.2.2) it is exact. For any other graph it takes the
//!   largest level.
//! * `strategy.rs` computes for each strategy an [`Allocation`]: whether it is possible, how many
//!   pipelines run at once, and in which order (thesis, section 4.2.6 and Table 4.2). `packing.rs`
//!   places scratch volumes, each of which lies whole on one node.
//! * `prediction.rs` predicts the run time, and `printed_equations.rs` has the equations of the
//!   thesis (section 4.4) for comparison. They differ in twelve places.
//! * `plan_choice.rs` makes the [`Plan`]. The fastest candidate is chosen, with the reason in one
//!   sentence. Remote I/O is shown but never chosen.
//! * [`SimulatedPlan`] corrects predictions by what simulations found ([`crate::simulator`]).
//!
//! **Units.** Sizes are bytes and exact. Predicted times are seconds in `f64`. Two predictions
//! within a second are equal.
//!
//! **Errors.** A workload for which no strategy is possible gives a plan without a choice, and a
//! `refusal` for the user. [`EnvironmentError`] names the wrong line, and [`CanonicalParseError`]
//! the wrong field.
//!
//! All functions are pure: no clock, no file, no random numbers. So the same arguments give the
//! same plan on every machine. "Thesis" is J. Bent, *Data-Driven Batch Scheduling* (2005).
//! `docs/explanation/planning.md` teaches the strategies and lists all corrections.

mod batch_storage;
mod canonical;
mod environment;
mod expected_times;
mod packing;
mod plan_choice;
mod prediction;
mod printed_equations;
mod scratch_sizes;
mod shape;
mod simulated_plan;
mod strategy;

pub use canonical::{CanonicalParseError, CanonicalWorkload, NotCanonicalError, PrivateLayout};
pub use environment::{Environment, EnvironmentError, NodeClass, RESTART_S_DEFAULT};
pub(crate) use plan_choice::is_need_worthwhile;
pub use plan_choice::{
    Plan, StrategyCandidate, StrategyChoice, plan_with_simulations, plan_workload,
};
pub use prediction::{predict_remaining, predict_time};
pub use printed_equations::predict_printed;
pub use shape::Shape;
pub use simulated_plan::summarise_simulations;
pub use strategy::{Allocation, Shortage, StrategyAllocation, Traversal};

pub use bafs_sched::{SimulatedPlan, Strategy};
