//! Transfers between simulated nodes, and between them and home: the links that they use, and the
//! effect of an aborted one. Decides nothing.
//!
//! A transfer over two links has arrived when it has passed both. Traffic of the link to home
//! counts on a node's own link only if that is slower than others of its cluster; otherwise the
//! link to home is the bottleneck.

use super::engine::Simulation;
use super::flows::{FillSource, FlowOwner, FlowPair, PendingFlow, VolumeFill};

impl Simulation {
    /// Moves bytes between an execution and a scratch volume (or home, with remote I/O).
    pub(super) fn transfer_volume_data(&mut self, at: u32, mount: usize, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let execution = &self.executions[at as usize];
        let node = execution.node;
        match execution.volumes[mount].server {
            None => {
                let owner = FlowOwner::Execution(at, execution.generation);
                for (link, flow) in self
                    .start_home_flows(node, bytes, owner)
                    .into_iter()
                    .flatten()
                {
                    let passing = PendingFlow {
                        link,
                        flow,
                        is_between_nodes: false,
                    };
                    self.wait_for_flow(at, passing);
                }
            }
            Some(server) if self.node_position(server) == node as usize => {
                let load = &self.scenario.load;
                if load
                    .mount_load(self.workflow_jobs(), execution.job, mount)
                    .is_bind_mount
                {
                    return;
                }
                self.transfer_over(at, 2 * node + 1, bytes);
            }
            Some(server) => {
                let holder = self.node_position(server) as u32;
                self.transfer_between(at, 2 * node, bytes);
                self.transfer_over(at, self.slower_link(2 * holder, 2 * holder + 1), bytes);
            }
        }
    }

    /// Transfers the peers' cached data to an execution. If few nodes have partitions, all of it
    /// crosses their links, and the part for this reader crosses the reader's link too.
    pub(super) fn transfer_from_peers(&mut self, at: u32, link: u32, bytes: u64, own_bytes: u64) {
        self.transfer_between(at, link, bytes);
        let own = 2 * self.executions[at as usize].node;
        if link != own {
            self.transfer_over(at, own, own_bytes);
        }
    }

    /// The link with the lower rate.
    fn slower_link(&self, one: u32, other: u32) -> u32 {
        let rate = |link: u32| self.links[link as usize].rate();
        if rate(other) < rate(one) { other } else { one }
    }

    pub(super) fn transfer_over(&mut self, at: u32, link: u32, bytes: u64) {
        let passing = self.begin_flow(at, link, bytes);
        self.wait_for_flow(at, passing);
    }

    /// The same for traffic between nodes.
    fn transfer_between(&mut self, at: u32, link: u32, bytes: u64) {
        self.result.peer_bytes += u128::from(bytes);
        let passing = self.begin_flow(at, link, bytes);
        let passing = PendingFlow {
            is_between_nodes: true,
            ..passing
        };
        self.wait_for_flow(at, passing);
    }

    fn begin_flow(&mut self, at: u32, link: u32, bytes: u64) -> PendingFlow {
        let generation = self.executions[at as usize].generation;
        let flow = self.start_flow(link, bytes, FlowOwner::Execution(at, generation));
        PendingFlow {
            link,
            flow,
            is_between_nodes: false,
        }
    }

    fn wait_for_flow(&mut self, at: u32, passing: PendingFlow) {
        let execution = &mut self.executions[at as usize];
        let free = usize::from(execution.pending_flows[0].is_some());
        debug_assert!(execution.pending_flows[free].is_none(), "two flows at most");
        execution.pending_flows[free] = Some(passing);
        execution.pending_count += 1;
    }

    /// Starts a transfer over the link to home of a node's cluster, to the node or from it.
    pub(super) fn start_home_flows(&mut self, node: u32, bytes: u64, owner: FlowOwner) -> FlowPair {
        let home = self.home_link(self.nodes[node as usize].cluster);
        let own = 2 * node;
        let most = self.links[home as usize].flow_rate_max();
        let is_slower = self.links[own as usize].rate() < most;
        let crossing = self.start_flow(home, bytes, owner);
        let passing = is_slower.then(|| (own, self.start_flow(own, bytes, owner)));
        [Some((home, crossing)), passing]
    }

    /// Ends flows before their time.
    pub(super) fn cut_flows(&mut self, flows: FlowPair) {
        for (link, flow) in flows.into_iter().flatten() {
            self.cut_flow(link, flow);
        }
    }

    /// The same for data that fills a volume, which no reader waits for.
    pub(super) fn cut_fill(&mut self, fill: VolumeFill) {
        for (link, flow) in fill.flows.into_iter().flatten() {
            let left = self.cut_flow(link, flow);
            if fill.source != FillSource::Home {
                self.result.peer_bytes -= u128::from(left);
            }
        }
    }

    /// The same for an ended execution.
    pub(super) fn cut_pending_flows(&mut self, flows: [Option<PendingFlow>; 2]) {
        for passing in flows.into_iter().flatten() {
            let left = self.cut_flow(passing.link, passing.flow);
            if passing.is_between_nodes {
                self.result.peer_bytes -= u128::from(left);
            }
        }
    }
}
