//! Longest chain first (levels of Hu, Operations Research 9, 1961), whatever space it takes.

use bafs_workflow::JobIndex;

use super::ready_order::{OrderKey, ReadyOrder};
use crate::policy::{Policy, View};
use crate::space::Space;

/// Orders by the length of the chain of jobs that begins with a job.
#[derive(Debug)]
pub(super) struct CriticalPath;

impl Policy for CriticalPath {
    fn name(&self) -> &'static str {
        "critical-path"
    }

    fn summary(&self) -> &'static str {
        "the job with the longest chain of jobs after it goes first, whatever space it needs"
    }
}

impl ReadyOrder for CriticalPath {
    fn key(&self, view: View<'_>, job: JobIndex, need: Space) -> OrderKey {
        OrderKey {
            turn: view.turn_by_limits(job),
            chain: view.graph.chains.length_of(job),
            need,
        }
    }
}
