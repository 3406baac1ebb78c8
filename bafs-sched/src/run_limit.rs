//! What a run may use of its cluster in all, as somebody outside says who divides the cluster
//! between runs. It may change at any time; the run obeys it within seconds.

use std::sync::{Arc, Mutex, PoisonError};

use bafs_proto::node_quota::NodeQuota;

/// A limit over all nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClusterLimit {
    /// Slots.
    pub slots: u64,
    /// Bytes for volumes.
    pub bytes: u64,
}

impl ClusterLimit {
    /// What is left of it on one node beside what others of the run's nodes keep.
    pub(crate) fn left_beside(self, kept_bytes: u64, kept_slots: u64) -> NodeQuota {
        NodeQuota {
            bytes: self.bytes.saturating_sub(kept_bytes),
            files: u64::MAX,
            slots: u32::try_from(self.slots.saturating_sub(kept_slots)).unwrap_or(u32::MAX),
        }
    }
}

/// The limit of a run, which others may change; none at first.
#[derive(Debug, Clone, Default)]
pub struct RunLimit(Arc<Mutex<Option<ClusterLimit>>>);

impl RunLimit {
    /// Sets the limit.
    pub fn set(&self, limit: Option<ClusterLimit>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = limit;
    }

    /// The limit now.
    pub fn get(&self) -> Option<ClusterLimit> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
