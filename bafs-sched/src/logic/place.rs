//! Capacity-aware placement: which ready job starts where. A job gets a place only when all its
//! volumes fit; sizes and space are those declared and believed, nothing is measured here.

use std::collections::BTreeMap;

use bafs_proto::ids::ServerId;

use super::queues::Binding;
use super::scheduler::{Phase, Scheduler};
use super::space::{Space, scale_up};
use super::timers::Timer;
use crate::workflow::{JobIndex, VolumeIndex};

/// Jobs at the head of a queue that are tried before the queue sleeps: enough to pass jobs that
/// wait for another writer, few enough that a million waiting jobs cost nothing.
const LOOKAHEAD: usize = 16;

/// Part of a cooperative cache beyond its size, in thousandths, where there is room: blocks are
/// never spread quite evenly.
const SKEW_PERMILLE: u64 = 100;

/// The least that a node contributes to a cooperative cache, in bytes; a smaller cache is kept
/// whole.
const SHARE_BYTES_MIN: u64 = 4 << 20;

/// Nodes may appear one after the other; a fleet is judged so long after its first node, in
/// milliseconds.
const SETTLE_MS: u64 = 5_000;

/// A volume to create: which, where, how large.
type Create = (VolumeIndex, Option<ServerId>, Space);

impl Scheduler {
    /// Starts every job that can start, best first.
    pub(super) fn place_all(&mut self) {
        while let Some(binding) = self.queues.first_awake() {
            let heads = self.queues.heads(binding, LOOKAHEAD);
            if !heads.iter().any(|key| self.try_place(key.job, binding)) {
                self.queues.sleep(binding);
            }
        }
        if std::mem::take(&mut self.is_space_wanted) {
            self.free_idle_caches();
        }
    }

    /// Gives a job a place on the node that it is bound to, or on the best of all.
    pub(super) fn try_place(&mut self, job: JobIndex, binding: Binding) -> bool {
        if !self.may_start(job) {
            return false;
        }
        let candidates = binding.map_or_else(|| self.fleet.candidates(), |server| vec![server]);
        self.try_place_on(job, &candidates)
    }

    /// Gives a job a place on any node that can take it, however many must be looked at.
    pub(super) fn try_place_anywhere(&mut self, job: JobIndex) -> bool {
        let all: Vec<ServerId> = self.fleet.live().map(|(server, _)| server).collect();
        self.may_start(job) && self.try_place_on(job, &all)
    }

    fn try_place_on(&mut self, job: JobIndex, candidates: &[ServerId]) -> bool {
        let mounted = self.graph.mounted(job);
        for &server in candidates {
            let is_refused = self.graph.job(job).refused_by.contains(&server);
            if is_refused || self.fleet.free_slots(server) < self.slots_of(job) {
                continue;
            }
            if let Some(creates) = self.plan(&mounted, server) {
                self.patience = None;
                self.assign(job, server, creates);
                return true;
            }
            self.is_space_wanted = true;
        }
        false
    }

    /// Whether nothing but space and slots keeps a ready job from starting.
    fn may_start(&self, job: JobIndex) -> bool {
        let is_kept_back = self
            .protected
            .is_some_and(|pipeline| self.graph.pipeline(job) != pipeline);
        let mounted = self.graph.mounted(job);
        let mut written = mounted.iter().filter(|(_, writable)| *writable);
        !is_kept_back && !written.any(|(volume, _)| self.graph.volume(*volume).writer.is_some())
    }

    /// The volumes to create so that a job with these volumes can run on `server`, or nothing if
    /// one does not fit.
    fn plan(&self, mounted: &[(VolumeIndex, bool)], server: ServerId) -> Option<Vec<Create>> {
        let mut creates = Vec::new();
        let mut taken: BTreeMap<ServerId, Space> = BTreeMap::new();
        for &(volume, _) in mounted
            .iter()
            .filter(|(v, _)| !self.graph.volume(*v).is_cache)
        {
            if self.volumes.is_live(volume) {
                continue;
            }
            let target = (!self.settings.remote_io).then_some(server);
            let size = self.size_of(volume);
            if target.is_some() {
                let here = taken.entry(server).or_default();
                *here = here.plus(size);
            }
            creates.push((volume, target, size));
        }
        if !self
            .fleet
            .available(server)
            .holds(taken.get(&server).copied().unwrap_or_default())
        {
            return None;
        }
        for &(volume, _) in mounted
            .iter()
            .filter(|(v, _)| self.graph.volume(*v).is_cache)
        {
            self.plan_cache(volume, server, &mut taken, &mut creates)?;
        }
        Some(creates)
    }

    fn plan_cache(
        &self,
        volume: VolumeIndex,
        server: ServerId,
        taken: &mut BTreeMap<ServerId, Space>,
        creates: &mut Vec<Create>,
    ) -> Option<()> {
        let size = self.size_of(volume);
        if self.settings.remote_io {
            if !self.volumes.is_live(volume) {
                creates.push((volume, None, size));
            }
            return Some(());
        }
        if self.volumes.live_at(volume, Some(server)).is_some() {
            return Some(());
        }
        let left_on = |node: ServerId, taken: &BTreeMap<ServerId, Space>| {
            self.fleet
                .available(node)
                .minus(taken.get(&node).copied().unwrap_or_default())
        };
        let left = left_on(server, taken);
        let is_single = self.graph.workflow.volume(volume).users.len() == 1;
        let shares = if is_single && left.holds(size) {
            vec![(server, size)]
        } else if self.volumes.is_live(volume) {
            // A node that joined later, or whose part was lost.
            let bytes = size.bytes.min(left.bytes);
            let is_enough = bytes >= size.bytes.min(SHARE_BYTES_MIN) && left.files >= size.files;
            vec![(
                server,
                is_enough.then_some(Space {
                    bytes,
                    files: size.files,
                })?,
            )]
        } else {
            let rooms = self.rooms(server, |node| left_on(node, taken));
            shares(size, &rooms).filter(|shares| shares.iter().any(|(node, _)| *node == server))?
        };
        for (node, share) in shares {
            let there = taken.entry(node).or_default();
            *there = there.plus(share);
            creates.push((volume, Some(node), share));
        }
        Some(())
    }

    /// What the nodes of the group of `server` can give to a cooperative cache.
    fn rooms(&self, server: ServerId, left: impl Fn(ServerId) -> Space) -> Vec<Room> {
        let group = self.fleet.get(server).map(|node| node.seen.group.as_str());
        let peers = self.fleet.live().filter(|(_, node)| {
            Some(node.seen.group.as_str()) == group
                && node.missing_since.is_none()
                && node.aside_until.is_none()
        });
        let need = self.scratch_need_max.bytes;
        let rooms = peers.map(|(peer, node)| Room {
            server: peer,
            left: left(peer),
            scratch_one: need,
            scratch_all: need.saturating_mul(u64::from(node.seen.slots)),
        });
        rooms.collect()
    }

    pub(super) fn size_of(&self, volume: VolumeIndex) -> Space {
        let spec = self.graph.workflow.volume(volume);
        Space {
            bytes: spec.size_bytes,
            files: spec.size_files,
        }
    }

    /// The most scratch space that one job needs at once for volumes that it uses first.
    pub(super) fn largest_scratch_need(&self) -> Space {
        let needs = self.first_needs();
        needs.iter().fold(Space::ZERO, |most, need| Space {
            bytes: most.bytes.max(need.bytes),
            files: most.files.max(need.files),
        })
    }

    /// For each job the scratch space that must exist on its node before it can start the first
    /// time.
    fn first_needs(&self) -> Vec<Space> {
        let mut needs = vec![Space::ZERO; self.graph.workflow.jobs.len()];
        for volume in self.graph.volume_indexes() {
            let users = &self.graph.workflow.volume(volume).users;
            if self.graph.volume(volume).is_cache {
                continue;
            }
            if let Some(first) = users.iter().min_by_key(|job| self.graph.rank(**job)) {
                let need = &mut needs[first.as_usize()];
                *need = need.plus(self.size_of(volume));
            }
        }
        needs
    }

    /// Starts the run as soon as the workflow fits into the nodes seen; gives up when it does not
    /// for too long.
    pub(super) fn gather(&mut self) {
        let has_nodes = self.fleet.live().any(|(_, node)| node.seen.slots > 0);
        let trouble = if has_nodes {
            self.misfit()
        } else {
            Some(no_node())
        };
        let Some(trouble) = trouble else {
            self.phase = Phase::Running;
            self.patience = None;
            return;
        };
        let wait_ms = self.settings.nodes_wait_ms;
        let wait_ms = if has_nodes {
            SETTLE_MS.min(wait_ms)
        } else {
            wait_ms
        };
        let mut until = self.now.plus_ms(wait_ms);
        if let Some(earlier) = self.patience {
            until = until.min(earlier);
        }
        if self.patience != Some(until) {
            self.patience = Some(until);
            self.timers.set(until, Timer::Patience);
        }
        if self.now >= until {
            self.messages.push(trouble);
            self.finish();
        }
    }

    /// Why the workflow can never run on the nodes that are there, if so.
    pub(super) fn misfit(&self) -> Option<String> {
        let slots = self
            .fleet
            .live()
            .map(|(_, node)| node.seen.slots)
            .max()
            .unwrap_or(0);
        let wide = self
            .graph
            .job_indexes()
            .find(|job| self.slots_of(*job) > slots);
        if let Some(job) = wide {
            let (name, cpus) = (&self.graph.workflow.job(job).name, self.slots_of(job));
            return Some(format!(
                "job '{name}' asks for {cpus} CPUs, but no node has more than {slots} slots: add \
                 a larger node or ask for fewer"
            ));
        }
        if self.settings.remote_io {
            return None;
        }
        let workers = || self.fleet.live().filter(|(_, node)| node.seen.slots > 0);
        let largest = workers()
            .map(|(id, _)| self.fleet.usable(id))
            .max()
            .unwrap_or_default();
        for volume in self.graph.volume_indexes() {
            let (need, spec) = (self.size_of(volume), self.graph.workflow.volume(volume));
            let (have, place) = if self.graph.volume(volume).is_cache {
                (self.largest_group(), "all nodes of a group together offer")
            } else {
                (largest, "the largest node offers")
            };
            let fits = match self.graph.volume(volume).is_cache {
                true => have.holds(need),
                false => workers().any(|(id, _)| self.fleet.usable(id).holds(need)),
            };
            if !fits && !spec.users.is_empty() {
                return Some(format!(
                    "volume '{}' needs {}, but {place} {}: add storage, or make the volume \
                     smaller",
                    spec.name,
                    describe(need),
                    describe(have)
                ));
            }
        }
        self.first_needs()
            .into_iter()
            .enumerate()
            .find_map(|(job, need)| {
                let fits = workers().any(|(id, _)| self.fleet.usable(id).holds(need));
                let name = &self.graph.workflow.jobs[job].name;
                (!fits).then(|| {
                    format!(
                        "the scratch volumes of job '{name}' need {} on one node, but the largest \
                     node offers {}: add a larger node, or make the volumes smaller",
                        describe(need),
                        describe(largest)
                    )
                })
            })
    }

    fn largest_group(&self) -> Space {
        let mut groups: BTreeMap<&str, Space> = BTreeMap::new();
        for (id, node) in self.fleet.live() {
            let sum = groups.entry(&node.seen.group).or_default();
            let usable = self.fleet.usable(id);
            *sum = Space {
                bytes: sum.bytes.saturating_add(usable.bytes),
                // Every node of the group must be able to hold every file.
                files: sum.files.max(usable.files),
            };
        }
        groups.into_values().max().unwrap_or_default()
    }
}

/// What a node can give to a cooperative cache, all in bytes but `left`.
#[derive(Debug, Clone, Copy)]
struct Room {
    server: ServerId,
    left: Space,
    /// What the scratch volumes of one job may need there.
    scratch_one: u64,
    /// What the scratch volumes of jobs in all slots may need there.
    scratch_all: u64,
}

/// Divides a cooperative cache of `size` among nodes: whole on each where that leaves room for
/// scratch volumes in every slot, else in proportion to what is left, keeping room for the
/// scratch volumes of all slots, or of one job, or none. Nothing if the sum is below the size.
fn shares(size: Space, rooms: &[Room]) -> Option<Vec<(ServerId, Space)>> {
    let rooms: Vec<_> = rooms
        .iter()
        .filter(|room| room.left.files >= size.files)
        .collect();
    for keep in [
        |room: &Room| room.scratch_all,
        |room: &Room| room.scratch_one,
        |_: &Room| 0,
    ] {
        let spare = |room: &Room| room.left.bytes.saturating_sub(keep(room));
        let total = rooms
            .iter()
            .fold(0u64, |sum, room| sum.saturating_add(spare(room)));
        if total < size.bytes {
            continue;
        }
        let wanted = size
            .bytes
            .saturating_add(scale_up(size.bytes, SKEW_PERMILLE, 1000));
        let is_whole = rooms.iter().all(|room| spare(room) >= size.bytes);
        let share = |room: &Room| match is_whole {
            true => size.bytes,
            false => scale_up(wanted, spare(room), total)
                .min(spare(room))
                .min(size.bytes),
        };
        let shares = rooms.iter().map(|room| {
            (
                room.server,
                Space {
                    bytes: share(room),
                    files: size.files,
                },
            )
        });
        return Some(shares.filter(|(_, share)| share.bytes > 0).collect());
    }
    None
}

fn no_node() -> String {
    "no node is in the catalog: start nodes (`bafs node`), and check the catalog's address"
        .to_owned()
}

/// An amount for people: three digits and a decimal unit.
pub(super) fn describe(space: Space) -> String {
    const UNITS: [(&str, u64); 4] = [
        ("TB", 1_000_000_000_000),
        ("GB", 1_000_000_000),
        ("MB", 1_000_000),
        ("kB", 1_000),
    ];
    let bytes = match UNITS.iter().find(|(_, unit)| space.bytes >= *unit) {
        Some((name, unit)) => {
            let tenths = u128::from(space.bytes) * 10 / u128::from(*unit);
            format!("{}.{} {name}", tenths / 10, tenths % 10)
        }
        None => format!("{} bytes", space.bytes),
    };
    format!("{bytes} and {} files", space.files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(id: u64, bytes: u64, scratch_one: u64, slots: u64) -> Room {
        let left = Space { bytes, files: 10 };
        Room {
            server: ServerId(id),
            left,
            scratch_one,
            scratch_all: scratch_one * slots,
        }
    }

    fn bytes(size: u64, rooms: &[Room]) -> Option<Vec<u64>> {
        let shares = shares(
            Space {
                bytes: size,
                files: 1,
            },
            rooms,
        )?;
        Some(shares.iter().map(|(_, share)| share.bytes).collect())
    }

    #[test]
    fn a_cache_is_whole_where_it_fits_and_shared_where_not() {
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
    fn shares_always_hold_the_whole() {
        for size in 1..=300 {
            for (a, b, c) in [(100, 100, 100), (1, 2, 297), (0, 150, 150)] {
                let shares = bytes(
                    size,
                    &[room(1, a, 0, 1), room(2, b, 0, 1), room(3, c, 0, 1)],
                );
                let sum: u64 = shares.expect("it fits").iter().sum();
                assert!(sum >= size, "{size}: {sum}");
            }
        }
    }

    #[test]
    fn amounts_read_well() {
        assert_eq!(
            describe(Space {
                bytes: 1_250_000_000,
                files: 3
            }),
            "1.2 GB and 3 files"
        );
        assert_eq!(
            describe(Space {
                bytes: 999,
                files: 0
            }),
            "999 bytes and 0 files"
        );
    }
}
