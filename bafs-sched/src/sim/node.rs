//! Simulated nodes: what they offer and what is on them. They do not move data.

use std::collections::BTreeMap;

use bafs_proto::ids::{ServerId, VolumeId};

use crate::logic::{NodeSeen, Space};
use crate::planner::{Environment, NodeClass};
use crate::workflow::VolumeIndex;

/// Files that a node can hold: not what these simulations are about.
const FILES: u64 = 1 << 40;

/// A node.
#[derive(Debug, Clone)]
pub(super) struct Node {
    /// Its kind, in the order of the environment.
    pub(super) class: u32,
    pub(super) cluster: u32,
    pub(super) speed_permille: u32,
    pub(super) memory_bytes: u64,
    pub(super) is_up: bool,
    /// Executions on it.
    pub(super) runs: Vec<u32>,
    /// Volumes on it, with their sizes.
    pub(super) volumes: BTreeMap<VolumeId, (VolumeIndex, u64)>,
    /// Volumes whose data are in memory, the latest last, with their bytes.
    memory: Vec<(VolumeIndex, u64)>,
}

impl Node {
    /// Whether this volume is in memory; it is afterwards if it can be, and those used longest ago
    /// have left.
    pub(super) fn read_through_memory(&mut self, volume: VolumeIndex, bytes: u64) -> bool {
        let before = self.memory.len();
        self.memory.retain(|(held, _)| *held != volume);
        let is_hit = self.memory.len() < before;
        if bytes <= self.memory_bytes {
            self.memory.push((volume, bytes));
            let mut held: u64 = self.memory.iter().map(|(_, bytes)| bytes).sum();
            while held > self.memory_bytes {
                held -= self.memory.remove(0).1;
            }
        }
        is_hit
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
        address: String::new(),
        group: class.cluster.clone(),
        capacity: Space {
            bytes: class.storage_bytes,
            files: if class.storage_bytes > 0 { FILES } else { 0 },
        },
        foreign: Space::ZERO,
        slots: class.cpus,
    }
}
