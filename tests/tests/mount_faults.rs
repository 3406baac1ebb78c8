//! Programs on volumes, in jobs and on the host, near their server and far from it, while
//! something goes wrong: none hangs, nothing of them is left, and what they had kept is there.

use anyhow::{Result, ensure};
use bafs_tests::bench::nohang::{Fault, FaultResult, meet};
use bafs_tests::{mount_obstacle, report_skip};

/// Has programs meet a fault; `None` when this machine cannot.
fn met(name: &str, fault: Fault) -> Result<Option<FaultResult>> {
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(None);
    }
    if !nix::unistd::geteuid().is_root() {
        report_skip(name, "it needs root for a network and mounts of its own");
        return Ok(None);
    }
    let verdict = meet(fault, env!("CARGO_BIN_EXE_bafs-bench"))?;
    ensure!(verdict.case_count == 8 && verdict.hung == 0, "{verdict:#?}");
    ensure!(verdict.leftovers.is_empty(), "{verdict:#?}");
    ensure!(verdict.wrong_bytes == 0, "{verdict:#?}");
    Ok(Some(verdict))
}

/// Whether all programs whose name contains a word saw something that contains another.
fn saw(verdict: &FaultResult, of: &str, what: &str) -> Result<()> {
    let lines = || verdict.lines.iter().filter(|line| line[0].contains(of));
    ensure!(lines().count() > 0, "nothing is called {of}");
    let all = lines().all(|line| line[1].contains(what));
    ensure!(all, "{of}: {what}: {verdict:#?}");
    Ok(())
}

#[test]
fn mount_ends_when_its_server_stops() -> Result<()> {
    let name = "mount_ends_when_its_server_stops";
    match met(name, Fault::ServerStop)? {
        Some(verdict) => saw(&verdict, "far", "agent: exit 75"),
        None => Ok(()),
    }
}

#[test]
fn mount_ends_when_its_server_is_killed() -> Result<()> {
    let name = "mount_ends_when_its_server_is_killed";
    match met(name, Fault::ServerKill)? {
        Some(verdict) => {
            saw(&verdict, "far", "agent: exit 75")?;
            saw(&verdict, "scratch", "agent: exit 75")
        }
        None => Ok(()),
    }
}

#[test]
fn mount_goes_on_when_its_server_restarts() -> Result<()> {
    let name = "mount_goes_on_when_its_server_restarts";
    match met(name, Fault::ServerRestart)? {
        Some(verdict) => saw(&verdict, "", "went on"),
        None => Ok(()),
    }
}

#[test]
fn mount_ends_when_its_link_is_cut() -> Result<()> {
    let name = "mount_ends_when_its_link_is_cut";
    match met(name, Fault::LinkCut)? {
        Some(verdict) => saw(&verdict, "far", "agent: exit 75"),
        None => Ok(()),
    }
}

#[test]
fn mount_tells_of_a_full_disk() -> Result<()> {
    let name = "mount_tells_of_a_full_disk";
    match met(name, Fault::DiskFull)? {
        Some(verdict) => {
            saw(&verdict, "cache", "went on")?;
            let full = verdict.lines.iter().any(|line| line[1].contains("ENOSPC"));
            ensure!(full, "nobody was told: {verdict:#?}");
            Ok(())
        }
        None => Ok(()),
    }
}

#[test]
fn mount_ends_with_its_agent() -> Result<()> {
    let name = "mount_ends_with_its_agent";
    match met(name, Fault::AgentKill)? {
        Some(verdict) => saw(&verdict, "", "agent: killed"),
        None => Ok(()),
    }
}

#[test]
fn mount_ends_when_its_agent_stops() -> Result<()> {
    let name = "mount_ends_when_its_agent_stops";
    match met(name, Fault::AgentStop)? {
        Some(verdict) => saw(&verdict, "", "agent: killed"),
        None => Ok(()),
    }
}
