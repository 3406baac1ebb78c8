//! Placement of WOW (Lehmann et al., *Workflow-Aware Data Movement and Task Scheduling for Dynamic
//! Scientific Workflows*, 2025, arXiv 2503.13072), as far as it places jobs. For comparison.
//!
//! WOW starts a task on a node that has all its intermediate data. If no such node is free, it
//! copies them to the free node where least is missing. It never waits for a busy node. Here, the
//! job reads over the network what WOW copies first. WOW's speculative copies have no counterpart.

use std::cmp::Reverse;

use bafs_proto::ids::ServerId;
use bafs_workflow::JobIndex;

use super::placement_policy::Placement;
use crate::policy::{Policy, View};
use crate::space::Space;

/// Idle nodes that are looked at, and nodes that are tried.
const NODES_LOOKED_AT: usize = 256;
const CANDIDATES: usize = 16;

/// Tries the idle nodes that lack least of a job's intermediate data.
#[derive(Debug)]
pub(super) struct Wow;

impl Policy for Wow {
    fn name(&self) -> &'static str {
        "wow"
    }

    fn summary(&self) -> &'static str {
        "a job goes to the idle node that lacks least of its scratch data, and waits for none"
    }
}

impl Placement for Wow {
    fn binding(&self, _view: View<'_>, _job: JobIndex, _need: Space) -> Option<ServerId> {
        None
    }

    fn candidates(&self, view: View<'_>, job: JobIndex) -> Vec<ServerId> {
        let idle = view.fleet.idle().take(NODES_LOOKED_AT);
        let able = idle.filter(|server| view.has_room_for_job(job, *server));
        let rated = able.map(|server| {
            let slots = Reverse(view.fleet.free_slots(server));
            (view.missing_bytes(job, server), slots, server)
        });
        let mut rated: Vec<_> = rated.collect();
        rated.sort_unstable();
        rated.truncate(CANDIDATES);
        rated.into_iter().map(|(.., server)| server).collect()
    }
}

impl View<'_> {
    /// Bytes of the scratch volumes of a job that exist, but not on this node.
    fn missing_bytes(&self, job: JobIndex, server: ServerId) -> u64 {
        let scratch = self.graph.mounted(job).into_iter().filter(|(volume, _)| {
            self.volumes.is_live(*volume) && !self.graph.volume(*volume).is_cache
        });
        let missing =
            scratch.filter(|(volume, _)| self.volumes.live_at(*volume, Some(server)).is_none());
        missing.fold(0, |sum: u64, (volume, _)| {
            sum.saturating_add(self.held_bytes(volume))
        })
    }
}
