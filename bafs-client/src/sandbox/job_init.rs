//! What process 1 of a job does while the job runs: it collects dead processes, and does what the
//! agent asks. One thread does both, as a second one takes each job a quarter of a millisecond.

use std::io::{self, BufReader};
use std::os::unix::net::UnixStream;
use std::process::exit;

use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{WaitOptions, WaitStatus, wait};

use super::control::{self, ControlRequest, ProcessEnd};
use super::limits::REPORT_BYTES_MAX;

/// Process 1 of a job that runs.
pub(super) struct JobInit {
    job: Pid,
    requests: BufReader<UnixStream>,
    /// Readable when a child of this process has ended.
    child_ends: SignalFd,
    /// Whether a signal was passed on to the job.
    is_signaled: bool,
}

/// What was found among the children of this process.
enum Reaped {
    /// The job itself has ended.
    Job(ProcessEnd),
    /// There are others that run.
    Others,
    /// There is no child any more.
    Nobody,
}

impl JobInit {
    /// Begins to look after a job; `requests` are the agent's.
    pub(super) fn begin(job: Pid, requests: BufReader<UnixStream>) -> io::Result<Self> {
        // After the job began, which would inherit it.
        let mut ends = SigSet::empty();
        ends.add(Signal::SIGCHLD);
        ends.thread_block()?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let child_ends = SignalFd::with_flags(&ends, flags)?;
        Ok(Self {
            job,
            requests,
            child_ends,
            is_signaled: false,
        })
    }

    /// Serves the agent until the job has ended, which is reported, and no process of it is left.
    /// When the agent is gone this process ends, and with it, by the kernel's hand, every process
    /// of the job.
    pub(super) fn accompany(
        mut self,
        report_end: impl FnOnce(ProcessEnd) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut report_end = Some(report_end);
        loop {
            // One signal may stand for several ends, and some came before anybody listened.
            while self.child_ends.read_signal()?.is_some() {}
            match self.reap_children()? {
                Reaped::Job(end) => {
                    if let Some(report_end) = report_end.take() {
                        report_end(end)?;
                    }
                    // A shell that a signal ends leaves programs that heard it as well, and may
                    // save something. The agent has them killed when they take too long.
                    if !self.is_signaled {
                        break;
                    }
                    continue;
                }
                Reaped::Nobody => break,
                Reaped::Others => {}
            }
            if self.wait_for_request()? {
                self.serve_requests();
            }
        }
        kill_everything();
        while wait(WaitOptions::empty()).is_ok() {}
        Ok(())
    }

    /// Collects dead processes, also those that the job abandoned, until the job is among them.
    fn reap_children(&self) -> io::Result<Reaped> {
        loop {
            let (pid, status) = match wait(WaitOptions::NOHANG) {
                Ok(Some(collected)) => collected,
                Ok(None) => return Ok(Reaped::Others),
                Err(Errno::CHILD) => return Ok(Reaped::Nobody),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            if pid.as_raw_nonzero().get() == self.job.as_raw()
                && let Some(end) = end_of(status)
            {
                return Ok(Reaped::Job(end));
            }
        }
    }

    /// Waits until the agent asks for something or a child ends; whether it is the former.
    fn wait_for_request(&self) -> io::Result<bool> {
        if !self.requests.buffer().is_empty() {
            return Ok(true);
        }
        let mut watched = [
            PollFd::new(self.requests.get_ref(), PollFlags::IN),
            PollFd::new(&self.child_ends, PollFlags::IN),
        ];
        match poll(&mut watched, None) {
            Ok(_) => Ok(!watched[0].revents().is_empty()),
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Does what the agent asks; some of it may have come already.
    fn serve_requests(&mut self) {
        loop {
            match control::receive_message(&mut self.requests, REPORT_BYTES_MAX) {
                Ok(Some(ControlRequest::Kill)) => kill_everything(),
                Ok(Some(ControlRequest::Signal(number))) => {
                    if let Ok(signal) = Signal::try_from(number) {
                        self.is_signaled = true;
                        signal_everything(signal);
                    }
                }
                Ok(None) | Err(_) => exit(0),
            }
            if self.requests.buffer().is_empty() {
                return;
            }
        }
    }
}

fn end_of(status: WaitStatus) -> Option<ProcessEnd> {
    let exited = status.exit_status().map(ProcessEnd::Exited);
    exited.or_else(|| status.terminating_signal().map(ProcessEnd::Signaled))
}

pub(super) fn is_init() -> bool {
    std::process::id() == 1
}

/// Kills every process of this name space but this one.
fn kill_everything() {
    signal_everything(Signal::SIGKILL);
}

/// Sends a signal to every process of this name space but this one.
fn signal_everything(signal: Signal) {
    // Anywhere else the same call would reach every process of the machine.
    assert!(is_init(), "only the job's init may signal everything");
    // It fails when there is none, and then nobody needs it.
    let _ = kill(Pid::from_raw(-1), signal);
}
