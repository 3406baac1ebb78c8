//! Copies nothing: what is lost is computed again.

use bafs_workflow::VolumeIndex;

use super::copy_policy::Replication;
use crate::policy::{Policy, View};
use crate::state::copy_costs::CopyDecision;

/// Copies nothing.
#[derive(Debug)]
pub(super) struct Never;

impl Policy for Never {
    fn name(&self) -> &'static str {
        "never"
    }

    fn summary(&self) -> &'static str {
        "no volume is copied; lost data are computed again"
    }
}

impl Replication for Never {
    fn is_active(&self) -> bool {
        false
    }

    fn is_worthwhile(&self, _: View<'_>, _: VolumeIndex, _: &CopyDecision) -> bool {
        false
    }

    fn keeps_older(&self, _: &CopyDecision, _: u64, _: u64) -> bool {
        false
    }
}
