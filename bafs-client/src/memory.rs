//! What an agent may keep in memory of the data that pass through it, over all its volumes, and
//! that the kernel does not take it first when memory is short. Knows no operation.

use std::fs;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use bafs_proto::limits::IO_BYTES_MAX;
use tokio::runtime::Handle;

use crate::kernel;
use crate::limits::{
    BLOCK_BUFFER_BYTES, LOG_BYTES_MAX, LOG_OP_BYTES, MEMORY_BYTES_DEFAULT, RING_BUFFERS_TOTAL_MAX,
};

/// Where the kernel keeps how soon it takes a process, from -1000 (never) to 1000.
const OOM_SCORE_PATH: &str = "/proc/self/oom_score_adj";

/// With an agent its job's volumes go, and what the job computed: better the job's own process.
const OOM_SCORE: i32 = -500;

/// Of the whole, what is for operations under way, for blocks that are kept, and for what was
/// answered and not brought to its server.
const INFLIGHT_PERCENT: u64 = 50;
const BLOCKS_PERCENT: u64 = 25;
const LOGS_PERCENT: u64 = 25;

/// Volumes of this process, as far as that was said.
static VOLUME_COUNT: AtomicUsize = AtomicUsize::new(1);

/// What all logs hold that were answered and have not reached their servers, in bytes.
static LOGS_BYTES: AtomicU64 = AtomicU64::new(0);

/// Fewer volumes get no more blocks than these would; a volume keeps one at least.
const VOLUMES_ASSUMED_MIN: usize = 4;
const BLOCK_BYTES: usize = 64 << 10;

static BUDGET: OnceLock<MemoryBudget> = OnceLock::new();

/// The score that a job gets: what this process had.
static OOM_SCORE_BEFORE: OnceLock<String> = OnceLock::new();

/// Bounds what this process keeps, in bytes, for as long as it lives. Only the first call counts;
/// without one the default holds. A few megabytes are the least with which anything works.
pub fn limit_memory(bytes_max: u64) {
    let _ = BUDGET.set(MemoryBudget::new(bytes_max));
}

/// This process will show so many volumes, among which what it may keep is divided.
pub(crate) fn set_volume_count(count: usize) {
    VOLUME_COUNT.store(count.max(1), Ordering::Relaxed);
}

/// Volumes that this process shows.
pub(crate) fn volume_count() -> usize {
    VOLUME_COUNT.load(Ordering::Relaxed)
}

/// Has the allocator give back what is large and free, and share its arenas among threads. Without
/// that an unused buffer of a session takes memory, and each thread keeps what others could use.
pub(crate) fn limit_allocator() {
    kernel::limit_allocator();
}

/// Asks the kernel to take others first when memory is short, if it lets us.
pub(crate) fn lower_oom_score() {
    let Ok(before) = fs::read_to_string(OOM_SCORE_PATH) else {
        return;
    };
    if let Err(error) = fs::write(OOM_SCORE_PATH, OOM_SCORE.to_string()) {
        tracing::debug!(%error, "not protected when memory is short");
        return;
    }
    let _ = OOM_SCORE_BEFORE.set(before);
}

/// Undoes [`lower_oom_score`] for a process that this one has started, and for all that it starts.
pub(crate) fn restore_oom_score(process: u32) {
    if let Some(before) = OOM_SCORE_BEFORE.get() {
        let path = format!("/proc/{process}/oom_score_adj");
        if let Err(error) = fs::write(path, before.trim()) {
            tracing::debug!(%error, "a job is as protected as its agent");
        }
    }
}

/// Takes room for the data of an operation, until what is returned is dropped. A thread of its own
/// waits for other operations to end when there is none, which their deadlines see to.
pub(crate) fn reserve_memory(bytes: usize) -> MemoryReservation {
    budget().reserve(bytes)
}

/// Most bytes of blocks that a cache volume keeps.
pub(crate) fn blocks_bytes_max() -> usize {
    budget().blocks_bytes_max(volume_count())
}

/// Buffers that all rings may have together.
pub(crate) fn ring_buffers_max() -> usize {
    let bytes = budget().inflight_bytes_max / 2;
    (bytes / IO_BYTES_MAX as usize).min(RING_BUFFERS_TOTAL_MAX)
}

/// What one volume's log takes of the memory for all logs, until it is dropped.
#[derive(Debug, Default)]
pub(crate) struct LogMemoryShare(AtomicU64);

impl LogMemoryShare {
    /// The log holds so many operations, with so many bytes of data, now. Whether that is too much:
    /// of this log, or of all together. An empty log never is.
    pub(crate) fn is_over_budget(&self, ops: u64, data_bytes: u64) -> bool {
        let bytes = data_bytes + ops * LOG_OP_BYTES;
        let before = self.0.swap(bytes, Ordering::AcqRel);
        let change = bytes.wrapping_sub(before);
        let all = LOGS_BYTES.fetch_add(change, Ordering::AcqRel);
        let all = all.wrapping_add(change);
        ops > 0 && (data_bytes > LOG_BYTES_MAX || all > budget().logs_bytes_max)
    }
}

impl Drop for LogMemoryShare {
    fn drop(&mut self) {
        LOGS_BYTES.fetch_sub(self.0.load(Ordering::Acquire), Ordering::AcqRel);
    }
}

fn budget() -> &'static MemoryBudget {
    BUDGET.get_or_init(|| MemoryBudget::new(MEMORY_BYTES_DEFAULT))
}

#[derive(Debug)]
struct MemoryBudget {
    inflight_bytes_max: usize,
    all_blocks_bytes_max: usize,
    logs_bytes_max: u64,
    used: Mutex<usize>,
    freed: Condvar,
}

/// Room that is taken.
#[derive(Debug)]
pub(crate) struct MemoryReservation {
    budget: &'static MemoryBudget,
    bytes: usize,
}

impl MemoryBudget {
    fn new(bytes_max: u64) -> Self {
        let part = |percent| usize::try_from(bytes_max / 100 * percent).unwrap_or(usize::MAX);
        Self {
            // The largest operation must fit: asked for, and copied once.
            inflight_bytes_max: part(INFLIGHT_PERCENT).max(2 * IO_BYTES_MAX as usize),
            all_blocks_bytes_max: part(BLOCKS_PERCENT),
            logs_bytes_max: bytes_max / 100 * LOGS_PERCENT,
            used: Mutex::default(),
            freed: Condvar::new(),
        }
    }

    /// Most bytes of blocks of each of so many volumes.
    fn blocks_bytes_max(&self, volumes: usize) -> usize {
        let share = self.all_blocks_bytes_max / volumes.max(VOLUMES_ASSUMED_MIN);
        share.clamp(BLOCK_BYTES, BLOCK_BUFFER_BYTES)
    }

    fn reserve(&'static self, bytes: usize) -> MemoryReservation {
        let bytes = bytes.min(self.inflight_bytes_max);
        // A task of the runtime must not wait for others that need its thread; what it does is
        // rare, and counts.
        if bytes > 0 && Handle::try_current().is_ok() {
            *self.lock() += bytes;
        } else if bytes > 0 {
            let full = |used: &mut usize| *used + bytes > self.inflight_bytes_max;
            let used = self.freed.wait_while(self.lock(), full);
            *used.unwrap_or_else(PoisonError::into_inner) += bytes;
        }
        MemoryReservation {
            budget: self,
            bytes,
        }
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        // A number is never half-changed.
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for MemoryReservation {
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
    fn blocks_are_divided_among_all_volumes() {
        let budget = MemoryBudget::new(256 << 20);
        let each = |volumes| budget.blocks_bytes_max(volumes);
        assert!(each(1) > 15 << 20 && each(1) <= 16 << 20);
        assert_eq!(each(1), each(4), "few volumes have what they had");
        for volumes in [5, 6, 100, 1_024] {
            assert!(each(volumes) >= 64 << 10);
            assert!(each(volumes) * volumes <= 64 << 20, "{volumes}");
        }
    }

    #[test]
    fn logs_of_all_volumes_share_one_bound() {
        let (first, second) = (LogMemoryShare::default(), LogMemoryShare::default());
        assert!(!first.is_over_budget(1, 30 << 20));
        assert!(first.is_over_budget(1, 33 << 20), "too much for one");
        assert!(!first.is_over_budget(1, 31 << 20));
        assert!(!second.is_over_budget(1, 31 << 20));
        let third = LogMemoryShare::default();
        assert!(third.is_over_budget(4, 4 << 20), "too much for all");
        assert!(
            !third.is_over_budget(0, 0),
            "an empty log would wait for ever"
        );
        drop(first);
        assert!(!third.is_over_budget(4, 4 << 20), "there is room again");
    }

    #[test]
    fn memory_is_granted_up_to_its_budget() {
        let budget: &'static MemoryBudget = Box::leak(Box::new(MemoryBudget::new(8 << 20)));
        let most = budget.inflight_bytes_max;
        assert!((4 << 20) - 100 < most && most <= 4 << 20);
        let first = budget.reserve(3 << 20);
        let second = budget.reserve(1 << 19);
        assert_eq!(*budget.lock(), (3 << 20) + (1 << 19));
        let (sender, woken) = std::sync::mpsc::channel();
        let waiting = std::thread::spawn(move || {
            // More than there is: all of it, once nobody else has any.
            let all = budget.reserve(usize::MAX);
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
