//! `bafs status`: how far a run is, from the journal that it is writing. It runs nothing.

use std::fmt::Write;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use anyhow::Result;
use bafs_sched::goodput::{TimeAccount, compute_goodput};
use bafs_sched::io::journal;
use bafs_sched::timeline::{ExecutionOutcome, Timeline, build_timeline};
use bafs_sched::{Outcome, Progress};
use bafs_server::clock;
use bafs_sim::strategy_selector::ModelSelector;
use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::args::StatusArgs;
use crate::history;
use crate::output::Printer;
use crate::terminal_text::sanitize_line as visible;

/// Time between looks, and the least part of the time that is not spent looking.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
const POLL_PAUSE_FACTOR: u32 = 9;

/// Executions that are shown at most.
const ROWS_SHOWN_MAX: usize = 12;
const BAR_WIDTH: usize = 30;

/// How far a run is.
#[derive(Debug, Serialize)]
struct RunStatus {
    workflow: String,
    /// From the run's first fact to now, while a scheduler has the journal open, else to the last
    /// one that the journal has, in milliseconds.
    wall_ms: u64,
    /// How it ended; `null` while it is under way.
    outcome: Option<Outcome>,
    /// Whether a scheduler has the journal open.
    is_running: bool,
    progress: Progress,
    /// For each stage: its jobs that are done, and all.
    levels: Vec<(u64, u64)>,
    nodes: Vec<NodeStatus>,
    running_executions: Vec<RunningExecution>,
    /// What the scheduler warned of.
    warnings: Vec<String>,
    ledger: TimeAccount,
}

/// A node.
#[derive(Debug, Serialize)]
struct NodeStatus {
    name: String,
    is_lost: bool,
    slots: u32,
    jobs: u32,
    capacity_bytes: u64,
    reserved_bytes: u64,
}

/// An execution that is under way.
#[derive(Debug, Serialize)]
struct RunningExecution {
    job: String,
    node: String,
    elapsed_ms: u64,
}

/// Shows how far a run is: on a terminal until it is over, otherwise once.
pub(crate) fn show_status(args: &StatusArgs, output: Printer) -> Result<()> {
    let path = history::find_journal(&args.run)?;
    let look = || -> Result<RunStatus> {
        let is_running = history::is_journal_open(&path);
        let history = journal::read_history(&path)?;
        let workflow = history.header.workflow.clone();
        let has_begun = !history.steps.is_empty();
        let mut timeline = build_timeline(history, &ModelSelector);
        if has_begun && is_running && timeline.outcome.is_none() {
            // Nothing may have happened for long.
            let so_far_ms = clock::now().ms_since(timeline.began_at);
            timeline.wall_ms = timeline.wall_ms.max(so_far_ms);
        }
        let ledger = compute_goodput(&workflow, &timeline).total;
        Ok(build_status(&timeline, is_running, ledger))
    };
    if output.is_json() || args.once || !std::io::stdout().is_terminal() {
        let status = look()?;
        return output.print_result(&format_status(&status)?, &status);
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout());
    bar.set_style(ProgressStyle::with_template("{msg}")?);
    loop {
        let start = now();
        let status = look()?;
        bar.set_message(format_status(&status)?);
        bar.tick();
        if status.outcome.is_some() || !status.is_running {
            break;
        }
        std::thread::sleep(POLL_INTERVAL.max(start.elapsed() * POLL_PAUSE_FACTOR));
    }
    bar.abandon();
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "how long looking took")]
fn now() -> Instant {
    Instant::now()
}

fn build_status(timeline: &Timeline, is_running: bool, ledger: TimeAccount) -> RunStatus {
    let mut stages: Vec<(u64, u64)> = Vec::new();
    for job in &timeline.jobs {
        let at = job.level as usize;
        stages.resize(stages.len().max(at + 1), (0, 0));
        stages[at].1 += 1;
        stages[at].0 += u64::from(job.state == bafs_sched::JobState::Done);
    }
    let open = || {
        let executions = timeline.executions.iter();
        executions.filter(|e| e.outcome == ExecutionOutcome::Running && timeline.outcome.is_none())
    };
    let nodes = timeline.nodes.iter().map(|node| {
        let here = open().filter(|execution| execution.server == node.server);
        let volumes = timeline.volumes.iter();
        let volumes = volumes.filter(|v| v.server == node.server && v.deleted_ms.is_none());
        NodeStatus {
            name: node.name.clone(),
            is_lost: node
                .presence
                .last()
                .is_some_and(|(_, until)| until.is_some()),
            slots: node.slots,
            jobs: here.count() as u32,
            capacity_bytes: node.capacity_bytes,
            reserved_bytes: volumes.map(|volume| volume.bytes).sum(),
        }
    });
    let running = open().map(|execution| RunningExecution {
        job: timeline.jobs[execution.job.as_usize()].name.clone(),
        node: execution.node.clone(),
        elapsed_ms: timeline.wall_ms.saturating_sub(execution.requested_ms),
    });
    RunStatus {
        workflow: timeline.workflow.clone(),
        wall_ms: timeline.wall_ms,
        outcome: timeline.outcome.clone(),
        is_running,
        progress: timeline.progress,
        levels: stages,
        nodes: nodes.collect(),
        running_executions: running.collect(),
        warnings: timeline.warnings.clone(),
        ledger,
    }
}

fn format_status(status: &RunStatus) -> Result<String> {
    let progress = &status.progress;
    let how = match (&status.outcome, status.is_running) {
        (Some(Outcome::Complete), _) => "complete",
        (Some(Outcome::Failed { .. }), _) => "FAILED",
        (Some(Outcome::Cancelled), _) => "cancelled",
        (None, true) => "under way",
        (None, false) => {
            "not ended, but no scheduler runs it; `bafs run` with the same journal resumes it"
        }
    };
    let seconds = status.wall_ms as f64 / 1e3;
    let mut text = format!("{}: {how}; {seconds:.1} s\n", visible(&status.workflow));
    let jobs = format_bar(progress.jobs_done, progress.jobs_total);
    let (done, total) = (progress.jobs_done, progress.jobs_total);
    let (running, failed) = (progress.jobs_running, progress.jobs_failed);
    writeln!(
        text,
        "jobs   {jobs} {done}/{total} done, {running} running, {failed} failed"
    )?;
    let files = format_bar(progress.extracts_done, progress.extracts_total);
    let (done, total) = (progress.extracts_done, progress.extracts_total);
    let bytes = HumanBytes(progress.extracted_bytes);
    writeln!(text, "files  {files} {done}/{total} at home, {bytes}")?;
    for (level, (done, all)) in status.levels.iter().enumerate().take(ROWS_SHOWN_MAX) {
        writeln!(
            text,
            "level {level:<2} {} {done}/{all}",
            format_bar(*done, *all)
        )?;
    }
    write_nodes(&mut text, status)?;
    for running in status.running_executions.iter().take(ROWS_SHOWN_MAX) {
        let (job, node) = (visible(&running.job), visible(&running.node));
        let seconds = running.elapsed_ms as f64 / 1e3;
        writeln!(text, "  {job} on {node} for {seconds:.1} s")?;
    }
    if status.running_executions.len() > ROWS_SHOWN_MAX {
        writeln!(
            text,
            "  and {} more",
            status.running_executions.len() - ROWS_SHOWN_MAX
        )?;
    }
    write_failures(&mut text, status)?;
    for warning in status.warnings.iter().rev().take(ROWS_SHOWN_MAX).rev() {
        writeln!(text, "warning: {}", visible(warning))?;
    }
    let ledger = &status.ledger;
    let part = |ms: u64| 100.0 * ms as f64 / ledger.sum_ms().max(1) as f64;
    write!(
        text,
        "time of jobs: {:.0} % computing, {:.0} % waiting for data, {:.0} % copying, {:.0} % lost, \
         {:.0} % overhead, {:.0} % queued",
        part(ledger.computing_ms),
        part(ledger.io_wait_ms),
        part(ledger.copying_ms),
        part(ledger.lost_ms),
        part(ledger.overhead_ms),
        part(ledger.queued_ms),
    )?;
    Ok(text)
}

/// One line for each node: its space and its jobs.
fn write_nodes(text: &mut String, status: &RunStatus) -> Result<()> {
    for node in status.nodes.iter().take(ROWS_SHOWN_MAX) {
        let name = visible(&node.name);
        if node.is_lost {
            writeln!(text, "node {name} is lost")?;
            continue;
        }
        let space = format_bar(node.reserved_bytes, node.capacity_bytes);
        let (used, all) = (
            HumanBytes(node.reserved_bytes),
            HumanBytes(node.capacity_bytes),
        );
        let (jobs, slots) = (node.jobs, node.slots);
        writeln!(
            text,
            "node {name} {space} {used} of {all} reserved, {jobs}/{slots} jobs"
        )?;
    }
    Ok(())
}

/// What failed for good, if the run did.
fn write_failures(text: &mut String, status: &RunStatus) -> Result<()> {
    let Some(Outcome::Failed { jobs, messages }) = &status.outcome else {
        return Ok(());
    };
    for failure in jobs.iter().take(ROWS_SHOWN_MAX) {
        writeln!(text, "{}", visible(&failure.to_string()))?;
    }
    if jobs.len() > ROWS_SHOWN_MAX {
        writeln!(text, "and {} more failed", jobs.len() - ROWS_SHOWN_MAX)?;
    }
    for message in messages {
        writeln!(text, "{}", visible(message))?;
    }
    Ok(())
}

fn format_bar(part: u64, whole: u64) -> String {
    let filled = (u128::from(part.min(whole)) * BAR_WIDTH as u128)
        .checked_div(u128::from(whole))
        .unwrap_or(0) as usize;
    format!("[{}{}]", "=".repeat(filled), " ".repeat(BAR_WIDTH - filled))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_bars_have_equal_length() {
        for (part, whole) in [(0, 0), (0, 3), (1, 3), (3, 3), (9, 3), (u64::MAX, u64::MAX)] {
            assert_eq!(format_bar(part, whole).len(), BAR_WIDTH + 2);
        }
        assert_eq!(format_bar(1, 2).matches('=').count(), BAR_WIDTH / 2);
    }
}
