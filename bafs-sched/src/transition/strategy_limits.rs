//! How far the limits of a strategy are used up: pipelines that begin, end and are rolled back, and
//! batch volumes that come and go. What the limits let start is `policy/admission/limits.rs`.

use bafs_workflow::{JobIndex, VolumeIndex};

use crate::decision::{Decision, LimitRelaxation};
use crate::policy::View;
use crate::policy::admission::limits::LimitVerdict;
use crate::state::jobs::JobState;
use crate::state::scheduler_state::State;
use crate::state::timers::Timer;

impl State {
    /// Takes note of a batch volume that exists from now on.
    pub(crate) fn note_batch(&mut self, volume: VolumeIndex) {
        if self.graph.is_batch(volume)
            && let Some(limits) = &mut self.limits
        {
            limits.batch.insert(volume);
        }
    }

    /// The first job of a pipeline starts.
    pub(crate) fn begin_pipeline(&mut self, pipeline: u32) {
        let Some(limits) = &mut self.limits else {
            return;
        };
        if std::mem::replace(&mut limits.is_begun[pipeline as usize], true) {
            return;
        }
        limits.under_way += 1;
        limits.begun += 1;
        let is_full = limits.is_full();
        self.graph.set_inside(pipeline, true);
        if is_full {
            self.wake_for_batch();
        }
    }

    /// A job of a pipeline has ended for good.
    pub(crate) fn end_pipeline_if_final(&mut self, pipeline: u32) {
        if self.graph.is_pipeline_final(pipeline) {
            self.unprotected = 0;
            self.preemptions.pipeline_ended(pipeline);
            self.end_claims(pipeline);
            self.pass_probe_on(pipeline);
        }
        let Some(limits) = &mut self.limits else {
            return;
        };
        if limits.is_begun[pipeline as usize] && self.graph.is_pipeline_final(pipeline) {
            self.leave(pipeline);
        }
    }

    fn leave(&mut self, pipeline: u32) {
        let Some(limits) = &mut self.limits else {
            return;
        };
        limits.is_begun[pipeline as usize] = false;
        self.graph.set_inside(pipeline, false);
        limits.under_way -= 1;
        if limits.under_way == 0 {
            limits.begun = 0;
            self.wake_for_batch();
            self.queues.wake_all();
        }
    }

    /// An attempt came to nothing: its pipeline is not under way if it was all that there was, or
    /// it would keep a place that nobody fills.
    pub(crate) fn leave_if_untouched(&mut self, job: JobIndex) {
        let pipeline = self.graph.pipeline(job);
        let Some(limits) = &self.limits else {
            return;
        };
        let has_state = |other: JobIndex| {
            let state = self.graph.state(other);
            other != job && matches!(state, JobState::Done | JobState::Active)
        };
        if limits.is_begun[pipeline as usize] && !self.graph.members(pipeline).any(has_state) {
            self.leave(pipeline);
        }
    }

    /// A pipeline was rolled back: what is left of it goes after the others. It is under way
    /// unless nothing of it is done.
    pub(crate) fn roll_back_pipeline(&mut self, pipeline: u32) {
        let Some(limits) = &mut self.limits else {
            return;
        };
        limits.rounds[pipeline as usize] += 1;
        self.graph.set_rolled_back(pipeline);
        let is_begun = limits.is_begun[pipeline as usize];
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
        if View::new(self).has_batch_room_again() {
            if let Some(limits) = &mut self.limits {
                limits.full_from = None;
            }
            self.queues.wake_all();
        }
    }

    /// Asks the limits whether a job may start now. Batch volumes go that must go first.
    pub(crate) fn admit(&mut self, job: JobIndex) -> bool {
        let going = match View::new(self).check_limits(job) {
            LimitVerdict::Admitted => return true,
            LimitVerdict::Refused => return false,
            LimitVerdict::AfterEviction(going) => Some(going),
            LimitVerdict::NoBatchRoom => None,
        };
        let (level, volumes) = (self.graph.level(job), &self.volumes);
        if let Some(limits) = &mut self.limits {
            limits.batch.retain(|volume| volumes.is_live(*volume));
            if going.is_none() {
                let from = limits.full_from.unwrap_or(level);
                limits.full_from = Some(from.min(level));
            }
        }
        let is_admitted = going.is_some();
        for volume in going.into_iter().flatten() {
            self.commit(Decision::EvictCache { volume });
        }
        is_admitted
    }

    /// Limits that block the workflow give way.
    pub(super) fn apply_relaxation(&mut self, relaxation: LimitRelaxation) {
        self.rules_eased += 1;
        if let Some(limits) = &mut self.limits {
            limits.full_from = None;
        }
        match relaxation {
            LimitRelaxation::ClosePart => {
                if let Some(limits) = &mut self.limits {
                    limits.begun = limits.rules.pipelines_max;
                }
            }
            LimitRelaxation::EvictBatch(volumes) => {
                volumes
                    .into_iter()
                    .for_each(|volume| self.retire_all(volume));
            }
            LimitRelaxation::DropAll => {
                self.limits = None;
                self.requeue_all();
            }
        }
        self.queues.wake_all();
        // No fact need follow that would make anybody look again.
        self.timers.set(self.now.plus_ms(1), Timer::WaitTimeout);
    }
}
