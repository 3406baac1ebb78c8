//! The scheduler: every policy of BAFS, and the driver of real runs.
//!
//! `bafs run` takes a workflow, decides where its data live and when its jobs run, and records each
//! step in a journal. The core is one deterministic function. Everything else feeds it or obeys it:
//!
//! ```text
//!  text ─▶ workflow ─▶ Workflow ─┐          ┌─▶ Action ─▶ io ─▶ calls to nodes and homes
//!                                ▼          │                    │
//!    StrategySelector, Settings ─▶ Scheduler::step ◀── Event
//!                                           ▲
//!    driver: the real cluster ──────────────┤
//!    crate bafs-sim: simulated clusters ────┘
//! ```
//!
//! * [`bafs_workflow`] reads what the user wrote, and returns a checked workflow or a list of
//!   errors.
//! * [`Scheduler`] decides. It has no clock, no I/O and no random numbers, so the same events lead
//!   to the same decisions. It asks a [`StrategySelector`], which it does not know, for the
//!   strategy of a run.
//! * [`driver`] and [`io`] run the decisions: first they are in the journal, then calls are made.
//! * [`report`], [`replay`], [`timeline`] and [`goodput`] say what a run did and why, from its
//!   journal.
//!
//! **Errors.** A wrong workflow is rejected with a list of diagnostics. A failed job, node or home
//! is an event, and the core decides what to do about it. Only a run that cannot go on ends with an
//! error, for example because its journal is damaged.
//!
//! **Units.** Times are milliseconds, sizes bytes and numbers of files.
//!
//! The ideas are from J. Bent, *Data-Driven Batch Scheduling* (2005).
//! `docs/explanation/scheduling.md` and `recovery.md` explain the policies.

mod action;
mod allocation_strategy;
mod decision;
mod describe;
pub mod driver;
pub mod earlier_work;
mod event;
pub mod goodput;
mod invariants;
pub mod io;
pub mod policy;
mod policy_names;
mod recorded_step;
pub mod replay;
pub mod report;
mod run_follower;
mod run_limit;
mod scheduler;
mod settings;
mod simulated_plan;
mod space;
mod state;
mod strategy_selector;
pub mod timeline;
mod transition;
mod verification;
mod wait_reasons;

pub use action::{Action, MountedVolume};
pub use allocation_strategy::Strategy;
pub use decision::{Decision, LimitRelaxation, QuarantineReason};
pub use event::{Event, NodeDeparture, NodeInfo, RunQuota, UserCommand};
pub use policy::order::node_demand::NodeDemand;
pub use policy::{PolicyDescription, list_policies};
pub use policy_names::PolicyNames;
pub use recorded_step::RecordedStep;
pub use run_follower::RunFollower;
pub use run_limit::{ClusterLimit, RunLimit};
pub use scheduler::Scheduler;
pub use settings::{ClusterLifetime, IoMode, Settings};
pub use simulated_plan::{EXACT_PERMILLE, SimulatedPlan};
pub use space::Space;
pub use state::copy_costs::CopyCost;
pub use state::copy_costs::CopyDecision;
pub use state::copy_costs::CopyOutcome;
pub use state::jobs::JobState;
pub use state::kept_state::StateChanges;
pub use state::limits::AllocationRules;
pub use state::limits::JobStartOrder;
pub use state::observed_access::RunWarning;
pub use state::progress::{JobFailure, Outcome, Progress};
pub use state::strategy::StrategyChange;
pub use strategy_selector::{
    NodeKind, NullSelector, RemainingPipelines, Selection, SelectionQuery, StrategySelector,
    StrategySelectorConfig, WorkloadModel,
};
