//! What follows from the report of a job.

use crate::message::JobReport;

impl JobReport {
    /// Time in which it computed, in milliseconds: that in which it did not wait for its volumes.
    pub fn computed_ms(&self) -> u64 {
        let waited = self.volumes.iter().map(|used| used.waited_ms);
        let waited = waited.fold(0, u64::saturating_add);
        // Waits for several volumes may have been the same time, and what the processors did was
        // no waiting.
        let least = self.cpu_ms.min(self.wall_ms);
        self.wall_ms.saturating_sub(waited).max(least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{JobOutcome, VolumeUse};

    #[test]
    fn a_job_computes_when_it_does_not_wait() {
        let computed = |wall_ms, cpu_ms, waits: &[u64]| {
            let volume = |waited_ms: &u64| VolumeUse {
                waited_ms: *waited_ms,
                ..VolumeUse::default()
            };
            let report = JobReport {
                outcome: JobOutcome::Exited(0),
                wall_ms,
                cpu_ms,
                output_tail: String::new(),
                volumes: waits.iter().map(volume).collect(),
            };
            report.computed_ms()
        };
        assert_eq!(computed(100, 1, &[]), 100, "one that sleeps");
        assert_eq!(computed(100, 1, &[30, 20]), 50);
        assert_eq!(computed(100, 60, &[70, 20]), 60);
        assert_eq!(computed(100, 400, &[u64::MAX, 1]), 100);
    }
}
