//! How unevenly blocks of cooperative caches are spread over their parts, as nodes tell: so much
//! more than its size the next cache is made. Moves no block and makes no cache.

use std::collections::BTreeMap;

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_workflow::VolumeIndex;

use crate::policy::View;
use crate::space::scale_up;
use crate::state::cache_statistics::CacheInspection;
use crate::state::volumes::InstanceState;

/// What the parts of a cache are asked.
#[derive(Debug)]
pub(crate) struct InspectionPlan {
    /// What is awaited of them.
    pub(crate) inspection: CacheInspection,
    /// Those that are asked.
    pub(crate) parts: Vec<(VolumeId, ServerId)>,
}

impl View<'_> {
    /// Another reader of a cache is done: after the first, the second, the fourth and so on its
    /// parts are asked what they keep of it. Where several are as large as the cache they tell
    /// nothing.
    pub(crate) fn plan_inspection(&self, volume: VolumeIndex) -> Option<InspectionPlan> {
        let node = self.graph.volume(volume);
        if !node.is_cache {
            return None;
        }
        let left = node.users_left as usize;
        let readers = self.graph.workflow.volume(volume).users.len();
        if !readers.saturating_sub(left).is_power_of_two() {
            return None;
        }
        let parts = self.volumes.live(volume).values();
        let size = self.size_of(volume).bytes;
        let part = |id: &VolumeId| {
            let instance = self.volumes.get(*id)?;
            (instance.state == InstanceState::Ready).then_some((*id, instance.server?))
        };
        let parts: Vec<(VolumeId, ServerId)> = parts.filter_map(part).collect();
        let mut by_group: BTreeMap<String, Vec<(VolumeId, ServerId)>> = BTreeMap::new();
        for part in parts {
            if let Some(node) = self.fleet.get(part.1) {
                let group = node.seen.group.clone();
                by_group.entry(group).or_default().push(part);
            }
        }
        let is_whole = |(id, _): &(VolumeId, ServerId)| {
            let instance = self.volumes.get(*id);
            instance.is_some_and(|instance| instance.size.bytes >= size)
        };
        by_group.retain(|_, parts| parts.len() == 1 || !parts.iter().any(is_whole));
        let is_even = |parts: &[(VolumeId, ServerId)]| {
            parts.len() > 1 && are_of_one_division(parts) && self.hold_all(parts, size)
        };
        let divided = by_group.iter().filter(|(_, parts)| is_even(parts));
        let left = divided.map(|(group, parts)| (group.clone(), parts.len()));
        let inspection = CacheInspection {
            left: left.collect(),
            ..CacheInspection::default()
        };
        let parts = by_group.into_values().flatten().collect();
        Some(InspectionPlan { inspection, parts })
    }

    /// How unevenly the blocks of a cache are spread over the parts in the group of `server`, in
    /// thousandths. Nothing before all of them have told what they keep.
    pub(crate) fn imbalance_of(&self, volume: VolumeIndex, server: ServerId) -> Option<u64> {
        let (asked, node) = (
            self.load_imbalance.asked.get(&volume)?,
            self.fleet.get(server)?,
        );
        if asked.left.get(&node.seen.group) != Some(&0) {
            return None;
        }
        let kept = &asked.kept;
        let peers = self.fleet.group_of(server);
        let parts = peers.filter_map(|(peer, _)| self.volumes.live_at(volume, Some(peer)));
        let part = |id: VolumeId| Some((self.volumes.get(id)?.size.bytes, *kept.get(&id)?));
        let parts: Option<Vec<(u64, u64)>> = parts.map(part).collect();
        unevenness(&parts?, self.size_of(volume).bytes)
    }

    /// Whether parts are as large together as the cache. Where one is lost they are not, and keep
    /// what was its part.
    fn hold_all(&self, parts: &[(VolumeId, ServerId)], size: u64) -> bool {
        let instances = parts.iter().filter_map(|(id, _)| self.volumes.get(*id));
        let bytes = instances.map(|it| it.size.bytes);
        bytes.fold(0, u64::saturating_add) >= size
    }

    /// The size of a cache, and a part more for blocks that are not spread evenly.
    pub(crate) fn with_imbalance(&self, bytes: u64) -> u64 {
        with_imbalance(bytes, self.load_imbalance.permille())
    }
}

/// As much, and so many thousandths more.
pub(crate) fn with_imbalance(bytes: u64, permille: u64) -> u64 {
    bytes.saturating_add(scale_up(bytes, permille, 1000))
}

/// Whether no part of a group came later than the others, which keep what is its part now. Parts
/// of one division have ids that follow each other.
fn are_of_one_division(parts: &[(VolumeId, ServerId)]) -> bool {
    let ids = || parts.iter().map(|(id, _)| id.0);
    let (Some(first), Some(last)) = (ids().min(), ids().max()) else {
        return false;
    };
    last - first == parts.len() as u128 - 1
}

/// How much more than its share by size the fullest part of a cache of `size` keeps, in
/// thousandths; `parts` are their sizes and what they keep. Nothing where less than half of the
/// cache has come, or where a part has just begun: the others keep its share until it has that.
fn unevenness(parts: &[(u64, u64)], size: u64) -> Option<u64> {
    let sum = |of: fn(&(u64, u64)) -> u64| parts.iter().map(of).fold(0, u64::saturating_add);
    let (room, kept) = (sum(|part| part.0), sum(|part| part.1));
    if kept < size / 2 || kept == 0 {
        return None;
    }
    let share = |part: &(u64, u64)| scale_up(part.0, kept, room).max(1);
    if parts.iter().any(|part| part.1 < share(part) / 2) {
        return None;
    }
    let more = parts
        .iter()
        .map(|part| scale_up(part.1.saturating_sub(share(part)), 1000, share(part)));
    more.max()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::cache_statistics::IMBALANCE_PERMILLE_FIRST;
    use crate::state::cache_statistics::LoadImbalance;

    #[test]
    fn load_imbalance_follows_the_most_uneven_cache() {
        let mut load_imbalance = LoadImbalance::default();
        assert_eq!(load_imbalance.permille(), IMBALANCE_PERMILLE_FIRST);
        for (volume, found, expected) in [(1, 50, 50), (2, 90, 90), (2, 40, 50), (1, 0, 40)] {
            load_imbalance.note(VolumeIndex(volume), found);
            assert_eq!(load_imbalance.permille(), expected);
        }
    }

    #[test]
    fn imbalance_is_that_of_the_fullest_partition() {
        assert_eq!(unevenness(&[(50, 50), (50, 50)], 100), Some(0));
        assert_eq!(unevenness(&[(50, 60), (50, 40)], 100), Some(200));
        // As its part is larger, more is its share.
        assert_eq!(unevenness(&[(75, 75), (25, 25)], 100), Some(0));
    }

    #[test]
    fn partly_filled_cache_has_no_imbalance() {
        assert_eq!(unevenness(&[(50, 30), (50, 19)], 100), None);
        assert_eq!(unevenness(&[(50, 50), (50, 50), (50, 0)], 100), None);
        assert_eq!(unevenness(&[], 0), None);
    }

    #[test]
    fn learned_imbalance_is_bounded() {
        let permille = |found: &[u64]| {
            let mut load_imbalance = LoadImbalance::default();
            for (at, found) in (0..).zip(found) {
                load_imbalance.note(VolumeIndex(at), *found);
            }
            load_imbalance.permille()
        };
        assert_eq!(permille(&[]), IMBALANCE_PERMILLE_FIRST);
        assert_eq!(
            [permille(&[0]), permille(&[60, 40]), permille(&[900])],
            [20, 60, 300]
        );
    }
}
