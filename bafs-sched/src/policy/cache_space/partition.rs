//! Cooperative caches: how much of one each node gets. It divides nothing that is
//! there already.

use std::collections::BTreeMap;

use bafs_proto::ids::ServerId;
use bafs_workflow::{JobIndex, VolumeIndex};

use super::partitioning::{CacheDivision, CachePlanning};
use crate::policy::View;
use crate::space::{Space, scale_up};
use crate::state::cache_parts::PART_BYTES_MIN;
use crate::state::planned_volumes::Create;

/// What a node takes of a cooperative cache that the others of its group hold already, in bytes,
/// where it can.
const PART_BYTES_GOOD: u64 = 4 << 20;

/// How often the room of a node is looked at, about, until a cache is divided.
const LOOKS_AT_ROOM: u64 = 8;

/// A cache is made so many thousandths larger than its size, as its blocks are not spread evenly
/// over the nodes. To learn how unevenly gained nothing (decision 0044).
const IMBALANCE_PERMILLE: u64 = 100;

/// How much of a cooperative cache each node gets.
pub(crate) type CachePartition = Vec<(ServerId, Space)>;

/// The size of a cache, and a part more for blocks that are not spread evenly.
pub(super) fn with_imbalance(bytes: u64) -> u64 {
    bytes.saturating_add(scale_up(bytes, IMBALANCE_PERMILLE, 1_000))
}

impl View<'_> {
    /// Adds what must be made of a cache so that a job can run on `server`. Nothing if it does not
    /// fit now.
    pub(crate) fn plan_cache(
        &self,
        planning: CachePlanning<'_>,
        job: JobIndex,
        volume: VolumeIndex,
        server: ServerId,
        taken: &mut BTreeMap<ServerId, Space>,
        creates: &mut Vec<Create>,
    ) -> Option<()> {
        let size = self.size_of(volume);
        if self.settings.caches_nothing() {
            if !self.volumes.is_live(volume) {
                creates.push((volume, None, size));
            }
            return Some(());
        }
        if self.volumes.live_at(volume, Some(server)).is_some() {
            return Some(());
        }
        let has = taken.get(&server).copied().unwrap_or_default();
        let left = self.fleet.available(server).saturating_sub(has);
        let is_single = self.graph.workflow.volume(volume).users.len() == 1;
        let partition = if is_single && left.can_hold(size) {
            vec![(server, size)]
        } else if self.is_cached_in_group(volume, server) {
            // A node that joined later, or whose part was lost. All parts are added up only where
            // volumes are packed: else idle nodes come here again and again.
            let have = self
                .packs_volumes()
                .then(|| self.cached_in_group(volume, server));
            let have = have.flatten();
            let bytes = match have {
                Some(have) => {
                    let lacking = size.bytes.saturating_sub(have).max(PART_BYTES_GOOD);
                    lacking.min(size.bytes).min(left.bytes)
                }
                None => self.late_part(size.bytes, left.bytes, server, has.bytes),
            };
            let is_enough = bytes >= size.bytes.min(PART_BYTES_MIN) && left.files >= size.files;
            let is_whole = have.is_some_and(|have| have >= size.bytes);
            let is_wanted = || !self.is_spare(left.bytes, bytes) || self.awaits_batch();
            if !is_enough || is_whole && is_wanted() {
                // It reads the cache at its peers.
                return Some(());
            }
            let files = size.files;
            vec![(server, Space { bytes, files })]
        } else {
            self.divide((job, creates), planning, volume, server, taken)?
        };
        for (node, part) in partition {
            let there = taken.entry(node).or_default();
            *there = there.saturating_add(part);
            creates.push((volume, Some(node), part));
        }
        Some(())
    }

    /// How the group of a node divides a cache of which it has no part yet.
    fn divide(
        &self,
        start: (JobIndex, &[Create]),
        planning: CachePlanning<'_>,
        volume: VolumeIndex,
        server: ServerId,
        taken: &BTreeMap<ServerId, Space>,
    ) -> Option<CachePartition> {
        let left = |node: ServerId| {
            let taken = taken.get(&node).copied().unwrap_or_default();
            self.fleet.available(node).saturating_sub(taken)
        };
        let rooms = self.rooms(planning, Some(start), server, taken, left);
        self.fleet.tally.add(LOOKS_AT_ROOM * rooms.len() as u64);
        let division = CacheDivision {
            volume,
            server,
            rooms: &rooms,
        };
        planning.partitioning.divide(*self, &division)
    }

    /// How the group of `server` divides a batch volume that nobody reads yet: only what scratch
    /// volumes of jobs in all slots leave, and caches that are `given` up for it. Nothing where
    /// that is less than the volume.
    pub(crate) fn partition_ahead(
        &self,
        planning: CachePlanning<'_>,
        volume: VolumeIndex,
        server: ServerId,
        given: &[VolumeIndex],
    ) -> Option<CachePartition> {
        let size = self.size_of(volume);
        let left = |node: ServerId| self.left_without(node, given);
        let mut rooms = self.rooms(planning, None, server, &BTreeMap::new(), left);
        rooms.retain(|room| room.left.files >= size.files);
        for room in &mut rooms {
            // Nobody reads it yet.
            room.is_placed = false;
        }
        let rooms: Vec<&Room> = rooms.iter().collect();
        let readers = u64::from(self.graph.volume(volume).users_left);
        let larger = with_imbalance(size.bytes);
        let keep = |room: &Room| room.scratch_all;
        partition_keeping(size, larger, &rooms, 0, readers, keep)
    }

    /// What a node has left when caches are given up.
    fn left_without(&self, server: ServerId, given: &[VolumeIndex]) -> Space {
        let parts = given.iter().filter_map(|cache| {
            let id = self.volumes.live_at(*cache, Some(server))?;
            Some(self.volumes.get(id)?.size)
        });
        parts.fold(self.fleet.available(server), Space::saturating_add)
    }

    /// What the group of a node has beside the scratch volumes of jobs in all slots when caches are
    /// given up, in bytes: a division looks at all that pipelines need, and this comes before it.
    pub(crate) fn spare_without(&self, server: ServerId, given: &[VolumeIndex]) -> u64 {
        let peers = self.fleet.group_of(server);
        let peers = peers.filter(|(_, node)| node.takes_work());
        let need = self.scratch_need_max.bytes;
        let spare = peers.map(|(peer, node)| {
            let all = need.saturating_mul(u64::from(node.seen.slots));
            let left = self.left_without(peer, given);
            left.bytes.saturating_sub(all)
        });
        spare.fold(0, u64::saturating_add)
    }

    /// What a node that has `left` takes of a cache that its group holds already: all, but for the
    /// scratch volumes of jobs in its free slots where that leaves a good part. The job that is
    /// placed has taken what it `has` of them. Without their room a slot would stay empty until the
    /// cache goes, and what runs there then brings the cache from home again.
    fn late_part(&self, size: u64, left: u64, server: ServerId, has: u64) -> u64 {
        let need = self.scratch_need_max.bytes;
        let slots = u64::from(self.fleet.free_slots(server));
        let all = need.saturating_mul(slots).saturating_sub(has);
        let part = |keep: u64| size.min(left.saturating_sub(keep));
        let is_good = |part: &u64| *part >= size.min(PART_BYTES_GOOD);
        let mut good = [all, need.saturating_sub(has)].map(part).into_iter();
        good.find(is_good).unwrap_or_else(|| part(0))
    }

    /// The parts of batch volumes that a node takes which came: those that its group lacks, before
    /// scratch volumes take its room. A cache that lacks a part of its size may find nothing again.
    pub(crate) fn parts_to_complete(&self, server: ServerId) -> Vec<(VolumeIndex, Space)> {
        let batch = self.limits.as_ref().map(|limits| limits.batch());
        let (mut parts, mut taken) = (Vec::new(), Space::ZERO);
        for volume in batch.into_iter().flatten() {
            let size = self.size_of(volume);
            let have = match self.volumes.live_at(volume, Some(server)) {
                Some(_) => None,
                None => self.cached_in_group(volume, server),
            };
            let left = self.fleet.available(server).saturating_sub(taken);
            let bytes = have.map_or(0, |have| size.bytes.saturating_sub(have).min(left.bytes));
            let part = Space {
                bytes,
                files: size.files,
            };
            if bytes >= PART_BYTES_GOOD
                && left.can_hold(part)
                && self.graph.volume(volume).is_needed()
            {
                taken = taken.saturating_add(part);
                parts.push((volume, part));
            }
        }
        parts
    }

    /// Whether as many scratch volumes fit into `left` bytes after some of them were given away.
    fn is_spare(&self, left: u64, given: u64) -> bool {
        let unit = self.scratch_volume_max;
        let fitting = |bytes: u64| bytes.checked_div(unit).unwrap_or(0);
        fitting(left) == fitting(left - given.min(left))
    }

    /// What the nodes of the group of `server` can give to a cooperative cache.
    /// The job that is placed has `taken` its scratch volumes already.
    fn rooms(
        &self,
        planning: CachePlanning<'_>,
        start: Option<(JobIndex, &[Create])>,
        server: ServerId,
        taken: &BTreeMap<ServerId, Space>,
        left: impl Fn(ServerId) -> Space,
    ) -> Vec<Room> {
        let peers = self.fleet.group_of(server);
        let peers = peers.filter(|(_, node)| node.takes_work());
        let need = self.scratch_need_max.bytes;
        let rooms = peers.map(|(peer, node)| {
            let has = taken.get(&peer).map_or(0, |taken| taken.bytes);
            let all = need.saturating_mul(u64::from(node.seen.slots));
            let start = start.filter(|_| peer == server);
            Room {
                server: peer,
                left: left(peer),
                to_end: (planning.to_end)(peer, start),
                pipeline: self.graph.courses.most.least.bytes.saturating_sub(has),
                scratch_one: need.saturating_sub(has),
                scratch_all: all.saturating_sub(has),
                is_placed: peer == server,
            }
        });
        rooms.collect()
    }
}

/// What a node can give to a cooperative cache, all in bytes but `left`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    pub(super) server: ServerId,
    pub(super) left: Space,
    /// What the pipelines at home there need to come to their end, one after the other.
    to_end: u64,
    /// What any pipeline may need to come to its end there.
    pipeline: u64,
    /// What the scratch volumes of one job may need there.
    scratch_one: u64,
    /// What the scratch volumes of jobs in all slots may need there.
    scratch_all: u64,
    /// Whether a reader is to start there. Others take a part when they run one.
    is_placed: bool,
}

/// Divides a cooperative cache of `size` among nodes: whole on each where that leaves room for
/// scratch volumes in every slot, for a whole pipeline, and for others that are read at the same
/// time; else in proportion to what is left, keeping room for the scratch volumes
/// of all slots, or of one job, or none, and, where that can be, for what the pipelines there need
/// to come to their end: who takes their room keeps them from going on. What a cache takes beyond
/// its size leaves room for all its `readers`: who waits for room reads it when it has gone, and
/// brings it from home again. Batch volumes that are read at the same time and are nowhere yet need
/// `others`, in bytes. Nothing if the sum is below the size.
pub(super) fn partition(
    size: Space,
    rooms: &[Room],
    others: u64,
    readers: u64,
) -> Option<CachePartition> {
    let rooms: Vec<_> = rooms
        .iter()
        .filter(|room| room.left.files >= size.files)
        .collect();
    let larger = with_imbalance(size.bytes);
    let keeps: [fn(&Room) -> u64; 6] = [
        |room| room.scratch_all.max(room.to_end),
        |room| room.scratch_one.max(room.to_end),
        |room| room.to_end,
        |room| room.scratch_all,
        |room| room.scratch_one,
        |_| 0,
    ];
    let mut partition = keeps
        .iter()
        .map(|keep| partition_keeping(size, larger, &rooms, others, readers, keep));
    partition.find_map(|partition| partition)
}

/// Divides a cooperative cache of `size`, or up to so many `larger` bytes, among nodes with room
/// for its files, each of which keeps so much. Nothing if the sum of what is left then is below the
/// size. The node where a reader is to start gets the least part that lets it run all the same:
/// where others only store, the whole cache might lie on those.
fn partition_keeping(
    size: Space,
    larger: u64,
    rooms: &[&Room],
    others: u64,
    readers: u64,
    keep: impl Fn(&Room) -> u64,
) -> Option<CachePartition> {
    let least = |room: &Room| match room.is_placed {
        true => PART_BYTES_MIN.min(size.bytes).min(room.left.bytes),
        false => 0,
    };
    let spare = |room: &Room| room.left.bytes.saturating_sub(keep(room));
    let total = rooms
        .iter()
        .fold(0u64, |sum, room| sum.saturating_add(spare(room)));
    if total < size.bytes {
        return None;
    }
    let on_each = readers.div_ceil(rooms.len().max(1) as u64);
    let beside_readers = rooms.iter().fold(0u64, |sum, room| {
        let scratch = room.scratch_one.saturating_mul(on_each).max(keep(room));
        // With less beside them nobody begins: he might not come to his end.
        let least = if readers == 0 { 0 } else { PART_BYTES_MIN };
        let scratch = scratch.saturating_add(least);
        sum.saturating_add(room.left.bytes.saturating_sub(scratch))
    });
    let wanted = larger.min(beside_readers.max(size.bytes));
    let is_whole = can_be_whole(size, rooms, others, &keep);
    let part = |room: &Room| match is_whole {
        true => size.bytes,
        false => scale_up(wanted, spare(room), total)
            .min(spare(room))
            .min(size.bytes)
            .max(least(room)),
    };
    let partition = rooms.iter().map(|room| {
        let bytes = part(room);
        (room.server, Space { bytes, ..size })
    });
    Some(partition.filter(|(_, part)| part.bytes > 0).collect())
}

/// Whether each node can have the whole of a cache, beside what it keeps, what its pipelines need
/// to end, and one pipeline more; and all together beside it `others`.
fn can_be_whole(size: Space, rooms: &[&Room], others: u64, keep: impl Fn(&Room) -> u64) -> bool {
    let spare = |room: &Room| {
        let kept = keep(room).max(room.to_end).max(room.pipeline);
        room.left.bytes.saturating_sub(kept)
    };
    let beside = rooms.iter().fold(0u64, |sum, room| {
        sum.saturating_add(spare(room).saturating_sub(size.bytes))
    });
    beside >= others && rooms.iter().all(|room| spare(room) >= size.bytes)
}

/// Divides a cooperative cache among nodes so that as many scratch volumes of `unit_bytes` as
/// possible still fit; with a part more for blocks that are not spread evenly, where that leaves
/// `beside` bytes for all else. Nothing if the nodes have less than the size.
pub(super) fn partition_beside(
    size: Space,
    rooms: &[Room],
    unit_bytes: u64,
    beside: u64,
) -> Option<CachePartition> {
    let left: u128 = rooms.iter().map(|room| u128::from(room.left.bytes)).sum();
    let larger = Space {
        bytes: with_imbalance(size.bytes),
        ..size
    };
    if left >= u128::from(larger.bytes) + u128::from(beside)
        && let Some(partition) = tight_partition(larger, rooms, unit_bytes)
    {
        return Some(partition);
    }
    tight_partition(size, rooms, unit_bytes)
}

/// Divides a cooperative cache of just `size` among nodes so that as many scratch volumes of
/// `unit_bytes` as possible still fit, evenly. Nothing if the nodes have less than the size.
pub(super) fn tight_partition(
    size: Space,
    rooms: &[Room],
    unit_bytes: u64,
) -> Option<CachePartition> {
    let rooms: Vec<_> = rooms
        .iter()
        .filter(|room| room.left.files >= size.files)
        .map(|room| (room.server, room.left.bytes))
        .collect();
    let units = |left: u64, most: u64| left.checked_div(unit_bytes).unwrap_or(0).min(most);
    let spare = |left: u64, most: u64| left - units(left, most) * unit_bytes;
    let total = |most: u64| {
        rooms
            .iter()
            .map(|(_, left)| u128::from(spare(*left, most)))
            .sum()
    };
    let wanted = u128::from(size.bytes);
    if wanted > total(0) {
        return None;
    }
    // The most units that every node can keep, as far as it has them.
    let (mut most, mut too_many) = (
        0,
        1 + rooms.iter().map(|room| units(room.1, u64::MAX)).max()?,
    );
    while most + 1 < too_many {
        let middle = most + (too_many - most) / 2;
        match total(middle) >= wanted {
            true => most = middle,
            false => too_many = middle,
        }
    }
    // Some can keep one more.
    let mut sum: u128 = total(most);
    let mut spares = Vec::with_capacity(rooms.len());
    for &(server, left) in &rooms {
        let (less, more) = (spare(left, most + 1), spare(left, most));
        let is_enough = sum - u128::from(more - less) >= wanted;
        sum -= if is_enough {
            u128::from(more - less)
        } else {
            0
        };
        spares.push((server, if is_enough { less } else { more }));
    }
    // Rounded as a whole: a byte too many could cost a scratch volume its place.
    let part = |spare: u128| (wanted * spare).checked_div(sum).unwrap_or(0) as u64;
    let mut before = 0;
    let partition = spares.into_iter().map(|(server, spare)| {
        let bytes = part(before + u128::from(spare)) - part(before);
        before += u128::from(spare);
        (
            server,
            Space {
                bytes,
                files: size.files,
            },
        )
    });
    Some(partition.filter(|(_, part)| part.bytes > 0).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    /// In megabytes.
    fn room(id: u64, size: u64, scratch_one: u64, slots: u64) -> Room {
        let left = Space {
            bytes: size * MB,
            files: 10,
        };
        Room {
            server: ServerId(id),
            left,
            to_end: 0,
            pipeline: 0,
            scratch_one: scratch_one * MB,
            scratch_all: scratch_one * slots * MB,
            is_placed: id == 1,
        }
    }

    fn bytes(size: u64, rooms: &[Room]) -> Option<Vec<u64>> {
        let partition = partition(
            Space {
                bytes: size * MB,
                files: 1,
            },
            rooms,
            0,
            0,
        )?;
        Some(
            partition
                .iter()
                .map(|(_, part)| part.bytes.div_ceil(MB))
                .collect(),
        )
    }

    #[test]
    fn cache_is_whole_where_it_fits_else_partitioned() {
        assert_eq!(
            bytes(50, &[room(1, 100, 10, 2), room(2, 80, 10, 2)]),
            Some(vec![50, 50])
        );
        // 80 and 40 are spare: 110 divided two to one.
        assert_eq!(
            bytes(100, &[room(1, 100, 10, 2), room(2, 60, 10, 2)]),
            Some(vec![74, 37])
        );
        // Only with room for one job per node.
        assert_eq!(
            bytes(135, &[room(1, 100, 10, 2), room(2, 60, 10, 2)]),
            Some(vec![90, 50])
        );
        assert_eq!(bytes(161, &[room(1, 100, 10, 2), room(2, 60, 10, 2)]), None);
        assert_eq!(bytes(1, &[]), None);
    }

    #[test]
    fn small_cache_is_whole_on_every_node() {
        let rooms: Vec<Room> = (1..=100).map(|id| room(id, 1_000, 300, 4)).collect();
        assert_eq!(bytes(20, &rooms), Some(vec![20; 100]));
    }

    #[test]
    fn cache_is_partitioned_where_pipelines_need_the_room() {
        let of = |pipeline: u64, to_end: u64, others: u64| {
            let rooms: Vec<Room> = (1..=4)
                .map(|id| Room {
                    pipeline: pipeline * MB,
                    to_end: if id == 2 { to_end * MB } else { 0 },
                    ..room(id, 100, 0, 1)
                })
                .collect();
            let size = Space {
                bytes: 40 * MB,
                files: 1,
            };
            let partition = partition(size, &rooms, others * MB, 0).expect("it fits");
            let bytes = partition.iter().map(|(_, part)| part.bytes.div_ceil(MB));
            bytes.collect::<Vec<u64>>()
        };
        assert_eq!(of(60, 0, 0), [40; 4]);
        assert_eq!(of(0, 60, 180), [40; 4]);
        assert_eq!(
            of(0, 60, 181),
            [13, 6, 13, 13],
            "no room for what is read with it"
        );
        assert_eq!(of(61, 0, 0), [11; 4], "no room for a pipeline more");
        // What is left beside their ends is 100, 20, 100 and 100.
        assert_eq!(
            of(0, 80, 0),
            [14, 3, 14, 14],
            "the second's pipelines could not end"
        );
    }

    #[test]
    fn fully_used_node_still_gets_a_small_partition() {
        let rooms = [
            room(1, 100, 50, 3),
            room(2, 200, 50, 0),
            room(3, 100, 50, 3),
        ];
        assert_eq!(bytes(60, &rooms), Some(vec![1, 60]));
    }

    #[test]
    fn extra_cache_space_leaves_room_for_all_readers() {
        let rooms: Vec<Room> = (1..=4).map(|id| room(id, 1_000, 10, 2)).collect();
        let taken = |readers| {
            let size = Space {
                bytes: 3_600 * MB,
                files: 1,
            };
            let partition = partition(size, &rooms, 0, readers).expect("it fits");
            partition.iter().map(|(_, part)| part.bytes).sum::<u64>() / MB
        };
        // A tenth more, if that leaves room for as many readers on each node, and a little.
        assert_eq!(taken(1), 3_918);
        assert_eq!(taken(24), 3_758);
        assert_eq!(taken(40), 3_600);
        // They cannot all have room: the others wait, as they must.
        assert_eq!(taken(4_000), 3_600);
    }

    /// The thesis' environment: 50 nodes of 5 GB (in MB here).
    #[test]
    fn tight_partitions_fit_the_most_scratch_volumes() {
        let rooms: Vec<Room> = (0..50).map(|id| room(id, 5_000, 0, 1)).collect();
        for (size, unit, volumes) in [(45_000, 500, 410), (225_000, 500, 50), (150_000, 2_500, 40)]
        {
            let partition = tight_partition(
                Space {
                    bytes: size * MB,
                    files: 1,
                },
                &rooms,
                unit * MB,
            )
            .unwrap();
            let sum: u64 = partition.iter().map(|(_, part)| part.bytes).sum();
            assert_eq!(sum, size * MB);
            let left = |id: u64| {
                let part = partition.iter().find(|(server, _)| server.0 == id);
                5_000 * MB - part.map_or(0, |(_, part)| part.bytes)
            };
            let kept: u64 = (0..50).map(|id| left(id) / (unit * MB)).sum();
            assert_eq!(kept, volumes);
        }
        assert_eq!(
            tight_partition(
                Space {
                    bytes: 250_001 * MB,
                    files: 1
                },
                &rooms,
                500 * MB
            ),
            None
        );
    }

    #[test]
    fn uneven_blocks_get_only_otherwise_unwanted_space() {
        let rooms: Vec<Room> = (1..=4).map(|id| room(id, 1_000, 10, 1)).collect();
        let taken = |beside| {
            let size = Space {
                bytes: 3_600 * MB,
                files: 1,
            };
            let partition = partition_beside(size, &rooms, 10 * MB, beside * MB).expect("it fits");
            partition.iter().map(|(_, part)| part.bytes).sum::<u64>() / MB
        };
        assert_eq!([0, 40, 41, 5_000].map(taken), [3_960, 3_960, 3_600, 3_600]);
    }

    #[test]
    fn partitions_always_hold_the_whole_cache() {
        for size in 1..=300 {
            for (a, b, c) in [(100, 100, 100), (1, 2, 297), (0, 150, 150)] {
                let partition = bytes(
                    size,
                    &[room(1, a, 0, 1), room(2, b, 0, 1), room(3, c, 0, 1)],
                );
                let sum: u64 = partition.expect("it fits").iter().sum();
                assert!(sum >= size, "{size}: {sum}");
            }
        }
    }
}
