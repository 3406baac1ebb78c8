//! The strategy selector, as the core knows it: what it is asked, and what it answers. The crate
//! `bafs-sim` has the one with model and simulation; this crate has none but the null selector.
//!
//! A selector is deterministic: equal questions have equal answers, on every machine. So a
//! scheduler that gets the events of a journal once more decides as before with the same selector.

use std::fmt;
use std::sync::Arc;

use bafs_workflow::Workflow;
use serde::{Deserialize, Serialize};

use crate::allocation_strategy::Strategy;
use crate::simulated_plan::SimulatedPlan;
use crate::space::Space;
use crate::state::limits::AllocationRules;

/// What the scheduler must be told to plan by itself: it sees nodes, but not links. Kept in the
/// journal with the other settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StrategySelectorConfig {
    /// Rate of the link to home, in bytes per second.
    pub home_bytes_per_s: u64,
    /// Rate of each node's link, in bytes per second.
    pub local_bytes_per_s: u64,
    /// Mean time between failures of any of the nodes, in seconds.
    pub mtbf_s: Option<u64>,
    /// How long a node that failed is away, in seconds.
    pub restart_s: u64,
    /// Standard deviation of computing times over their mean, in millionths.
    pub variability_ppm: u64,
    /// What was simulated of the workload; nothing when nothing was.
    pub simulated_plan: Option<SimulatedPlan>,
}

/// Chooses strategies for a scheduler.
pub trait StrategySelector: fmt::Debug + Send + Sync {
    /// What the selector knows of a workflow, with sizes as declared. Nothing when it never selects
    /// anything: then need alone decides.
    fn model_workload(
        &self,
        workflow: &Workflow,
        config: &StrategySelectorConfig,
    ) -> Option<Arc<dyn WorkloadModel>>;
}

/// What a selector knows of one workflow. It follows from the workflow alone, and never changes.
pub trait WorkloadModel: fmt::Debug + Send + Sync {
    /// The same with the sizes of a workflow of which more is known.
    fn with_sizes(&self, workflow: &Workflow) -> Arc<dyn WorkloadModel>;

    /// Levels of all pipelines together.
    fn level_count(&self) -> u64;

    /// Mean computing time of one level of one pipeline as declared, in seconds.
    fn mean_run_s(&self) -> f64;

    /// The strategy for what is left. Nothing where all remains as it is, also the rules.
    fn select(&self, query: &SelectionQuery) -> Option<Selection>;
}

/// What a selector is asked.
#[derive(Debug, Clone, PartialEq)]
pub struct SelectionQuery {
    /// What is left to do.
    pub remaining: RemainingPipelines,
    /// The nodes to plan with, equal ones together.
    pub nodes: Vec<NodeKind>,
    /// Processors of all these nodes.
    pub cpus: u64,
    /// Bytes for volumes of all these nodes.
    pub bytes: u64,
    /// Computing time as it is expected, in seconds, as [`WorkloadModel::mean_run_s`].
    pub run_s: f64,
    /// Whether that is what jobs declare.
    pub has_declared_times: bool,
    /// What is followed; nothing at first, and where no strategy was possible.
    pub present: Option<Strategy>,
    /// Whether the present rules are those that were simulated as the best.
    pub has_simulated_rules: bool,
    /// Whether any size was measured.
    pub has_measured_sizes: bool,
}

/// What is left to do, in pipelines.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RemainingPipelines {
    /// Of which something is left.
    pub open: u64,
    /// Of which nothing has begun.
    pub fresh: u64,
    /// What is left of those that have begun, as whole ones, rounded up.
    pub begun: u64,
    /// The part of the batch data still needed that no cache is made for.
    pub missing: f64,
}

/// Equal nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeKind {
    /// How many there are.
    pub count: u32,
    /// Jobs that each runs at once.
    pub slots: u32,
    /// What of each this run may use.
    pub space: Space,
    /// Their group: nodes of one share caches.
    pub group: String,
}

/// What a selector answers.
#[derive(Debug, Clone, PartialEq)]
pub struct Selection {
    /// What to follow; nothing when none fits and need alone decides.
    pub strategy: Option<Strategy>,
    /// Why, in one sentence; empty where it is the present one.
    pub reason: String,
    /// Its rules on the nodes that are there.
    pub rules: Option<AllocationRules>,
    /// Whether these were simulated as the best.
    pub has_simulated_rules: bool,
}

/// Selects nothing: need alone decides. For runs and tests without a plan.
#[derive(Debug, Clone, Copy, Default)]
pub struct NullSelector;

impl StrategySelector for NullSelector {
    fn model_workload(
        &self,
        _: &Workflow,
        _: &StrategySelectorConfig,
    ) -> Option<Arc<dyn WorkloadModel>> {
        None
    }
}

/// A model in the state of a scheduler.
#[derive(Debug, Clone)]
pub(crate) struct SharedModel(pub(crate) Arc<dyn WorkloadModel>);

/// Models follow from the workflow and the sizes, which schedulers compare anyway.
impl PartialEq for SharedModel {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
