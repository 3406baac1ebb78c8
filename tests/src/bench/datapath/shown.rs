//! A scratch volume that is mounted as on another machine, by the way of the network over loopback,
//! or as on the machine that has it.

use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_proto::door::DOOR_NAME;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::{World, mounts_with};

/// A mounted volume.
#[derive(Debug)]
pub(super) struct Shown {
    agent: Child,
    directory: TempDir,
    pub(super) world: World,
}

/// A cluster of one node whose door is shut, so that agents must use the network, with a volume
/// named `work`.
pub(super) fn distant_world(size: &str) -> Result<World> {
    let world = near_world(size, &[])?;
    fs::remove_file(world.cluster.directory().join("n1").join(DOOR_NAME))?;
    Ok(world)
}

/// A cluster of one node with a volume named `work`, made with these options.
pub(super) fn near_world(size: &str, options: &[&str]) -> Result<World> {
    let world = World::start(&[size])?;
    world.wait_for_servers(2)?;
    // A watched volume takes a margin too.
    let size = if options.is_empty() { size } else { "16GB" };
    let create = ["volume", "create", "work", "--node", "n1", "--size", size];
    world.json(&[&create[..], &["--files", "200000"], options].concat())?;
    Ok(world)
}

impl Shown {
    /// Shows an empty volume of nearly so much space, as on another machine.
    pub(super) fn start(size: &str) -> Result<Self> {
        Self::show(distant_world(size)?)
    }

    /// Shows one as on the machine that has it.
    pub(super) fn near(size: &str) -> Result<Self> {
        Self::show(near_world(size, &[])?)
    }

    fn show(world: World) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let at = directory
            .path()
            .to_str()
            .context("a temporary path is text")?;
        let agent = world
            .bafs(&["mount", "work", at])
            .stderr(Stdio::null())
            .spawn()?;
        let shown = Self {
            agent,
            directory,
            world,
        };
        let mut looks = 400;
        while mounts_with(shown.path().to_str().unwrap_or_default()).is_empty() {
            looks -= 1;
            ensure!(looks > 0, "the volume is not mounted");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(shown)
    }

    pub(super) fn path(&self) -> &Path {
        self.directory.path()
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.agent.id()) {
            // It may have ended by itself, which the work has seen.
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
        let _ = self.agent.wait();
    }
}
