//! What users wish of pipelines, in the workflow and while a run goes on: which go first, and which
//! are given up.

use bafs_workflow::JobIndex;

use crate::event::UserCommand;
use crate::state::jobs::JobState;
use crate::state::scheduler_state::State;

impl State {
    /// Wishes that were read so far, understood or not.
    pub fn commands_received(&self) -> u64 {
        self.steering.count
    }

    /// How far behind the user wants a pipeline.
    pub(crate) fn behind(&self, pipeline: u32) -> i32 {
        let priority = self.steering.priority.get(&pipeline);
        priority.map_or(0, |priority| priority.saturating_neg())
    }

    /// Whether the user does not want the rest of a job's pipeline.
    pub(crate) fn is_given_up(&self, job: JobIndex) -> bool {
        let given_up = &self.steering.given_up;
        !given_up.is_empty() && given_up.contains(&self.graph.pipeline(job))
    }

    /// Whether the user holds a pipeline, alone or with all others: none of its jobs starts.
    pub(crate) fn is_pipeline_held(&self, pipeline: u32) -> bool {
        self.steering.is_run_held || self.steering.held.contains(&pipeline)
    }

    /// Whether the user holds the pipeline of a job, alone or with all others.
    pub fn is_held(&self, job: JobIndex) -> bool {
        self.is_pipeline_held(self.graph.pipeline(job))
    }

    /// Whether the user holds all pipelines.
    pub fn is_run_held(&self) -> bool {
        self.steering.is_run_held
    }

    /// What the user, or the workflow, says of the order of a job's pipeline.
    pub fn priority(&self, job: JobIndex) -> i32 {
        let priority = self.steering.priority.get(&self.graph.pipeline(job));
        priority.copied().unwrap_or(0)
    }

    /// Whether jobs wait for nobody but the user, who may release them at any time.
    pub(crate) fn waits_for_user(&self) -> bool {
        self.steering.is_run_held || !self.steering.held.is_empty()
    }

    pub(crate) fn steer(&mut self, count: u64, command: Option<UserCommand>) {
        self.steering.count = self.steering.count.max(count);
        let job = match command {
            None => return,
            Some(UserCommand::SetPriority { job, .. } | UserCommand::Cancel { job }) => Some(job),
            Some(UserCommand::Hold { job } | UserCommand::Release { job }) => job,
        };
        // A journal may be damaged in ways that its checksums do not show.
        if job.is_some_and(|job| job.as_usize() >= self.graph.workflow.jobs.len()) {
            return;
        }
        let pipeline = job.map(|job| self.graph.pipeline(job));
        let members: Vec<JobIndex> = match pipeline {
            Some(pipeline) => self.graph.members(pipeline).collect(),
            None => self.graph.job_indexes().collect(),
        };
        match (command, pipeline) {
            (Some(UserCommand::SetPriority { priority, .. }), Some(pipeline)) => {
                self.steering.priority.insert(pipeline, priority);
                for job in members {
                    if self.queues.contains(job) {
                        self.enqueue(job);
                    }
                }
            }
            (Some(UserCommand::Cancel { .. }), Some(pipeline)) => self.give_up(pipeline, &members),
            (Some(UserCommand::Hold { .. }), _) => self.hold(pipeline, &members),
            (Some(UserCommand::Release { .. }), _) => self.release(pipeline, &members),
            _ => {}
        }
    }

    /// Takes jobs out of the queues: what is not there does not start, and nobody looks for space
    /// for it.
    fn hold(&mut self, pipeline: Option<u32>, members: &[JobIndex]) {
        match pipeline {
            Some(pipeline) if self.graph.is_pipeline_final(pipeline) => return,
            Some(pipeline) => drop(self.steering.held.insert(pipeline)),
            None => self.steering.is_run_held = true,
        }
        for &job in members {
            self.queues.take(job);
        }
        // Others would wait for its end.
        if self
            .protected
            .is_some_and(|protected| self.is_pipeline_held(protected))
        {
            self.protected = None;
            self.queues.wake_all();
        }
    }

    fn release(&mut self, pipeline: Option<u32>, members: &[JobIndex]) {
        match pipeline {
            Some(pipeline) => drop(self.steering.held.remove(&pipeline)),
            None => {
                self.steering.is_run_held = false;
                drop(self.steering.held.take());
            }
        }
        for &job in members {
            if self.graph.state(job) == JobState::Ready {
                self.enqueue(job);
            }
        }
        self.queues.wake_all();
    }

    fn give_up(&mut self, pipeline: u32, members: &[JobIndex]) {
        if self.graph.is_pipeline_final(pipeline) || !self.steering.given_up.insert(pipeline) {
            return;
        }
        let name = &self.graph.workflow.jobs[pipeline as usize].name;
        self.messages.push(format!(
            "the pipeline of job '{name}' is cancelled: its unfinished jobs do not run"
        ));
        for &job in members {
            match self.graph.state(job) {
                // It is given up when its attempt has ended.
                JobState::Active => self.stop(job, None),
                state if !state.is_final() => self.skip(job),
                _ => {}
            }
        }
    }
}
