//! Links between the scheduler and all others, and between groups: cut for a while. The driver's
//! view of nodes, and its consequences.

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::time::Time;
use bafs_sched::{Event, NodeInfo};

use super::{ClusterEvent, SchedulerCut, SimulatedCluster};

/// A cut is so long at most, in milliseconds: longer than any call is repeated.
const CUT_MS_MAX: u64 = 40_000;

impl SimulatedCluster {
    /// The cuts of one second begin, and those that are over end.
    pub(super) fn inject_link_cuts(&mut self) {
        let now = self.now;
        self.scheduler_cut.take_if(|cut| now >= cut.until);
        if self.has_fault(self.faults.scheduler_cut) && self.scheduler_cut.is_none() {
            let until = now.plus_ms(1_000 + self.rng.next_below(CUT_MS_MAX));
            let is_one_way = self.rng.next_bool(500);
            self.scheduler_cut = Some(SchedulerCut { until, is_one_way });
        }
        if self.has_fault(self.faults.group_cut) {
            let back = now.plus_ms(1_000 + self.rng.next_below(CUT_MS_MAX));
            for server in self.nodes.keys().copied().collect::<Vec<_>>() {
                if self.is_alive(server) && self.rng.next_bool(500) {
                    let node = self.node(server);
                    (node.unreachable, node.has_failed) = (Some((now, back)), true);
                }
            }
        }
    }

    pub(super) fn serve_probe(&mut self, server: ServerId, mut volumes: Vec<VolumeId>) {
        if self.is_alive(server) {
            volumes.retain(|id| !self.nodes[&server].volumes.contains_key(id));
            let lost = volumes;
            self.schedule_due(
                10,
                ClusterEvent::ApplyEvent(Event::VolumesProbed { server, lost }),
            );
        }
    }

    pub(super) fn serve_find(&mut self, server: ServerId, mut volumes: Vec<VolumeId>) {
        let (is_there, there) = (self.is_alive(server), &self.nodes[&server].volumes);
        volumes.retain(|id| is_there && there.contains_key(id));
        let found = volumes;
        self.schedule_due(
            10,
            ClusterEvent::ApplyEvent(Event::VolumesFound { server, found }),
        );
    }

    /// Blocked messages arrive after the link is restored, because calls are repeated.
    pub(super) fn delay_until_connected(&mut self, due: ClusterEvent) {
        let left_ms = self
            .scheduler_cut
            .map_or(0, |cut| cut.until.ms_since(self.now));
        let delay_ms = left_ms + 1 + self.rng.next_below(200);
        self.schedule_due(delay_ms, due);
    }

    /// The driver's work in each second: it waits for jobs of nodes, probes silent nodes, and gives
    /// the core the resulting facts.
    pub(super) fn check_silent_nodes(&mut self, has_catalog: bool, nodes: Vec<NodeInfo>) {
        let running: Vec<ServerId> = self
            .scheduler
            .running_executions()
            .map(|(_, at)| at)
            .collect();
        let asked = self
            .connectivity
            .nodes_to_probe(&self.scheduler, self.now)
            .into_iter();
        let asked: Vec<ServerId> = asked.map(|(server, _)| server).collect();
        let is_cut = self.scheduler_cut.is_some();
        for server in running.into_iter().chain(asked) {
            let Some(node) = self.scheduler.node(server) else {
                continue;
            };
            let now: Time = self.now;
            let is_there = !is_cut && self.is_alive(server);
            match is_there {
                true => self.connectivity.note_answer(&node.address, now),
                false => self.connectivity.note_silence(&node.address, now, now),
            }
        }
        if has_catalog && !is_cut {
            let listed = nodes.iter().map(|node| node.id);
            self.connectivity.note_listing(listed, self.now);
            let (contact, scheduler) = (&self.connectivity, &self.scheduler);
            let is_heard = |server| contact.has_recent_answer(scheduler, server, self.now);
            if let Some(news) = self
                .listing_tracker
                .find_changes(scheduler, nodes, is_heard)
            {
                self.apply_event(news);
            }
        }
        for event in self.connectivity.detect_failures(&self.scheduler, self.now) {
            self.apply_event(event);
        }
    }
}
