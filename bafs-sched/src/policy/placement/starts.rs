//! Capacity-aware placement: which ready job starts where. A job gets a place only when all its
//! volumes fit; sizes and space are those declared and believed, nothing is measured here.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::ServerId;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::policy::View;
use crate::space::Space;
use crate::state::nodes::FleetNode;
use crate::state::planned_volumes::{Care, Create};
use crate::state::ready_queue::{Binding, ReadyKey};
use crate::state::scheduler_state::State;

/// Jobs of a queue that are tried before the queue sleeps, of those that need the same only one:
/// enough to pass jobs that wait for another writer, few enough that a million waiting jobs cost
/// nothing.
pub(super) const LOOKAHEAD: usize = 16;

/// Pipelines at home on a node that are tried, those that need least to end first.
const EASY_TRIED: usize = 4;

/// Nodes that are tried for a scratch volume that does not fit where its job runs.
const SPILL_LOOKED_AT: usize = 2;

/// Whether a scratch volume may lie on another node than the job that needs it first. It is read
/// and written over the network then, but the storage of all nodes counts as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spill {
    Never,
    Allowed,
}

impl State {
    /// Starts every job that can start, best first.
    pub(crate) fn place_all(&mut self) {
        loop {
            let awake = self.queues.awake_first();
            if awake.is_empty() {
                break;
            }
            for binding in awake {
                self.place_from(binding);
            }
        }
        while self.place_away() {}
        // What goes already may be enough.
        if self.leaving.is_empty() && std::mem::take(&mut self.is_space_wanted) {
            self.free_idle_caches();
        }
        if std::mem::take(&mut self.warming.is_in_the_way) {
            self.free_warmed();
        }
    }

    /// Starts one job of a queue, or lets the queue sleep.
    fn place_from(&mut self, binding: Binding) {
        let is_idle = |server| self.fleet.free_slots(server) > 0;
        if binding.is_some_and(|server| !is_idle(server)) {
            self.queues.sleep(binding);
            return;
        }
        let mut tried: Option<ReadyKey> = None;
        self.is_held_back = false;
        for _ in 0..LOOKAHEAD {
            let Some(key) = self.queues.after(binding, tried) else {
                break;
            };
            if self.try_place(key.job, binding) {
                return;
            }
            // A job that waits for another writer, for its pipeline's turn, or for other nodes than
            // those where it failed, says nothing of its like.
            let node = self.graph.job(key.job);
            let is_choosy = node.troubles.avoids_any() || !node.troubles.refused_by.is_empty();
            let is_telling = self.may_start(key.job) && !self.is_held_back && !is_choosy;
            tried = Some(if is_telling { key.last_alike() } else { key });
        }
        if let (true, Some(server)) = (self.is_held_back, binding)
            && self.place_easiest(server)
        {
            return;
        }
        match binding {
            Some(server) if self.may_spill() => self.queues.starve(server),
            _ => self.queues.sleep(binding),
        }
    }

    /// Starts the next job of a pipeline at home on this node that what is free there lets end:
    /// among many that must wait it may be far behind.
    fn place_easiest(&mut self, server: ServerId) -> bool {
        let mut jobs = self.easiest(server);
        jobs.retain(|job| self.queues.contains(*job) && self.may_start(*job));
        let mut jobs = jobs.into_iter().take(EASY_TRIED);
        jobs.any(|job| self.rules_admit(job) && self.try_place_on(job, &[server], Care::Safe))
    }

    /// Gives a job a place on the node that it is bound to, or on the best of all.
    pub(crate) fn try_place(&mut self, job: JobIndex, binding: Binding) -> bool {
        // Before the search for nodes, which costs more: with many pipelines most are not admitted.
        if !self.may_start(job) || !self.rules_admit(job) {
            return false;
        }
        let candidates = binding.map_or_else(
            || self.policies.placement.candidates(View::new(self), job),
            |server| vec![server],
        );
        self.try_place_on(job, &candidates, Care::Safe)
    }

    /// Gives a job a place on any node that can take it, however many must be looked at.
    pub(crate) fn try_place_anywhere(&mut self, job: JobIndex, care: Care) -> bool {
        let all = self.unlike_nodes(job);
        self.may_start(job) && self.rules_admit(job) && self.try_place_on(job, &all, care)
    }

    /// All live nodes, but of those that are alike and have nothing of this run only the first:
    /// what finds no place there finds none on the others, and to look for one takes as long as
    /// there are nodes.
    fn unlike_nodes(&self, job: JobIndex) -> Vec<ServerId> {
        let of_job = self.graph.job(job);
        let (mut known, mut unlike) = (BTreeSet::new(), Vec::new());
        for (server, node) in self.fleet.live() {
            let is_told =
                of_job.troubles.refused_by.contains(&server) || of_job.troubles.avoids(server);
            let is_bare = node.busy == 0 && node.limit.is_none() && !self.volumes.has_any(server);
            let (space, slots) = (self.fleet.available(server), node.slots());
            let kind = (&node.seen.group, space, slots, node.takes_work());
            if !is_bare || is_told || known.insert(kind) {
                unlike.push(server);
            }
        }
        unlike
    }

    /// Without nodes on which the job or its environment failed or met a full disk, while there are
    /// others: where it succeeds tells whose fault it was.
    fn without_failed(&self, job: JobIndex, candidates: &[ServerId], care: Care) -> Vec<ServerId> {
        let of_job = self.graph.job(job);
        let is_choosy = of_job.troubles.avoids_any() && self.policies.failure.avoids_failed_nodes();
        if !is_choosy || care != Care::Safe {
            return candidates.to_vec();
        }
        let need = self.need_of(job);
        let is_other = |(server, node): (ServerId, &FleetNode)| {
            node.takes_work() && self.could_run(job, server, need)
        };
        if !self.fleet.live().any(is_other) {
            return candidates.to_vec();
        }
        let kept = candidates
            .iter()
            .filter(|server| !of_job.troubles.avoids(**server));
        kept.copied().collect()
    }

    /// Whether scratch volumes may lie on other nodes than the jobs that need them first.
    pub(crate) fn may_spill(&self) -> bool {
        self.admission.is_some()
    }

    fn try_place_on(&mut self, job: JobIndex, candidates: &[ServerId], care: Care) -> bool {
        let mounted = self.graph.mounted(job);
        let spills = match self.may_spill() {
            true => &[Spill::Never, Spill::Allowed][..],
            false => &[Spill::Never][..],
        };
        let candidates = self.without_failed(job, candidates, care);
        let mut is_crowded = false;
        for &spill in spills {
            for &server in &candidates {
                let is_refused = self.graph.job(job).troubles.refused_by.contains(&server);
                let has_slots = self.fleet.free_slots(server) >= self.slots_of(job);
                if is_refused || !has_slots || self.begins_over(job, server) {
                    continue;
                }
                self.survey_for_division(&mounted, server);
                let creates = self.plan(job, &mounted, server, spill);
                let creates = creates.filter(|c| self.can_end_from(job, server, c, care));
                let creates = creates.filter(|c| !self.is_rash(server, c));
                let leans = creates.as_ref().and_then(|c| self.leans(job, server, c));
                let is_unsafe = care == Care::Safe && leans.is_none();
                self.is_held_back |= is_unsafe && creates.is_some();
                if let Some(creates) = creates.filter(|_| !is_unsafe) {
                    self.patience = None;
                    self.note_claims(job, server, &creates, leans.unwrap_or_default());
                    self.assign(job, server, creates);
                    return true;
                }
                self.is_space_wanted = true;
                is_crowded |= self.is_warmed_on(server);
            }
        }
        self.warming.is_in_the_way |= is_crowded;
        false
    }

    /// Whether a job would make a new cache to use a slot that is kept for another one. Jobs that
    /// need less go before, but may not have that slot; the cache would take their room.
    fn is_rash(&self, server: ServerId, creates: &[Create]) -> bool {
        let is_new = |volume: VolumeIndex| {
            self.graph.volume(volume).is_cache && !self.volumes.is_live(volume)
        };
        creates.iter().any(|(volume, ..)| is_new(*volume))
            && self.fleet.free_slots(server) <= self.slots_soon_needed(server)
    }

    /// Whether nothing but space and slots keeps a ready job from starting.
    fn may_start(&self, job: JobIndex) -> bool {
        let is_kept_back = self
            .protected
            .is_some_and(|pipeline| self.graph.pipeline(job) != pipeline);
        let mounts = &self.graph.workflow.job(job).mounts;
        let mut written = mounts.iter().filter(|mount| mount.writable);
        !is_kept_back
            && !self.waits_for_probe(self.graph.pipeline(job))
            && !self.waits_for_like(job)
            && !written.any(|mount| {
                let is_written = self.graph.volume(mount.volume).writer.is_some();
                is_written || self.is_being_copied(mount.volume)
            })
    }

    /// The volumes to create so that a job with these volumes can run on `server`, or nothing if
    /// one does not fit.
    fn plan(
        &self,
        job: JobIndex,
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
                    true => self.plan_cache(job, volume, server, &mut taken, &mut creates)?,
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
        if self.settings.has_private_data_at_home() {
            creates.push((volume, None, size));
            return Some(());
        }
        let has_room = |server: &ServerId| {
            let taken = taken.get(server).copied().unwrap_or_default();
            self.fleet
                .available(*server)
                .saturating_sub(taken)
                .can_hold(size)
        };
        let keeps_room =
            |server: &ServerId| self.leaves_room_to_come(*server, size, taken, creates);
        let has_own = keeps_room(&server);
        let outside = match has_own {
            true => None,
            false => self.roomiest_outside(server).find(has_room),
        };
        let target = match (has_room(&server), spill) {
            (true, Spill::Never) if outside.is_some() => return None,
            (true, _) => outside.unwrap_or(server),
            (false, Spill::Allowed) => {
                let places = || self.places_beside(server, taken).filter(has_room);
                // It is the same for all peers, of which there may be many.
                let is_good = |place: &ServerId| match self.fleet.is_together(*place, server) {
                    true => has_own,
                    false => keeps_room(place),
                };
                places().find(is_good).or_else(|| places().next())?
            }
            (false, Spill::Never) => return None,
        };
        let there = taken.entry(target).or_default();
        *there = there.saturating_add(size);
        creates.push((volume, Some(target), size));
        Some(())
    }

    /// Where a scratch volume may lie that finds no room on `server`, best first: the nodes with
    /// most room, then, as these may be those that a new cache fills first, the peers of `server`,
    /// then, as the cache may fill all of these, other groups.
    fn places_beside(
        &self,
        server: ServerId,
        taken: &BTreeMap<ServerId, Space>,
    ) -> impl Iterator<Item = ServerId> {
        let is_divided = !taken.is_empty();
        let peers = move || {
            let peers = is_divided.then(|| self.fleet.group_of(server));
            let usable = peers.into_iter().flatten();
            let usable = usable.filter(|(_, node)| node.takes_work());
            usable.map(|(id, _)| id)
        };
        let roomiest = self.fleet.roomiest().take(SPILL_LOOKED_AT);
        let peers = std::iter::once_with(peers).flatten();
        let outside = std::iter::once_with(move || self.roomiest_outside(server)).flatten();
        roomiest.chain(peers).chain(outside)
    }

    /// Whether a scratch volume of this size leaves the group of `server` so much that the batch
    /// volumes which the rules let come yet find room. They must lie in that group, the scratch
    /// volume may lie elsewhere; where there is no other group that makes no difference.
    fn leaves_room_to_come(
        &self,
        server: ServerId,
        size: Space,
        taken: &BTreeMap<ServerId, Space>,
        creates: &[Create],
    ) -> bool {
        if !self.fleet.has_groups() {
            return true;
        }
        let to_come = self.batch_bytes_to_come(creates);
        if to_come == 0 {
            return true;
        }
        let wanted = size.bytes.saturating_add(to_come);
        let mut left = 0u64;
        let peers = self.fleet.group_of(server);
        let is_enough = peers.filter(|(_, node)| node.takes_work()).any(|(id, _)| {
            let taken = taken.get(&id).copied().unwrap_or_default();
            left = left.saturating_add(self.fleet.available(id).saturating_sub(taken).bytes);
            left >= wanted
        });
        // What finds no room there anyway keeps none.
        is_enough || left < to_come
    }

    /// Nodes of other groups with most room.
    fn roomiest_outside(&self, server: ServerId) -> impl Iterator<Item = ServerId> {
        let all = self.fleet.roomiest();
        all.filter(move |other| !self.fleet.is_together(*other, server))
            .take(SPILL_LOOKED_AT)
    }

    pub(crate) fn size_of(&self, volume: VolumeIndex) -> Space {
        let spec = self.graph.workflow.volume(volume);
        Space {
            bytes: spec.size_bytes,
            files: spec.size_files,
        }
    }

    /// The most scratch space that one job needs at once for volumes that it uses first.
    pub(crate) fn largest_scratch_need(&self) -> Space {
        let needs = self.first_needs();
        needs.iter().fold(Space::ZERO, |most, need| Space {
            bytes: most.bytes.max(need.bytes),
            files: most.files.max(need.files),
        })
    }

    /// The largest scratch volume, in bytes.
    pub(crate) fn largest_scratch_volume(&self) -> u64 {
        let volumes = self.graph.volume_indexes();
        let scratch = volumes.filter(|volume| !self.graph.volume(*volume).is_cache);
        let sizes = scratch.map(|volume| self.size_of(volume).bytes);
        sizes.max().unwrap_or(0)
    }

    /// For each job the scratch space that must exist on its node before it can start the first
    /// time.
    pub(crate) fn first_needs(&self) -> Vec<Space> {
        let mut needs = vec![Space::ZERO; self.graph.workflow.jobs.len()];
        for volume in self.graph.volume_indexes() {
            let users = &self.graph.workflow.volume(volume).users;
            if self.graph.volume(volume).is_cache {
                continue;
            }
            if let Some(first) = users.iter().min_by_key(|job| self.graph.rank(**job)) {
                let need = &mut needs[first.as_usize()];
                *need = need.saturating_add(self.size_of(volume));
            }
        }
        needs
    }
}
