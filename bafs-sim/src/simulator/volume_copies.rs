//! Simulated copies of volumes between nodes: the bytes that cross the network, and the scheduler's
//! later knowledge of them. Decides nothing.

use std::collections::BTreeMap;

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::{Error, ErrorCode};
use bafs_sched::{Event, MountedVolume};

use super::engine::{FillSource, FlowOwner, Simulation, VolumeFill};

/// Content of scratch volumes and their copies.
#[derive(Debug, Default)]
pub(super) struct VolumeContents(BTreeMap<VolumeId, VolumeContent>);

/// Content of a volume.
#[derive(Debug, Clone, Copy)]
struct VolumeContent {
    /// Bytes ever written into it, or into the source of the copy.
    written_bytes: u64,
    /// Bytes that travelled to make this copy, if it is one.
    copied_bytes: u64,
    /// It holds no more.
    size_bytes: u64,
}

impl VolumeContent {
    fn held_bytes(self) -> u64 {
        self.written_bytes.min(self.size_bytes)
    }
}

impl VolumeContents {
    /// A volume is created with so many bytes in it.
    pub(super) fn note_created(&mut self, id: VolumeId, written: u64, size: u64) {
        let content = VolumeContent {
            written_bytes: written,
            copied_bytes: 0,
            size_bytes: size,
        };
        self.0.insert(id, content);
    }

    /// A job writes into a volume.
    pub(super) fn note_written(&mut self, id: VolumeId, bytes: u64) {
        if let Some(content) = self.0.get_mut(&id) {
            content.written_bytes = content.written_bytes.saturating_add(bytes);
        }
    }

    /// Bytes that a volume holds.
    pub(super) fn held_bytes(&self, id: VolumeId) -> u64 {
        self.0.get(&id).map_or(0, |content| content.held_bytes())
    }

    /// Bytes to transfer for a copy: the whole content, or the bytes written since the older copy.
    fn begin_copy(&mut self, id: VolumeId, source: VolumeId, base: Option<VolumeId>) -> u64 {
        let Some(content) = self.0.get(&source).copied() else {
            return 1;
        };
        let older = base.and_then(|base| self.0.get(&base));
        let before = older.map_or(0, |older| older.written_bytes);
        let moved = content
            .held_bytes()
            .min(content.written_bytes.saturating_sub(before));
        let moved = moved.max(1);
        self.0.insert(
            id,
            VolumeContent {
                copied_bytes: moved,
                ..content
            },
        );
        moved
    }

    pub(super) fn forget(&mut self, id: VolumeId) {
        self.0.remove(&id);
    }
}

impl Simulation {
    /// Copies travel between the nodes of the target's cluster.
    pub(super) fn start_copy(
        &mut self,
        id: VolumeId,
        source: &MountedVolume,
        server: ServerId,
        bytes: u64,
        base: Option<VolumeId>,
    ) {
        let node = self.node_position(server);
        let from = source.server.map(|server| self.node_position(server));
        let from = from.filter(|from| self.nodes[*from].volumes.contains_key(&source.id));
        let Some(from) = from else {
            return self.fail_copy(id);
        };
        let entry = (source.volume, bytes);
        if self.nodes[node].volumes.insert(id, entry).is_some() {
            return;
        }
        self.scratch_bytes += bytes;
        let base = base.filter(|base| self.nodes[node].volumes.contains_key(base));
        let moved = self.volume_contents.begin_copy(id, source.id, base);
        let link = self.peers_link(self.nodes[node].cluster);
        self.result.peer_bytes += u128::from(moved);
        let flow = self.start_flow(link, moved, FlowOwner::Fill(id));
        let from = FillSource::Node(from as u32);
        let flows = [Some((link, flow)), None];
        self.fills.insert(
            id,
            VolumeFill {
                source: from,
                flows,
            },
        );
        self.record_sample();
    }

    /// The source of the copy is absent or lost.
    pub(super) fn fail_copy(&mut self, id: VolumeId) {
        let error = Error::new(ErrorCode::VolumeLost, "the source of the copy is gone");
        let fact = Event::VolumeCreateFailed { volume: id, error };
        self.pending_events.push_back(fact);
    }

    /// All data that fills a volume has arrived.
    pub(super) fn complete_fill(&mut self, id: VolumeId) {
        let fact = match self.fills.remove(&id).map(|fill| fill.source) {
            Some(FillSource::Node(_)) => Event::VolumeCopied {
                volume: id,
                received_bytes: self
                    .volume_contents
                    .0
                    .get(&id)
                    .map_or(0, |copy| copy.copied_bytes),
            },
            Some(FillSource::Home) | None => Event::VolumeCreated { volume: id },
        };
        self.pending_events.push_back(fact);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn further_copy_moves_only_later_writes() {
        let [volume, copy, newer] = [1, 2, 3].map(VolumeId);
        let mut copying = VolumeContents::default();
        copying.note_created(volume, 0, 100);
        copying.note_written(volume, 30);
        assert_eq!(
            copying.begin_copy(copy, volume, None),
            30,
            "of the 100 declared"
        );
        copying.note_written(volume, 5);
        assert_eq!(copying.begin_copy(newer, volume, Some(copy)), 5);
        // The volume is lost, and the copy in its place written over and over.
        copying.forget(volume);
        copying.note_written(copy, 200);
        assert_eq!(copying.held_bytes(copy), 100, "no more than it may");
        assert_eq!(copying.held_bytes(volume), 0);
    }
}
