//! Processes of a job that are copies of this one, made before it has threads: starting the program
//! anew takes two milliseconds each time. They have no descriptor of this process but the standard
//! streams that they are given.

use std::fs::OpenOptions;
use std::io::{self, IoSlice, IoSliceMut, PipeReader, PipeWriter, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, exit};
use std::time::Duration;

use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::waitpid;
use nix::unistd::{Pid, dup2_stderr, dup2_stdin, dup2_stdout, getpid, getppid};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::kernel;
use crate::own_process::{HOLDER, OUTER, SUBCOMMAND};

/// Standard streams that travel with a task.
const STREAMS_MAX: usize = 2;

/// A task as it travels: what to become, and how long the agent may be silent, in milliseconds.
const TASK_BYTES: usize = 9;

const BECOME_OUTER_STAGE: u8 = 1;
const START_HOLDER: u8 = 2;

/// A process of a job, as its parent knows it.
#[derive(Debug)]
pub(super) enum StageProcess {
    /// The program, started anew.
    Spawned(Child),
    /// A copy of this process.
    Forked(Pid),
}

impl StageProcess {
    /// Its number.
    pub(super) fn id(&self) -> u32 {
        match self {
            Self::Spawned(child) => child.id(),
            Self::Forked(pid) => pid.as_raw().unsigned_abs(),
        }
    }

    /// Waits for its end.
    pub(super) fn wait(&mut self) {
        match self {
            Self::Spawned(child) => drop(child.wait()),
            Self::Forked(pid) => drop(waitpid(*pid, None)),
        }
    }
}

/// Runs `body` in a copy of this process, which lists of processes show by this name, with these
/// streams as standard input and output.
/// Without an output, and for errors, it has none.
pub(super) fn fork_child(
    name: &str,
    input: OwnedFd,
    output: Option<OwnedFd>,
    body: impl FnOnce() -> io::Result<()>,
) -> io::Result<Pid> {
    if let Some(child) = kernel::fork()? {
        return Ok(child);
    }
    run_child(|| {
        let null = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/null")?;
        let null = OwnedFd::from(null);
        dup2_stdin(&input)?;
        dup2_stdout(output.as_ref().unwrap_or(&null))?;
        dup2_stderr(&null)?;
        kernel::close_from(3)?;
        std::mem::forget((input, output, null));
        set_title(name);
        body()
    })
}

/// Lists of processes show this stage, and not what the agent was started with.
fn set_title(name: &str) {
    // Without it only people are misled.
    let _ = kernel::set_process_title(&["bafs", SUBCOMMAND, name]);
}

/// The rest of a copied process.
fn run_child(body: impl FnOnce() -> io::Result<()>) -> ! {
    let ended = catch_unwind(AssertUnwindSafe(body));
    exit(i32::from(!matches!(ended, Ok(Ok(())))))
}

/// What a reserved process can become.
#[derive(Debug, Clone, Copy)]
pub(super) struct StageTasks {
    /// Keeps mount points, as a copy of its own.
    pub(super) hold_mount_points: fn() -> io::Result<()>,
    /// The outer stage; kills an agent that is silent for so long.
    pub(super) run_outer_stage: fn(Option<Duration>) -> io::Result<()>,
}

/// A process that becomes the outer stage of this one's job, with no more than it had before there
/// were threads. It ends with this one.
#[derive(Debug)]
pub struct ReservedStage {
    pid: Pid,
    control: Option<UnixStream>,
}

impl ReservedStage {
    /// Makes it, as [`super::reserve_stage`] says.
    ///
    /// # Errors
    /// The system gives no process or descriptor.
    pub(super) fn start(tasks: StageTasks) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let agent = getpid();
        let Some(pid) = kernel::fork()? else {
            run_child(|| serve_tasks(agent, theirs, tasks))
        };
        let control = Some(ours);
        Ok(Self { pid, control })
    }

    /// Its number.
    pub(super) fn id(&self) -> u32 {
        self.pid.as_raw().unsigned_abs()
    }

    /// Starts the process that keeps mount points, with these standard streams.
    pub(super) fn start_holder(&self, input: PipeReader, output: PipeWriter) -> io::Result<()> {
        let streams = [OwnedFd::from(input), OwnedFd::from(output)];
        self.send_task(START_HOLDER, 0, &streams)
    }

    /// Has it become the outer stage, which speaks by `socket`.
    pub(super) fn become_outer(
        mut self,
        socket: OwnedFd,
        watched: Option<(UnixStream, Duration)>,
    ) -> io::Result<StageProcess> {
        let mut streams = vec![socket];
        let mut silence_ms = 0;
        if let Some((heartbeat, silence)) = watched {
            streams.push(heartbeat.into());
            silence_ms = u64::try_from(silence.as_millis()).unwrap_or(u64::MAX);
        }
        self.send_task(BECOME_OUTER_STAGE, silence_ms, &streams)?;
        self.control = None;
        Ok(StageProcess::Forked(self.pid))
    }

    fn send_task(&self, task: u8, silence_ms: u64, streams: &[OwnedFd]) -> io::Result<()> {
        let control = self.control.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        let mut bytes = [0; TASK_BYTES];
        bytes[0] = task;
        bytes[1..].copy_from_slice(&silence_ms.to_le_bytes());
        let streams: Vec<_> = streams.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(STREAMS_MAX))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(&streams)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let slices = [IoSlice::new(&bytes)];
        sendmsg(control, &slices, &mut ancillary, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

impl Drop for ReservedStage {
    fn drop(&mut self) {
        // One without a task ends now.
        if self.control.take().is_some() {
            let _ = waitpid(self.pid, None);
        }
    }
}

/// The reserved process' own part.
fn serve_tasks(agent: Pid, control: UnixStream, tasks: StageTasks) -> io::Result<()> {
    // A signal to the whole process group is for agent and job to judge.
    SigSet::all().thread_block()?;
    set_pdeathsig(Signal::SIGKILL)?;
    if getppid() != agent {
        return Ok(());
    }
    let null = OwnedFd::from(OpenOptions::new().write(true).open("/dev/null")?);
    dup2_stdin(&control)?;
    dup2_stdout(&null)?;
    kernel::close_from(3)?;
    std::mem::forget((control, null));
    set_title(OUTER);
    loop {
        let Some((task, silence_ms, mut streams)) = receive_task()? else {
            return Ok(());
        };
        let input = match streams.is_empty() {
            true => return Err(io::ErrorKind::InvalidData.into()),
            false => streams.remove(0),
        };
        let output = streams.pop();
        if task == START_HOLDER {
            fork_child(HOLDER, input, output, tasks.hold_mount_points)?;
            continue;
        }
        dup2_stdin(&input)?;
        let silence = output.as_ref().map(|_| Duration::from_millis(silence_ms));
        if let Some(heartbeat) = output {
            dup2_stdout(&heartbeat)?;
        }
        drop(input);
        return (tasks.run_outer_stage)(silence);
    }
}

/// The next task; nothing when the agent wants none.
fn receive_task() -> io::Result<Option<(u8, u64, Vec<OwnedFd>)>> {
    let stdin = io::stdin();
    let mut bytes = [0; TASK_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(STREAMS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    let received = recvmsg(stdin.as_fd(), &mut slices, &mut ancillary, flags)?;
    if received.bytes < TASK_BYTES {
        return Ok(None);
    }
    let rights = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let streams = rights.flatten().collect();
    let [task, silence @ ..] = bytes;
    Ok(Some((task, u64::from_le_bytes(silence), streams)))
}

/// A process that lives until its standard input ends, as who waits for its end knows it.
#[derive(Debug)]
pub(super) struct LinkedProcess {
    input: Option<PipeWriter>,
    process: LinkedEnd,
}

/// How the end of a process is noticed.
#[derive(Debug)]
enum LinkedEnd {
    /// It is a child of this one.
    Child(StageProcess),
    /// Its output ends.
    Output(PipeReader),
}

impl LinkedProcess {
    /// A child with this pipe as standard input.
    pub(super) fn child(input: PipeWriter, child: StageProcess) -> Self {
        let (input, process) = (Some(input), LinkedEnd::Child(child));
        Self { input, process }
    }

    /// A process of somebody else, with these pipes.
    pub(super) fn linked(input: PipeWriter, output: PipeReader) -> Self {
        let (input, process) = (Some(input), LinkedEnd::Output(output));
        Self { input, process }
    }
}

impl Drop for LinkedProcess {
    fn drop(&mut self) {
        drop(self.input.take());
        match &mut self.process {
            LinkedEnd::Child(child) => child.wait(),
            LinkedEnd::Output(output) => {
                let _ = output.read_to_end(&mut Vec::new());
            }
        }
    }
}
