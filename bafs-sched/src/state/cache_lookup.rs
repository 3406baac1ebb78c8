//! Where parts of caches are: of which a group has one, which are being deleted, and which came
//! before their readers.

use std::collections::BTreeSet;

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::action::Action;
use crate::space::Space;
use crate::state::batch_sets::BatchSets;
use crate::state::prefetch::Ahead;
use crate::state::scheduler_state::State;

impl State {
    /// The part of a cache that a job on `server` mounts: its node's own, else one of the group,
    /// which the job's number picks so that readers spread.
    pub(crate) fn part_for(
        &self,
        volume: VolumeIndex,
        server: ServerId,
        job: JobIndex,
    ) -> Option<(VolumeId, ServerId)> {
        if let Some(id) = self.volumes.live_at(volume, Some(server)) {
            return Some((id, server));
        }
        let parts: Vec<(VolumeId, ServerId)> = self.parts_in_group(volume, server).collect();
        parts.get(job.as_usize() % parts.len().max(1)).copied()
    }

    /// The parts of a cache in the group of `server`, with their nodes, in the order of these.
    /// Looks at the nodes or at the parts, whichever are fewer: where many nodes have none, who
    /// looks for each of them at all others never comes to an end.
    fn parts_in_group(
        &self,
        volume: VolumeIndex,
        server: ServerId,
    ) -> impl Iterator<Item = (VolumeId, ServerId)> {
        let parts = self.volumes.live(volume);
        let is_scattered = parts.len() < self.fleet.group_size(server);
        let all = is_scattered.then(|| self.volumes.parts(volume));
        let all = all.into_iter().flatten();
        let here = all.filter(move |(_, holder)| self.fleet.is_together(*holder, server));
        let peers = (!is_scattered).then(|| self.fleet.group_of(server));
        let of_peers = peers.into_iter().flatten().filter_map(move |(peer, _)| {
            let id = self.volumes.live_at(volume, Some(peer))?;
            Some((id, peer))
        });
        here.chain(of_peers)
    }

    /// Whether a node of the group of `server` holds a part of a cache.
    pub(crate) fn is_cached_in_group(&self, volume: VolumeIndex, server: ServerId) -> bool {
        let mut parts = self.parts_in_group(volume, server);
        self.volumes.is_live(volume) && parts.next().is_some()
    }

    /// What the group of `server` holds of a cache, in bytes; nothing when it holds no part.
    pub(crate) fn cached_in_group(&self, volume: VolumeIndex, server: ServerId) -> Option<u64> {
        if !self.volumes.is_live(volume) {
            return None;
        }
        let parts = self.parts_in_group(volume, server);
        let sizes = parts.filter_map(|(id, _)| Some(self.volumes.get(id)?.size.bytes));
        sizes.fold(None, |sum, bytes| Some(sum.unwrap_or(0) + bytes))
    }

    /// What batch volumes still need of the group of a node, in bytes, so that all are there which
    /// one stage reads at once, when those of `made` are there too. Volumes of other stages will
    /// have gone by then.
    pub(crate) fn lacking_batch(&self, server: ServerId, made: &BTreeSet<VolumeIndex>) -> u64 {
        let BatchSets { sets, all } = &self.graph.batch;
        let is_there = |volume: &VolumeIndex| {
            made.contains(volume) || self.is_cached_in_group(*volume, server)
        };
        let there: BTreeSet<VolumeIndex> = all.iter().copied().filter(is_there).collect();
        let size = |sum: u64, volume: &VolumeIndex| sum.saturating_add(self.size_of(*volume).bytes);
        let lacking = sets.iter().map(|set| {
            let absent = set.difference(&there);
            let absent = absent.filter(|volume| self.graph.volume(**volume).users_left > 0);
            let others = there.difference(set).fold(0, size);
            absent.fold(0, size).saturating_sub(others)
        });
        lacking.max().unwrap_or(0)
    }

    /// What was asked of the parts of the volume that comes before its readers.
    pub(crate) fn asked_to_warm(&self) -> Vec<Action> {
        let ahead = self.prefetching.ahead.iter();
        let parts = ahead.flat_map(|ahead| &ahead.asked);
        let action = |&id: &VolumeId| {
            let server = self.volumes.get(id)?.server?;
            Some(Action::WarmCache { id, server })
        };
        parts.filter_map(action).collect()
    }

    /// Whether a part of the volume that was made before its readers lies on this node.
    pub(crate) fn is_warmed_on(&self, server: ServerId) -> bool {
        self.warmed_part(server).is_some()
    }

    fn warmed_part(&self, server: ServerId) -> Option<VolumeId> {
        let is_spare =
            |ahead: &&Ahead| ahead.is_made && self.graph.volume(ahead.volume).users_near == 0;
        let made = self.prefetching.ahead.as_ref().filter(is_spare)?;
        self.volumes.live_at(made.volume, Some(server))
    }

    /// The room on this node of the volume that was made before its readers: nothing that has begun
    /// needs it.
    pub(crate) fn warmed_on(&self, server: ServerId) -> Space {
        let part = self.warmed_part(server);
        let instance = part.and_then(|id| self.volumes.get(id));
        instance.map_or(Space::ZERO, |instance| instance.size)
    }
}
