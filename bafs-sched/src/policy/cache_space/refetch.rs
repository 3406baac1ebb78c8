//! What crossed the link more than once as a cache is too small for what its jobs read: the user is
//! told, and nothing is decided.

use std::collections::BTreeMap;

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_workflow::VolumeIndex;

use crate::describe::{bytes_only, describe_bytes};
use crate::policy::View;
use crate::state::volumes::InstanceState;

/// So many thousandths of a cache may come once more before anybody is told.
const REFETCHED_PERMILLE: u64 = 50;

impl View<'_> {
    /// The parts of a cache that are asked what they got once more, as another reader of it is
    /// done: after the first, the second, the fourth and so on. Where several are as large as the
    /// cache they have nothing to tell.
    pub(crate) fn parts_to_inspect(&self, volume: VolumeIndex) -> Vec<(VolumeId, ServerId)> {
        let node = self.graph.volume(volume);
        let readers = self.graph.workflow.volume(volume).users.len();
        let done = readers.saturating_sub(node.users_left as usize);
        if !node.is_cache || !done.is_power_of_two() {
            return Vec::new();
        }
        let size = self.size_of(volume).bytes;
        let mut by_group: BTreeMap<&str, Vec<(VolumeId, ServerId, bool)>> = BTreeMap::new();
        for id in self.volumes.live(volume).values() {
            let part = self.volumes.get(*id);
            let part = part.filter(|part| part.state == InstanceState::Ready);
            let Some((part, server)) = part.and_then(|part| Some((part, part.server?))) else {
                continue;
            };
            if let Some(node) = self.fleet.get(server) {
                let of_group = by_group.entry(&node.seen.group).or_default();
                of_group.push((*id, server, part.size.bytes >= size));
            }
        }
        by_group.retain(|_, parts| parts.len() == 1 || !parts.iter().any(|part| part.2));
        let parts = by_group.into_values().flatten();
        parts.map(|(id, server, _)| (id, server)).collect()
    }

    /// What the user is told of a cache of which so many bytes came once more; nothing where they
    /// are few.
    pub(crate) fn describe_refetch(&self, volume: VolumeIndex, bytes: u64) -> Option<String> {
        let declared = self.size_of(volume).bytes;
        (bytes > declared / 1000 * REFETCHED_PERMILLE).then(|| {
            format!(
                "{} of volume '{}' crossed the home link again: a cache of {} is too small and \
                 evicts blocks that jobs read again; declare a size 10 % above that of its source",
                describe_bytes(bytes_only(bytes)),
                self.graph.workflow.volume(volume).name,
                describe_bytes(bytes_only(declared)),
            )
        })
    }
}
