//! Which strategy is followed, and what was known when that was decided.

use std::sync::Arc;

use bafs_proto::ids::ServerId;
use bafs_proto::time::Time;
use bafs_workflow::Workflow;
use serde::{Deserialize, Serialize};

use crate::allocation_strategy::Strategy;
use crate::state::compute_time::Computing;
use crate::state::recorded::{MayReplace, kept, whole_rows};
use crate::state::tracked::{Rows, Table};
use crate::strategy_selector::{SharedModel, StrategySelector, StrategySelectorConfig};

/// A decision to follow a strategy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StrategyChange {
    /// When.
    pub changed_at: Time,
    /// Which; nothing when none fits and need alone decides.
    pub strategy: Option<Strategy>,
    /// Why, in one sentence.
    pub reason: String,
}

/// What is followed, and what was known when that was decided.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Guided {
    pub(crate) guide: StrategySelectorConfig,
    /// Of the whole workflow.
    pub(crate) model: SharedModel,
    /// Computing of a job as it is expected, in seconds.
    pub(crate) run_s: f64,
    /// For each job the first one of its pipeline, as the planner counts them.
    pub(crate) pipeline: Arc<[u32]>,
    pub(crate) followed: Rows<StrategyChange>,
    /// Whether the present rules are those that were simulated as the best.
    pub(crate) has_simulated_rules: bool,
    pub(crate) asked: Option<SelectionInputs>,
    pub(crate) computing: Computing,
    pub(crate) lost_nodes: LostNodes,
}

/// What the last question was about.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct SelectionInputs {
    pub(crate) alive: u64,
    pub(crate) lost: u64,
    pub(crate) cpus: u64,
    pub(crate) bytes: u64,
    pub(crate) done: u64,
    /// Jobs whose computing was measured.
    pub(crate) computed: u64,
    /// When the nodes are looked at again, also when none came or went.
    pub(crate) look_at: Option<Time>,
    /// Kinds of volumes whose sizes were measured.
    pub(crate) sizes: usize,
}

whole_rows!(StrategyChange);

kept! {
    /// What was written of the strategy that is followed.
    GuidedChanges of Guided;
    values {
        run_s: f64,
        has_simulated_rules: bool,
        asked: Option<SelectionInputs>,
        computing: Computing,
    }
    tables { followed: Rows<StrategyChange> }
    indexed {}
    parts { lost_nodes: LostNodes }
    rebuilt { guide, model, pipeline }
}

impl MayReplace for Guided {
    /// Whether strategies are selected is said by the settings.
    fn take_fresh(&mut self) -> bool {
        false
    }
}

impl Guided {
    /// No scheduler ran for so long, in milliseconds: what was to be looked at is so much later.
    pub(crate) fn put_off(&mut self, ms: u64) {
        self.lost_nodes.put_off(ms);
        if let Some(asked) = &mut self.asked {
            asked.look_at = asked.look_at.map(|at| at.plus_ms(ms));
        }
    }
}

impl Guided {
    /// What the selector knows of the workflow; nothing of one that it selects nothing for.
    pub(crate) fn new(
        guide: StrategySelectorConfig,
        workflow: &Workflow,
        selector: &dyn StrategySelector,
    ) -> Option<Self> {
        let model = selector.model_workload(workflow, &guide)?;
        let (levels, run_s) = (model.level_count(), model.mean_run_s());
        Some(Self {
            computing: Computing::new(levels, run_s, workflow.jobs.len()),
            guide,
            model: SharedModel(model),
            run_s,
            pipeline: workflow.connected_pipelines().into(),
            followed: Rows::default(),
            has_simulated_rules: false,
            asked: None,
            lost_nodes: LostNodes::default(),
        })
    }

    pub(crate) fn strategy(&self) -> Option<Strategy> {
        self.followed.last().and_then(|last| last.strategy)
    }
}

/// A node that failed is expected to be back for so many times as long as a restart takes.
pub(crate) const RESTARTS: u64 = 2;

/// Nodes that were lost, and when. One that came back may still be among them.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct LostNodes {
    pub(crate) since: Table<ServerId, Time>,
}

kept! {
    /// What was written of lost nodes.
    LostNodeChanges of LostNodes;
    values {}
    tables { since: Table<ServerId, Time> }
    indexed {}
    parts {}
    rebuilt {}
}

impl LostNodes {
    pub(crate) fn put_off(&mut self, ms: u64) {
        let times = self.since.values_mut();
        times.for_each(|since| *since = since.plus_ms(ms));
    }
}
