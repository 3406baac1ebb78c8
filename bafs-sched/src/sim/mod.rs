//! How long a workflow takes on machines that are not there: the real scheduler core in front of
//! simulated nodes, links and caches. Table of contents.
//!
//! [`Simulation`] runs one workflow under one [`Policy`]; the same [`Scenario`] gives the same
//! [`Run`], byte for byte, on every machine. `docs/PLANNING.md` says what is modelled.

mod simulated_plan;
mod canonical;
mod cluster_caches;
mod trial_candidate;
mod volume_copies;
mod strategy_trials;
mod engine;
mod link;
mod load;
mod node;
mod outages;
mod policy;
mod random;
mod cache_reads;
mod simulation_result;
mod remote_comparison;
mod action_handling;
mod load_imbalance;
pub mod study;
mod transfer;
mod warming;

pub use simulated_plan::derive_simulated_plan;
pub use canonical::build_canonical_workflow;
pub use strategy_trials::{TrialScope, TrialsOutcome, PLAN_JOBS_FAILING_MAX, PLAN_JOBS_MAX, TrialResult, decide_by_simulation};
pub use engine::{Simulation, NoStepTimer, StepTimer};
pub use load::{JobLoad, LoadModel, MeasuredLoad, MountLoad};
pub use policy::{Policy, Scenario};
pub use simulation_result::{UsageSample, SimulationResult, ExecutionSpan, StalledRunError};
pub use remote_comparison::compare_remote_io;
