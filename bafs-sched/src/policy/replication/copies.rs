//! Copies of scratch volumes on other nodes: how they are made, when they take the place of what
//! was lost, and when they go. Whether one is worth its cost says
//! `policy/replication/copy_estimate.rs`.
//!
//! While a newer copy of a volume is made, the older one stays: it spares what was done before it
//! until the newer is complete, and what has not changed since need not cross the network again.

use std::collections::BTreeSet;

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::time::Time;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::action::{Action, MountedVolume};
use crate::state::copies::{Copies, Copy};
use crate::state::copy_costs::CopyCost;
use crate::state::jobs::JobState;
use crate::state::scheduler_state::State;
use crate::state::volumes::{Instance, InstanceState};

impl State {
    /// Whether a volume is being copied, so that nobody may write it.
    pub(crate) fn is_being_copied(&self, volume: VolumeIndex) -> bool {
        let mut copies = self.checkpoints.copies.of(volume).iter();
        copies.any(|copy| self.copy_state(copy) == Some(InstanceState::Copying))
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

    /// A copy is not being made any more: who waited for it may not need the slot that was kept.
    fn end_copying(&mut self, volume: VolumeIndex, id: VolumeId) {
        if let Some(server) = self.checkpoints.copies.end(volume, id) {
            self.queues.wake(server);
        }
    }

    /// When a copy began.
    pub(crate) fn copied_since(&self, volume: VolumeIndex, id: VolumeId) -> Option<Time> {
        let copy = self.checkpoints.copies.get(volume, id);
        copy.map(|copy| copy.since)
    }

    fn copy_state(&self, copy: &Copy) -> Option<InstanceState> {
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

    /// A copy is back with its node. If it has all that the volume has, no other need be made.
    pub(crate) fn add_complete_copy(
        &mut self,
        id: VolumeId,
        volume: VolumeIndex,
        source: MountedVolume,
        writers: Vec<JobIndex>,
    ) {
        if writers == self.done_writers(volume) {
            self.drop_unfinished_copy(volume);
        }
        let copy = Copy {
            id,
            source,
            since: self.now,
            writers,
            base: None,
        };
        let pipeline = self.graph.pipeline_of(volume);
        let server = self.volumes.get(id).and_then(|instance| instance.server);
        self.checkpoints.copies.add_complete(volume, pipeline, copy);
        self.checkpoints.reopen_receipt(volume, server);
    }

    pub(crate) fn copy(&mut self, source: MountedVolume, server: ServerId, base: Option<VolumeId>) {
        let (volume, size) = (source.volume, self.size_of(source.volume));
        let id = VolumeId(self.next_id());
        self.fleet.update(server, |node| {
            node.reserved = node.reserved.saturating_add(size)
        });
        let instance = Instance {
            volume,
            server: Some(server),
            size,
            state: InstanceState::Copying,
            waiters: Vec::new(),
            delete_faults: 0,
            is_kept: false,
        };
        self.volumes.add_copy(id, instance);
        let copy = Copy {
            id,
            source,
            since: self.now,
            writers: self.done_writers(volume),
            base,
        };
        let pipeline = self.graph.pipeline_of(volume);
        self.checkpoints.copies.add(volume, pipeline, copy);
        self.out.push(Action::CopyVolume {
            id,
            source,
            server,
            size,
            base_copy: base,
        });
        self.watch_copy(id);
    }

    fn done_writers(&self, volume: VolumeIndex) -> Vec<JobIndex> {
        let writers = self.graph.volume(volume).writers.iter().copied();
        writers
            .filter(|writer| self.graph.state(*writer) == JobState::Done)
            .collect()
    }

    /// The action that makes a copy, to ask for it once more.
    pub(crate) fn copy_action(&self, id: VolumeId, instance: &Instance) -> Option<Action> {
        let copy = self.checkpoints.copies.get(instance.volume, id)?;
        Some(Action::CopyVolume {
            id,
            source: copy.source,
            server: instance.server?,
            size: instance.size,
            base_copy: copy.base,
        })
    }

    /// A copy is complete, for which so many bytes crossed the network; the older one goes, and
    /// so do copies of what only earlier stages needed.
    pub(crate) fn volume_copied(&mut self, id: VolumeId, received_bytes: u64) {
        let copying = self.volumes.get_mut(id);
        let Some(instance) = copying.filter(|instance| instance.state == InstanceState::Copying)
        else {
            self.delete_late(id);
            return;
        };
        instance.state = InstanceState::Copy;
        let (volume, target) = (instance.volume, instance.server);
        self.end_copying(volume, id);
        let older = self.copies_where(volume, |copy| copy.id != id);
        self.drop_these(volume, &older);
        let is_first = !self.checkpoints.knows_cost();
        if let (Some(copy), Some(to)) = (self.checkpoints.copies.get(volume, id), target)
            && let Some(from) = copy.source.server
        {
            let moved = CopyCost {
                held_bytes: self.held_bytes(volume),
                received_bytes,
                duration_ms: self.now.ms_since(copy.since),
            };
            let is_further = copy.base.is_some();
            self.checkpoints.overdue.forget(to);
            self.checkpoints
                .learn_copy(volume, (from, to), is_further, moved);
            self.checkpoints.note_copied(volume, to, moved);
        }
        self.drop_older_stages(volume);
        self.requeue_users(volume);
        if is_first {
            self.weigh_again();
        }
    }

    /// A copy could not be made; the volume itself is none the worse, and so is an older copy.
    pub(crate) fn copy_failed(&mut self, id: VolumeId) {
        if let Some(volume) = self.volumes.get(id).map(|instance| instance.volume) {
            self.drop_these(volume, &[id]);
        }
    }

    /// Deletes the copies of a volume, if there are any, and lets its writers go on.
    pub(crate) fn drop_copies(&mut self, volume: VolumeIndex) {
        let all = self.copies_where(volume, |_| true);
        self.drop_these(volume, &all);
    }

    /// Deletes what is being copied of a volume that changes now.
    pub(crate) fn drop_unfinished_copy(&mut self, volume: VolumeIndex) {
        let is_unfinished = |copy: &Copy| self.copy_state(copy) == Some(InstanceState::Copying);
        let unfinished = self.copies_where(volume, is_unfinished);
        self.drop_these(volume, &unfinished);
    }

    /// Before a job runs again: copies of a volume with what it or a later job made there go.
    pub(crate) fn drop_copies_since(&mut self, volume: VolumeIndex, job: JobIndex) {
        let is_since = |writer: &JobIndex| self.graph.rank(*writer) >= self.graph.rank(job);
        let since = self.copies_where(volume, |copy| copy.writers.iter().any(is_since));
        self.drop_these(volume, &since);
    }

    fn copies_where(&self, volume: VolumeIndex, goes: impl Fn(&Copy) -> bool) -> Vec<VolumeId> {
        let copies = self.checkpoints.copies.of(volume).iter();
        copies.filter(|copy| goes(copy)).map(|c| c.id).collect()
    }

    fn drop_these(&mut self, volume: VolumeIndex, copies: &[VolumeId]) {
        for id in copies {
            self.retire(*id);
        }
        if !copies.is_empty() {
            self.requeue_users(volume);
        }
    }

    /// Deletes every copy; answers whether there was one.
    pub(crate) fn drop_all_copies(&mut self) -> bool {
        let copies = &self.checkpoints.copies.by_volume;
        let volumes: Vec<VolumeIndex> = copies.keys().copied().collect();
        for &volume in &volumes {
            self.drop_copies(volume);
        }
        !volumes.is_empty()
    }

    /// Deletes copies of volumes of a pipeline in which nothing can have to run again.
    pub(crate) fn drop_copies_of_closed(&mut self, pipeline: u32) {
        if self.graph.is_pipeline_closed(pipeline) {
            for volume in self.checkpoints.copies.of_pipeline(pipeline) {
                self.drop_copies(volume);
            }
        }
    }

    /// A newer stage is safe, so what it was made from need not be.
    fn drop_older_stages(&mut self, newer: VolumeIndex) {
        let Some(pipeline) = self.graph.pipeline_of(newer) else {
            return;
        };
        for volume in self.checkpoints.copies.of_pipeline(pipeline) {
            if volume != newer && self.graph.volume(volume).is_idle() {
                self.drop_copies(volume);
            }
        }
    }

    /// The copy that has what the volume has: complete, and no writer was done since.
    pub(crate) fn good_copy(&self, volume: VolumeIndex) -> Option<VolumeId> {
        let copy = self.complete_copy(volume)?;
        (copy.writers == self.done_writers(volume)).then_some(copy.id)
    }

    /// Puts the copy in the place of a volume that is gone; answers whether there was one.
    pub(crate) fn restore(&mut self, volume: VolumeIndex) -> bool {
        let Some(id) = self.good_copy(volume) else {
            return false;
        };
        let saved_ms = self.redo_ms(volume, &[]);
        let others = self.copies_where(volume, |copy| copy.id != id);
        self.drop_these(volume, &others);
        let pipeline = self.graph.pipeline_of(volume);
        self.checkpoints.copies.remove(volume, pipeline, id);
        self.checkpoints.note_saved(volume, saved_ms);
        self.volumes.promote(id);
        self.send_files(volume);
        self.requeue_users(volume);
        true
    }

    /// Takes note that a volume goes: if it was a copy, so does what was believed of it.
    pub(crate) fn forget_copy(&mut self, id: VolumeId, volume: VolumeIndex) {
        self.end_copying(volume, id);
        let pipeline = self.graph.pipeline_of(volume);
        match self.checkpoints.copies.remove(volume, pipeline, id) {
            Some(true) => self.checkpoints.close_receipt(volume),
            // A newer one that is complete takes its place; one that is being made may never be.
            Some(false) if self.is_being_copied(volume) => {
                self.checkpoints.close_complete(volume);
            }
            _ => {}
        }
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
