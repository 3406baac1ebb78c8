//! Pipelines that wait for jobs of others: what waits so holds its space until those have found
//! theirs. Knows neither space nor servers.

use bafs_workflow::{JobIndex, VolumeKind, Workflow};

use crate::state::jobs::adjust;

/// Counts of the edges between pipelines whose first job has something left to do.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CrossDependencies {
    /// By pipeline: edges that lead to its jobs.
    into: Vec<u32>,
    /// By pipeline: edges that begin at its jobs.
    out: Vec<u32>,
    /// Whether a pipeline has scratch volumes.
    takes_space: Vec<bool>,
    /// Pipelines with scratch volumes that others wait for.
    awaited: usize,
}

impl CrossDependencies {
    pub(crate) fn new(workflow: &Workflow, pipeline: &[u32]) -> Self {
        let count = pipeline.len();
        let mut cross_dependencies = Self {
            into: vec![0; count],
            out: vec![0; count],
            takes_space: vec![false; count],
            awaited: 0,
        };
        for volume in &workflow.volumes {
            if let (VolumeKind::Scratch { .. }, Some(user)) = (&volume.kind, volume.users.first()) {
                cross_dependencies.takes_space[pipeline[user.as_usize()] as usize] = true;
            }
        }
        for (position, job) in workflow.jobs.iter().enumerate() {
            let job_index = JobIndex(u32::try_from(position).expect("jobs have 32 bits"));
            cross_dependencies.count(job_index, &job.children, pipeline, (false, true));
        }
        cross_dependencies
    }

    /// A job has something left to do, before and after.
    pub(crate) fn count(
        &mut self,
        job: JobIndex,
        children: &[JobIndex],
        pipeline: &[u32],
        (before, after): (bool, bool),
    ) {
        let own = pipeline[job.as_usize()] as usize;
        let was_awaited = self.is_awaited(own as u32);
        for child in children {
            let other = pipeline[child.as_usize()] as usize;
            if other != own {
                adjust(&mut self.into[other], before, after);
                adjust(&mut self.out[own], before, after);
            }
        }
        match (was_awaited, self.is_awaited(own as u32)) {
            (false, true) => self.awaited += 1,
            (true, false) => self.awaited -= 1,
            _ => {}
        }
    }

    /// Whether a pipeline has jobs that wait for those of another.
    pub(crate) fn waits(&self, pipeline: u32) -> bool {
        self.into[pipeline as usize] > 0
    }

    /// Whether a pipeline has scratch volumes, and another waits for it.
    pub(crate) fn is_awaited(&self, pipeline: u32) -> bool {
        self.takes_space[pipeline as usize] && self.out[pipeline as usize] > 0
    }

    /// How many pipelines have scratch volumes and are waited for.
    pub(crate) fn awaited(&self) -> usize {
        self.awaited
    }
}

#[cfg(test)]
mod tests {
    use bafs_workflow::parse_workflow;

    use super::*;

    #[test]
    fn cross_pipeline_dependencies_end_when_jobs_are_done() {
        let text = "job a JOB\njob b JOB\njob c JOB\nparent a child c\nparent b child c\n\
            volume x scratch 1 MB\nvolume y scratch 1 MB\nmount x a /x\nmount y c /y\n";
        let text = text.replace("JOB", "{\n  executable = x\n}");
        let none = |path: &str| Err(path.to_owned());
        let workflow = parse_workflow("w.bafs", &text, &none)
            .expect("right")
            .workflow;
        let pipeline = [0, 1, 2];
        let mut cross_dependencies = CrossDependencies::new(&workflow, &pipeline);
        assert_eq!(
            [0, 1, 2].map(|it| cross_dependencies.waits(it)),
            [false, false, true]
        );
        assert!(cross_dependencies.is_awaited(0), "it has a volume");
        assert!(!cross_dependencies.is_awaited(1) && cross_dependencies.awaited() == 1);
        for job in [0, 1] {
            let children = &workflow.jobs[job as usize].children;
            cross_dependencies.count(JobIndex(job), children, &pipeline, (true, false));
        }
        assert!(!cross_dependencies.waits(2) && cross_dependencies.awaited() == 0);
    }
}
