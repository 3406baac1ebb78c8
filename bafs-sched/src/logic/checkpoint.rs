//! Copies of scratch volumes on other nodes: whether one is worth its cost, when it takes the
//! place of what was lost, and when it goes. How long copying takes is measured, not assumed.
//!
//! The rule is that of the thesis (*Data-Driven Batch Scheduling*, 2005, section 3.2.6): copy when
//! a stage is done and benefit > cost. Benefit is the time that would be spent again if the volume
//! were lost, times the probability that it is lost while it is needed. Cost is the time that
//! copying takes, which the next writer of the volume waits. Beyond the thesis, a copy also costs
//! the work that its space keeps waiting, and the first copy is the only one that is tried without
//! knowing its cost.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::message::JobReport;
use bafs_proto::time::Time;
use serde::{Deserialize, Serialize};

use super::action::{Action, MountedVolume};
use super::graph::JobState;
use super::scheduler::{Phase, Scheduler};
use super::volumes::{Instance, State};
use crate::workflow::{JobIndex, VolumeIndex};

/// What is believed of failures before any was seen, as the weight of a volume's loss in
/// thousandths, and as observed node time in milliseconds: one loss for each node and week, held
/// so lightly that a single loss in an hour outweighs it.
const PRIOR_LOSS_PERMILLE: u128 = 20;
const PRIOR_NODE_MS: u128 = 20 * 7 * 24 * 3_600_000 / 1_000;

/// Nodes that are looked at for a copy: one may be where the volume is, some may lack files.
const TARGETS_MAX: usize = 8;

/// When volumes are copied to another node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckpointPolicy {
    /// Never: what is lost is computed again.
    Never,
    /// After each stage, as far as there is room.
    Always,
    /// After a stage whose loss would cost more than the copy.
    #[default]
    CostBenefit,
}

/// What became of the question whether to copy a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// It was not worth it.
    NotWorth,
    /// No other node had room.
    NoRoom,
    /// It is being copied to this node.
    Copying(ServerId),
    /// A copy is on this node, made in so many milliseconds.
    Copied(ServerId, u64),
    /// Copying failed or was overtaken.
    Failed,
    /// The copy took the place of the lost volume, and spared so many milliseconds of work.
    Saved(u64),
    /// The copy was deleted without ever having been needed.
    Unused,
}

/// The last decision about a volume, with its reasons; times in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receipt {
    /// When it was decided.
    pub at: Time,
    /// Work that a loss would have cost.
    pub redo_ms: u64,
    /// How long the volume was expected to be needed.
    pub exposure_ms: u64,
    /// Probability of its loss in that time, in millionths.
    pub risk_ppm: u64,
    /// Expected gain of a copy, in microseconds.
    pub benefit_us: u64,
    /// Expected time of copying; `None` before anything was copied.
    pub copy_ms: Option<u64>,
    /// Work that the copy's space would have kept waiting.
    pub space_ms: u64,
    /// What was decided, and what became of it.
    pub decision: Decision,
}

/// A copy that exists or is being made.
#[derive(Debug, Clone, PartialEq)]
struct Copy {
    id: VolumeId,
    source: MountedVolume,
    since: Time,
    /// Writers whose output it has; it is good only while no other writer is done.
    writers: Vec<JobIndex>,
}

/// All copies, and what is known about what they cost.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Checkpoints {
    copies: BTreeMap<VolumeIndex, Copy>,
    /// Volumes that have copies, by pipeline.
    by_pipeline: BTreeSet<(u32, VolumeIndex)>,
    /// Bytes and milliseconds of all copies between two nodes.
    paths: BTreeMap<(ServerId, ServerId), (u64, u64)>,
    /// The same of all copies together.
    all_paths: (u64, u64),
    /// What volumes held when their last writer was done, in bytes.
    held: BTreeMap<VolumeIndex, u64>,
    receipts: BTreeMap<VolumeIndex, Receipt>,
    /// Volumes lost with their servers or alone.
    pub(super) losses: u64,
    /// Time that live nodes were observed, in milliseconds, until `counted`.
    node_ms: u64,
    counted: Option<Time>,
    /// Wall time of finished jobs, and their number.
    wall_ms: u64,
    jobs: u64,
}

impl Checkpoints {
    /// Counts the time that `nodes` live nodes were observed since the last call.
    pub(super) fn observe(&mut self, now: Time, nodes: u64) {
        let since = self.counted.map_or(0, |before| now.ms_since(before));
        self.node_ms = self.node_ms.saturating_add(since.saturating_mul(nodes));
        self.counted = Some(now);
    }

    /// Time in which nothing was observed, in milliseconds, does not count.
    pub(super) fn put_off(&mut self, ms: u64) {
        self.counted = self.counted.map(|before| before.plus_ms(ms));
        for copy in self.copies.values_mut() {
            copy.since = copy.since.plus_ms(ms);
        }
    }

    /// Takes note of a job that is done.
    pub(super) fn learn_job(&mut self, wall_ms: u64) {
        self.wall_ms = self.wall_ms.saturating_add(wall_ms);
        self.jobs += 1;
    }

    pub(super) fn mean_wall_ms(&self) -> u64 {
        self.wall_ms.checked_div(self.jobs).unwrap_or(0)
    }

    /// Probability in millionths that a volume is lost within `exposure_ms`.
    fn risk_ppm(&self, exposure_ms: u64) -> u64 {
        let losses = u128::from(self.losses) * 1_000 + PRIOR_LOSS_PERMILLE;
        let observed = (u128::from(self.node_ms) + PRIOR_NODE_MS) * 1_000;
        let ppm = u128::from(exposure_ms) * losses * 1_000_000 / observed;
        u64::try_from(ppm).unwrap_or(u64::MAX).min(1_000_000)
    }

    /// Expected time to copy so many bytes, by what this path took, else by what all took.
    pub(super) fn copy_ms(&self, path: (ServerId, ServerId), bytes: u64) -> Option<u64> {
        let (copied, ms) = self.paths.get(&path).copied().unwrap_or(self.all_paths);
        let ms = u128::from(bytes) * u128::from(ms);
        let ms = ms.checked_div(u128::from(copied))?;
        Some(u64::try_from(ms).unwrap_or(u64::MAX))
    }

    fn learn_copy(&mut self, path: (ServerId, ServerId), bytes: u64, ms: u64) {
        let own = self.paths.entry(path).or_default();
        for sum in [own, &mut self.all_paths] {
            *sum = (sum.0.saturating_add(bytes), sum.1.saturating_add(ms));
        }
    }

    /// Takes the copy of a volume out of the books.
    fn remove(&mut self, volume: VolumeIndex, pipeline: Option<u32>) -> Option<Copy> {
        if let Some(pipeline) = pipeline {
            self.by_pipeline.remove(&(pipeline, volume));
        }
        self.copies.remove(&volume)
    }

    fn decide(&mut self, volume: VolumeIndex, decision: Decision) {
        if let Some(receipt) = self.receipts.get_mut(&volume) {
            receipt.decision = decision;
        }
    }
}

impl Scheduler {
    /// The last decisions about copies, by volume.
    pub fn receipts(&self) -> impl Iterator<Item = (VolumeIndex, &Receipt)> {
        let receipts = self.checkpoints.receipts.iter();
        receipts.map(|(volume, receipt)| (*volume, receipt))
    }

    /// The last decision about a copy of a volume, if there was one.
    pub fn receipt(&self, volume: VolumeIndex) -> Option<&Receipt> {
        self.checkpoints.receipts.get(&volume)
    }

    /// Takes note of what a job left in the volumes that it may write.
    pub(super) fn learn_held(&mut self, job: JobIndex, report: &JobReport) {
        for (volume, _) in self.graph.mounted(job).iter().filter(|(_, w)| *w) {
            let name = &self.graph.workflow.volume(*volume).name;
            let used = report.volumes.iter().find(|used| used.name == *name);
            // None of an agent that was not told.
            if let Some(used) = used.filter(|used| used.held_bytes > 0) {
                self.checkpoints.held.insert(*volume, used.held_bytes);
            }
        }
    }

    /// What a volume holds as far as is known, else the most that it may, in bytes.
    pub(super) fn held_bytes(&self, volume: VolumeIndex) -> u64 {
        let held = self.checkpoints.held.get(&volume).copied();
        let most = self.size_of(volume).bytes;
        held.map_or(most, |held| held.min(most))
    }

    /// Whether a volume is being copied, so that nobody may write it.
    pub(super) fn is_being_copied(&self, volume: VolumeIndex) -> bool {
        let copy = self.checkpoints.copies.get(&volume);
        let instance = copy.and_then(|copy| self.volumes.get(copy.id));
        instance.is_some_and(|instance| instance.state == State::Copying)
    }

    /// A job that wrote a volume is done: an earlier copy is outdated, and a new one may be worth
    /// its cost.
    pub(super) fn consider_copy(&mut self, volume: VolumeIndex) {
        self.drop_copy(volume);
        let policy = self.settings.checkpoint;
        let is_needed = self.graph.volume(volume).users_left > 0;
        if policy == CheckpointPolicy::Never
            || !is_needed
            || self.settings.is_private_at_home()
            || self.phase != Phase::Running
        {
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
        let is_worth = match receipt.copy_ms {
            _ if policy == CheckpointPolicy::Always => true,
            Some(ms) => {
                let cost_ms = ms.saturating_add(receipt.space_ms);
                receipt.benefit_us > cost_ms.saturating_mul(1_000)
            }
            // One copy is made to learn the cost; until it ends there is no second.
            None => receipt.benefit_us > 0 && self.checkpoints.copies.is_empty(),
        };
        receipt.decision = match target {
            _ if !is_worth => Decision::NotWorth,
            None => Decision::NoRoom,
            Some(target) => Decision::Copying(target),
        };
        let decision = receipt.decision;
        self.checkpoints.receipts.insert(volume, receipt);
        if let Decision::Copying(target) = decision {
            self.copy(source, target);
        }
    }

    fn weigh(&self, volume: VolumeIndex, source: ServerId, target: Option<ServerId>) -> Receipt {
        let redo_ms = self.redo_ms(volume);
        let users = u64::from(self.graph.volume(volume).users_left);
        let exposure_ms = users.saturating_mul(self.checkpoints.mean_wall_ms());
        let risk_ppm = self.checkpoints.risk_ppm(exposure_ms);
        let benefit_us = u128::from(redo_ms) * u128::from(risk_ppm) / 1_000;
        let (size, held_bytes) = (self.size_of(volume), self.held_bytes(volume));
        let copy_ms =
            target.and_then(|target| self.checkpoints.copy_ms((source, target), held_bytes));
        Receipt {
            at: self.now,
            redo_ms,
            exposure_ms,
            risk_ppm,
            benefit_us: u64::try_from(benefit_us).unwrap_or(u64::MAX),
            copy_ms,
            space_ms: target.map_or(0, |target| self.space_ms(target, size.bytes, exposure_ms)),
            decision: Decision::NotWorth,
        }
    }

    /// Wall time of the finished jobs that would run again if the volume were lost.
    fn redo_ms(&self, volume: VolumeIndex) -> u64 {
        let mut sum: u64 = 0;
        let mut seen = BTreeSet::new();
        let mut lost = vec![volume];
        while let Some(volume) = lost.pop() {
            for &writer in &self.graph.volume(volume).writers {
                if self.graph.state(writer) != JobState::Done || !seen.insert(writer) {
                    continue;
                }
                sum = sum.saturating_add(self.graph.job(writer).wall_ms);
                let inputs = self.graph.mounted(writer).into_iter();
                lost.extend(inputs.map(|(input, _)| input).filter(|input| {
                    !self.graph.volume(*input).is_cache
                        && !self.volumes.is_live(*input)
                        && self.good_copy(*input).is_none()
                }));
            }
        }
        sum
    }

    /// Time for which a copy keeps other work waiting: none while its node has room for a job in
    /// every free slot besides, or nothing waits.
    fn space_ms(&self, target: ServerId, bytes: u64, exposure_ms: u64) -> u64 {
        let one = self.scratch_need_max.bytes.max(1);
        let slots = u64::from(self.fleet.free_slots(target)).max(1);
        let left = self.fleet.available(target).bytes.saturating_sub(bytes);
        if self.queues.is_empty() || left >= one.saturating_mul(slots) {
            return 0;
        }
        let displaced = u128::from(exposure_ms) * u128::from(bytes) / u128::from(one);
        u64::try_from(displaced).unwrap_or(u64::MAX)
    }

    /// The node with most room besides the one that has the volume.
    fn target_of_copy(&self, source: MountedVolume) -> Option<ServerId> {
        let size = self.size_of(source.volume);
        // All further ones have less room.
        let mut roomy = self.fleet.roomiest().take(TARGETS_MAX);
        roomy.find(|&server| {
            Some(server) != source.server && self.fleet.available(server).holds(size)
        })
    }

    fn copy(&mut self, source: MountedVolume, target: ServerId) {
        let (volume, size) = (source.volume, self.size_of(source.volume));
        let id = VolumeId(self.next_id());
        self.fleet
            .update(target, |node| node.reserved = node.reserved.plus(size));
        let instance = Instance {
            volume,
            server: Some(target),
            size,
            state: State::Copying,
            waiters: Vec::new(),
            delete_faults: 0,
        };
        self.volumes.add_copy(id, instance);
        let writers = self.done_writers(volume);
        let copy = Copy {
            id,
            source,
            since: self.now,
            writers,
        };
        self.checkpoints.copies.insert(volume, copy);
        let pipeline = self.graph.pipeline_of(volume);
        let place = pipeline.map(|pipeline| (pipeline, volume));
        self.checkpoints.by_pipeline.extend(place);
        self.out.push(Action::CopyVolume {
            id,
            source,
            server: target,
            size,
        });
    }

    fn done_writers(&self, volume: VolumeIndex) -> Vec<JobIndex> {
        let writers = self.graph.volume(volume).writers.iter().copied();
        writers
            .filter(|writer| self.graph.state(*writer) == JobState::Done)
            .collect()
    }

    /// The action that makes a copy, to ask for it once more.
    pub(super) fn copy_action(&self, id: VolumeId, instance: &Instance) -> Option<Action> {
        let copy = self.checkpoints.copies.get(&instance.volume);
        let copy = copy.filter(|copy| copy.id == id)?;
        Some(Action::CopyVolume {
            id,
            source: copy.source,
            server: instance.server?,
            size: instance.size,
        })
    }

    /// A copy is complete; copies of what only earlier stages needed go.
    pub(super) fn copied(&mut self, id: VolumeId) {
        let Some(instance) = self.volumes.get_mut(id) else {
            return;
        };
        instance.state = State::Copy;
        let (volume, target) = (instance.volume, instance.server);
        let bytes = self.held_bytes(volume);
        let Some(copy) = self.checkpoints.copies.get(&volume) else {
            return;
        };
        let (took_ms, source) = (self.now.ms_since(copy.since), copy.source.server);
        if let (Some(source), Some(target)) = (source, target) {
            self.checkpoints
                .learn_copy((source, target), bytes, took_ms);
            self.checkpoints
                .decide(volume, Decision::Copied(target, took_ms));
        }
        self.drop_older_copies(volume);
        self.requeue_users(volume);
    }

    /// A copy could not be made; the volume itself is none the worse.
    pub(super) fn copy_failed(&mut self, id: VolumeId) {
        if let Some(volume) = self.volumes.get(id).map(|instance| instance.volume) {
            self.drop_copy(volume);
        }
    }

    /// Deletes the copy of a volume, if there is one, and lets its writers go on.
    pub(super) fn drop_copy(&mut self, volume: VolumeIndex) {
        if let Some(id) = self.checkpoints.copies.get(&volume).map(|copy| copy.id) {
            self.retire(id);
            self.requeue_users(volume);
        }
    }

    /// Deletes every copy; answers whether there was one.
    pub(super) fn drop_all_copies(&mut self) -> bool {
        let volumes: Vec<VolumeIndex> = self.checkpoints.copies.keys().copied().collect();
        for &volume in &volumes {
            self.drop_copy(volume);
        }
        !volumes.is_empty()
    }

    /// Deletes copies of volumes of a pipeline in which nothing can have to run again.
    pub(super) fn drop_copies_of_closed(&mut self, pipeline: u32) {
        if self.graph.is_pipeline_closed(pipeline) {
            for volume in self.copied_of(pipeline) {
                self.drop_copy(volume);
            }
        }
    }

    /// A newer stage is safe, so what it was made from need not be.
    fn drop_older_copies(&mut self, newer: VolumeIndex) {
        let Some(pipeline) = self.graph.pipeline_of(newer) else {
            return;
        };
        for volume in self.copied_of(pipeline) {
            if volume != newer && self.graph.volume(volume).is_idle() {
                self.drop_copy(volume);
            }
        }
    }

    fn copied_of(&self, pipeline: u32) -> Vec<VolumeIndex> {
        let of_pipeline = (pipeline, VolumeIndex(0))..=(pipeline, VolumeIndex(u32::MAX));
        let copied = self.checkpoints.by_pipeline.range(of_pipeline);
        copied.map(|(_, volume)| *volume).collect()
    }

    /// The copy that has what the volume has: complete, and no writer was done since.
    fn good_copy(&self, volume: VolumeIndex) -> Option<VolumeId> {
        let copy = self.checkpoints.copies.get(&volume)?;
        let is_complete = self.volumes.get(copy.id)?.state == State::Copy;
        (is_complete && copy.writers == self.done_writers(volume)).then_some(copy.id)
    }

    /// Puts the copy in the place of a volume that is gone; answers whether there was one.
    pub(super) fn restore(&mut self, volume: VolumeIndex) -> bool {
        let Some(id) = self.good_copy(volume) else {
            return false;
        };
        let saved_ms = self.redo_ms(volume);
        let pipeline = self.graph.pipeline_of(volume);
        self.checkpoints.remove(volume, pipeline);
        self.checkpoints.decide(volume, Decision::Saved(saved_ms));
        self.volumes.promote(id);
        self.send_files(volume);
        self.requeue_users(volume);
        true
    }

    /// Takes note that a volume goes: if it was a copy, so does what was believed of it.
    pub(super) fn forget_copy(&mut self, id: VolumeId, volume: VolumeIndex) {
        let copy = self.checkpoints.copies.get(&volume);
        if copy.is_none_or(|copy| copy.id != id) {
            return;
        }
        let pipeline = self.graph.pipeline_of(volume);
        self.checkpoints.remove(volume, pipeline);
        let state = self.volumes.get(id).map(|instance| instance.state);
        let decision = match state {
            Some(State::Copy) => Decision::Unused,
            _ => Decision::Failed,
        };
        self.checkpoints.decide(volume, decision);
    }

    /// Asserts that the copies that are known are those that exist.
    pub(super) fn check_copies(&self) {
        let exist = self
            .volumes
            .iter()
            .filter(|(_, instance)| matches!(instance.state, State::Copying | State::Copy));
        let exist: BTreeMap<_, _> = exist.map(|(id, i)| (i.volume, id)).collect();
        let known = self.checkpoints.copies.iter();
        let known: BTreeMap<_, _> = known.map(|(volume, copy)| (*volume, copy.id)).collect();
        assert_eq!(exist, known, "copies");
        assert_eq!(
            known.len(),
            self.checkpoints.by_pipeline.len(),
            "copies by pipeline"
        );
    }
}
