//! Copies of volumes between simulated nodes, files that go home, and volumes that end.

use bafs_proto::ids::{ExtractionId, ServerId, VolumeId};
use bafs_proto::{Error, ErrorCode};
use bafs_sched::{Event, MountedVolume, Space};

use super::chaos::digest as digest_of;
use super::{CALL_TIMEOUT_MS, ClusterEvent, ClusterNode, SimulatedCluster, unreachable_error};

impl ClusterNode {
    /// Ends a volume for good, whether or not it is there.
    pub(super) fn end_volume(&mut self, id: VolumeId) {
        self.volumes.remove(&id);
        self.tombstones.insert(id);
    }
}

impl SimulatedCluster {
    /// Refuses to make a volume that ended before. Returns whether it did.
    pub(super) fn refuse_ended(&mut self, id: VolumeId, server: ServerId) -> bool {
        let has_ended = self.nodes[&server].tombstones.contains(&id);
        if has_ended {
            let error = Error::new(ErrorCode::VolumeLost, "it was deleted before");
            let failed = Event::VolumeCreateFailed { volume: id, error };
            self.schedule_due(10, ClusterEvent::ApplyEvent(failed));
        }
        has_ended
    }

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
        if self.refuse_ended(id, server) {
            return;
        }
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

#[cfg(test)]
mod tests {
    use bafs_sched::{Action, Settings};
    use bafs_workflow::VolumeIndex;

    use super::*;
    use crate::simulated_cluster::{Faults, NodeSpec, parse_workflow_text};

    const SIZE: Space = Space {
        bytes: 1_000,
        files: 1,
    };

    /// A node that has one volume, and answers to what it is asked.
    struct OneNodeFixture {
        cluster: SimulatedCluster,
    }

    impl OneNodeFixture {
        const SERVER: ServerId = ServerId(1);
        const SOURCE: VolumeId = VolumeId(1);

        fn new() -> Self {
            let text = "volume v scratch 1 MB files 9\njob a {\nexecutable = x\n}\nmount v a /v\n";
            let node = NodeSpec {
                capacity: Space {
                    bytes: 10_000,
                    files: 10,
                },
                slots: 1,
            };
            let workflow = parse_workflow_text(text);
            let settings = Settings::default();
            let cluster =
                SimulatedCluster::new(1, workflow, settings, vec![node], Faults::default());
            let mut fixture = Self { cluster };
            fixture.create(Self::SOURCE);
            fixture
        }

        /// Serves an action; returns the errors of creations that it refuses.
        fn serve(&mut self, action: Action) -> Vec<ErrorCode> {
            self.cluster.due_events.clear();
            self.cluster.serve_action(action);
            let due = self.cluster.due_events.values();
            let refused = due.filter_map(|due| match due {
                ClusterEvent::ApplyEvent(Event::VolumeCreateFailed { error, .. }) => {
                    Some(error.code)
                }
                _ => None,
            });
            refused.collect()
        }

        fn create(&mut self, id: VolumeId) -> Vec<ErrorCode> {
            self.serve(Action::CreateVolume {
                id,
                volume: VolumeIndex(0),
                server: Self::SERVER,
                size: SIZE,
            })
        }

        fn copy(&mut self, id: VolumeId) -> Vec<ErrorCode> {
            let source = MountedVolume {
                volume: VolumeIndex(0),
                id: Self::SOURCE,
                server: Some(Self::SERVER),
            };
            self.serve(Action::CopyVolume {
                id,
                source,
                server: Self::SERVER,
                size: SIZE,
                base_copy: None,
            })
        }

        fn delete(&mut self, id: VolumeId) {
            let server = Self::SERVER;
            self.serve(Action::DeleteVolume { id, server });
        }

        fn volumes(&self) -> Vec<VolumeId> {
            let node = &self.cluster.nodes[&Self::SERVER];
            node.volumes.keys().copied().collect()
        }
    }

    #[test]
    fn delayed_call_revives_no_deleted_volume() {
        let mut fixture = OneNodeFixture::new();
        let (deleted, never_made) = (VolumeId(2), VolumeId(3));
        assert_eq!(fixture.create(deleted), []);
        fixture.delete(deleted);
        fixture.delete(never_made);
        for id in [deleted, never_made] {
            assert_eq!(fixture.create(id), [ErrorCode::VolumeLost]);
            assert_eq!(fixture.copy(id), [ErrorCode::VolumeLost]);
        }
        assert_eq!(fixture.volumes(), [OneNodeFixture::SOURCE]);
    }

    #[test]
    fn wiped_node_revives_no_former_volume() {
        let mut fixture = OneNodeFixture::new();
        fixture.cluster.faults = Faults {
            node_wiped: 1_000,
            until_ms: 1,
            ..Faults::default()
        };
        fixture.cluster.kill_node(OneNodeFixture::SERVER);
        fixture.cluster.revive_node(OneNodeFixture::SERVER);
        let again = fixture.create(OneNodeFixture::SOURCE);
        assert_eq!(again, [ErrorCode::VolumeLost]);
        assert_eq!(fixture.volumes(), []);
    }
}
