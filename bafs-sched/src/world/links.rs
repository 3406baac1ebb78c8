//! Links between the scheduler and all others, and between groups: cut for a while. What the driver
//! hears of nodes, and what follows.

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::time::Time;

use super::{Cut, Due, World};
use crate::logic::{Event, NodeSeen};

/// A cut is so long at most, in milliseconds: longer than any call is repeated.
const CUT_MS_MAX: u64 = 40_000;

impl World {
    /// The cuts of one second begin, and those that are over end.
    pub(super) fn cut_links(&mut self) {
        let now = self.now;
        self.cut.take_if(|cut| now >= cut.until);
        if self.is_faulty(self.faults.scheduler_cut) && self.cut.is_none() {
            let until = now.plus_ms(1_000 + self.dice.below(CUT_MS_MAX));
            let is_one_way = self.dice.chance(500);
            self.cut = Some(Cut { until, is_one_way });
        }
        if self.is_faulty(self.faults.group_cut) {
            let back = now.plus_ms(1_000 + self.dice.below(CUT_MS_MAX));
            for server in self.nodes.keys().copied().collect::<Vec<_>>() {
                if self.is_alive(server) && self.dice.chance(500) {
                    let node = self.node(server);
                    (node.away, node.was_hurt) = (Some((now, back)), true);
                }
            }
        }
    }

    pub(super) fn serve_probe(&mut self, server: ServerId, mut volumes: Vec<VolumeId>) {
        if self.is_alive(server) {
            volumes.retain(|id| !self.nodes[&server].volumes.contains_key(id));
            let lost = volumes;
            self.at(10, Due::Tell(Event::VolumesProbed { server, lost }));
        }
    }

    pub(super) fn serve_find(&mut self, server: ServerId, mut volumes: Vec<VolumeId>) {
        let (is_there, there) = (self.is_alive(server), &self.nodes[&server].volumes);
        volumes.retain(|id| is_there && there.contains_key(id));
        let found = volumes;
        self.at(10, Due::Tell(Event::VolumesFound { server, found }));
    }

    /// What cannot pass now comes when the link is back, as calls are repeated.
    pub(super) fn wait_for_link(&mut self, due: Due) {
        let left_ms = self.cut.map_or(0, |cut| cut.until.ms_since(self.now));
        let delay_ms = left_ms + 1 + self.dice.below(200);
        self.at(delay_ms, due);
    }

    /// What the driver does each second: it waits for jobs of nodes, asks those that are silent,
    /// and tells the core what follows.
    pub(super) fn judge_silence(&mut self, has_catalog: bool, nodes: Vec<NodeSeen>) {
        let running: Vec<ServerId> = self.scheduler.running().map(|(_, at)| at).collect();
        let asked = self
            .contact
            .nodes_to_ask(&self.scheduler, self.now)
            .into_iter();
        let asked: Vec<ServerId> = asked.map(|(server, _)| server).collect();
        let is_cut = self.cut.is_some();
        for server in running.into_iter().chain(asked) {
            let Some(node) = self.scheduler.node(server) else {
                continue;
            };
            let now: Time = self.now;
            let is_there = !is_cut && self.is_alive(server);
            match is_there {
                true => self.contact.answered(&node.address, now),
                false => self.contact.unanswered(&node.address, now, now),
            }
        }
        if has_catalog && !is_cut {
            let listed = nodes.iter().map(|node| node.id);
            self.contact.listed(listed, self.now);
            let (contact, scheduler) = (&self.contact, &self.scheduler);
            let is_heard = |server| contact.is_heard(scheduler, server, self.now);
            if let Some(news) = self.listing.news(scheduler, nodes, is_heard) {
                self.tell(news);
            }
        }
        for event in self.contact.judge(&self.scheduler, self.now) {
            self.tell(event);
        }
    }
}
