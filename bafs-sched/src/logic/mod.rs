//! The deterministic core of the scheduler: facts in, decisions out. Table of contents only; no
//! clock, no I/O, no randomness anywhere below.
//!
//! [`Scheduler::step`] takes an [`Event`] and answers with [`Action`]s. Replaying the events of a
//! journal gives the same state again.

mod action;
mod again;
mod alike;
mod allot;
mod attempt;
mod away;
mod batch;
mod blockade;
mod chains;
mod checkpoint;
mod computing;
mod copies;
mod course;
mod crossings;
mod cut_off;
mod declared;
mod event;
mod expected_nodes;
mod extraction;
mod failed_logs;
mod failure;
pub mod fair_share;
mod fit;
mod fit_caches;
mod fit_gather;
mod fleet;
mod followers;
mod full_disk;
mod gathering;
mod graph;
mod growth;
mod guide;
mod invariants;
mod leaving;
mod mounted;
mod overdue;
mod place;
mod progress;
mod queues;
mod recover;
mod release;
mod returned;
mod reweigh;
mod rules;
mod safety;
mod scheduler;
mod settings;
mod shares;
mod simulated_plan;
mod sizes;
mod skew;
mod space;
mod standing;
mod steering;
mod strategy;
mod strategy_selector;
mod surveys;
mod tally;
mod timers;
mod trial;
mod troubles;
mod under_way;
mod volumes;
mod waiting;
mod warming;

pub use action::{Action, MountedVolume};
pub use allot::NodeDemand;
pub use checkpoint::{CheckpointPolicy, CopyCost, CopyDecision, CopyOutcome};
pub use declared::RunWarning;
pub use event::{Event, NodeInfo, RunQuota, UserCommand};
pub use fit::PLAN_HINT;
pub use full_disk::{FULL_DISK_HINT, INODES_EXHAUSTED_HINT, RERUN_HINT};
pub use graph::JobState;
pub use guide::StrategyChange;
pub(crate) use progress::describe_signal;
pub use progress::{JobFailure, Outcome, Progress};
pub use rules::{AllocationRules, JobStartOrder};
pub use scheduler::Scheduler;
pub use settings::{IoMode, Settings};
pub use simulated_plan::{EXACT_PERMILLE, SimulatedPlan};
pub use space::Space;
pub use strategy::Strategy;
pub use strategy_selector::{
    NodeKind, NullSelector, RemainingPipelines, Selection, SelectionQuery, StrategySelector,
    StrategySelectorConfig, WorkloadModel,
};
