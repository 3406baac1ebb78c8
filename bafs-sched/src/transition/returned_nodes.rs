//! Nodes that were given up and are back: they are asked for what may be used again, and that is.
//! What can be used says `policy/failure/returned_nodes.rs`.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_workflow::JobIndex;

use crate::action::Action;
use crate::decision::Decision;
use crate::policy::View;
use crate::policy::failure::returned_nodes::{find_reusable, plan_reuse, source_of_returned_copy};
use crate::state::jobs::JobState;
use crate::state::lost_volumes::{LostVolume, LostVolumeState};
use crate::state::scheduler_state::State;
use crate::state::timers::Timer;
use crate::state::volumes::InstanceState;

impl State {
    /// Before a volume is forgotten with its node: takes note of it if it can be used again.
    pub(crate) fn note_left(&mut self, id: VolumeId) {
        if let Some(left) = find_reusable(View::new(self), id) {
            self.left.insert(id, left);
        }
    }

    /// Before a job runs again: its other outputs are to be deleted. A node that is lost before it
    /// does so, as in a cut of both, may still have them when it is back.
    pub(crate) fn note_undone(&mut self, job: JobIndex) {
        for (volume, writable) in self.graph.mounted(job) {
            if let Some((id, Some(_))) = self.volumes.scratch(volume).filter(|_| writable) {
                self.note_left(id);
            }
        }
    }

    /// A job is done. Of its outputs on lost nodes that an earlier attempt wrote none may be used
    /// beside those of this one.
    pub(crate) fn note_redone(&mut self, job: JobIndex) {
        if !self.left.is_empty() {
            self.redone.insert(job, self.last_id());
        }
    }

    /// A node is back that had been given up: it is asked for what may be used again, and those
    /// wait whose work that would spare. What else it had goes.
    pub(crate) fn take_back(&mut self, server: ServerId) {
        let records = self.stale.len() + self.orphaned_executions.len();
        self.graph.tally.add(records as u64);
        let stale = self.stale.iter().filter(|(_, at)| **at == server);
        let stale: Vec<VolumeId> = stale.map(|(id, _)| *id).collect();
        let plan = plan_reuse(View::new(self), |_| true);
        let mut volumes = Vec::new();
        for id in stale {
            match self.left.get_mut(&id).filter(|left| plan.uses(id, left)) {
                Some(left) => {
                    left.state = LostVolumeState::Requested;
                    volumes.push(id);
                }
                None => self.discard_left(id, server),
            }
        }
        self.hold_back(&plan.spared);
        if !volumes.is_empty() {
            self.out.push(Action::FindVolumes { server, volumes });
        }
        // What it still runs has been begun elsewhere, or will be.
        let orphaned_executions = self
            .orphaned_executions
            .iter()
            .filter(|(_, at)| **at == server);
        let kill = |(&execution, _)| Action::KillJob { execution, server };
        self.out.extend(orphaned_executions.map(kill));
    }

    /// A volume that a node has is of no use.
    fn discard_left(&mut self, id: VolumeId, server: ServerId) {
        self.left.remove(&id);
        self.out.push(Action::DeleteVolume { id, server });
    }

    /// Jobs that need not run again if their outputs are there wait until that is known.
    fn hold_back(&mut self, jobs: &BTreeSet<JobIndex>) {
        let at = self.now.plus_ms(self.settings.node_timeout_ms);
        for &job in jobs {
            if self.graph.state(job) == JobState::Ready {
                self.queues.take(job);
                self.graph.set_state(job, JobState::HeldBack);
                self.timers.set(at, Timer::Job(job));
            }
        }
    }

    /// Volumes for which their nodes were asked when these came back, and did not answer yet.
    pub(crate) fn asked_for(&self) -> BTreeMap<ServerId, Vec<VolumeId>> {
        let mut asked: BTreeMap<ServerId, Vec<VolumeId>> = BTreeMap::new();
        let is_asked_for = |left: &LostVolume| left.state == LostVolumeState::Requested;
        for (id, _) in self.left.iter().filter(|(_, left)| is_asked_for(left)) {
            if let Some(server) = self.stale.get(id).filter(|server| !self.is_lost(**server)) {
                asked.entry(*server).or_default().push(*id);
            }
        }
        asked
    }

    /// A node that is back has these of the volumes for which it was asked.
    pub(crate) fn volumes_found(&mut self, server: ServerId, found: &[VolumeId]) {
        let asked = self.asked_for().remove(&server).unwrap_or_default();
        let held = plan_reuse(View::new(self), |_| true).spared;
        for id in asked {
            match self.left.get_mut(&id).filter(|_| found.contains(&id)) {
                Some(left) => left.state = LostVolumeState::Found,
                None => self.discard_left(id, server),
            }
        }
        self.reuse_found(&held);
        self.queues.wake(server);
    }

    /// A node is lost, maybe once more: it is to say again what it has. What others have may be of
    /// no use without that, or spare work that is to be done again now.
    pub(crate) fn forget_found(&mut self, server: ServerId) {
        if !self.left.values().any(LostVolume::is_awaited) {
            return;
        }
        let stale = &self.stale;
        let left = self.left.iter_mut();
        for (_, left) in left.filter(|(id, _)| stale.get(id) == Some(&server)) {
            left.state = LostVolumeState::NodeLost;
        }
        self.reuse_found(&BTreeSet::new());
        let plan = plan_reuse(View::new(self), |_| true);
        self.hold_back(&plan.spared);
    }

    /// Uses what nodes have said that they have, as far as no other node need say more for that,
    /// and deletes what is of no use. Those of the `held` jobs that are not spared run.
    fn reuse_found(&mut self, held: &BTreeSet<JobIndex>) {
        let is_found = |left: &LostVolume| left.state == LostVolumeState::Found;
        let plan = plan_reuse(View::new(self), is_found);
        let possible = plan_reuse(View::new(self), |_| true);
        let found = self.left.iter().filter(|(_, left)| is_found(left));
        let found = found.filter_map(|(id, _)| Some((*id, *self.stale.get(id)?)));
        for (volume, node) in found.collect::<Vec<_>>() {
            let Some(left) = self.left.get(&volume) else {
                continue;
            };
            if plan.volumes.get(&left.volume) == Some(&volume) {
                let is_copy = false;
                self.commit(Decision::ReuseVolume {
                    volume,
                    node,
                    is_copy,
                });
            } else if !plan.uses(volume, left) && !possible.uses(volume, left) {
                self.discard_left(volume, node);
            }
        }
        if !plan.spared.is_empty() {
            let jobs = plan.spared.iter().copied().collect();
            self.commit(Decision::SkipRedo { jobs });
        }
        for &volume in &plan.copies {
            if let Some(&node) = self.stale.get(&volume) {
                let is_copy = true;
                self.commit(Decision::ReuseVolume {
                    volume,
                    node,
                    is_copy,
                });
            }
        }
        for &job in held.difference(&possible.spared) {
            if self.graph.state(job) == JobState::HeldBack {
                self.settle(job, 0);
            }
        }
        for &id in plan.volumes.values() {
            self.settle_reused(id);
        }
    }

    /// A volume that a node has takes its place again.
    pub(crate) fn reuse_volume(&mut self, id: VolumeId, server: ServerId, is_copy: bool) {
        let Some(left) = self.left.remove(&id) else {
            return;
        };
        if !is_copy {
            return self.add_returned(id, server, &left, InstanceState::Ready);
        }
        // What was spared may have ended its use.
        match source_of_returned_copy(View::new(self), &left, server) {
            Some(source) => {
                self.add_returned(id, server, &left, InstanceState::Copy);
                self.add_complete_copy(id, left.volume, source, left.writers);
            }
            None => self.out.push(Action::DeleteVolume { id, server }),
        }
    }

    fn add_returned(
        &mut self,
        id: VolumeId,
        server: ServerId,
        left: &LostVolume,
        state: InstanceState,
    ) {
        self.stale.remove(&id);
        let (volume, size) = (left.volume, left.size);
        let instance = self.reserve_instance(volume, server, size, state);
        match state {
            InstanceState::Copy => self.volumes.add_copy(id, instance),
            _ => self.volumes.add(id, instance),
        }
    }

    /// These jobs need not run again.
    pub(crate) fn skip_redo(&mut self, jobs: &[JobIndex]) {
        for &job in jobs {
            self.queues.take(job);
            self.graph.set_state(job, JobState::Done);
        }
        for &job in jobs {
            for child in self.graph.waiting_for(job).collect::<Vec<_>>() {
                if self.graph.state(child) == JobState::Waiting {
                    self.settle(child, 0);
                }
            }
            for (volume, _) in self.graph.mounted(job) {
                self.release_if_unneeded(volume);
            }
        }
        for job in jobs {
            let pipeline = self.graph.pipeline(*job);
            self.begin_pipeline(pipeline);
            self.release_kept(pipeline);
            self.end_pipeline_if_final(pipeline);
        }
        self.wake_for_batch();
        self.unprotect_if_done();
    }

    fn settle_reused(&mut self, id: VolumeId) {
        let Some(volume) = self.volumes.get(id).map(|instance| instance.volume) else {
            return;
        };
        self.send_files(volume);
        self.requeue_users(volume);
        self.release_if_unneeded(volume);
    }
}
