//! Which data of a workload are allocated at once, as rules that a strategy gives the scheduler:
//! how many pipelines may be under way, how many batch volumes exist, and in which order jobs go.
//! Where data lie is `policy/placement/starts.rs`. Rules never make a workflow impossible: when
//! they block it, they give way.

use bafs_workflow::{JobIndex, VolumeIndex};

use crate::state::jobs::JobState;
use crate::state::planned_volumes::Create;
use crate::state::scheduler_state::State;
use crate::state::timers::Timer;

impl State {
    /// How often rules blocked the workflow and gave way.
    pub fn rule_relaxations(&self) -> u64 {
        self.rules_eased
    }

    /// Whether the rules let a job start now. A batch volume that nobody needs now gives way to
    /// one that this job needs.
    pub(crate) fn rules_admit(&mut self, job: JobIndex) -> bool {
        let pipeline = self.graph.pipeline(job);
        let Some(admission) = &self.admission else {
            return true;
        };
        admission.admits(pipeline) && self.make_batch_room(job)
    }

    /// Batch volumes of a job that do not exist.
    fn missing_batch(&self, job: JobIndex) -> Vec<VolumeIndex> {
        let mounts = self.graph.workflow.job(job).mounts.iter();
        let missing = mounts
            .map(|mount| mount.volume)
            .filter(|volume| self.graph.is_batch(*volume) && !self.volumes.is_live(*volume));
        missing.collect()
    }

    fn make_batch_room(&mut self, job: JobIndex) -> bool {
        let missing = self.missing_batch(job);
        let Some(admission) = self.admission.as_mut().filter(|_| !missing.is_empty()) else {
            return true;
        };
        let level = self.graph.level(job);
        if admission.full_from.is_some_and(|from| from <= level) {
            return false;
        }
        let volumes = &self.volumes;
        admission.batch.retain(|volume| volumes.is_live(*volume));
        let existing = admission.batch.len() as u64;
        let most = admission.rules.batch_volumes_max.max(missing.len() as u64);
        let excess = (existing + missing.len() as u64).saturating_sub(most);
        let batch: Vec<VolumeIndex> = admission.batch.iter().copied().collect();
        let may_go = |volume: &VolumeIndex| {
            !missing.contains(volume) && self.may_batch_volume_go(*volume, level)
        };
        let going = batch.into_iter().filter(may_go);
        let going: Vec<VolumeIndex> = going.take(excess as usize).collect();
        if (going.len() as u64) < excess {
            if let Some(admission) = &mut self.admission {
                let from = admission.full_from.unwrap_or(level);
                admission.full_from = Some(from.min(level));
            }
            return false;
        }
        for volume in going {
            self.retire_all(volume);
        }
        true
    }

    /// Whether a batch volume may go so that another one exists for a job of this level: no job
    /// that may start soon, or runs, reads it, and no pipeline that is behind is still to come.
    ///
    /// Pipelines that were rolled back are not waited for: they go after the others, and fetch
    /// again what they need. Of a volume that several levels read, it is not known which are still
    /// to come.
    fn may_batch_volume_go(&self, volume: VolumeIndex, level: u32) -> bool {
        let (node, Some(admission)) = (self.graph.volume(volume), &self.admission) else {
            return true;
        };
        // Pipelines that cannot begin before others have ended need nothing now.
        let (near, to_come) = match admission.is_full() {
            true => (
                node.users_near - node.users_outside,
                node.users_steady - node.steady_outside,
            ),
            false => (node.users_near, node.users_steady),
        };
        let is_behind = |stage: &u32| *stage <= level;
        near == 0 && (to_come == 0 || !admission.stage.get(&volume).is_some_and(is_behind))
    }

    /// Whether batch volumes that the rules let exist beside those that do are still to come: they
    /// need what nobody else does.
    pub(crate) fn awaits_batch(&self) -> bool {
        let Some(admission) = &self.admission else {
            return false;
        };
        let is_live = |volume: &&VolumeIndex| self.volumes.is_live(**volume);
        let live = admission.batch.iter().filter(is_live).count() as u64;
        let is_to_come = |volume: &VolumeIndex| {
            let is_read = self.graph.volume(*volume).users_left > 0;
            is_read && self.graph.is_batch(*volume) && !self.volumes.is_live(*volume)
        };
        live < admission.rules.batch_volumes_max && admission.caches.iter().any(is_to_come)
    }

    /// What the batch volumes that the rules let come yet need at most, in bytes, beside those that
    /// exist and those of `made`.
    pub(crate) fn batch_bytes_to_come(&self, made: &[Create]) -> u64 {
        let Some(admission) = &self.admission else {
            return 0;
        };
        let is_made = |volume: &VolumeIndex| made.iter().any(|(it, ..)| it == volume);
        let exists = |volume: &VolumeIndex| self.volumes.is_live(*volume) || is_made(volume);
        let is_to_come = |volume: &&VolumeIndex| {
            let is_read = self.graph.volume(**volume).users_left > 0;
            is_read && self.graph.is_batch(**volume) && !exists(volume)
        };
        let to_come = admission.caches.iter().filter(is_to_come);
        let mut sizes: Vec<u64> = to_come.map(|volume| self.size_of(*volume).bytes).collect();
        sizes.sort_unstable_by_key(|bytes| std::cmp::Reverse(*bytes));
        let caches = admission.caches.iter();
        let existing = caches.filter(|v| self.graph.is_batch(**v) && exists(v));
        let more = admission.rules.batch_volumes_max;
        let more = more.saturating_sub(existing.count() as u64);
        let largest = sizes
            .iter()
            .take(usize::try_from(more).unwrap_or(usize::MAX));
        largest.fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// Takes note of a batch volume that exists from now on.
    pub(crate) fn note_batch(&mut self, volume: VolumeIndex) {
        if self.graph.is_batch(volume)
            && let Some(admission) = &mut self.admission
        {
            admission.batch.insert(volume);
        }
    }

    /// The first job of a pipeline starts.
    pub(crate) fn begin_pipeline(&mut self, pipeline: u32) {
        let Some(admission) = &mut self.admission else {
            return;
        };
        if std::mem::replace(&mut admission.is_begun[pipeline as usize], true) {
            return;
        }
        admission.under_way += 1;
        admission.begun += 1;
        let is_full = admission.is_full();
        self.graph.set_inside(pipeline, true);
        if is_full {
            self.wake_for_batch();
        }
    }

    /// A job of a pipeline has ended for good.
    pub(crate) fn end_pipeline_if_final(&mut self, pipeline: u32) {
        if self.graph.is_pipeline_final(pipeline) {
            self.unprotected = 0;
            self.ways.pipeline_ended(pipeline);
            self.end_claims(pipeline);
            self.pass_probe_on(pipeline);
        }
        let Some(admission) = &mut self.admission else {
            return;
        };
        if admission.is_begun[pipeline as usize] && self.graph.is_pipeline_final(pipeline) {
            self.leave(pipeline);
        }
    }

    fn leave(&mut self, pipeline: u32) {
        let Some(admission) = &mut self.admission else {
            return;
        };
        admission.is_begun[pipeline as usize] = false;
        self.graph.set_inside(pipeline, false);
        admission.under_way -= 1;
        if admission.under_way == 0 {
            admission.begun = 0;
            self.wake_for_batch();
            self.queues.wake_all();
        }
    }

    /// An attempt came to nothing: its pipeline is not under way if it was all that there was, or
    /// it would keep a place that nobody fills.
    pub(crate) fn leave_if_untouched(&mut self, job: JobIndex) {
        let pipeline = self.graph.pipeline(job);
        let Some(admission) = &self.admission else {
            return;
        };
        let has_state = |other: JobIndex| {
            let state = self.graph.state(other);
            other != job && matches!(state, JobState::Done | JobState::Active)
        };
        if admission.is_begun[pipeline as usize] && !self.graph.members(pipeline).any(has_state) {
            self.leave(pipeline);
        }
    }

    /// A pipeline was rolled back: what is left of it goes after the others. It is under way
    /// unless nothing of it is done.
    pub(crate) fn roll_back_pipeline(&mut self, pipeline: u32) {
        let Some(admission) = &mut self.admission else {
            return;
        };
        admission.rounds[pipeline as usize] += 1;
        self.graph.set_rolled_back(pipeline);
        let is_begun = admission.is_begun[pipeline as usize];
        let has_state =
            |job: JobIndex| matches!(self.graph.state(job), JobState::Done | JobState::Active);
        let has_any = self.graph.members(pipeline).any(has_state);
        match (is_begun, has_any) {
            (true, false) => self.leave(pipeline),
            (false, true) => self.begin_pipeline(pipeline),
            _ => {}
        }
        self.wake_for_batch();
    }

    /// When a batch volume may go now, those who wait for another may go on.
    pub(crate) fn wake_for_batch(&mut self) {
        let Some(admission) = &self.admission else {
            return;
        };
        let Some(level) = admission.full_from else {
            return;
        };
        let is_kept = |volume: &VolumeIndex| {
            self.volumes.is_live(*volume) && !self.may_batch_volume_go(*volume, level)
        };
        if !admission.batch.iter().all(is_kept) {
            if let Some(admission) = &mut self.admission {
                admission.full_from = None;
            }
            self.queues.wake_all();
        }
    }

    /// The rules block the workflow: the part that is under way takes no further pipelines, else
    /// a batch volume goes that is in nobody's use, else the rules. Answers whether that changed
    /// anything.
    pub(crate) fn relax_rules(&mut self) -> bool {
        let Some(admission) = &mut self.admission else {
            return false;
        };
        self.rules_eased += 1;
        admission.full_from = None;
        let live = admission.batch.iter().filter(|v| self.volumes.is_live(**v));
        let live: Vec<VolumeIndex> = live.copied().collect();
        if admission.under_way > 0 && !admission.is_full() && admission.rules.has_sequential_parts {
            // Where volumes lie, fewer pipelines fit than their bytes alone would let.
            if let Some(admission) = &mut self.admission {
                admission.begun = admission.rules.pipelines_max;
            }
        } else if !live.is_empty() && live.len() as u64 >= admission.rules.batch_volumes_max {
            // Nothing is under way, so nobody uses it.
            live.into_iter().for_each(|volume| self.retire_all(volume));
        } else {
            self.admission = None;
            for job in self.graph.job_indexes() {
                if self.graph.state(job) == JobState::Ready && self.queues.contains(job) {
                    self.enqueue(job);
                }
            }
        }
        self.queues.wake_all();
        // No fact need follow that would make anybody look again.
        self.timers.set(self.now.plus_ms(1), Timer::Patience);
        true
    }
}
