//! Orders by the level of a job alone: what schedulers do that do not know about space. For
//! comparison.

use bafs_workflow::JobIndex;

use super::ready_order::{OrderKey, ReadyOrder};
use crate::policy::{Policy, View};
use crate::space::Space;

/// Whole levels one after the other.
#[derive(Debug)]
pub(super) struct BreadthFirst;

/// Whole pipelines one after the other.
#[derive(Debug)]
pub(super) struct DepthFirst;

impl Policy for BreadthFirst {
    fn name(&self) -> &'static str {
        "breadth-first"
    }

    fn summary(&self) -> &'static str {
        "jobs with fewer jobs before them go first"
    }
}

impl ReadyOrder for BreadthFirst {
    fn key(&self, view: View<'_>, job: JobIndex, need: Space) -> OrderKey {
        OrderKey {
            turn: (0, view.graph.level(job)),
            need,
            ..OrderKey::default()
        }
    }
}

impl Policy for DepthFirst {
    fn name(&self) -> &'static str {
        "depth-first"
    }

    fn summary(&self) -> &'static str {
        "jobs with more jobs before them go first"
    }
}

impl ReadyOrder for DepthFirst {
    fn key(&self, view: View<'_>, job: JobIndex, need: Space) -> OrderKey {
        OrderKey {
            turn: (0, u32::MAX - view.graph.level(job)),
            need,
            ..OrderKey::default()
        }
    }
}
