//! Divides a cache so that room stays for scratch volumes: whole on each node where that leaves
//! enough, else in proportion to what is free. What an allocation strategy limits is divided so
//! that as many scratch volumes as possible fit beside it.

use std::collections::BTreeSet;

use super::partition::{CachePartition, partition, partition_beside, with_imbalance};
use super::partitioning::{CacheDivision, CachePartitioning};
use crate::policy::{Policy, View};

/// Keeps room for the scratch volumes of the jobs that read the cache.
#[derive(Debug)]
pub(super) struct Reserving;

impl Policy for Reserving {
    fn name(&self) -> &'static str {
        "reserving"
    }

    fn summary(&self) -> &'static str {
        "each node holds a whole cache where scratch space remains, else a part by its free space"
    }
}

impl CachePartitioning for Reserving {
    fn divide(&self, view: View<'_>, division: &CacheDivision<'_>) -> Option<CachePartition> {
        let &CacheDivision {
            volume,
            server,
            rooms,
        } = division;
        let size = view.size_of(volume);
        if view.packs_volumes() {
            let readers = u64::from(view.graph.volume(volume).users_left);
            let scratch = view.scratch_need_max.bytes.saturating_mul(readers);
            let absent = view.volumes.absent_beside(volume);
            let absent = absent.map(|(bytes, n)| with_imbalance(bytes).saturating_mul(n));
            let beside = absent.fold(scratch, u64::saturating_add);
            return partition_beside(size, rooms, view.scratch_volume_max, beside);
        }
        let others = view.lacking_batch(server, &BTreeSet::from([volume]));
        let readers = u64::from(view.graph.volume(volume).users_left);
        partition(size, rooms, others, readers)
    }
}
