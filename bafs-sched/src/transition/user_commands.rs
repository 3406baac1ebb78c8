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

    pub(crate) fn steer(&mut self, count: u64, command: Option<UserCommand>) {
        self.steering.count = self.steering.count.max(count);
        let (Some(UserCommand::SetPriority { job, .. } | UserCommand::Cancel { job }), jobs) =
            (command, self.graph.workflow.jobs.len())
        else {
            return;
        };
        // A journal may be damaged in ways that its checksums do not show.
        if job.as_usize() >= jobs {
            return;
        }
        let pipeline = self.graph.pipeline(job);
        let members: Vec<JobIndex> = self.graph.members(pipeline).collect();
        match command {
            Some(UserCommand::SetPriority { priority, .. }) => {
                self.steering.priority.insert(pipeline, priority);
                for job in members {
                    if self.queues.contains(job) {
                        self.enqueue(job);
                    }
                }
            }
            Some(UserCommand::Cancel { .. }) => self.give_up(pipeline, &members),
            None => {}
        }
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
