//! Whether a copy of a scratch volume on another node is worth its cost. How long copying takes is
//! measured, not assumed. What becomes of copies says `policy/replication/copies.rs`.
//!
//! The rule is that of the thesis (*Data-Driven Batch Scheduling*, 2005, section 3.2.6): copy when
//! a stage is done and benefit > cost. Benefit is the time that would be spent again if the volume
//! were lost, times the probability that it is lost while it is needed. Cost is the time that
//! copying takes, which the next writer of the volume waits. Beyond the thesis, where nobody is to
//! write it any more only that part of the time counts that jobs wait for data; a copy also costs
//! the work that its space keeps waiting, the first copy is the only one that is tried without
//! knowing its cost (a hundredth of what is left of the run at most, as it seems), and a newer copy
//! is weighed against the older one that is there: it spares only what was done since, and takes
//! only as long as further copies took.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::ServerId;
use bafs_proto::message::JobReport;
use bafs_proto::time::Time;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::action::MountedVolume;
use crate::policy::View;
use crate::policy::replication::copies::Copies;
use crate::policy::replication::overdue::Overdue;
use crate::state::jobs::JobState;
use crate::state::scheduler_state::{Phase, State};
use crate::state::volumes::Instance;

/// What is believed of failures before any was seen, as the weight of a loss in thousandths, and as
/// observed node time in milliseconds: one loss for each node and week, held so lightly that a few
/// hours without any make it less.
const PRIOR_LOSS_PERMILLE: u128 = 20;
const PRIOR_NODE_MS: u128 = 20 * 7 * 24 * 3_600_000 / 1_000;
const YEAR_MS: u64 = 365 * 24 * 3_600_000;

/// Decisions about one volume that are remembered: one for each job that wrote it, mostly.
const RECEIPTS_MAX: usize = 64;

/// Of the time of all jobs that are left, the part that may be spent to learn what copies cost, as
/// one over it.
const TRIAL_PART: u64 = 100;

/// Of the time of copying, the part at least that jobs beside it lose, as one over it: processors
/// and disks are theirs too.
const BESIDE_PART: u64 = 20;

/// A copy that takes this part at most of the work that it spares, as one over it, is made whatever
/// is believed of failures: until the first one nothing is known of them, and nobody loses more by
/// such copies than so small a part of the run.
const PREMIUM_PART: u64 = 40;

/// A slot is kept for who waits for a copy that takes this part of a job's time at most, as one
/// over it: longer, another job had better use it.
const SOON_PART: u64 = 4;

/// What a network between nodes carries before a copy was measured, in bytes per millisecond: half
/// of a gigabit per second.
const ASSUMED_BYTES_PER_MS: u64 = 62_500;

/// Nodes that are looked at for a copy: one may be where the volume is, some may lack files.
const TARGETS_MAX: usize = 8;

/// What became of the question whether to copy a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyCost {
    /// What the volume held.
    pub held_bytes: u64,
    /// What of it crossed the network: with an older copy beside it, what had changed since.
    pub received_bytes: u64,
    /// How long it took, in milliseconds.
    pub duration_ms: u64,
}

/// A decision about a volume, with its reasons; times in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
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
type Pace = (u64, u64);

/// All copies, and what is known about what they cost.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Checkpoints {
    pub(crate) copies: Copies,
    pub(crate) overdue: Overdue,
    /// All copies between two nodes, but for further ones.
    paths: BTreeMap<(ServerId, ServerId), Pace>,
    /// The same of all nodes together.
    all_paths: Pace,
    /// The last copy of each volume that was made from an older one: how much of a volume changes
    /// in a stage is its own.
    further: BTreeMap<VolumeIndex, Pace>,
    /// All such copies together.
    all_further: Pace,
    /// The quickest of all copies, in milliseconds.
    quickest_ms: Option<u64>,
    /// What volumes held when their last writer was done, in bytes.
    held: BTreeMap<VolumeIndex, u64>,
    /// Decisions about each volume, the latest last.
    receipts: BTreeMap<VolumeIndex, Vec<CopyDecision>>,
    /// Volumes lost with their servers or alone.
    pub(crate) losses: u64,
    /// Losses of a node in a year, in millionths, as they were believed when volumes were last
    /// weighed for it.
    losses_weighed: u128,
    /// Time that live nodes were observed, in milliseconds, until `counted`.
    node_ms: u64,
    counted: Option<Time>,
    /// Wall time of finished jobs, and what of it they waited for data.
    wall_ms: u64,
    waited_ms: u64,
    /// How long finished jobs kept their slots, from when their volumes were asked for, and their
    /// number.
    took_ms: u64,
    jobs: u64,
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
    fn waiting_ms(&self, ms: u64) -> u64 {
        let waited = u128::from(ms) * u128::from(self.waited_ms);
        let waited = waited.checked_div(self.wall_ms.into()).unwrap_or(0);
        u64::try_from(waited)
            .unwrap_or(u64::MAX)
            .max(ms / BESIDE_PART)
    }

    pub(crate) fn mean_wall_ms(&self) -> u64 {
        self.wall_ms.checked_div(self.jobs).unwrap_or(0)
    }

    fn mean_attempt_ms(&self) -> u64 {
        self.took_ms.checked_div(self.jobs).unwrap_or(0)
    }

    /// Probability in millionths that a volume is lost within `exposure_ms`.
    fn risk_ppm(&self, exposure_ms: u64) -> u64 {
        let losses = self.losses_expected(exposure_ms);
        u64::try_from(losses).unwrap_or(u64::MAX).min(1_000_000)
    }

    /// Losses that are expected of a node, in millionths. What was seen counts alone where it is
    /// worse than what is believed: a belief in hours would hide in a run of minutes that a node is
    /// lost in each of them.
    fn losses_expected(&self, exposure_ms: u64) -> u128 {
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
    fn further_ms(
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
    fn is_cheap(&self, ms: u64, redo_ms: u64) -> bool {
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

    fn latest(
        &mut self,
        volume: VolumeIndex,
        is_it: impl Fn(&CopyOutcome) -> bool,
    ) -> Option<&mut CopyOutcome> {
        let receipts = self.receipts.get_mut(&volume)?.iter_mut().rev();
        let mut decisions = receipts.map(|receipt| &mut receipt.outcome);
        decisions.find(|decision| is_it(decision))
    }

    fn note(&mut self, volume: VolumeIndex, receipt: CopyDecision) {
        let receipts = self.receipts.entry(volume).or_default();
        if receipts.len() >= RECEIPTS_MAX {
            receipts.remove(0);
        }
        receipts.push(receipt);
    }
}

fn add(sum: &mut Pace, one: Pace) {
    *sum = (sum.0.saturating_add(one.0), sum.1.saturating_add(one.1));
}

/// Time for so many bytes; `None` while nothing was measured.
fn time_at((measured, ms): Pace, bytes: u64) -> Option<u64> {
    let ms = u128::from(bytes) * u128::from(ms);
    let ms = ms.checked_div(u128::from(measured))?;
    Some(u64::try_from(ms).unwrap_or(u64::MAX))
}

impl State {
    /// All decisions about copies, by volume, the latest of each last.
    pub fn copy_decisions(&self) -> impl Iterator<Item = (VolumeIndex, &CopyDecision)> {
        let receipts = self.checkpoints.receipts.iter();
        receipts.flat_map(|(volume, all)| all.iter().map(|receipt| (*volume, receipt)))
    }

    /// The decisions about copies of a volume, the latest last.
    pub fn copy_decisions_of(&self, volume: VolumeIndex) -> &[CopyDecision] {
        let receipts = self.checkpoints.receipts.get(&volume);
        receipts.map_or(&[], Vec::as_slice)
    }

    /// Takes note of what a job left in the volumes that it may write.
    pub(crate) fn learn_held(&mut self, job: JobIndex, report: &JobReport) {
        for (volume, _) in self.graph.mounted(job).iter().filter(|(_, w)| *w) {
            let name = &self.graph.workflow.volume(*volume).name;
            let used = report.volumes.iter().find(|used| used.name == *name);
            // None of an agent that was not told.
            if let Some(used) = used.filter(|used| used.used_bytes > 0) {
                self.checkpoints.held.insert(*volume, used.used_bytes);
            }
        }
    }

    /// What a volume holds as far as is known, else the most that it may, in bytes.
    pub(crate) fn held_bytes(&self, volume: VolumeIndex) -> u64 {
        let held = self.checkpoints.held.get(&volume).copied();
        let most = self.size_of(volume).bytes;
        held.map_or(most, |held| held.min(most))
    }

    /// A job that wrote a volume is done: a copy of what it holds now may be worth its cost.
    pub(crate) fn consider_copy(&mut self, volume: VolumeIndex) {
        self.drop_unfinished_copy(volume);
        let policy = self.policies.replication;
        let is_needed = self.graph.volume(volume).users_left > 0;
        if !policy.is_active()
            || !is_needed
            || self.settings.has_private_data_at_home()
            || self.phase != Phase::Running
        {
            self.drop_copies(volume);
            return;
        }
        let Some((id, Some(server))) = self.volumes.scratch(volume) else {
            return;
        };
        let source = MountedVolume {
            volume,
            id,
            server: Some(server),
        };
        let target = self.target_of_copy(source);
        let mut receipt = self.weigh(volume, server, target);
        let is_worth = policy.is_worthwhile(View::new(self), volume, &receipt);
        receipt.outcome = match target {
            _ if !is_worth => CopyOutcome::NotWorthwhile,
            None => CopyOutcome::NoRoom,
            Some(target) => CopyOutcome::Copying(target),
        };
        if let CopyOutcome::Copying(target) = receipt.outcome {
            let base = self.older_copy(volume).filter(|_| receipt.has_base_copy);
            let base = base.map(|(id, _)| id);
            self.copy(source, target, base);
        } else if !self.is_worth_keeping(volume, &receipt) {
            self.drop_copies(volume);
        }
        self.checkpoints.note(volume, receipt);
    }

    /// Whether a copy is made to learn what copies cost: one at a time, and, while nothing was
    /// measured, only one that takes a small part of the work that is left, or hardly more than
    /// it is worth, over a network as it is assumed.
    pub(crate) fn may_try(&self, volume: VolumeIndex, receipt: &CopyDecision) -> bool {
        let assumed_ms = self.held_bytes(volume) / ASSUMED_BYTES_PER_MS;
        let cost_ms = assumed_ms.saturating_add(receipt.space_ms);
        let jobs = self.graph.workflow.jobs.len() as u64;
        let jobs_left = jobs.saturating_sub(self.graph.finals());
        let work_ms = jobs_left.saturating_mul(self.checkpoints.mean_attempt_ms());
        let most_ms = (work_ms / TRIAL_PART).max(receipt.benefit_us / 1_000);
        self.checkpoints.copies.is_empty() && cost_ms <= most_ms
    }

    /// Whether copying takes so little of a job's time that a slot may be idle meanwhile.
    pub(crate) fn is_soon_copied(&self, copy: &Instance, source: ServerId) -> bool {
        let bytes = self.held_bytes(copy.volume);
        let target = copy.server.unwrap_or(source);
        let copy_ms = self.checkpoints.expected_ms((source, target), bytes);
        copy_ms.saturating_mul(SOON_PART) <= self.checkpoints.mean_wall_ms()
    }

    fn weigh(
        &self,
        volume: VolumeIndex,
        source: ServerId,
        target: Option<ServerId>,
    ) -> CopyDecision {
        let redo_ms = self.redo_ms(volume, self.copied_writers(volume));
        let users = u64::from(self.graph.volume(volume).users_left);
        let exposure_ms = users.saturating_mul(self.checkpoints.mean_attempt_ms());
        let risk_ppm = self.checkpoints.risk_ppm(exposure_ms);
        let (size, held_bytes) = (self.size_of(volume), self.held_bytes(volume));
        let older = self.older_copy(volume).and_then(|(_, older)| older.server);
        let is_further = target.is_some() && target == older;
        let copy_ms = target.and_then(|target| match is_further {
            true => self
                .checkpoints
                .further_ms(volume, (source, target), held_bytes),
            false => self.checkpoints.copy_ms((source, target), held_bytes),
        });
        let wait_ms = |copy_ms: u64| match self.is_written_again(volume) {
            true => copy_ms,
            false => self.checkpoints.waiting_ms(copy_ms),
        };
        let space_ms = |target| self.space_ms(target, size.bytes, size.bytes, exposure_ms);
        let space_ms = target.map_or(0, space_ms);
        let is_cheap = |ms| {
            self.checkpoints
                .is_cheap(space_ms.saturating_add(ms), redo_ms)
        };
        CopyDecision {
            decided_at: self.now,
            redo_ms,
            exposure_ms,
            risk_ppm,
            benefit_us: benefit_us(redo_ms, risk_ppm),
            copy_ms,
            wait_ms: copy_ms.map_or(0, wait_ms),
            space_ms,
            is_cheap: copy_ms.is_some_and(is_cheap),
            has_base_copy: is_further,
            outcome: CopyOutcome::NotWorthwhile,
        }
    }

    /// Whether a job that is not done writes the volume: it waits until that is copied.
    fn is_written_again(&self, volume: VolumeIndex) -> bool {
        let mut writers = self.graph.volume(volume).writers.iter();
        writers.any(|writer| self.graph.state(*writer) != JobState::Done)
    }

    /// Whether an older copy is worth its space on: it spares what was done before it, while no
    /// newer one is made.
    fn is_worth_keeping(&self, volume: VolumeIndex, receipt: &CopyDecision) -> bool {
        let Some((_, older)) = self.older_copy(volume) else {
            return false;
        };
        let Some(server) = older.server else {
            return false;
        };
        let spared_ms = self.redo_ms(volume, &[]).saturating_sub(receipt.redo_ms);
        let space_ms = self.space_ms(server, 0, older.size.bytes, receipt.exposure_ms);
        let policy = self.policies.replication;
        policy.keeps_older(receipt, spared_ms, space_ms)
    }

    /// Slots' time of the finished jobs that would run again if the volume were lost, besides those
    /// of whose output there is a copy. With it goes what else is on its node.
    pub(crate) fn redo_ms(&self, volume: VolumeIndex, copied: &[JobIndex]) -> u64 {
        let lost_server = self.volumes.scratch(volume).and_then(|(_, server)| server);
        let is_left = |input: &VolumeIndex| {
            let there = self.volumes.scratch(*input);
            let is_beside = there.is_some_and(|(_, server)| server != lost_server);
            is_beside || self.good_copy(*input).is_some()
        };
        let mut sum: u64 = 0;
        let mut seen: BTreeSet<JobIndex> = copied.iter().copied().collect();
        let mut lost = vec![volume];
        while let Some(volume) = lost.pop() {
            for &writer in &self.graph.volume(volume).writers {
                if self.graph.state(writer) != JobState::Done || !seen.insert(writer) {
                    continue;
                }
                sum = sum.saturating_add(self.graph.job(writer).took_ms);
                let inputs = self.graph.mounted(writer).into_iter();
                let scratch = inputs
                    .map(|(input, _)| input)
                    .filter(|input| !self.graph.volume(*input).is_cache);
                lost.extend(scratch.filter(|input| !is_left(input)));
            }
        }
        sum
    }

    /// Time for which a copy keeps other work waiting: none while its node has room for a job in
    /// every free slot besides, or nothing waits. Of its bytes so many have yet to be `taken`.
    fn space_ms(&self, target: ServerId, taken: u64, bytes: u64, exposure_ms: u64) -> u64 {
        let one = self.scratch_need_max.bytes.max(1);
        let slots = u64::from(self.fleet.free_slots(target)).max(1);
        let left = self.fleet.available(target).bytes.saturating_sub(taken);
        if self.queues.is_empty() || left >= one.saturating_mul(slots) {
            return 0;
        }
        let displaced = u128::from(exposure_ms) * u128::from(bytes) / u128::from(one);
        u64::try_from(displaced).unwrap_or(u64::MAX)
    }

    /// Where a copy goes: to the node of the older one if that has room for both, else to the one
    /// with most room besides the one that has the volume; to a slow one if there is no other.
    fn target_of_copy(&self, source: MountedVolume) -> Option<ServerId> {
        let size = self.size_of(source.volume);
        let older = self.older_copy(source.volume);
        let older = older.and_then(|(_, older)| older.server);
        // All further ones have less room.
        let roomy = self.fleet.roomiest().take(TARGETS_MAX);
        let has_room = |server: &ServerId| {
            Some(*server) != source.server && self.fleet.available(*server).can_hold(size)
        };
        let mut targets = older.into_iter().chain(roomy).filter(has_room);
        let is_quick = |server: &ServerId| !self.checkpoints.overdue.is_slow(*server);
        let first = targets.next()?;
        match is_quick(&first) {
            true => Some(first),
            false => targets.find(is_quick).or(Some(first)),
        }
    }
}

/// What a copy is worth, in microseconds, that spares this work at that probability of a loss.
pub(super) fn benefit_us(redo_ms: u64, risk_ppm: u64) -> u64 {
    let us = u128::from(redo_ms) * u128::from(risk_ppm) / 1_000;
    u64::try_from(us).unwrap_or(u64::MAX)
}
