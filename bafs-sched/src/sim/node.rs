//! Simulated nodes: what they offer and what is on them. They do not move data.

use std::collections::BTreeMap;

use bafs_proto::ids::{ServerId, VolumeId};

use crate::logic::{NodeSeen, Space};
use crate::planner::{Environment, NodeClass};
use crate::workflow::{CachePolicy, VolumeIndex};

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
    /// How much of a volume that is scanned is found in memory; it is there afterwards as far as it
    /// can be, and volumes used longest ago have left. Of one that is larger, the last blocks push
    /// out the first ones, unless those used last are replaced.
    pub(super) fn read_through_memory(
        &mut self,
        volume: VolumeIndex,
        bytes: u64,
        policy: CachePolicy,
    ) -> u64 {
        let is_this = |(held, _): &(VolumeIndex, u64)| *held == volume;
        let found = self.memory.iter().position(is_this);
        let found = found.map_or(0, |at| self.memory.remove(at).1);
        let stays = match policy {
            _ if bytes <= self.memory_bytes => bytes,
            CachePolicy::Lru => return 0,
            CachePolicy::Mru => self.memory_bytes,
        };
        self.memory.push((volume, stays));
        let mut held: u64 = self.memory.iter().map(|(_, bytes)| bytes).sum();
        while held > self.memory_bytes {
            held -= self.memory.remove(0).1;
        }
        found.min(stays)
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
