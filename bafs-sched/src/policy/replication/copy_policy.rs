//! What a replication policy decides.

use bafs_workflow::VolumeIndex;

use crate::policy::{Policy, View};
use crate::state::copy_costs::CopyDecision;

/// Decides whether a finished stage of a scratch volume is copied.
pub(crate) trait Replication: Policy {
    /// Whether volumes are ever copied. Nothing is estimated where they are not.
    fn is_active(&self) -> bool {
        true
    }

    /// Whether volumes are judged again once more is known of failures and of the cost of copies.
    fn weighs(&self) -> bool {
        false
    }

    /// Whether a copy of a volume is worth what it costs by this estimate.
    fn is_worthwhile(&self, view: View<'_>, volume: VolumeIndex, estimate: &CopyDecision) -> bool;

    /// Whether an older copy stays that spares so much work, in milliseconds, and whose space keeps
    /// other work waiting for so long, when no newer copy is made.
    fn keeps_older(&self, estimate: &CopyDecision, spared_ms: u64, space_ms: u64) -> bool;
}
