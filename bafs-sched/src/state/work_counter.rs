//! Counts the records that decisions look at: how much work they are, the same on every machine.
//! It knows nothing of what the records are, and no decision depends on it.

use std::sync::atomic::{AtomicU64, Ordering};

/// How many records were looked at. Also those count that are only asked for, for people: so two
/// schedulers that know the same are equal whatever they have counted.
#[derive(Debug, Default)]
pub(crate) struct WorkCounter(AtomicU64);

impl WorkCounter {
    /// So many more were looked at.
    pub(crate) fn add(&self, records: u64) {
        // One thread decides: to read and to write costs less than to add at one stroke.
        let before = self.0.load(Ordering::Relaxed);
        self.0.store(before + records, Ordering::Relaxed);
    }

    /// One more was looked at.
    pub(crate) fn one(&self) {
        self.add(1);
    }

    pub(crate) fn total(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Clone for WorkCounter {
    fn clone(&self) -> Self {
        Self(AtomicU64::new(self.total()))
    }
}

impl PartialEq for WorkCounter {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
