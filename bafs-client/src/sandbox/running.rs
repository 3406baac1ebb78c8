//! The agent's side of a job: starts the stages, hears how it ends, and can end it. Builds no
//! name space itself.

use std::io::{self, BufReader};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};
use std::{fs, thread};

use nix::sys::signal::Signal;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Resource, getrlimit, pidfd_open, pidfd_send_signal};
use thiserror::Error;
use tokio::sync::oneshot;

use super::control::{self, ControlRequest, JobOrder, ProcessEnd, StageReport, StreamSpec};
use super::forked_process::{ReservedStage, StageProcess};
use super::limits::{KILL_GRACE, KILL_MAX, REPORT_BYTES_MAX};
use super::mount_point_holder::StartedHolder;
use super::mounts;
use super::outcome::{JobUsage, NotStarted, SandboxOutcome, SandboxReport};
use super::plan::{InputSource, JobPlan, JobStreams, OutputTarget, PlanError};
use super::privilege::{EnterError, Privilege, mount_refusal};
use crate::own_process::{OUTER, OWN_EXECUTABLE, SUBCOMMAND};
use crate::{clock, control_group, memory};

/// Directories that the private mount points may cover, in the agent's name space only. No
/// agent needs them, and most are empty; one of them exists everywhere.
const BASE_CANDIDATES: [&str; 6] = ["/boot", "/media", "/srv", "/mnt", "/opt", "/proc/fs"];

/// Private name space of an agent: has mount points for its volumes, and starts jobs.
#[derive(Debug)]
pub struct Sandbox {
    privilege: Privilege,
    mount_base: PathBuf,
    mount_point_count: AtomicU32,
    descriptor_limit: Option<u64>,
    /// Becomes the outer stage of the first job.
    reserved_stage: Mutex<Option<ReservedStage>>,
}

/// Why a job could not be started.
#[derive(Debug, Error)]
pub enum StartError {
    /// The plan contradicts itself.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// This machine gave no process, thread or descriptor.
    #[error("cannot start the job's first process: {0}")]
    Process(#[from] io::Error),
}

impl Sandbox {
    /// Prepares a private directory for mount points; needs [`super::enter_private`] first.
    ///
    /// The directory exists in memory and in this name space only, so nothing has to be
    /// removed afterwards, however the agent ends.
    pub fn prepare(privilege: Privilege) -> Result<Self, EnterError> {
        let base = choose_base().ok_or_else(|| EnterError::NoBase {
            candidates: BASE_CANDIDATES.map(PathBuf::from).to_vec(),
        })?;
        mounts::mount_tmpfs(&base, 0o755)
            .map_err(|errno| mount_refusal("mount a place for mount points", errno))?;
        Ok(Self {
            privilege,
            mount_base: base,
            mount_point_count: AtomicU32::new(0),
            descriptor_limit: getrlimit(Resource::Nofile).current,
            reserved_stage: Mutex::default(),
        })
    }

    /// The same, with the process that becomes the outer stage of its first job.
    #[must_use]
    pub fn with_reserved_stage(self, stage: ReservedStage) -> Self {
        let reserved_stage = Mutex::new(Some(stage));
        Self {
            reserved_stage,
            ..self
        }
    }

    /// A new empty directory on which to mount a volume, invisible outside this agent.
    pub fn mount_point(&self) -> io::Result<PathBuf> {
        let number = self.mount_point_count.fetch_add(1, Ordering::Relaxed);
        let path = self.mount_base.join(format!(".bafs-{number}"));
        fs::create_dir(&path)?;
        Ok(path)
    }

    /// By what right this sandbox mounts.
    pub fn privilege(&self) -> Privilege {
        self.privilege
    }

    /// Starts a job. The volumes' file systems must be mounted already; what is mounted later
    /// stays invisible to this job. Returns at once: even a missing program is reported by
    /// [`RunningJob::wait`].
    pub fn start(&self, plan: JobPlan, streams: JobStreams) -> Result<RunningJob, StartError> {
        self.start_watched(plan, streams, None)
    }

    /// As [`Self::start`], with the other end of a pulse: when this process gives no sign of life
    /// for so long, it is killed, and the job with it.
    pub(crate) fn start_watched(
        &self,
        plan: JobPlan,
        streams: JobStreams,
        watched: Option<(UnixStream, Duration)>,
    ) -> Result<RunningJob, StartError> {
        plan.check()?;
        let mut passed = Vec::new();
        let streams = pass_streams(streams, &mut passed)?;
        let name = plan.job.replace('\0', "");
        let base = self.mount_base.clone().into_os_string();
        let order = JobOrder {
            plan,
            privilege: self.privilege,
            mount_base: base,
            descriptor_limit: self.descriptor_limit,
            streams,
        };

        let (ours, theirs) = UnixStream::pair()?;
        let shared = Arc::new(RunningJobState {
            socket: ours,
            progress: Mutex::default(),
            changed: Condvar::new(),
        });
        let reserved = self.reserved_stage.lock();
        let reserved = reserved.unwrap_or_else(PoisonError::into_inner).take();
        let (started, start_receiver) = mpsc::channel();
        let (finished, report) = oneshot::channel();
        let (cleaned, cleanup) = oneshot::channel();
        let supervisor = Arc::clone(&shared);
        // Stages that are started anew die with the thread that started them: it must be one that
        // lives as long as the job, which a thread of an async runtime does not promise.
        thread::Builder::new()
            .name("bafs-job".to_owned())
            .spawn(move || {
                let base = Path::new(&order.mount_base);
                let hold = |reserved| StartedHolder::start(&order.plan, base, reserved);
                let spawned = match reserved {
                    Some(stage) => {
                        let holder = hold(Some(&stage));
                        // Whatever it starts later is in the same group.
                        let entered = control_group::enter_job_group(stage.id());
                        let outer =
                            entered.and_then(|()| stage.become_outer(theirs.into(), watched));
                        outer.map(|outer| (outer, holder))
                    }
                    None => spawn_outer(&name, theirs, watched).map(|outer| (outer, hold(None))),
                };
                match spawned {
                    Ok((outer, holder)) => {
                        memory::restore_oom_score(outer.id());
                        let _ = started.send(Ok(()));
                        // The stages begin meanwhile, and look for mount points when they have
                        // their order. Without them the job has stand-ins, and is told so.
                        let holder = holder.unwrap_or_default();
                        let points = holder.and_then(|holder| holder.wait().ok());
                        let report = supervisor.supervise(outer, &order, passed);
                        // Nobody may be waiting any more.
                        let _ = finished.send(report);
                        // No process of the job uses them any more.
                        drop(points);
                        let _ = cleaned.send(());
                    }
                    Err(error) => drop(started.send(Err(error))),
                }
            })?;
        start_receiver.recv().map_err(io::Error::other)??;
        Ok(RunningJob {
            control: JobControl(shared),
            report,
            cleanup: Cleanup(Some(cleanup)),
        })
    }
}

/// Starts the outer stage as the program anew.
fn spawn_outer(
    job: &str,
    socket: UnixStream,
    watched: Option<(UnixStream, Duration)>,
) -> io::Result<StageProcess> {
    let mut command = Command::new(OWN_EXECUTABLE);
    command
        .arg0("bafs")
        .args([SUBCOMMAND, OUTER, job])
        .env_clear()
        .stdin(OwnedFd::from(socket))
        .stdout(Stdio::null());
    if let Some((heartbeat, silence)) = watched {
        command.arg(silence.as_millis().to_string());
        command.stdout(OwnedFd::from(heartbeat));
    }
    command.spawn().map(StageProcess::Spawned)
}

fn choose_base() -> Option<PathBuf> {
    let directories = || {
        BASE_CANDIDATES
            .into_iter()
            .filter_map(|path| fs::canonicalize(path).ok())
    };
    let empty = |path: &PathBuf| fs::read_dir(path).is_ok_and(|mut all| all.next().is_none());
    let usable = |path: &PathBuf| path.is_dir() && path != Path::new("/");
    directories()
        .find(empty)
        .or_else(|| directories().find(usable))
}

fn pass_streams(streams: JobStreams, passed: &mut Vec<OwnedFd>) -> io::Result<[StreamSpec; 3]> {
    let mut pass = |descriptor: io::Result<OwnedFd>| {
        passed.push(descriptor?);
        Ok::<_, io::Error>(StreamSpec::Passed)
    };
    let stdin = match streams.stdin {
        InputSource::Null => StreamSpec::Null,
        InputSource::Inherit => pass(io::stdin().as_fd().try_clone_to_owned())?,
        InputSource::Descriptor(descriptor) => pass(Ok(descriptor))?,
        InputSource::Path(path) => StreamSpec::from_path(path),
    };
    let mut output = |output, own: io::Result<OwnedFd>| match output {
        OutputTarget::Null => Ok(StreamSpec::Null),
        OutputTarget::Inherit => pass(own),
        OutputTarget::Descriptor(descriptor) => pass(Ok(descriptor)),
        OutputTarget::Path(path) => Ok(StreamSpec::from_path(path)),
    };
    let stdout = output(streams.stdout, io::stdout().as_fd().try_clone_to_owned())?;
    let stderr = output(streams.stderr, io::stderr().as_fd().try_clone_to_owned())?;
    Ok([stdin, stdout, stderr])
}

/// A job that was started. Dropping it leaves the job running.
#[derive(Debug)]
pub struct RunningJob {
    control: JobControl,
    report: oneshot::Receiver<SandboxReport>,
    cleanup: Cleanup,
}

/// The removal of a job's mount points, which comes after its report.
#[derive(Debug, Default)]
pub struct Cleanup(Option<oneshot::Receiver<()>>);

impl Cleanup {
    /// Waits for its end.
    pub async fn wait(self) {
        if let Some(end) = self.0 {
            let _ = end.await;
        }
    }
}

impl RunningJob {
    /// A handle to signal or kill the job from elsewhere while somebody waits.
    pub fn control(&self) -> JobControl {
        self.control.clone()
    }

    /// Whoever takes this can do something else after the report, and must wait for it before this
    /// process ends.
    pub fn take_cleanup(&mut self) -> Cleanup {
        std::mem::take(&mut self.cleanup)
    }

    /// Waits for the end, blocking; not for use inside an async runtime.
    pub fn wait(self) -> SandboxReport {
        let report = self.report.blocking_recv();
        if let Some(end) = self.cleanup.0 {
            let _ = end.blocking_recv();
        }
        report.unwrap_or_else(|_| watcher_panic_report())
    }

    /// Waits for the end.
    pub async fn wait_async(self) -> SandboxReport {
        let report = self.report.await;
        self.cleanup.wait().await;
        report.unwrap_or_else(|_| watcher_panic_report())
    }
}

fn watcher_panic_report() -> SandboxReport {
    let outcome =
        SandboxOutcome::Interrupted("the thread that watched the job panicked".to_owned());
    SandboxReport {
        outcome,
        usage: None,
        wall: Duration::ZERO,
        notes: Vec::new(),
        warnings: Vec::new(),
    }
}

/// Signals or kills a job; as many copies as needed.
#[derive(Debug, Clone)]
pub struct JobControl(Arc<RunningJobState>);

/// The job still has processes after [`KILL_MAX`]: they wait inside the kernel, most likely
/// for a file system that does not answer. Abort its connection, and they die.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("processes of the job are still alive {} s after it was killed", KILL_MAX.as_secs())]
pub struct StillAlive;

impl JobControl {
    /// Passes a signal to every process of the job, which from then on ends with the last of them,
    /// not with its main process. A job that does not run yet gets it as soon as it does.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        let mut progress = self.0.lock();
        match progress.phase {
            JobPhase::Running => {
                control::send_message(&self.0.socket, &ControlRequest::Signal(signal as i32))
            }
            JobPhase::Starting => {
                progress.early_signals.push(signal);
                Ok(())
            }
            JobPhase::Ended => Ok(()),
        }
    }

    /// Kills every process of the job, whatever it did to escape, and waits until all are
    /// dead: [`KILL_MAX`] at most. Blocks; inside an async runtime use `spawn_blocking`.
    ///
    /// The reason becomes part of [`SandboxOutcome::Killed`]; the first one given stays.
    pub fn kill(&self, reason: &str) -> Result<(), StillAlive> {
        let mut progress = self.0.lock();
        progress
            .kill_reason
            .get_or_insert_with(|| reason.to_owned());
        // Init can count what the job used; so it is asked first, if it listens already.
        if progress.phase == JobPhase::Running
            && control::send_message(&self.0.socket, &ControlRequest::Kill).is_ok()
        {
            progress = self.0.wait_ended(progress, KILL_GRACE);
        }
        if progress.phase != JobPhase::Ended {
            // An init that is not known yet meets the end of the socket, or this mark when it
            // becomes known. The outer stage then ends by itself: it waits for init.
            let _ = self.0.socket.shutdown(Shutdown::Write);
            progress.is_kill_pending = true;
            kill_stage(progress.init.as_ref());
            progress = self.0.wait_ended(progress, KILL_GRACE);
        }
        if progress.phase != JobPhase::Ended {
            // Unless somebody stopped it.
            kill_stage(progress.outer_stage.as_ref());
            progress = self.0.wait_ended(progress, KILL_MAX - 2 * KILL_GRACE);
        }
        if progress.phase == JobPhase::Ended {
            Ok(())
        } else {
            Err(StillAlive)
        }
    }
}

fn kill_stage(stage: Option<&OwnedFd>) {
    if let Some(stage) = stage {
        // One that is dead already is as good.
        let _ = pidfd_send_signal(stage, rustix::process::Signal::KILL);
    }
}

#[derive(Debug)]
struct RunningJobState {
    socket: UnixStream,
    progress: Mutex<JobProgress>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct JobProgress {
    phase: JobPhase,
    kill_reason: Option<String>,
    /// Init is to be killed as soon as it is known.
    is_kill_pending: bool,
    /// Signals for the job that came before it ran.
    early_signals: Vec<Signal>,
    /// The outer stage, as long as it may be alive.
    outer_stage: Option<OwnedFd>,
    /// The job's init, once it is known.
    init: Option<OwnedFd>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum JobPhase {
    #[default]
    Starting,
    Running,
    /// No process of the job is left.
    Ended,
}

/// What the stages told of a job.
#[derive(Default)]
struct StageReports {
    not_started: Option<NotStarted>,
    end: Option<ProcessEnd>,
    usage: Option<JobUsage>,
    notes: Vec<String>,
    warnings: Vec<String>,
    started: Option<Instant>,
    wall: Duration,
}

impl RunningJobState {
    fn lock(&self) -> MutexGuard<'_, JobProgress> {
        // No holder leaves the progress half-changed, so a panic elsewhere spoils nothing.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_ended<'a>(
        &self,
        progress: MutexGuard<'a, JobProgress>,
        longest: Duration,
    ) -> MutexGuard<'a, JobProgress> {
        self.changed
            .wait_timeout_while(progress, longest, |progress| {
                progress.phase != JobPhase::Ended
            })
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }

    /// Accompanies the stages from the order to the last process's death.
    fn supervise(
        &self,
        mut outer: StageProcess,
        order: &JobOrder,
        passed: Vec<OwnedFd>,
    ) -> SandboxReport {
        self.lock().outer_stage =
            Pid::from_raw(outer.id() as i32).and_then(open_process_descriptor);
        // A stage that fails hangs up; its report tells more than this error.
        let _ = control::send_order(&self.socket, order, &passed);
        drop(passed);
        // Later messages are short. A stopped init that reads none must not stop the agent.
        let _ = self.socket.set_write_timeout(Some(KILL_GRACE));
        let told = self.collect_reports();
        outer.wait();
        let mut progress = self.lock();
        progress.outer_stage = None;
        let init = progress.init.take();
        drop(progress);
        if let Some(init) = init {
            // When somebody killed the outer stage, its init may take a moment longer to die.
            let _ = poll(&mut [PollFd::new(&init, PollFlags::IN)], None);
        }
        let mut progress = self.lock();
        progress.phase = JobPhase::Ended;
        let kill_reason = progress.kill_reason.clone();
        drop(progress);
        self.changed.notify_all();
        told.into_report(kill_reason)
    }

    fn record_init(&self, number: i32) {
        let init = Pid::from_raw(number).and_then(open_process_descriptor);
        let mut progress = self.lock();
        if progress.is_kill_pending {
            kill_stage(init.as_ref());
        }
        progress.init = init;
    }

    fn mark_running(&self) {
        let mut progress = self.lock();
        progress.phase = JobPhase::Running;
        for signal in std::mem::take(&mut progress.early_signals) {
            // An init that died meanwhile is noticed by the listener.
            let _ = control::send_message(&self.socket, &ControlRequest::Signal(signal as i32));
        }
    }

    fn collect_reports(&self) -> StageReports {
        let mut told = StageReports::default();
        let mut reader = BufReader::new(&self.socket);
        while let Ok(Some(report)) = control::receive_message(&mut reader, REPORT_BYTES_MAX) {
            match report {
                StageReport::Init(number) => self.record_init(number),
                StageReport::NotStarted(refusal) => told.not_started = Some(refusal),
                StageReport::Started { missing, warnings } => {
                    told.notes = missing;
                    told.warnings = warnings;
                    told.started = Some(clock::now());
                    self.mark_running();
                }
                StageReport::Ended(end) => {
                    told.end = Some(end);
                    told.stop_clock();
                }
                StageReport::Usage(usage) => told.usage = Some(usage),
            }
        }
        told.stop_clock();
        told
    }
}

/// A descriptor stays with its process, where a number may pass to another one. Without it
/// (old kernels) a kill still works through the stages' own obedience.
fn open_process_descriptor(pid: Pid) -> Option<OwnedFd> {
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

impl StageReports {
    fn stop_clock(&mut self) {
        if let Some(started) = self.started.take() {
            self.wall = clock::now().saturating_duration_since(started);
        }
    }

    fn into_report(self, kill_reason: Option<String>) -> SandboxReport {
        const SIGKILL: i32 = Signal::SIGKILL as i32;
        let outcome = match (self.not_started, self.end, kill_reason) {
            // A job that came to its own end before the kill reached it keeps that end.
            (_, Some(ProcessEnd::Exited(code)), _) => SandboxOutcome::Exited(code),
            (_, Some(ProcessEnd::Signaled(SIGKILL)) | None, Some(reason)) => {
                SandboxOutcome::Killed(reason)
            }
            (_, Some(ProcessEnd::Signaled(signal)), _) => SandboxOutcome::Signaled(signal),
            (Some(refusal), None, None) => SandboxOutcome::NotStarted(refusal),
            (None, None, None) => SandboxOutcome::Interrupted(
                "the job's init process was killed from outside, or memory ran out".to_owned(),
            ),
        };
        SandboxReport {
            outcome,
            usage: self.usage,
            wall: self.wall,
            notes: self.notes,
            warnings: self.warnings,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(end: Option<ProcessEnd>, kill_reason: Option<&str>, expected: SandboxOutcome) {
        let told = StageReports {
            end,
            ..StageReports::default()
        };
        assert_eq!(
            told.into_report(kill_reason.map(str::to_owned)).outcome,
            expected
        );
    }

    #[test]
    fn job_ends_are_distinguished() {
        let killed = || SandboxOutcome::Killed("why".to_owned());
        check(Some(ProcessEnd::Exited(3)), None, SandboxOutcome::Exited(3));
        check(
            Some(ProcessEnd::Exited(3)),
            Some("why"),
            SandboxOutcome::Exited(3),
        );
        check(
            Some(ProcessEnd::Signaled(9)),
            None,
            SandboxOutcome::Signaled(9),
        );
        check(Some(ProcessEnd::Signaled(9)), Some("why"), killed());
        check(
            Some(ProcessEnd::Signaled(15)),
            Some("why"),
            SandboxOutcome::Signaled(15),
        );
        check(None, Some("why"), killed());
        let told = StageReports::default().into_report(None);
        assert!(matches!(told.outcome, SandboxOutcome::Interrupted(_)));
    }
}
