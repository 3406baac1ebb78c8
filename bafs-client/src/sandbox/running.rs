//! The agent's side of a job: starts the stages, hears how it ends, and can end it. Builds no
//! name space itself.

use std::io::{self, BufReader};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};
use std::{fs, thread};

use nix::sys::signal::Signal;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Resource, getrlimit, pidfd_open, pidfd_send_signal};
use thiserror::Error;
use tokio::sync::oneshot;

use super::control::{self, Order, ProcessEnd, Report, Request, Stream};
use super::holder::Holder;
use super::limits::{KILL_ASKED, KILL_MAX, REPORT_BYTES_MAX};
use super::mounts;
use super::outcome::{JobOutcome, JobReport, JobUsage, NotStarted};
use super::plan::{Input, JobPlan, JobStreams, Output, PlanError};
use super::privilege::{EnterError, Privilege, refused};
use super::stages::{OUTER, SELF, SUBCOMMAND};
use crate::{clock, memory};

/// Directories that the private mount points may cover, in the agent's name space only. No
/// agent needs them, and most are empty; one of them exists everywhere.
const BASES: [&str; 6] = ["/boot", "/media", "/srv", "/mnt", "/opt", "/proc/fs"];

/// The agent's private place for mount points, and the starter of jobs.
#[derive(Debug)]
pub struct Sandbox {
    privilege: Privilege,
    base: PathBuf,
    mount_points: AtomicU32,
    descriptors: Option<u64>,
}

/// Why a job could not even be attempted.
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
            candidates: BASES.map(PathBuf::from).to_vec(),
        })?;
        mounts::memory(&base, 0o755)
            .map_err(|errno| refused("mount a place for mount points", errno))?;
        Ok(Self {
            privilege,
            base,
            mount_points: AtomicU32::new(0),
            descriptors: getrlimit(Resource::Nofile).current,
        })
    }

    /// A new empty directory on which to mount a volume, invisible outside this agent.
    pub fn mount_point(&self) -> io::Result<PathBuf> {
        let number = self.mount_points.fetch_add(1, Ordering::Relaxed);
        let path = self.base.join(format!(".bafs-{number}"));
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
        let base = self.base.clone().into_os_string();
        let order = Order {
            plan,
            privilege: self.privilege,
            base,
            descriptors: self.descriptors,
            streams,
        };

        let (ours, theirs) = UnixStream::pair()?;
        let mut command = Command::new(SELF);
        command
            .arg0("bafs")
            .args([SUBCOMMAND, OUTER, &name])
            .env_clear()
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null());
        if let Some((pulse, silence)) = watched {
            command.arg(silence.as_millis().to_string());
            command.stdout(OwnedFd::from(pulse));
        }
        let shared = Arc::new(Shared {
            socket: ours,
            progress: Mutex::default(),
            changed: Condvar::new(),
        });
        let (started, wait_started) = mpsc::channel();
        let (finished, report) = oneshot::channel();
        let watched = Arc::clone(&shared);
        // The stages die with the thread that started them: it must be one that lives as long
        // as the job, which a thread of an async runtime does not promise.
        thread::Builder::new()
            .name("bafs-job".to_owned())
            .spawn(move || {
                let spawned = command.spawn();
                // The command still holds the stages' end of the socket.
                drop(command);
                match spawned {
                    Ok(child) => {
                        memory::expose(child.id());
                        let _ = started.send(Ok(()));
                        let points = Holder::start(&order.plan, Path::new(&order.base));
                        // Without them the job has stand-ins, and is told so.
                        let points = points.unwrap_or_default();
                        let report = watched.watch(child, &order, passed);
                        // No process of the job uses them any more.
                        drop(points);
                        // Nobody may be waiting any more.
                        let _ = finished.send(report);
                    }
                    Err(error) => drop(started.send(Err(error))),
                }
            })?;
        wait_started.recv().map_err(io::Error::other)??;
        Ok(RunningJob {
            control: JobControl(shared),
            report,
        })
    }
}

fn choose_base() -> Option<PathBuf> {
    let directories = || {
        BASES
            .into_iter()
            .filter_map(|path| fs::canonicalize(path).ok())
    };
    let empty = |path: &PathBuf| fs::read_dir(path).is_ok_and(|mut all| all.next().is_none());
    let usable = |path: &PathBuf| path.is_dir() && path != Path::new("/");
    directories()
        .find(empty)
        .or_else(|| directories().find(usable))
}

fn pass_streams(streams: JobStreams, passed: &mut Vec<OwnedFd>) -> io::Result<[Stream; 3]> {
    let mut pass = |descriptor: io::Result<OwnedFd>| {
        passed.push(descriptor?);
        Ok::<_, io::Error>(Stream::Passed)
    };
    let stdin = match streams.stdin {
        Input::Null => Stream::Null,
        Input::Inherit => pass(io::stdin().as_fd().try_clone_to_owned())?,
        Input::Descriptor(descriptor) => pass(Ok(descriptor))?,
        Input::Path(path) => Stream::path(path),
    };
    let mut output = |output, own: io::Result<OwnedFd>| match output {
        Output::Null => Ok(Stream::Null),
        Output::Inherit => pass(own),
        Output::Descriptor(descriptor) => pass(Ok(descriptor)),
        Output::Path(path) => Ok(Stream::path(path)),
    };
    let stdout = output(streams.stdout, io::stdout().as_fd().try_clone_to_owned())?;
    let stderr = output(streams.stderr, io::stderr().as_fd().try_clone_to_owned())?;
    Ok([stdin, stdout, stderr])
}

/// A job that was started. Dropping it leaves the job running.
#[derive(Debug)]
pub struct RunningJob {
    control: JobControl,
    report: oneshot::Receiver<JobReport>,
}

impl RunningJob {
    /// A handle to signal or kill the job from elsewhere while somebody waits.
    pub fn control(&self) -> JobControl {
        self.control.clone()
    }

    /// Waits for the end, blocking; not for use inside an async runtime.
    pub fn wait(self) -> JobReport {
        self.report.blocking_recv().unwrap_or_else(|_| unwatched())
    }

    /// Waits for the end.
    pub async fn finished(self) -> JobReport {
        self.report.await.unwrap_or_else(|_| unwatched())
    }
}

fn unwatched() -> JobReport {
    let outcome = JobOutcome::Interrupted("the thread that watched the job panicked".to_owned());
    JobReport {
        outcome,
        usage: None,
        wall: Duration::ZERO,
        notes: Vec::new(),
        warnings: Vec::new(),
    }
}

/// Signals or kills a job; as many copies as needed.
#[derive(Debug, Clone)]
pub struct JobControl(Arc<Shared>);

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
            Phase::Running => control::send(&self.0.socket, &Request::Signal(signal as i32)),
            Phase::Starting => {
                progress.early_signals.push(signal);
                Ok(())
            }
            Phase::Ended => Ok(()),
        }
    }

    /// Kills every process of the job, whatever it did to escape, and waits until all are
    /// dead: [`KILL_MAX`] at most. Blocks; inside an async runtime use `spawn_blocking`.
    ///
    /// The reason becomes part of [`JobOutcome::Killed`]; the first one given stays.
    pub fn kill(&self, reason: &str) -> Result<(), StillAlive> {
        let mut progress = self.0.lock();
        progress
            .kill_reason
            .get_or_insert_with(|| reason.to_owned());
        // Init can count what the job used; so it is asked first, if it listens already.
        if progress.phase == Phase::Running && control::send(&self.0.socket, &Request::Kill).is_ok()
        {
            progress = self.0.wait_ended(progress, KILL_ASKED);
        }
        if progress.phase != Phase::Ended {
            // An init that is not known yet meets the end of the socket, or this mark when it
            // becomes known. The outer stage then ends by itself: it waits for init.
            let _ = self.0.socket.shutdown(Shutdown::Write);
            progress.kill_init = true;
            kill_stage(progress.init.as_ref());
            progress = self.0.wait_ended(progress, KILL_ASKED);
        }
        if progress.phase != Phase::Ended {
            // Unless somebody stopped it.
            kill_stage(progress.outer.as_ref());
            progress = self.0.wait_ended(progress, KILL_MAX - 2 * KILL_ASKED);
        }
        if progress.phase == Phase::Ended {
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
struct Shared {
    socket: UnixStream,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Progress {
    phase: Phase,
    kill_reason: Option<String>,
    /// Init is to be killed as soon as it is known.
    kill_init: bool,
    /// Signals for the job that came before it ran.
    early_signals: Vec<Signal>,
    /// The outer stage, as long as it may be alive.
    outer: Option<OwnedFd>,
    /// The job's init, once it is known.
    init: Option<OwnedFd>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Starting,
    Running,
    /// No process of the job is left.
    Ended,
}

/// What the stages told of a job.
#[derive(Default)]
struct Told {
    not_started: Option<NotStarted>,
    end: Option<ProcessEnd>,
    usage: Option<JobUsage>,
    notes: Vec<String>,
    warnings: Vec<String>,
    started: Option<Instant>,
    wall: Duration,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        // No holder leaves the progress half-changed, so a panic elsewhere spoils nothing.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_ended<'a>(
        &self,
        progress: MutexGuard<'a, Progress>,
        longest: Duration,
    ) -> MutexGuard<'a, Progress> {
        self.changed
            .wait_timeout_while(progress, longest, |progress| progress.phase != Phase::Ended)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }

    /// Accompanies the stages from the order to the last process's death.
    fn watch(&self, mut outer: Child, order: &Order, passed: Vec<OwnedFd>) -> JobReport {
        self.lock().outer = descriptor_of(Pid::from_child(&outer));
        // A stage that fails hangs up; its report tells more than this error.
        let _ = control::send_order(&self.socket, order, &passed);
        drop(passed);
        // Later messages are short. A stopped init that reads none must not stop the agent.
        let _ = self.socket.set_write_timeout(Some(KILL_ASKED));
        let told = self.listen();
        let _ = outer.wait();
        let mut progress = self.lock();
        progress.outer = None;
        let init = progress.init.take();
        drop(progress);
        if let Some(init) = init {
            // When somebody killed the outer stage, its init may take a moment longer to die.
            let _ = poll(&mut [PollFd::new(&init, PollFlags::IN)], None);
        }
        let mut progress = self.lock();
        progress.phase = Phase::Ended;
        let kill_reason = progress.kill_reason.clone();
        drop(progress);
        self.changed.notify_all();
        told.judge(kill_reason)
    }

    fn meet_init(&self, number: i32) {
        let init = Pid::from_raw(number).and_then(descriptor_of);
        let mut progress = self.lock();
        if progress.kill_init {
            kill_stage(init.as_ref());
        }
        progress.init = init;
    }

    fn let_run(&self) {
        let mut progress = self.lock();
        progress.phase = Phase::Running;
        for signal in std::mem::take(&mut progress.early_signals) {
            // An init that died meanwhile is noticed by the listener.
            let _ = control::send(&self.socket, &Request::Signal(signal as i32));
        }
    }

    fn listen(&self) -> Told {
        let mut told = Told::default();
        let mut reader = BufReader::new(&self.socket);
        while let Ok(Some(report)) = control::receive(&mut reader, REPORT_BYTES_MAX) {
            match report {
                Report::Init(number) => self.meet_init(number),
                Report::NotStarted(refusal) => told.not_started = Some(refusal),
                Report::Started { missing, warnings } => {
                    told.notes = missing;
                    told.warnings = warnings;
                    told.started = Some(clock::now());
                    self.let_run();
                }
                Report::Ended(end) => {
                    told.end = Some(end);
                    told.stop_clock();
                }
                Report::Used(usage) => told.usage = Some(usage),
            }
        }
        told.stop_clock();
        told
    }
}

/// A descriptor stays with its process, where a number may pass to another one. Without it
/// (old kernels) a kill still works through the stages' own obedience.
fn descriptor_of(pid: Pid) -> Option<OwnedFd> {
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

impl Told {
    fn stop_clock(&mut self) {
        if let Some(started) = self.started.take() {
            self.wall = clock::now().saturating_duration_since(started);
        }
    }

    fn judge(self, kill_reason: Option<String>) -> JobReport {
        const SIGKILL: i32 = Signal::SIGKILL as i32;
        let outcome = match (self.not_started, self.end, kill_reason) {
            // A job that came to its own end before the kill reached it keeps that end.
            (_, Some(ProcessEnd::Exited(code)), _) => JobOutcome::Exited(code),
            (_, Some(ProcessEnd::Signaled(SIGKILL)) | None, Some(reason)) => {
                JobOutcome::Killed(reason)
            }
            (_, Some(ProcessEnd::Signaled(signal)), _) => JobOutcome::Signaled(signal),
            (Some(refusal), None, None) => JobOutcome::NotStarted(refusal),
            (None, None, None) => JobOutcome::Interrupted(
                "the job's init process was killed from outside, or memory ran out".to_owned(),
            ),
        };
        JobReport {
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
    fn check(end: Option<ProcessEnd>, kill_reason: Option<&str>, expected: JobOutcome) {
        let told = Told {
            end,
            ..Told::default()
        };
        assert_eq!(told.judge(kill_reason.map(str::to_owned)).outcome, expected);
    }

    #[test]
    fn ends_are_told_apart() {
        let killed = || JobOutcome::Killed("why".to_owned());
        check(Some(ProcessEnd::Exited(3)), None, JobOutcome::Exited(3));
        check(
            Some(ProcessEnd::Exited(3)),
            Some("why"),
            JobOutcome::Exited(3),
        );
        check(Some(ProcessEnd::Signaled(9)), None, JobOutcome::Signaled(9));
        check(Some(ProcessEnd::Signaled(9)), Some("why"), killed());
        check(
            Some(ProcessEnd::Signaled(15)),
            Some("why"),
            JobOutcome::Signaled(15),
        );
        check(None, Some("why"), killed());
        let told = Told::default().judge(None);
        assert!(matches!(told.outcome, JobOutcome::Interrupted(_)));
    }
}
