//! Which ready job goes first, and how nodes are shared among runs.

mod critical_path;
pub(crate) mod declared_levels;
pub mod fair_share;
mod least_need;
pub(crate) mod node_demand;
pub(crate) mod urgency;

use super::{Policy, View};
use crate::Space;
use bafs_workflow::JobIndex;

/// Orders the jobs that are ready.
pub(crate) trait ReadyOrder: Policy {
    /// The place of a job among those that are ready: a smaller key goes first. It is asked again
    /// when a volume of the job comes or goes, and when the user changes a priority.
    fn key(&self, view: View<'_>, job: JobIndex) -> OrderKey;
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

/// All of them, the default first.
pub(crate) static ORDERS: &[&dyn ReadyOrder] = &[
    &least_need::LeastNeed,
    &critical_path::CriticalPath,
    &declared_levels::BreadthFirst,
    &declared_levels::DepthFirst,
];
