//! Where the time of a run went: for each job computing, waiting for data, copying, lost work and
//! waiting for its turn; the columns sum to the time that the job was in the run. Arithmetic only.

use bafs_workflow::{JobIndex, Workflow};
use serde::Serialize;

use crate::timeline::{ExecutionOutcome, ExecutionRecord, Timeline, VolumeRecord};

/// Where a time went. All in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct TimeAccount {
    /// The job ran and did not wait for its agent.
    pub computing_ms: u64,
    /// The job ran, and a call to its agent was under way; at most what its processors were idle.
    pub io_wait_ms: u64,
    /// Volumes were made, filled or copied before it could start, or its results were sent home.
    pub copying_ms: u64,
    /// Executions of it that failed, were given up, or whose output was lost.
    pub lost_ms: u64,
    /// From asking a node to start it to the end known here, without the program's own time.
    pub overhead_ms: u64,
    /// It waited for other jobs, a processor or space.
    pub queued_ms: u64,
}

impl TimeAccount {
    /// The sum of the columns.
    pub fn sum_ms(&self) -> u64 {
        self.computing_ms
            + self.io_wait_ms
            + self.copying_ms
            + self.lost_ms
            + self.overhead_ms
            + self.queued_ms
    }

    fn add(&mut self, other: &Self) {
        self.computing_ms += other.computing_ms;
        self.io_wait_ms += other.io_wait_ms;
        self.copying_ms += other.copying_ms;
        self.lost_ms += other.lost_ms;
        self.overhead_ms += other.overhead_ms;
        self.queued_ms += other.queued_ms;
    }
}

/// The account of one job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct JobTimeAccount {
    /// Its name.
    pub job: String,
    /// From the run's first fact until it was done and its results were at home; until the run's
    /// last fact when it is not.
    pub wall_ms: u64,
    /// Where that time went.
    #[serde(flatten)]
    pub account: TimeAccount,
}

/// The accounts of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Goodput {
    /// Each job, in the order of declaration.
    pub jobs: Vec<JobTimeAccount>,
    /// The sum over jobs.
    pub total: TimeAccount,
    /// Time that slots were there for jobs: each node's slots times the time it was there.
    pub slot_ms: u64,
    /// Thousandths of that time in which jobs computed what was kept; one that asks for several
    /// processors counts as often.
    pub goodput_permille: u64,
}

type Interval = (u64, u64);

/// Accounts for a run.
pub fn compute_goodput(workflow: &Workflow, timeline: &Timeline) -> Goodput {
    let mut executions = vec![Vec::new(); workflow.jobs.len()];
    for execution in &timeline.executions {
        executions[execution.job.as_usize()].push(execution);
    }
    let mut sendings = vec![Vec::new(); workflow.jobs.len()];
    for sending in &timeline.extract_attempts {
        if let Some(job) = find_last_writer(workflow, sending.index, &executions) {
            let until = sending.ended_ms.unwrap_or(timeline.wall_ms);
            sendings[job.as_usize()].push((sending.requested_ms, until));
        }
    }
    let mut total = TimeAccount::default();
    let mut computing_slot_ms: u64 = 0;
    let mut jobs = Vec::with_capacity(workflow.jobs.len());
    for (at, job) in workflow.jobs.iter().enumerate() {
        let (wall_ms, account) = account_for_job(&executions[at], &sendings[at], timeline);
        total.add(&account);
        let slots = u64::from(job.cpus.max(1));
        computing_slot_ms += account.computing_ms.saturating_mul(slots);
        jobs.push(JobTimeAccount {
            job: job.name.clone(),
            wall_ms,
            account,
        });
    }
    let slot_ms = timeline.nodes.iter().map(|node| {
        let there = node.presence.iter();
        let ms: u64 = there
            .map(|(from, until)| until.unwrap_or(timeline.wall_ms).saturating_sub(*from))
            .sum();
        ms.saturating_mul(u64::from(node.slots))
    });
    let slot_ms: u64 = slot_ms.sum();
    let permille = computing_slot_ms.saturating_mul(1_000).checked_div(slot_ms);
    Goodput {
        jobs,
        total,
        slot_ms,
        goodput_permille: permille.unwrap_or(0),
    }
}

/// The job whose end let a file be sent: of the volume's writers the one that was done last.
fn find_last_writer(
    workflow: &Workflow,
    extract: u32,
    executions: &[Vec<&ExecutionRecord>],
) -> Option<JobIndex> {
    let volume = workflow.extracts.get(extract as usize)?.volume;
    let users = workflow.volume(volume).users.iter().copied();
    let writers = users.filter(|user| {
        let mounts = &workflow.job(*user).mounts;
        mounts.iter().any(|m| m.volume == volume && m.writable)
    });
    writers.max_by_key(|writer| {
        let done = executions[writer.as_usize()].iter();
        let done = done.filter(|execution| execution.outcome == ExecutionOutcome::Done);
        done.filter_map(|execution| execution.ended_ms).max()
    })
}

/// The account of a job, with the time that it is about.
fn account_for_job(
    executions: &[&ExecutionRecord],
    sendings: &[Interval],
    timeline: &Timeline,
) -> (u64, TimeAccount) {
    let done = executions
        .iter()
        .find(|e| e.outcome == ExecutionOutcome::Done);
    let sent = sendings.iter().map(|(_, until)| *until).max().unwrap_or(0);
    let wall_ms = match done.and_then(|done| done.ended_ms) {
        Some(ended) => ended.max(sent),
        None => timeline.wall_ms,
    };
    let span = |execution: &ExecutionRecord| {
        let until = execution.ended_ms.unwrap_or(timeline.wall_ms);
        (execution.requested_ms, until)
    };
    let lost = executions.iter().filter(|e| e.outcome.is_wasted());
    let lost: Vec<Interval> = lost.map(|e| span(e)).collect();
    let kept = executions.iter().filter(|e| !e.outcome.is_wasted());
    let all: Vec<Interval> = executions.iter().map(|e| span(e)).collect();
    let mut copying: Vec<Interval> = sendings.to_vec();
    for execution in executions {
        let mounts = execution.mounts.iter().map(|at| &timeline.volumes[*at]);
        copying.extend(mounts.filter_map(|making| creation_interval(making, execution)));
    }
    let covered_by_executions = covered_ms(&all, wall_ms);
    copying.extend(&all);
    let covered = covered_ms(&copying, wall_ms);
    let mut account = TimeAccount {
        lost_ms: covered_ms(&lost, wall_ms),
        copying_ms: covered - covered_by_executions,
        queued_ms: wall_ms - covered,
        ..TimeAccount::default()
    };
    for execution in kept {
        let (from, until) = span(execution);
        let length = until.saturating_sub(from);
        // What is still running has reported nothing yet.
        let ran_ms = match execution.outcome {
            ExecutionOutcome::Running => length,
            _ => execution.wall_ms.min(length),
        };
        let idle_ms = ran_ms.saturating_sub(execution.cpu_ms);
        let waiting_ms = execution.waited_ms.min(idle_ms);
        account.io_wait_ms += waiting_ms;
        account.computing_ms += ran_ms - waiting_ms;
        account.overhead_ms += length - ran_ms;
    }
    (wall_ms, account)
}

/// The time that a volume took to be made before an execution that mounts it was asked for.
fn creation_interval(making: &VolumeRecord, execution: &ExecutionRecord) -> Option<Interval> {
    let until = making.created_ms?.min(execution.requested_ms);
    (making.requested_ms < until).then_some((making.requested_ms, until))
}

/// How much of the time up to `end` lies in at least one interval.
fn covered_ms(intervals: &[Interval], end: u64) -> u64 {
    let mut sorted = intervals.to_vec();
    sorted.sort_unstable();
    let (mut covered, mut reached) = (0, 0);
    for (from, until) in sorted {
        let (from, until) = (from.max(reached), until.min(end));
        covered += until.saturating_sub(from);
        reached = reached.max(until);
    }
    covered
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_intervals_count_once() {
        assert_eq!(covered_ms(&[], 10), 0);
        assert_eq!(covered_ms(&[(5, 8), (0, 3), (2, 4)], 10), 7);
        assert_eq!(covered_ms(&[(0, 100), (5, 7)], 10), 10);
        assert_eq!(covered_ms(&[(20, 30)], 10), 0);
    }
}
