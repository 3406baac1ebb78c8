//! What is known of the copies of scratch volumes, for all who ask. Decides nothing.

use std::collections::BTreeSet;

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::time::Time;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::state::copies::{Copies, Copy};
use crate::state::copy_costs::CopyDecision;
use crate::state::jobs::JobState;
use crate::state::scheduler_state::State;
use crate::state::volumes::{Instance, InstanceState};

/// A slot is kept for who waits for a copy that takes this part of a job's time at most, as one
/// over it: longer, another job had better use it.
const SOON_PART: u64 = 4;

impl State {
    /// All decisions about copies, by volume, the latest of each last.
    pub fn copy_decisions(&self) -> impl Iterator<Item = (VolumeIndex, &CopyDecision)> {
        let receipts = self.checkpoints.receipts.iter();
        receipts.flat_map(|(volume, all)| all.iter().map(|receipt| (*volume, receipt)))
    }

    /// The decisions about copies of a volume, the latest last.
    pub fn copy_decisions_of(&self, volume: VolumeIndex) -> &[CopyDecision] {
        let receipts = self.checkpoints.receipts.get(&volume);
        receipts.map_or(&[], Vec::as_slice)
    }

    /// What a volume holds as far as is known, else the most that it may, in bytes.
    pub(crate) fn held_bytes(&self, volume: VolumeIndex) -> u64 {
        let held = self.checkpoints.held.get(&volume).copied();
        let most = self.size_of(volume).bytes;
        held.map_or(most, |held| held.min(most))
    }

    /// Whether a volume is being copied, so that nobody may write it.
    pub(crate) fn is_being_copied(&self, volume: VolumeIndex) -> bool {
        let mut copies = self.checkpoints.copies.of(volume).iter();
        copies.any(|copy| self.copy_state(copy) == Some(InstanceState::Copying))
    }

    /// Whether a job that waits only for a slot or for a copy writes the volume.
    pub(crate) fn is_waited_for(&self, volume: VolumeIndex) -> bool {
        let mut writers = self.graph.volume(volume).writers.iter();
        writers.any(|writer| self.graph.state(*writer) == JobState::Ready)
    }

    /// Slots of a node that are soon needed by jobs that wait for copies of what they go on to
    /// write: a pipeline that begins there meanwhile would keep them waiting for all of its job.
    pub(crate) fn slots_soon_needed(&self, server: ServerId) -> u32 {
        let made = self.checkpoints.copies.made_from(server);
        let waited_for = made.filter(|id| {
            self.volumes.get(*id).is_some_and(|copy| {
                self.is_waited_for(copy.volume) && self.is_soon_copied(copy, server)
            })
        });
        u32::try_from(waited_for.count()).unwrap_or(u32::MAX)
    }

    /// Whether copying takes so little of a job's time that a slot may be idle meanwhile.
    fn is_soon_copied(&self, copy: &Instance, source: ServerId) -> bool {
        let bytes = self.held_bytes(copy.volume);
        let target = copy.server.unwrap_or(source);
        let copy_ms = self.checkpoints.expected_ms((source, target), bytes);
        copy_ms.saturating_mul(SOON_PART) <= self.checkpoints.mean_wall_ms()
    }

    /// When a copy began.
    pub(crate) fn copied_since(&self, volume: VolumeIndex, id: VolumeId) -> Option<Time> {
        let copy = self.checkpoints.copies.get(volume, id);
        copy.map(|copy| copy.since)
    }

    /// Where a copy is in its life.
    pub(crate) fn copy_state(&self, copy: &Copy) -> Option<InstanceState> {
        self.volumes.get(copy.id).map(|instance| instance.state)
    }

    /// The newest complete copy of a volume. It may be older than the volume.
    fn complete_copy(&self, volume: VolumeIndex) -> Option<&Copy> {
        let mut copies = self.checkpoints.copies.of(volume).iter().rev();
        copies.find(|copy| self.copy_state(copy) == Some(InstanceState::Copy))
    }

    /// The newest complete copy of a volume, and where it is.
    pub(crate) fn older_copy(&self, volume: VolumeIndex) -> Option<(VolumeId, &Instance)> {
        let id = self.complete_copy(volume)?.id;
        self.volumes.get(id).map(|instance| (id, instance))
    }

    /// The copy that has what the volume has: complete, and no writer was done since.
    pub(crate) fn good_copy(&self, volume: VolumeIndex) -> Option<VolumeId> {
        let copy = self.complete_copy(volume)?;
        (copy.writers == self.done_writers(volume)).then_some(copy.id)
    }

    /// The copy that has what the volume has, on a node that does not drain.
    pub(crate) fn copy_that_stays(&self, volume: VolumeIndex) -> Option<VolumeId> {
        let id = self.good_copy(volume)?;
        let server = self.volumes.get(id)?.server?;
        (!self.fleet.is_draining(server)).then_some(id)
    }

    /// Finished jobs of whose output in a volume there is a copy.
    pub(crate) fn copied_writers(&self, volume: VolumeIndex) -> &[JobIndex] {
        let copy = self.complete_copy(volume);
        copy.map_or(&[], |copy| &copy.writers)
    }

    /// Finished jobs whose output this copy of a volume has.
    pub(crate) fn writers_of_copy(&self, volume: VolumeIndex, id: VolumeId) -> Vec<JobIndex> {
        let copy = self.checkpoints.copies.get(volume, id);
        copy.map_or_else(Vec::new, |copy| copy.writers.clone())
    }

    /// Writers of a volume that are done.
    pub(crate) fn done_writers(&self, volume: VolumeIndex) -> Vec<JobIndex> {
        let writers = self.graph.volume(volume).writers.iter().copied();
        writers
            .filter(|writer| self.graph.state(*writer) == JobState::Done)
            .collect()
    }

    /// Asserts that the copies that are known are those that exist.
    pub(crate) fn check_copies(&self) {
        let exist = self.volumes.iter().filter(|(_, instance)| {
            matches!(instance.state, InstanceState::Copying | InstanceState::Copy)
        });
        let exist: BTreeSet<_> = exist.map(|(id, i)| (i.volume, id)).collect();
        let Copies {
            by_volume,
            by_pipeline,
            under_way,
        } = &self.checkpoints.copies;
        let made = self.volumes.iter();
        let made = made.filter(|(_, instance)| instance.state == InstanceState::Copying);
        let made: BTreeSet<_> = made.map(|(id, _)| id).collect();
        let known: BTreeSet<_> = under_way.iter().map(|(_, id)| *id).collect();
        assert_eq!(made, known, "copies that are being made");
        let of = |(volume, copies): (&VolumeIndex, &Vec<Copy>)| {
            let volume = *volume;
            let ids: Vec<_> = copies.iter().map(|copy| (volume, copy.id)).collect();
            ids
        };
        let known: BTreeSet<_> = by_volume.iter().flat_map(of).collect();
        assert_eq!(exist, known, "copies");
        assert_eq!(by_volume.len(), by_pipeline.len(), "copies by pipeline");
        for (volume, copies) in by_volume {
            let complete = copies
                .iter()
                .filter(|copy| self.copy_state(copy) == Some(InstanceState::Copy));
            assert!(complete.count() <= 1, "one complete copy of a volume");
            let is_done = |writer: &JobIndex| self.graph.state(*writer) == JobState::Done;
            let mut writers = copies.iter().flat_map(|copy| &copy.writers);
            assert!(
                writers.all(is_done),
                "a copy of {volume:?} has what is undone"
            );
        }
    }
}
