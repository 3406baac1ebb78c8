//! Arrivals, departures and failures of simulated nodes, and the catalog's delay in noticing them.
//! Their data is lost then; nothing is moved here.

use bafs_sched::Event;

use super::engine::{Simulation, SimulationEvent};
use super::flows::FillSource;
use super::link::SECOND_US;
use super::node::{node_info, server_id};
use super::random::draw_exponential;
use crate::planner::NodeClass;

/// The catalog's delay until a failed node is missing, in microseconds.
const ADVERT_TTL_US: u64 = 4 * SECOND_US;
/// The catalog's delay until a restarted node is listed, in microseconds.
const ADVERT_DELAY_US: u64 = SECOND_US;

/// Delay of a caller's next attempt after a refusal, in microseconds.
const POLL_PAUSE_US: u64 = SECOND_US / 5;

impl Simulation {
    /// A node arrives, unless it has left permanently meanwhile.
    pub(super) fn add_node(&mut self, node: u32) {
        if !self.has_left(node) {
            self.nodes[node as usize].is_up = true;
            self.schedule_event(
                self.now + ADVERT_DELAY_US,
                SimulationEvent::CatalogNotices(node),
            );
        }
    }

    /// A failed node is listed again, as a new node at its address, so the scheduler knows that the
    /// old one is lost.
    pub(super) fn replace_node(&mut self, node: u32) {
        if !self.has_left(node) {
            self.nodes[node as usize].is_up = true;
            self.lose_node(node);
            self.notice_node(node);
        }
    }

    pub(super) fn remove_node(&mut self, node: u32) {
        self.reset_node(node);
        self.schedule_event(
            self.now + ADVERT_TTL_US,
            SimulationEvent::CatalogNotices(node),
        );
    }

    /// Gives the core the changes of the node list.
    pub(super) fn update_listing(&mut self) {
        let mut noticed = std::mem::take(&mut self.noticed_nodes);
        noticed.sort_unstable();
        noticed.dedup();
        let (up, down): (Vec<u32>, Vec<u32>) = noticed
            .into_iter()
            .partition(|at| self.nodes[*at as usize].is_listed);
        let seen = |at: u32| node_info(at as usize, self.class_of(at));
        let nodes = up.into_iter().map(seen).collect();
        let missed = down.into_iter().map(|at| server_id(at as usize)).collect();
        self.pending_events.push_back(Event::NodesListed {
            nodes,
            unlisted: missed,
        });
    }

    pub(super) fn notice_node(&mut self, at: u32) {
        let node = &mut self.nodes[at as usize];
        node.is_listed = node.is_up;
        // All changes noticed at this time are in one list.
        if self.noticed_nodes.is_empty() {
            self.schedule_event(self.now, SimulationEvent::CatalogLists);
        }
        self.noticed_nodes.push(at);
    }

    pub(super) fn schedule_failure(&mut self) {
        if let Some(mtbf_s) = self.scenario.environment.mtbf_s {
            let wait = draw_exponential(&mut self.rng, mtbf_s.saturating_mul(SECOND_US));
            self.schedule_event(
                self.now.saturating_add(wait),
                SimulationEvent::RandomNodeFails,
            );
        }
    }

    pub(super) fn schedule_arrivals(&mut self) {
        for node in 0..self.nodes.len() as u32 {
            let class = self.class_of(node);
            let (from_s, until_s) = (class.arrival_s, class.departure_s);
            if from_s > 0 {
                self.schedule_event(
                    from_s.saturating_mul(SECOND_US),
                    SimulationEvent::NodeArrives(node),
                );
            }
            if let Some(until_s) = until_s {
                self.schedule_event(
                    until_s.saturating_mul(SECOND_US),
                    SimulationEvent::NodeLeaves(node),
                );
            }
        }
    }

    pub(super) fn class_of(&self, node: u32) -> &NodeClass {
        let class = self.nodes[node as usize].class;
        &self.scenario.environment.nodes[class as usize]
    }

    fn has_left(&self, node: u32) -> bool {
        let until_s = self.class_of(node).departure_s;
        until_s.is_some_and(|until_s| until_s.saturating_mul(SECOND_US) <= self.now)
    }

    /// A node's server ends while its machine runs on: its callers are refused immediately, and
    /// stop retrying after a while, whatever the catalog lists.
    pub(super) fn fail_server(&mut self, node: u32) {
        let is_up = self.nodes[node as usize].is_up;
        if is_up && !self.nodes[node as usize].executions.is_empty() {
            let lost_us = self.scheduler.settings().node_timeout_ms * 1_000;
            self.schedule_event(
                self.now + lost_us + POLL_PAUSE_US,
                SimulationEvent::NodeGivenUp(node),
            );
        }
        self.fail_node(node);
    }

    /// The callers of a node stop retrying, unless it has restarted meanwhile.
    pub(super) fn give_up_node(&mut self, node: u32) {
        if !self.nodes[node as usize].is_up {
            self.lose_node(node);
        }
    }

    fn lose_node(&mut self, node: u32) {
        let server = server_id(node as usize);
        self.pending_events
            .push_back(Event::ServerSilent { server });
    }

    pub(super) fn fail_node(&mut self, node: u32) {
        if !self.nodes[node as usize].is_up {
            return;
        }
        self.result.failures += 1;
        self.reset_node(node);
        let restart = self.scenario.environment.restart_s;
        let back = self.now.saturating_add(restart.saturating_mul(SECOND_US));
        self.schedule_event(
            back.saturating_add(ADVERT_DELAY_US),
            SimulationEvent::NodeReplaced(node),
        );
        self.schedule_event(
            self.now + ADVERT_TTL_US,
            SimulationEvent::CatalogNotices(node),
        );
    }

    /// A node fails and loses its data.
    fn reset_node(&mut self, node: u32) {
        for at in self.nodes[node as usize].executions.clone() {
            self.record_span(at, false);
            self.remove_execution(at);
        }
        let volumes = std::mem::take(&mut self.nodes[node as usize].volumes);
        for (id, (volume, bytes)) in volumes {
            self.forget_volume(node as usize, id, volume, bytes);
        }
        self.records_examined += (self.extracts.len() + self.fills.len()) as u64;
        let sending = self.extracts.iter().filter(|(_, it)| it.node == node);
        let sending: Vec<_> = sending.map(|(id, it)| (*id, it.flows)).collect();
        for (id, flows) in sending {
            self.extracts.remove(&id);
            self.cut_flows(flows);
        }
        let copied = self.fills.iter();
        let copied = copied.filter(|(_, fill)| fill.source == FillSource::Node(node));
        let copied: Vec<_> = copied.map(|(id, fill)| (*id, *fill)).collect();
        for (id, fill) in copied {
            self.fills.remove(&id);
            self.cut_fill(fill);
            self.fail_copy(id);
        }
        self.nodes[node as usize].reset();
        self.nodes[node as usize].is_up = false;
        self.record_sample();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::{CanonicalWorkload, Environment};
    use crate::simulator::{LoadModel, Policy, Scenario, build_canonical_workflow};

    #[test]
    fn each_failure_is_noticed_after_its_own_time() {
        let canonical =
            CanonicalWorkload::parse("width=1,depth=1,batch=0B,private=0B,run=9s").unwrap();
        let environment = Environment {
            nodes: vec![NodeClass::new(3, 1, 1_000)],
            home_bytes_per_s: 1,
            local_bytes_per_s: 1,
            mtbf_s: None,
            restart_s: 60,
        };
        let load = LoadModel::Declared { variability_ppm: 0 };
        let scenario = Scenario::new(environment, Policy::Need, load, 1);
        let mut simulation = Simulation::new(build_canonical_workflow(&canonical), scenario);
        simulation.fail_node(0);
        simulation.now = ADVERT_TTL_US - 1;
        simulation.fail_node(1);
        simulation.now = ADVERT_TTL_US;
        simulation.notice_node(0);
        simulation.pending_events.clear();
        simulation.update_listing();
        let Some(Event::NodesListed {
            nodes,
            unlisted: missed,
        }) = simulation.pending_events.pop_front()
        else {
            panic!("no list");
        };
        assert_eq!(missed, [server_id(0)], "the second one is not missed yet");
        assert!(nodes.is_empty(), "of the others nothing is new: {nodes:?}");
    }

    #[test]
    fn waiting_scheduler_loses_a_refusing_server_early() {
        let canonical =
            CanonicalWorkload::parse("width=1,depth=1,batch=0B,private=0B,run=9s").unwrap();
        let took_s = |node: u32, restart_s: u64| {
            let environment = Environment {
                nodes: vec![NodeClass::new(2, 1, 1_000)],
                home_bytes_per_s: 1,
                local_bytes_per_s: 1,
                mtbf_s: None,
                restart_s,
            };
            let load = LoadModel::Declared { variability_ppm: 0 };
            let scenario = Scenario {
                failures: vec![(SECOND_US, node)],
                ..Scenario::new(environment, Policy::Need, load, 1)
            };
            let run = Simulation::new(build_canonical_workflow(&canonical), scenario).run();
            run.unwrap().seconds()
        };
        let most = |restart_s| took_s(0, restart_s).max(took_s(1, restart_s));
        let least = took_s(0, 60).min(took_s(1, 60));
        assert!((9.0..9.1).contains(&least), "the other one fails: {least}");
        // It fails after 1 s and is declared lost 6.2 s later, and soon the other one runs the job;
        // by the catalog it would be 20 s.
        assert!((16.2..17.0).contains(&most(60)), "{}", most(60));
        // When it starts again at once it is listed a second later, as another one.
        assert!((11.0..11.5).contains(&most(0)), "{}", most(0));
    }
}
