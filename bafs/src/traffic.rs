//! How much servers moved: read from the counters of those that live. Changes nothing.

use std::collections::BTreeMap;

use bafs_proto::ids::ServerId;
use bafs_proto::message::{ReadCounters, ServerKind};

use crate::client::ClusterClient;

/// A server answers within so long, or its last figures stay, in milliseconds.
const ANSWER_TIMEOUT_MS: u64 = 1_000;

/// Bytes that servers moved since they were looked at first.
#[derive(Debug, Default)]
pub(crate) struct TrafficTotals {
    servers: BTreeMap<ServerId, ServerTraffic>,
}

#[derive(Debug)]
struct ServerTraffic {
    kind: ServerKind,
    /// What its counter said last; it begins anew with each start of the server.
    last_value: u64,
    transferred_bytes: u64,
}

impl TrafficTotals {
    /// Takes what the counter of a server says now. What a server without an answer said stays.
    fn record_counter(&mut self, server: ServerId, kind: ServerKind, value: u64) {
        let new = || ServerTraffic {
            kind,
            last_value: value,
            transferred_bytes: 0,
        };
        let counted = self.servers.entry(server).or_insert_with(new);
        let more = value.checked_sub(counted.last_value).unwrap_or(value);
        counted.transferred_bytes = counted.transferred_bytes.saturating_add(more);
        counted.last_value = value;
    }

    /// What crossed the link to home, and what nodes gave each other.
    pub(crate) fn total_bytes(&self) -> (u64, u64) {
        let sum = |kind: ServerKind| {
            let servers = self.servers.values().filter(|server| server.kind == kind);
            servers.map(|server| server.transferred_bytes).sum()
        };
        (sum(ServerKind::Home), sum(ServerKind::Node))
    }
}

/// Asks the servers that live what they moved.
pub(crate) async fn poll_servers(client: &ClusterClient, moved: &mut TrafficTotals) {
    for server in client.list_servers(None).await.unwrap_or_default() {
        let Ok(counters) = client
            .call_with_timeout(&server.address, ReadCounters, ANSWER_TIMEOUT_MS)
            .await
        else {
            continue;
        };
        let value = |name: &str| counters.values.get(name).copied().unwrap_or(0);
        let value = match server.kind {
            ServerKind::Home => value("home_read_bytes") + value("home_written_bytes"),
            ServerKind::Node => value("cache_served_to_peers_bytes"),
        };
        moved.record_counter(server.id, server.kind, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moved_bytes_count_from_the_first_observation() {
        let (home, node) = (ServerId::random(), ServerId::random());
        let mut moved = TrafficTotals::default();
        moved.record_counter(home, ServerKind::Home, 5_000);
        moved.record_counter(node, ServerKind::Node, 700);
        assert_eq!(moved.total_bytes(), (0, 0));
        moved.record_counter(home, ServerKind::Home, 5_020);
        moved.record_counter(node, ServerKind::Node, 701);
        assert_eq!(moved.total_bytes(), (20, 1));
        // The node does not answer; the home was started anew.
        moved.record_counter(home, ServerKind::Home, 4);
        assert_eq!(moved.total_bytes(), (24, 1));
    }
}
