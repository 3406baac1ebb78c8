//! Simulated nodes: their resources and their content. They do not move data.

use std::collections::BTreeMap;

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_sched::{NodeDeparture, NodeInfo, Space};
use bafs_workflow::{CachePolicy, VolumeIndex};

use crate::planner::{Environment, NodeClass};

/// A node.
#[derive(Debug, Clone)]
pub(super) struct SimulatedNode {
    /// Its kind, in the order of the environment.
    pub(super) class: u32,
    pub(super) cluster: u32,
    pub(super) speed_permille: u32,
    pub(super) memory_bytes: u64,
    pub(super) is_up: bool,
    /// Whether the catalog lists it.
    pub(super) is_listed: bool,
    /// Executions on it.
    pub(super) executions: Vec<u32>,
    /// Volumes on it, with their sizes.
    pub(super) volumes: BTreeMap<VolumeId, (VolumeIndex, u64)>,
    /// Volumes whose data are in memory, the latest last.
    memory_contents: Vec<CachedVolume>,
}

/// Bytes of a volume in memory.
#[derive(Debug, Clone, Copy)]
struct CachedVolume {
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

impl SimulatedNode {
    /// How much of a scan is found in memory. Of a volume that is larger, the last blocks push out
    /// the first ones, unless those used last are replaced.
    pub(super) fn cached_bytes(&self, scan: &Scan) -> u64 {
        match scan.policy {
            CachePolicy::Lru if scan.bytes > self.memory_bytes => 0,
            _ => self.resident_bytes(scan).min(scan.bytes),
        }
    }

    fn resident_bytes(&self, scan: &Scan) -> u64 {
        let is_this =
            |held: &&CachedVolume| held.volume == scan.volume && held.generation == scan.generation;
        self.memory_contents
            .iter()
            .find(is_this)
            .map_or(0, |held| held.bytes)
    }

    /// A scan has ended: memory keeps as much of it as fits, and evicts the least recently used
    /// volumes.
    pub(super) fn cache_scan(&mut self, scan: &Scan) {
        let held = self.resident_bytes(scan);
        self.memory_contents
            .retain(|held| held.volume != scan.volume);
        let bytes = match scan.policy {
            _ if scan.bytes <= self.memory_bytes => scan.bytes.max(held),
            CachePolicy::Lru => 0,
            CachePolicy::Mru => self.memory_bytes,
        };
        if bytes == 0 {
            return;
        }
        self.memory_contents.push(CachedVolume {
            volume: scan.volume,
            generation: scan.generation,
            bytes,
        });
        let mut held: u64 = self.memory_contents.iter().map(|held| held.bytes).sum();
        while held > self.memory_bytes {
            held -= self.memory_contents.remove(0).bytes;
        }
    }

    /// It returns as it was when it was new.
    pub(super) fn reset(&mut self) {
        self.executions.clear();
        self.volumes.clear();
        self.memory_contents.clear();
    }
}

/// The nodes of an environment, in its order, and the names of its clusters.
pub(super) fn build_nodes(environment: &Environment) -> (Vec<SimulatedNode>, Vec<String>) {
    let (mut nodes, mut clusters) = (Vec::new(), Vec::<String>::new());
    let mut known: BTreeMap<&str, u32> = BTreeMap::new();
    for (class, spec) in environment.nodes.iter().enumerate() {
        let cluster = *known.entry(&spec.cluster).or_insert_with(|| {
            clusters.push(spec.cluster.clone());
            clusters.len() as u32 - 1
        });
        let node = SimulatedNode {
            class: class as u32,
            cluster,
            speed_permille: spec.speed_permille,
            memory_bytes: spec.memory_bytes,
            is_up: spec.is_present_at_start(),
            is_listed: spec.is_present_at_start(),
            executions: Vec::new(),
            volumes: BTreeMap::new(),
            memory_contents: Vec::new(),
        };
        nodes.extend(std::iter::repeat_n(node, spec.count as usize));
    }
    (nodes, clusters)
}

/// For each cluster, how many of its nodes compute.
pub(super) fn count_computing_nodes(
    environment: &Environment,
    nodes: &[SimulatedNode],
    clusters: usize,
) -> Vec<u32> {
    let mut computing = vec![0; clusters];
    for node in nodes {
        let class = &environment.nodes[node.class as usize];
        computing[node.cluster as usize] += u32::from(class.cpus > 0);
    }
    computing
}

/// The id of the node at this position.
pub(super) fn server_id(node: usize) -> ServerId {
    ServerId(node as u64 + 1)
}

/// The position of the node with this id.
pub(super) fn node_index(server: ServerId) -> usize {
    (server.0 - 1) as usize
}

/// The catalog's entry of a node.
pub(super) fn node_info(at: usize, class: &NodeClass) -> NodeInfo {
    NodeInfo {
        id: server_id(at),
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
        foreign_space: Space::ZERO,
        slots: class.cpus,
        departure: NodeDeparture::default(),
        memory_bytes: 0,
        temporary_bytes: 0,
        cached: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_node(memory_bytes: u64) -> SimulatedNode {
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
        build_nodes(&environment).0.remove(0)
    }

    fn test_scan(generation: u32, bytes: u64) -> Scan {
        Scan {
            volume: VolumeIndex(0),
            generation,
            bytes,
            policy: CachePolicy::Lru,
        }
    }

    #[test]
    fn memory_holds_exactly_the_read_data() {
        let mut node = test_node(100);
        node.cache_scan(&test_scan(0, 10));
        assert_eq!(node.cached_bytes(&test_scan(0, 10)), 10);
        assert_eq!(node.cached_bytes(&test_scan(0, 90)), 10);
        node.cache_scan(&test_scan(0, 90));
        node.cache_scan(&test_scan(0, 10));
        assert_eq!(
            node.cached_bytes(&test_scan(0, 90)),
            90,
            "a shorter scan keeps the rest"
        );
    }

    #[test]
    fn recreated_cache_finds_nothing_in_memory() {
        let mut node = test_node(100);
        node.cache_scan(&test_scan(0, 10));
        assert_eq!(node.cached_bytes(&test_scan(1, 10)), 0);
    }
}
