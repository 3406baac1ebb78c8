//! Repeats what failed, wherever a slot is free, and blames nobody: what most batch systems do. For
//! comparison.

use bafs_proto::ids::ServerId;

use super::{FailureAttribution, Policy, View};

/// Blames no node.
#[derive(Debug)]
pub(super) struct RetryOnly;

impl Policy for RetryOnly {
    fn name(&self) -> &'static str {
        "retry-only"
    }

    fn summary(&self) -> &'static str {
        "failed jobs run again on any node; no node is put into quarantine for failures"
    }
}

impl FailureAttribution for RetryOnly {
    fn blames_for_faults(&self, _: View<'_>, _: ServerId) -> bool {
        false
    }

    fn blames_for_jobs(&self, _: View<'_>, _: ServerId) -> bool {
        false
    }

    fn avoids_failed_nodes(&self) -> bool {
        false
    }
}
