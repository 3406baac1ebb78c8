//! What the program's subcommands call: `bafs agent`, `bafs exec`, `bafs mount`. Parses no
//! arguments; each function is the rest of `main`.

use std::io::{self, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use bafs_proto::identity::Identity;
use bafs_proto::message::{JobOutcome, JobSpec, MountSpec, Role};
use bafs_proto::net::channel::Dialer;
use bafs_proto::net::memory::MemoryNetwork;
use bafs_proto::net::pool::Pool;
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use nix::libc;
use nix::sched::{sched_getaffinity, sched_setaffinity};
use nix::unistd::{Pid, geteuid};
use serde_json::json;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};

use crate::agent::{Agent, AgentOptions, TemporaryLocation};
use crate::agent_input;
use crate::connection_end::ConnectionEnd;
use crate::control_group;
use crate::doctor;
use crate::fuse::{FuseMount, MountError, MountKind, open_device};
use crate::job::{JobEnd, JobIo, StopRequest, run_job};
use crate::memory;
use crate::mount_watchdog::MountWatchdog;
use crate::sandbox::{
    NotStartedReason, Privilege, ReservedStage, Sandbox, enter_private, reserve_stage,
};
use crate::signals::{SignalOrigin, StopSignal, StopSignals};
use crate::tree;
use crate::volume::Volume;

/// Exit code when the environment of a job failed, `EX_TEMPFAIL`: running it again may help.
pub const EXIT_ENVIRONMENT: u8 = 75;

/// Exit codes of a program that could not be started, as shells use them.
const EXIT_NOT_EXECUTABLE: u8 = 126;
const EXIT_NOT_FOUND: u8 = 127;

/// How often a mount's keeper is looked at.
const WATCHDOG_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Signals within this time are one request, in milliseconds.
const SIGNAL_MERGE_MS: u64 = 1_000;

/// Pause between two signs of life of an agent: an empty line each, before its report.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);

/// Threads of the runtime: calls are short, and more threads than processors do not help.
const WORKER_THREADS: usize = 2;

/// Threads for what blocks, as the mounting and unmounting of a volume: those of all volumes of a
/// job must not each have one.
const BLOCKING_THREADS_MAX: usize = 32;

/// How a failure of the environment is told on standard error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureFormat {
    /// In words.
    Text,
    /// As one line of JSON, with `reason`, `code`, `volume` and `detail`.
    Json,
}

/// What a program of `bafs exec` or a mount of `bafs mount` failed with.
#[derive(Debug, Clone, Copy)]
pub struct EnvironmentFailure<'a> {
    /// What went wrong, for programs.
    pub code: ErrorCode,
    /// The volume that is the cause, if one is.
    pub volume: Option<&'a str>,
    /// What failed, why, and what to do, for people.
    pub detail: &'a str,
}

impl EnvironmentFailure<'_> {
    /// The line for standard error.
    #[must_use]
    pub fn format_line(&self, format: FailureFormat) -> String {
        match format {
            FailureFormat::Text => format!("bafs: {}", self.detail),
            FailureFormat::Json => json!({
                "reason": format!("{:?}", self.code),
                "code": self.code as u16,
                "volume": self.volume,
                "detail": self.detail,
            })
            .to_string(),
        }
    }
}

/// `bafs agent`: runs the job that one line of JSON on standard input describes, and reports on
/// standard output in one line. The end of standard input kills the job. Empty lines before the
/// report say that the agent still works: who started it kills one that is stuck.
///
/// What the job printed goes to files that begin with `printed`, before the report does.
///
/// Call it with one thread, after `sandbox::dispatch_job_init`.
pub fn agent_main(
    identity_dir: &Path,
    output_prefix: Option<&Path>,
    options: AgentOptions,
    temporary: Option<TemporaryLocation>,
) -> ExitCode {
    let entered = enter_private();
    let mut input = BufReader::new(io::stdin());
    let end = agent_input::read_spec(&mut input).and_then(|spec| {
        let privilege = entered.map_err(|error| unsupported_error(&error))?;
        // A job without volumes calls no server.
        let calls_servers = !spec.mounts.is_empty();
        let identity = calls_servers.then(|| Identity::load(identity_dir, Role::Agent));
        let identity = identity.transpose()?;
        let stage = reserve_stage().map_err(|error| unsupported_error(&error))?;
        let runtime = build_runtime(if calls_servers { WORKER_THREADS } else { 1 })?;
        let (kill, command) = watch::channel(StopRequest::None);
        agent_input::watch_input_end(&runtime, input, kill)
            .map_err(|error| unsupported_error(&error))?;
        runtime.spawn(print_keepalives());
        let places = (options, temporary, output_prefix.map(Path::to_owned));
        let end = runtime.block_on(async {
            let pool = match &identity {
                Some(identity) => build_pool(identity)?,
                None => Pool::new(MemoryNetwork::new().dialer("agent")),
            };
            let (rights, io) = ((privilege, stage), JobIo::Captured);
            Ok(serve_job(spec, pool, rights, io, command, places).await)
        });
        // Its threads end with the process.
        runtime.shutdown_background();
        end
    });
    let end = end.unwrap_or_else(|error| JobEnd::environment_failure(error, None));
    if let Some(prefix) = output_prefix
        && let Err(error) = end.output.write(prefix)
    {
        tracing::warn!(%error, "the job's output is not kept");
    }
    control_group::remove_orphaned_group();
    let mut output = io::stdout().lock();
    let written = serde_json::to_writer(&mut output, &end.report)
        .map_err(io::Error::from)
        .and_then(|()| output.write_all(b"\n"))
        .and_then(|()| output.flush());
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "cannot report");
            ExitCode::FAILURE
        }
    }
}

/// `bafs exec`: runs a job on this terminal and ends as the job ended. The job is what `prepare`
/// gives, which may ask servers by the same connections as the job's volumes later.
///
/// A signal that asks this process to end is passed on to every process of the job; what of it goes
/// on for ten seconds is killed, and all of it when somebody asks again after a second. Ctrl-C the
/// job hears itself, and may go on; pressed twice within a second, it kills the job.
///
/// Exit codes: the job's own; 128 and the signal's number; 127 or 126 when the program is missing
/// or cannot be executed; 75 when the environment failed, which standard error tells as `format`
/// says.
/// Call it with one thread, after `sandbox::dispatch_job_init`.
///
/// # Errors
/// What `prepare` fails with.
pub fn exec_main<E>(
    prepare: impl AsyncFnOnce(Pool) -> std::result::Result<JobSpec, E>,
    identity: Identity,
    options: AgentOptions,
    temporary: Option<TemporaryLocation>,
    format: FailureFormat,
) -> std::result::Result<ExitCode, E> {
    let mut asked = StopSignal::Terminate;
    let end = enter_private()
        .map_err(|error| unsupported_error(&error))
        .and_then(|privilege| {
            let stage = reserve_stage().map_err(|error| unsupported_error(&error))?;
            let runtime = build_runtime(WORKER_THREADS)?;
            let end = runtime.block_on(async {
                let command = watch_stop_signals()?;
                let (wished, io) = (command.clone(), JobIo::Inherited);
                let chosen = (options, temporary.clone(), None);
                let pool = build_pool(&identity)?;
                let spec = match prepare(pool.clone()).await {
                    Ok(spec) => spec,
                    Err(refusal) => return Ok(Err(refusal)),
                };
                let end = serve_job(spec, pool, (privilege, stage), io, command, chosen).await;
                if let StopRequest::AlreadySignaled(heard)
                | StopRequest::Terminate(heard)
                | StopRequest::Kill(heard) = *wished.borrow()
                {
                    asked = heard;
                }
                Ok(Ok(end))
            });
            // Its threads end with the process.
            runtime.shutdown_background();
            end
        });
    if let Some(temporary) = temporary {
        temporary.remove_all();
    }
    let end = end.unwrap_or_else(|error| Ok(JobEnd::environment_failure(error, None)))?;
    for warning in &end.warnings {
        print_error(&format!("bafs: {warning}"));
    }
    Ok(match end.report.outcome {
        JobOutcome::Exited(code) => ExitCode::from(code as u8),
        JobOutcome::Signaled(signal) => ExitCode::from(128u8.wrapping_add(signal as u8)),
        JobOutcome::Killed => ExitCode::from(asked.exit_code() as u8),
        JobOutcome::NotStarted(message) => {
            print_error(&format!("bafs: {message}"));
            ExitCode::from(match end.not_started {
                Some(NotStartedReason::ExecutableMissing) => EXIT_NOT_FOUND,
                _ => EXIT_NOT_EXECUTABLE,
            })
        }
        JobOutcome::EnvironmentFailed(error) => {
            report_environment_failure(&error, end.lost_volume.as_deref(), format)
        }
    })
}

/// `bafs mount`: shows a volume on a directory of this host until somebody unmounts it, this
/// process is asked to end by a signal, or the volume is lost (exit code 75).
pub fn mount_main(
    mount: MountSpec,
    directory: &Path,
    identity: Identity,
    op_deadline_ms: u64,
    options: AgentOptions,
    format: FailureFormat,
) -> ExitCode {
    let name = mount.name.clone();
    let shown = build_runtime(WORKER_THREADS).and_then(|runtime| {
        runtime.block_on(serve_mount(
            mount,
            directory,
            &identity,
            op_deadline_ms,
            options,
        ))
    });
    match shown {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report_environment_failure(&error, Some(&name), format),
    }
}

/// How an agent works, where its job's temporary files go, and where its output does.
type JobPlaces = (AgentOptions, Option<TemporaryLocation>, Option<PathBuf>);

async fn serve_job(
    spec: JobSpec,
    pool: Pool,
    (privilege, stage): (Privilege, ReservedStage),
    io: JobIo,
    request: watch::Receiver<StopRequest>,
    (choices, temporary, output_prefix): JobPlaces,
) -> JobEnd {
    let mut agent = Agent::new(pool, privilege, spec.op_deadline_ms);
    agent.options = choices;
    agent.temporary = temporary;
    agent.output_prefix = output_prefix;
    match Sandbox::prepare(privilege) {
        Ok(sandbox) => {
            let sandbox = sandbox.with_reserved_stage(stage);
            run_job(&agent, &sandbox, spec, io, request).await
        }
        Err(error) => JobEnd::environment_failure(unsupported_error(&error), None),
    }
}

async fn serve_mount(
    mount: MountSpec,
    directory: &Path,
    identity: &Identity,
    op_deadline_ms: u64,
    options: AgentOptions,
) -> Result<()> {
    let mut command = watch_stop_signals()?;
    let name = mount.name.clone();
    let (losses, mut lost) = mpsc::unbounded_channel();
    // On the host numbers of users are what they are, whoever mounts.
    let mut agent = Agent::new(build_pool(identity)?, Privilege::Root, op_deadline_ms);
    agent.options = options;
    agent.mount_location = tree::MountLocation::Host;
    let volume = Arc::new(agent.open_volume(&mount, losses).await?);
    let directory = std::path::absolute(directory).map_err(|error| unsupported_error(&error))?;
    let (shown, silence) = (Arc::clone(&volume), agent.silence_timeout());
    let mounting = tokio::task::spawn_blocking(move || mount_on_host(shown, &directory, silence));
    let (mounted, mut kept) = mounting
        .await
        .map_err(|error| unsupported_error(&error))?
        .map_err(|error| unsupported_error(&error))?;
    agent.explain(&name, mounted.transport());
    let result = loop {
        tokio::select! {
            _ = command.wait_for(|command| *command != StopRequest::None) => break Ok(()),
            end = mounted.wait_for_end() => break match end {
                ConnectionEnd::Unmounted => Ok(()),
                ConnectionEnd::Aborted => Err(aborted_error(&name)),
            },
            Some(loss) = lost.recv() => match volume.health().loss() {
                Some(_) => break Err(loss.error),
                // Here is no job to end, and the volume is still good for others.
                None => print_error(&format!("bafs: {}", loss.error)),
            },
            () = tokio::time::sleep(WATCHDOG_POLL_INTERVAL) => {
                if kept.has_exited() {
                    tokio::task::block_in_place(|| restart_watchdog(&mut kept, &mounted));
                }
            }
        }
    };
    let unmounting = move || {
        mounted.sync();
        mounted.unmount();
    };
    if let Err(error) = tokio::task::spawn_blocking(unmounting).await {
        tracing::error!(%error, "unmounting failed");
    }
    kept.dismiss();
    volume.close(0).await;
    // What the kernel had collected may not have come.
    let mut result = result;
    while let (Ok(loss), None) = (lost.try_recv(), volume.health().loss()) {
        print_error(&format!("bafs: {}", loss.error));
        result = result.and(Err(loss.error));
    }
    // What was answered already may have failed at the very end.
    let result = match volume.health().loss() {
        // The next writer came after the unmount: nothing is lost that was home by then.
        Some(_) if volume.health().has_successor() && !volume.has_unsent_changes() => result,
        Some(loss) => result.and_then(|()| Err(loss.clone())),
        None => result,
    };
    let used = volume.usage();
    print_error(&format!(
        "bafs: volume {}: {} bytes read, {} written; the longest call took {} ms",
        used.name, used.read_bytes, used.written_bytes, used.call_ms_max
    ));
    result
}

fn aborted_error(volume: &str) -> Error {
    let text = format!("the kernel's connection of the mount of volume {volume} was aborted");
    Error::new(ErrorCode::VolumeLost, text)
}

/// Has the mount kept again, whose keeper is gone.
fn restart_watchdog(watchdog: &mut MountWatchdog, mounted: &FuseMount) {
    if let Some(mount) = mounted.mount_id()
        && let Err(error) = watchdog.restart(mount)
    {
        tracing::warn!(%error, "the mount watchdog ended and does not restart");
    }
}

/// Mounts, with a keeper that takes the mount away should this process die or get stuck. What a
/// killed process left on the directory before is taken away first.
fn mount_on_host(
    volume: Arc<Volume>,
    directory: &Path,
    silence: Duration,
) -> Result<(FuseMount, MountWatchdog), MountError> {
    doctor::mounts::detach_dead_mounts(directory);
    // The kernel's table of mounts has no symbolic links.
    let directory = &std::fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned());
    doctor::mounts::detach_dead_mounts(directory);
    let kept =
        |device| MountWatchdog::start(directory, silence, device).map_err(MountError::Watchdog);
    if !geteuid().is_root() {
        let kept = kept(None)?;
        let mounted = FuseMount::mount(volume, directory, MountKind::Fusermount)?;
        return Ok((mounted, kept));
    }
    let device = open_device()?;
    let kept = kept(Some(device.try_clone().map_err(MountError::Watchdog)?))?;
    FuseMount::mount_with_device(volume, directory, device).map(|mounted| (mounted, kept))
}

fn build_runtime(worker_threads: usize) -> Result<Runtime> {
    // Before there are threads.
    memory::limit_allocator();
    // A thread that a ring's thread starts would stay on its one processor.
    let own = Pid::from_raw(0);
    let all = sched_getaffinity(own);
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(worker_threads)
        .max_blocking_threads(BLOCKING_THREADS_MAX)
        .on_thread_start(move || {
            let spread = all.and_then(|all| sched_setaffinity(own, &all));
            if let Err(error) = spread {
                tracing::debug!(%error, "a thread runs where it was started");
            }
        })
        .enable_all()
        .build()
        .map_err(|error| unsupported_error(&error))
}

fn build_pool(identity: &Identity) -> Result<Pool> {
    // Who has connections serves volumes.
    memory::lower_oom_score();
    // A job reads and writes where it began to, or nowhere.
    Ok(Pool::new(Arc::new(Dialer::new(identity)?)).with_pinned_servers())
}

/// Runs where the volumes are served, so that it falls silent when they do.
async fn print_keepalives() {
    loop {
        tokio::time::sleep(KEEPALIVE_INTERVAL).await;
        // The lock keeps it out of the report; without a reader the report fails and says so.
        let mut output = io::stdout().lock();
        let _ = output.write_all(b"\n").and_then(|()| output.flush());
    }
}

/// What somebody wishes who asks this process to end by signals.
///
/// That it ends, and when somebody asks again, that it does so at once. A batch system that stops
/// everything, and a terminal that goes, send several signals together: they are one request, and
/// SIGHUP never is another. What a key says the job hears itself, and may take for something else;
/// only who presses it twice in haste wants more.
fn watch_stop_signals() -> Result<watch::Receiver<StopRequest>> {
    let mut requests = StopSignals::subscribe();
    // Heard, it ends no agent: a write past `ulimit -f` of whoever started us fails with EFBIG.
    let _ =
        signal(SignalKind::from_raw(libc::SIGXFSZ)).map_err(|error| unsupported_error(&error))?;
    let (command, wished) = watch::channel(StopRequest::None);
    tokio::spawn(async move {
        let (mut haste, mut asked) = (Deadline::after_ms(0), None);
        loop {
            let (signal, by) = requests.next_signal().await;
            let is_hasty = !haste.remaining().is_zero();
            let next = match (asked, by) {
                (None, SignalOrigin::Other) => {
                    asked = Some(signal);
                    StopRequest::Terminate(signal)
                }
                (None, SignalOrigin::Keyboard) if !is_hasty => StopRequest::AlreadySignaled(signal),
                (None, SignalOrigin::Keyboard) => StopRequest::Kill(signal),
                (Some(_), _) if is_hasty || signal == StopSignal::Hangup => continue,
                (Some(first), _) => StopRequest::Kill(first),
            };
            haste = Deadline::after_ms(SIGNAL_MERGE_MS);
            command.send_replace(next);
            if matches!(next, StopRequest::Kill(_)) {
                break;
            }
        }
        // The receiver must not take the end of this task for a request.
        command.closed().await;
    });
    Ok(wished)
}

fn unsupported_error(error: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorCode::Unsupported, error.to_string())
}

fn report_environment_failure(
    error: &Error,
    volume: Option<&str>,
    format: FailureFormat,
) -> ExitCode {
    let detail = match (format, volume) {
        (FailureFormat::Json, _) => error.detail.clone(),
        (FailureFormat::Text, Some(volume)) => format!("volume '{volume}': {error}"),
        (FailureFormat::Text, None) => error.to_string(),
    };
    let failure = EnvironmentFailure {
        code: error.code,
        volume,
        detail: &detail,
    };
    print_error(&failure.format_line(format));
    ExitCode::from(EXIT_ENVIRONMENT)
}

fn print_error(line: &str) {
    // Without a standard error there is nobody to tell; the exit code still does.
    let _ = writeln!(io::stderr(), "{line}");
}
