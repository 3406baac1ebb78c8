//! Which data of a workload are allocated at once, as limits that a strategy gives the scheduler:
//! how many pipelines may be under way, how many batch volumes exist, and in which order jobs go.
//! Limits never make a workflow impossible: when they block it, they give way.

use bafs_workflow::{JobIndex, VolumeIndex};

use crate::decision::LimitRelaxation;
use crate::policy::View;

/// What the limits say of a start.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum LimitVerdict {
    /// It may happen.
    Admitted,
    /// It may happen once these batch volumes have gone, of which nobody reads any now.
    AfterEviction(Vec<VolumeIndex>),
    /// It may not.
    Refused,
    /// It may not, as no batch volume may go for a job of its level.
    NoBatchRoom,
}

impl View<'_> {
    /// Whether the limits let a job start now. A batch volume that nobody needs now gives way to
    /// one that this job needs.
    pub(crate) fn check_limits(&self, job: JobIndex) -> LimitVerdict {
        let Some(limits) = &self.limits else {
            return LimitVerdict::Admitted;
        };
        if !limits.admits(self.graph.pipeline(job)) {
            return LimitVerdict::Refused;
        }
        let missing = self.missing_batch(job);
        if missing.is_empty() {
            return LimitVerdict::Admitted;
        }
        let level = self.graph.level(job);
        if limits.full_from.is_some_and(|from| from <= level) {
            return LimitVerdict::Refused;
        }
        let is_live = |volume: &&VolumeIndex| self.volumes.is_live(**volume);
        let existing = limits.batch.iter().filter(is_live);
        let most = limits.rules.batch_volumes_max.max(missing.len() as u64);
        let wanted = existing.clone().count() as u64 + missing.len() as u64;
        let excess = wanted.saturating_sub(most);
        let may_go = |volume: &&VolumeIndex| {
            !missing.contains(volume) && self.may_batch_volume_go(**volume, level)
        };
        let going = existing.filter(may_go).take(excess as usize);
        let going: Vec<VolumeIndex> = going.copied().collect();
        match (going.len() as u64) < excess {
            true => LimitVerdict::NoBatchRoom,
            false => LimitVerdict::AfterEviction(going),
        }
    }

    /// Whether one of the batch volumes may go for which jobs wait, or is gone.
    pub(crate) fn has_batch_room_again(&self) -> bool {
        let Some(limits) = &self.limits else {
            return false;
        };
        let Some(level) = limits.full_from else {
            return false;
        };
        let is_kept = |volume: &VolumeIndex| {
            self.volumes.is_live(*volume) && !self.may_batch_volume_go(*volume, level)
        };
        !limits.batch.iter().all(is_kept)
    }

    /// How limits give way that block the workflow: the part that is under way takes no further
    /// pipelines, else batch volumes go that nobody uses, else the limits. Nothing without limits.
    pub(crate) fn relax_limits(&self) -> Option<LimitRelaxation> {
        let limits = self.limits.as_ref()?;
        let live = limits.batch.iter().filter(|v| self.volumes.is_live(**v));
        let live: Vec<VolumeIndex> = live.copied().collect();
        if limits.under_way > 0 && !limits.is_full() && limits.rules.has_sequential_parts {
            // Where volumes lie, fewer pipelines fit than their bytes alone would let.
            return Some(LimitRelaxation::ClosePart);
        }
        let is_full = live.len() as u64 >= limits.rules.batch_volumes_max;
        Some(match !live.is_empty() && is_full {
            // Nothing is under way, so nobody uses them.
            true => LimitRelaxation::EvictBatch(live),
            false => LimitRelaxation::DropAll,
        })
    }

    /// Batch volumes of a job that do not exist.
    fn missing_batch(&self, job: JobIndex) -> Vec<VolumeIndex> {
        let mounts = self.graph.workflow.job(job).mounts.iter();
        let missing = mounts
            .map(|mount| mount.volume)
            .filter(|volume| self.graph.is_batch(*volume) && !self.volumes.is_live(*volume));
        missing.collect()
    }

    /// Whether a batch volume may go so that another one exists for a job of this level: no job
    /// that may start soon, or runs, reads it, and no pipeline that is behind is still to come.
    ///
    /// Pipelines that were rolled back are not waited for: they go after the others, and fetch
    /// again what they need. Of a volume that several levels read, it is not known which are still
    /// to come.
    fn may_batch_volume_go(&self, volume: VolumeIndex, level: u32) -> bool {
        let (node, Some(limits)) = (self.graph.volume(volume), &self.limits) else {
            return true;
        };
        // Pipelines that cannot begin before others have ended need nothing now.
        let (near, to_come) = match limits.is_full() {
            true => (
                node.users_near - node.users_outside,
                node.users_steady - node.steady_outside,
            ),
            false => (node.users_near, node.users_steady),
        };
        let is_behind = |stage: &u32| *stage <= level;
        near == 0 && (to_come == 0 || !limits.stage.get(&volume).is_some_and(is_behind))
    }
}
