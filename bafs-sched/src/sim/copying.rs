//! Simulated copies of volumes between nodes: what crosses the network, and what is known of them
//! afterwards. Decides nothing.

use std::collections::BTreeMap;

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::{Error, ErrorCode};

use super::engine::{Fill, Filler, Owner, Simulation};
use crate::logic::{Event, MountedVolume};
use crate::workflow::VolumeIndex;

/// What jobs wrote, and what copies have of it.
#[derive(Debug, Default)]
pub(super) struct Copying {
    /// Bytes that were ever written into each volume.
    written: BTreeMap<VolumeIndex, u64>,
    /// For each copy the bytes that had been written when it was made, and those that travelled.
    copies: BTreeMap<VolumeId, (u64, u64)>,
}

impl Copying {
    /// A job writes into a volume.
    pub(super) fn written(&mut self, volume: VolumeIndex, bytes: u64) {
        *self.written.entry(volume).or_default() += bytes;
    }

    /// Bytes that travel for a copy of a volume of this size: all of it, or what was written since
    /// the older copy was made.
    fn begin(
        &mut self,
        id: VolumeId,
        volume: VolumeIndex,
        size: u64,
        base: Option<VolumeId>,
    ) -> u64 {
        let written = self.written.get(&volume).copied().unwrap_or(0);
        let older = base.and_then(|base| self.copies.get(&base));
        let moved = older.map_or(size, |(before, _)| size.min(written - before).max(1));
        self.copies.insert(id, (written, moved));
        moved
    }

    pub(super) fn forget(&mut self, id: VolumeId) {
        self.copies.remove(&id);
    }
}

impl Simulation {
    /// Copies travel between the nodes of the target's cluster.
    pub(super) fn copy(
        &mut self,
        id: VolumeId,
        source: &MountedVolume,
        server: ServerId,
        bytes: u64,
        base: Option<VolumeId>,
    ) {
        let node = self.node_at(server);
        let from = source.server.map(|server| self.node_at(server));
        let from = from.filter(|from| self.nodes[*from].volumes.contains_key(&source.id));
        let Some(from) = from else {
            return self.copy_broke(id);
        };
        let entry = (source.volume, bytes);
        if self.nodes[node].volumes.insert(id, entry).is_some() {
            return;
        }
        self.scratch_bytes += bytes;
        let base = base.filter(|base| self.nodes[node].volumes.contains_key(base));
        let moved = self.copying.begin(id, source.volume, bytes, base);
        let link = self.peers_link(self.nodes[node].cluster);
        let flow = self.start_flow(link, moved, Owner::Fill(id));
        let from = Filler::Node(from as u32);
        self.fills.insert(id, Fill { from, link, flow });
        self.note_moment();
    }

    /// What is copied is not there, or not any more.
    pub(super) fn copy_broke(&mut self, id: VolumeId) {
        let error = Error::new(ErrorCode::VolumeLost, "the source of the copy is gone");
        let fact = Event::VolumeCreateFailed { volume: id, error };
        self.facts.push_back(fact);
    }

    /// All that was to come into a volume has come.
    pub(super) fn filled(&mut self, id: VolumeId) {
        let fact = match self.fills.remove(&id).map(|fill| fill.from) {
            Some(Filler::Node(_)) => Event::VolumeCopied {
                volume: id,
                received_bytes: self.copying.copies.get(&id).map_or(0, |(_, moved)| *moved),
            },
            Some(Filler::Home) | None => Event::VolumeCreated { volume: id },
        };
        self.facts.push_back(fact);
    }
}
