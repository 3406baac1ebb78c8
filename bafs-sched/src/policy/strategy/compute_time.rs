//! What jobs computed beside what they declare, and when that contradicts what was expected.
//!
//! Of jobs that begin together the short ones end first: the mean of those that have ended is too
//! small, and it is too large when all that running ones have done is counted with them. Only what
//! both say is believed.

use bafs_proto::message::JobReport;
use bafs_workflow::JobIndex;

use crate::state::attempts::AttemptState;
use crate::state::scheduler_state::State;

/// Computing that differs by so many thousandths from what was expected contradicts the plan.
const CONTRADICTION_PERMILLE: u64 = 250;

/// Jobs whose computing must have been measured before that counts.
pub(crate) const MEASURED_MIN: u64 = 8;

/// What finished jobs computed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Computing {
    /// Computing of a job of the whole workflow as declared, in seconds.
    pub(crate) declared_run_s: f64,
    /// Jobs of a mean pipeline over its stages.
    stage_jobs: f64,
    /// Of finished jobs in milliseconds, as measured and as declared, and their number.
    measured_ms: u64,
    declared_ms: u64,
    pub(crate) jobs: u64,
}

impl Computing {
    /// Nothing measured yet of so many jobs, on so many levels of all pipelines together.
    pub(crate) fn new(level_count: u64, declared_run_s: f64, jobs: usize) -> Self {
        Self {
            declared_run_s,
            stage_jobs: jobs as f64 / level_count.max(1) as f64,
            measured_ms: 0,
            declared_ms: 0,
            jobs: 0,
        }
    }

    /// A job is done. Where others declare run times, one that does not says nothing about these.
    fn learn(&mut self, declared_s: u64, measured_ms: u64) {
        if declared_s == 0 && self.declared_run_s > 0.0 {
            return;
        }
        let declared_ms = declared_s.saturating_mul(1_000);
        self.declared_ms = self.declared_ms.saturating_add(declared_ms);
        self.measured_ms = self.measured_ms.saturating_add(measured_ms);
        self.jobs += 1;
    }

    /// Computing of a job when those that ended took so long. Jobs declare unlike times: they are
    /// compared with their own.
    fn scaled_s(&self, measured_ms: u64) -> f64 {
        match self.declared_ms {
            0 => self.stage_jobs * measured_ms as f64 / self.jobs as f64 / 1_000.0,
            declared_ms => self.declared_run_s * measured_ms as f64 / declared_ms as f64,
        }
    }

    /// What is to be expected by what was measured, in seconds, when that is not what was expected.
    /// `running_ms` is asked, at some cost, for how long all running jobs have run by now.
    pub(crate) fn contradiction_s(
        &self,
        expected_s: f64,
        running_ms: impl FnOnce() -> u64,
    ) -> Option<f64> {
        if self.jobs < MEASURED_MIN {
            return None;
        }
        let is_far = |measured_s: f64| {
            let off = (measured_s - expected_s).abs();
            off * 1_000.0 > expected_s * CONTRADICTION_PERMILLE as f64
        };
        let least_s = self.scaled_s(self.measured_ms);
        if !is_far(least_s) || least_s > expected_s {
            return is_far(least_s).then_some(least_s);
        }
        let most_s = self.scaled_s(self.measured_ms.saturating_add(running_ms()));
        (most_s < expected_s && is_far(most_s)).then_some(most_s)
    }
}

impl State {
    /// A job is done: takes note of what it computed.
    pub(crate) fn learn_computing(&mut self, job: JobIndex, report: &JobReport) {
        let declared_s = self.graph.workflow.job(job).runtime_s.unwrap_or(0);
        if let Some(guided) = &mut self.guided {
            guided.computing.learn(declared_s, report.compute_ms());
        }
    }

    /// How long all jobs that run have had their slots by now, in milliseconds: no less than they
    /// have computed.
    pub(crate) fn running_ms(&self) -> u64 {
        self.graph.tally.add(self.attempts.len() as u64);
        let attempts = self.attempts.values();
        let running = attempts.filter(|attempt| attempt.stage == AttemptState::Running);
        running.map(|it| self.now.ms_since(it.since)).sum()
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    const SHORT: u64 = 10;
    const LONG: u64 = 1_000;

    /// Ten pipelines of two levels, of a short job and nine long ones.
    fn unlike() -> Computing {
        let declared_s = 10 * SHORT + 90 * LONG;
        Computing::new(20, declared_s as f64 / 20.0, 100)
    }

    /// So many jobs that declare a time took so many hundredths of it.
    fn learn(computing: &mut Computing, jobs: u64, declared_s: u64, hundredths: u64) {
        for _ in 0..jobs {
            computing.learn(declared_s, declared_s * hundredths * 10);
        }
    }

    /// What is expected instead of what is declared, in hundredths of it.
    fn instead(computing: &Computing, running_ms: u64) -> Option<u64> {
        let declared_s = computing.declared_run_s;
        let found_s = computing.contradiction_s(declared_s, || running_ms);
        found_s.map(|found_s| (100.0 * found_s / declared_s).round() as u64)
    }

    #[test]
    fn short_jobs_leave_estimates_of_long_jobs_unchanged() {
        let mut computing = unlike();
        learn(&mut computing, 10, SHORT, 100);
        assert_eq!(instead(&computing, 0), None);
        learn(&mut computing, 90, LONG, 100);
        assert_eq!(instead(&computing, 0), None);
    }

    #[test]
    fn run_time_estimate_follows_enough_slow_jobs() {
        let mut computing = unlike();
        learn(&mut computing, MEASURED_MIN - 1, SHORT, 200);
        assert_eq!(instead(&computing, 0), None, "too few");
        learn(&mut computing, 1, SHORT, 200);
        assert_eq!(instead(&computing, 0), Some(200));
    }

    /// Of jobs of one declared time some take a tenth of it, and they end first.
    #[test]
    fn early_endings_are_ignored_while_others_run() {
        let mut computing = unlike();
        learn(&mut computing, 8, LONG, 10);
        let others_ms = 80 * LONG * 10 * 10;
        assert_eq!(instead(&computing, others_ms), None);
        assert_eq!(instead(&computing, 0), Some(10));
        // What runs may still take long, but not so long that all are as declared.
        learn(&mut computing, 32, LONG, 10);
        assert_eq!(instead(&computing, 8 * LONG * 10 * 10), Some(12));
    }
}
