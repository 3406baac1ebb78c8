//! What finished jobs computed beside what they declare.

use serde::{Deserialize, Serialize};

/// Computing that differs by so many thousandths from what was expected contradicts the plan.
pub(crate) const CONTRADICTION_PERMILLE: u64 = 250;

/// Jobs whose computing must have been measured before that counts.
pub(crate) const MEASURED_MIN: u64 = 8;

/// What finished jobs computed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Computing {
    /// Computing of a job of the whole workflow as declared, in seconds.
    pub(crate) declared_run_s: f64,
    /// Jobs of a mean pipeline over its stages.
    pub(crate) stage_jobs: f64,
    /// Of finished jobs in milliseconds, as measured and as declared, and their number.
    pub(crate) measured_ms: u64,
    pub(crate) declared_ms: u64,
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
    pub(crate) fn learn(&mut self, declared_s: u64, measured_ms: u64) {
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
    pub(crate) fn scaled_s(&self, measured_ms: u64) -> f64 {
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
