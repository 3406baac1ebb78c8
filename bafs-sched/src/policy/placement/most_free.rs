//! Load balancing without data locality: what schedulers do that do not know where data lie. For
//! comparison.

use bafs_proto::ids::ServerId;
use bafs_workflow::JobIndex;

use super::placement_policy::Placement;
use crate::policy::{Policy, View};
use crate::space::Space;

/// Nodes that are tried.
const CANDIDATES: usize = 16;

/// Tries the nodes with most free slots, wherever a job's data are.
#[derive(Debug)]
pub(super) struct MostFree;

impl Policy for MostFree {
    fn name(&self) -> &'static str {
        "most-free"
    }

    fn summary(&self) -> &'static str {
        "a job goes where most slots are free, and reads its data over the network"
    }
}

impl Placement for MostFree {
    fn binding(&self, _view: View<'_>, _job: JobIndex, _need: Space) -> Option<ServerId> {
        None
    }

    fn candidates(&self, view: View<'_>, _job: JobIndex) -> Vec<ServerId> {
        view.fleet.idle().take(CANDIDATES).collect()
    }
}
