//! Nodes that were given up and come back unharmed: what finished jobs wrote there is used again
//! where nothing has begun in its place, and these jobs do not run again.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_workflow::{JobIndex, VolumeIndex};

use super::action::Action;
use super::attempt::AttemptState;
use super::graph::JobState;
use super::scheduler::{Phase, Scheduler};
use super::space::Space;
use super::timers::Timer;
use super::volumes::{Instance, InstanceState};

/// A volume that was complete when its node was given up, and that no job was writing.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LostVolume {
    volume: VolumeIndex,
    size: Space,
    /// Jobs that were done and whose output it has.
    writers: Vec<JobIndex>,
    /// Whether its node is back and is asked for it.
    is_asked_for: bool,
}

impl LostVolume {
    /// Whether its node is back and has not said yet whether it has it.
    pub(super) fn is_asked_for(&self) -> bool {
        self.is_asked_for
    }
}

impl Scheduler {
    /// Before a volume is forgotten with its node: takes note of it if it can be used again.
    pub(super) fn note_left(&mut self, id: VolumeId) {
        let Some(instance) = self.volumes.get(id) else {
            return;
        };
        let (volume, size) = (instance.volume, instance.size);
        let node = self.graph.volume(volume);
        let is_written = node.writer.is_some_and(|writer| {
            let attempt = self.attempts.get(&writer);
            attempt.is_some_and(|attempt| attempt.stage != AttemptState::Preparing)
        });
        if node.is_cache || is_written || instance.state != InstanceState::Ready {
            return;
        }
        let is_done = |writer: &JobIndex| self.graph.state(*writer) == JobState::Done;
        let writers: Vec<JobIndex> = node.writers.iter().copied().filter(is_done).collect();
        if writers.is_empty() {
            return;
        }
        let is_asked_for = false;
        let left = LostVolume {
            volume,
            size,
            writers,
            is_asked_for,
        };
        self.left.insert(id, left);
    }

    /// A node is back that had been given up: it is asked for what may be used again, and those
    /// wait whose work that would spare. What else it had goes.
    pub(super) fn take_back(&mut self, server: ServerId) {
        let records = self.stale.len() + self.strays.len();
        self.graph.tally.add(records as u64);
        let stale = self.stale.iter().filter(|(_, at)| **at == server);
        let stale: Vec<VolumeId> = stale.map(|(id, _)| *id).collect();
        let (usable, spared) = self.usable(&stale);
        for &id in &stale {
            match usable.contains(&id) {
                true => self.ask_for(id),
                false => {
                    self.left.remove(&id);
                    self.out.push(Action::DeleteVolume { id, server });
                }
            }
        }
        let at = self.now.plus_ms(self.settings.node_timeout_ms);
        for job in spared {
            if self.graph.state(job) == JobState::Ready {
                self.queues.take(job);
                self.graph.set_state(job, JobState::HeldBack);
                self.timers.set(at, Timer::Job(job));
            }
        }
        if !usable.is_empty() {
            let volumes = usable.into_iter().collect();
            self.out.push(Action::FindVolumes { server, volumes });
        }
        // What it still runs has been begun elsewhere, or will be.
        let strays = self.strays.iter().filter(|(_, at)| **at == server);
        let kill = |(&execution, _)| Action::KillJob { execution, server };
        self.out.extend(strays.map(kill));
    }

    fn ask_for(&mut self, id: VolumeId) {
        if let Some(left) = self.left.get_mut(&id) {
            left.is_asked_for = true;
        }
    }

    /// Volumes for which their nodes were asked when these came back, and did not answer yet.
    pub(super) fn asked_for(&self) -> BTreeMap<ServerId, Vec<VolumeId>> {
        let mut asked: BTreeMap<ServerId, Vec<VolumeId>> = BTreeMap::new();
        for (id, _) in self.left.iter().filter(|(_, left)| left.is_asked_for) {
            if let Some(server) = self.stale.get(id).filter(|server| !self.is_lost(**server)) {
                asked.entry(*server).or_default().push(*id);
            }
        }
        asked
    }

    /// A node that is back has these of the volumes for which it was asked.
    pub(super) fn volumes_found(&mut self, server: ServerId, found: &[VolumeId]) {
        let asked = self.asked_for().remove(&server).unwrap_or_default();
        let is_found = |id: &VolumeId| found.contains(id);
        let found: Vec<VolumeId> = asked.iter().copied().filter(is_found).collect();
        let (_, held) = self.usable(&asked);
        let (usable, spared) = self.usable(&found);
        for id in asked {
            let left = self.left.remove(&id);
            match left.filter(|_| usable.contains(&id)) {
                Some(left) => self.use_again_volume(id, server, &left),
                None => self.out.push(Action::DeleteVolume { id, server }),
            }
        }
        self.spare(&spared);
        for job in held {
            if self.graph.state(job) == JobState::HeldBack {
                self.settle(job, 0);
            }
        }
        for id in usable {
            self.settle_taken_back(id);
        }
        self.queues.wake(server);
    }

    fn use_again_volume(&mut self, id: VolumeId, server: ServerId, left: &LostVolume) {
        self.stale.remove(&id);
        let (volume, size) = (left.volume, left.size);
        self.fleet.update(server, |node| {
            node.reserved = node.reserved.saturating_add(size)
        });
        let instance = Instance {
            volume,
            server: Some(server),
            size,
            state: InstanceState::Ready,
            waiters: Vec::new(),
            delete_faults: 0,
            is_kept: false,
        };
        self.volumes.add(id, instance);
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

    /// Which of these volumes can be used again, and which jobs need not run again then: all that a
    /// job wrote is there, or nobody needs it, and nothing has begun in its place.
    fn usable(&self, ids: &[VolumeId]) -> (BTreeSet<VolumeId>, BTreeSet<JobIndex>) {
        if self.phase != Phase::Running {
            return Default::default();
        }
        let mut there: BTreeMap<VolumeIndex, VolumeId> = BTreeMap::new();
        let mut room: BTreeMap<ServerId, Space> = BTreeMap::new();
        for id in ids {
            let (Some(left), Some(&server)) = (self.left.get(id), self.stale.get(id)) else {
                continue;
            };
            let free = self.fleet.available(server);
            let free = room.entry(server).or_insert(free);
            if !self.volumes.is_live(left.volume) && free.can_hold(left.size) {
                *free = free.saturating_sub(left.size);
                there.insert(left.volume, *id);
            }
        }
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
        let is_good = |(volume, id): &(VolumeIndex, VolumeId)| {
            let is_done = |job| self.graph.state(job) == JobState::Done || spared.contains(&job);
            let are_done = self.left[id].writers.iter().all(|job| is_done(*job));
            are_done && self.is_needed_after(*volume, &spared)
        };
        let good = there.into_iter().filter(is_good);
        (good.map(|(_, id)| id).collect(), spared)
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
