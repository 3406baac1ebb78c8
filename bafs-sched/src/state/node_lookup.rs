//! Which nodes live, and what they have left.

use std::collections::BTreeMap;

use bafs_proto::ids::ServerId;

use crate::state::scheduler_state::State;

impl State {
    /// Nodes that live, as the catalog shows them.
    pub fn live_nodes(&self) -> impl Iterator<Item = ServerId> {
        self.fleet.live().map(|(server, _)| server)
    }

    /// How many nodes live, as the catalog shows them.
    pub(crate) fn live_node_count(&self) -> u64 {
        self.fleet.alive
    }

    /// Whether a node was in the last list of the catalog and has not been given up since.
    pub(crate) fn is_listed(&self, server: ServerId) -> bool {
        let node = self.fleet.get(server);
        node.is_some_and(|node| !node.is_lost && node.missing_since.is_none())
    }

    /// What the nodes of a group have left together, in bytes, where that is most.
    pub(crate) fn most_left_in_a_group(&self) -> u64 {
        let mut left: BTreeMap<&str, u64> = BTreeMap::new();
        for (server, node) in self.fleet.live() {
            let of_group = left.entry(&node.seen.group).or_default();
            *of_group = of_group.saturating_add(self.fleet.available(server).bytes);
        }
        left.into_values().max().unwrap_or(0)
    }

    /// Whether a live node can run jobs.
    pub(crate) fn has_workers(&self) -> bool {
        self.fleet.live().any(|(_, node)| node.seen.slots > 0)
    }
}
