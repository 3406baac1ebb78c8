//! What divides cooperative caches among nodes, and what it is given.

use bafs_proto::ids::ServerId;
use bafs_workflow::{JobIndex, VolumeIndex};

use super::partition::{CachePartition, Room};
use crate::policy::{Policy, View};
use crate::state::planned_volumes::Create;

/// Divides a cooperative cache among the nodes of a group.
pub(crate) trait CachePartitioning: Policy {
    /// How much each node gets. `None` when the cache does not fit now; its readers wait then.
    fn divide(&self, view: View<'_>, division: &CacheDivision<'_>) -> Option<CachePartition>;
}

/// A cache of which its group has no part yet, and what the nodes of the group can give it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CacheDivision<'r> {
    /// The cache.
    pub(crate) volume: VolumeIndex,
    /// The node where its first reader is to start.
    pub(crate) server: ServerId,
    /// One for each node of the group that takes work.
    pub(crate) rooms: &'r [Room],
}

/// A job that starts, and the volumes that are made for it.
pub(crate) type PlannedStart<'s> = (JobIndex, &'s [Create]);

/// What the planning of caches takes from other rules.
#[derive(Clone, Copy)]
pub(crate) struct CachePlanning<'p> {
    /// How a cache is divided.
    pub(crate) partitioning: &'p dyn CachePartitioning,
    /// What a node must keep free, in bytes, so that the pipelines at home there can end, once a
    /// job has started there if one is given.
    pub(crate) to_end: &'p dyn Fn(ServerId, Option<PlannedStart<'_>>) -> u64,
}
