//! Copies of volumes between simulated nodes, and files that go home.

use bafs_proto::ids::{ExtractionId, ServerId, VolumeId};
use bafs_sched::{Event, MountedVolume, Space};

use super::chaos::digest as digest_of;
use super::{CALL_TIMEOUT_MS, ClusterEvent, SimulatedCluster, unreachable_error};

impl SimulatedCluster {
    pub(super) fn serve_copy(
        &mut self,
        id: VolumeId,
        source: MountedVolume,
        server: ServerId,
        size: Space,
        base: Option<VolumeId>,
    ) {
        let content = self.content(&source).cloned();
        let failed = Event::VolumeCreateFailed {
            volume: id,
            error: unreachable_error(),
        };
        let (true, Some(content)) = (self.is_alive(server), content) else {
            self.schedule_due(CALL_TIMEOUT_MS, ClusterEvent::ApplyEvent(failed));
            return;
        };
        // No job writes it meanwhile, so its current content is copied.
        self.node(server)
            .volumes
            .entry(id)
            .or_insert((size, source.volume, content));
        let copying_ms = 50 + self.rng.next_below(1_000);
        let is_there = |id| self.nodes[&server].volumes.contains_key(&id);
        let received_bytes = match base.is_some_and(is_there) {
            true => size.bytes / 10,
            false => size.bytes,
        };
        let made = Event::VolumeCopied {
            volume: id,
            received_bytes,
        };
        let event = if self.has_fault(self.faults.reply_lost) {
            failed
        } else {
            made
        };
        self.schedule_due(copying_ms, ClusterEvent::ApplyEvent(event));
    }

    pub(super) fn serve_extract(
        &mut self,
        extract: ExtractionId,
        index: u32,
        source: MountedVolume,
    ) {
        let lost = Event::ExtractFailed {
            extract,
            error: unreachable_error(),
        };
        let content = match self.content(&source) {
            Some(content) => content.clone(),
            None => {
                self.schedule_due(100, ClusterEvent::ApplyEvent(lost));
                return;
            }
        };
        let workflow = self.scheduler.workflow();
        for job in &workflow.volume(source.volume).users {
            let mounts = &workflow.job(*job).mounts;
            let writes = mounts
                .iter()
                .any(|m| m.volume == source.volume && m.writable);
            assert!(
                !writes || content.contains_key(job),
                "extracted before {job:?} wrote"
            );
        }
        let digest = digest_of(content.values().copied());
        if *self.outputs.entry(index).or_insert(digest) != digest {
            self.mismatches += 1;
        }
        if self.extract_attempts.insert(extract, index).is_none() {
            *self.extract_arrivals.entry(index).or_default() += 1;
        }
        self.send_reply(Event::FileExtracted { extract, bytes: 1 }, lost);
    }
}
