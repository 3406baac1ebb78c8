//! Opens the journal of a run: a new one, one to resume, or one of a run that never began.

use std::sync::Arc;

use bafs_proto::ids::RunId;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_workflow::Workflow;

use super::RunOptions;
use super::ended_attempt::find_ended_attempt;
use crate::io::homes::Homes;
use crate::io::job_logs::EndedAttempt;
use crate::io::journal::{Journal, JournalHeader, JournalTail, Snapshot};
use crate::report::RunReportBuilder;
use crate::{Event, RecordedStep, Scheduler};

/// The journal of a run of `workflow`, and what it tells.
pub(super) fn open_journal(
    workflow: &Arc<Workflow>,
    options: &RunOptions,
) -> Result<(Journal, JournalTail)> {
    let fresh = || JournalHeader {
        run: RunId::random(),
        workflow: Arc::clone(workflow),
        settings: options.settings.clone(),
    };
    let (mut journal, mut tail) = Journal::open(&options.journal, fresh)?;
    let is_fresh = !tail.has_steps() && tail.header.workflow == *workflow;
    if options.earlier_work.is_some() {
        if !is_fresh {
            tail = journal.begin_epoch(fresh())?;
        }
        return Ok((journal, tail));
    }
    if !is_fresh && !has_begun(&tail) {
        // Nothing was made, so that what it says binds nobody: it may be over already.
        tail = journal.begin_anew(fresh())?;
    }
    if tail.header.workflow != *workflow {
        let text = format!(
            "the journal {} is of another workflow, or of an earlier version of this one; name \
             another journal",
            options.journal.display()
        );
        return Err(Error::new(ErrorCode::Conflict, text));
    }
    // Both are equal: one is enough.
    tail.header.workflow = Arc::clone(workflow);
    Ok((journal, tail))
}

/// Whether a run saw a node at any time: before that nothing is made. A snapshot is of a run that
/// ended or had much to tell.
pub(super) fn has_begun(tail: &JournalTail) -> bool {
    // What cannot be read is told by whoever puts it back.
    let mut steps = tail.steps.read().map_while(Result::ok);
    let is_seen = |step: RecordedStep| match step.event {
        Event::NodesListed { nodes, .. } => !nodes.is_empty(),
        _ => false,
    };
    tail.snapshot.is_some() || steps.any(is_seen)
}

/// What a driver has again of a run.
pub(super) struct RecoveredRun {
    pub(super) scheduler: Scheduler,
    pub(super) report_builder: RunReportBuilder,
    /// Whether the builder knows only of the steps after a snapshot.
    pub(super) is_report_partial: bool,
    pub(super) ended_attempts: Vec<EndedAttempt>,
}

/// Puts back what the journal keeps of a run, and which homes its names mean.
///
/// # Errors
/// That the journal cannot be read, or is damaged.
pub(super) fn recover_run(
    tail: JournalTail,
    options: &RunOptions,
    homes: &mut Homes,
) -> Result<RecoveredRun> {
    let mut scheduler = tail.header.new_scheduler(&*options.strategy_selector);
    // Before rows are put back: all of them are in the next snapshot.
    scheduler.start_recording();
    let is_report_partial = tail.snapshot.is_some();
    let snapshot = tail.snapshot.unwrap_or_default();
    scheduler.try_redo(&snapshot.state)?;
    snapshot
        .homes
        .iter()
        .for_each(|event| homes.apply_event(event));
    let mut ended_attempts = snapshot.ended_attempts;
    let mut report_builder = RunReportBuilder::default();
    for step in tail.steps.read() {
        let step = step?;
        homes.apply_event(&step.event);
        report_builder.note_event(&scheduler, step.at, &step.event);
        ended_attempts.extend(find_ended_attempt(&scheduler, &step.event));
        scheduler.try_redo(&step.changes)?;
    }
    scheduler.finish_redo();
    Ok(RecoveredRun {
        scheduler,
        report_builder,
        is_report_partial,
        ended_attempts,
    })
}

/// What the next scheduler goes on with.
pub(super) fn take_snapshot(
    scheduler: &Scheduler,
    homes: &Homes,
    ended_attempts: Vec<EndedAttempt>,
) -> Snapshot {
    Snapshot {
        state: scheduler.snapshot(),
        homes: homes.journaled_names(),
        ended_attempts,
    }
}
