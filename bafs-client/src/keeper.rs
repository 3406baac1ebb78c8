//! The keeper of a mount on the host: a small process in a session of its own that takes the mount
//! away when the process that serves it dies or falls silent, so that nobody meets a dead mount.
//! It holds the FUSE device meanwhile, answers no request, and needs no memory to speak of.

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
use crate::kernel;
use crate::limits::{KEEPER_ENDS, KEEPER_READY};
use crate::pulse::{Pulse, PulseEnd, READY, watch};
use crate::sandbox::{KEEPER, SELF, SUBCOMMAND};

/// Where the root of each hierarchy of control groups is.
const CONTROL_GROUPS: &str = "/sys/fs/cgroup";

/// Pause between two looks at a keeper that should end.
const LOOK: Duration = Duration::from_millis(2);

/// The agent's side of a keeper. Dropping it without [`Self::dismiss`] has the mount taken away.
#[derive(Debug)]
pub(crate) struct Keeper {
    pulse: Arc<Pulse>,
    process: Child,
}

impl Keeper {
    /// Starts a keeper of what will be mounted on `directory`, which must be absolute, or of the
    /// mount of this id that is there. `device`, if there is one, stays open as long as the keeper
    /// lives: until then a request of a dead agent waits instead of failing.
    pub(crate) fn start(
        directory: &Path,
        silence: Duration,
        device: Option<OwnedFd>,
        mount: Option<u64>,
    ) -> io::Result<Self> {
        let (pulse, watched) = Pulse::pair()?;
        let silence_ms = silence.as_millis().to_string();
        let mut process = Command::new(SELF)
            .arg0("bafs")
            .args([OsStr::new(SUBCOMMAND), OsStr::new(KEEPER)])
            .arg(directory)
            .arg(silence_ms)
            .args(mount.map(|id| id.to_string()))
            .env_clear()
            .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
            .stdin(OwnedFd::from(watched))
            .stdout(device.map_or_else(Stdio::null, Stdio::from))
            .spawn()?;
        if let Err(error) = pulse.await_watcher(KEEPER_READY) {
            let _ = process.kill();
            let _ = process.wait();
            return Err(error);
        }
        let pulse = Arc::new(pulse);
        Ok(Self { pulse, process })
    }

    /// The mount is gone in good order, and so is the keeper when this returns.
    pub(crate) fn dismiss(self) {
        let Self { pulse, mut process } = self;
        pulse.end();
        let start = clock::now();
        loop {
            match process.try_wait() {
                Ok(Some(_)) => return,
                Ok(None) if start.elapsed() < KEEPER_ENDS => thread::sleep(LOOK),
                Ok(None) => break,
                Err(error) => return tracing::warn!(%error, "nobody knows how the keeper ended"),
            }
        }
        // It is stopped, and has nothing to keep any more.
        let _ = process.kill();
        let _ = process.wait();
    }
}

/// A mount's keeper, which sees the agent beat, and is followed by another when it dies alone.
pub(crate) struct Kept {
    directory: PathBuf,
    silence: Duration,
    device: Option<OwnedFd>,
    keeper: Keeper,
    beating: JoinHandle<()>,
    /// No other keeper could be started, and none is tried any more.
    is_alone: bool,
}

impl Kept {
    /// As [`Keeper::start`]; must run inside the runtime whose life the keeper shall see.
    pub(crate) fn start(
        directory: &Path,
        silence: Duration,
        device: Option<OwnedFd>,
    ) -> io::Result<Self> {
        let keeper = Keeper::start(directory, silence, copy_of(device.as_ref())?, None)?;
        Ok(Self {
            directory: directory.to_owned(),
            silence,
            device,
            beating: tokio::spawn(Arc::clone(&keeper.pulse).beat_on()),
            keeper,
            is_alone: false,
        })
    }

    /// Whether another keeper is needed: this one is gone when somebody killed it.
    pub(crate) fn is_gone(&mut self) -> bool {
        !self.is_alone && !matches!(self.keeper.process.try_wait(), Ok(None))
    }

    /// Starts another keeper, of the mount of this id, in place of one that is gone.
    pub(crate) fn renew(&mut self, mount: u64) -> io::Result<()> {
        self.is_alone = true;
        let device = copy_of(self.device.as_ref())?;
        self.keeper = Keeper::start(&self.directory, self.silence, device, Some(mount))?;
        self.is_alone = false;
        self.beating.abort();
        self.beating = tokio::spawn(Arc::clone(&self.keeper.pulse).beat_on());
        Ok(())
    }

    /// As [`Keeper::dismiss`].
    pub(crate) fn dismiss(self) {
        self.beating.abort();
        self.keeper.dismiss();
    }
}

fn copy_of(device: Option<&OwnedFd>) -> io::Result<Option<OwnedFd>> {
    device.map(OwnedFd::try_clone).transpose()
}

/// The keeper itself; `arguments` are the directory, the longest silence in milliseconds, and the
/// id of the mount if it is there already.
pub(crate) fn main(mut arguments: impl Iterator<Item = OsString>) -> io::Result<()> {
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
    let before: BTreeSet<u64> = mounts::ours_on(directory)?
        .into_iter()
        .map(|found| found.id)
        .filter(|id| Some(*id) != mount)
        .collect();
    (&watched).write_all(&[READY])?;
    let ended = watch(watched, Duration::from_millis(silence_ms));
    if ended == PulseEnd::Well {
        return Ok(());
    }
    // A mount of a silent agent is taken away first: nobody new shall wait for it.
    for mount in mounts::ours_on(directory)? {
        if !before.contains(&mount.id) {
            mounts::take_away(&mount);
        }
    }
    if ended == PulseEnd::Silent && getppid() == agent {
        complain(directory, silence_ms);
        // It may be stopped, and would hold its end of the connection for ever.
        let _ = kill(agent, Signal::SIGKILL);
    }
    Ok(())
}

/// Goes where a batch system that kills a control group does not reach, if it may.
fn leave_control_group() {
    let own = std::process::id().to_string();
    let root = Path::new(CONTROL_GROUPS);
    if fs::write(root.join("cgroup.procs"), &own).is_ok() {
        return;
    }
    // The first version has a tree for each controller.
    for hierarchy in fs::read_dir(root).into_iter().flatten().flatten() {
        let _ = fs::write(hierarchy.path().join("cgroup.procs"), &own);
    }
}

fn complain(directory: &Path, silence_ms: u64) {
    let text = format!(
        "bafs: the process that served {} gave no sign of life for {} s; it is killed, and the \
         mount is gone\n",
        directory.display(),
        silence_ms / 1000
    );
    // Standard error may be as gone as the terminal.
    let _ = io::stderr().write_all(text.as_bytes());
}
