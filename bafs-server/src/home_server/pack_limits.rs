//! How many small files that come home are made durable at once. Waits for nothing.

use std::sync::Arc;

use tokio::sync::Semaphore;

/// Calls whose files are put in place at once; others wait for their turn.
pub(super) const PACKS_MAX: usize = 16;

/// Files of all of them that are made durable at once, each with a thread and a descriptor. Those
/// that a disk takes together cost about as much as one.
pub(super) const FILES_MAX: usize = 192;

/// How much is done at once, for all callers of a home together.
#[derive(Debug)]
pub(super) struct PackLimits {
    /// One permit for each call.
    pub(super) packs: Arc<Semaphore>,
    /// One permit for each file.
    pub(super) files: Semaphore,
}

impl Default for PackLimits {
    fn default() -> Self {
        Self {
            packs: Arc::new(Semaphore::new(PACKS_MAX)),
            files: Semaphore::new(FILES_MAX),
        }
    }
}
