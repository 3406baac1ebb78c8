//! The faults of a run, with place, time and duration: drawn from a seed before the run begins.
//! Does nothing.

use std::fmt;

use crate::seeded_rng::SeededRng;

/// The fault of a server, or of its link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultKind {
    /// Killed (SIGKILL), and started again at the end.
    Kill,
    /// Killed; its data is lost at the restart.
    Wipe,
    /// Stopped (SIGSTOP), and continued at the end.
    Stop,
    /// Stopped and continued repeatedly.
    StopPulsed,
    /// Its link is down.
    Cut,
    /// Its link is down and up, again and again.
    CutPulsed,
    /// Its packets are lost; packets of the other side arrive.
    CutOneWay,
    /// A part of the packets to it is lost.
    PacketLoss,
    /// Another user fills its disk.
    DiskFull,
}

impl FaultKind {
    fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Wipe => "wipe",
            Self::Stop => "stop",
            Self::StopPulsed => "stop-pulses",
            Self::Cut => "cut",
            Self::CutPulsed => "cut-pulses",
            Self::CutOneWay => "one-way",
            Self::PacketLoss => "loss",
            Self::DiskFull => "full-disk",
        }
    }

    /// Whether it comes and goes as long as it lasts.
    pub fn is_pulsed(self) -> bool {
        matches!(self, Self::StopPulsed | Self::CutPulsed)
    }
}

/// One fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedFault {
    /// The fault.
    pub kind: FaultKind,
    /// The target: a node, `home`, `catalog`, or a user, for the user's scheduler.
    pub target: String,
    /// The other side of a one-way cut.
    pub other_side: Option<String>,
    /// When it begins, in milliseconds after the runs began.
    pub at_ms: u64,
    /// When it ends.
    pub until_ms: u64,
    /// Of pulses, how long each half lasts; of loss, how many of a hundred packets.
    pub strength: u32,
}

impl fmt::Display for PlannedFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind.name(), self.target)?;
        if let Some(other) = &self.other_side {
            write!(f, ">{other}")?;
        }
        let seconds = |ms: u64| ms as f64 / 1e3;
        write!(
            f,
            "@{:.1}-{:.1}s",
            seconds(self.at_ms),
            seconds(self.until_ms)
        )
    }
}

/// Most concurrent faults: some nodes must be able to continue.
const CONCURRENT_FAULTS_MAX: usize = 3;

/// A fault lasts so long, in milliseconds.
const FAULT_MS_MIN: u64 = 1_000;
const FAULT_MS_MAX: u64 = 14_000;

/// The faults of a seed on so many nodes `n1`, `n2`, …, during runs of these users: they begin and
/// end within so many milliseconds.
pub fn plan_faults(
    rng: &mut SeededRng,
    nodes: u64,
    users: &[&str],
    window_ms: u64,
) -> Vec<PlannedFault> {
    let mut faults: Vec<PlannedFault> = Vec::new();
    let mut at_ms = 1_500;
    while at_ms + FAULT_MS_MIN < window_ms {
        let longest = FAULT_MS_MAX.min(window_ms - at_ms) - FAULT_MS_MIN;
        let fault = draw_fault(rng, nodes, users, at_ms, longest);
        let at_once: Vec<&PlannedFault> = faults.iter().filter(|it| it.until_ms > at_ms).collect();
        let is_free = at_once.iter().all(|it| it.target != fault.target)
            && (fault.kind != FaultKind::DiskFull
                || at_once.iter().all(|it| it.kind != FaultKind::DiskFull));
        if is_free && at_once.len() < CONCURRENT_FAULTS_MAX {
            faults.push(fault);
        }
        at_ms += 400 + rng.next_below(2_200);
    }
    faults
}

fn draw_fault(
    rng: &mut SeededRng,
    nodes: u64,
    users: &[&str],
    at_ms: u64,
    longest_ms: u64,
) -> PlannedFault {
    const NODE: [FaultKind; 9] = [
        FaultKind::Kill,
        FaultKind::Wipe,
        FaultKind::Stop,
        FaultKind::StopPulsed,
        FaultKind::Cut,
        FaultKind::CutPulsed,
        FaultKind::CutOneWay,
        FaultKind::PacketLoss,
        FaultKind::DiskFull,
    ];
    const SERVER: [FaultKind; 4] = [
        FaultKind::Kill,
        FaultKind::Stop,
        FaultKind::Cut,
        FaultKind::PacketLoss,
    ];
    const SCHEDULER: [FaultKind; 4] = [
        FaultKind::Kill,
        FaultKind::Cut,
        FaultKind::CutPulsed,
        FaultKind::PacketLoss,
    ];
    let user = users[rng.next_below(users.len() as u64) as usize];
    let node = |rng: &mut SeededRng| format!("n{}", 1 + rng.next_below(nodes));
    // Shorter ones are more frequent.
    let for_ms = FAULT_MS_MIN
        + rng
            .next_below(longest_ms + 1)
            .min(rng.next_below(longest_ms + 1));
    let (kind, target) = match rng.next_below(10) {
        0 => (rng.choose(&SERVER), "home".to_owned()),
        1 => (rng.choose(&SERVER), "catalog".to_owned()),
        2 | 3 => (rng.choose(&SCHEDULER), user.to_owned()),
        _ => (rng.choose(&NODE), node(rng)),
    };
    let other = (kind == FaultKind::CutOneWay).then(|| match rng.next_below(4) {
        0 => user.to_owned(),
        1 => "catalog".to_owned(),
        2 => "home".to_owned(),
        _ => Some(node(rng))
            .filter(|it| *it != target)
            .unwrap_or_else(|| "home".to_owned()),
    });
    // A killed scheduler is restarted soon: until then it gets no report.
    let for_ms = match kind {
        FaultKind::Kill if target == user => for_ms.min(3_000),
        _ => for_ms,
    };
    let strength = match kind {
        FaultKind::PacketLoss => 5 + rng.next_below(45),
        _ => 200 + rng.next_below(1_300),
    };
    PlannedFault {
        kind,
        target,
        other_side: other,
        at_ms,
        until_ms: at_ms + for_ms,
        strength: u32::try_from(strength).unwrap_or(u32::MAX),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn plans_follow_their_seed_and_cover_all_kinds() {
        let make = |seed| plan_faults(&mut SeededRng::new(seed), 5, &["alice", "bob"], 22_000);
        assert_eq!(make(7), make(7));
        let mut kinds = BTreeSet::new();
        let mut count = 0;
        for seed in 0..40 {
            for fault in make(seed) {
                assert!(fault.until_ms <= 22_000, "{fault} goes on too long");
                kinds.insert(fault.kind);
                count += 1;
            }
        }
        assert_eq!(kinds.len(), 9, "{kinds:?}");
        assert!(count > 300, "{count} faults in 40 runs");
    }
}
