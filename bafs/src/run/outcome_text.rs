//! How a run ended, in words.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bafs_sched::Outcome;
use bafs_sched::report::RunReport;

use crate::args::RunArgs;
use crate::failure_groups::describe_failures;
use crate::logs;

/// Most warnings about declarations that a report shows.
const WARNINGS_SHOWN_MAX: usize = 20;

/// Ways to volumes, and names of volumes for each, that a report shows.
const ACCESS_PATHS_SHOWN_MAX: usize = 8;
const NAMES_SHOWN_MAX: usize = 3;

/// How jobs reached their volumes, and why not in a faster way: a line for each way.
fn describe_access_paths(report: &RunReport) -> String {
    let mut by_path = BTreeMap::<&str, BTreeSet<&str>>::new();
    let used = report.jobs.iter().flat_map(|job| &job.volumes);
    for volume in used.filter(|volume| !volume.access_path.is_empty()) {
        let names = by_path.entry(&volume.access_path).or_default();
        names.insert(&volume.name);
    }
    let mut text = String::new();
    for (path, names) in by_path.iter().take(ACCESS_PATHS_SHOWN_MAX) {
        let shown: Vec<_> = names.iter().take(NAMES_SHOWN_MAX).copied().collect();
        let more = match names.len() - shown.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let noun = if names.len() == 1 {
            "volume"
        } else {
            "volumes"
        };
        text += &format!("\n{noun} {}{more}: {path}", shown.join(", "));
    }
    text
}

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
    text += &describe_access_paths(report);
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

/// How to see all that a job printed which failed.
pub(super) fn describe_logs(args: &RunArgs, report: &RunReport) -> String {
    let Outcome::Failed { jobs, .. } = &report.outcome else {
        return String::new();
    };
    let run = args.journal.as_ref().unwrap_or(&args.workflow).display();
    let directory = logs::logs_directory(&args.journal_path());
    match jobs.first() {
        Some(failure) if directory.is_dir() => {
            let name = &failure.name;
            format!("\nmore output of a job: bafs logs {run} {name}")
        }
        _ => String::new(),
    }
}
