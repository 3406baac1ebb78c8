//! A scratch volume that is mounted as on another machine, by the way of the network over loopback,
//! or as on the machine that has it.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bafs_proto::fd_passing::HANDOFF_SOCKET_NAME;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::mounted_volume::{RING_MESSAGE, WRITE_BACK_MESSAGE};
use crate::uring::{RingSetting, uring_obstacle};
use crate::{TestCluster, mounts_matching};

/// How often, and with which pauses, something is looked for that comes soon.
const POLLS_MAX: u32 = 400;
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Longest time for a few small files, in seconds.
const PROBE_TIMEOUT_S: &str = "30";

/// A mounted volume.
#[derive(Debug)]
pub(super) struct MountedScratch {
    agent: Child,
    /// The agent's output.
    agent_output: File,
    directory: TempDir,
    pub(super) test_cluster: TestCluster,
}

/// A cluster of one node whose door is shut, so that agents must use the network, with a volume
/// named `work`.
pub(super) fn start_remote_cluster(size: &str) -> Result<TestCluster> {
    let world = start_local_cluster(size, EXACT, size)?;
    fs::remove_file(
        world
            .cluster
            .directory()
            .join("n1")
            .join(HANDOFF_SOCKET_NAME),
    )?;
    Ok(world)
}

/// Options of a volume that needs no margin.
const EXACT: &[&str] = &["--limit", "exact"];

/// A cluster of one node of a size, with a volume named `work` of another, made with these options.
pub(super) fn start_local_cluster(
    node_size: &str,
    options: &[&str],
    volume_size: &str,
) -> Result<TestCluster> {
    let world = TestCluster::start(&[node_size])?;
    world.wait_for_servers(2)?;
    let create = ["volume", "create", "work", "--node", "n1"];
    let create = [&create[..], &["--size", volume_size]].concat();
    world.run_json(&[&create[..], &["--files", "200000"], options].concat())?;
    Ok(world)
}

impl MountedScratch {
    /// Shows an empty volume of nearly so much space, as on another machine.
    pub(super) fn start_remote(size: &str) -> Result<Self> {
        Self::mount_volume(start_remote_cluster(size)?, &[])
    }

    /// Shows one as on the machine that has it.
    pub(super) fn start_local(size: &str) -> Result<Self> {
        Self::mount_volume(start_local_cluster(size, EXACT, size)?, &[])
    }

    /// As [`Self::start_local`], and the kernel collects writes.
    pub(super) fn start_write_back(size: &str) -> Result<Self> {
        let shown = Self::mount_volume(start_local_cluster(size, EXACT, size)?, &["--write-back"])?;
        let said = shown.read_request_path()?;
        ensure!(
            said.contains(WRITE_BACK_MESSAGE),
            "it does not collect: {said}"
        );
        Ok(shown)
    }

    /// As [`Self::start_local`], and the kernel asks by rings.
    ///
    /// # Errors
    /// Why it does not, or does not get answers.
    pub(super) fn start_with_rings(size: &str) -> Result<Self> {
        if let Some(reason) = uring_obstacle() {
            bail!(reason);
        }
        let shown = {
            let _rings = RingSetting::enable()?;
            Self::start_local(size)?
        };
        let said = shown.read_request_path()?;
        ensure!(said.contains(RING_MESSAGE), "no rings: {said}");
        // A silent ring would block the benchmark for ever.
        let at = shown.path().display();
        let probe =
            format!("for i in $(seq 64); do echo $i >{at}/p && cat {at}/p; done; rm {at}/p");
        let probed = Command::new("timeout")
            .args(["--kill-after=5", PROBE_TIMEOUT_S, "sh", "-c", &probe])
            .stdout(Stdio::null())
            .status()?;
        ensure!(probed.success(), "files by rings: {probed}");
        Ok(shown)
    }

    /// The agent's report of the path of the kernel's requests.
    fn read_request_path(&self) -> Result<String> {
        for _ in 0..POLLS_MAX {
            let mut said = vec![0; 64 << 10];
            let length = self.agent_output.read_at(&mut said, 0)?;
            let said = String::from_utf8_lossy(&said[..length]);
            let mut lines = said.lines();
            if let Some(line) = lines.find(|line| line.contains("the kernel sends requests")) {
                return Ok(line.to_owned());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        bail!("the agent does not say how the kernel asks");
    }

    fn mount_volume(world: TestCluster, options: &[&str]) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let at = directory
            .path()
            .to_str()
            .context("a temporary path is text")?;
        let said = tempfile::tempfile()?;
        let agent = world
            .bafs_command(&[&["mount", "work", at, "--explain"], options].concat())
            .stderr(said.try_clone()?)
            .spawn()?;
        let shown = Self {
            agent,
            agent_output: said,
            directory,
            test_cluster: world,
        };
        let mut looks = POLLS_MAX;
        while mounts_matching(shown.path().to_str().unwrap_or_default()).is_empty() {
            looks -= 1;
            ensure!(looks > 0, "the volume is not mounted");
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(shown)
    }

    pub(super) fn path(&self) -> &Path {
        self.directory.path()
    }
}

impl Drop for MountedScratch {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.agent.id()) {
            // It may have ended by itself, which the work has seen.
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
        for _ in 0..POLLS_MAX {
            if !matches!(self.agent.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        // It hangs, and blocks all users of the mount.
        let _ = self.agent.kill();
        let _ = self.agent.wait();
    }
}
