//! Bytes on their way between simulated nodes, and between them and home: over which links, and
//! what becomes of them when somebody stops. Decides nothing.
//!
//! What passes two links has arrived when both have seen it pass. What crosses the link to home
//! counts on a node's own link only where that is slower than others of its cluster: else the link
//! to home itself lets no flow have more.

use super::engine::{Fill, Filler, Owner, Simulation};
use super::link::FlowId;

/// Flows of what passes two links at most, with these.
pub(super) type Flows = [Option<(u32, FlowId)>; 2];

/// One of them has ended; whether that was the last.
pub(super) fn is_last(flows: &mut Flows, ended: u32) -> bool {
    for flow in flows.iter_mut() {
        if flow.is_some_and(|(link, _)| link == ended) {
            *flow = None;
        }
    }
    flows.iter().all(Option::is_none)
}

/// A flow that an execution waits for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Passing {
    pub(super) link: u32,
    pub(super) flow: FlowId,
    /// It counts as what passes between nodes.
    is_between_nodes: bool,
}

impl Simulation {
    /// Moves bytes between an execution and a scratch volume (or home, with remote I/O).
    pub(super) fn transfer(&mut self, at: u32, mount: usize, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let execution = &self.executions[at as usize];
        let node = execution.node;
        match execution.volumes[mount].server {
            None => {
                let owner = Owner::Execution(at, execution.generation);
                for (link, flow) in self.home_flows(node, bytes, owner).into_iter().flatten() {
                    let passing = Passing {
                        link,
                        flow,
                        is_between_nodes: false,
                    };
                    self.wait_for(at, passing);
                }
            }
            Some(server) if self.node_at(server) == node as usize => {
                let load = &self.scenario.load;
                if load.mount(self.jobs(), execution.job, mount).is_bound {
                    return;
                }
                self.transfer_over(at, 2 * node + 1, bytes);
            }
            Some(server) => {
                let holder = self.node_at(server) as u32;
                self.transfer_between(at, 2 * node, bytes);
                self.transfer_over(at, self.narrower(2 * holder, 2 * holder + 1), bytes);
            }
        }
    }

    /// Brings an execution what its node's peers have of a cache. Where few nodes have parts, all
    /// of it crosses the links of these, and what of it is for this reader also the reader's own.
    pub(super) fn transfer_from_peers(&mut self, at: u32, link: u32, bytes: u64, own_bytes: u64) {
        self.transfer_between(at, link, bytes);
        let own = 2 * self.executions[at as usize].node;
        if link != own {
            self.transfer_over(at, own, own_bytes);
        }
    }

    /// The link with the lower rate.
    fn narrower(&self, one: u32, other: u32) -> u32 {
        let rate = |link: u32| self.links[link as usize].rate();
        if rate(other) < rate(one) { other } else { one }
    }

    pub(super) fn transfer_over(&mut self, at: u32, link: u32, bytes: u64) {
        let passing = self.begin(at, link, bytes);
        self.wait_for(at, passing);
    }

    /// The same of what counts as passing between nodes.
    fn transfer_between(&mut self, at: u32, link: u32, bytes: u64) {
        self.run.peer_bytes += u128::from(bytes);
        let passing = self.begin(at, link, bytes);
        let passing = Passing {
            is_between_nodes: true,
            ..passing
        };
        self.wait_for(at, passing);
    }

    fn begin(&mut self, at: u32, link: u32, bytes: u64) -> Passing {
        let generation = self.executions[at as usize].generation;
        let flow = self.start_flow(link, bytes, Owner::Execution(at, generation));
        Passing {
            link,
            flow,
            is_between_nodes: false,
        }
    }

    fn wait_for(&mut self, at: u32, passing: Passing) {
        let execution = &mut self.executions[at as usize];
        let free = usize::from(execution.flows[0].is_some());
        debug_assert!(execution.flows[free].is_none(), "two flows at most");
        execution.flows[free] = Some(passing);
        execution.waits += 1;
    }

    /// Starts what crosses the link to home of a node's cluster, to the node or from it.
    pub(super) fn home_flows(&mut self, node: u32, bytes: u64, owner: Owner) -> Flows {
        let home = self.home_link(self.nodes[node as usize].cluster);
        let own = 2 * node;
        let most = self.links[home as usize].flow_rate_max();
        let is_slower = self.links[own as usize].rate() < most;
        let crossing = self.start_flow(home, bytes, owner);
        let passing = is_slower.then(|| (own, self.start_flow(own, bytes, owner)));
        [Some((home, crossing)), passing]
    }

    /// Ends flows before their time.
    pub(super) fn cut_flows(&mut self, flows: Flows) {
        for (link, flow) in flows.into_iter().flatten() {
            self.cut_flow(link, flow);
        }
    }

    /// The same of what comes into a volume, for which nothing is left to wait.
    pub(super) fn cut_fill(&mut self, fill: Fill) {
        for (link, flow) in fill.flows.into_iter().flatten() {
            let left = self.cut_flow(link, flow);
            if fill.from != Filler::Home {
                self.run.peer_bytes -= u128::from(left);
            }
        }
    }

    /// The same of an execution that is over.
    pub(super) fn cut_passing(&mut self, flows: [Option<Passing>; 2]) {
        for passing in flows.into_iter().flatten() {
            let left = self.cut_flow(passing.link, passing.flow);
            if passing.is_between_nodes {
                self.run.peer_bytes -= u128::from(left);
            }
        }
    }
}
