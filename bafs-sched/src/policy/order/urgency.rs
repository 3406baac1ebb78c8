//! Which ready job goes first towards the end. While there is more to do than the chain of jobs
//! after a job takes, on all slots, it can wait: who ends its pipeline first frees its space first.
//! After that the job is urgent: a chain that begins late, or was lost with a node, would run alone
//! at the end while other slots have nothing (levels of Hu, Operations Research 9, 1961).

use bafs_workflow::{JobIndex, VolumeIndex};

use crate::decision::Decision;
use crate::policy::View;
use crate::state::critical_path::NONE;

impl View<'_> {
    /// How long the chain of a job must be that is urgent, where that has changed.
    pub(crate) fn prioritise_critical_path(&self) -> Option<Decision> {
        let chains = &self.graph.chains;
        if chains.is_flat || self.urgency.is_over {
            return None;
        }
        let from = chains.urgent_from(self.fleet.slots);
        (from != self.urgency.from).then_some(Decision::PrioritiseChains {
            from,
            is_final: false,
        })
    }

    /// Nothing goes on: from now on no job is urgent, where some were. The job with the longest
    /// chain may fit nowhere while others do.
    pub(crate) fn end_urgency(&self) -> Option<Decision> {
        (self.urgency.from != NONE).then_some(Decision::PrioritiseChains {
            from: NONE,
            is_final: true,
        })
    }

    /// How long the chain of a job is that is urgent, or half as long as one that is: it soon will
    /// be. Zero for others, and where it says less than that the job lacks what others read too, or
    /// that other readers are to go first.
    pub(crate) fn urgent_chain(&self, job: JobIndex) -> u32 {
        let length = self.graph.chains.length[job.as_usize()];
        if self.urgency.from == NONE || length < self.urgency.from / 2 {
            return 0;
        }
        let has = |volume: VolumeIndex| {
            !self.graph.is_batch(volume)
                || (self.volumes.is_live(volume) && self.prefetching.place_behind(volume) == 0)
        };
        let mut mounted = self.graph.mounted(job).into_iter();
        match mounted.all(|(volume, _)| has(volume)) {
            true => length,
            false => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::state::critical_path::{Chains, NONE, rounded};
    use bafs_workflow::parse_workflow;

    fn chains(text: &str) -> Chains {
        let none = |path: &str| Err(path.to_owned());
        let text = text.replace("JOB", "executable = x\n}\n");
        let workflow = parse_workflow("w.bafs", &text, &none);
        let workflow = workflow.expect("it is right").workflow;
        Chains::new(&workflow, &workflow.topological_order())
    }

    #[test]
    fn path_length_counts_the_longest_descendant_chain() {
        let chains = chains(
            "job a {\nJOBjob b {\nJOBjob c {\nJOBjob d {\nrequest_cpus = 3\nJOB\
             parent a child b c\nparent c child d\n",
        );
        assert_eq!(chains.length, [3, 1, 2, 1]);
        assert_eq!((chains.left, chains.is_flat), (6, false));
    }

    #[test]
    fn undeclared_run_times_count_as_the_average() {
        let chains = chains(
            "job a {\nruntime = 10\nJOBjob b {\nruntime = 30\nJOBjob c {\nJOBparent a child c\n",
        );
        assert_eq!(chains.length, [30, 30, 20]);
        assert_eq!((chains.left, chains.usual), (60, 20));
    }

    #[test]
    fn path_as_long_as_remaining_work_is_critical() {
        let text = "job a {\nJOBjob b {\nJOBjob c {\nJOBparent a child b\nparent b child c\n";
        let chains = chains(text);
        assert_eq!(chains.urgent_from(1), 3, "three jobs are left");
        assert_eq!(chains.urgent_from(2), 2);
        assert_eq!(chains.urgent_from(9), 1);
        assert_eq!(chains.urgent_from(0), NONE);
    }

    #[test]
    fn similar_path_lengths_count_as_equal() {
        let lengths = [0, 3, 15, 16, 17, 18, 3_601, 3_670, u32::MAX].map(rounded);
        assert_eq!(lengths, [0, 3, 15, 16, 16, 18, 3_584, 3_584, 15 << 28]);
    }

    #[test]
    fn equal_independent_jobs_have_no_order() {
        assert!(chains("job a {\nJOBjob b {\nJOB").is_flat);
    }
}
