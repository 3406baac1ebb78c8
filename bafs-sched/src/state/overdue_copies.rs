//! Nodes to which copies take too long.

use std::collections::BTreeMap;

use bafs_proto::ids::ServerId;

/// So many times what it should take a copy may take.
pub(crate) const PATIENCE_FACTOR: u64 = 4;

/// A copy may take so long at least, in milliseconds: a busy machine is not a dead one.
pub(crate) const PATIENCE_MS_MIN: u64 = 2_000;

/// The patience doubles so often at most.
pub(crate) const DOUBLINGS_MAX: u32 = 10;

/// Nodes to which copies were let go since one was complete there, with how many.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Overdue(pub(crate) BTreeMap<ServerId, u32>);

impl Overdue {
    pub(crate) fn is_slow(&self, target: ServerId) -> bool {
        self.0.contains_key(&target)
    }

    /// A copy there is complete, or the node is lost.
    pub(crate) fn forget(&mut self, target: ServerId) {
        self.0.remove(&target);
    }

    /// How long a copy may take that should take `expected_ms`: longer after each that was let go,
    /// wherever it went, as what is expected may be wrong.
    pub(crate) fn patience_ms(&self, expected_ms: u64) -> u64 {
        let let_go: u32 = self.0.values().sum();
        let first_ms = expected_ms.saturating_mul(PATIENCE_FACTOR);
        let first_ms = first_ms.max(PATIENCE_MS_MIN);
        first_ms.saturating_mul(1 << let_go.min(DOUBLINGS_MAX))
    }
}
