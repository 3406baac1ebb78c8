//! Which volumes of this process have readers of their own: the first few, among which threads and
//! rings are divided, so that what they take of memory is bounded whatever a job mounts.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::limits::{
    OWN_READERS_MAX, READER_SLOTS_MAX, RING_ENTRIES_MAX, RING_ENTRIES_MIN, SESSION_THREADS_MAX,
    SESSION_THREADS_MIN,
};
use crate::memory;

/// Volumes that have readers of their own now.
static SLOTS_TAKEN: AtomicUsize = AtomicUsize::new(0);

/// A volume's right to readers of its own, until it is dropped.
#[derive(Debug)]
pub(super) struct ReaderSlot(());

impl ReaderSlot {
    /// A seat, if there is one left.
    pub(super) fn acquire() -> Option<Self> {
        let more = |taken| (taken < READER_SLOTS_MAX).then_some(taken + 1);
        let taken = SLOTS_TAKEN.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        taken.ok().map(|_| Self(()))
    }
}

impl Drop for ReaderSlot {
    fn drop(&mut self) {
        SLOTS_TAKEN.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Threads that serve one volume of this process.
pub(super) fn session_thread_count() -> usize {
    threads_per_volume(thread::available_parallelism().ok(), memory::volume_count())
}

/// Entries of each ring of one volume on a machine of so many processors; `None` where they would
/// be too few to be of use.
pub(super) fn ring_entry_count(processors: u16) -> Option<usize> {
    entries_per_ring(
        processors,
        memory::volume_count(),
        memory::ring_buffers_max(),
    )
}

/// Threads of one of so many volumes on a machine of so many processors.
fn threads_per_volume(processors: Option<NonZeroUsize>, volumes: usize) -> usize {
    let processors = processors.map_or(SESSION_THREADS_MIN, NonZeroUsize::get);
    let share = OWN_READERS_MAX / volumes.clamp(1, READER_SLOTS_MAX);
    processors
        .min(share)
        .clamp(SESSION_THREADS_MIN, SESSION_THREADS_MAX)
}

fn entries_per_ring(processors: u16, volumes: usize, buffers: usize) -> Option<usize> {
    let rings = usize::from(processors.max(1)) * volumes.clamp(1, READER_SLOTS_MAX);
    let entries = (buffers / rings).min(RING_ENTRIES_MAX);
    (entries >= RING_ENTRIES_MIN).then_some(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reader_threads_scale_with_processors_within_bounds() {
        for (processors, threads) in [(1, 2), (2, 2), (8, 8), (64, 16)] {
            assert_eq!(
                threads_per_volume(NonZeroUsize::new(processors), 1),
                threads
            );
        }
    }

    #[test]
    fn readers_of_all_volumes_are_bounded() {
        for volumes in [1, 2, 6, 8, 100, 1_024] {
            for processors in [1, 2, 8, 16, 64] {
                let seats = volumes.min(READER_SLOTS_MAX);
                let threads = threads_per_volume(NonZeroUsize::new(processors), volumes);
                assert!(seats * threads <= OWN_READERS_MAX, "{volumes} {processors}");
                let rings = entries_per_ring(processors as u16, volumes, 64).unwrap_or(0);
                assert!(seats * processors * rings <= 64);
            }
        }
        assert_eq!(
            threads_per_volume(NonZeroUsize::new(2), 8),
            2,
            "as for one volume"
        );
        assert_eq!(entries_per_ring(2, 1, 64), Some(RING_ENTRIES_MAX));
        assert_eq!(entries_per_ring(16, 6, 64), None);
        assert_eq!(
            entries_per_ring(2, 1, 2),
            None,
            "where the agent has little memory"
        );
    }

    #[test]
    fn seats_are_bounded_and_reusable() {
        let seats: Vec<_> = std::iter::from_fn(ReaderSlot::acquire)
            .take(READER_SLOTS_MAX + 1)
            .collect();
        assert!(seats.len() <= READER_SLOTS_MAX);
        assert!(ReaderSlot::acquire().is_none());
        drop(seats);
        assert!(ReaderSlot::acquire().is_some());
    }
}
