//! Which ready job goes first towards the end. While there is more to do than the longest chain of
//! jobs takes on all slots, who ends its pipeline first frees its space first. After that each
//! chain that begins late, or was lost with a node, would run alone at the end while other slots
//! have nothing: the longest chains go first (levels of Hu, Operations Research 9, 1961).

use crate::workflow::{JobIndex, VolumeIndex, Workflow};

use super::scheduler::Scheduler;

/// Once the longest chains go first, they do until so many times as much is left as they could take
/// on all slots: each loss of a node adds some.
const MORE_AGAIN: u64 = 2;

/// How long the jobs after each job take, and how much is left in all, in seconds of declared run
/// times; each job counts one where none is declared.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Chains {
    /// Of each job the longest chain that begins with it.
    length: Vec<u32>,
    longest: u32,
    /// Whether the first jobs of all chains have the same before them, which is all.
    is_flat: bool,
    /// What a job counts that declares no run time.
    usual: u32,
    /// What is left, over all slots of jobs that are not final.
    left: u64,
}

impl Chains {
    /// Of a workflow of which nothing is done; `order` has all jobs, parents first.
    pub(super) fn new(workflow: &Workflow, order: &[JobIndex]) -> Self {
        let declared = workflow.jobs.iter().filter_map(|job| job.runtime_s);
        let (sum, count) = declared.fold((0u64, 0u64), |(sum, count), seconds| {
            (sum.saturating_add(seconds), count + 1)
        });
        let usual = sum.checked_div(count).unwrap_or(1);
        let mut chains = Self {
            length: vec![0; workflow.jobs.len()],
            usual: u32::try_from(usual.max(1)).unwrap_or(u32::MAX),
            ..Self::default()
        };
        for &job in order.iter().rev() {
            let children = workflow.job(job).children.iter();
            let after = children.map(|child| chains.length[child.as_usize()]);
            let after = after.max().unwrap_or(0);
            let length = after.saturating_add(chains.takes(workflow, job));
            chains.length[job.as_usize()] = length;
            chains.longest = chains.longest.max(length);
            chains.count(workflow, job, true);
        }
        chains.is_flat = chains.length.iter().all(|it| *it == chains.longest);
        chains
    }

    fn takes(&self, workflow: &Workflow, job: JobIndex) -> u32 {
        let declared = workflow.job(job).runtime_s;
        declared.map_or(self.usual, |seconds| {
            u32::try_from(seconds.max(1)).unwrap_or(u32::MAX)
        })
    }

    fn work(&self, workflow: &Workflow, job: JobIndex) -> u64 {
        let slots = u64::from(workflow.job(job).cpus.max(1));
        slots.saturating_mul(u64::from(self.takes(workflow, job)))
    }

    /// A job is not final any more, or is.
    pub(super) fn count(&mut self, workflow: &Workflow, job: JobIndex, is_left: bool) {
        let work = self.work(workflow, job);
        self.left = match is_left {
            true => self.left.saturating_add(work),
            false => self.left.saturating_sub(work),
        };
    }
}

impl Scheduler {
    /// Takes note of whether the longest chains should go first from now on.
    pub(super) fn heed_chains(&mut self) {
        let chains = &self.graph.chains;
        if chains.is_flat || self.admission.is_some() {
            return;
        }
        let reach = u64::from(chains.longest).saturating_mul(self.fleet.slots);
        let most = match self.are_chains_first {
            true => reach.saturating_mul(MORE_AGAIN),
            false => reach,
        };
        let are_first = chains.left <= most;
        if are_first == self.are_chains_first {
            return;
        }
        self.are_chains_first = are_first;
        for job in self.queues.jobs() {
            self.enqueue(job);
        }
    }

    /// What is left is what jobs that are not final count.
    pub(super) fn check_chains(&self) {
        let (chains, workflow) = (&self.graph.chains, &self.graph.workflow);
        let jobs = self.graph.job_indexes();
        let left = jobs.filter(|job| !self.graph.state(*job).is_final());
        let left: u64 = left.map(|job| chains.work(workflow, job)).sum();
        assert_eq!(chains.left, left, "what is left to do");
        let live = self.fleet.live();
        let slots: u64 = live.map(|(_, node)| u64::from(node.slots())).sum();
        assert_eq!(self.fleet.slots, slots, "slots of live nodes");
    }

    /// How long the chain is for which a job goes before others; zero where its place says less
    /// than that it lacks a cache, or that what others read is to go first.
    pub(super) fn chain_of(&self, job: JobIndex) -> u32 {
        if !self.are_chains_first {
            return 0;
        }
        let has = |volume: VolumeIndex| {
            !self.graph.volume(volume).is_cache
                || (self.volumes.is_live(volume) && self.warming.place_behind(volume) == 0)
        };
        let mut mounted = self.graph.mounted(job).into_iter();
        match mounted.all(|(volume, _)| has(volume)) {
            true => self.graph.chains.length[job.as_usize()],
            false => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workflow::parse_workflow;

    fn chains(text: &str) -> Chains {
        let none = |path: &str| Err(path.to_owned());
        let text = text.replace("JOB", "executable = x\n}\n");
        let workflow = parse_workflow("w.bafs", &text, &none);
        let workflow = workflow.expect("it is right").workflow;
        Chains::new(&workflow, &workflow.topological_order())
    }

    #[test]
    fn a_chain_is_as_long_as_its_longest_way_to_the_end() {
        let chains = chains(
            "job a {\nJOBjob b {\nJOBjob c {\nJOBjob d {\nrequest_cpus = 3\nJOB\
             parent a child b c\nparent c child d\n",
        );
        assert_eq!(chains.length, [3, 1, 2, 1]);
        assert_eq!((chains.left, chains.is_flat), (6, false));
    }

    #[test]
    fn who_declares_no_run_time_counts_as_the_others_on_average() {
        let chains = chains(
            "job a {\nruntime = 10\nJOBjob b {\nruntime = 30\nJOBjob c {\nJOBparent a child c\n",
        );
        assert_eq!(chains.length, [30, 30, 20]);
        assert_eq!((chains.left, chains.usual), (60, 20));
    }

    #[test]
    fn jobs_without_children_that_count_alike_are_in_no_order() {
        assert!(chains("job a {\nJOBjob b {\nJOB").is_flat);
    }
}
