//! Programs on volumes, in jobs and on the host, near their server and far from it, while
//! something goes wrong: none hangs, nothing of them is left, and what they had kept is there.

use anyhow::{Result, ensure};
use bafs_tests::bench::nohang::{FaultResult, FaultScenario, run_scenario};
use bafs_tests::{mount_obstacle, report_skip};

/// Has programs meet a fault; `None` when this machine cannot.
fn check_scenario(name: &str, fault: FaultScenario) -> Result<Option<FaultResult>> {
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(None);
    }
    if !nix::unistd::geteuid().is_root() {
        report_skip(name, "it needs root for a network and mounts of its own");
        return Ok(None);
    }
    let verdict = run_scenario(fault, env!("CARGO_BIN_EXE_bafs-bench"))?;
    ensure!(
        verdict.case_count == 8 && verdict.hung_count == 0,
        "{verdict:#?}"
    );
    ensure!(verdict.leftovers.is_empty(), "{verdict:#?}");
    ensure!(verdict.wrong_bytes == 0, "{verdict:#?}");
    Ok(Some(verdict))
}

/// Whether all programs whose name contains a word saw something that contains another.
fn check_observation(verdict: &FaultResult, of: &str, what: &str) -> Result<()> {
    let lines = || verdict.lines.iter().filter(|line| line[0].contains(of));
    ensure!(lines().count() > 0, "nothing is called {of}");
    let all = lines().all(|line| line[1].contains(what));
    ensure!(all, "{of}: {what}: {verdict:#?}");
    Ok(())
}

#[test]
fn mount_ends_when_its_server_stops() -> Result<()> {
    let name = "mount_ends_when_its_server_stops";
    match check_scenario(name, FaultScenario::ServerStop)? {
        Some(verdict) => check_observation(&verdict, "far", "agent: exit 75"),
        None => Ok(()),
    }
}

#[test]
fn mount_ends_when_its_server_is_killed() -> Result<()> {
    let name = "mount_ends_when_its_server_is_killed";
    match check_scenario(name, FaultScenario::ServerKill)? {
        Some(verdict) => {
            check_observation(&verdict, "far", "agent: exit 75")?;
            check_observation(&verdict, "scratch", "agent: exit 75")
        }
        None => Ok(()),
    }
}

#[test]
fn mount_continues_when_its_server_restarts() -> Result<()> {
    let name = "mount_continues_when_its_server_restarts";
    match check_scenario(name, FaultScenario::ServerRestart)? {
        Some(verdict) => check_observation(&verdict, "", "went on"),
        None => Ok(()),
    }
}

#[test]
fn mount_ends_when_its_link_is_cut() -> Result<()> {
    let name = "mount_ends_when_its_link_is_cut";
    match check_scenario(name, FaultScenario::LinkCut)? {
        Some(verdict) => check_observation(&verdict, "far", "agent: exit 75"),
        None => Ok(()),
    }
}

#[test]
fn mount_reports_a_full_disk() -> Result<()> {
    let name = "mount_reports_a_full_disk";
    match check_scenario(name, FaultScenario::DiskFull)? {
        Some(verdict) => {
            check_observation(&verdict, "cache", "went on")?;
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
    match check_scenario(name, FaultScenario::AgentKill)? {
        Some(verdict) => check_observation(&verdict, "", "agent: killed"),
        None => Ok(()),
    }
}

#[test]
fn mount_ends_when_its_agent_stops() -> Result<()> {
    let name = "mount_ends_when_its_agent_stops";
    match check_scenario(name, FaultScenario::AgentStop)? {
        Some(verdict) => check_observation(&verdict, "", "agent: killed"),
        None => Ok(()),
    }
}
