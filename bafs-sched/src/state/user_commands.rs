//! What users wish of pipelines, in the workflow and while a run goes on: which go first, and which
//! are given up.

use std::collections::{BTreeMap, BTreeSet};

use bafs_workflow::JobIndex;

use crate::event::UserCommand;
use crate::state::jobs::{Graph, JobState};
use crate::state::scheduler_state::State;

/// All wishes so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Steering {
    count: u64,
    priority: BTreeMap<u32, i32>,
    given_up: BTreeSet<u32>,
}

impl Steering {
    /// What the workflow itself says.
    pub(crate) fn new(graph: &Graph) -> Self {
        let mut priority: BTreeMap<u32, i32> = BTreeMap::new();
        for job in graph.job_indexes() {
            let own = graph.workflow.job(job).priority;
            // Of pipelines where no job has one there may be a million.
            if own > 0 {
                let highest = priority.entry(graph.pipeline(job)).or_default();
                *highest = own.max(*highest);
            } else if own < 0 && graph.pipeline(job) == job.0 {
                let jobs = graph.members(job.0);
                let jobs = jobs.map(|job| graph.workflow.job(job).priority);
                priority.extend(jobs.max().map(|highest| (job.0, highest)));
            }
        }
        Self {
            priority,
            ..Self::default()
        }
    }
}

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

    pub(crate) fn steer(&mut self, count: u64, wish: Option<UserCommand>) {
        self.steering.count = self.steering.count.max(count);
        let (Some(UserCommand::SetPriority { job, .. } | UserCommand::Cancel { job }), jobs) =
            (wish, self.graph.workflow.jobs.len())
        else {
            return;
        };
        // A journal may be damaged in ways that its checksums do not show.
        if job.as_usize() >= jobs {
            return;
        }
        let pipeline = self.graph.pipeline(job);
        let members: Vec<JobIndex> = self.graph.members(pipeline).collect();
        match wish {
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
