//! Memory of nodes, and their room for temporary files. Places nothing.

use super::{Fleet, FleetNode};

impl FleetNode {
    /// Memory that it has for jobs, in bytes: without bounds where it does not say.
    pub(crate) fn memory_bytes(&self) -> u64 {
        match self.seen.memory_bytes {
            0 => u64::MAX,
            bytes => bytes,
        }
    }

    /// Memory that our own executions leave, in bytes.
    pub(crate) fn free_memory(&self) -> u64 {
        self.memory_bytes().saturating_sub(self.busy_memory)
    }

    /// What a job has for temporary files, in bytes: without bounds where it does not say.
    pub(crate) fn temporary_bytes(&self) -> u64 {
        match self.seen.temporary_bytes {
            0 => u64::MAX,
            bytes => bytes,
        }
    }
}

impl Fleet {
    /// The most memory that a live node with slots has for jobs, in bytes.
    pub(crate) fn largest_memory(&self) -> u64 {
        let nodes = self.live().filter(|(_, node)| node.seen.slots > 0);
        nodes
            .map(|(_, node)| node.memory_bytes())
            .max()
            .unwrap_or(0)
    }
}
