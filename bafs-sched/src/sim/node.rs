//! Simulated nodes: what they offer and what is on them. They do not move data.

use std::collections::BTreeMap;

use bafs_proto::ids::{ServerId, VolumeId};

use crate::logic::{NodeSeen, Space};
use crate::planner::{Environment, NodeClass};
use crate::workflow::{CachePolicy, VolumeIndex};

/// A node.
#[derive(Debug, Clone)]
pub(super) struct Node {
    /// Its kind, in the order of the environment.
    pub(super) class: u32,
    pub(super) cluster: u32,
    pub(super) speed_permille: u32,
    pub(super) memory_bytes: u64,
    pub(super) is_up: bool,
    /// Whether the catalog lists it.
    pub(super) is_listed: bool,
    /// Executions on it.
    pub(super) runs: Vec<u32>,
    /// Volumes on it, with their sizes.
    pub(super) volumes: BTreeMap<VolumeId, (VolumeIndex, u64)>,
    /// Volumes whose data are in memory, the latest last.
    memory: Vec<InMemory>,
}

/// What is in memory of a volume.
#[derive(Debug, Clone, Copy)]
struct InMemory {
    volume: VolumeIndex,
    /// The generation of the cache that it was read from.
    generation: u32,
    bytes: u64,
}

/// A volume that is scanned from its beginning.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scan {
    pub(super) volume: VolumeIndex,
    pub(super) generation: u32,
    pub(super) bytes: u64,
    pub(super) policy: CachePolicy,
}

impl Node {
    /// How much of a scan is found in memory. Of a volume that is larger, the last blocks push out
    /// the first ones, unless those used last are replaced.
    pub(super) fn in_memory(&self, scan: &Scan) -> u64 {
        match scan.policy {
            CachePolicy::Lru if scan.bytes > self.memory_bytes => 0,
            _ => self.held(scan).min(scan.bytes),
        }
    }

    fn held(&self, scan: &Scan) -> u64 {
        let is_this =
            |held: &&InMemory| held.volume == scan.volume && held.generation == scan.generation;
        self.memory
            .iter()
            .find(is_this)
            .map_or(0, |held| held.bytes)
    }

    /// A scan has ended: what was read is in memory as far as it can be, and volumes used longest
    /// ago have left.
    pub(super) fn remember(&mut self, scan: &Scan) {
        let held = self.held(scan);
        self.memory.retain(|held| held.volume != scan.volume);
        let bytes = match scan.policy {
            _ if scan.bytes <= self.memory_bytes => scan.bytes.max(held),
            CachePolicy::Lru => 0,
            CachePolicy::Mru => self.memory_bytes,
        };
        if bytes == 0 {
            return;
        }
        self.memory.push(InMemory {
            volume: scan.volume,
            generation: scan.generation,
            bytes,
        });
        let mut held: u64 = self.memory.iter().map(|held| held.bytes).sum();
        while held > self.memory_bytes {
            held -= self.memory.remove(0).bytes;
        }
    }

    /// It returns as it was when it was new.
    pub(super) fn empty(&mut self) {
        self.runs.clear();
        self.volumes.clear();
        self.memory.clear();
    }
}

/// The nodes of an environment, in its order, and the names of its clusters.
pub(super) fn nodes_of(environment: &Environment) -> (Vec<Node>, Vec<String>) {
    let (mut nodes, mut clusters) = (Vec::new(), Vec::<String>::new());
    let mut known: BTreeMap<&str, u32> = BTreeMap::new();
    for (class, spec) in environment.nodes.iter().enumerate() {
        let cluster = *known.entry(&spec.cluster).or_insert_with(|| {
            clusters.push(spec.cluster.clone());
            clusters.len() as u32 - 1
        });
        let node = Node {
            class: class as u32,
            cluster,
            speed_permille: spec.speed_permille,
            memory_bytes: spec.memory_bytes,
            is_up: spec.is_there_first(),
            is_listed: spec.is_there_first(),
            runs: Vec::new(),
            volumes: BTreeMap::new(),
            memory: Vec::new(),
        };
        nodes.extend(std::iter::repeat_n(node, spec.count as usize));
    }
    (nodes, clusters)
}

/// The id of the node at this position.
pub(super) fn server_of(node: usize) -> ServerId {
    ServerId(node as u64 + 1)
}

/// The position of the node with this id.
pub(super) fn node_of(server: ServerId) -> usize {
    (server.0 - 1) as usize
}

/// What the catalog says of a node.
pub(super) fn seen(at: usize, class: &NodeClass) -> NodeSeen {
    NodeSeen {
        id: server_of(at),
        name: format!("n{at}"),
        address: format!("n{at}:1"),
        group: class.cluster.clone(),
        capacity: Space {
            bytes: class.storage_bytes,
            files: if class.storage_bytes > 0 {
                class.files
            } else {
                0
            },
        },
        foreign: Space::ZERO,
        slots: class.cpus,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(memory_bytes: u64) -> Node {
        let class = NodeClass {
            memory_bytes,
            ..NodeClass::new(1, 1, 1_000)
        };
        let environment = Environment {
            nodes: vec![class],
            home_bytes_per_s: 1,
            local_bytes_per_s: 1,
            mtbf_s: None,
            restart_s: 60,
        };
        nodes_of(&environment).0.remove(0)
    }

    fn scan(generation: u32, bytes: u64) -> Scan {
        Scan {
            volume: VolumeIndex(0),
            generation,
            bytes,
            policy: CachePolicy::Lru,
        }
    }

    #[test]
    fn memory_has_what_was_read_and_no_more() {
        let mut node = node(100);
        node.remember(&scan(0, 10));
        assert_eq!(node.in_memory(&scan(0, 10)), 10);
        assert_eq!(node.in_memory(&scan(0, 90)), 10);
        node.remember(&scan(0, 90));
        node.remember(&scan(0, 10));
        assert_eq!(
            node.in_memory(&scan(0, 90)),
            90,
            "a shorter scan keeps the rest"
        );
    }

    #[test]
    fn memory_is_of_no_use_when_the_cache_was_deleted_and_made_anew() {
        let mut node = node(100);
        node.remember(&scan(0, 10));
        assert_eq!(node.in_memory(&scan(1, 10)), 0);
    }
}
