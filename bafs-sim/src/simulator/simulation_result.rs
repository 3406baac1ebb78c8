//! The result of a simulated run: totals, and on request its history. Values only.

use bafs_sched::{Outcome, StrategyChange};
use serde::Serialize;

/// Totals of a simulated run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SimulationResult {
    /// From the beginning to the last file at home, in microseconds.
    pub elapsed_us: u64,
    /// How it ended.
    pub outcome: Outcome,
    /// Executions that were started; more than jobs when some ran again.
    pub executions: u64,
    /// Bytes that crossed links to home, both directions.
    pub home_bytes: u128,
    /// Bytes of batch data among them.
    pub fetched_bytes: u128,
    /// Bytes that crossed nodes' links inside clusters.
    pub peer_bytes: u128,
    /// Failures of nodes.
    pub failures: u64,
    /// Facts that the scheduler core got.
    pub events: u64,
    /// Records that the scheduler core and the simulator examined: a measure of the work that does
    /// not depend on the machine.
    pub records_examined: u64,
    /// Jobs' time on processors, computing or waiting for data, in microseconds.
    pub busy_us: u128,
    /// The most pipelines' scratch volumes at once, in bytes.
    pub scratch_bytes_max: u64,
    /// The most cache volumes at once, in bytes.
    pub cache_bytes_max: u64,
    /// How often the rules of a strategy blocked the workflow and gave way.
    pub rule_relaxations: u64,
    /// The strategies that were followed, where the scheduler chose them.
    pub strategy_changes: Vec<StrategyChange>,
    /// Resource use over time, thinned out; empty unless requested.
    #[serde(skip)]
    pub samples: Vec<UsageSample>,
    /// Each ended execution; empty unless requested.
    #[serde(skip)]
    pub execution_spans: Vec<ExecutionSpan>,
}

impl SimulationResult {
    /// That of a run of which nothing has happened yet.
    pub(super) fn empty() -> Self {
        Self {
            elapsed_us: 0,
            outcome: Outcome::Cancelled,
            executions: 0,
            home_bytes: 0,
            fetched_bytes: 0,
            peer_bytes: 0,
            failures: 0,
            events: 0,
            records_examined: 0,
            busy_us: 0,
            scratch_bytes_max: 0,
            cache_bytes_max: 0,
            rule_relaxations: 0,
            strategy_changes: Vec::new(),
            samples: Vec::new(),
            execution_spans: Vec::new(),
        }
    }

    /// The same in seconds.
    pub fn seconds(&self) -> f64 {
        self.elapsed_us as f64 / 1e6
    }

    /// Whether every job is done and every file at home.
    pub fn is_complete(&self) -> bool {
        self.outcome == Outcome::Complete
    }

    /// Why it is not complete, in a sentence; nothing when it is.
    pub fn failure(&self) -> Option<String> {
        let why = match &self.outcome {
            Outcome::Complete => return None,
            Outcome::Failed { jobs, messages } => {
                let reasons = jobs.iter().map(|job| match job.node.as_str() {
                    "" => format!("job '{}': {}", job.name, job.reason),
                    node => format!("job '{}' on {node}: {}", job.name, job.reason),
                });
                messages.iter().cloned().chain(reasons).next()
            }
            Outcome::Cancelled => None,
        };
        Some(why.unwrap_or_else(|| "no reason was given".to_owned()))
    }
}

/// Resources in use from this time on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UsageSample {
    /// When, in microseconds.
    pub at_us: u64,
    /// Jobs on processors.
    pub running: u32,
    /// Bytes of scratch volumes.
    pub scratch_bytes: u64,
    /// Bytes of cache volumes.
    pub cache_bytes: u64,
}

/// Moments of a run that are kept at most: a picture shows far fewer.
const SAMPLES_MAX: usize = 500_000;

/// Moments as they come, of which a long run keeps every second, then every fourth, and so on.
#[derive(Debug, Clone, Default)]
pub(super) struct UsageSamples {
    samples: Vec<UsageSample>,
    /// How often every second sample was dropped.
    halvings: u32,
    samples_seen: u64,
    last_sample: Option<UsageSample>,
}

impl UsageSamples {
    pub(super) fn add_sample(&mut self, moment: UsageSample) {
        self.last_sample = Some(moment);
        if self.samples_seen.trailing_zeros() >= self.halvings {
            self.samples.push(moment);
        }
        self.samples_seen += 1;
        if self.samples.len() >= SAMPLES_MAX {
            let mut is_kept = false;
            self.samples.retain(|_| {
                is_kept = !is_kept;
                is_kept
            });
            self.halvings += 1;
        }
    }

    /// The kept samples, and the last one.
    pub(super) fn into_samples(mut self) -> Vec<UsageSample> {
        let last = self
            .last_sample
            .filter(|last| self.samples.last() != Some(last));
        self.samples.extend(last);
        self.samples
    }
}

/// An execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExecutionSpan {
    /// Position of its job in the workflow.
    pub job: u32,
    /// Position of its node in the environment.
    pub node: u32,
    /// When it started, in microseconds.
    pub start_us: u64,
    /// When it ended, in microseconds.
    pub end_us: u64,
    /// Whether it completed its work.
    pub has_succeeded: bool,
}

/// A simulated run stalled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StalledRunError(pub String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_runs_keep_evenly_spaced_moments() {
        let moment = |at_us| UsageSample {
            at_us,
            running: 0,
            scratch_bytes: 0,
            cache_bytes: 0,
        };
        let mut moments = UsageSamples::default();
        let most = 3 * SAMPLES_MAX as u64;
        for at_us in 0..most {
            moments.add_sample(moment(at_us));
        }
        let all = moments.into_samples();
        assert!(all.len() <= SAMPLES_MAX, "{}", all.len());
        let gaps = all.windows(2).map(|two| two[1].at_us - two[0].at_us);
        assert_eq!(gaps.max(), Some(4), "evenly");
        assert_eq!((all[0].at_us, all[all.len() - 1].at_us), (0, most - 1));
    }
}
