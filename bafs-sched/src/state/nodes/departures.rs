//! Which nodes leave, and when, by their own account. What becomes of their data is decided in
//! `policy/replication/departures.rs`.

use bafs_proto::ids::ServerId;

use super::{Fleet, FleetNode};
use crate::event::{NodeDeparture, NodeInfo};

impl Fleet {
    /// When a node leaves, as far as is known.
    pub(crate) fn departure(&self, server: ServerId) -> NodeDeparture {
        let node = self.nodes.get(&server);
        node.map_or_else(NodeDeparture::default, |node| node.seen.departure)
    }

    /// Live nodes that drain.
    pub(crate) fn draining(&self) -> impl Iterator<Item = ServerId> {
        let draining = self.draining.iter().copied();
        draining.filter(|server| self.get(*server).is_some_and(|node| !node.is_lost))
    }

    /// Whether a node drains.
    pub(crate) fn is_draining(&self, server: ServerId) -> bool {
        !self.draining.is_empty() && self.draining.contains(&server)
    }

    /// A node drains, by the report of a job.
    pub(crate) fn note_draining(&mut self, server: ServerId) {
        let drain = |node: &mut FleetNode| node.seen.departure.is_draining = true;
        if self.update(server, drain).is_some() {
            // What is seen of a node is not compared by an update.
            self.nodes.note(&server);
            self.draining.insert(server);
        }
    }

    /// Takes from a listing of a node whether it drains.
    pub(super) fn see_departure(&mut self, seen: &NodeInfo) {
        if seen.departure.is_draining {
            self.draining.insert(seen.id);
        } else {
            self.draining.remove(&seen.id);
        }
    }
}
