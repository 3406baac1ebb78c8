//! What jobs computed beside what they declare, and when that contradicts what was expected.
//!
//! Of jobs that begin together the short ones end first: the mean of those that have ended is too
//! small, and it is too large when all that running ones have done is counted with them. Only what
//! both say is believed.

use crate::policy::View;
use crate::state::attempts::AttemptState;

impl View<'_> {
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

    use crate::state::compute_time::Computing;
    use crate::state::compute_time::MEASURED_MIN;

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
