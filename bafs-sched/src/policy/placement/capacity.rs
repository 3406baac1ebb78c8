//! Capacity-aware placement (Bent, *Data-Driven Batch Scheduling*, chapter 5): a job stays where
//! its data are, and new data go where most space is free.

use bafs_proto::ids::ServerId;
use bafs_workflow::{JobIndex, VolumeIndex};

use super::placement_policy::Placement;
use crate::policy::{Policy, View};
use crate::space::Space;
use crate::state::planned_volumes::Create;

/// Idle nodes that are looked at, and nodes with enough memory that are tried, for a job that asks
/// for memory or time: the roomiest nodes may lack those. Few, as this is asked for each ready job.
const NODES_LOOKED_AT: usize = 64;
const NODES_TRIED: usize = 16;

/// Keeps jobs with their scratch data, and looks for slots and space elsewhere.
#[derive(Debug)]
pub(super) struct Capacity;

impl Policy for Capacity {
    fn name(&self) -> &'static str {
        "capacity"
    }

    fn summary(&self) -> &'static str {
        "a job waits for the node that has its scratch data; others go where most is free"
    }
}

impl Placement for Capacity {
    fn binding(&self, view: View<'_>, job: JobIndex, need: Space) -> Option<ServerId> {
        view.node_of_data(job, need)
    }

    fn candidates(&self, view: View<'_>, job: JobIndex) -> Vec<ServerId> {
        let mut candidates = view.nodes_with_cached_data(job);
        for server in view.fleet.candidates() {
            if !candidates.contains(&server) {
                candidates.push(server);
            }
        }
        if view.asks_for_resources(job) {
            let idle = view.fleet.idle().take(NODES_LOOKED_AT);
            let able = idle.filter(|server| view.has_room_for_job(job, *server));
            candidates.extend(able.take(NODES_TRIED));
        }
        candidates
            .retain(|server| view.fleet.free_slots(*server) > view.slots_soon_needed(*server));
        candidates
    }
}

impl View<'_> {
    /// Nodes with free slots that have data of a cache which this job is the first of the run to
    /// read: a cache with one reader lies on one node, and another one would fetch the data again.
    fn nodes_with_cached_data(&self, job: JobIndex) -> Vec<ServerId> {
        let is_new = |volume: &VolumeIndex| {
            self.graph.volume(*volume).is_cache && !self.volumes.is_live(*volume)
        };
        let mounted = self.graph.mounted(job);
        let caches = mounted.iter().map(|(volume, _)| volume);
        let caches: Vec<VolumeIndex> = caches.copied().filter(is_new).collect();
        if caches.is_empty() {
            return Vec::new();
        }
        let mut found = Vec::new();
        for (server, node) in self.fleet.live() {
            self.fleet.tally.add(1);
            let has_data = node.seen.cached.iter().any(|it| caches.contains(it));
            if has_data && node.takes_work() && self.fleet.free_slots(server) > 0 {
                found.push(server);
            }
        }
        found
    }

    /// The node that has the largest scratch volume of a job, if it can run the job. An appliance
    /// only stores: its volumes are mounted from elsewhere. So are those of a node that refused the
    /// job room.
    pub(crate) fn node_of_data(&self, job: JobIndex, need: Space) -> Option<ServerId> {
        let mut home: Option<(u64, ServerId)> = None;
        for (volume, _) in self.graph.mounted(job) {
            if self.volumes.is_live(volume) && !self.graph.volume(volume).is_cache {
                let bytes = self.graph.workflow.volume(volume).size_bytes;
                let there = self.volumes.scratch(volume).and_then(|(_, server)| server);
                if let Some(server) = there
                    && home.is_none_or(|(most, _)| most < bytes)
                {
                    home = Some((bytes, server));
                }
            }
        }
        let (_, server) = home?;
        let no_room_on = &self.graph.job(job).failure_history.no_room_on;
        let can_run = !no_room_on.contains(&server) && self.could_run(job, server, need);
        can_run.then_some(server)
    }

    /// Whether a job would make a new cache to use a slot that is kept for another one. Jobs that
    /// need less go before, but may not have that slot; the cache would take their room.
    pub(crate) fn would_cache_for_reserved_slot(
        &self,
        server: ServerId,
        creates: &[Create],
    ) -> bool {
        let is_new = |volume: VolumeIndex| {
            self.graph.volume(volume).is_cache && !self.volumes.is_live(volume)
        };
        creates.iter().any(|(volume, ..)| is_new(*volume))
            && self.fleet.free_slots(server) <= self.slots_soon_needed(server)
    }

    /// Whether a job would begin its pipeline on a node of which this run has more than its part.
    pub(crate) fn begins_above_quota(&self, job: JobIndex, server: ServerId) -> bool {
        let limit = self.fleet.get(server).and_then(|node| node.limit);
        limit.is_some_and(|limit| limit.is_over)
            && !self.is_at_home(self.graph.pipeline(job), server)
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::RunId;
    use bafs_proto::time::Time;
    use bafs_workflow::parse_workflow;

    use crate::{Action, Event, NodeInfo, Scheduler, Settings, Space};

    use super::*;

    /// The other node is the better one in all else.
    #[test]
    fn single_readers_go_where_their_data_wait() {
        let text = "volume a cache bafs://home/a 5 MB\njob j {\nexecutable = x\n}\nmount a j /a\n";
        let parsed = parse_workflow("w", text, &|_| unreachable!()).expect("a workflow");
        let capacity = |megabytes: u64| Space {
            bytes: megabytes * 1_000_000,
            files: 100_000,
        };
        for has_data in [false, true] {
            let workflow = parsed.workflow.clone();
            let mut scheduler = Scheduler::new(RunId(1), workflow, Settings::default());
            let mut small = NodeInfo::single_group(ServerId(1), capacity(100), 1);
            small.cached.extend(has_data.then_some(VolumeIndex(0)));
            let large = NodeInfo::single_group(ServerId(2), capacity(500), 4);
            let mut actions = Vec::new();
            let listed = Event::nodes_listed(vec![small, large]);
            scheduler.step(Time(0), listed, &mut actions);
            let created = actions.iter().find_map(|action| match action {
                Action::CreateVolume { server, .. } => Some(*server),
                _ => None,
            });
            let expected = ServerId(if has_data { 1 } else { 2 });
            assert_eq!(created, Some(expected), "{actions:?}");
        }
    }
}
