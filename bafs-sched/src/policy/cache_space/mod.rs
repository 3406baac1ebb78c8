//! How much of each cache a node holds, and when caches come and go.

pub(crate) mod load_imbalance;
pub(crate) mod partition;
pub(crate) mod prefetch;
pub(crate) mod reclaim;
pub(crate) mod refetch;
mod reserving;
mod single_copy;

use bafs_proto::ids::ServerId;

use self::partition::{CachePartition, Room};
use super::{Policy, View};
use bafs_workflow::VolumeIndex;

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

/// All of them, the default first.
pub(crate) static PARTITIONINGS: &[&dyn CachePartitioning] =
    &[&reserving::Reserving, &single_copy::SingleCopy];
