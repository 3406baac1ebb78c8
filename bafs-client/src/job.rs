//! Runs one job: mounts its volumes, starts its program, waits for its end, and reports it.
//!
//! [`run_job`] takes these steps, each only after the one before:
//!
//! 1. It opens and mounts all volumes. One that fails ends the job before it starts.
//! 2. It starts the program in the [`Sandbox`], with each volume bound to its path in the job.
//! 3. It waits for the first of three events: the program ends, a volume is lost, or somebody sends
//!    a [`StopRequest`]. A request to terminate passes the signal on, and kills after ten seconds.
//! 4. It waits until the kernel has sent what it still holds, takes the mounts away, and closes the
//!    sessions. This waits for all delegated operations. If the job succeeded, volumes with results
//!    get their longer lifetime now, before anybody learns of the end.
//! 5. It returns a [`JobEnd`]: outcome, times, output, and what the job did to each volume.
//!
//! **Whose fault.** The report separates the job from its environment, because only the former uses
//! up retries.
//!
//! | Outcome | Meaning |
//! |---|---|
//! | `Exited`, `Signaled` | the program ended by itself |
//! | `NotStarted` | the program cannot start on any machine: missing, wrong format, bad path |
//! | `EnvironmentFailed` | a volume, a server or the machine failed |
//! | `Killed` | somebody asked for it |
//!
//! A job that ended after it lost a volume counts as `EnvironmentFailed`, whatever its exit code
//! was.
//!
//! **Concurrency.** All this is one async function. Mounting and killing run on blocking threads.
//! Volumes are released in parallel, so a silent server delays only its own. A process that waits
//! in an operation cannot be killed: so its volumes stop waiting first, and then their FUSE
//! connections are aborted.
//!
//! **Liveness.** The agent sends heartbeats to the job's outer stage. That kills an agent that is
//! silent for the deadline of an operation (3 s at least), and the job ends with it. On a terminal
//! there are no heartbeats, because a person may stop agent and job together.
//!
//! Afterwards no process and no mount of the job is left. What follows is the scheduler's decision.

mod job_end;
mod job_files;

use std::ffi::OsString;
use std::io::IsTerminal;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bafs_proto::job_report::VolumeUse;
use bafs_proto::message::{JobCommand, JobOutcome, JobReport, JobSpec, MountSpec};
use bafs_proto::path::is_program_place;
use bafs_proto::{Error, ErrorCode};
use futures_util::future::try_join_all;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;

use job_end::{classify_end, environment_code, interrupted_error};
use job_files::{check_produced_files, find_missing, refuse_start, volume_places};

use crate::agent::{Agent, TemporaryLocation};
use crate::fuse::{FuseMount, MountKind};
use crate::heartbeat::Heartbeat;
use crate::job_environment::{build_environment, collect_temporary_directories};
use crate::limits::TERMINATION_GRACE;
use crate::logic::manifest_tree::SINGLE_FILE_NAME;
use crate::memory;
use crate::output::{CapturedOutput, OutputCollector, OutputFile};
use crate::report_limits::limit_pages;
use crate::sandbox::{
    self, JobControl, JobPlan, JobSession, JobStreams, JobUser, NotStartedReason, OutputTarget,
    RunningJob, Sandbox, StartError, VOLUMES_MAX, VolumeBind,
};
use crate::signals::StopSignal;
use crate::volume::Volume;
use crate::volume_health::VolumeLoss;

/// Where a job's input and output go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobIo {
    /// No input; the end of the output becomes part of the report.
    Captured,
    /// Those of this process, its terminal included.
    Inherited,
}

/// Request to a running job to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopRequest {
    /// Nothing.
    None,
    /// Nothing that it has not heard itself, from the keyboard; but it is not to begin.
    AlreadySignaled(StopSignal),
    /// To end: it is told so by this signal, and killed if it goes on for ten seconds.
    Terminate(StopSignal),
    /// To be killed, as whoever asked in this way did not want to wait, or cannot tell it more.
    Kill(StopSignal),
}

impl StopRequest {
    /// The same, of a job that could not hear it.
    fn without_grace(self) -> Self {
        match self {
            Self::None => Self::None,
            Self::AlreadySignaled(asked) | Self::Terminate(asked) | Self::Kill(asked) => {
                Self::Kill(asked)
            }
        }
    }
}

/// How a job ended, with all that is reported of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobEnd {
    /// What is reported.
    pub report: JobReport,
    /// The volume whose loss ended the job.
    pub lost_volume: Option<String>,
    /// Why the program never ran, when it did not.
    pub not_started: Option<NotStartedReason>,
    /// What its user must know to understand a failure.
    pub warnings: Vec<String>,
    /// What it printed, if that was collected.
    pub output: CapturedOutput,
}

impl JobEnd {
    /// The end of a job whose environment failed before it could start.
    pub fn environment_failure(error: Error, volume: Option<String>) -> Self {
        let report = JobReport {
            outcome: JobOutcome::EnvironmentFailed(error),
            wall_ms: 0,
            cpu_ms: 0,
            memory_bytes_max: 0,
            output_tail: String::new(),
            volumes: Vec::new(),
        };
        Self {
            report,
            lost_volume: volume,
            not_started: None,
            warnings: Vec::new(),
            output: CapturedOutput::default(),
        }
    }
}

/// Runs a job to its end. Afterwards none of its processes and none of its mounts is left.
///
/// The process must have entered its private name space before it had threads. When the sender of
/// `stop_request` is gone, the job is killed.
pub async fn run_job(
    agent: &Agent,
    sandbox: &Sandbox,
    spec: JobSpec,
    io: JobIo,
    mut request: watch::Receiver<StopRequest>,
) -> JobEnd {
    if spec.mounts.len() > VOLUMES_MAX {
        let (count, name) = (spec.mounts.len(), &spec.name);
        let text = format!("job {name} has {count} mounts; a job may have at most {VOLUMES_MAX}");
        return JobEnd::environment_failure(Error::new(ErrorCode::BadPath, text), None);
    }
    memory::set_volume_count(spec.mounts.len());
    let (losses, mut lost) = mpsc::unbounded_channel();
    let opened = tokio::select! {
        opened = mount_volumes(agent, sandbox, &spec, losses) => opened,
        _ = request.wait_for(|stop_request| *stop_request != StopRequest::None) => {
            let mut end = JobEnd::environment_failure(interrupted_error(), None);
            end.report.outcome = JobOutcome::Killed;
            return end;
        }
    };
    let mounts = match opened {
        Ok(mounts) => mounts,
        Err(loss) => return JobEnd::environment_failure(loss.error, Some(loss.volume)),
    };
    let (ended, collector, cleanup) =
        execute_job(agent, sandbox, &spec, &mounts, io, (&mut lost, request)).await;
    let printed = match collector {
        Some(collector) => {
            let named = output_files(&spec.command, &mounts);
            Some(collector.finish(named, !is_success(&ended)).await)
        }
        None => None,
    };
    let (volumes, unsent) = release_volumes(mounts, is_success(&ended)).await;
    cleanup.wait().await;
    let loss = lost.try_recv().ok().or(unsent);
    let mut end = classify_end(ended, loss);
    end.report.volumes = volumes;
    limit_pages(&mut end.report.volumes);
    if let Some((printed, tail)) = printed {
        (end.output, end.report.output_tail) = (printed, tail);
        // What explains a failure is read with it.
        for warning in &end.warnings {
            let tail = &mut end.report.output_tail;
            if !tail.is_empty() && !tail.ends_with('\n') {
                tail.push('\n');
            }
            tail.push_str(&format!("bafs: {warning}\n"));
        }
    }
    end
}

/// What may end a job: losses of volumes, and requests of people.
type JobNews<'l> = (
    &'l mut mpsc::UnboundedReceiver<VolumeLoss>,
    watch::Receiver<StopRequest>,
);

/// Starts the program of a job whose volumes are mounted and waits for its end, with what collects
/// its output, and what ends when nothing of it is left on the host. The files that the job
/// declares are looked for before and after.
async fn execute_job(
    agent: &Agent,
    sandbox: &Sandbox,
    spec: &JobSpec,
    mounts: &[JobVolume],
    io: JobIo,
    news: JobNews<'_>,
) -> (
    Result<sandbox::SandboxReport, JobInterruption>,
    Option<OutputCollector>,
    sandbox::Cleanup,
) {
    // What was asked before the job could hear it.
    let (lost, request) = news;
    let asked = *request.borrow();
    let stop_request = match asked {
        StopRequest::None => request,
        asked => watch::channel(asked.without_grace()).1,
    };
    let (silence, temporary) = (agent.silence_timeout(), agent.temporary.as_ref());
    let required = &spec.command.required_files;
    let missing = find_missing(required, volume_places(mounts)).await;
    let started = match missing.is_empty() {
        true => Some(start_job(sandbox, spec, mounts, temporary, io, silence)),
        false => None,
    };
    let unstarted = |ended| (ended, None, sandbox::Cleanup::default());
    let (mut ended, collector, cleanup) = match started {
        Some(Ok((mut running, collector, beating))) => {
            let cleanup = running.take_cleanup();
            let prefix = agent.output_prefix.clone();
            let shown = prefix.zip(collector.clone()).map(|(prefix, collector)| {
                tokio::spawn(async move { collector.write_while_running(&prefix).await })
            });
            let ended = supervise(running, lost, stop_request, mounts).await;
            if let Some(shown) = shown {
                shown.abort();
                // What it was about to write is not to replace what is written at the end.
                let _ = shown.await;
            }
            if let Some(beating) = beating {
                beating.abort();
            }
            (ended, collector, cleanup)
        }
        Some(Err(error)) => unstarted(Err(JobInterruption::Environment(error))),
        None => unstarted(Ok(refuse_start(&missing))),
    };
    check_produced_files(&mut ended, &spec.command, mounts).await;
    (ended, collector, cleanup)
}

/// Why a job did not come to its own end.
enum JobInterruption {
    VolumeLost(VolumeLoss),
    Environment(Error),
}

/// A volume that the job will see: the mount, and the file system path to bind.
struct JobVolume {
    volume: Arc<Volume>,
    /// `None` where a directory of this machine is shown as it is.
    mount: Option<FuseMount>,
    binding: VolumeBind,
    /// How long it is kept at least when the job succeeds, in milliseconds.
    keep_ms: u64,
}

/// Opens and mounts all volumes at once: each waits for its server several times.
async fn mount_volumes(
    agent: &Agent,
    sandbox: &Sandbox,
    spec: &JobSpec,
    losses: mpsc::UnboundedSender<VolumeLoss>,
) -> Result<Vec<JobVolume>, VolumeLoss> {
    let opening = spec.mounts.iter().map(|mount| {
        let losses = losses.clone();
        async move {
            let opened = open_job_volume(agent, sandbox, mount, losses).await;
            opened.map_err(|error| VolumeLoss {
                volume: mount.name.clone(),
                error,
            })
        }
    });
    // The first failure gives up the others.
    try_join_all(opening).await
}

/// Opens and mounts one volume.
async fn open_job_volume(
    agent: &Agent,
    sandbox: &Sandbox,
    mount: &MountSpec,
    losses: mpsc::UnboundedSender<VolumeLoss>,
) -> Result<JobVolume, Error> {
    let volume = Arc::new(agent.open_volume(mount, losses).await?);
    let (mounted, source) = match volume.directory() {
        Some(directory) => (None, directory.to_owned()),
        None => {
            let directory = sandbox.mount_point().map_err(|error| {
                let text = format!("volume {}: {error}", mount.name);
                Error::new(ErrorCode::Unsupported, text)
            })?;
            let mounted = mount_volume(&volume, directory.clone()).await?;
            agent.explain(&mount.name, mounted.transport());
            let file = match volume.is_single_file() {
                true => Some(SINGLE_FILE_NAME.to_owned()),
                false => volume.only_file().filter(|_| is_program_place(&mount.path)),
            };
            let source = file.map_or_else(|| directory.clone(), |file| directory.join(file));
            (Some(mounted), source)
        }
    };
    let binding = VolumeBind {
        name: mount.name.clone(),
        source,
        path: mount.path.clone().into(),
        access: volume.mode().access,
    };
    Ok(JobVolume {
        volume,
        mount: mounted,
        binding,
        keep_ms: mount.lifetime_ms_min,
    })
}

async fn mount_volume(volume: &Arc<Volume>, directory: PathBuf) -> Result<FuseMount, Error> {
    let shown = Arc::clone(volume);
    // Mounting waits for the kernel, which may already ask the volume something.
    let mounting = tokio::task::spawn_blocking(move || {
        FuseMount::mount(shown, &directory, MountKind::MountSystemCall)
    });
    let mounted = mounting.await.map_err(|error| {
        let text = format!("volume {}: {error}", volume.name());
        Error::new(ErrorCode::Unsupported, text)
    })?;
    mounted.map_err(|error| {
        let text = format!("volume {}: {error}", volume.name());
        Error::new(environment_code(error.errno()), text)
    })
}

fn start_job(
    sandbox: &Sandbox,
    spec: &JobSpec,
    mounts: &[JobVolume],
    temporary: Option<&TemporaryLocation>,
    io: JobIo,
    silence: Duration,
) -> Result<(RunningJob, Option<OutputCollector>, Option<AbortHandle>), Error> {
    let unable = |error: &dyn std::fmt::Display| {
        Error::new(
            // The machine gave no process or descriptor now; it may later.
            ErrorCode::ServerFault,
            format!("cannot start job {}: {error}", spec.name),
        )
    };
    let command = &spec.command;
    let volumes: Vec<_> = mounts.iter().map(|bound| bound.binding.clone()).collect();
    let session = match io {
        JobIo::Captured => JobSession::NewSession,
        JobIo::Inherited => JobSession::SharedTerminal,
    };
    let environment = build_environment(command, &spec.name, &volumes, temporary);
    let temporary =
        temporary.map(|place| collect_temporary_directories(place, command, &environment));
    let plan = JobPlan {
        job: spec.name.clone(),
        environment,
        volumes,
        program: command.executable.clone().into(),
        arguments: command.arguments.iter().map(OsString::from).collect(),
        working_directory: if command.directory.is_empty() {
            "/"
        } else {
            &command.directory
        }
        .into(),
        user: JobUser::SameUser,
        session,
        temporary,
    };
    let (streams, collector) = job_streams(command, io).map_err(|error| unable(&error))?;
    let (watched, beating) = match start_heartbeat(io).map_err(|error| unable(&error))? {
        Some((beat, watched)) => {
            let beating = tokio::spawn(Arc::new(beat).send_beats());
            (Some((watched, silence)), Some(beating.abort_handle()))
        }
        None => (None, None),
    };
    let running = sandbox.start_watched(plan, streams, watched);
    let running = running.map_err(|error| match error {
        // No machine could ever start it.
        StartError::Plan(error) => Error::new(
            ErrorCode::BadPath,
            format!("cannot start job {}: {error}", spec.name),
        ),
        StartError::Process(error) => unable(&error),
    })?;
    Ok((running, collector, beating))
}

/// Signs of life for the job's outer stage. Not on a terminal: there a person may stop agent and
/// job together, and go on with both later.
fn start_heartbeat(io: JobIo) -> std::io::Result<Option<(Heartbeat, UnixStream)>> {
    let by_person = io == JobIo::Inherited && std::io::stdin().is_terminal();
    if by_person {
        return Ok(None);
    }
    Heartbeat::pair().map(Some)
}

fn job_streams(
    command: &JobCommand,
    io: JobIo,
) -> std::io::Result<(JobStreams, Option<OutputCollector>)> {
    let file = |path: &Option<String>| path.as_ref().map(|path| OutputTarget::Path(path.into()));
    let (stdout, stderr) = (file(&command.stdout), file(&command.stderr));
    Ok(match io {
        JobIo::Captured => {
            let (collector, [to_stdout, to_stderr]) = OutputCollector::collect()?;
            let streams = JobStreams {
                stdout: stdout.unwrap_or(OutputTarget::Descriptor(to_stdout)),
                stderr: stderr.unwrap_or(OutputTarget::Descriptor(to_stderr)),
                ..JobStreams::batch()
            };
            (streams, Some(collector))
        }
        JobIo::Inherited => {
            let streams = JobStreams {
                stdout: stdout.unwrap_or(OutputTarget::Inherit),
                stderr: stderr.unwrap_or(OutputTarget::Inherit),
                ..JobStreams::interactive()
            };
            (streams, None)
        }
    })
}

/// The files of volumes that took standard output and standard error of a job that is over. What is
/// read of them from here on is no use that the job made of its volumes.
fn output_files(command: &JobCommand, mounts: &[JobVolume]) -> [Option<OutputFile>; 2] {
    let named = |path: &Option<String>| {
        let path = Path::new(path.as_deref()?);
        let is_there = |bound: &&JobVolume| path.starts_with(&bound.binding.path);
        let inner = mounts.iter().filter(is_there);
        let bound = inner.max_by_key(|bound| bound.binding.path.as_os_str().len())?;
        let is_lost = bound.volume.health().loss().is_some();
        if is_lost || bound.volume.is_single_file() {
            return None;
        }
        bound.volume.stop_counting_reads();
        Some(OutputFile {
            volume: bound.binding.source.clone(),
            path: path.strip_prefix(&bound.binding.path).ok()?.to_owned(),
        })
    };
    [named(&command.stdout), named(&command.stderr)]
}

/// Waits for the job's end, and brings it about when a volume is lost or somebody asks for it.
async fn supervise(
    running: RunningJob,
    lost: &mut mpsc::UnboundedReceiver<VolumeLoss>,
    mut request: watch::Receiver<StopRequest>,
    mounts: &[JobVolume],
) -> Result<sandbox::SandboxReport, JobInterruption> {
    let control = running.control();
    let finished = running.wait_async();
    tokio::pin!(finished);
    let loss = tokio::select! {
        report = &mut finished => return Ok(report),
        Some(loss) = lost.recv() => Some(loss),
        asked = wait_for_request(&mut request, is_actionable) => match asked {
            StopRequest::Terminate(asked) => {
                forward_signal(&control, asked);
                tokio::select! {
                    report = &mut finished => return Ok(report),
                    Some(loss) = lost.recv() => Some(loss),
                    _ = wait_for_request(&mut request, |asked| {
                        matches!(asked, StopRequest::Kill(_))
                    }) => None,
                    () = tokio::time::sleep(TERMINATION_GRACE) => None,
                }
            }
            _ => None,
        },
    };
    let reason = match &loss {
        Some(loss) => format!("{}", loss.error),
        None => "killed by request".to_owned(),
    };
    end_job(control, reason, mounts).await;
    let report = finished.await;
    match loss {
        Some(loss) => Err(JobInterruption::VolumeLost(loss)),
        None => Ok(report),
    }
}

/// Whether anything is to be done for a wish while the job runs.
fn is_actionable(request: StopRequest) -> bool {
    matches!(request, StopRequest::Terminate(_) | StopRequest::Kill(_))
}

/// Waits for such a wish. Where nobody is left who could wish anything the job is to be killed.
async fn wait_for_request(
    request: &mut watch::Receiver<StopRequest>,
    is_such: impl Fn(StopRequest) -> bool,
) -> StopRequest {
    let wished = request
        .wait_for(|stop_request| is_such(*stop_request))
        .await;
    wished.map_or(StopRequest::Kill(StopSignal::Terminate), |stop_request| {
        *stop_request
    })
}

/// Passes on what somebody asked of this process.
fn forward_signal(control: &JobControl, signal: StopSignal) {
    if let Err(error) = control.signal(signal.signal()) {
        tracing::warn!(%error, "cannot signal the job to end");
    }
}

async fn end_job(control: JobControl, reason: String, mounts: &[JobVolume]) {
    // A process in the middle of an operation cannot be killed.
    for bound in mounts {
        bound.volume.stop_waiting();
    }
    let again = control.clone();
    let text = reason.clone();
    let killed = tokio::task::spawn_blocking(move || control.kill(&text)).await;
    if matches!(killed, Ok(Ok(()))) {
        return;
    }
    tracing::warn!("job does not end after SIGKILL; aborting the connections of its volumes");
    for mounted in mounts.iter().filter_map(|bound| bound.mount.as_ref()) {
        mounted.abort();
    }
    if let Ok(Err(error)) = tokio::task::spawn_blocking(move || again.kill(&reason)).await {
        tracing::error!(%error, "job does not end after SIGKILL");
    }
}

fn is_success(ended: &Result<sandbox::SandboxReport, JobInterruption>) -> bool {
    let outcome = ended.as_ref().map(|report| &report.outcome);
    matches!(outcome, Ok(sandbox::SandboxOutcome::Exited(0)))
}

/// Takes all mounts away, ends the sessions, and tells what the job did to its volumes; with the
/// first loss of answered changes that nobody was told of.
async fn release_volumes(
    mut mounts: Vec<JobVolume>,
    is_success: bool,
) -> (Vec<VolumeUse>, Option<VolumeLoss>) {
    // Results live longer than what is half done, from before anybody hears of them.
    for bound in mounts.iter_mut().filter(|_| !is_success) {
        bound.keep_ms = 0;
    }
    // All at once: a server that does not answer delays only its own volume.
    let releasing: Vec<_> = mounts
        .into_iter()
        .map(|bound| tokio::spawn(release_volume(bound)))
        .collect();
    let (mut volumes, mut unsent) = (Vec::new(), None);
    for released in releasing {
        match released.await {
            Ok((volume, loss)) => {
                volumes.push(volume);
                unsent = unsent.or(loss);
            }
            Err(error) => tracing::error!(%error, "cannot release a volume"),
        }
    }
    (volumes, unsent)
}

async fn release_volume(job_volume: JobVolume) -> (VolumeUse, Option<VolumeLoss>) {
    let volume = job_volume.volume;
    if let Some(mounted) = job_volume.mount {
        // Both bring what the kernel still has: collected writes, then mapped pages.
        let unmounting = move || {
            mounted.wait_until_closed();
            mounted.unmount();
        };
        let unmounted = tokio::task::spawn_blocking(unmounting).await;
        if let Err(error) = unmounted {
            tracing::error!(%error, volume = volume.name(), "unmounting failed");
        }
    }
    // The job is dead: nothing has to wait for a server that is away.
    volume.stop_waiting();
    let (held, is_changed) = tokio::join!(volume.current_stat(), volume.is_changed());
    volume.close(job_volume.keep_ms).await;
    // The next writer may take the volume after its unmount, but not before all has arrived.
    let loss = volume.health().loss().cloned();
    let is_unsent = volume.health().has_successor() && volume.has_unsent_changes();
    let unsent = loss.filter(|_| is_unsent).map(|error| VolumeLoss {
        volume: volume.name().to_owned(),
        error,
    });
    (volume.usage_with(held, is_changed), unsent)
}
