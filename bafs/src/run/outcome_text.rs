//! How a run ended, in words.

use std::time::Duration;

use bafs_sched::Outcome;
use bafs_sched::report::RunReport;

use crate::failure_groups::describe_failures;

/// Most warnings about declarations that a report shows.
const WARNINGS_SHOWN_MAX: usize = 20;

/// How a run ended, in words.
pub(crate) fn describe_outcome(report: &RunReport) -> String {
    let totals = &report.totals;
    let took = Duration::from_millis(report.wall_ms).as_secs_f64();
    let mut text = match &report.outcome {
        Outcome::Complete => format!("{}: complete", report.workflow),
        Outcome::Cancelled => format!("{}: cancelled", report.workflow),
        Outcome::Failed { .. } => format!("{}: FAILED", report.workflow),
    };
    text += &format!(
        "; {} of {} jobs done, {} of {} files at home, {took:.1} s",
        totals.jobs_done, totals.jobs_total, totals.extracts_done, totals.extracts_total
    );
    for warning in report.warnings.iter().take(WARNINGS_SHOWN_MAX) {
        text += &format!("\nwarning: {warning}");
    }
    let more = report.warnings.len().saturating_sub(WARNINGS_SHOWN_MAX) as u64;
    if more + report.warnings_omitted > 0 {
        text += &format!("\n{} further warnings", more + report.warnings_omitted);
    }
    if let Outcome::Failed { jobs, messages } = &report.outcome {
        text += &describe_failures(jobs);
        for message in messages {
            text += &format!("\n{message}");
        }
        if totals.jobs_skipped > 0 {
            // Without failed ones they were cancelled.
            let count = totals.jobs_skipped;
            let noun = if count == 1 { "job" } else { "jobs" };
            let why = match (jobs.is_empty(), count) {
                (true, _) => "",
                (false, 1) => " that depends on these",
                (false, _) => " that depend on these",
            };
            text += &format!("\n{count} {noun}{why} did not run");
        }
    }
    text
}
