//! Attempts that end without success, and finished jobs that run again. Which do says
//! `policy/failure/recovery.rs`.

use bafs_proto::ids::VolumeId;
use bafs_proto::message::JobReport;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::decision::Decision;
use crate::policy::View;
use crate::policy::failure::recovery::{self, Recovery};
use crate::state::jobs::JobState;
use crate::state::scheduler_state::State;

impl State {
    /// Attempts that use a volume.
    pub(crate) fn users_of(&self, id: VolumeId, volume: VolumeIndex) -> Vec<JobIndex> {
        if self.graph.volume(volume).is_cache {
            // It may have as many readers as there are jobs.
            let readers = self.under_way.readers(id);
            self.graph.tally.add(readers.len() as u64);
            return readers;
        }
        let users = &self.graph.workflow.volume(volume).users;
        let uses = |job: &JobIndex| {
            self.attempts
                .get(job)
                .is_some_and(|attempt| attempt.uses(id))
        };
        self.graph
            .tally
            .add(users.len().min(self.attempts.len()) as u64);
        if users.len() <= self.attempts.len() {
            return users.iter().copied().filter(uses).collect();
        }
        let attempts = self.attempts.iter().filter(|(_, attempt)| attempt.uses(id));
        attempts.map(|(job, _)| *job).collect()
    }

    pub(crate) fn stop_users(&mut self, id: VolumeId, volume: VolumeIndex) {
        for job in self.users_of(id, volume) {
            self.stop(job, None);
        }
    }

    /// Ends an attempt that did not succeed. What it may have changed goes, also if finished jobs
    /// wrote there before.
    pub(crate) fn abandon_attempt(&mut self, job: JobIndex) {
        let Some(attempt) = self.end_attempt(job) else {
            return;
        };
        self.leave_if_untouched(job);
        for (volume, _) in self.graph.mounted(job).into_iter().filter(|(_, w)| *w) {
            if let Some(id) = recovery::find_half_written(View::new(self), &attempt, volume) {
                self.retire(id);
            }
        }
    }

    /// Takes note of the volumes that an attempt left as they were.
    pub(crate) fn note_unchanged(&mut self, job: JobIndex, report: &JobReport) {
        let unchanged = recovery::find_unchanged(View::new(self), job, report);
        if let Some(attempt) = self.attempts.get_mut(&job) {
            attempt.unchanged = unchanged;
        }
    }

    /// Before a job runs again: what finished jobs had written for it, and went with an attempt
    /// that failed, comes back from a copy or is written again.
    pub(crate) fn make_inputs_again(&mut self, job: JobIndex) {
        let gone = recovery::find_missing_inputs(View::new(self), job);
        if !gone.is_empty() {
            self.redo(Vec::new(), gone);
        }
    }

    /// Rolls finished jobs back: `jobs` themselves, and the writers of `gone` volumes that are
    /// still needed; then, again and again, the writers of what those read and is gone too. A job
    /// that runs again gets fresh volumes to write, so what it wrote before is dropped.
    pub(crate) fn redo(&mut self, jobs: Vec<JobIndex>, gone: Vec<VolumeIndex>) {
        let mut volumes = gone;
        let mut undone = Vec::new();
        self.undo_all(jobs, &mut volumes, &mut undone);
        while let Some(volume) = volumes.pop() {
            match recovery::find_recovery(View::new(self), volume) {
                Recovery::Unneeded => {}
                Recovery::Restore(copy) => self.commit(Decision::RestoreVolume { volume, copy }),
                Recovery::Redo(writers) => self.undo_all(writers, &mut volumes, &mut undone),
            }
        }
        let mut pipelines: Vec<u32> = undone.iter().map(|job| self.graph.pipeline(*job)).collect();
        pipelines.sort_unstable();
        pipelines.dedup();
        for pipeline in pipelines {
            self.roll_back_pipeline(pipeline);
        }
        for job in undone {
            if self.graph.state(job) == JobState::Waiting {
                self.settle(job, 0);
            }
        }
    }

    /// Those of these jobs that are done are to run again; adds what of their volumes is gone.
    fn undo_all(
        &mut self,
        jobs: Vec<JobIndex>,
        gone: &mut Vec<VolumeIndex>,
        undone: &mut Vec<JobIndex>,
    ) {
        for job in jobs {
            if recovery::may_run_again(View::new(self), job) {
                undone.push(job);
                self.commit(Decision::Redo { job });
                let mounted = self.graph.mounted(job).into_iter();
                let scratch = mounted.filter(|(volume, _)| !self.graph.volume(*volume).is_cache);
                let lost = scratch.filter(|(volume, _)| !self.volumes.is_live(*volume));
                gone.extend(lost.map(|(volume, _)| volume));
            }
        }
    }

    /// A job that was done is to run again: what it wrote goes, and so does what is not as it
    /// found it.
    pub(crate) fn undo(&mut self, job: JobIndex) {
        self.note_undone(job);
        self.forget_record(job);
        self.graph.set_state(job, JobState::Waiting);
        for child in self.graph.waiting_for(job).collect::<Vec<_>>() {
            if matches!(
                self.graph.state(child),
                JobState::Ready | JobState::HeldBack
            ) {
                self.queues.take(child);
                self.graph.set_state(child, JobState::Waiting);
            }
        }
        for (volume, writable) in self.graph.mounted(job) {
            let is_cache = self.graph.volume(volume).is_cache;
            if is_cache || !recovery::is_outdated(View::new(self), volume, job, writable) {
                continue;
            }
            self.drop_copies_since(volume, job);
            if let Some((id, _)) = self.volumes.scratch(volume) {
                self.retire(id);
                self.take_back_extracts(volume, id);
                self.stop_users(id, volume);
            }
        }
    }
}
