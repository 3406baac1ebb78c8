//! What belongs together in a workflow, and what comes one after the other: computed once from
//! parents and users; nothing here knows sizes.

use super::model::{JobIndex, VolumeKind, Workflow};

impl Workflow {
    /// For each job, the jobs before it on its longest way from a first one.
    pub fn levels(&self) -> Vec<u32> {
        self.levels_in(&self.topological_order())
    }

    /// The same with the jobs in an order, parents first.
    pub fn levels_in(&self, order: &[JobIndex]) -> Vec<u32> {
        let mut levels = vec![0; self.jobs.len()];
        for &job in order {
            let parents = self.job(job).parents.iter();
            let above = parents.map(|parent| levels[parent.as_usize()] + 1).max();
            levels[job.as_usize()] = above.unwrap_or(0);
        }
        levels
    }

    /// For each job the first one of its pipeline: jobs that scratch volumes connect.
    pub fn pipelines(&self) -> Vec<u32> {
        let mut parts = DisjointSets::with_single_jobs(self.jobs.len());
        parts.join_users(self);
        parts.into_firsts()
    }

    /// The same where parents connect too.
    pub fn connected_pipelines(&self) -> Vec<u32> {
        let mut parts = DisjointSets::with_single_jobs(self.jobs.len());
        parts.join_users(self);
        for (job, parents) in self.jobs.iter().map(|job| &job.parents).enumerate() {
            for parent in parents {
                parts.union(job as u32, parent.0);
            }
        }
        parts.into_firsts()
    }
}

/// Disjoint sets of jobs: each job's leader, which is its own when it is the first of a set.
struct DisjointSets(Vec<u32>);

impl DisjointSets {
    fn with_single_jobs(jobs: usize) -> Self {
        Self((0..jobs as u32).collect())
    }

    fn join_users(&mut self, workflow: &Workflow) {
        for volume in &workflow.volumes {
            if matches!(volume.kind, VolumeKind::Scratch { .. }) {
                for pair in volume.users.windows(2) {
                    self.union(pair[0].0, pair[1].0);
                }
            }
        }
    }

    fn find_first(&mut self, mut job: u32) -> u32 {
        let Self(leader) = self;
        while leader[job as usize] != job {
            let up = leader[job as usize];
            leader[job as usize] = leader[up as usize];
            job = up;
        }
        job
    }

    fn union(&mut self, a: u32, b: u32) {
        let (a, b) = (self.find_first(a), self.find_first(b));
        self.0[a.max(b) as usize] = a.min(b);
    }

    fn into_firsts(mut self) -> Vec<u32> {
        let jobs = 0..self.0.len() as u32;
        jobs.map(|job| self.find_first(job)).collect()
    }
}
