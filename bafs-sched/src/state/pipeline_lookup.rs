//! Where pipelines that have begun are at home, and what a strategy's limits let come yet.

use bafs_proto::ids::ServerId;
use bafs_workflow::VolumeIndex;

use crate::state::planned_volumes::Create;
use crate::state::scheduler_state::State;

impl State {
    /// Pipelines that have created scratch volumes and are not at their end.
    pub(crate) fn pipelines_at_home(&self) -> impl Iterator<Item = u32> {
        self.claims.home.keys().copied()
    }

    /// Whether a pipeline has created scratch volumes and is not at its end.
    pub(crate) fn is_under_way(&self, pipeline: u32) -> bool {
        self.claims.home.contains_key(&pipeline)
    }

    /// Whether a pipeline created scratch volumes on this node last.
    pub(crate) fn is_at_home(&self, pipeline: u32, server: ServerId) -> bool {
        self.claims.home.get(&pipeline) == Some(&server)
    }

    /// Where a pipeline created scratch volumes last.
    pub(crate) fn home_of(&self, pipeline: u32) -> Option<ServerId> {
        self.claims.home.get(&pipeline).copied()
    }

    /// How often rules blocked the workflow and gave way.
    pub fn rule_relaxations(&self) -> u64 {
        self.rules_eased
    }

    /// Whether batch volumes that the rules let exist beside those that do are still to come: they
    /// need what nobody else does.
    pub(crate) fn awaits_batch(&self) -> bool {
        let Some(limits) = &self.limits else {
            return false;
        };
        let is_live = |volume: &&VolumeIndex| self.volumes.is_live(**volume);
        let live = limits.batch.iter().filter(is_live).count() as u64;
        let is_to_come = |volume: &VolumeIndex| {
            let is_read = self.graph.volume(*volume).users_left > 0;
            is_read && self.graph.is_batch(*volume) && !self.volumes.is_live(*volume)
        };
        live < limits.rules.batch_volumes_max && limits.caches.iter().any(is_to_come)
    }

    /// What the batch volumes that the rules let come yet need at most, in bytes, beside those that
    /// exist and those of `made`.
    pub(crate) fn batch_bytes_to_come(&self, made: &[Create]) -> u64 {
        let Some(limits) = &self.limits else {
            return 0;
        };
        let is_made = |volume: &VolumeIndex| made.iter().any(|(it, ..)| it == volume);
        let exists = |volume: &VolumeIndex| self.volumes.is_live(*volume) || is_made(volume);
        let is_to_come = |volume: &&VolumeIndex| {
            let is_read = self.graph.volume(**volume).users_left > 0;
            is_read && self.graph.is_batch(**volume) && !exists(volume)
        };
        let to_come = limits.caches.iter().filter(is_to_come);
        let mut sizes: Vec<u64> = to_come.map(|volume| self.size_of(*volume).bytes).collect();
        sizes.sort_unstable_by_key(|bytes| std::cmp::Reverse(*bytes));
        let caches = limits.caches.iter();
        let existing = caches.filter(|v| self.graph.is_batch(**v) && exists(v));
        let more = limits.rules.batch_volumes_max;
        let more = more.saturating_sub(existing.count() as u64);
        let largest = sizes
            .iter()
            .take(usize::try_from(more).unwrap_or(usize::MAX));
        largest.fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }
}
