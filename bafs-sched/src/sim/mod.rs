//! How long a workflow takes on machines that are not there: the real scheduler core in front of
//! simulated nodes, links and caches. Table of contents.
//!
//! [`Simulation`] runs one workflow under one [`Policy`]; the same [`Scenario`] gives the same
//! [`SimulationResult`], byte for byte, on every machine. `docs/PLANNING.md` says what is modelled.

mod action_handling;
mod cache_reads;
mod canonical;
mod cluster_caches;
mod engine;
mod link;
mod load;
mod load_imbalance;
mod node;
mod outages;
mod policy;
mod random;
mod remote_comparison;
mod simulated_plan;
mod simulation_result;
mod strategy_trials;
pub mod study;
mod transfer;
mod trial_candidate;
mod volume_copies;
mod warming;

pub use canonical::build_canonical_workflow;
pub use engine::{NoStepTimer, Simulation, StepTimer};
pub use load::{JobLoad, LoadModel, MeasuredLoad, MountLoad};
pub use policy::{Policy, Scenario};
pub use remote_comparison::compare_remote_io;
pub use simulated_plan::derive_simulated_plan;
pub use simulation_result::{ExecutionSpan, SimulationResult, StalledRunError, UsageSample};
pub use strategy_trials::{
    PLAN_JOBS_FAILING_MAX, PLAN_JOBS_MAX, TrialResult, TrialScope, TrialsOutcome,
    decide_by_simulation,
};
