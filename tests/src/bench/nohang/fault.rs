//! What goes wrong, and how it is put right again, in a name space of its own.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::Signal;

use super::case::Running;
use crate::TestCluster;

/// The node that holds all volumes.
const NODE: &str = "n1";

/// Size of the disk that gets full.
const SMALL_DISK: &str = "256m";

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The server is stopped (SIGSTOP), and stays so.
    ServerStop,
    /// The server is killed (SIGKILL), and stays away.
    ServerKill,
    /// The server is killed and started again at once.
    ServerRestart,
    /// No packet goes between agents and server any more.
    LinkCut,
    /// Somebody else fills the server's disk.
    DiskFull,
    /// The agent is killed (SIGKILL).
    AgentKill,
    /// The agent is stopped (SIGSTOP).
    AgentStop,
}

impl Fault {
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

    /// Whether programs may go on for good once it has happened, so that nobody need wait.
    pub(super) fn passes(self) -> bool {
        matches!(self, Self::ServerRestart | Self::DiskFull)
    }

    /// What must be there before anything runs.
    pub(super) fn prepare(self, world: &mut TestCluster) -> Result<()> {
        if self != Self::DiskFull {
            return Ok(());
        }
        world.cluster.kill(NODE)?;
        let store = store(world);
        std::fs::remove_dir_all(&store)?;
        std::fs::create_dir(&store)?;
        make_small(&store, SMALL_DISK)?;
        world.cluster.restart(NODE)
    }

    /// Makes it happen.
    pub(super) fn happen(self, world: &mut TestCluster, running: &[Running]) -> Result<()> {
        match self {
            Self::ServerStop => world.cluster.signal(NODE, Signal::SIGSTOP),
            Self::ServerKill => world.cluster.kill(NODE),
            Self::ServerRestart => {
                world.cluster.kill(NODE)?;
                world.cluster.restart(NODE)
            }
            Self::LinkCut => cut(NODE, world.cluster.address(NODE)),
            Self::DiskFull => fill(&filler(world)),
            Self::AgentKill => running.iter().try_for_each(|it| it.signal(Signal::SIGKILL)),
            Self::AgentStop => running.iter().try_for_each(|it| it.signal(Signal::SIGSTOP)),
        }
    }

    /// Keeps it so: what makes room on a full disk is not to help.
    pub(super) fn stay(self, world: &TestCluster) -> Result<()> {
        match self {
            Self::DiskFull => fill(&filler(world)),
            _ => Ok(()),
        }
    }

    /// Puts right what can be put right.
    pub(super) fn heal(self, world: &mut TestCluster) -> Result<()> {
        match self {
            Self::ServerStop => world.cluster.signal(NODE, Signal::SIGCONT),
            Self::ServerKill => world.cluster.restart(NODE),
            Self::LinkCut => heal(NODE),
            Self::DiskFull => Ok(std::fs::remove_file(filler(world))?),
            Self::ServerRestart | Self::AgentKill | Self::AgentStop => Ok(()),
        }
    }

    /// Takes away what [`Self::prepare`] made.
    pub(super) fn clear(self, world: &TestCluster) -> Result<()> {
        if self == Self::DiskFull {
            take_small(&store(world))?;
        }
        Ok(())
    }
}

/// Why links cannot be cut here and disks not be small, if so.
pub(crate) fn cannot_live_apart() -> Option<String> {
    let tried = run("nft", &["list", "ruleset"]).and_then(|()| run("ip", &["link"]));
    tried.err().map(|error| format!("{error:#}"))
}

/// Gives this thread, and what it starts, a network and a table of mounts of its own.
pub(crate) fn live_apart() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)?;
    let nothing: Option<&str> = None;
    mount(
        nothing,
        "/",
        nothing,
        MsFlags::MS_REC | MsFlags::MS_PRIVATE,
        nothing,
    )?;
    run("ip", &["link", "set", "lo", "up"])
}

/// Has agents that come now take the way over the network.
pub(super) fn close_door(world: &TestCluster) -> Result<()> {
    let door = store(world).join(bafs_proto::door::DOOR_NAME);
    std::fs::remove_file(&door).with_context(|| door.display().to_string())
}

fn store(world: &TestCluster) -> PathBuf {
    world.cluster.directory().join(NODE)
}

fn filler(world: &TestCluster) -> PathBuf {
    store(world).join("filler")
}

/// Puts a file system of a few bytes, such as `256m`, in the place of a directory.
pub(crate) fn make_small(directory: &Path, size: &str) -> Result<()> {
    let (kind, size) = (Some("tmpfs"), format!("size={size}"));
    mount(kind, directory, kind, MsFlags::empty(), Some(size.as_str()))?;
    Ok(())
}

/// Takes away what [`make_small`] made, also while somebody uses it.
pub(crate) fn take_small(directory: &Path) -> Result<()> {
    Ok(umount2(directory, MntFlags::MNT_DETACH)?)
}

/// No packet to the server of this name, or from where it listens, arrives any more.
pub(crate) fn cut(name: &str, address: &str) -> Result<()> {
    let port = address
        .rsplit(':')
        .next()
        .context("an address has a port")?;
    let rules = format!(
        "table inet cut_{name} {{\nchain arriving {{\ntype filter hook input priority 0;\n\
         udp dport {port} drop;\nudp sport {port} drop;\n\
         tcp dport {port} drop;\ntcp sport {port} drop;\n}}\n}}"
    );
    nft(&[&rules])
}

/// Packets to this server arrive again.
pub(crate) fn heal(name: &str) -> Result<()> {
    nft(&["delete", "table", "inet", &format!("cut_{name}")])
}

fn nft(arguments: &[&str]) -> Result<()> {
    run("nft", arguments)
}

fn run(program: &str, arguments: &[&str]) -> Result<()> {
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
pub(crate) fn fill(path: &Path) -> Result<()> {
    let mut file = File::options().create(true).append(true).open(path)?;
    for size in [1 << 20, 4096] {
        while file.write_all(&vec![0; size]).is_ok() {}
    }
    Ok(())
}
