//! One agent process: starts it, hands it the job, waits for its report, kills it on request. The
//! agent's standard input stays open as long as this node lives. When it closes, the agent kills
//! the job, so that no job outlives its node, even after `kill -9`.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use bafs_proto::agent_order::AgentOrder;
use bafs_proto::message::{JobOutcome, JobReport, StartJob};
use bafs_proto::path::ROOT_PATH;
use bafs_proto::{Error, ErrorCode, codec};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::pipe::{Receiver, Sender};
use tokio::sync::watch;

use super::agent_log::LogDirectory;
use super::agent_process::{AgentProcess, AgentSpawner, AgentStreams};
use super::control_groups::{ControlGroups, JobGroup};
use super::job_limits::JobWatch;
use super::spare_directories::SpareDirectories;
use super::temporary_directory::{LastUse, TemporaryDirectory};
use super::unlinked_files::UnlinkedFiles;
use super::{ExecutorConfig, agent_log, minimal_report};

/// Longest report line, in bytes.
const REPORT_LINE_BYTES_MAX: u64 = 16 << 20;

/// Largest report that is kept, encoded, in bytes: it must fit a reply with others.
const REPORT_BYTES_MAX: usize = 256 << 10;

/// Longest end of the output that is kept, in bytes.
const OUTPUT_TAIL_BYTES_MAX: usize = 64 << 10;

/// Time for a killed agent to clean up and report, in milliseconds.
const KILL_TIMEOUT_MS: u64 = 2_000;

/// Time for an agent that has reported to exit, and for the rest of its output to arrive after it
/// has exited, in milliseconds.
const EXIT_TIMEOUT_MS: u64 = 2_000;

/// Time for the last words of an agent to reach its log, in milliseconds.
const LOG_TIMEOUT_MS: u64 = 500;

/// Time for an agent to take its job, in milliseconds.
const JOB_INPUT_TIMEOUT_MS: u64 = 10_000;

/// An agent without a sign of life for so long is stuck, in milliseconds; it gives one every two
/// seconds. Its job would wait for its volumes for ever.
const HEARTBEAT_TIMEOUT_MS: u64 = 30_000;

/// What the agents of a node share.
#[derive(Debug, Default)]
pub(super) struct SharedParts {
    spawner: AgentSpawner,
    logs: Arc<LogDirectory>,
    spares: Arc<SpareDirectories>,
}

/// Runs a job in an agent to its end. Dropping the future kills the agent.
pub(super) async fn run_job(
    config: &ExecutorConfig,
    (shared, groups): (&SharedParts, Option<&Arc<ControlGroups>>),
    call: &StartJob,
    mut killed: watch::Receiver<bool>,
) -> JobReport {
    let group = create_group(groups, call).await;
    let result = run_agent(config, (shared, group.clone()), call, &mut killed).await;
    if let Some(group) = group {
        group.remove().await;
    }
    result.unwrap_or_else(|error| minimal_report(JobOutcome::EnvironmentFailed(error)))
}

/// The control group of a job with a limit, where the node can make one.
async fn create_group(
    groups: Option<&Arc<ControlGroups>>,
    call: &StartJob,
) -> Option<Arc<JobGroup>> {
    let (groups, limit) = (groups?.clone(), call.job.limits.memory_bytes?);
    let execution = call.execution;
    let making = tokio::task::spawn_blocking(move || groups.create(execution, limit));
    match making.await.map_err(std::io::Error::other).flatten() {
        Ok(group) => Some(Arc::new(group)),
        Err(error) => {
            tracing::warn!(%error, %execution, "no control group; the job's memory is watched");
            None
        }
    }
}

async fn run_agent(
    config: &ExecutorConfig,
    (shared, group): (&SharedParts, Option<Arc<JobGroup>>),
    call: &StartJob,
    killed: &mut watch::Receiver<bool>,
) -> Result<JobReport, Error> {
    let name = &call.job.name;
    let temporary = TemporaryDirectory::create(
        &config.temporary_directory,
        call.execution,
        name,
        config.temporary_quota.for_job(&call.job)?,
        &shared.spares,
    )?;
    let order = AgentOrder {
        temporary_directory: temporary.path().to_owned(),
        shared_memory_bytes: temporary.memory_bytes(),
        output_prefix: agent_log::output_path_prefix(&config.log_directory, call.execution),
        control_group: group.as_ref().map(|group| group.path().to_owned()),
    };
    let started = shared.spawner.start(config, order).await;
    let (child, streams) = started.map_err(|error| not_started_error(config, &error))?;
    let AgentStreams {
        input,
        output,
        errors,
    } = streams;
    let path = config.log_directory.join(format!("{}.log", call.execution));
    let logging = tokio::spawn(agent_log::copy_stderr(
        errors,
        path,
        Arc::clone(&shared.logs),
    ));
    let (stop, mut stopped) = watch::channel(false);
    let unlinked = UnlinkedFiles::of_agent(child.id(), visible_paths(call));
    let watch = JobWatch {
        job: name.clone(),
        limits: call.job.limits,
        agent: child.id(),
        group,
        seen_bytes_max: AtomicU64::new(0),
    };
    let running = run_spawned(child, input, output, call, &mut stopped);
    let watched = (&temporary, unlinked, &watch);
    let result = match run_within_quota(running, watched, killed, &stop).await {
        Ok(report) => Ok(watch.complete_report(report).await),
        Err(error) => Err(error),
    };
    // The report's reader may read the log next.
    let _ = tokio::time::timeout(Duration::from_millis(LOG_TIMEOUT_MS), logging).await;
    // An agent reports when no process of its job is left; one that was killed, earlier.
    let last_use = match &result {
        Ok(report) if report.outcome != JobOutcome::Killed => LastUse::Over,
        _ => LastUse::Uncertain,
    };
    temporary.remove(last_use).await;
    result
}

/// Paths of foreign data in a job's name space: volumes, and directories of the host.
fn visible_paths(call: &StartJob) -> Vec<PathBuf> {
    let job = &call.job;
    // What a job has of its own is no part of its root.
    let volumes = job.mounts.iter().map(|mount| &mount.path);
    let volumes = volumes.filter(|path| *path != ROOT_PATH);
    let paths = volumes.chain(&job.command.shared_directories);
    paths.map(PathBuf::from).collect()
}

/// Waits for the end of a job; ends it on request, or when it exceeds a limit: then the report has
/// that error, with what the job printed.
async fn run_within_quota(
    running: impl Future<Output = Result<JobReport, Error>>,
    (temporary, unlinked, watch): (&TemporaryDirectory, UnlinkedFiles, &JobWatch),
    killed: &mut watch::Receiver<bool>,
    stop: &watch::Sender<bool>,
) -> Result<JobReport, Error> {
    let mut running = std::pin::pin!(running);
    let excess = tokio::select! {
        report = &mut running => {
            let full = match &report {
                Ok(report) => temporary.disk_full_error(report).await,
                Err(_) => None,
            };
            return full.map_or(report, Err);
        }
        () = wait_for_kill(killed) => None,
        excess = temporary.wait_for_overflow(unlinked) => Some(excess),
        excess = watch.wait_for_excess() => Some(excess),
    };
    stop.send_replace(true);
    let report = running.await;
    match (excess, report) {
        // It ended before it was stopped.
        (Some(_), Ok(report)) if report.outcome == JobOutcome::Exited(0) => Ok(report),
        (Some(excess), Ok(report)) => Ok(JobReport {
            outcome: JobOutcome::EnvironmentFailed(excess),
            ..report
        }),
        (Some(excess), Err(_)) => Err(excess),
        (None, report) => report,
    }
}

async fn run_spawned(
    mut child: AgentProcess,
    input: Sender,
    output: Receiver,
    call: &StartJob,
    killed: &mut watch::Receiver<bool>,
) -> Result<JobReport, Error> {
    let mut reading = tokio::spawn(read_report(output));
    let ending = supervise(&mut child, input, call, killed, &mut reading).await;
    let report = match ending {
        AgentEnd::Reported(report) => {
            let exit = child.wait();
            if tokio::time::timeout(Duration::from_millis(EXIT_TIMEOUT_MS), exit)
                .await
                .is_err()
            {
                kill_and_reap(&mut child).await;
            }
            return report.map(truncate_report);
        }
        AgentEnd::Exited(status) => {
            let rest =
                tokio::time::timeout(Duration::from_millis(EXIT_TIMEOUT_MS), &mut reading).await;
            match rest {
                Ok(Ok(Ok(report))) => return Ok(truncate_report(report)),
                _ => Err(agent_died_error(
                    call,
                    &format!("it ended with {status} without a report"),
                )),
            }
        }
        AgentEnd::Killed => {
            kill_and_reap(&mut child).await;
            Ok(minimal_report(JobOutcome::Killed))
        }
        AgentEnd::Fault(why) => {
            kill_and_reap(&mut child).await;
            Err(agent_died_error(call, &why))
        }
    };
    reading.abort();
    if *killed.borrow() {
        Ok(minimal_report(JobOutcome::Killed))
    } else {
        report
    }
}

/// How the supervision of an agent ended.
enum AgentEnd {
    Reported(Result<JobReport, Error>),
    /// With what is known of its end.
    Exited(String),
    Killed,
    Fault(String),
}

type ReportTask = tokio::task::JoinHandle<Result<JobReport, String>>;

async fn supervise(
    child: &mut AgentProcess,
    input: Sender,
    call: &StartJob,
    killed: &mut watch::Receiver<bool>,
    reading: &mut ReportTask,
) -> AgentEnd {
    let mut input = Some(input);
    let handed = tokio::select! {
        handed = send_job(&mut input, call) => handed,
        () = wait_for_kill(killed) => Ok(()),
    };
    if let Err(why) = handed {
        // It may have died on the way and say why by its exit status.
        tracing::debug!(execution = %call.execution, %why, "job not taken by its agent");
    }
    // One buffer for both, so that no byte is read twice.
    let mut ending = std::pin::pin!(wait_for_end(child, reading));
    let ended = tokio::select! {
        ended = &mut ending => ended,
        () = wait_for_kill(killed) => {
            drop(input.take()); // the agent kills its job at the end of its input
            let grace = Duration::from_millis(KILL_TIMEOUT_MS);
            tokio::time::timeout(grace, ending).await.unwrap_or(AgentEnd::Killed)
        }
    };
    drop(input);
    ended
}

async fn wait_for_end(child: &mut AgentProcess, reading: &mut ReportTask) -> AgentEnd {
    tokio::select! {
        biased;
        read = &mut *reading => match read {
            Ok(Ok(report)) => AgentEnd::Reported(Ok(report)),
            Ok(Err(why)) => match tokio::time::timeout(
                Duration::from_millis(EXIT_TIMEOUT_MS),
                child.wait(),
            ).await {
                Ok(Ok(status)) => AgentEnd::Fault(format!("it ended with {status}; {why}")),
                _ => AgentEnd::Fault(why),
            },
            Err(e) => AgentEnd::Fault(e.to_string()),
        },
        status = child.wait() => match status {
            Ok(status) => AgentEnd::Exited(status),
            Err(e) => AgentEnd::Fault(e.to_string()),
        },
    }
}

fn not_started_error(config: &ExecutorConfig, why: &std::io::Error) -> Error {
    let text = format!(
        "cannot start the agent program {}: {why}; check the node's installation",
        config.program.display()
    );
    Error::new(ErrorCode::ServerFault, text)
}

/// Writes the job as one line; the pipe stays open.
async fn send_job(input: &mut Option<Sender>, call: &StartJob) -> Result<(), String> {
    let Some(input) = input else { return Ok(()) };
    let mut line = serde_json::to_vec(&call.job).map_err(|e| e.to_string())?;
    line.push(b'\n');
    let writing = async {
        input.write_all(&line).await?;
        input.flush().await
    };
    match tokio::time::timeout(Duration::from_millis(JOB_INPUT_TIMEOUT_MS), writing).await {
        Ok(written) => written.map_err(|e| e.to_string()),
        Err(_) => Err("it does not read its job description".to_owned()),
    }
}

/// Skips the signs of life, empty lines, and reads the report.
async fn read_report(output: Receiver) -> Result<JobReport, String> {
    let mut line = Vec::new();
    let mut output = BufReader::new(output).take(REPORT_LINE_BYTES_MAX);
    let silence = Duration::from_millis(HEARTBEAT_TIMEOUT_MS);
    while line.is_empty() {
        output.set_limit(REPORT_LINE_BYTES_MAX);
        let read = tokio::time::timeout(silence, output.read_until(b'\n', &mut line)).await;
        match read {
            Ok(Ok(0)) => break,
            Ok(Ok(_)) if line == b"\n" => line.clear(),
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return Err(error.to_string()),
            Err(_) => {
                let seconds = silence.as_secs();
                return Err(format!("it sent no heartbeat for {seconds} s"));
            }
        }
    }
    if line.is_empty() {
        return Err("it sent no report".to_owned());
    }
    serde_json::from_slice(&line).map_err(|e| format!("its report is invalid: {e}"))
}

async fn wait_for_kill(killed: &mut watch::Receiver<bool>) {
    if killed.wait_for(|killed| *killed).await.is_err() {
        std::future::pending::<()>().await;
    }
}

async fn kill_and_reap(child: &mut AgentProcess) {
    if let Err(error) = child.kill().await {
        tracing::warn!(%error, "agent not killed");
    }
}

fn agent_died_error(call: &StartJob, why: &str) -> Error {
    let text = format!(
        "the agent of job '{}' died: {why}; see its log {}.log in the node's logs",
        call.job.name, call.execution
    );
    Error::new(ErrorCode::ServerFault, text)
}

/// Cuts a report to the size of one reply: the pages first, because they are only statistics.
fn truncate_report(mut report: JobReport) -> JobReport {
    if report.output_tail.len() > OUTPUT_TAIL_BYTES_MAX {
        let start = report.output_tail.len() - OUTPUT_TAIL_BYTES_MAX;
        let start = (start..)
            .find(|&at| report.output_tail.is_char_boundary(at))
            .unwrap_or(0);
        report.output_tail.drain(..start);
    }
    let size = |report: &JobReport| codec::encode(report).map_or(usize::MAX, |bytes| bytes.len());
    if size(&report) > REPORT_BYTES_MAX {
        tracing::warn!("a report is too large; its list of touched pages is dropped");
        report
            .volumes
            .iter_mut()
            .for_each(|volume| volume.pages.clear());
    }
    if size(&report) > REPORT_BYTES_MAX {
        report.volumes.clear();
        report.outcome = match report.outcome {
            JobOutcome::NotStarted(why) => JobOutcome::NotStarted(why.chars().take(1024).collect()),
            outcome => outcome,
        };
    }
    report
}
