//! How much fits beside batch data. A scratch volume lies whole on one node; batch data are divided
//! among the nodes of a cluster, to the byte. Where all scratch volumes are of one size that is
//! exact, else a sum. It knows no strategies.

use std::collections::BTreeMap;

use super::environment::{Environment, NodeClass};
use super::shape::Shape;

/// Batch data that exist at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BatchData {
    pub(super) bytes: u128,
    /// Files, all of which a node with a part of them counts.
    pub(super) files: u64,
}

/// Space of all nodes together.
#[derive(Debug, Clone, Copy, Default)]
struct StorageOffer {
    /// On the nodes with space for the files of the batch data: bytes, and bytes of whole scratch
    /// volumes on them.
    bytes: u128,
    batch_node_scratch_bytes: u128,
    /// Bytes of scratch volumes where there is no such room.
    other_scratch_bytes: u128,
    /// Bytes for scratch volumes on all nodes, without batch data.
    unshared_scratch_bytes: u128,
    has_processors: bool,
}

impl Shape {
    /// Bytes of scratch volumes that such a node holds, whole ones, beside so many files.
    fn held_bytes(&self, class: &NodeClass, other_files: u64) -> u128 {
        let volume = match self.has_equal_volumes {
            true => self.largest_volume_bytes,
            false => 0,
        };
        let files = class.files.saturating_sub(other_files);
        match class.storage_bytes.checked_div(volume) {
            None => class.storage_bytes.into(),
            Some(fitting) => {
                let by_files = files.checked_div(self.volume_files).unwrap_or(fitting);
                u128::from(fitting.min(by_files)) * u128::from(volume)
            }
        }
    }

    /// Part of so many bytes that whole scratch volumes can use.
    fn round_to_volumes(&self, bytes: u128) -> u128 {
        match self.has_equal_volumes && self.largest_volume_bytes > 0 {
            true => bytes - bytes % u128::from(self.largest_volume_bytes),
            false => bytes,
        }
    }
}

impl Environment {
    /// Bytes of the largest node that computes beside batch data: in a cluster that can hold them
    /// and so many bytes more. Of the largest node anywhere where there is no such cluster.
    pub(super) fn largest_node_beside(&self, batch: BatchData, more_bytes: u128) -> u64 {
        let mut clusters: BTreeMap<&str, (u128, u64)> = BTreeMap::new();
        for class in self
            .initial_nodes()
            .filter(|class| class.files >= batch.files)
        {
            let (bytes, largest) = clusters.entry(&class.cluster).or_default();
            *bytes += u128::from(class.count) * u128::from(class.storage_bytes);
            if class.cpus > 0 {
                *largest = class.storage_bytes.max(*largest);
            }
        }
        let holding = clusters
            .values()
            .filter(|(bytes, largest)| *largest > 0 && *bytes >= batch.bytes + more_bytes);
        let largest = holding.map(|(_, largest)| *largest).max();
        largest.unwrap_or_else(|| self.largest_node_bytes())
    }

    /// Bytes of scratch volumes of this shape that fit on all nodes at once, beside batch data in
    /// one cluster that computes: in that one which leaves most. How many bytes the cluster that
    /// offers most lacks, when none can hold the batch data.
    pub(super) fn scratch_room_beside(
        &self,
        shape: &Shape,
        batch: BatchData,
    ) -> Result<u128, u128> {
        let mut clusters: BTreeMap<&str, StorageOffer> = BTreeMap::new();
        for class in self.initial_nodes() {
            let count = u128::from(class.count);
            let offer = clusters.entry(&class.cluster).or_default();
            offer.has_processors |= class.cpus > 0;
            offer.unshared_scratch_bytes += count * shape.held_bytes(class, 0);
            if class.files >= batch.files {
                offer.bytes += count * u128::from(class.storage_bytes);
                offer.batch_node_scratch_bytes += count * shape.held_bytes(class, batch.files);
            } else {
                offer.other_scratch_bytes += count * shape.held_bytes(class, 0);
            }
        }
        let all: u128 = clusters
            .values()
            .map(|offer| offer.unshared_scratch_bytes)
            .sum();
        let computing = clusters.values().filter(|offer| offer.has_processors);
        let rooms = computing.map(|offer| {
            if offer.bytes < batch.bytes {
                return Err(batch.bytes - offer.bytes);
            }
            let left = offer.bytes - batch.bytes;
            let beside = offer
                .batch_node_scratch_bytes
                .min(shape.round_to_volumes(left));
            Ok(all - offer.unshared_scratch_bytes + offer.other_scratch_bytes + beside)
        });
        let (mut most, mut lacking) = (None, u128::MAX);
        for room in rooms {
            match room {
                Ok(bytes) => most = most.max(Some(bytes)),
                Err(bytes) => lacking = lacking.min(bytes),
            }
        }
        most.ok_or(lacking)
    }
}
