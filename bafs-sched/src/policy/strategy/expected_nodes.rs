//! The nodes to plan with: those that are there, and those that failed and will soon be back.

use std::collections::BTreeMap;

use bafs_proto::ids::ServerId;
use bafs_proto::time::Time;

use crate::policy::View;
use crate::space::Space;
use crate::state::nodes::FleetNode;
use crate::state::strategy::RESTARTS;
use crate::strategy_selector::{NodeKind, StrategySelectorConfig};

impl StrategySelectorConfig {
    /// How long a lost node is expected to come back, in milliseconds. Where none is expected to
    /// fail, one that does is gone.
    fn back_within_ms(&self) -> u64 {
        let is_any_expected = self.mtbf_s.is_some();
        let restart_s = if is_any_expected { self.restart_s } else { 0 };
        restart_s.saturating_mul(RESTARTS * 1_000)
    }
}

impl View<'_> {
    /// Nodes that were lost and are expected back, each with when it was lost: no other one is in
    /// its place, and it is not gone for long.
    pub(crate) fn nodes_expected_back(&self) -> BTreeMap<ServerId, Time> {
        let Some(guided) = &self.guided else {
            return BTreeMap::new();
        };
        let within_ms = guided.guide.back_within_ms();
        let lost = guided.lost_nodes.since.iter();
        let is_expected = |(server, since): &(&ServerId, &Time)| {
            self.fleet.is_vacant(**server) && self.now < since.plus_ms(within_ms)
        };
        let back = lost.filter(is_expected);
        back.map(|(server, since)| (*server, *since)).collect()
    }

    /// When the next of these nodes is given up.
    pub(crate) fn next_given_up(&self) -> Option<Time> {
        let within_ms = self.guided.as_ref()?.guide.back_within_ms();
        let expected = self.nodes_expected_back().into_values();
        expected.map(|since| since.plus_ms(within_ms)).min()
    }

    fn expected_nodes(&self) -> impl Iterator<Item = (ServerId, &FleetNode)> {
        let lost = self.nodes_expected_back().into_keys();
        let away = lost.filter_map(|server| Some((server, self.fleet.get(server)?)));
        self.fleet.live().chain(away)
    }

    /// Processors and bytes of the nodes to plan with.
    pub(crate) fn processors_and_bytes(&self) -> (u64, u64) {
        self.expected_nodes()
            .fold((0, 0u64), |(cpus, bytes), (id, node)| {
                let usable = self.fleet.usable_when_back(id).bytes;
                (cpus + u64::from(node.slots()), bytes.saturating_add(usable))
            })
    }

    /// The nodes to plan with, equal ones together.
    pub(crate) fn node_kinds(&self) -> Vec<NodeKind> {
        let mut kinds: BTreeMap<(u32, Space, &str), u32> = BTreeMap::new();
        for (id, node) in self.expected_nodes() {
            let kind = (
                node.slots(),
                self.fleet.usable_when_back(id),
                node.seen.group.as_str(),
            );
            *kinds.entry(kind).or_default() += 1;
        }
        let kinds = kinds.into_iter();
        let kinds = kinds.map(|((slots, space, group), count)| NodeKind {
            count,
            slots,
            space,
            group: group.to_owned(),
        });
        kinds.collect()
    }
}
