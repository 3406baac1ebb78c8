//! Jobs that leave the node that has their data, because others have nothing to do: when waiting
//! would cost more than reading over the network.

use bafs_proto::ids::ServerId;
use bafs_workflow::JobIndex;

use crate::policy::View;

/// Bound jobs that are looked at for one that could run elsewhere.
const AWAY_LOOKED_AT: usize = 64;

/// Bound jobs that are tried elsewhere at a time.
const AWAY_TRIED: usize = 2;

impl View<'_> {
    /// Jobs that wait for a slot of the node that has their data, and had better go elsewhere.
    pub(crate) fn jobs_better_away(&self) -> Vec<JobIndex> {
        let bound = self.queues.bound().take(AWAY_LOOKED_AT);
        // Where a slot is free, all that could start there has.
        let is_held_back = !self.packs_volumes();
        let is_stuck = |(_, server): &(JobIndex, ServerId)| {
            is_held_back || self.fleet.free_slots(*server) == 0
        };
        bound
            .filter(is_stuck)
            .filter(|(job, server)| self.is_better_away(*job, *server))
            .map(|(job, _)| job)
            .take(AWAY_TRIED)
            .collect()
    }

    /// Whether a job would wait longer for a slot of its node than it takes to move its data over
    /// the network once. Before a barrier all wait for the last, so the queue counts as a whole.
    fn is_better_away(&self, job: JobIndex, server: ServerId) -> bool {
        if self.packs_volumes() || self.fleet.is_draining(server) {
            return true;
        }
        let slots = self.fleet.get(server).map_or(1, |node| node.seen.slots);
        let waiting = self.queues.length(server) as u64;
        let wall_ms = self.checkpoints.mean_wall_ms();
        let wait_ms = wall_ms.saturating_mul(waiting) / u64::from(slots.max(1));
        let mounted = self.graph.mounted(job).into_iter();
        let there = mounted.filter(|(volume, _)| {
            let is_cache = self.graph.volume(*volume).is_cache;
            !is_cache && self.volumes.live_at(*volume, Some(server)).is_some()
        });
        let bytes = there.fold(0u64, |sum, (volume, _)| {
            sum.saturating_add(self.held_bytes(volume))
        });
        self.checkpoints.expected_ms((server, server), bytes) < wait_ms
    }
}
