//! `bafs prefer` and `bafs cancel`: wishes for a run that goes on. Its scheduler
//! reads and journals them; these commands only leave them beside its journal.

use std::path::Path;

use anyhow::{Context, Result, bail};
use bafs_sched::UserCommand;
use bafs_sched::io::{journal, user_commands};
use bafs_workflow::JobIndex;

use crate::args::{CancelArgs, PreferArgs};
use crate::history;
use crate::output::Printer;

/// Lets a pipeline go before others.
pub(crate) fn prefer_pipeline(args: &PreferArgs, output: Printer) -> Result<()> {
    let priority = args.priority;
    let command = |job| UserCommand::SetPriority { job, priority };
    send_command(&args.run, &args.pipeline, command)?;
    let text = format!(
        "the pipeline of job {} gets priority {priority} within two seconds",
        args.pipeline
    );
    output.print_result(
        &text,
        &serde_json::json!({"job": args.pipeline, "priority": priority}),
    )
}

/// Gives up the rest of a pipeline.
pub(crate) fn cancel_pipeline(args: &CancelArgs, output: Printer) -> Result<()> {
    send_command(&args.run, &args.pipeline, |job| UserCommand::Cancel { job })?;
    let text = format!(
        "the scheduler cancels the pipeline of job {} within two seconds, unless it ends first",
        args.pipeline
    );
    output.print_result(
        &text,
        &serde_json::json!({"job": args.pipeline, "cancelled": true}),
    )
}

fn send_command(
    run: &Path,
    name: &str,
    command: impl FnOnce(JobIndex) -> UserCommand,
) -> Result<()> {
    let path = history::find_journal(run)?;
    if !history::is_journal_open(&path) {
        bail!(
            "no scheduler uses the journal {}: start the run with `bafs run`, then repeat this \
             command",
            path.display()
        );
    }
    let header = journal::read_header(&path)?;
    let unknown = || format!("the run has no job '{name}'; name any job of the pipeline");
    let job = user_commands::find_job(&header.workflow, name).with_context(unknown)?;
    Ok(user_commands::send_command(&path, &header, command(job))?)
}
