//! What an agent may keep in memory of the data that pass through it, over all its volumes, and
//! that the kernel does not take it first when memory is short. Knows no operation.

use std::fs;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use bafs_proto::limits::IO_BYTES_MAX;
use tokio::runtime::Handle;

use crate::limits::{BLOCK_BUFFER_BYTES, MEMORY_BYTES_DEFAULT};

/// Where the kernel keeps how soon it takes a process, from -1000 (never) to 1000.
const OWN_SCORE: &str = "/proc/self/oom_score_adj";

/// With an agent its job's volumes go, and what the job computed: better the job's own process.
const SCORE: i32 = -500;

/// Of the whole, what is for operations under way; the rest is for blocks that are kept.
const UNDER_WAY_PERCENT: u64 = 50;

static BUDGET: OnceLock<Budget> = OnceLock::new();

/// The score that a job gets: what this process had.
static SCORE_BEFORE: OnceLock<String> = OnceLock::new();

/// Bounds what this process keeps, in bytes, for as long as it lives. Only the first call counts;
/// without one the default holds. A few megabytes are the least with which anything works.
pub fn bound(bytes_max: u64) {
    let _ = BUDGET.set(Budget::new(bytes_max));
}

/// Asks the kernel to take others first when memory is short, if it lets us.
pub(crate) fn protect() {
    let Ok(before) = fs::read_to_string(OWN_SCORE) else {
        return;
    };
    if let Err(error) = fs::write(OWN_SCORE, SCORE.to_string()) {
        tracing::debug!(%error, "not protected when memory is short");
        return;
    }
    let _ = SCORE_BEFORE.set(before);
}

/// Undoes [`protect`] for a process that this one has started, and for all that it starts.
pub(crate) fn expose(process: u32) {
    if let Some(before) = SCORE_BEFORE.get() {
        let path = format!("/proc/{process}/oom_score_adj");
        if let Err(error) = fs::write(path, before.trim()) {
            tracing::debug!(%error, "a job is as protected as its agent");
        }
    }
}

/// Takes room for the data of an operation, until what is returned is dropped. A thread of its own
/// waits for other operations to end when there is none, which their deadlines see to.
pub(crate) fn hold(bytes: usize) -> Held {
    budget().hold(bytes)
}

/// Most bytes of blocks that a cache volume keeps.
pub(crate) fn blocks_bytes_max() -> usize {
    budget().blocks_bytes_max
}

fn budget() -> &'static Budget {
    BUDGET.get_or_init(|| Budget::new(MEMORY_BYTES_DEFAULT))
}

#[derive(Debug)]
struct Budget {
    under_way_bytes_max: usize,
    blocks_bytes_max: usize,
    used: Mutex<usize>,
    freed: Condvar,
}

/// Room that is taken.
#[derive(Debug)]
pub(crate) struct Held {
    budget: &'static Budget,
    bytes: usize,
}

impl Budget {
    fn new(bytes_max: u64) -> Self {
        let part = |percent| usize::try_from(bytes_max / 100 * percent).unwrap_or(usize::MAX);
        Self {
            // The largest operation must fit: asked for, and copied once.
            under_way_bytes_max: part(UNDER_WAY_PERCENT).max(2 * IO_BYTES_MAX as usize),
            // As if there were four cache volumes at most; more are rare, and small.
            blocks_bytes_max: part((100 - UNDER_WAY_PERCENT) / 4).min(BLOCK_BUFFER_BYTES),
            used: Mutex::default(),
            freed: Condvar::new(),
        }
    }

    fn hold(&'static self, bytes: usize) -> Held {
        let bytes = bytes.min(self.under_way_bytes_max);
        // A task of the runtime must not wait for others that need its thread; what it does is
        // rare, and counts.
        if bytes > 0 && Handle::try_current().is_ok() {
            *self.lock() += bytes;
        } else if bytes > 0 {
            let full = |used: &mut usize| *used + bytes > self.under_way_bytes_max;
            let used = self.freed.wait_while(self.lock(), full);
            *used.unwrap_or_else(PoisonError::into_inner) += bytes;
        }
        Held {
            budget: self,
            bytes,
        }
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        // A number is never half-changed.
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.bytes > 0 {
            *self.budget.lock() -= self.bytes;
            self.budget.freed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_given_up_to_the_bound_and_again_when_it_is_free() {
        let budget: &'static Budget = Box::leak(Box::new(Budget::new(8 << 20)));
        let most = budget.under_way_bytes_max;
        assert!((4 << 20) - 100 < most && most <= 4 << 20);
        let first = budget.hold(3 << 20);
        let second = budget.hold(1 << 19);
        assert_eq!(*budget.lock(), (3 << 20) + (1 << 19));
        let (sender, woken) = std::sync::mpsc::channel();
        let waiting = std::thread::spawn(move || {
            // More than there is: all of it, once nobody else has any.
            let all = budget.hold(usize::MAX);
            sender.send(*budget.lock()).unwrap();
            drop(all);
        });
        drop(second);
        assert!(woken.try_recv().is_err(), "the first still has its room");
        drop(first);
        assert_eq!(woken.recv().unwrap(), most);
        waiting.join().unwrap();
        assert_eq!(*budget.lock(), 0);
    }
}
