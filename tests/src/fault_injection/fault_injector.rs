//! Makes faults happen on a cluster and takes them back, when it is their time.

use std::path::Path;

use anyhow::Result;
use nix::sys::signal::Signal;

use super::fault_plan::{FaultKind, PlannedFault};
use super::{ChaosRun, USERS, start_run};
use crate::bench::nohang::fault_scenario::fill_disk;

/// The file with which another user fills a disk.
const FILLER_FILE: &str = "filler";

/// Pending faults, and current ones.
pub(super) struct FaultInjector {
    pending: Vec<PlannedFault>,
    /// With when the next half of a pulse begins, and whether it is a bad one.
    active: Vec<(PlannedFault, u64, bool)>,
}

impl FaultInjector {
    pub(super) fn new(faults: Vec<PlannedFault>) -> Self {
        Self {
            pending: faults,
            active: Vec::new(),
        }
    }

    pub(super) fn is_finished(&self) -> bool {
        self.pending.is_empty() && self.active.is_empty()
    }

    /// Whether the scheduler of a user is dead now and will come back.
    pub(super) fn is_scheduler_killed(&self, user: &str) -> bool {
        let mut active = self.active.iter();
        active.any(|(fault, ..)| fault.kind == FaultKind::Kill && fault.target == user)
    }

    /// Begins and ends the faults that are due.
    pub(super) fn advance(&mut self, now_ms: u64, run: &mut ChaosRun) -> Result<()> {
        let ended: Vec<_> = self
            .active
            .extract_if(.., |(fault, ..)| fault.until_ms <= now_ms)
            .collect();
        for (fault, _, is_bad) in ended {
            if is_bad {
                end_fault(&fault, run)?;
            }
        }
        for (fault, turn_ms, is_bad) in &mut self.active {
            if fault.kind.is_pulsed() && *turn_ms <= now_ms {
                match *is_bad {
                    true => end_fault(fault, run)?,
                    false => drop(begin_fault(fault, run)?),
                }
                *is_bad = !*is_bad;
                *turn_ms = now_ms + u64::from(fault.strength);
            }
        }
        let due: Vec<PlannedFault> = self
            .pending
            .extract_if(.., |it| it.at_ms <= now_ms)
            .collect();
        for fault in due {
            if begin_fault(&fault, run)? {
                let turn_ms = now_ms + u64::from(fault.strength);
                self.active.push((fault, turn_ms, true));
            }
        }
        Ok(())
    }
}

/// Injects a fault, unless its target is gone.
fn begin_fault(fault: &PlannedFault, run: &mut ChaosRun) -> Result<bool> {
    let target = fault.target.as_str();
    let cluster = &mut run.cluster;
    match fault.kind {
        FaultKind::Kill if USERS.contains(&target) => {
            let mut runs = run.runs.iter_mut();
            let Some(user_run) = runs.find(|user_run| user_run.user == target) else {
                return Ok(false);
            };
            if user_run.run.try_wait()?.is_some() {
                return Ok(false);
            }
            user_run.run.kill()?;
            user_run.run.wait()?;
        }
        FaultKind::Kill => cluster.kill(target)?,
        FaultKind::Wipe => {
            cluster.kill(target)?;
            wipe_store(&cluster.store_path(target))?;
        }
        FaultKind::Stop | FaultKind::StopPulsed => cluster.send_signal(target, Signal::SIGSTOP)?,
        FaultKind::Cut | FaultKind::CutPulsed => cluster.network.cut_link(target)?,
        FaultKind::CutOneWay => {
            let other = fault.other_side.as_deref().unwrap_or(target);
            cluster.network.block_packets(&[target], &[other])?;
        }
        FaultKind::PacketLoss => cluster.network.set_packet_loss(target, fault.strength)?,
        FaultKind::DiskFull => fill_disk(&cluster.store_path(target).join(FILLER_FILE))?,
    }
    Ok(true)
}

/// Puts right what [`begin_fault`] did.
fn end_fault(fault: &PlannedFault, run: &mut ChaosRun) -> Result<()> {
    let target = fault.target.as_str();
    let cluster = &mut run.cluster;
    match fault.kind {
        FaultKind::Kill if USERS.contains(&target) => {
            let mut runs = run.runs.iter_mut();
            if let Some(user_run) = runs.find(|user_run| user_run.user == target) {
                user_run.run = start_run(cluster, &user_run.user, &user_run.workflow)?;
            }
        }
        FaultKind::Kill | FaultKind::Wipe => cluster.restart(target)?,
        FaultKind::Stop | FaultKind::StopPulsed => cluster.send_signal(target, Signal::SIGCONT)?,
        FaultKind::Cut | FaultKind::CutPulsed => cluster.network.restore_link(target)?,
        FaultKind::CutOneWay => {
            let other = fault.other_side.as_deref().unwrap_or(target);
            cluster.network.unblock_packets(&[target], &[other])?;
        }
        FaultKind::PacketLoss => cluster.network.set_packet_loss(target, 0)?,
        // A node that was wiped meanwhile has none.
        FaultKind::DiskFull => drop(std::fs::remove_file(
            cluster.store_path(target).join(FILLER_FILE),
        )),
    }
    Ok(())
}

/// Removes all that a node keeps; its directory may be a disk.
pub(super) fn wipe_store(store: &Path) -> Result<()> {
    for entry in std::fs::read_dir(store)? {
        let path = entry?.path();
        match path.is_dir() {
            true => std::fs::remove_dir_all(path)?,
            false => std::fs::remove_file(path)?,
        }
    }
    Ok(())
}
