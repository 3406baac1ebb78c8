//! The process that makes a job's mount points on the host and removes them: apart from the agent,
//! so that a killed agent leaves none. Mounts nothing.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, PipeReader, PipeWriter, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use nix::sys::signal::SigSet;
use serde::{Deserialize, Serialize};

use super::forked_process::{LinkedProcess, ReservedStage, StageProcess, fork_child};
use super::limits::PLAN_BYTES_MAX;
use super::mount_points::{MountPoints, is_needed};
use super::plan::{JobPlan, VolumeBind};
use super::root::HostRoot;
use super::temporary_directories::{MaskedHostTree, PrivateDirectory, TemporaryDirectories};
use crate::own_process::{HOLDER, OWN_EXECUTABLE, REMOVER, SUBCOMMAND};

/// How often, and after what pause, a directory is removed that is not empty yet.
const REMOVE_ATTEMPTS: u32 = 40;
const REMOVE_PAUSE: Duration = Duration::from_millis(50);

/// What the process is told in one line. Its input ends with the job, or with the agent.
#[derive(Debug, Serialize, Deserialize)]
struct HolderTask {
    volumes: Vec<VolumeBind>,
    temporary: Option<TemporaryDirectories>,
    base: OsString,
}

/// Keeps the mount points of a job until it is dropped.
#[derive(Debug)]
pub(super) struct MountPointHolder {
    _process: LinkedProcess,
}

/// A process that makes mount points now, and will keep them.
#[derive(Debug)]
pub(super) struct StartedHolder {
    /// Nothing where the process is somebody else's child.
    child: Option<StageProcess>,
    input: PipeWriter,
    output: PipeReader,
}

impl StartedHolder {
    /// Has the mount points made that the host lacks, if it lacks any. What cannot be made is left
    /// to a stand-in. A reserved process starts the keeper faster.
    pub(super) fn start(
        plan: &JobPlan,
        base: &Path,
        reserved: Option<&ReservedStage>,
    ) -> io::Result<Option<Self>> {
        // Nothing of the host is a mount point in another root.
        if plan.root().is_some() {
            return Ok(None);
        }
        let wanted = HolderTask {
            volumes: plan.volumes.clone(),
            temporary: plan.temporary.clone(),
            base: base.as_os_str().to_owned(),
        };
        let privates = wanted.private_directories()?;
        let is_ready = |path: &Path| wanted.is_ready(&privates, path);
        if !is_needed(
            &plan.volumes,
            &MaskedHostTree(&HostRoot, &privates),
            is_ready,
        ) {
            return Ok(None);
        }
        let (task, mut input) = io::pipe()?;
        let (output, ready) = io::pipe()?;
        let child = match reserved {
            Some(reserved) => {
                reserved.start_holder(task, ready)?;
                None
            }
            None => {
                let spawned = Command::new(OWN_EXECUTABLE)
                    .arg0("bafs")
                    .args([SUBCOMMAND, HOLDER])
                    .env_clear()
                    .stdin(task)
                    .stdout(ready)
                    .stderr(Stdio::null())
                    .spawn()?;
                Some(StageProcess::Spawned(spawned))
            }
        };
        let mut line = serde_json::to_vec(&wanted)?;
        line.push(b'\n');
        input.write_all(&line)?;
        Ok(Some(Self {
            child,
            input,
            output,
        }))
    }

    /// Waits until the mount points are there, as far as they can be made.
    pub(super) fn wait(mut self) -> io::Result<MountPointHolder> {
        // It ends with the process, too.
        let _ = self.output.read(&mut [0])?;
        let _process = match self.child {
            Some(child) => LinkedProcess::child(self.input, child),
            None => LinkedProcess::linked(self.input, self.output),
        };
        Ok(MountPointHolder { _process })
    }
}

/// Removes a directory for temporary files when its agent has ended in any way.
#[derive(Debug)]
pub struct DirectoryRemover {
    _process: LinkedProcess,
}

impl DirectoryRemover {
    /// Starts the process that will remove `directory`, and runs `meanwhile` before. Call it with
    /// one thread.
    ///
    /// # Errors
    /// The system gives no process.
    pub fn start(directory: &Path, meanwhile: fn()) -> io::Result<Self> {
        let (until, input) = io::pipe()?;
        let remove = || remove_at_end(directory, meanwhile);
        let child = fork_child(REMOVER, until.into(), None, remove)?;
        let _process = LinkedProcess::child(input, StageProcess::Forked(child));
        Ok(Self { _process })
    }
}

/// The removing process' own part.
fn remove_at_end(directory: &Path, meanwhile: fn()) -> io::Result<()> {
    // A key that ends the program must not end this first.
    SigSet::all().thread_block()?;
    meanwhile();
    io::copy(&mut io::stdin(), &mut io::sink())?;
    // Processes of a killed job die at this moment, and may still make files.
    for _ in 0..REMOVE_ATTEMPTS {
        match bafs_tree::remove_tree(directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => thread::sleep(REMOVE_PAUSE),
            _ => break,
        }
    }
    Ok(())
}

/// The process' own part.
pub(super) fn holder_main() -> io::Result<()> {
    // A key that ends the program must not take its mount points away first.
    SigSet::all().thread_block()?;
    let mut input = BufReader::new(io::stdin());
    let mut line = Vec::new();
    input
        .by_ref()
        .take(PLAN_BYTES_MAX)
        .read_until(b'\n', &mut line)?;
    let wanted: HolderTask = serde_json::from_slice(&line)?;
    let privates = wanted.private_directories()?;
    let is_ready = |path: &Path| wanted.is_ready(&privates, path);
    let shown = MaskedHostTree(&HostRoot, &privates);
    let points = MountPoints::make(&wanted.volumes, &shown, is_ready);
    io::stdout().write_all(b"\n")?;
    io::stdout().flush()?;
    io::copy(&mut input, &mut io::sink())?;
    drop(points);
    Ok(())
}

impl HolderTask {
    fn private_directories(&self) -> io::Result<Vec<PrivateDirectory>> {
        let privates = self.temporary.as_ref().map(|temporary| {
            temporary.create_directories()?;
            temporary.private_directories(&HostRoot)
        });
        privates.transpose().map(Option::unwrap_or_default)
    }

    /// Whether mount points in a directory need nothing on the host: it is the job's own, or what
    /// the agent sees there is.
    fn is_ready(&self, private_directories: &[PrivateDirectory], path: &Path) -> bool {
        path.starts_with(Path::new(&self.base))
            || private_directories
                .iter()
                .any(|private| private.target == path)
    }
}
