//! What copies cost and losses were, as measured; decisions about copies.

use bafs_proto::ids::ServerId;
use bafs_proto::message::JobReport;
use bafs_proto::time::Time;
use bafs_workflow::VolumeIndex;
use serde::{Deserialize, Serialize};

use crate::state::copies::Copies;
use crate::state::overdue_copies::Overdue;
use crate::state::recorded::{kept, whole_rows};
use crate::state::tracked::Table;

/// What is believed of failures before any was seen, as the weight of a loss in thousandths, and as
/// observed node time in milliseconds: one loss for each node and week, held so lightly that a few
/// hours without any make it less.
pub(crate) const PRIOR_LOSS_PERMILLE: u128 = 20;

pub(crate) const PRIOR_NODE_MS: u128 = 20 * 7 * 24 * 3_600_000 / 1_000;

pub(crate) const YEAR_MS: u64 = 365 * 24 * 3_600_000;

/// Decisions about one volume that are remembered: one for each job that wrote it, mostly.
pub(crate) const RECEIPTS_MAX: usize = 64;

/// Of the time of copying, the part at least that jobs beside it lose, as one over it: processors
/// and disks are theirs too.
pub(crate) const BESIDE_PART: u64 = 20;

/// A copy that takes this part at most of the work that it spares, as one over it, is made whatever
/// is believed of failures: until the first one nothing is known of them, and nobody loses more by
/// such copies than so small a part of the run.
pub(crate) const PREMIUM_PART: u64 = 40;

/// What a network between nodes carries before a copy was measured, in bytes per millisecond: half
/// of a gigabit per second.
pub(crate) const ASSUMED_BYTES_PER_MS: u64 = 62_500;

/// What became of the question whether to copy a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CopyOutcome {
    /// It was not worth it.
    NotWorthwhile,
    /// No other node had room.
    NoRoom,
    /// It is being copied to this node.
    Copying(ServerId),
    /// A copy is on this node.
    Copied(ServerId, CopyCost),
    /// Copying failed or was overtaken.
    Failed,
    /// The copy took the place of the lost volume, and spared so many milliseconds of work.
    UsedForRecovery(u64),
    /// A newer copy took its place before it was needed.
    Replaced(CopyCost),
    /// The copy was deleted without ever having been needed.
    Unused(CopyCost),
}

/// What it took to make a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyCost {
    /// What the volume held.
    pub held_bytes: u64,
    /// What of it crossed the network: with an older copy beside it, what had changed since.
    pub received_bytes: u64,
    /// How long it took, in milliseconds.
    pub duration_ms: u64,
}

/// A decision about a volume, with its reasons; times in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyDecision {
    /// When it was decided.
    pub decided_at: Time,
    /// Work that a loss would have cost: with an older copy, what was done since.
    pub redo_ms: u64,
    /// How long the volume was expected to be needed.
    pub exposure_ms: u64,
    /// Probability of its loss in that time, in millionths.
    pub risk_ppm: u64,
    /// Expected gain of a copy, in microseconds.
    pub benefit_us: u64,
    /// Expected time of copying; `None` before anything was copied.
    pub copy_ms: Option<u64>,
    /// What of that jobs would have waited: all of it when one is yet to write the volume, else as
    /// much as jobs wait for data, which travel beside the copy. Nothing while that is not known.
    pub wait_ms: u64,
    /// Work that the copy's space would have kept waiting.
    pub space_ms: u64,
    /// Whether it takes so little of that work that it is made whatever is believed of failures.
    pub is_cheap: bool,
    /// Whether an older copy lies where the new one would go, so that only changes travel.
    pub has_base_copy: bool,
    /// What was decided, and what became of it.
    pub outcome: CopyOutcome,
}

/// Bytes that volumes held, and milliseconds that copying them took.
pub(crate) type Pace = (u64, u64);

/// All copies, and what is known about what they cost.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Checkpoints {
    pub(crate) copies: Copies,
    pub(crate) overdue: Overdue,
    /// All copies between two nodes, but for further ones.
    pub(crate) paths: Table<(ServerId, ServerId), Pace>,
    /// The same of all nodes together.
    pub(crate) all_paths: Pace,
    /// The last copy of each volume that was made from an older one: how much of a volume changes
    /// in a stage is its own.
    pub(crate) further: Table<VolumeIndex, Pace>,
    /// All such copies together.
    pub(crate) all_further: Pace,
    /// The quickest of all copies, in milliseconds.
    pub(crate) quickest_ms: Option<u64>,
    /// What volumes held when their last writer was done, in bytes.
    pub(crate) held: Table<VolumeIndex, u64>,
    /// Decisions about each volume, the latest last.
    pub(crate) receipts: Table<VolumeIndex, Vec<CopyDecision>>,
    /// Volumes lost with their servers or alone.
    pub(crate) losses: u64,
    /// Losses of a node in a year, in millionths, as they were believed when volumes were last
    /// weighed for it.
    pub(crate) losses_weighed: u128,
    /// Time that live nodes were observed, in milliseconds, until `counted`.
    pub(crate) node_ms: u64,
    pub(crate) counted: Option<Time>,
    /// Wall time of finished jobs, and what of it they waited for data.
    pub(crate) wall_ms: u64,
    pub(crate) waited_ms: u64,
    /// How long finished jobs kept their slots, from when their volumes were asked for, and their
    /// number.
    pub(crate) took_ms: u64,
    pub(crate) jobs: u64,
}

whole_rows!(Pace, u64, Vec<CopyDecision>);

kept! {
    /// What was written of copies and their costs.
    CheckpointChanges of Checkpoints;
    values {
        all_paths: Pace,
        all_further: Pace,
        quickest_ms: Option<u64>,
        losses: u64,
        losses_weighed: u128,
        node_ms: u64,
        counted: Option<Time>,
        wall_ms: u64,
        waited_ms: u64,
        took_ms: u64,
        jobs: u64,
    }
    tables {
        paths: Table<(ServerId, ServerId), Pace>,
        further: Table<VolumeIndex, Pace>,
        held: Table<VolumeIndex, u64>,
        receipts: Table<VolumeIndex, Vec<CopyDecision>>,
    }
    indexed {}
    parts { copies: Copies, overdue: Overdue }
    rebuilt {}
}

impl Checkpoints {
    /// Counts the time that `nodes` live nodes were observed since the last call.
    pub(crate) fn observe(&mut self, now: Time, nodes: u64) {
        let since = self.counted.map_or(0, |before| now.ms_since(before));
        self.node_ms = self.node_ms.saturating_add(since.saturating_mul(nodes));
        self.counted = Some(now);
    }

    /// Time in which nothing was observed, in milliseconds, does not count.
    pub(crate) fn put_off(&mut self, ms: u64) {
        self.counted = self.counted.map(|before| before.plus_ms(ms));
        self.copies.put_off(ms);
    }

    /// Takes note of a job that is done, and kept its slots for so long.
    pub(crate) fn learn_job(&mut self, took_ms: u64, report: &JobReport) {
        let waits = report.volumes.iter().map(|used| used.wait_ms);
        let waited_ms = waits.fold(0, u64::saturating_add);
        self.took_ms = self.took_ms.saturating_add(took_ms);
        self.wall_ms = self.wall_ms.saturating_add(report.wall_ms);
        self.waited_ms = self.waited_ms.saturating_add(waited_ms.min(report.wall_ms));
        self.jobs += 1;
    }

    /// What of so much time of a job is waiting for data; some is lost to it in any case.
    pub(crate) fn waiting_ms(&self, ms: u64) -> u64 {
        let waited = u128::from(ms) * u128::from(self.waited_ms);
        let waited = waited.checked_div(self.wall_ms.into()).unwrap_or(0);
        u64::try_from(waited)
            .unwrap_or(u64::MAX)
            .max(ms / BESIDE_PART)
    }

    pub(crate) fn mean_wall_ms(&self) -> u64 {
        self.wall_ms.checked_div(self.jobs).unwrap_or(0)
    }

    pub(crate) fn mean_attempt_ms(&self) -> u64 {
        self.took_ms.checked_div(self.jobs).unwrap_or(0)
    }

    /// Probability in millionths that a volume is lost within `exposure_ms`.
    pub(crate) fn risk_ppm(&self, exposure_ms: u64) -> u64 {
        let losses = self.losses_expected(exposure_ms);
        u64::try_from(losses).unwrap_or(u64::MAX).min(1_000_000)
    }

    /// Losses that are expected of a node, in millionths. What was seen counts alone where it is
    /// worse than what is believed: a belief in hours would hide in a run of minutes that a node is
    /// lost in each of them.
    pub(crate) fn losses_expected(&self, exposure_ms: u64) -> u128 {
        let ppm = |losses_permille: u128, node_ms: u128| {
            let exposed = u128::from(exposure_ms) * losses_permille * 1_000;
            exposed.checked_div(node_ms).unwrap_or(0)
        };
        let believed = ppm(
            PRIOR_LOSS_PERMILLE,
            PRIOR_NODE_MS + u128::from(self.node_ms),
        );
        let seen = ppm(u128::from(self.losses) * 1_000, self.node_ms.into());
        believed.max(seen)
    }

    /// Whether losses are believed to be twice as frequent as when this was last so.
    pub(crate) fn has_worsened(&mut self) -> bool {
        let expected = self.losses_expected(YEAR_MS);
        let is_worse = expected >= self.losses_weighed.saturating_mul(2);
        if is_worse {
            self.losses_weighed = expected;
        }
        is_worse
    }

    /// Expected time to copy so many bytes, by what this path took, else by what all took.
    pub(crate) fn copy_ms(&self, path: (ServerId, ServerId), bytes: u64) -> Option<u64> {
        let pace = self.paths.get(&path).copied().unwrap_or(self.all_paths);
        time_at(pace, bytes)
    }

    /// The same before anything was copied too, over a network as it is assumed.
    pub(crate) fn expected_ms(&self, path: (ServerId, ServerId), bytes: u64) -> u64 {
        let measured = self.copy_ms(path, bytes);
        measured.unwrap_or(bytes / ASSUMED_BYTES_PER_MS)
    }

    /// Expected time to make a copy from an older one, by what the last such copy of the volume
    /// took, else all did; before the first, as long as a whole one.
    pub(crate) fn further_ms(
        &self,
        volume: VolumeIndex,
        path: (ServerId, ServerId),
        bytes: u64,
    ) -> Option<u64> {
        let pace = self.further.get(&volume).copied();
        let known = time_at(pace.unwrap_or(self.all_further), bytes);
        known.or_else(|| self.copy_ms(path, bytes))
    }

    /// Whether anything is known of what copies take.
    pub(crate) fn knows_cost(&self) -> bool {
        self.all_paths.0 > 0
    }

    pub(crate) fn learn_copy(
        &mut self,
        volume: VolumeIndex,
        path: (ServerId, ServerId),
        is_further: bool,
        moved: CopyCost,
    ) {
        let learned = (moved.held_bytes, moved.duration_ms);
        let quickest_ms = self.quickest_ms.unwrap_or(u64::MAX);
        self.quickest_ms = Some(quickest_ms.min(moved.duration_ms));
        if is_further {
            self.further.insert(volume, learned);
            add(&mut self.all_further, learned);
        } else {
            add(self.paths.entry(path).or_default(), learned);
            add(&mut self.all_paths, learned);
        }
    }

    /// Whether a copy takes so little of the work that it spares that it is made in any case. None
    /// takes less than the quickest so far, however little it holds.
    pub(crate) fn is_cheap(&self, ms: u64, redo_ms: u64) -> bool {
        let ms = ms.max(self.quickest_ms.unwrap_or(u64::MAX)).max(1);
        ms.saturating_mul(PREMIUM_PART) <= redo_ms
    }

    /// The newest copy of a volume goes, whatever was decided about a newer one since.
    pub(crate) fn close_receipt(&mut self, volume: VolumeIndex) {
        let of_copy =
            |d: &CopyOutcome| matches!(d, CopyOutcome::Copying(_) | CopyOutcome::Copied(..));
        if let Some(decision) = self.latest(volume, of_copy) {
            *decision = match *decision {
                CopyOutcome::Copied(_, moved) => CopyOutcome::Unused(moved),
                _ => CopyOutcome::Failed,
            };
        }
    }

    /// A copy of a volume is back that had gone with its node.
    pub(crate) fn reopen_receipt(&mut self, volume: VolumeIndex, server: Option<ServerId>) {
        let is_unused = |decision: &CopyOutcome| matches!(decision, CopyOutcome::Unused(_));
        if let (Some(decision), Some(server)) = (self.latest(volume, is_unused), server)
            && let CopyOutcome::Unused(moved) = *decision
        {
            *decision = CopyOutcome::Copied(server, moved);
        }
    }

    /// The complete copy of a volume goes, while a newer one is being made.
    pub(crate) fn close_complete(&mut self, volume: VolumeIndex) {
        let is_complete = |decision: &CopyOutcome| matches!(decision, CopyOutcome::Copied(..));
        if let Some(decision) = self.latest(volume, is_complete)
            && let CopyOutcome::Copied(_, moved) = *decision
        {
            *decision = CopyOutcome::Unused(moved);
        }
    }

    /// A copy of a volume is complete; an older one is of no use any more.
    pub(crate) fn note_copied(&mut self, volume: VolumeIndex, to: ServerId, moved: CopyCost) {
        let is_complete = |decision: &CopyOutcome| matches!(decision, CopyOutcome::Copied(..));
        if let Some(decision) = self.latest(volume, is_complete)
            && let CopyOutcome::Copied(_, moved) = *decision
        {
            *decision = CopyOutcome::Replaced(moved);
        }
        let is_copying = |decision: &CopyOutcome| matches!(decision, CopyOutcome::Copying(_));
        if let Some(decision) = self.latest(volume, is_copying) {
            *decision = CopyOutcome::Copied(to, moved);
        }
    }

    /// A copy took the place of a lost volume, and spared so much work.
    pub(crate) fn note_saved(&mut self, volume: VolumeIndex, saved_ms: u64) {
        let is_complete = |decision: &CopyOutcome| matches!(decision, CopyOutcome::Copied(..));
        if let Some(decision) = self.latest(volume, is_complete) {
            *decision = CopyOutcome::UsedForRecovery(saved_ms);
        }
    }

    pub(crate) fn latest(
        &mut self,
        volume: VolumeIndex,
        is_it: impl Fn(&CopyOutcome) -> bool,
    ) -> Option<&mut CopyOutcome> {
        let receipts = self.receipts.get_mut(&volume)?.iter_mut().rev();
        let mut decisions = receipts.map(|receipt| &mut receipt.outcome);
        decisions.find(|decision| is_it(decision))
    }

    pub(crate) fn note(&mut self, volume: VolumeIndex, receipt: CopyDecision) {
        let receipts = self.receipts.entry(volume).or_default();
        if receipts.len() >= RECEIPTS_MAX {
            receipts.remove(0);
        }
        if receipts.is_empty() {
            // Of most volumes there is one decision, and a list has room for four without this.
            receipts.reserve_exact(1);
        }
        receipts.push(receipt);
    }
}

pub(crate) fn add(sum: &mut Pace, one: Pace) {
    *sum = (sum.0.saturating_add(one.0), sum.1.saturating_add(one.1));
}

/// Time for so many bytes; `None` while nothing was measured.
pub(crate) fn time_at((measured, ms): Pace, bytes: u64) -> Option<u64> {
    let ms = u128::from(bytes) * u128::from(ms);
    let ms = ms.checked_div(u128::from(measured))?;
    Some(u64::try_from(ms).unwrap_or(u64::MAX))
}

/// What a copy is worth, in microseconds, that spares this work at that probability of a loss.
pub(crate) fn benefit_us(redo_ms: u64, risk_ppm: u64) -> u64 {
    let us = u128::from(redo_ms) * u128::from(risk_ppm) / 1_000;
    u64::try_from(us).unwrap_or(u64::MAX)
}
