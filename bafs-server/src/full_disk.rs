//! Whether the disk of this server was found full: by jobs that run here, which report it, by those
//! of other nodes in the operations that this server runs for them, or by a volume being filled.

use std::sync::atomic::{AtomicBool, Ordering};

/// A disk with less free is full, in bytes.
const FULL_BYTES: u64 = 16 << 20;

/// Whether somebody found the disk full.
#[derive(Debug, Default)]
pub(crate) struct DiskFullFlag(AtomicBool);

/// Whether a disk with so many bytes free is full.
pub(crate) fn is_disk_full(free_bytes: u64) -> bool {
    free_bytes < FULL_BYTES
}

impl DiskFullFlag {
    /// Somebody found no space where the disk has so many bytes free, `None` if that is unknown.
    pub(crate) fn note_no_space(&self, free_bytes: Option<u64>) {
        if free_bytes.is_some_and(is_disk_full) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// Whether anybody found it full since this was asked the last time.
    pub(crate) fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}
