//! Whether a job can start, on which node, and with which new volumes. It asks the families in
//! turn: placement and cache space plan the volumes, admission says whether every started pipeline
//! can still end.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::ServerId;
use bafs_workflow::{JobIndex, VolumeIndex};

use super::cache_space::CachePlanning;
use super::placement::scratch_volumes::Spill;
use super::{PolicySet, View};
use crate::decision::Decision;
use crate::state::nodes::FleetNode;
use crate::state::planned_volumes::{Care, Create};

/// What a search for a place found, and what was in the way.
#[derive(Debug, Default)]
pub(crate) struct StartSearch {
    /// The start; nothing when there is no place.
    pub(crate) start: Option<Decision>,
    /// A node with a free slot had too little space.
    pub(crate) is_space_wanted: bool,
    /// A start had room, and would have kept others from ending.
    pub(crate) is_held_back: bool,
    /// A volume that came before its readers takes room of such a node.
    pub(crate) is_prefetch_in_the_way: bool,
}

impl View<'_> {
    /// Looks for a place for a job on the first of these nodes that can take it.
    pub(crate) fn find_start(
        &self,
        policies: &PolicySet,
        job: JobIndex,
        candidates: &[ServerId],
        care: Care,
    ) -> StartSearch {
        let mounted = self.graph.mounted(job);
        let spills = match self.packs_volumes() {
            true => &[Spill::Never, Spill::Allowed][..],
            false => &[Spill::Never][..],
        };
        let candidates = self.without_failed(policies, job, candidates, care);
        let mut search = StartSearch::default();
        let mut is_crowded = false;
        for &spill in spills {
            for &server in &candidates {
                let is_refused = self
                    .graph
                    .job(job)
                    .failure_history
                    .refused_by
                    .contains(&server);
                let has_slots = self.fleet.free_slots(server) >= self.slots_of(job);
                let is_too_long = !self.can_end_in_time(job, server);
                let is_small = !self.has_room_for_job(job, server);
                let is_unfit = is_refused || !has_slots || is_too_long || is_small;
                if is_unfit || self.begins_above_quota(job, server) {
                    continue;
                }
                let creates = self.plan_volumes(policies, job, &mounted, server, spill);
                let creates = creates.filter(|c| self.can_end_from(job, server, c, care));
                let creates = creates.filter(|c| !self.would_cache_for_reserved_slot(server, c));
                let borrows = creates
                    .as_ref()
                    .and_then(|c| policies.admission.borrows(*self, job, server, c));
                let is_unsafe = care == Care::Safe && borrows.is_none();
                search.is_held_back |= is_unsafe && creates.is_some();
                if let Some(creates) = creates.filter(|_| !is_unsafe) {
                    search.start = Some(Decision::Start {
                        job,
                        server,
                        creates,
                        borrows: borrows.unwrap_or_default(),
                    });
                    return search;
                }
                search.is_space_wanted = true;
                is_crowded |= self.is_warmed_on(server);
            }
        }
        search.is_prefetch_in_the_way = is_crowded;
        search
    }

    /// The volumes to create so that a job with these volumes can run on `server`, or nothing if
    /// one does not fit.
    fn plan_volumes(
        &self,
        policies: &PolicySet,
        job: JobIndex,
        mounted: &[(VolumeIndex, bool)],
        server: ServerId,
        spill: Spill,
    ) -> Option<Vec<Create>> {
        let mut creates = Vec::new();
        let mut taken = BTreeMap::new();
        let planning = CachePlanning {
            partitioning: policies.cache_space,
            to_end: &|node, start| self.lacking_to_end(node, start).bytes,
        };
        let is_cache = |volume: VolumeIndex| self.graph.volume(volume).is_cache;
        // Parts that are just large enough must come first, or this node may be left without.
        let caches_first = self.packs_volumes();
        for caches in [caches_first, !caches_first] {
            for &(volume, _) in mounted.iter().filter(|(v, _)| is_cache(*v) == caches) {
                match caches {
                    true => {
                        self.plan_cache(planning, job, volume, server, &mut taken, &mut creates)?;
                    }
                    false => self.plan_scratch(volume, server, spill, &mut taken, &mut creates)?,
                }
            }
        }
        Some(creates)
    }

    /// Without nodes on which the job or its environment failed or met a full disk, while there are
    /// others: where it succeeds tells whose fault it was.
    fn without_failed(
        &self,
        policies: &PolicySet,
        job: JobIndex,
        candidates: &[ServerId],
        care: Care,
    ) -> Vec<ServerId> {
        let of_job = self.graph.job(job);
        let is_choosy =
            of_job.failure_history.avoids_any() && policies.failure.avoids_failed_nodes();
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
            .filter(|server| !of_job.failure_history.avoids(**server));
        kept.copied().collect()
    }

    /// Whether nothing but space and slots keeps a ready job from starting.
    pub(crate) fn may_start(&self, job: JobIndex) -> bool {
        let is_kept_back = self
            .protected
            .is_some_and(|pipeline| self.graph.pipeline(job) != pipeline);
        let mounts = &self.graph.workflow.job(job).mounts;
        let mut written = mounts.iter().filter(|mount| mount.writable);
        !is_kept_back
            && !self.waits_for_probe(self.graph.pipeline(job))
            && !self.waits_for_like(job)
            && !self.awaits_departure(job)
            && !written.any(|mount| {
                let is_written = self.graph.volume(mount.volume).writer.is_some();
                is_written || self.is_being_copied(mount.volume)
            })
    }

    /// Whether what keeps a job from starting keeps all jobs of its kind. A job that waits for
    /// another writer, for its pipeline's turn, or for other nodes than those where it failed, says
    /// nothing of its like.
    pub(crate) fn stands_for_its_kind(&self, job: JobIndex) -> bool {
        let node = self.graph.job(job);
        let is_choosy = node.failure_history.avoids_any()
            || !node.failure_history.refused_by.is_empty()
            || node.failure_history.used_up_memory > 0;
        self.may_start(job) && !self.is_held_back && !is_choosy
    }
}

/// Nodes on which a job is tried however many must be looked at: all live ones, but of those that
/// are alike and have nothing of this run only the first. A job that finds no place there finds
/// none on the others, and to look for one takes as long as there are nodes.
pub(crate) fn unlike_nodes(view: View<'_>, job: JobIndex) -> Vec<ServerId> {
    let of_job = view.graph.job(job);
    let (mut known, mut unlike) = (BTreeSet::new(), Vec::new());
    for (server, node) in view.fleet.live() {
        let is_told = of_job.failure_history.refused_by.contains(&server)
            || of_job.failure_history.avoids(server);
        let is_bare = node.busy == 0 && node.limit.is_none() && !view.volumes.has_any(server);
        let (space, slots) = (view.fleet.available(server), node.slots());
        let ends = view.can_end_in_time(job, server);
        let fits = (ends, view.has_room_for_job(job, server));
        let (group, cached) = (&node.seen.group, &node.seen.cached);
        let kind = (group, cached, space, slots, node.takes_work(), fits);
        if !is_bare || is_told || known.insert(kind) {
            unlike.push(server);
        }
    }
    unlike
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::RunId;
    use bafs_proto::time::Time;
    use bafs_workflow::parse_workflow;

    use super::*;
    use crate::{NodeDeparture, NodeInfo, Scheduler, Settings, Space};

    #[test]
    fn nodes_that_leave_later_are_tried() {
        let text = "job a {\nexecutable = x\nruntime = 60 s\n}\n";
        let none = |_: &str| Err("no files".to_owned());
        let workflow = parse_workflow("w.bafs", text, &none).unwrap().workflow;
        let mut scheduler = Scheduler::new(RunId(1), workflow, Settings::default());
        let space = Space {
            bytes: 1_000_000,
            files: 100,
        };
        for (id, at_ms) in [(1, 30_000), (2, 30_000), (3, 90_000)] {
            let departure = NodeDeparture {
                at: Some(Time(at_ms)),
                is_draining: false,
            };
            scheduler.state.fleet.see(NodeInfo {
                departure,
                ..NodeInfo::single_group(ServerId(id), space, 1)
            });
        }
        let tried = unlike_nodes(View::new(&scheduler.state), JobIndex(0));
        assert_eq!(tried, [ServerId(1), ServerId(3)]);
    }
}
