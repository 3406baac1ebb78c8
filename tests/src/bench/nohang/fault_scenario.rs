//! Faults and their repair, in a name space of their own.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::Signal;

use super::fault_case::RunningCase;
use crate::TestCluster;

/// The node that holds all volumes.
const NODE_NAME: &str = "n1";

/// Size of the disk that gets full.
const SMALL_DISK_SIZE: &str = "256m";

/// The fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultScenario {
    /// The server is stopped (SIGSTOP), and stays so.
    ServerStop,
    /// The server is killed (SIGKILL), and stays away.
    ServerKill,
    /// The server is killed and started again at once.
    ServerRestart,
    /// No packet goes between agents and server any more.
    LinkCut,
    /// Another user fills the server's disk.
    DiskFull,
    /// The agent is killed (SIGKILL).
    AgentKill,
    /// The agent is stopped (SIGSTOP).
    AgentStop,
}

impl FaultScenario {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::ServerStop,
        Self::ServerKill,
        Self::ServerRestart,
        Self::LinkCut,
        Self::DiskFull,
        Self::AgentKill,
        Self::AgentStop,
    ];

    /// Its name, for tables and `--only`.
    pub fn name(self) -> &'static str {
        match self {
            Self::ServerStop => "server-stop",
            Self::ServerKill => "server-kill",
            Self::ServerRestart => "server-restart",
            Self::LinkCut => "link-cut",
            Self::DiskFull => "disk-full",
            Self::AgentKill => "agent-kill",
            Self::AgentStop => "agent-stop",
        }
    }

    /// Whether programs may continue for ever after it, so that waiting is pointless.
    pub(super) fn is_transient(self) -> bool {
        matches!(self, Self::ServerRestart | Self::DiskFull)
    }

    /// Requirements before the start.
    pub(super) fn set_up(self, world: &mut TestCluster) -> Result<()> {
        if self != Self::DiskFull {
            return Ok(());
        }
        world.cluster.kill(NODE_NAME)?;
        let store = store_path(world);
        std::fs::remove_dir_all(&store)?;
        std::fs::create_dir(&store)?;
        mount_small_disk(&store, SMALL_DISK_SIZE)?;
        world.cluster.restart(NODE_NAME)
    }

    /// Makes it happen.
    pub(super) fn inject(self, world: &mut TestCluster, running: &[RunningCase]) -> Result<()> {
        match self {
            Self::ServerStop => world.cluster.signal(NODE_NAME, Signal::SIGSTOP),
            Self::ServerKill => world.cluster.kill(NODE_NAME),
            Self::ServerRestart => {
                world.cluster.kill(NODE_NAME)?;
                world.cluster.restart(NODE_NAME)
            }
            Self::LinkCut => cut_link(NODE_NAME, world.cluster.address(NODE_NAME)),
            Self::DiskFull => fill_disk(&filler_path(world)),
            Self::AgentKill => running.iter().try_for_each(|it| it.signal(Signal::SIGKILL)),
            Self::AgentStop => running.iter().try_for_each(|it| it.signal(Signal::SIGSTOP)),
        }
    }

    /// Keeps it full: space that the server frees must not help.
    pub(super) fn sustain(self, world: &TestCluster) -> Result<()> {
        match self {
            Self::DiskFull => fill_disk(&filler_path(world)),
            _ => Ok(()),
        }
    }

    /// Puts right what can be put right.
    pub(super) fn revert(self, world: &mut TestCluster) -> Result<()> {
        match self {
            Self::ServerStop => world.cluster.signal(NODE_NAME, Signal::SIGCONT),
            Self::ServerKill => world.cluster.restart(NODE_NAME),
            Self::LinkCut => restore_link(NODE_NAME),
            Self::DiskFull => Ok(std::fs::remove_file(filler_path(world))?),
            Self::ServerRestart | Self::AgentKill | Self::AgentStop => Ok(()),
        }
    }

    /// Takes away what [`Self::set_up`] made.
    pub(super) fn tear_down(self, world: &TestCluster) -> Result<()> {
        if self == Self::DiskFull {
            unmount_small_disk(&store_path(world))?;
        }
        Ok(())
    }
}

/// Why links cannot be cut here and disks not be small, if so.
pub(crate) fn isolation_obstacle() -> Option<String> {
    let tried =
        run_program("nft", &["list", "ruleset"]).and_then(|()| run_program("ip", &["link"]));
    tried.err().map(|error| format!("{error:#}"))
}

/// Gives this thread and its children a network and a mount table of their own.
pub(crate) fn enter_private_namespaces() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)?;
    let nothing: Option<&str> = None;
    mount(
        nothing,
        "/",
        nothing,
        MsFlags::MS_REC | MsFlags::MS_PRIVATE,
        nothing,
    )?;
    run_program("ip", &["link", "set", "lo", "up"])
}

/// Has agents that come now take the way over the network.
pub(super) fn disable_fd_passing(world: &TestCluster) -> Result<()> {
    let handoff = store_path(world).join(bafs_proto::fd_passing::HANDOFF_SOCKET_NAME);
    std::fs::remove_file(&handoff).with_context(|| handoff.display().to_string())
}

fn store_path(world: &TestCluster) -> PathBuf {
    world.cluster.directory().join(NODE_NAME)
}

fn filler_path(world: &TestCluster) -> PathBuf {
    store_path(world).join("filler")
}

/// Puts a file system of a few bytes, such as `256m`, in the place of a directory.
pub(crate) fn mount_small_disk(directory: &Path, size: &str) -> Result<()> {
    let (kind, size) = (Some("tmpfs"), format!("size={size}"));
    mount(kind, directory, kind, MsFlags::empty(), Some(size.as_str()))?;
    Ok(())
}

/// Removes the disk of [`mount_small_disk`], even if it is in use.
pub(crate) fn unmount_small_disk(directory: &Path) -> Result<()> {
    Ok(umount2(directory, MntFlags::MNT_DETACH)?)
}

/// No packet to the server of this name, or from where it listens, arrives any more.
pub(crate) fn cut_link(name: &str, address: &str) -> Result<()> {
    let port = address
        .rsplit(':')
        .next()
        .context("an address has a port")?;
    let rules = format!(
        "table inet cut_{name} {{\nchain arriving {{\ntype filter hook input priority 0;\n\
         udp dport {port} drop;\nudp sport {port} drop;\n\
         tcp dport {port} drop;\ntcp sport {port} drop;\n}}\n}}"
    );
    run_nft(&[&rules])
}

/// Packets to this server arrive again.
pub(crate) fn restore_link(name: &str) -> Result<()> {
    run_nft(&["delete", "table", "inet", &format!("cut_{name}")])
}

fn run_nft(arguments: &[&str]) -> Result<()> {
    run_program("nft", arguments)
}

fn run_program(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program).args(arguments).output();
    let output = output.with_context(|| format!("{program} does not start"))?;
    ensure!(
        output.status.success(),
        "{program}: {}",
        crate::printed_text(&output)
    );
    Ok(())
}

/// Writes to a file until its disk is full.
pub(crate) fn fill_disk(path: &Path) -> Result<()> {
    let mut file = File::options().create(true).append(true).open(path)?;
    for size in [1 << 20, 4096] {
        while file.write_all(&vec![0; size]).is_ok() {}
    }
    Ok(())
}
