//! Simulated copies of volumes between nodes: what crosses the network, and what is known of them
//! afterwards. Decides nothing.

use std::collections::BTreeMap;

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::{Error, ErrorCode};

use super::engine::{Fill, Filler, Owner, Simulation};
use crate::logic::{Event, MountedVolume};

/// What scratch volumes and their copies hold.
#[derive(Debug, Default)]
pub(super) struct Copying(BTreeMap<VolumeId, Content>);

/// What is in a volume.
#[derive(Debug, Clone, Copy)]
struct Content {
    /// Bytes that were ever written into it, or into what it was copied from.
    written: u64,
    /// Bytes that travelled to make this copy, if it is one.
    moved: u64,
    /// It holds no more.
    size: u64,
}

impl Content {
    fn held(self) -> u64 {
        self.written.min(self.size)
    }
}

impl Copying {
    /// A volume is made with so many bytes in it.
    pub(super) fn created(&mut self, id: VolumeId, written: u64, size: u64) {
        let content = Content {
            written,
            moved: 0,
            size,
        };
        self.0.insert(id, content);
    }

    /// A job writes into a volume.
    pub(super) fn written(&mut self, id: VolumeId, bytes: u64) {
        if let Some(content) = self.0.get_mut(&id) {
            content.written = content.written.saturating_add(bytes);
        }
    }

    /// Bytes that a volume holds.
    pub(super) fn held(&self, id: VolumeId) -> u64 {
        self.0.get(&id).map_or(0, |content| content.held())
    }

    /// Bytes that travel for a copy: all that the volume holds, or what was written since the older
    /// copy was made.
    fn begin(&mut self, id: VolumeId, source: VolumeId, base: Option<VolumeId>) -> u64 {
        let Some(content) = self.0.get(&source).copied() else {
            return 1;
        };
        let older = base.and_then(|base| self.0.get(&base));
        let before = older.map_or(0, |older| older.written);
        let moved = content.held().min(content.written.saturating_sub(before));
        let moved = moved.max(1);
        self.0.insert(id, Content { moved, ..content });
        moved
    }

    pub(super) fn forget(&mut self, id: VolumeId) {
        self.0.remove(&id);
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
        let moved = self.copying.begin(id, source.id, base);
        let link = self.peers_link(self.nodes[node].cluster);
        self.run.peer_bytes += u128::from(moved);
        let flow = self.start_flow(link, moved, Owner::Fill(id));
        let from = Filler::Node(from as u32);
        let flows = [Some((link, flow)), None];
        self.fills.insert(id, Fill { from, flows });
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
                received_bytes: self.copying.0.get(&id).map_or(0, |copy| copy.moved),
            },
            Some(Filler::Home) | None => Event::VolumeCreated { volume: id },
        };
        self.facts.push_back(fact);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_takes_what_the_volume_holds_and_then_what_was_written_since() {
        let [volume, copy, newer] = [1, 2, 3].map(VolumeId);
        let mut copying = Copying::default();
        copying.created(volume, 0, 100);
        copying.written(volume, 30);
        assert_eq!(copying.begin(copy, volume, None), 30, "of the 100 declared");
        copying.written(volume, 5);
        assert_eq!(copying.begin(newer, volume, Some(copy)), 5);
        // The volume is lost, and the copy in its place written over and over.
        copying.forget(volume);
        copying.written(copy, 200);
        assert_eq!(copying.held(copy), 100, "no more than it may");
        assert_eq!(copying.held(volume), 0);
    }
}
