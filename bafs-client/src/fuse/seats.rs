//! Which volumes of this process have readers of their own: the first few, among which threads and
//! rings are divided, so that what they take of memory is bounded whatever a job mounts.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::limits::{
    OWN_READERS_MAX, RING_ENTRIES, RING_ENTRIES_MIN, SEATS_MAX, SESSION_THREADS_MAX,
    SESSION_THREADS_MIN,
};
use crate::memory;

/// Volumes that have readers of their own now.
static TAKEN: AtomicUsize = AtomicUsize::new(0);

/// A volume's right to readers of its own, until it is dropped.
#[derive(Debug)]
pub(super) struct Seat(());

impl Seat {
    /// A seat, if there is one left.
    pub(super) fn take() -> Option<Self> {
        let more = |taken| (taken < SEATS_MAX).then_some(taken + 1);
        let taken = TAKEN.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        taken.ok().map(|_| Self(()))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        TAKEN.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Threads that serve one volume of this process.
pub(super) fn session_threads() -> usize {
    threads_of(thread::available_parallelism().ok(), memory::volumes())
}

/// Entries of each ring of one volume on a machine of so many processors; `None` where they would
/// be too few to be of use.
pub(super) fn ring_entries(processors: u16) -> Option<usize> {
    entries_of(processors, memory::volumes(), memory::ring_buffers_max())
}

/// Threads of one of so many volumes on a machine of so many processors.
fn threads_of(processors: Option<NonZeroUsize>, volumes: usize) -> usize {
    let processors = processors.map_or(SESSION_THREADS_MIN, NonZeroUsize::get);
    let share = OWN_READERS_MAX / volumes.clamp(1, SEATS_MAX);
    processors
        .min(share)
        .clamp(SESSION_THREADS_MIN, SESSION_THREADS_MAX)
}

fn entries_of(processors: u16, volumes: usize, buffers: usize) -> Option<usize> {
    let rings = usize::from(processors.max(1)) * volumes.clamp(1, SEATS_MAX);
    let entries = (buffers / rings).min(RING_ENTRIES);
    (entries >= RING_ENTRIES_MIN).then_some(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_processor_serves_a_volume_up_to_a_bound() {
        for (processors, threads) in [(1, 2), (2, 2), (8, 8), (64, 16)] {
            assert_eq!(threads_of(NonZeroUsize::new(processors), 1), threads);
        }
    }

    #[test]
    fn readers_of_all_volumes_are_bounded() {
        for volumes in [1, 2, 6, 8, 100, 1_024] {
            for processors in [1, 2, 8, 16, 64] {
                let seats = volumes.min(SEATS_MAX);
                let threads = threads_of(NonZeroUsize::new(processors), volumes);
                assert!(seats * threads <= OWN_READERS_MAX, "{volumes} {processors}");
                let rings = entries_of(processors as u16, volumes, 64).unwrap_or(0);
                assert!(seats * processors * rings <= 64);
            }
        }
        assert_eq!(threads_of(NonZeroUsize::new(2), 8), 2, "as for one volume");
        assert_eq!(entries_of(2, 1, 64), Some(RING_ENTRIES));
        assert_eq!(entries_of(16, 6, 64), None);
        assert_eq!(
            entries_of(2, 1, 2),
            None,
            "where the agent has little memory"
        );
    }

    #[test]
    fn seats_are_given_up_to_the_bound_and_again() {
        let seats: Vec<_> = std::iter::from_fn(Seat::take).take(SEATS_MAX + 1).collect();
        assert!(seats.len() <= SEATS_MAX);
        assert!(Seat::take().is_none());
        drop(seats);
        assert!(Seat::take().is_some());
    }
}
