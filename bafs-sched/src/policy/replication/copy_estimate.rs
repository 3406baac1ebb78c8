//! Whether a copy of a scratch volume on another node is worth its cost. How long copying takes is
//! measured, not assumed. Which copies go says `policy/replication/obsolete_copies.rs`, how they
//! are made `transition/copies.rs`.
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
use bafs_workflow::{JobIndex, VolumeIndex};

use super::copy_policy::Replication;
use crate::action::MountedVolume;
use crate::decision::Decision;
use crate::policy::View;
use crate::state::copy_costs::{CopyDecision, CopyOutcome, benefit_us};
use crate::state::jobs::JobState;
use crate::state::scheduler_state::Phase;

/// Nodes that are looked at for a copy: one may be where the volume is, some may lack files.
const TARGETS_MAX: usize = 8;

/// What becomes of the copies of a volume when a writer of it is done.
#[derive(Debug)]
pub(crate) enum CopyVerdict {
    /// Nothing is known of a volume on a node.
    Unchanged,
    /// No copy is of use.
    DropAll,
    /// A copy is made by this estimate.
    Make(CopyDecision, Decision),
    /// None is made, and an older one stays.
    KeepOlder(CopyDecision),
    /// None is worth its cost.
    Drop(CopyDecision),
}

/// Judges whether a copy of what a volume holds now is worth its cost.
pub(crate) fn judge_copy(
    view: View<'_>,
    policy: &dyn Replication,
    volume: VolumeIndex,
) -> CopyVerdict {
    let is_needed = view.graph.volume(volume).users_left > 0;
    if !policy.is_active()
        || !is_needed
        || view.settings.has_private_data_at_home()
        || view.phase != Phase::Running
    {
        return CopyVerdict::DropAll;
    }
    let Some((id, Some(server))) = view.volumes.scratch(volume) else {
        return CopyVerdict::Unchanged;
    };
    let source = MountedVolume {
        volume,
        id,
        server: Some(server),
    };
    let target = target_of_copy(view, source);
    let mut estimate = weigh(view, volume, server, target);
    let is_worth = policy.is_worthwhile(view, volume, &estimate);
    estimate.outcome = match target {
        _ if !is_worth => CopyOutcome::NotWorthwhile,
        None => CopyOutcome::NoRoom,
        Some(target) => CopyOutcome::Copying(target),
    };
    if let CopyOutcome::Copying(server) = estimate.outcome {
        let base = view.older_copy(volume).filter(|_| estimate.has_base_copy);
        let base_copy = base.map(|(id, _)| id);
        let decision = Decision::CopyVolume {
            source,
            server,
            base_copy,
        };
        return CopyVerdict::Make(estimate, decision);
    }
    match is_worth_keeping(view, policy, volume, &estimate) {
        true => CopyVerdict::KeepOlder(estimate),
        false => CopyVerdict::Drop(estimate),
    }
}

fn weigh(
    view: View<'_>,
    volume: VolumeIndex,
    source: ServerId,
    target: Option<ServerId>,
) -> CopyDecision {
    let redo_ms = redo_ms(view, volume, view.copied_writers(volume));
    let users = u64::from(view.graph.volume(volume).users_left);
    let exposure_ms = users.saturating_mul(view.checkpoints.mean_attempt_ms());
    let risk_ppm = view.checkpoints.risk_ppm(exposure_ms);
    let (size, held_bytes) = (view.size_of(volume), view.held_bytes(volume));
    let older = view.older_copy(volume).and_then(|(_, older)| older.server);
    let is_further = target.is_some() && target == older;
    let copy_ms = target.and_then(|target| match is_further {
        true => view
            .checkpoints
            .further_ms(volume, (source, target), held_bytes),
        false => view.checkpoints.copy_ms((source, target), held_bytes),
    });
    let wait_ms = |copy_ms: u64| match is_written_again(view, volume) {
        true => copy_ms,
        false => view.checkpoints.waiting_ms(copy_ms),
    };
    let space_ms = |target| space_ms(view, target, size.bytes, size.bytes, exposure_ms);
    let space_ms = target.map_or(0, space_ms);
    let is_cheap = |ms| {
        view.checkpoints
            .is_cheap(space_ms.saturating_add(ms), redo_ms)
    };
    CopyDecision {
        decided_at: view.now,
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
fn is_written_again(view: View<'_>, volume: VolumeIndex) -> bool {
    let mut writers = view.graph.volume(volume).writers.iter();
    writers.any(|writer| view.graph.state(*writer) != JobState::Done)
}

/// Whether an older copy is worth its space on: it spares what was done before it, while no
/// newer one is made.
fn is_worth_keeping(
    view: View<'_>,
    policy: &dyn Replication,
    volume: VolumeIndex,
    estimate: &CopyDecision,
) -> bool {
    let Some((_, older)) = view.older_copy(volume) else {
        return false;
    };
    let Some(server) = older.server else {
        return false;
    };
    let spared_ms = redo_ms(view, volume, &[]).saturating_sub(estimate.redo_ms);
    let space_ms = space_ms(view, server, 0, older.size.bytes, estimate.exposure_ms);
    policy.keeps_older(estimate, spared_ms, space_ms)
}

/// Slots' time of the finished jobs that would run again if the volume were lost, besides those
/// of whose output there is a copy. With it goes what else is on its node.
pub(crate) fn redo_ms(view: View<'_>, volume: VolumeIndex, copied: &[JobIndex]) -> u64 {
    let lost_server = view.volumes.scratch(volume).and_then(|(_, server)| server);
    let is_left = |input: &VolumeIndex| {
        let there = view.volumes.scratch(*input);
        let is_beside = there.is_some_and(|(_, server)| server != lost_server);
        is_beside || view.good_copy(*input).is_some()
    };
    let mut sum: u64 = 0;
    let mut seen: BTreeSet<JobIndex> = copied.iter().copied().collect();
    let mut lost = vec![volume];
    while let Some(volume) = lost.pop() {
        for &writer in &view.graph.volume(volume).writers {
            if view.graph.state(writer) != JobState::Done || !seen.insert(writer) {
                continue;
            }
            sum = sum.saturating_add(view.graph.job(writer).took_ms);
            let inputs = view.graph.mounted(writer).into_iter();
            let scratch = inputs
                .map(|(input, _)| input)
                .filter(|input| !view.graph.volume(*input).is_cache);
            lost.extend(scratch.filter(|input| !is_left(input)));
        }
    }
    sum
}

/// Time for which a copy keeps other work waiting: none while its node has room for a job in
/// every free slot besides, or nothing waits. Of its bytes so many have yet to be `taken`.
fn space_ms(view: View<'_>, target: ServerId, taken: u64, bytes: u64, exposure_ms: u64) -> u64 {
    let one = view.scratch_need_max.bytes.max(1);
    let slots = u64::from(view.fleet.free_slots(target)).max(1);
    let left = view.fleet.available(target).bytes.saturating_sub(taken);
    if view.queues.is_empty() || left >= one.saturating_mul(slots) {
        return 0;
    }
    let displaced = u128::from(exposure_ms) * u128::from(bytes) / u128::from(one);
    u64::try_from(displaced).unwrap_or(u64::MAX)
}

/// Where a copy goes: to the node of the older one if that has room for both, else to the one
/// with most room besides the one that has the volume; to a slow one if there is no other.
pub(crate) fn target_of_copy(view: View<'_>, source: MountedVolume) -> Option<ServerId> {
    let size = view.size_of(source.volume);
    let older = view.older_copy(source.volume);
    let older = older.and_then(|(_, older)| older.server);
    // All further ones have less room.
    let roomy = view.fleet.roomiest().take(TARGETS_MAX);
    let has_room = |server: &ServerId| {
        Some(*server) != source.server
            && !view.fleet.is_draining(*server)
            && view.fleet.available(*server).can_hold(size)
    };
    let mut targets = older.into_iter().chain(roomy).filter(has_room);
    let is_quick = |server: &ServerId| !view.checkpoints.overdue.is_slow(*server);
    let first = targets.next()?;
    match is_quick(&first) {
        true => Some(first),
        false => targets.find(is_quick).or(Some(first)),
    }
}
