//! How long the jobs after each job take (levels of Hu, Operations Research 9, 1961).

use std::collections::BTreeMap;

use bafs_workflow::{JobIndex, Workflow};
use serde::{Deserialize, Serialize};

/// Lengths of chains are told apart by so many leading bits: jobs that need the same are tried only
/// once, and run times of a day differ by seconds.
pub(crate) const LEADING_BITS: u32 = 4;

/// No job is urgent.
pub(crate) const NONE: u32 = u32::MAX;

/// How long the jobs after each job take, and how much is left in all, in seconds of declared run
/// times; each job counts one where none is declared.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Chains {
    /// Of each job the longest chain that begins with it, rounded.
    pub(crate) length: Vec<u32>,
    /// Jobs that are not final, by the lengths of their chains.
    pub(crate) lengths: BTreeMap<u32, u32>,
    /// Whether all jobs have chains of one length.
    pub(crate) is_flat: bool,
    /// What a job counts that declares no run time.
    pub(crate) usual: u32,
    /// What is left, over all slots of jobs that are not final.
    pub(crate) left: u64,
}

/// What was made of that.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Urgency {
    /// Jobs with chains of this length and longer ones are urgent.
    pub(crate) from: u32,
    /// Nothing went on once: space binds, and the least need goes first again.
    pub(crate) is_over: bool,
}

impl Default for Urgency {
    fn default() -> Self {
        Self {
            from: NONE,
            is_over: false,
        }
    }
}

impl Chains {
    /// Of a workflow of which nothing is done; `order` has all jobs, parents first.
    pub(crate) fn new(workflow: &Workflow, order: &[JobIndex]) -> Self {
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
        }
        chains.length.iter_mut().for_each(|it| *it = rounded(*it));
        order
            .iter()
            .for_each(|job| chains.count(workflow, *job, true));
        chains.is_flat = chains.lengths.len() < 2;
        chains
    }

    /// The longest chain of jobs that begins with this one, in seconds, rounded.
    pub(crate) fn length_of(&self, job: JobIndex) -> u32 {
        self.length[job.as_usize()]
    }

    pub(crate) fn takes(&self, workflow: &Workflow, job: JobIndex) -> u32 {
        let declared = workflow.job(job).runtime_s;
        declared.map_or(self.usual, |seconds| {
            u32::try_from(seconds.max(1)).unwrap_or(u32::MAX)
        })
    }

    pub(crate) fn work(&self, workflow: &Workflow, job: JobIndex) -> u64 {
        let slots = u64::from(workflow.job(job).cpus.max(1));
        slots.saturating_mul(u64::from(self.takes(workflow, job)))
    }

    /// A job is to be done, again maybe, or is final.
    pub(crate) fn count(&mut self, workflow: &Workflow, job: JobIndex, is_left: bool) {
        let work = self.work(workflow, job);
        let length = self.length[job.as_usize()];
        let of_length = self.lengths.entry(length).or_default();
        if is_left {
            *of_length += 1;
            self.left = self.left.saturating_add(work);
            return;
        }
        *of_length -= 1;
        if *of_length == 0 {
            self.lengths.remove(&length);
        }
        self.left = self.left.saturating_sub(work);
    }

    /// The shortest chain of a job that is left which takes as long as all that is left does on so
    /// many slots.
    pub(crate) fn urgent_from(&self, slots: u64) -> u32 {
        let takes = self.left.checked_div(slots).unwrap_or(u64::MAX);
        let takes = takes.saturating_add(u64::from(!self.left.is_multiple_of(slots.max(1))));
        let Ok(takes) = u32::try_from(takes) else {
            return NONE;
        };
        let mut long_enough = self.lengths.range(takes..);
        long_enough.next().map_or(NONE, |(length, _)| *length)
    }
}

/// Rounded down to its leading bits.
pub(crate) fn rounded(length: u32) -> u32 {
    let bits = u32::BITS - length.leading_zeros();
    let low = bits.saturating_sub(LEADING_BITS);
    length >> low << low
}
