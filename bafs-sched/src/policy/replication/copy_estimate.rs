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

use std::collections::BTreeSet;

use bafs_proto::ids::ServerId;
use bafs_proto::message::JobReport;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::action::MountedVolume;
use crate::policy::View;
use crate::state::copy_costs::{ASSUMED_BYTES_PER_MS, CopyDecision, CopyOutcome};
use crate::state::jobs::JobState;
use crate::state::scheduler_state::{Phase, State};
use crate::state::volumes::Instance;

/// Of the time of all jobs that are left, the part that may be spent to learn what copies cost, as
/// one over it.
const TRIAL_PART: u64 = 100;

/// A slot is kept for who waits for a copy that takes this part of a job's time at most, as one
/// over it: longer, another job had better use it.
const SOON_PART: u64 = 4;

/// Nodes that are looked at for a copy: one may be where the volume is, some may lack files.
const TARGETS_MAX: usize = 8;

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
        let policy = self.policies().replication;
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
        let policy = self.policies().replication;
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
