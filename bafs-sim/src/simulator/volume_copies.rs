//! Simulated copies of volumes between nodes, and the scheduler's later knowledge of them. Decides
//! nothing.

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::{Error, ErrorCode};
use bafs_sched::{Event, MountedVolume};

use super::engine::Simulation;
use super::flows::{FillSource, FlowOwner, VolumeFill};

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
                received_bytes: self.volume_contents.copied_bytes(id),
            },
            Some(FillSource::Home) | None => Event::VolumeCreated { volume: id },
        };
        self.pending_events.push_back(fact);
    }
}
