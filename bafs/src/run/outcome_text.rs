//! How a run ended, in words.

use std::time::Duration;

use bafs_sched::Outcome;
use bafs_sched::report::RunReport;

use crate::terminal_text;

/// Most lines, and characters of each, that a report shows of a failed job's output.
const LINES_SHOWN_MAX: usize = 20;
const COLUMNS_SHOWN_MAX: usize = 500;

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
        for failure in jobs {
            text += &format!("\n{failure}");
            for line in last_lines(&failure.output_tail) {
                text += &format!("\n    {line}");
            }
        }
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

/// The last lines of a job's output, short and without what would steer a terminal; `--json` has
/// all that was kept.
fn last_lines(output: &str) -> Vec<String> {
    let lines: Vec<&str> = output.lines().collect();
    lines[lines.len().saturating_sub(LINES_SHOWN_MAX)..]
        .iter()
        .map(|line| {
            terminal_text::sanitize_lines(&line.chars().take(COLUMNS_SHOWN_MAX).collect::<String>())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_shortens_output_and_escapes_control_characters() {
        let flood = "x".repeat(60_000);
        let output = format!("{}{flood}\n\u{1b}[2Jthe end\n", "line\n".repeat(1_000));
        let shown = last_lines(&output);
        assert_eq!(shown.len(), LINES_SHOWN_MAX);
        assert_eq!(shown[LINES_SHOWN_MAX - 2].len(), COLUMNS_SHOWN_MAX);
        assert_eq!(shown[LINES_SHOWN_MAX - 1], "\u{fffd}[2Jthe end");
    }
}
