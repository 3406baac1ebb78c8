//! What a cache volume holds and did, for people and benchmarks. Changes nothing.

use bafs_proto::Result;
use bafs_proto::cache::{CachePeer, CacheStatus};
use bafs_proto::ids::VolumeId;
use bafs_proto::message::SourceKind;

use super::Caches;
use super::fetch::Generation;
use super::peers::PeerCache;
use crate::clock;
use crate::logic::blocks::CopyClass;

impl Caches {
    /// Shows a volume.
    ///
    /// # Errors
    /// `VolumeLost`.
    pub fn get_cache(&self, id: VolumeId) -> Result<CacheStatus> {
        let volume = self.volume(id)?;
        let generation = volume.generation();
        let [primary_bytes, secondary_bytes, pinned_bytes] = {
            let table = generation.disk.table();
            let classes = [CopyClass::Primary, CopyClass::Secondary, CopyClass::Pinned];
            classes.map(|class| table.class_bytes(class))
        };
        let files = generation.manifest.entries().iter();
        let files = files.filter(|entry| entry.kind == SourceKind::File);
        let sharers = self.fetcher.sharers(&generation).into_iter();
        let peers = sharers.map(|peer| self.show_peer(&generation, peer));
        Ok(CacheStatus {
            volume: id,
            cooperative: generation.cooperative.clone(),
            manifest: generation.manifest.digest(),
            block_bytes: generation.manifest.block_bytes(),
            source_bytes: generation.source_bytes,
            source_files: files.count() as u64,
            capacity_bytes: generation.capacity_bytes,
            primary_bytes,
            secondary_bytes,
            pinned_bytes,
            pinned_paths: generation.pins.paths(),
            warming: volume.warmer().state(),
            counters: generation.meter.counts().snapshot(),
            peers: peers.collect(),
        })
    }

    fn show_peer(&self, generation: &Generation, peer: PeerCache) -> CachePeer {
        let PeerCache {
            server,
            address,
            capacity_bytes,
        } = peer;
        let peers = self.fetcher.peers();
        CachePeer {
            server,
            address,
            capacity_bytes,
            used_bytes: peers.used_bytes(&generation.name(), server),
            is_unresponsive: peers.is_suspect(server, clock::monotonic_ms()),
            counters: generation.meter.of_peer(server),
        }
    }
}
