//! Nodes that were given up and come back unharmed: what finished jobs wrote there is used again
//! where nothing has begun in its place, and these jobs do not run again. So are copies. What nodes
//! have that are back together counts together.

use crate::state::lost_volumes::LostVolumeState;
use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::action::{Action, MountedVolume};
use crate::space::Space;
use crate::state::attempts::AttemptState;
use crate::state::jobs::JobState;
use crate::state::lost_volumes::LostVolume;
use crate::state::scheduler_state::{Phase, State};
use crate::state::timers::Timer;
use crate::state::volumes::{Instance, InstanceState};

/// What can be used again of all that nodes have that are back.
#[derive(Debug, Default)]
struct ReusePlan {
    volumes: BTreeMap<VolumeIndex, VolumeId>,
    copies: BTreeSet<VolumeId>,
    /// Jobs that need not run again then.
    spared: BTreeSet<JobIndex>,
}

impl ReusePlan {
    fn uses(&self, id: VolumeId, left: &LostVolume) -> bool {
        self.volumes.get(&left.volume) == Some(&id) || self.copies.contains(&id)
    }
}

impl State {
    /// Before a volume is forgotten with its node: takes note of it if it can be used again.
    pub(crate) fn note_left(&mut self, id: VolumeId) {
        let Some(instance) = self.volumes.get(id) else {
            return;
        };
        let (volume, size) = (instance.volume, instance.size);
        let node = self.graph.volume(volume);
        let is_written = node.writer.is_some_and(|writer| {
            let attempt = self.attempts.get(&writer);
            attempt.is_some_and(|attempt| attempt.stage != AttemptState::Preparing)
        });
        let is_done = |writer: &JobIndex| self.graph.state(*writer) == JobState::Done;
        let is_copy = instance.state == InstanceState::Copy;
        let writers: Vec<JobIndex> = match instance.state {
            InstanceState::Copy => self.writers_of_copy(volume, id),
            InstanceState::Ready if !node.is_cache && !is_written => {
                node.writers.iter().copied().filter(is_done).collect()
            }
            _ => return,
        };
        if writers.is_empty() {
            return;
        }
        let left = LostVolume {
            volume,
            size,
            writers,
            is_copy,
            noted_at: self.last_id(),
            state: LostVolumeState::NodeLost,
        };
        self.left.insert(id, left);
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
        let records = self.stale.len() + self.strays.len();
        self.graph.tally.add(records as u64);
        let stale = self.stale.iter().filter(|(_, at)| **at == server);
        let stale: Vec<VolumeId> = stale.map(|(id, _)| *id).collect();
        let plan = self.plan_reuse(|_| true);
        let mut volumes = Vec::new();
        for id in stale {
            match self.left.get_mut(&id).filter(|left| plan.uses(id, left)) {
                Some(left) => {
                    left.state = LostVolumeState::Requested;
                    volumes.push(id);
                }
                None => {
                    self.left.remove(&id);
                    self.out.push(Action::DeleteVolume { id, server });
                }
            }
        }
        self.hold_back(&plan.spared);
        if !volumes.is_empty() {
            self.out.push(Action::FindVolumes { server, volumes });
        }
        // What it still runs has been begun elsewhere, or will be.
        let strays = self.strays.iter().filter(|(_, at)| **at == server);
        let kill = |(&execution, _)| Action::KillJob { execution, server };
        self.out.extend(strays.map(kill));
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
        let held = self.plan_reuse(|_| true).spared;
        for id in asked {
            match self.left.get_mut(&id).filter(|_| found.contains(&id)) {
                Some(left) => left.state = LostVolumeState::Found,
                None => {
                    self.left.remove(&id);
                    self.out.push(Action::DeleteVolume { id, server });
                }
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
        let plan = self.plan_reuse(|_| true);
        self.hold_back(&plan.spared);
    }

    /// Uses what nodes have said that they have, as far as no other node need say more for that,
    /// and deletes what is of no use. Those of the `held` jobs that are not spared run.
    fn reuse_found(&mut self, held: &BTreeSet<JobIndex>) {
        let is_found = |left: &LostVolume| left.state == LostVolumeState::Found;
        let plan = self.plan_reuse(is_found);
        let possible = self.plan_reuse(|_| true);
        let found = self.left.iter().filter(|(_, left)| is_found(left));
        let found = found.filter_map(|(id, _)| Some((*id, *self.stale.get(id)?)));
        for (id, server) in found.collect::<Vec<_>>() {
            let Some(left) = self.left.get(&id).cloned() else {
                continue;
            };
            if plan.volumes.get(&left.volume) == Some(&id) {
                self.left.remove(&id);
                self.reuse_volume(id, server, &left, InstanceState::Ready);
            } else if !plan.uses(id, &left) && !possible.uses(id, &left) {
                self.left.remove(&id);
                self.out.push(Action::DeleteVolume { id, server });
            }
        }
        self.spare(&plan.spared);
        for &id in &plan.copies {
            self.use_again_copy(id);
        }
        for &job in held.difference(&possible.spared) {
            if self.graph.state(job) == JobState::HeldBack {
                self.settle(job, 0);
            }
        }
        for &id in plan.volumes.values() {
            self.settle_taken_back(id);
        }
    }

    fn use_again_copy(&mut self, id: VolumeId) {
        let Some((left, server)) = self.left.remove(&id).zip(self.stale.get(&id).copied()) else {
            return;
        };
        // What was spared may have ended its use.
        match self.source_of_copy(&left, server, &ReusePlan::default()) {
            Some(source) => {
                self.reuse_volume(id, server, &left, InstanceState::Copy);
                self.add_complete_copy(id, left.volume, source, left.writers);
            }
            None => self.out.push(Action::DeleteVolume { id, server }),
        }
    }

    fn reuse_volume(
        &mut self,
        id: VolumeId,
        server: ServerId,
        left: &LostVolume,
        state: InstanceState,
    ) {
        self.stale.remove(&id);
        let (volume, size) = (left.volume, left.size);
        self.fleet.update(server, |node| {
            node.reserved = node.reserved.saturating_add(size)
        });
        let instance = Instance {
            volume,
            server: Some(server),
            size,
            state,
            waiters: Vec::new(),
            delete_faults: 0,
            is_kept: false,
        };
        match state {
            InstanceState::Copy => self.volumes.add_copy(id, instance),
            _ => self.volumes.add(id, instance),
        }
    }

    /// These jobs need not run again.
    fn spare(&mut self, jobs: &BTreeSet<JobIndex>) {
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
        if !jobs.is_empty() {
            self.wake_for_batch();
            self.unprotect_if_done();
        }
    }

    fn settle_taken_back(&mut self, id: VolumeId) {
        let Some(volume) = self.volumes.get(id).map(|instance| instance.volume) else {
            return;
        };
        self.send_files(volume);
        self.requeue_users(volume);
        self.release_if_unneeded(volume);
    }

    /// What can be used again, and which jobs need not run again then: all that a job wrote is
    /// there, or nobody needs it, and nothing has begun in its place. All counts that nodes may
    /// have that are not lost, as far as `is_certain` says so.
    fn plan_reuse(&self, is_certain: impl Fn(&LostVolume) -> bool) -> ReusePlan {
        if self.phase != Phase::Running || self.left.is_empty() {
            return ReusePlan::default();
        }
        let (mut there, copies) = self.returned_volumes();
        there.retain(|_, id| is_certain(&self.left[id]));
        let writers = there.values().flat_map(|id| self.left[id].writers.iter());
        let mut spared = self.with_parents(writers.copied().collect());
        loop {
            let is_whole = |job: &JobIndex| {
                let mounted = self.graph.mounted(*job).into_iter();
                let mut written = mounted.filter(|(_, writable)| *writable);
                written.all(|(volume, _)| self.has_output(*job, volume, &there, &spared))
            };
            let whole: BTreeSet<JobIndex> = spared.iter().copied().filter(is_whole).collect();
            if whole.len() == spared.len() {
                break;
            }
            spared = whole;
        }
        let is_good = |volume: &VolumeIndex, id: &mut VolumeId| {
            let is_done = |job| self.graph.state(job) == JobState::Done || spared.contains(&job);
            let are_done = self.left[id].writers.iter().all(|job| is_done(*job));
            are_done && self.is_needed_after(*volume, &spared)
        };
        there.retain(is_good);
        let mut plan = ReusePlan {
            volumes: there,
            copies: BTreeSet::new(),
            spared,
        };
        let is_useful = |(id, server): &(VolumeId, ServerId)| {
            let left = &self.left[id];
            is_certain(left) && self.source_of_copy(left, *server, &plan).is_some()
        };
        plan.copies = copies.filter(is_useful).map(|(id, _)| id).collect();
        plan
    }

    /// What nodes that are not lost may have: of each volume that is gone the newest, a copy only
    /// if there is nothing else; and copies of others, one of each.
    fn returned_volumes(
        &self,
    ) -> (
        BTreeMap<VolumeIndex, VolumeId>,
        impl Iterator<Item = (VolumeId, ServerId)> + use<>,
    ) {
        let mut room: BTreeMap<ServerId, Space> = BTreeMap::new();
        let mut there: BTreeMap<VolumeIndex, VolumeId> = BTreeMap::new();
        let mut copies: BTreeMap<VolumeIndex, (VolumeId, ServerId)> = BTreeMap::new();
        self.graph.tally.add(self.left.len() as u64);
        let originals = self.left.iter().rev().filter(|(_, left)| !left.is_copy);
        let copied = self.left.iter().rev().filter(|(_, left)| left.is_copy);
        for (id, left) in originals.chain(copied) {
            let server = self.stale.get(id).filter(|server| !self.is_lost(**server));
            let Some(&server) = server.filter(|_| !self.is_superseded(left)) else {
                continue;
            };
            let is_there = self.volumes.is_live(left.volume) || there.contains_key(&left.volume);
            let is_known = is_there && (!left.is_copy || copies.contains_key(&left.volume));
            let free = self.fleet.available(server);
            let free = room.entry(server).or_insert(free);
            if is_known || !free.can_hold(left.size) {
                continue;
            }
            *free = free.saturating_sub(left.size);
            match is_there {
                true => drop(copies.insert(left.volume, (*id, server))),
                false => drop(there.insert(left.volume, *id)),
            }
        }
        (there, copies.into_values())
    }

    /// Whether a job whose output a volume has ran again since, and was done.
    fn is_superseded(&self, left: &LostVolume) -> bool {
        let is_redone = |job| self.redone.get(job).is_some_and(|at| *at > left.noted_at);
        left.writers.iter().any(is_redone)
    }

    /// The volume of which a copy that is back spares work if it is lost: one that somebody needs,
    /// on another node, without another copy.
    fn source_of_copy(
        &self,
        left: &LostVolume,
        server: ServerId,
        plan: &ReusePlan,
    ) -> Option<MountedVolume> {
        let volume = left.volume;
        let is_done =
            |job: &JobIndex| self.graph.state(*job) == JobState::Done || plan.spared.contains(job);
        let is_left =
            |job: &JobIndex| !self.graph.state(*job).is_final() && !plan.spared.contains(job);
        let mut users = self.graph.workflow.volume(volume).users.iter();
        let is_useful = left.writers.iter().all(is_done)
            && users.any(is_left)
            && self.older_copy(volume).is_none();
        let ready = self.volumes.scratch(volume).filter(|(id, _)| {
            let instance = self.volumes.get(*id);
            instance.is_some_and(|instance| instance.state == InstanceState::Ready)
        });
        let planned = plan.volumes.get(&volume);
        let planned = planned.map(|id| (*id, self.stale.get(id).copied()));
        let (id, at) = ready.or(planned).filter(|_| is_useful)?;
        let source = MountedVolume {
            volume,
            id,
            server: at,
        };
        at.filter(|at| *at != server).map(|_| source)
    }

    /// Those of these jobs, all of which were done, that are to run again, and with them those
    /// before them: these were done, too.
    fn with_parents(&self, mut open: Vec<JobIndex>) -> BTreeSet<JobIndex> {
        let mut all = BTreeSet::new();
        while let Some(job) = open.pop() {
            if self.is_to_run_again(job) && all.insert(job) {
                open.extend(&self.graph.workflow.job(job).parents);
            }
        }
        all
    }

    fn is_to_run_again(&self, job: JobIndex) -> bool {
        matches!(
            self.graph.state(job),
            JobState::Waiting | JobState::Ready | JobState::HeldBack
        )
    }

    /// Whether what a job wrote into a volume is in the one that is back, or nobody needs it.
    fn has_output(
        &self,
        job: JobIndex,
        volume: VolumeIndex,
        there: &BTreeMap<VolumeIndex, VolumeId>,
        spared: &BTreeSet<JobIndex>,
    ) -> bool {
        let is_done =
            |job: &JobIndex| self.graph.state(*job) == JobState::Done || spared.contains(job);
        match there.get(&volume).map(|id| &self.left[id].writers) {
            Some(writers) => writers.contains(&job) && writers.iter().all(is_done),
            None => !self.is_needed_after(volume, spared) && !self.volumes.is_live(volume),
        }
    }

    /// Whether somebody needs a volume once these jobs are done.
    fn is_needed_after(&self, volume: VolumeIndex, spared: &BTreeSet<JobIndex>) -> bool {
        let is_left = |job: &JobIndex| !self.graph.state(*job).is_final() && !spared.contains(job);
        let mut users = self.graph.workflow.volume(volume).users.iter();
        self.graph.volume(volume).extracts_left > 0 || users.any(is_left)
    }
}
