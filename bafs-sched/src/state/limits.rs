//! Limits of an allocation strategy, and how far they are used up.

use std::collections::BTreeMap;

use bafs_workflow::{JobIndex, VolumeIndex};
use serde::{Deserialize, Serialize};

use crate::state::jobs::Graph;
use crate::state::recorded::{Freshness, Kept, MayReplace, kept};
use crate::state::tracked::{Keys, Rows};

/// In which order ready jobs start, before their needs decide.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobStartOrder {
    /// By need alone.
    #[default]
    Need,
    /// Jobs with fewer jobs before them first.
    BreadthFirst,
    /// Jobs with more jobs before them first.
    DepthFirst,
}

/// What may be allocated at once. A pipeline is under way from its first start to its last end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllocationRules {
    /// In which order ready jobs start.
    pub order: JobStartOrder,
    /// Pipelines that may be under way at once.
    pub pipelines_max: u64,
    /// Whether the next pipelines begin only when all that are under way have ended.
    pub has_sequential_parts: bool,
    /// Batch volumes that may exist at once: caches with more than one reader.
    pub batch_volumes_max: u64,
}

impl AllocationRules {
    /// An order alone: everything may be allocated at once that fits. By need there are no rules.
    pub fn with_order(order: JobStartOrder) -> Option<Self> {
        (order != JobStartOrder::Need).then_some(Self {
            order,
            pipelines_max: u64::MAX,
            has_sequential_parts: false,
            batch_volumes_max: u64::MAX,
        })
    }
}

/// How far the rules have been used up.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct StrategyLimits {
    pub(crate) rules: AllocationRules,
    /// For each pipeline, whether it is under way.
    pub(crate) is_begun: Rows<bool>,
    /// How often each pipeline was rolled back: what runs again goes after the others.
    pub(crate) rounds: Rows<u32>,
    pub(crate) under_way: u64,
    /// Pipelines that have begun since none was under way.
    pub(crate) begun: u64,
    /// Every cache of the workflow.
    pub(crate) caches: Vec<VolumeIndex>,
    /// Batch volumes that may exist.
    pub(crate) batch: Keys<VolumeIndex>,
    /// Of each cache that jobs of one level alone read, that level.
    pub(crate) stage: BTreeMap<VolumeIndex, u32>,
    /// No further batch volume can exist for jobs of this level and above until one may go: none of
    /// these need look again.
    pub(crate) full_from: Option<u32>,
    /// No journal has it yet.
    freshness: Freshness,
}

kept! {
    /// What was written of how far the rules have been used up.
    LimitChanges of StrategyLimits;
    values { rules: AllocationRules, under_way: u64, begun: u64, full_from: Option<u32> }
    tables { is_begun: Rows<bool>, rounds: Rows<u32>, batch: Keys<VolumeIndex> }
    indexed {}
    parts {}
    rebuilt { caches, stage, freshness }
}

impl MayReplace for StrategyLimits {
    fn take_fresh(&mut self) -> bool {
        std::mem::take(&mut self.freshness.0)
    }
}

impl StrategyLimits {
    pub(crate) fn new(rules: AllocationRules, graph: &Graph) -> Self {
        let workflow = &graph.workflow;
        let jobs = workflow.jobs.len();
        let volumes = (0..workflow.volumes.len() as u32).map(VolumeIndex);
        let caches: Vec<VolumeIndex> = volumes.filter(|v| graph.volume(*v).is_cache).collect();
        let stage = |cache: &VolumeIndex| {
            let mut levels = workflow
                .volume(*cache)
                .users
                .iter()
                .map(|user| graph.level(*user));
            let first = levels.next()?;
            levels
                .all(|level| level == first)
                .then_some((*cache, first))
        };
        let mut limits = Self {
            rules,
            stage: caches.iter().filter_map(stage).collect(),
            caches,
            is_begun: vec![false; jobs].into(),
            rounds: vec![0; jobs].into(),
            under_way: 0,
            begun: 0,
            batch: Keys::default(),
            full_from: None,
            freshness: Freshness(true),
        };
        if graph.is_recording() {
            limits.start_recording();
        }
        limits
    }

    /// Other rules from now on; what is under way stays so.
    pub(crate) fn change(&mut self, rules: AllocationRules) {
        self.rules = rules;
        self.begun = self.under_way;
        self.full_from = None;
    }

    /// The place of a job in the order, before its needs are looked at.
    pub(crate) fn turn(&self, graph: &Graph, job: JobIndex, pipeline: u32) -> (u32, u32) {
        let level = graph.level(job);
        let turn = match self.rules.order {
            JobStartOrder::Need => 0,
            JobStartOrder::BreadthFirst => level,
            JobStartOrder::DepthFirst => u32::MAX - level,
        };
        (self.rounds[pipeline as usize], turn)
    }

    /// Whether no pipeline can begin before others have ended.
    pub(crate) fn is_full(&self) -> bool {
        let is_part_full =
            self.rules.has_sequential_parts && self.begun >= self.rules.pipelines_max;
        is_part_full || self.under_way >= self.rules.pipelines_max
    }

    /// The batch volumes that may exist.
    pub(crate) fn batch(&self) -> Vec<VolumeIndex> {
        self.batch.iter().copied().collect()
    }

    pub(crate) fn admits(&self, pipeline: u32) -> bool {
        self.is_begun[pipeline as usize] || !self.is_full()
    }
}
