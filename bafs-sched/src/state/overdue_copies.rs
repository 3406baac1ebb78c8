//! Nodes to which copies take too long.

use bafs_proto::ids::ServerId;

use crate::state::recorded::kept;
use crate::state::tracked::Table;

/// So many times what it should take a copy may take.
pub(crate) const TIMEOUT_FACTOR: u64 = 4;

/// A copy may take so long at least, in milliseconds: a busy machine is not a dead one.
pub(crate) const TIMEOUT_MS_MIN: u64 = 2_000;

/// The patience doubles so often at most.
pub(crate) const DOUBLINGS_MAX: u32 = 10;

/// Nodes to which copies were let go since one was complete there, with how many.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Overdue {
    pub(crate) let_go: Table<ServerId, u32>,
}

kept! {
    /// What was written of overdue copies.
    OverdueChanges of Overdue;
    values {}
    tables { let_go: Table<ServerId, u32> }
    indexed {}
    parts {}
    rebuilt {}
}

impl Overdue {
    pub(crate) fn is_slow(&self, target: ServerId) -> bool {
        self.let_go.contains_key(&target)
    }

    /// A copy there is complete, or the node is lost.
    pub(crate) fn forget(&mut self, target: ServerId) {
        self.let_go.remove(&target);
    }

    /// How long a copy may take that should take `expected_ms`: longer after each that was let go,
    /// wherever it went, as what is expected may be wrong.
    pub(crate) fn timeout_ms(&self, expected_ms: u64) -> u64 {
        let let_go: u32 = self.let_go.values().sum();
        let first_ms = expected_ms.saturating_mul(TIMEOUT_FACTOR);
        let first_ms = first_ms.max(TIMEOUT_MS_MIN);
        first_ms.saturating_mul(1 << let_go.min(DOUBLINGS_MAX))
    }
}
