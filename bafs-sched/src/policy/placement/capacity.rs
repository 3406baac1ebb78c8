//! Capacity-aware placement (Bent, *Data-Driven Batch Scheduling*, chapter 5): a job stays where
//! its data are, and new data go where most space is free.

use bafs_proto::ids::ServerId;
use bafs_workflow::JobIndex;

use super::starts::LOOKAHEAD;
use super::{Placement, Policy, View};

/// Idle nodes that are searched for one that has a part of a job's cache.
const READERS_LOOKED_AT: usize = 64;

/// Keeps jobs with their scratch data, and looks for slots and space elsewhere.
#[derive(Debug)]
pub(super) struct Capacity;

impl Policy for Capacity {
    fn name(&self) -> &'static str {
        "capacity"
    }

    fn summary(&self) -> &'static str {
        "a job waits for the node that has its scratch data; others go where most is free"
    }
}

impl Placement for Capacity {
    fn binding(&self, view: View<'_>, job: JobIndex) -> Option<ServerId> {
        view.node_of_data(job)
    }

    /// Where caches are just as large as they must be, the roomiest nodes may be those without a
    /// part of them, and cannot run their readers.
    fn candidates(&self, view: View<'_>, job: JobIndex) -> Vec<ServerId> {
        let mut candidates = view.fleet.candidates();
        let mounts = view.graph.workflow.job(job).mounts.iter();
        let mut caches = mounts.filter(|mount| view.graph.volume(mount.volume).is_cache);
        if let (Some(_), Some(mount)) = (&view.admission, caches.next()) {
            let idle = view.fleet.idle().take(READERS_LOOKED_AT);
            let has_part =
                |server: &ServerId| view.volumes.live_at(mount.volume, Some(*server)).is_some();
            candidates.extend(idle.filter(has_part).take(LOOKAHEAD));
        }
        candidates
            .retain(|server| view.fleet.free_slots(*server) > view.slots_soon_needed(*server));
        candidates
    }
}
