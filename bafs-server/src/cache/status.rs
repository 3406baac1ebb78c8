//! Describes a cache volume, for people and benchmarks. Changes nothing.

use bafs_proto::Result;
use bafs_proto::cache::{CacheMember, CachePeer, CacheStatus};
use bafs_proto::ids::VolumeId;
use bafs_proto::message::SourceKind;

use super::caches::Caches;
use super::generation::Generation;
use crate::clock;
use crate::logic::blocks::CopyClass;

impl Caches {
    /// Describes a volume.
    ///
    /// # Errors
    /// `VolumeLost`.
    pub fn get_cache(&self, id: VolumeId) -> Result<CacheStatus> {
        let volume = self.volume(id)?;
        let generation = volume.generation();
        let [primary_bytes, secondary_bytes, pinned_bytes] = {
            let table = generation.store.disk.table();
            let classes = [CopyClass::Primary, CopyClass::Secondary, CopyClass::Pinned];
            classes.map(|class| table.class_bytes(class))
        };
        let files = generation.store.manifest.entries().iter();
        let files = files.filter(|entry| entry.kind == SourceKind::File);
        let members = self.fetcher.members(&generation).into_iter();
        let peers = members.map(|peer| self.describe_peer(&generation, peer));
        Ok(CacheStatus {
            volume: id,
            cooperative: generation.membership.cooperative().to_owned(),
            manifest: generation.store.manifest.digest(),
            block_bytes: generation.store.manifest.block_bytes(),
            peer_check: self.fetcher.peer_check(&generation),
            source_bytes: generation.store.manifest.source_bytes(),
            source_files: files.count() as u64,
            capacity_bytes: generation.store.capacity_bytes(),
            primary_bytes,
            secondary_bytes,
            pinned_bytes,
            pinned_paths: generation.store.pins.paths(),
            warming: volume.warmer().state(),
            counters: volume.counters_of(id),
            peers: peers.collect(),
        })
    }

    fn describe_peer(&self, generation: &Generation, peer: CacheMember) -> CachePeer {
        let CacheMember {
            server,
            address,
            capacity_bytes,
        } = peer;
        let peers = self.fetcher.peers();
        CachePeer {
            server,
            address,
            capacity_bytes,
            used_bytes: peers.used_bytes(&generation.membership.cache_name(), server),
            is_unresponsive: peers.is_suspect(server, clock::monotonic_ms()),
            counters: generation.statistics.of_peer(server),
        }
    }
}
