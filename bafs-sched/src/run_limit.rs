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
    /// The part of a node that it leaves beside what others of the run's nodes keep. Space goes
    /// where slots go, and in no smaller part than something needs to begin.
    pub(crate) fn cap(
        self,
        part: NodeQuota,
        kept: (u64, u64),
        start_minimum: NodeQuota,
    ) -> NodeQuota {
        let (kept_bytes, kept_slots) = kept;
        let left_slots = self.slots.saturating_sub(kept_slots);
        let left_bytes = self.bytes.saturating_sub(kept_bytes);
        let slots = u64::from(part.slots).min(left_slots);
        let share = u128::from(left_bytes) * u128::from(slots) / u128::from(left_slots.max(1));
        let share = u64::try_from(share).unwrap_or(u64::MAX);
        let bytes = match (slots, part.slots) {
            // It only stores.
            (_, 0) => left_bytes,
            (0, _) => 0,
            _ => share.max(start_minimum.bytes).min(left_bytes),
        };
        NodeQuota {
            bytes: part.bytes.min(bytes),
            slots: u32::try_from(slots).unwrap_or(u32::MAX),
            ..part
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
