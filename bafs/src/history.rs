//! `bafs replay` and `bafs why`: what a run did and why, from its journal. They run nothing.

use std::fs::{File, TryLockError};
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use bafs_sched::Action;
use bafs_sched::io::journal;
use bafs_sched::replay::{HistoryLine, describe_status, replay_history, verify_decisions};
use bafs_sim::strategy_selector::ModelSelector;

use crate::args::{ReplayArgs, WhyArgs};
use crate::input_file;
use crate::output::Printer;
use crate::sizes;

/// Tells all that happened in a run.
pub(crate) fn print_history(args: &ReplayArgs, output: Printer) -> Result<()> {
    let Some(run) = &args.run else {
        bail!("no run is named; give its journal: {}", describe_journals());
    };
    if args.verify {
        return verify_run(run, output);
    }
    print_lines(&read_lines(run)?, output)
}

/// Tells whether this program decides as the run did.
fn verify_run(run: &Path, output: Printer) -> Result<()> {
    let path = find_journal(run)?;
    let history = journal::read_history(&path)?;
    let Some(found) = verify_decisions(&history, &ModelSelector) else {
        let steps = history.steps.len();
        let text = format!("the same decisions after all {steps} events");
        return output.print_result(&text, &serde_json::json!({ "difference": null }));
    };
    let list = |actions: &[Action]| match actions {
        [] => "  nothing".to_owned(),
        _ => {
            let lines = actions.iter().map(|action| format!("  {action:?}"));
            lines.collect::<Vec<_>>().join("\n")
        }
    };
    let text = format!(
        "at {}.{:03} s, after {:?}\nthe run decided:\n{}\nthis program decides:\n{}",
        found.at_ms / 1_000,
        found.at_ms % 1_000,
        found.event,
        list(&found.recorded),
        list(&found.decided),
    );
    output.print_result(&text, &serde_json::json!({ "difference": found }))?;
    bail!("this program decides otherwise than the run did; it continues the run all the same")
}

/// Tells what happened to one job, volume or node of a run.
pub(crate) fn explain_name(args: &WhyArgs, output: Printer) -> Result<()> {
    let Some(name) = &args.name else {
        let run = args.run.display();
        bail!(
            "`bafs why` needs the journal of a run and the name of a job, volume or node of it, \
             not '{run}' alone; {}",
            describe_journals()
        );
    };
    let path = find_journal(&args.run)?;
    let history = journal::read_history(&path)?;
    let measured = sizes::describe_measured_size(&history, name);
    let (all, scheduler) = replay_history(history, &ModelSelector);
    let is_about = |line: &HistoryLine| line.subjects.contains(name);
    let mut told: Vec<HistoryLine> = all.iter().filter(|line| is_about(line)).cloned().collect();
    let status = describe_status(&scheduler, name);
    told.extend(measured.into_iter().chain(status).map(|text| HistoryLine {
        at_ms: all.last().map_or(0, |line| line.at_ms),
        subjects: vec![name.clone()],
        text,
    }));
    if told.is_empty() && scheduler.job_records().any(|record| record.job == *name) {
        told.push(HistoryLine {
            at_ms: 0,
            subjects: vec![name.clone()],
            text: format!("job '{name}' was up to date when the run began, and did not run"),
        });
    }
    if told.is_empty() {
        bail!(
            "the journal {} has no entry for '{name}'; name a job, volume or node of that run \
             (`bafs replay` lists all events)",
            path.display()
        );
    }
    print_lines(&told, output)
}

/// Where journals are, and which are here.
pub(crate) fn describe_journals() -> String {
    /// More are not named.
    const JOURNALS_SHOWN_MAX: usize = 3;
    let entries = std::fs::read_dir(".").into_iter().flatten().flatten();
    let names = entries.map(|entry| PathBuf::from(entry.file_name()));
    let is_named = |path: &PathBuf| path.extension().is_some_and(|it| it == "journal");
    let mut found: Vec<PathBuf> = names
        .filter(|path| is_named(path) && is_journal(path).unwrap_or(false))
        .collect();
    found.sort();
    let named = found
        .iter()
        .take(JOURNALS_SHOWN_MAX)
        .map(|path| path.display());
    let named: Vec<String> = named.map(|name| name.to_string()).collect();
    let here = match named.is_empty() {
        true => String::new(),
        false => format!(" (here: {})", named.join(", ")),
    };
    format!("`bafs run` writes it to the workflow's directory, as WORKFLOW.journal{here}")
}

/// How every journal begins, of whatever version.
const JOURNAL_MAGIC: &[u8] = b"bafs-journal ";

/// Whether a file is a journal.
pub(crate) fn is_journal(path: &Path) -> Result<bool> {
    Ok(read_prefix(path, JOURNAL_MAGIC.len() as u64)? == JOURNAL_MAGIC)
}

/// The first bytes of a file, at most so many.
pub(crate) fn read_prefix(path: &Path, bytes: u64) -> Result<Vec<u8>> {
    let failed = || format!("cannot read {}", path.display());
    let mut start = Vec::new();
    input_file::open_regular(path)?
        .take(bytes)
        .read_to_end(&mut start)
        .with_context(failed)?;
    Ok(start)
}

/// The journal that a user means who names it, or the workflow that it is beside.
pub(crate) fn find_journal(path: &Path) -> Result<PathBuf> {
    let is_journal = is_journal(path);
    if is_journal.map_err(|error| anyhow!("{error:#}; name a journal: {}", describe_journals()))? {
        return Ok(path.to_owned());
    }
    let mut name = path.to_owned().into_os_string();
    name.push(".journal");
    let beside = PathBuf::from(name);
    if beside.is_file() {
        return Ok(beside);
    }
    bail!(
        "{} is not a journal, and {} does not exist; name the file of `bafs run --journal` (with \
         --local, a run writes a journal only with --journal)",
        path.display(),
        beside.display()
    );
}

/// Whether a scheduler has a journal open.
pub(crate) fn is_journal_open(path: &Path) -> bool {
    let locked = File::open(path).map(|file| file.try_lock_shared());
    matches!(locked, Ok(Err(TryLockError::WouldBlock)))
}

fn read_lines(path: &Path) -> Result<Vec<HistoryLine>> {
    let path = find_journal(path)?;
    let history = journal::read_history(&path)?;
    Ok(replay_history(history, &ModelSelector).0)
}

fn print_lines(lines: &[HistoryLine], output: Printer) -> Result<()> {
    let text = |line: &HistoryLine| {
        let (seconds, ms) = (line.at_ms / 1_000, line.at_ms % 1_000);
        format!("{seconds:>6}.{ms:03} s  {}", line.text)
    };
    let text: Vec<String> = lines.iter().map(text).collect();
    output.print_result(&text.join("\n"), &lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreadable_journal_error_precedes_the_advice() {
        let path = Path::new("/nowhere/nosuch");
        let said = format!("{:#}", find_journal(path).expect_err("it is not there"));
        let begin = "cannot read /nowhere/nosuch: No such file or directory";
        assert!(said.starts_with(begin), "{said}");
        assert!(
            said.contains("; name a journal: `bafs run` writes it"),
            "{said}"
        );
    }
}
