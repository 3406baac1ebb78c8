//! Pipelines whose volumes were dropped for others.

use crate::state::recorded::kept;
use crate::state::tracked::{Keys, Table};

/// Pipelines that made way for others.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Preemptions {
    /// The most jobs that were done when one did.
    pub(crate) done_most: u64,
    /// How often each did since a pipeline ended, or more were done than ever before.
    pub(crate) made: Table<u32, u32>,
    /// Pipelines that ended after others made way: each counts once, as it may make way itself and
    /// end again.
    pub(crate) ended: Keys<u32>,
}

kept! {
    /// What was written of pipelines that made way.
    PreemptionChanges of Preemptions;
    values { done_most: u64 }
    tables { made: Table<u32, u32>, ended: Keys<u32> }
    indexed {}
    parts {}
    rebuilt {}
}

impl Preemptions {
    /// So many jobs are done: when that is more than ever before, all may be preempted again.
    pub(crate) fn note_progress(&mut self, done: u64) {
        if done > self.done_most {
            self.done_most = done;
            self.made.clear();
        }
    }

    /// A pipeline is through: it was not in vain that others made way.
    pub(crate) fn pipeline_ended(&mut self, pipeline: u32) {
        if !self.made.is_empty() && self.ended.insert(pipeline) {
            self.made.clear();
        }
    }
}
