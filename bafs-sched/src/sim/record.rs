//! What a simulated run was like: totals, and on request what happened when. Values only.

use serde::Serialize;

use crate::logic::{Followed, Outcome};

/// Totals of a simulated run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Run {
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
    /// Facts that the scheduler core was told.
    pub steps: u64,
    /// Records that the scheduler core and the simulator looked at: how much work the run was,
    /// whatever the machine.
    pub looked_at: u64,
    /// Jobs' time on processors, computing or waiting for data, in microseconds.
    pub busy_us: u128,
    /// The most pipelines' scratch volumes at once, in bytes.
    pub scratch_bytes_max: u64,
    /// The most cache volumes at once, in bytes.
    pub cache_bytes_max: u64,
    /// How often the rules of a strategy blocked the workflow and gave way.
    pub rules_eased: u64,
    /// The strategies that were followed, where the scheduler chose them.
    pub followed: Vec<Followed>,
    /// What happened when, of very many moments some; empty unless asked for.
    #[serde(skip)]
    pub moments: Vec<Moment>,
    /// Each execution that ended; empty unless asked for.
    #[serde(skip)]
    pub spells: Vec<Spell>,
}

impl Run {
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

/// What was in use from this time on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
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
const MOMENTS_MAX: usize = 500_000;

/// Moments as they come, of which a long run keeps every second, then every fourth, and so on.
#[derive(Debug, Clone, Default)]
pub(super) struct Moments {
    kept: Vec<Moment>,
    /// So many times every second was left out.
    halved: u32,
    seen: u64,
    last: Option<Moment>,
}

impl Moments {
    pub(super) fn note(&mut self, moment: Moment) {
        self.last = Some(moment);
        if self.seen.trailing_zeros() >= self.halved {
            self.kept.push(moment);
        }
        self.seen += 1;
        if self.kept.len() >= MOMENTS_MAX {
            let mut is_kept = false;
            self.kept.retain(|_| {
                is_kept = !is_kept;
                is_kept
            });
            self.halved += 1;
        }
    }

    /// Those that are kept, and the last one.
    pub(super) fn all(mut self) -> Vec<Moment> {
        let last = self.last.filter(|last| self.kept.last() != Some(last));
        self.kept.extend(last);
        self.kept
    }
}

/// An execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spell {
    /// Position of its job in the workflow.
    pub job: u32,
    /// Position of its node in the environment.
    pub node: u32,
    /// When it started, in microseconds.
    pub start_us: u64,
    /// When it ended, in microseconds.
    pub end_us: u64,
    /// Whether it did what it should.
    pub is_done: bool,
}

/// A simulated run did not come to an end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Stuck(pub String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_very_many_moments_some_are_kept_all_over_the_run() {
        let moment = |at_us| Moment {
            at_us,
            running: 0,
            scratch_bytes: 0,
            cache_bytes: 0,
        };
        let mut moments = Moments::default();
        let most = 3 * MOMENTS_MAX as u64;
        for at_us in 0..most {
            moments.note(moment(at_us));
        }
        let all = moments.all();
        assert!(all.len() <= MOMENTS_MAX, "{}", all.len());
        let gaps = all.windows(2).map(|two| two[1].at_us - two[0].at_us);
        assert_eq!(gaps.max(), Some(4), "evenly");
        assert_eq!((all[0].at_us, all[all.len() - 1].at_us), (0, most - 1));
    }
}
