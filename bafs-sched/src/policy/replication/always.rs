//! Copies after each stage, as far as there is room.

use bafs_workflow::VolumeIndex;

use super::copy_policy::Replication;
use crate::policy::{Policy, View};
use crate::state::copy_costs::CopyDecision;

/// Copies whatever it costs.
#[derive(Debug)]
pub(super) struct Always;

impl Policy for Always {
    fn name(&self) -> &'static str {
        "always"
    }

    fn summary(&self) -> &'static str {
        "every volume is copied when a stage of it is done, as far as there is room"
    }
}

impl Replication for Always {
    fn is_worthwhile(&self, _: View<'_>, _: VolumeIndex, _: &CopyDecision) -> bool {
        true
    }

    fn keeps_older(&self, _: &CopyDecision, _: u64, _: u64) -> bool {
        true
    }
}
