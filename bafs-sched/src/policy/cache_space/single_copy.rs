//! Divides a cache so that the group holds each block once: the least space that caches can take,
//! at the price of reads from peers.

use super::partition::{CachePartition, tight_partition};
use super::partitioning::{CacheDivision, CachePartitioning};
use crate::policy::{Policy, View};

/// Holds one copy in a group, whatever is free.
#[derive(Debug)]
pub(super) struct SingleCopy;

impl Policy for SingleCopy {
    fn name(&self) -> &'static str {
        "single-copy"
    }

    fn summary(&self) -> &'static str {
        "the nodes of a group together hold each cache once, whatever space remains"
    }
}

impl CachePartitioning for SingleCopy {
    fn divide(&self, view: View<'_>, division: &CacheDivision<'_>) -> Option<CachePartition> {
        let size = view.size_of(division.volume);
        tight_partition(size, division.rooms, view.scratch_volume_max)
    }
}
