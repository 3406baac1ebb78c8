//! Flows of bytes in a simulation: whose they are, and what waits for them. Starts none.

use bafs_proto::ids::{ExtractionId, VolumeId};

use super::link::FlowId;

/// The owner of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum FlowOwner {
    /// An execution's, with its generation.
    Execution(u32, u32),
    /// A cache's.
    Fetch(u32),
    /// A cluster's, in the background.
    Warm(u32),
    /// A scratch volume's that is filled from home.
    Fill(VolumeId),
    /// A file's on its way home.
    Extract(ExtractionId),
}

/// Where bytes pass one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TransferStep {
    /// So many bytes the own disk.
    Disk(u64),
    /// Bytes over the peers' links, and the part of them over the reader's own.
    Peers(u32, u64, u64),
    /// So long, in microseconds, the reader's own memory.
    Memory(u64),
}

impl TransferStep {
    /// Whether nothing passes it, which would come late all the same. Memory is the last level, and
    /// is never left out.
    pub(super) fn is_empty(self) -> bool {
        matches!(self, Self::Disk(0) | Self::Peers(_, 0, _))
    }
}

/// Flows of a transfer: at most two, with these links.
pub(super) type FlowPair = [Option<(u32, FlowId)>; 2];

/// One of them has ended; whether that was the last.
pub(super) fn is_last_flow(flows: &mut FlowPair, ended: u32) -> bool {
    for flow in flows.iter_mut() {
        if flow.is_some_and(|(link, _)| link == ended) {
            *flow = None;
        }
    }
    flows.iter().all(Option::is_none)
}

/// A flow that an execution waits for.
#[derive(Debug, Clone, Copy)]
pub(super) struct PendingFlow {
    pub(super) link: u32,
    pub(super) flow: FlowId,
    /// It counts as traffic between nodes.
    pub(super) is_between_nodes: bool,
}

/// Bytes that fill a volume.
#[derive(Debug, Clone, Copy)]
pub(super) struct VolumeFill {
    pub(super) source: FillSource,
    pub(super) flows: FlowPair,
}

/// From where a volume is filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FillSource {
    Home,
    /// The node of the volume that is copied.
    Node(u32),
}
