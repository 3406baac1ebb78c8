//! Simulates how long a workflow takes: the real scheduler core before simulated nodes and links.
//!
//! [`Simulation`] runs a workflow in a [`Scenario`]: an environment, a [`Policy`], a [`LoadModel`]
//! and a seed. It returns a [`SimulationResult`].
//!
//! ```text
//!  engine.rs: next due time ─▶ Scheduler::step ─▶ actions ─▶ action_handling.rs
//!      ▲                                                       │
//!      └── transfers (links), computing jobs, cache fetches ◀──┘
//! ```
//!
//! * `link.rs` models a link or a disk. Concurrent flows get equal parts of its rate.
//! * `cluster_caches.rs` and `cache_reads.rs` model cooperative caches as amounts: cached bytes of
//!   a volume on the nodes, and the bytes that a reader waits for. `load_imbalance.rs` models
//!   uneven spread.
//! * `action_handling.rs` acts as the servers, and [`LoadModel`] gives the reads, computing and
//!   writes of each job: as declared, or as measured.
//! * `outages.rs` makes nodes fail and return. `random.rs` varies run times.
//! * `strategy_trials.rs` simulates the best candidates of a plan ([`decide_by_simulation`]).
//!   [`study`] compares all strategies over many workloads, as the thesis does in its figures 4.20
//!   to 4.28.
//!
//! It models bytes and their time. It does not model files, digests or wire messages.
//! `crate::simulated_cluster` is the opposite: faults of every kind, but no transfer times.
//!
//! **Units.** The simulator counts microseconds and bytes in integers. So the same scenario gives
//! the same result, byte for byte, on every machine.
//!
//! **Errors.** A run that makes no progress ends with [`StalledRunError`], after a bounded number
//! of attempts and records.
//!
//! **Limits.** Trials are bounded by the number of simulated jobs ([`PLAN_JOBS_MAX`]) and of
//! records, not by a clock. Results must not depend on the speed of the machine.
//!
//! A simulation is one thread with its own state. `docs/explanation/planning.md` lists the modelled
//! effects, and decision 0031 compares the model with journals of real runs.

mod action_handling;
mod cache_reads;
mod canonical;
mod cluster_caches;
mod engine;
mod flows;
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
mod volume_contents;
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
