//! A writable volume on a directory of this host, by each way that data can take; for suites that
//! only need a directory. Judges nothing.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_client::fuse::{FuseMount, MountKind};
use bafs_client::sandbox::Access;
use bafs_client::tree::{LocalTree, Tree};
use bafs_client::usage::VolumeUsage;
use bafs_client::volume::{Ownership, Volume, VolumeMode};
use bafs_client::volume_health::VolumeHealth;
use bafs_proto::fd_passing::HANDOFF_SOCKET_NAME;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::uring::RingSetting;
use crate::{TestCluster, mounts_matching};

/// A mount's output if its requests use rings.
pub const RING_MESSAGE: &str = "through a ring per processor";

/// A mount's output in write-back mode.
pub const WRITE_BACK_MESSAGE: &str = "it caches writes";

/// The way from a program to its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPath {
    /// The process that serves the kernel has the tree.
    Inline,
    /// The same, and the kernel keeps nothing.
    Uncached,
    /// Agent and node are separate processes, as with `bafs mount`.
    AgentProcess,
    /// The same as on another machine: the node's door is shut, and agents use the network.
    Network,
    /// As [`Self::Inline`], and the kernel asks by rings, where it can (see `crate::ring`).
    Ring,
    /// As [`Self::Inline`], and the kernel collects writes.
    WriteBack,
    /// As [`Self::Ring`], and the kernel collects writes.
    WriteBackRing,
    /// As [`Self::Network`], and the kernel collects writes.
    WriteBackNetwork,
}

impl DataPath {
    /// The variants that every machine supports.
    pub const ALL: [Self; 4] = [
        Self::Inline,
        Self::Uncached,
        Self::AgentProcess,
        Self::Network,
    ];

    /// The variants with write-back.
    pub const WRITE_BACK: [Self; 2] = [Self::WriteBack, Self::WriteBackNetwork];

    fn has_rings(self) -> bool {
        matches!(self, Self::Ring | Self::WriteBackRing)
    }

    fn has_write_back(self) -> bool {
        matches!(self, Self::WriteBack | Self::WriteBackRing)
    }
}

/// A volume that is shown.
#[derive(Debug)]
pub struct MountedVolume {
    mount: VolumeMount,
    directory: TempDir,
}

#[derive(Debug)]
enum VolumeMount {
    InProcess {
        mounted: Option<FuseMount>,
        _store: TempDir,
    },
    AgentProcess {
        agent: Child,
        _world: Box<TestCluster>,
    },
}

impl MountedVolume {
    /// Shows an empty volume of 2 GB and 100,000 files, open to every user.
    ///
    /// # Errors
    /// The failed start or mount.
    pub fn start(way: DataPath) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755))?;
        let shown = match way {
            DataPath::Inline => {
                mount_in_process(VolumeMode::scratch(Access::ReadWrite), directory.path())?
            }
            DataPath::WriteBack => mount_in_process(VolumeMode::write_back(), directory.path())?,
            DataPath::Uncached => {
                mount_in_process(VolumeMode::home(Access::ReadWrite), directory.path())?
            }
            DataPath::Ring => {
                let _rings = RingSetting::enable()?;
                mount_in_process(VolumeMode::scratch(Access::ReadWrite), directory.path())?
            }
            DataPath::WriteBackRing => {
                let _rings = RingSetting::enable()?;
                mount_in_process(VolumeMode::write_back(), directory.path())?
            }
            DataPath::AgentProcess => mount_by_agent(directory.path(), true, &[])?,
            DataPath::Network => mount_by_agent(directory.path(), false, &[])?,
            DataPath::WriteBackNetwork => {
                mount_by_agent(directory.path(), false, &["--write-back"])?
            }
        };
        if let VolumeMount::InProcess {
            mounted: Some(mounted),
            ..
        } = &shown
        {
            // Others may have allowed rings at this moment, so they may come unasked.
            let right = !way.has_rings() || mounted.transport().contains(RING_MESSAGE);
            let collects = mounted.transport().contains(WRITE_BACK_MESSAGE) == way.has_write_back();
            ensure!(right && collects, "{way:?}: {}", mounted.transport());
        }
        fs::set_permissions(directory.path(), Permissions::from_mode(0o777))?;
        Ok(Self {
            mount: shown,
            directory,
        })
    }

    /// Where the volume is.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The services of this process.
    pub fn in_process_mount(&self) -> Option<&FuseMount> {
        match &self.mount {
            VolumeMount::InProcess { mounted, .. } => mounted.as_ref(),
            VolumeMount::AgentProcess { .. } => None,
        }
    }

    /// A new directory in the volume.
    ///
    /// # Errors
    /// An I/O error.
    pub fn create_directory(&self, name: &str) -> Result<PathBuf> {
        let path = self.path().join(name);
        fs::create_dir(&path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o777))?;
        Ok(path)
    }
}

impl Drop for MountedVolume {
    fn drop(&mut self) {
        match &mut self.mount {
            VolumeMount::InProcess { mounted, .. } => {
                if let Some(mounted) = mounted.take() {
                    mounted.unmount();
                }
            }
            VolumeMount::AgentProcess { agent, .. } => {
                if let Ok(pid) = i32::try_from(agent.id()) {
                    // It may have ended by itself, which the test has seen.
                    let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
                }
                let _ = agent.wait();
            }
        }
    }
}

fn mount_in_process(mode: VolumeMode, directory: &Path) -> Result<VolumeMount> {
    let store = tempfile::tempdir()?;
    let limit = bafs_tree::Limit {
        bytes: 2_000_000_000,
        files: 100_000,
    };
    let tree = bafs_tree::Tree::open(store.path(), Some(limit))?;
    let session = bafs_tree::Session::new(tree, true);
    let run = move |caller, op: &_, data: &[u8], read: &mut _| session.run(caller, op, data, read);
    let (losses, _) = tokio::sync::mpsc::unbounded_channel();
    let volume = Volume::new(
        "stand",
        Tree::Local(LocalTree::new(run)),
        mode,
        Ownership::AsStored,
        VolumeHealth::new("stand", losses),
        VolumeUsage::new(),
    );
    let mounted = FuseMount::mount(Arc::new(volume), directory, MountKind::MountSystemCall)?;
    Ok(VolumeMount::InProcess {
        mounted: Some(mounted),
        _store: store,
    })
}

fn mount_by_agent(directory: &Path, by_fd_passing: bool, options: &[&str]) -> Result<VolumeMount> {
    let world = TestCluster::start(&["2GB"])?;
    world.wait_for_servers(2)?;
    if !by_fd_passing {
        fs::remove_file(
            world
                .cluster
                .directory()
                .join("n1")
                .join(HANDOFF_SOCKET_NAME),
        )?;
    }
    let create = ["volume", "create", "stand", "--node", "n1"];
    let size = ["--size", "2GB", "--files", "100000", "--limit", "exact"];
    world.run_json(&[&create[..], &size[..]].concat())?;
    let at = directory.to_str().context("a temporary path is text")?;
    let mount = [&["mount", "stand", at], options].concat();
    let agent = world.bafs_command(&mount).spawn()?;
    let shown = VolumeMount::AgentProcess {
        agent,
        _world: Box::new(world),
    };
    for _ in 0..400 {
        if !mounts_matching(at).is_empty() {
            return Ok(shown);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    ensure!(!mounts_matching(at).is_empty(), "the volume is not mounted");
    Ok(shown)
}
