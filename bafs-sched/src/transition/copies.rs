//! Copies of scratch volumes on other nodes: how they are made, take the place of what was lost,
//! and go. Whether one is worth its cost, and which go, says `policy/replication/`.

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::message::JobReport;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::action::{Action, MountedVolume};
use crate::decision::Decision;
use crate::policy::View;
use crate::policy::replication::copy_estimate::{CopyVerdict, judge_copy, redo_ms};
use crate::policy::replication::overdue::{OverdueVerdict, copy_timeout_ms, judge_overdue};
use crate::policy::replication::{obsolete_copies, reconsider};
use crate::space::Space;
use crate::state::copies::Copy;
use crate::state::copy_costs::CopyCost;
use crate::state::scheduler_state::State;
use crate::state::timers::Timer;
use crate::state::volumes::{Instance, InstanceState};

impl State {
    /// An instance on a node, whose space is reserved from now on.
    pub(super) fn reserve_instance(
        &mut self,
        volume: VolumeIndex,
        server: ServerId,
        size: Space,
        state: InstanceState,
    ) -> Instance {
        self.fleet.update(server, |node| {
            node.reserved = node.reserved.saturating_add(size)
        });
        Instance {
            volume,
            server: Some(server),
            size,
            state,
            waiters: Vec::new(),
            delete_faults: 0,
            is_kept: false,
        }
    }

    /// A job that wrote a volume is done: a copy of what it holds now may be worth its cost.
    pub(crate) fn consider_copy(&mut self, volume: VolumeIndex) {
        self.drop_unfinished_copy(volume);
        let estimate = match judge_copy(View::new(self), self.policies().replication, volume) {
            CopyVerdict::Unchanged => return,
            CopyVerdict::DropAll => return self.drop_copies(volume),
            CopyVerdict::KeepOlder(estimate) => estimate,
            CopyVerdict::Make(estimate, decision) => {
                self.commit(decision);
                estimate
            }
            CopyVerdict::Drop(estimate) => {
                self.drop_copies(volume);
                estimate
            }
        };
        self.checkpoints.note(volume, estimate);
    }

    /// A server or a volume was lost. Weighs again only where losses are believed to be twice as
    /// frequent as the last time, so that it is seldom, however many nodes fail.
    pub(crate) fn note_loss(&mut self) {
        self.checkpoints.losses += 1;
        if self.checkpoints.has_worsened() {
            self.weigh_again();
        }
    }

    /// Weighs every volume again that has no copy.
    fn weigh_again(&mut self) {
        let policy = self.policies().replication;
        for volume in reconsider::volumes_to_weigh(View::new(self), policy) {
            self.consider_copy(volume);
        }
    }

    /// Takes note of what a job left in the volumes that it may write.
    pub(crate) fn learn_held(&mut self, job: JobIndex, report: &JobReport) {
        for (volume, _) in self.graph.mounted(job).iter().filter(|(_, w)| *w) {
            let name = &self.graph.workflow.volume(*volume).name;
            let used = report.volumes.iter().find(|used| used.name == *name);
            // None of an agent that was not told.
            if let Some(used) = used.filter(|used| used.used_bytes > 0) {
                self.checkpoints.held.insert(*volume, used.used_bytes);
            }
        }
    }

    /// Has a copy made.
    pub(crate) fn begin_copy(
        &mut self,
        source: MountedVolume,
        server: ServerId,
        base: Option<VolumeId>,
    ) {
        let (volume, size) = (source.volume, self.size_of(source.volume));
        let id = VolumeId(self.next_id());
        let instance = self.reserve_instance(volume, server, size, InstanceState::Copying);
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
        if let Some(ms) = copy_timeout_ms(View::new(self), id) {
            self.timers.set(self.now.plus_ms(ms), Timer::Copy(id));
        }
    }

    /// A copy should have been complete long ago.
    pub(crate) fn copy_is_overdue(&mut self, id: VolumeId) {
        match judge_overdue(View::new(self), id) {
            OverdueVerdict::Ended => {}
            OverdueVerdict::Wait(ms) => self.timers.set(self.now.plus_ms(ms), Timer::Copy(id)),
            OverdueVerdict::LetGo => {
                let target = self.volumes.get(id).and_then(|copy| copy.server);
                if let Some(target) = target {
                    *self.checkpoints.overdue.let_go.entry(target).or_default() += 1;
                }
                self.copy_failed(id);
            }
        }
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
        self.drop_others(volume, id);
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
        for older in obsolete_copies::volumes_of_older_stages(View::new(self), volume) {
            self.drop_copies(older);
        }
        self.requeue_users(volume);
        if is_first {
            self.weigh_again();
        }
    }

    /// A copy could not be made; the volume itself is none the worse, and so is an older copy.
    pub(crate) fn copy_failed(&mut self, id: VolumeId) {
        if let Some(volume) = self.volumes.get(id).map(|instance| instance.volume) {
            self.drop_some(volume, vec![id]);
        }
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

    /// Deletes the copies of a volume, if there are any, and lets its writers go on.
    pub(crate) fn drop_copies(&mut self, volume: VolumeIndex) {
        let all = obsolete_copies::all_copies(View::new(self), volume);
        self.drop_some(volume, all);
    }

    /// Deletes what is being copied of a volume that changes now.
    fn drop_unfinished_copy(&mut self, volume: VolumeIndex) {
        let unfinished = obsolete_copies::unfinished_copies(View::new(self), volume);
        self.drop_some(volume, unfinished);
    }

    /// Before a job runs again: copies of a volume with what it or a later job made there go.
    pub(crate) fn drop_copies_since(&mut self, volume: VolumeIndex, job: JobIndex) {
        let since = obsolete_copies::copies_since(View::new(self), volume, job);
        self.drop_some(volume, since);
    }

    fn drop_others(&mut self, volume: VolumeIndex, kept: VolumeId) {
        let others = obsolete_copies::copies_beside(View::new(self), volume, kept);
        self.drop_some(volume, others);
    }

    fn drop_some(&mut self, volume: VolumeIndex, copies: Vec<VolumeId>) {
        if !copies.is_empty() {
            self.commit(Decision::DropCopies { volume, copies });
        }
    }

    /// Deletes copies of a volume, and lets its writers go on.
    pub(crate) fn delete_copies(&mut self, volume: VolumeIndex, copies: &[VolumeId]) {
        for id in copies {
            self.retire(*id);
        }
        self.requeue_users(volume);
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
        for volume in obsolete_copies::volumes_of_closed(View::new(self), pipeline) {
            self.drop_copies(volume);
        }
    }

    /// Puts a copy in the place of a volume that is gone.
    pub(crate) fn restore_volume(&mut self, volume: VolumeIndex, id: VolumeId) {
        let saved_ms = redo_ms(View::new(self), volume, &[]);
        self.drop_others(volume, id);
        let pipeline = self.graph.pipeline_of(volume);
        self.checkpoints.copies.remove(volume, pipeline, id);
        self.checkpoints.note_saved(volume, saved_ms);
        self.volumes.promote(id);
        self.send_files(volume);
        self.requeue_users(volume);
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

    /// A copy is not being made any more: who waited for it may not need the slot that was kept.
    fn end_copying(&mut self, volume: VolumeIndex, id: VolumeId) {
        if let Some(server) = self.checkpoints.copies.end(volume, id) {
            self.queues.wake(server);
        }
    }
}
