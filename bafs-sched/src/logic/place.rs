//! Capacity-aware placement: which ready job starts where. A job gets a place only when all its
//! volumes fit; sizes and space are those declared and believed, nothing is measured here.

use std::collections::BTreeMap;

use bafs_proto::ids::ServerId;

use super::queues::{Binding, Key};
use super::scheduler::{Phase, Scheduler};
use super::space::Space;
use super::timers::Timer;
use crate::workflow::{JobIndex, VolumeIndex};

/// Jobs at the head of a queue that are tried before the queue sleeps: enough to pass jobs that
/// wait for another writer, few enough that a million waiting jobs cost nothing.
const LOOKAHEAD: usize = 16;

/// Bound jobs that are looked at for one that could run elsewhere.
const AWAY_LOOKED_AT: usize = 64;

/// Bound jobs that are tried elsewhere at a time.
const AWAY_TRIED: usize = 2;

/// Idle nodes that are searched for one that has a part of a job's cache.
const READERS_LOOKED_AT: usize = 64;

/// Nodes that are tried for a scratch volume that does not fit where its job runs.
const SPILL_LOOKED_AT: usize = 2;

/// Nodes may appear one after the other; a fleet is judged so long after its first node, in
/// milliseconds.
const SETTLE_MS: u64 = 5_000;

/// A volume to create: which, where, how large.
pub(super) type Create = (VolumeIndex, Option<ServerId>, Space);

/// Whether a scratch volume may lie on another node than the job that needs it first. It is read
/// and written over the network then, but the storage of all nodes counts as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spill {
    Never,
    Allowed,
}

impl Scheduler {
    /// Starts every job that can start, best first.
    pub(super) fn place_all(&mut self) {
        loop {
            let awake = self.queues.awake_first();
            if awake.is_empty() {
                break;
            }
            for binding in awake {
                self.place_from(binding);
            }
        }
        while self.may_spill() && self.place_away() {}
        if std::mem::take(&mut self.is_space_wanted) {
            self.free_idle_caches();
        }
    }

    /// Starts one job of a queue, or lets the queue sleep.
    fn place_from(&mut self, binding: Binding) {
        let is_idle = |server| self.fleet.free_slots(server) > 0;
        if binding.is_some_and(|server| !is_idle(server)) {
            self.queues.sleep(binding);
            return;
        }
        let mut failed: Option<Key> = None;
        for key in self.queues.heads(binding, LOOKAHEAD) {
            // What fails for one job fails for another of the same need, but for other caches.
            let is_alike = failed.is_some_and(|failed| {
                let alike = Key {
                    job: failed.job,
                    ..key
                };
                alike == failed && self.graph.reads_alike(key.job, failed.job)
            });
            if is_alike {
                continue;
            }
            if self.try_place(key.job, binding) {
                return;
            }
            // A job that waits for another writer says nothing of its like.
            failed = self.may_start(key.job).then_some(key);
        }
        match binding {
            Some(server) if self.may_spill() => self.queues.starve(server),
            _ => self.queues.sleep(binding),
        }
    }

    /// Gives a job whose data lie on a node without a free slot a place on one that has nothing to
    /// do. Before a barrier all wait for the last, which costs more than data from a neighbour.
    fn place_away(&mut self) -> bool {
        if self.fleet.idle().next().is_none() {
            return false;
        }
        let bound = self.queues.bound().take(AWAY_LOOKED_AT);
        let is_stuck = |(_, server): &(JobIndex, ServerId)| self.fleet.free_slots(*server) == 0;
        let stuck: Vec<JobIndex> = bound.filter(is_stuck).map(|(job, _)| job).collect();
        let mut stuck = stuck.into_iter().take(AWAY_TRIED);
        stuck.any(|job| self.try_place(job, None))
    }

    /// Gives a job a place on the node that it is bound to, or on the best of all.
    pub(super) fn try_place(&mut self, job: JobIndex, binding: Binding) -> bool {
        if !self.may_start(job) {
            return false;
        }
        let candidates = binding.map_or_else(|| self.candidates(job), |server| vec![server]);
        self.try_place_on(job, &candidates)
    }

    /// Gives a job a place on any node that can take it, however many must be looked at.
    pub(super) fn try_place_anywhere(&mut self, job: JobIndex) -> bool {
        let all: Vec<ServerId> = self.fleet.live().map(|(server, _)| server).collect();
        self.may_start(job) && self.try_place_on(job, &all)
    }

    /// Nodes to try for a job that is bound to none. Where caches are just as large as they must
    /// be, the roomiest nodes may be those without a part of them, and cannot run their readers.
    fn candidates(&self, job: JobIndex) -> Vec<ServerId> {
        let mut candidates = self.fleet.candidates();
        let mounts = self.graph.workflow.job(job).mounts.iter();
        let mut caches = mounts.filter(|mount| self.graph.volume(mount.volume).is_cache);
        if let (Some(_), Some(mount)) = (&self.admission, caches.next()) {
            let idle = self.fleet.idle().take(READERS_LOOKED_AT);
            let has_part =
                |server: &ServerId| self.volumes.live_at(mount.volume, Some(*server)).is_some();
            candidates.extend(idle.filter(has_part).take(LOOKAHEAD));
        }
        candidates
    }

    /// Whether scratch volumes may lie on other nodes than the jobs that need them first.
    fn may_spill(&self) -> bool {
        self.admission.is_some()
    }

    fn try_place_on(&mut self, job: JobIndex, candidates: &[ServerId]) -> bool {
        if !self.rules_admit(job) {
            return false;
        }
        let mounted = self.graph.mounted(job);
        let spills = match self.may_spill() {
            true => &[Spill::Never, Spill::Allowed][..],
            false => &[Spill::Never][..],
        };
        for &spill in spills {
            for &server in candidates {
                let is_refused = self.graph.job(job).refused_by.contains(&server);
                if is_refused || self.fleet.free_slots(server) < self.slots_of(job) {
                    continue;
                }
                if let Some(creates) = self.plan(&mounted, server, spill) {
                    self.patience = None;
                    self.assign(job, server, creates);
                    return true;
                }
                self.is_space_wanted = true;
            }
        }
        false
    }

    /// Whether nothing but space and slots keeps a ready job from starting.
    fn may_start(&self, job: JobIndex) -> bool {
        let is_kept_back = self
            .protected
            .is_some_and(|pipeline| self.graph.pipeline(job) != pipeline);
        let mounts = &self.graph.workflow.job(job).mounts;
        let mut written = mounts.iter().filter(|mount| mount.writable);
        !is_kept_back
            && !written.any(|mount| {
                let is_written = self.graph.volume(mount.volume).writer.is_some();
                is_written || self.is_being_copied(mount.volume)
            })
    }

    /// The volumes to create so that a job with these volumes can run on `server`, or nothing if
    /// one does not fit.
    fn plan(
        &self,
        mounted: &[(VolumeIndex, bool)],
        server: ServerId,
        spill: Spill,
    ) -> Option<Vec<Create>> {
        let mut creates = Vec::new();
        let mut taken = BTreeMap::new();
        let is_cache = |volume: VolumeIndex| self.graph.volume(volume).is_cache;
        // Shares that are just large enough must come first, or this node may be left without.
        let caches_first = self.admission.is_some();
        for caches in [caches_first, !caches_first] {
            for &(volume, _) in mounted.iter().filter(|(v, _)| is_cache(*v) == caches) {
                match caches {
                    true => self.plan_cache(volume, server, &mut taken, &mut creates)?,
                    false => self.plan_scratch(volume, server, spill, &mut taken, &mut creates)?,
                }
            }
        }
        Some(creates)
    }

    fn plan_scratch(
        &self,
        volume: VolumeIndex,
        server: ServerId,
        spill: Spill,
        taken: &mut BTreeMap<ServerId, Space>,
        creates: &mut Vec<Create>,
    ) -> Option<()> {
        if self.volumes.is_live(volume) {
            return Some(());
        }
        let size = self.size_of(volume);
        if self.settings.remote_io {
            creates.push((volume, None, size));
            return Some(());
        }
        let has_room = |server: &ServerId| {
            let taken = taken.get(server).copied().unwrap_or_default();
            self.fleet.available(*server).minus(taken).holds(size)
        };
        let mut others = self.fleet.roomiest().take(SPILL_LOOKED_AT);
        // The roomiest may be those that a new cache fills first.
        let beside = || {
            let peers = self.fleet.group_of(server).filter(|_| !taken.is_empty());
            let mut usable = peers
                .filter(|(_, node)| node.takes_work())
                .map(|(id, _)| id);
            usable.find(has_room)
        };
        let target = match (has_room(&server), spill) {
            (true, _) => server,
            (false, Spill::Allowed) => others.find(has_room).or_else(beside)?,
            (false, Spill::Never) => return None,
        };
        let there = taken.entry(target).or_default();
        *there = there.plus(size);
        creates.push((volume, Some(target), size));
        Some(())
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

    /// The largest scratch volume, in bytes.
    pub(super) fn largest_scratch_volume(&self) -> u64 {
        let volumes = self.graph.volume_indexes();
        let scratch = volumes.filter(|volume| !self.graph.volume(*volume).is_cache);
        let sizes = scratch.map(|volume| self.size_of(volume).bytes);
        sizes.max().unwrap_or(0)
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
        if self.may_spill() {
            return None;
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
