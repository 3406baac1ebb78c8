//! What a run says of failures while it goes on.

use bafs_proto::ErrorCode;
use bafs_proto::message::JobOutcome;
use bafs_proto::time::Time;

use super::Driver;
use crate::Event;
use crate::policy::failure::attribution::exceeds_limit;

/// Failures of the environment are told at most once in so long, in milliseconds: when a home is
/// away, every job has one. Once it was told that the home is away, none of these is.
const FAILURE_REPORT_INTERVAL_MS: u64 = 5_000;

impl Driver {
    /// Says why nothing seems to happen while something is tried again.
    pub(super) fn report_failure(&mut self, now: Time, event: &Event) {
        let error = match event {
            Event::JobEnded { report, .. } => match &report.outcome {
                // A job that used too much is told of as such.
                JobOutcome::EnvironmentFailed(error) if !exceeds_limit(error) => error,
                _ => return,
            },
            Event::VolumeCreateFailed { error, .. } | Event::JobStartFailed { error, .. } => error,
            // Of a file that no job wrote the core tells.
            Event::ExtractFailed { error, .. } if error.code != ErrorCode::NotFound => error,
            _ => return,
        };
        let is_due = self
            .failure_reported_at
            .is_none_or(|told| now.ms_since(told) >= FAILURE_REPORT_INTERVAL_MS);
        if is_due && !self.servers.is_reported_outage(error) {
            self.failure_reported_at = Some(now);
            let what = self.scheduler.describe_failed_call(event);
            tracing::warn!(%error, "{what} failed; the scheduler recovers if possible");
        }
    }
}
