//! Least need first: a job that finds its data there holds the least new space. What is urgent goes
//! before that (`urgency.rs`).

use bafs_workflow::JobIndex;

use super::ready_order::{OrderKey, ReadyOrder};
use crate::policy::{Policy, View};
use crate::space::Space;

/// Orders by what must still be made for a job.
#[derive(Debug)]
pub(super) struct LeastNeed;

impl Policy for LeastNeed {
    fn name(&self) -> &'static str {
        "least-need"
    }

    fn summary(&self) -> &'static str {
        "the job that needs the least new space goes first, after jobs on an urgent chain"
    }
}

impl ReadyOrder for LeastNeed {
    fn key(&self, view: View<'_>, job: JobIndex, need: Space) -> OrderKey {
        let behind = view.need_behind(job);
        OrderKey {
            turn: view.turn_by_limits(job),
            chain: view.urgent_chain(job),
            need: need.saturating_add(behind),
        }
    }
}
