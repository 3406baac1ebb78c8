//! What orders ready jobs, and what the orders have in common.

use bafs_workflow::JobIndex;

use crate::policy::{Policy, View};
use crate::space::Space;

/// Orders the jobs that are ready.
pub(crate) trait ReadyOrder: Policy {
    /// The place of a job among those that are ready: a smaller key goes first. It is asked again
    /// when a volume of the job comes or goes, and when the user changes a priority. `need` is the
    /// space of its volumes that do not exist.
    fn key(&self, view: View<'_>, job: JobIndex, need: Space) -> OrderKey;
}

/// A place among ready jobs; each field counts only where all before it are equal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct OrderKey {
    /// A turn, the smaller the earlier.
    pub(crate) turn: (u32, u32),
    /// Length of the chain of jobs that begins with this one, in seconds: the longest goes first.
    /// 0 when that does not matter now.
    pub(crate) chain: u32,
    /// Space that must still be made for the job: the least goes first.
    pub(crate) need: Space,
}

impl View<'_> {
    /// The turn of a job under the limits of a strategy.
    pub(crate) fn turn_by_limits(&self, job: JobIndex) -> (u32, u32) {
        let limits = self.limits.as_ref();
        limits.map_or((0, 0), |limits| {
            limits.turn(&self.graph, job, self.graph.pipeline(job))
        })
    }

    /// What is added to the need of readers that come after those of what was there before: a
    /// little more than scratch volumes need, so that jobs which lack a batch volume come later.
    pub(crate) fn need_behind(&self, job: JobIndex) -> Space {
        let mounted = self.graph.mounted(job).into_iter();
        let places = mounted.map(|(volume, _)| self.prefetching.place_behind(volume));
        let more = self.scratch_need_max.bytes.saturating_add(1);
        let bytes = more.saturating_mul(places.max().unwrap_or(0));
        Space { bytes, files: 0 }
    }
}
