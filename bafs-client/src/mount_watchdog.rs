//! The mount watchdog: a process that removes a mount on the host if its agent dies or is silent.
//!
//! A mount of `bafs mount` is visible to every process of the host. If its agent died, every access
//! would fail or hang. So each such mount has a watchdog, a small process in a session of its own:
//!
//! ```text
//!  agent ── heartbeat each 0.5 s ──▶ watchdog      (a socket pair)
//!    └───── /dev/fuse, duplicated ─▶ watchdog      (held open, never read)
//! ```
//!
//! * `MountWatchdog` is the agent's side. It starts the watchdog, sends heartbeats from the
//!   runtime, and starts another watchdog if this one was killed. So a blocked runtime counts as
//!   silent.
//! * `WatchdogProcess` is one process. Dropping it without `dismiss` removes the mount, and
//!   `dismiss` ends it in good order.
//! * `watchdog_main` is the process itself. It runs the same executable under a hidden subcommand.
//!
//! The watchdog counts missing heartbeats, so a pause of the whole machine counts as one. The limit
//! is the deadline of an operation, three seconds at least. It acts in this order:
//!
//! 1. It detaches the mount (umount2(2), `MNT_DETACH`), so that no new process waits for it.
//! 2. If the agent is silent but alive, it prints the reason to standard error and kills the agent.
//! 3. It exits. With that the kernel's FUSE connection closes, and waiting requests fail.
//!
//! It holds the device until then, so requests to a dead agent wait instead of failing.
//!
//! **Survival.** Batch systems kill process groups, sessions and control groups. The watchdog
//! leaves all three if it may, and blocks all signals. It needs little memory, and knows nothing of
//! files.
//!
//! **Errors.** `start` fails if the process does not report within five seconds. Then nothing is
//! mounted. A job's own mounts need no watchdog, because they end with their name space. See
//! `docs/decisions/0014-mount-watchdog.md`.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::{getppid, setsid};
use tokio::task::JoinHandle;

use crate::clock;
use crate::doctor::mounts;
use crate::heartbeat::{Heartbeat, HeartbeatEnd, READY_BYTE, watch_heartbeat};
use crate::kernel;
use crate::limits::{WATCHDOG_EXIT_TIMEOUT, WATCHDOG_READY_TIMEOUT};
use crate::own_process::{MOUNT_WATCHDOG, OWN_EXECUTABLE, SUBCOMMAND};

/// Where the root of each hierarchy of control groups is.
const CONTROL_GROUPS_PATH: &str = "/sys/fs/cgroup";

/// Pause between two looks at a keeper that should end.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// The agent's side of a keeper. Dropping it without [`Self::dismiss`] has the mount taken away.
#[derive(Debug)]
pub(crate) struct WatchdogProcess {
    heartbeat: Arc<Heartbeat>,
    process: Child,
}

impl WatchdogProcess {
    /// Starts a keeper of what will be mounted on `directory`, which must be absolute, or of the
    /// mount of this id that is there. `device`, if there is one, stays open as long as the keeper
    /// lives: until then a request of a dead agent waits instead of failing.
    pub(crate) fn start(
        directory: &Path,
        silence: Duration,
        device: Option<OwnedFd>,
        mount: Option<u64>,
    ) -> io::Result<Self> {
        let (beat, watched) = Heartbeat::pair()?;
        let silence_ms = silence.as_millis().to_string();
        let mut process = Command::new(OWN_EXECUTABLE)
            .arg0("bafs")
            .args([OsStr::new(SUBCOMMAND), OsStr::new(MOUNT_WATCHDOG)])
            .arg(directory)
            .arg(silence_ms)
            .args(mount.map(|id| id.to_string()))
            .env_clear()
            .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
            .stdin(OwnedFd::from(watched))
            .stdout(device.map_or_else(Stdio::null, Stdio::from))
            .spawn()?;
        if let Err(error) = beat.wait_for_watcher(WATCHDOG_READY_TIMEOUT) {
            let _ = process.kill();
            let _ = process.wait();
            return Err(error);
        }
        let beat = Arc::new(beat);
        Ok(Self {
            heartbeat: beat,
            process,
        })
    }

    /// The mount is gone in good order, and so is the keeper when this returns.
    pub(crate) fn dismiss(self) {
        let Self {
            heartbeat: beat,
            mut process,
        } = self;
        beat.finish();
        let start = clock::now();
        loop {
            match process.try_wait() {
                Ok(Some(_)) => return,
                Ok(None) if start.elapsed() < WATCHDOG_EXIT_TIMEOUT => {
                    thread::sleep(EXIT_POLL_INTERVAL)
                }
                Ok(None) => break,
                Err(error) => {
                    return tracing::warn!(%error, "the exit status of the mount watchdog \
                    is unknown");
                }
            }
        }
        // It is stopped, and has nothing to keep any more.
        let _ = process.kill();
        let _ = process.wait();
    }
}

/// A mount's keeper, which sees the agent beat, and is followed by another when it dies alone.
pub(crate) struct MountWatchdog {
    directory: PathBuf,
    silence: Duration,
    device: Option<OwnedFd>,
    process: WatchdogProcess,
    heartbeat_task: JoinHandle<()>,
    /// No other keeper could be started, and none is tried any more.
    has_given_up: bool,
}

impl MountWatchdog {
    /// As [`WatchdogProcess::start`]; must run inside the runtime whose life the keeper shall see.
    pub(crate) fn start(
        directory: &Path,
        silence: Duration,
        device: Option<OwnedFd>,
    ) -> io::Result<Self> {
        let keeper =
            WatchdogProcess::start(directory, silence, duplicate_device(device.as_ref())?, None)?;
        Ok(Self {
            directory: directory.to_owned(),
            silence,
            device,
            heartbeat_task: tokio::spawn(Arc::clone(&keeper.heartbeat).send_beats()),
            process: keeper,
            has_given_up: false,
        })
    }

    /// Whether another keeper is needed: this one is gone when somebody killed it.
    pub(crate) fn has_exited(&mut self) -> bool {
        !self.has_given_up && !matches!(self.process.process.try_wait(), Ok(None))
    }

    /// Starts another keeper, of the mount of this id, in place of one that is gone.
    pub(crate) fn restart(&mut self, mount: u64) -> io::Result<()> {
        self.has_given_up = true;
        let device = duplicate_device(self.device.as_ref())?;
        self.process = WatchdogProcess::start(&self.directory, self.silence, device, Some(mount))?;
        self.has_given_up = false;
        self.heartbeat_task.abort();
        self.heartbeat_task = tokio::spawn(Arc::clone(&self.process.heartbeat).send_beats());
        Ok(())
    }

    /// As [`WatchdogProcess::dismiss`].
    pub(crate) fn dismiss(self) {
        self.heartbeat_task.abort();
        self.process.dismiss();
    }
}

fn duplicate_device(device: Option<&OwnedFd>) -> io::Result<Option<OwnedFd>> {
    device.map(OwnedFd::try_clone).transpose()
}

/// The keeper itself; `arguments` are the directory, the longest silence in milliseconds, and the
/// id of the mount if it is there already.
pub(crate) fn watchdog_main(mut arguments: impl Iterator<Item = OsString>) -> io::Result<()> {
    let directory = arguments.next().unwrap_or_default();
    let directory = Path::new(&directory);
    let silence_ms = arguments
        .next()
        .and_then(|text| text.to_str()?.parse().ok());
    let silence_ms = silence_ms.ok_or(io::ErrorKind::InvalidInput)?;
    let mount = arguments
        .next()
        .and_then(|text| text.to_str()?.parse().ok());
    kernel::close_on_exec_from(3)?;
    // Batch systems end a job by killing its process group or session, and its control group.
    setsid()?;
    SigSet::all().thread_block()?;
    leave_control_group();
    std::env::set_current_dir("/")?;
    let agent = getppid();
    let watched = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let before: BTreeSet<u64> = mounts::own_mounts_on(directory)?
        .into_iter()
        .map(|found| found.id)
        .filter(|id| Some(*id) != mount)
        .collect();
    (&watched).write_all(&[READY_BYTE])?;
    let ended = watch_heartbeat(watched, Duration::from_millis(silence_ms), None);
    if ended == HeartbeatEnd::Finished {
        return Ok(());
    }
    // A mount of a silent agent is taken away first: nobody new shall wait for it.
    for mount in mounts::own_mounts_on(directory)? {
        if !before.contains(&mount.id) {
            mounts::detach_mount(&mount);
        }
    }
    if ended == HeartbeatEnd::Silent && getppid() == agent {
        print_loss(directory, silence_ms);
        // It may be stopped, and would hold its end of the connection for ever.
        let _ = kill(agent, Signal::SIGKILL);
    }
    Ok(())
}

/// Goes where a batch system that kills a control group does not reach, if it may.
fn leave_control_group() {
    let own = std::process::id().to_string();
    let root = Path::new(CONTROL_GROUPS_PATH);
    if fs::write(root.join("cgroup.procs"), &own).is_ok() {
        return;
    }
    // The first version has a tree for each controller.
    for hierarchy in fs::read_dir(root).into_iter().flatten().flatten() {
        let _ = fs::write(hierarchy.path().join("cgroup.procs"), &own);
    }
}

fn print_loss(directory: &Path, silence_ms: u64) {
    let text = format!(
        "bafs: the process that serves {} sent no heartbeat for {} s; it is killed and unmounted; \
         mount again\n",
        directory.display(),
        silence_ms / 1000
    );
    // Standard error may be as gone as the terminal.
    let _ = io::stderr().write_all(text.as_bytes());
}
