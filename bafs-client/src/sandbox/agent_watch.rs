//! How the outer stage notices an agent that hangs. Ends nothing but the agent.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getppid};
use rustix::process::{PidfdFlags, pidfd_open};

use crate::heartbeat::{HeartbeatEnd, watch_heartbeat};

/// Ends an agent that gives no sign of life; its beats arrive as standard output. Only its death
/// frees the job's processes from a file system that nobody serves, also for being killed.
pub(super) struct AgentWatch {
    agent: Pid,
    silence: Duration,
    /// Nothing where a thread watches already.
    beats: Option<UnixStream>,
}

impl AgentWatch {
    /// Begins to watch, in this thread where the kernel has descriptors of processes. Else a thread
    /// does: there cannot be one any more once new processes go to another name space.
    pub(super) fn begin(agent: Pid, silence: Duration) -> io::Result<Self> {
        let beats = UnixStream::from(io::stdout().as_fd().try_clone_to_owned()?);
        let mut watch = Self {
            agent,
            silence,
            beats: Some(beats),
        };
        if open_process(std::process::id()).is_none() {
            let beats = watch.beats.take();
            let watching = move || {
                if let Some(beats) = beats {
                    kill_if_silent(agent, watch_heartbeat(beats, silence, None));
                }
            };
            let named = thread::Builder::new().name("pulse".to_owned());
            named.spawn(watching)?;
        }
        Ok(watch)
    }

    /// Watches until the agent needs no watch any more, or a child of this process ends.
    pub(super) fn watch_until_end(self, child: u32) {
        if let (Some(beats), Some(child)) = (self.beats, open_process(child)) {
            let end = watch_heartbeat(beats, self.silence, Some(&child));
            kill_if_silent(self.agent, end);
        }
    }
}

fn kill_if_silent(agent: Pid, end: HeartbeatEnd) {
    if end == HeartbeatEnd::Silent && getppid() == agent {
        let _ = kill(agent, Signal::SIGKILL);
    }
}

/// Nothing where the kernel has no such descriptors.
fn open_process(id: u32) -> Option<OwnedFd> {
    let pid = rustix::process::Pid::from_raw(i32::try_from(id).ok()?)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}
