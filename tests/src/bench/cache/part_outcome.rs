//! What parts of the benchmark share: what they and their readers return, and a unit.

use std::future::Future;
use std::pin::Pin;

use anyhow::Result;

pub(super) const MIB: usize = 1 << 20;

/// A reader that returns the number of wrong bytes.
pub(super) type ReadTask = Pin<Box<dyn Future<Output = Result<u64>> + Send>>;

/// Findings of a part besides its figures.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PartOutcome {
    pub(super) wrong_bytes: u64,
}
