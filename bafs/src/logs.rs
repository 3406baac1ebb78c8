//! `bafs logs`: what the jobs of a run printed, from the files beside its journal. Asks no server.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use bafs_sched::io::job_logs::{LOGS_BYTES_MAX, LoggedAttempt, is_in_use, read_index};
use bafs_sched::io::{journal, user_commands};
use bafs_sched::replay::{describe_status, replay_history};
use bafs_sched::{JobState, Scheduler};
use bafs_sim::strategy_selector::ModelSelector;
use bafs_workflow::find_nearest;
use serde::Serialize;

use crate::args::LogsArgs;
use crate::followed_log::follow_job;
use crate::history;
use crate::output::Printer;
use crate::workflow_file;

/// How the directory is called that a run keeps its logs in.
const LOGS_EXTENSION: &str = "logs";

/// Most names of jobs that are listed.
const NAMES_SHOWN_MAX: usize = 5;

/// The directory that takes what the jobs of a run print whose journal this is.
pub(crate) fn logs_directory(journal: &Path) -> PathBuf {
    match journal.extension() {
        Some(extension) if extension == "journal" => journal.with_extension(LOGS_EXTENSION),
        _ => sibling_path(journal, LOGS_EXTENSION),
    }
}

/// A path beside a file: its name with an ending more.
pub(crate) fn sibling_path(file: &Path, ending: &str) -> PathBuf {
    let mut name = file.to_owned().into_os_string();
    name.push(format!(".{ending}"));
    PathBuf::from(name)
}

/// Where the logs of a run are, and what else tells of it.
struct RunFiles {
    logs: PathBuf,
    journal: Option<PathBuf>,
    workflow: Option<PathBuf>,
}

/// What is told of an attempt.
#[derive(Debug, Serialize)]
struct AttemptLog {
    job: String,
    attempt: u32,
    node: String,
    outcome: String,
    stdout: Option<String>,
    stderr: Option<String>,
    missing_reason: Option<String>,
}

/// Prints what a job printed.
pub(crate) fn print_logs(args: &LogsArgs, output: Printer) -> Result<()> {
    let (run, name) = match args.run_and_job.as_slice() {
        [run, job] => (find_run(Path::new(run))?, job),
        [job] => (find_only_run()?, job),
        _ => bail!("name a run and a job of it: bafs logs WORKFLOW JOB"),
    };
    let all = !(args.stdout || args.stderr);
    if args.follow && is_in_use(&run.logs).unwrap_or(false) {
        check_job_name(&run, name)?;
        let wanted = [args.stdout || all, args.stderr || all];
        return follow_job(&run.logs, name, wanted, || is_job_over(&run, name));
    }
    let attempts = match read_index(&run.logs) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        read => read.with_context(|| format!("cannot read {}", run.logs.display()))?,
    };
    let is_there = |it: &&LoggedAttempt| args.node.as_ref().is_none_or(|node| *node == it.node);
    let of_job = attempts.iter().filter(|it| it.job == *name);
    let of_job: Vec<&LoggedAttempt> = of_job.filter(is_there).collect();
    let Some(last) = of_job.last() else {
        if let Some(node) = args.node.as_ref().filter(|_| !attempts.is_empty()) {
            bail!("no attempt of job '{name}' has ended on node '{node}'");
        }
        return Err(anyhow!(explain_missing_log(&run, name, &attempts)?));
    };
    let attempt = match args.attempt {
        None => last,
        Some(number) => of_job
            .iter()
            .find(|attempt| attempt.attempt == number)
            .with_context(|| {
                let count = last.attempt;
                format!("job '{name}' has no ended attempt {number}; the last is {count}")
            })?,
    };
    let [stdout, stderr] = attempt.log_paths(&run.logs);
    let read = |wanted: bool, file: &Path, bytes: u64| match wanted || all {
        true => read_log(file, bytes).map(Some),
        false => Ok(None),
    };
    let told = AttemptLog {
        job: attempt.job.clone(),
        attempt: attempt.attempt,
        node: attempt.node.clone(),
        outcome: attempt.end_description.clone(),
        stdout: read(args.stdout, &stdout, attempt.stdout_bytes)?,
        stderr: read(args.stderr, &stderr, attempt.stderr_bytes)?,
        missing_reason: attempt.missing_reason.clone(),
    };
    output.print_result(&format_attempt(&told), &told)?;
    if args.attempt.is_none() && is_job_running(&run, name) {
        eprintln!("bafs: job '{name}' runs again now; --follow prints its new output");
    }
    Ok(())
}

fn format_attempt(told: &AttemptLog) -> String {
    let (job, attempt, node, ended) = (&told.job, told.attempt, &told.node, &told.outcome);
    let mut text = format!("job {job}, attempt {attempt} on node {node}: {ended}");
    if let Some(why) = &told.missing_reason {
        return text + &format!("\nits output is not kept: {why}");
    }
    let streams = [
        ("standard output", &told.stdout),
        ("standard error", &told.stderr),
    ];
    for (stream, printed) in streams {
        match printed.as_deref() {
            None => {}
            Some("") => text += &format!("\n--- {stream}: nothing"),
            Some(printed) => {
                text += &format!("\n--- {stream}:\n{}", printed.trim_end_matches('\n'));
            }
        }
    }
    text
}

/// What is kept of a stream, or a sentence that says why it is not.
fn read_log(file: &Path, bytes: u64) -> Result<String> {
    if bytes == 0 {
        return Ok(String::new());
    }
    match fs::read(file) {
        Ok(read) => Ok(String::from_utf8_lossy(&read).into_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(format!(
            "[removed: the logs of a run take at most {} MiB; BAFS removes old logs of successful \
             jobs first]",
            LOGS_BYTES_MAX >> 20
        )),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", file.display())),
    }
}

/// The run that a user means who names its journal, its workflow or its logs.
fn find_run(path: &Path) -> Result<RunFiles> {
    if path.is_dir() {
        let workflow = path.with_extension("");
        let journal = sibling_path(&workflow, "journal");
        return Ok(RunFiles {
            logs: path.to_owned(),
            journal: journal.is_file().then_some(journal),
            workflow: workflow.is_file().then_some(workflow),
        });
    }
    let told = |error| anyhow!("{error:#}; name the workflow of a run, or its journal");
    if history::is_journal(path).map_err(told)? {
        let workflow = path.with_extension("");
        return Ok(RunFiles {
            logs: logs_directory(path),
            journal: Some(path.to_owned()),
            workflow: workflow.is_file().then_some(workflow),
        });
    }
    let (logs, journal) = (
        sibling_path(path, LOGS_EXTENSION),
        sibling_path(path, "journal"),
    );
    if !logs.is_dir() && !journal.is_file() {
        bail!(
            "neither {} nor {} exists; `bafs run {}` creates them; if it used --journal, name that \
             file",
            logs.display(),
            journal.display(),
            path.display()
        );
    }
    Ok(RunFiles {
        logs,
        journal: journal.is_file().then_some(journal),
        workflow: Some(path.to_owned()),
    })
}

/// The run whose logs are here, if there is one only.
fn find_only_run() -> Result<RunFiles> {
    let entries = fs::read_dir(".").into_iter().flatten().flatten();
    let paths = entries.map(|entry| PathBuf::from(entry.file_name()));
    let is_such = |path: &PathBuf| {
        path.extension().is_some_and(|it| it == LOGS_EXTENSION) && read_index(path).is_ok()
    };
    let mut found: Vec<PathBuf> = paths.filter(is_such).collect();
    found.sort();
    match found.as_slice() {
        [only] => find_run(only),
        [] => bail!(
            "this directory has no logs of a run; name its workflow or journal, too: `bafs logs \
             WORKFLOW JOB`"
        ),
        [first, ..] => bail!(
            "this directory has logs of {} runs; name one: `bafs logs {} JOB`",
            found.len(),
            first.display()
        ),
    }
}

/// Why there is no log of a job.
fn explain_missing_log(run: &RunFiles, name: &str, attempts: &[LoggedAttempt]) -> Result<String> {
    if let Some(path) = &run.journal {
        let scheduler = replay_history(journal::read_history(path)?, &ModelSelector).1;
        let workflow = scheduler.workflow();
        let Some(job) = user_commands::find_job(workflow, name) else {
            let names = workflow.jobs.iter().map(|job| job.name.as_str());
            return Ok(unknown_job_message(name, names.collect()));
        };
        return Ok(match scheduler.job_state(job) {
            JobState::Active => {
                format!("job '{name}' still runs; `bafs logs --follow` prints its output now")
            }
            JobState::Done | JobState::Failed => format!(
                "the output of job '{name}' is not kept: its node did not deliver it, or {} could \
                 not be written",
                run.logs.display()
            ),
            _ => describe_status(&scheduler, name)
                .unwrap_or_else(|| format!("job '{name}' has not run yet")),
        });
    }
    let workflow = run.workflow.as_deref();
    let workflow = workflow.and_then(workflow_file::load_without_warnings);
    let names: Vec<&str> = match &workflow {
        Some(workflow) => workflow.jobs.iter().map(|job| job.name.as_str()).collect(),
        None => attempts.iter().map(|it| it.job.as_str()).collect(),
    };
    Ok(match names.contains(&name) {
        true => format!(
            "job '{name}' has no output in {}: it still runs, or has not run",
            run.logs.display()
        ),
        false => unknown_job_message(name, names),
    })
}

fn unknown_job_message(name: &str, mut names: Vec<&str>) -> String {
    names.sort_unstable();
    names.dedup();
    let hint = match find_nearest(name, names.iter().copied()) {
        Some(nearest) => format!("did you mean '{nearest}'?"),
        None if names.is_empty() => "no attempt has ended".to_owned(),
        None => {
            let shown = names.iter().take(NAMES_SHOWN_MAX).copied();
            let more = if names.len() > NAMES_SHOWN_MAX {
                ", …"
            } else {
                ""
            };
            let shown: Vec<&str> = shown.collect();
            format!("it has {}{more}", shown.join(", "))
        }
    };
    format!("the run has no job '{name}': {hint}")
}

/// Rejects a name that no job of the run has, as far as anybody knows.
fn check_job_name(run: &RunFiles, name: &str) -> Result<()> {
    let workflow = match (&run.journal, &run.workflow) {
        (Some(path), _) => Some(replay_run(path)?.workflow().clone()),
        (None, Some(path)) => workflow_file::load_without_warnings(path).map(Arc::new),
        (None, None) => None,
    };
    let Some(workflow) = workflow else {
        return Ok(());
    };
    if user_commands::find_job(&workflow, name).is_some() {
        return Ok(());
    }
    let names = workflow.jobs.iter().map(|job| job.name.as_str());
    bail!(unknown_job_message(name, names.collect()))
}

fn replay_run(journal: &Path) -> Result<Scheduler> {
    Ok(replay_history(journal::read_history(journal)?, &ModelSelector).1)
}

/// Whether a job is done or given up, if the run has a journal.
fn is_job_over(run: &RunFiles, name: &str) -> Option<bool> {
    let scheduler = replay_run(run.journal.as_deref()?).ok()?;
    let job = user_commands::find_job(scheduler.workflow(), name)?;
    let state = scheduler.job_state(job);
    Some(matches!(
        state,
        JobState::Done | JobState::Failed | JobState::Skipped
    ))
}

/// Whether a job of a run that goes on is under way.
fn is_job_running(run: &RunFiles, name: &str) -> bool {
    let journal = run.journal.as_deref();
    let written = journal.filter(|path| history::is_journal_open(path));
    let history = written.and_then(|path| journal::read_history(path).ok());
    history.is_some_and(|history| {
        let scheduler = replay_history(history, &ModelSelector).1;
        let job = user_commands::find_job(scheduler.workflow(), name);
        job.is_some_and(|job| scheduler.job_state(job) == JobState::Active)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_beside_the_journal() {
        let directory = |journal: &str| logs_directory(Path::new(journal));
        assert_eq!(directory("a/w.bafs.journal"), Path::new("a/w.bafs.logs"));
        assert_eq!(directory("a/night"), Path::new("a/night.logs"));
    }

    #[test]
    fn unknown_job_gets_a_suggestion() {
        let told = unknown_job_message("serach", vec!["search", "align"]);
        assert!(told.ends_with("did you mean 'search'?"), "{told}");
        let told = unknown_job_message("x", vec!["search", "align", "align"]);
        assert!(told.ends_with("it has align, search"), "{told}");
    }

    #[test]
    fn header_names_node_attempt_and_end() {
        let mut told = AttemptLog {
            job: "a".to_owned(),
            attempt: 2,
            node: "n1".to_owned(),
            outcome: "exits with code 1 after 0.2 s".to_owned(),
            stdout: Some("one\ntwo\n".to_owned()),
            stderr: Some(String::new()),
            missing_reason: None,
        };
        let text = "job a, attempt 2 on node n1: exits with code 1 after 0.2 s\n--- standard \
                    output:\none\ntwo\n--- standard error: nothing";
        assert_eq!(format_attempt(&told), text);
        told.missing_reason = Some("node n1 did not tell it".to_owned());
        let text = format_attempt(&told);
        assert!(
            text.ends_with("is not kept: node n1 did not tell it"),
            "{text}"
        );
    }
}
