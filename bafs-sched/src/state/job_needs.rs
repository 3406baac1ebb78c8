//! What jobs need of nodes, and which nodes could give it: as declared or learned, whoever decides.

use bafs_proto::ids::ServerId;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::space::Space;
use crate::state::nodes::FleetNode;
use crate::state::scheduler_state::State;

impl State {
    pub(crate) fn size_of(&self, volume: VolumeIndex) -> Space {
        let spec = self.graph.workflow.volume(volume);
        Space {
            bytes: spec.size_bytes,
            files: spec.size_files,
        }
    }

    pub(crate) fn slots_of(&self, job: JobIndex) -> u32 {
        self.graph.workflow.job(job).cpus.max(1)
    }

    /// Memory that the next try of a job asks for, in bytes; 0 if the workflow does not say.
    pub(crate) fn memory_of(&self, job: JobIndex) -> u64 {
        let tries = self.graph.job(job).failure_history.used_up_memory;
        self.graph.workflow.job(job).memory_of_try(tries)
    }

    /// Whether a node could run a job by its memory and its room for temporary files, when nothing
    /// else ran there.
    pub(crate) fn has_job_resources(&self, job: JobIndex, node: &FleetNode) -> bool {
        let temporary = self.graph.workflow.job(job).limits.temporary_bytes;
        self.memory_of(job) <= node.memory_bytes()
            && temporary.unwrap_or(0) <= node.temporary_bytes()
    }

    /// What those volumes of a job need that do not exist.
    pub(crate) fn need_of(&self, job: JobIndex) -> Space {
        if self.settings.has_private_data_at_home() {
            return Space::ZERO;
        }
        let mounted = self.graph.mounted(job).into_iter();
        let missing = mounted.filter(|(volume, _)| !self.volumes.is_live(*volume));
        missing.fold(Space::ZERO, |sum, (v, _)| {
            sum.saturating_add(self.size_of(v))
        })
    }

    pub(crate) fn scratch_of(&self, job: JobIndex) -> Vec<VolumeIndex> {
        let mounted = self
            .graph
            .mounted(job)
            .into_iter()
            .map(|(volume, _)| volume);
        mounted
            .filter(|volume| !self.graph.volume(*volume).is_cache)
            .collect()
    }

    pub(crate) fn caches_of(&self, job: JobIndex) -> Vec<VolumeIndex> {
        if self.settings.caches_nothing() {
            return Vec::new();
        }
        let mounted = self.graph.mounted(job).into_iter();
        let caches = mounted.map(|(volume, _)| volume);
        caches
            .filter(|volume| self.graph.volume(*volume).is_cache)
            .collect()
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

    /// The most that the caches of one job need.
    pub(crate) fn largest_cache_need(&self) -> Space {
        let need = |job: JobIndex| {
            let mounted = self.graph.mounted(job).into_iter();
            let caches = mounted.filter(|(volume, _)| self.graph.volume(*volume).is_cache);
            caches.fold(Space::ZERO, |sum, (v, _)| {
                sum.saturating_add(self.size_of(v))
            })
        };
        self.graph
            .job_indexes()
            .map(need)
            .fold(Space::ZERO, Space::component_max)
    }

    /// Whether a node could run a job with this need when nothing else ran there, and the job has
    /// not failed there, nor met a full disk.
    pub(crate) fn could_run(&self, job: JobIndex, server: ServerId, need: Space) -> bool {
        let (node, slots) = (self.graph.job(job), self.slots_of(job));
        let found = self.fleet.get(server);
        found.is_some_and(|it| it.seen.slots >= slots && self.has_job_resources(job, it))
            && !node.failure_history.refused_by.contains(&server)
            && !node.failure_history.avoids(server)
            && self.can_ever_hold(job, server, need)
    }

    /// Whether a node could hold what a job still needs beside what the job has there: waiting for
    /// others to leave does not help where it could not.
    pub(crate) fn can_ever_hold(&self, job: JobIndex, server: ServerId, need: Space) -> bool {
        let mounted = self.graph.mounted(job).into_iter();
        let scratch = mounted.filter(|(volume, _)| !self.graph.volume(*volume).is_cache);
        let here = scratch.filter(|(v, _)| self.volumes.live_at(*v, Some(server)).is_some());
        let held = here.fold(Space::ZERO, |sum, (v, _)| {
            sum.saturating_add(self.size_of(v))
        });
        let (mut left, mut need) = (self.fleet.offered(server).saturating_sub(held), need);
        // Of caches a part may do, wherever that is.
        for (cache, _) in self.graph.mounted(job) {
            if self.graph.volume(cache).is_cache && !self.volumes.is_live(cache) {
                need = need.saturating_sub(self.size_of(cache));
            }
        }
        left.files = left.files.max(need.files);
        self.packs_volumes() || left.can_hold(need)
    }

    /// Whether the storage of all nodes counts as one, because a strategy counts on all of it:
    /// scratch volumes may lie on other nodes than the jobs that need them first, caches are just
    /// as large as they must be, and nodes may read them at their peers.
    pub(crate) fn packs_volumes(&self) -> bool {
        self.limits.is_some()
    }

    /// The same, now or as soon as the selector has chosen a strategy.
    pub(crate) fn may_pack_volumes(&self) -> bool {
        self.packs_volumes() || self.guided.is_some()
    }

    /// Nodes that may hold scratch volumes: one that runs no jobs has parts of caches only, unless
    /// volumes may lie on other nodes than their jobs.
    pub(crate) fn nodes_for_scratch(&self) -> impl Iterator<Item = ServerId> {
        let is_storing = self.may_pack_volumes();
        let nodes = self.fleet.live();
        let nodes = nodes.filter(move |(_, node)| is_storing || node.seen.slots > 0);
        nodes.map(|(id, _)| id)
    }

    /// The sizes of all scratch volumes of each job of a pipeline.
    pub(crate) fn kind(&self, pipeline: u32) -> Vec<Vec<Space>> {
        let course = self.graph.courses.of(pipeline).iter();
        let sizes = |job: &JobIndex| {
            let scratch = self.scratch_of(*job).into_iter();
            scratch.map(|volume| self.size_of(volume)).collect()
        };
        course.map(sizes).collect()
    }
}
