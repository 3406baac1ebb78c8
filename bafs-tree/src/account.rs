//! Exact accounting: how many bytes and files a tree takes, against its limit.
//!
//! `Account` belongs to one tree. It holds two counters, for bytes and for files, and a table of
//! the files by device and inode number of the host. Bytes are allocated blocks, as `st_blocks`
//! counts them (inode(7)), so a sparse file costs only its data. Each inode counts as one file,
//! except the root.
//!
//! An operation that takes space does this, while it holds the lock of the file
//! (`FileState::lock`):
//!
//! 1. `try_reserve_worst_case` adds the most that the operation can take. If that does not fit,
//!    `reserve_exactly` asks the operation for its exact need.
//! 2. The operation runs its system call.
//! 3. `settle` replaces the reservation by the new charge of the file.
//!
//! So the sum of all charges and reservations never exceeds the limit, whatever runs at once.
//!
//! **Errors.** `reserve_exactly` fails with `ENOSPC`. Reservations of others may be larger than
//! what they take in the end. So it waits for them first: 16 attempts within a tenth of a second.
//! While it waits, no operation reserves its worst case.
//!
//! **Deleted files.** A file without a name keeps its charge until its last reference is released,
//! as on any POSIX file system.
//!
//! **Concurrency.** Counters are atomic, and the table has 16 shards with a mutex each. A thread
//! may hold the lock of a file while it waits, but never a shard. The account touches no file: its
//! callers tell it what is on disk.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::errno::{self, Outcome};

/// Limit of a tree, in bytes and in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// Bytes on disk, counted in allocated blocks.
    pub bytes: u64,
    /// Files, directories and all other inodes, the root not counted.
    pub files: u64,
}

/// Device and inode number on the host.
pub(crate) type HostFileId = (u64, u64);

/// Locks that the table of files is spread over.
const SHARDS: usize = 16;

/// Rounds of asking again when others take space at the same time, or hold more than they take.
const RESERVE_ATTEMPTS_MAX: u32 = 16;

/// Pause before the second round; each one after it is longer by as much.
const RESERVE_PAUSE: Duration = Duration::from_micros(500);

/// What becomes of a wish for space.
pub(crate) enum SpaceDecision<T> {
    /// So many bytes, for this.
    Reserve(u64, T),
    /// It waits for what others hold and may not take.
    Wait,
    Refuse,
}

/// What one file is charged, shared by all who have it open.
#[derive(Debug)]
pub(crate) struct FileState {
    pub(crate) id: HostFileId,
    charged: Mutex<u64>,
    references: AtomicUsize,
    is_unlinked: AtomicBool,
    /// Made by this tree, and given no extended attribute since.
    lacks_xattrs: AtomicBool,
}

impl FileState {
    /// Locks the file against other changes of its space, and gives its charge in bytes.
    pub(crate) fn lock(&self) -> MutexGuard<'_, u64> {
        lock(&self.charged)
    }

    /// Takes note that no name leads to the file any more.
    pub(crate) fn set_unlinked(&self) {
        self.is_unlinked.store(true, SeqCst);
    }

    /// Whether no name leads to the file any more.
    pub(crate) fn is_unlinked(&self) -> bool {
        self.is_unlinked.load(SeqCst)
    }

    /// Whether the file surely has no capability of its own.
    pub(crate) fn lacks_capability(&self) -> bool {
        self.lacks_xattrs.load(SeqCst)
    }

    /// Takes note that the file gets an extended attribute.
    pub(crate) fn note_xattr(&self) {
        self.lacks_xattrs.store(false, SeqCst);
    }
}

/// The use of one tree.
#[derive(Debug)]
pub(crate) struct Account {
    limit_bytes: AtomicU64,
    limit_files: AtomicU64,
    /// Charges and reservations.
    bytes: AtomicU64,
    files: AtomicU64,
    /// Reservations alone.
    reserved: AtomicU64,
    /// Who finds too little free, and wants no more than what is needed.
    exact_waiters: AtomicUsize,
    files_by_id: [Mutex<HashMap<HostFileId, Arc<FileState>>>; SHARDS],
}

impl Account {
    pub(crate) fn new(limit: Limit) -> Self {
        Self {
            limit_bytes: limit.bytes.into(),
            limit_files: limit.files.into(),
            bytes: AtomicU64::new(0),
            files: AtomicU64::new(0),
            reserved: AtomicU64::new(0),
            exact_waiters: AtomicUsize::new(0),
            files_by_id: Default::default(),
        }
    }

    pub(crate) fn limit(&self) -> Limit {
        Limit {
            bytes: self.limit_bytes.load(SeqCst),
            files: self.limit_files.load(SeqCst),
        }
    }

    /// Replaces the limit. What is charged stays, also where that is more.
    pub(crate) fn set_limit(&self, limit: Limit) {
        self.limit_bytes.store(limit.bytes, SeqCst);
        self.limit_files.store(limit.files, SeqCst);
    }

    /// Bytes and files in use, reservations included.
    pub(crate) fn used(&self) -> (u64, u64) {
        (self.bytes.load(SeqCst), self.files.load(SeqCst))
    }

    fn free_bytes(&self) -> u64 {
        let limit = self.limit_bytes.load(SeqCst);
        limit.saturating_sub(self.bytes.load(SeqCst))
    }

    /// Takes `amount` bytes if they fit.
    pub(crate) fn reserve(&self, amount: u64) -> bool {
        // First, and given back last: who finds nothing free must see why.
        self.reserved.fetch_add(amount, SeqCst);
        let fits = add_within_limit(&self.bytes, amount, self.limit_bytes.load(SeqCst));
        if !fits {
            self.reserved.fetch_sub(amount, SeqCst);
        }
        fits
    }

    /// Takes more than may be needed, if that fits and keeps nobody waiting.
    pub(crate) fn try_reserve_worst_case(&self, amount: u64) -> bool {
        self.exact_waiters.load(SeqCst) == 0 && self.reserve(amount)
    }

    /// Takes what is needed. `request` is told how much is free, and whether that may become more
    /// as others hold more than they will take; it is asked again while it waits, and when others
    /// were faster. Who holds locks waits for a tenth of a second at most, whatever others do.
    ///
    /// # Errors
    /// `ENOSPC`.
    pub(crate) fn reserve_exactly<T>(
        &self,
        request: impl Fn(u64, bool) -> SpaceDecision<T>,
    ) -> Outcome<T> {
        self.exact_waiters.fetch_add(1, SeqCst);
        let mut taken = Err(errno::NOSPC);
        for round in 1..=RESERVE_ATTEMPTS_MAX {
            // Before and after, as one may begin or end in between.
            let before = self.reserved.load(SeqCst);
            let free = self.free_bytes();
            let others_hold = before > 0 || self.reserved.load(SeqCst) > 0;
            match request(free, others_hold && round < RESERVE_ATTEMPTS_MAX) {
                SpaceDecision::Reserve(amount, of) if self.reserve(amount) => {
                    taken = Ok(of);
                    break;
                }
                SpaceDecision::Reserve(..) => {}
                SpaceDecision::Wait => std::thread::sleep(RESERVE_PAUSE * round),
                SpaceDecision::Refuse if self.free_bytes() <= free => break,
                SpaceDecision::Refuse => {}
            }
        }
        self.exact_waiters.fetch_sub(1, SeqCst);
        taken
    }

    /// Takes one file if it fits.
    pub(crate) fn reserve_file(&self) -> bool {
        add_within_limit(&self.files, 1, self.limit_files.load(SeqCst))
    }

    pub(crate) fn release_file(&self) {
        self.files.fetch_sub(1, SeqCst);
    }

    /// Turns a reservation into the charge that the file has now.
    pub(crate) fn settle(&self, charged: &mut u64, now: u64, reserved: u64) {
        let (more, less) = (now, *charged + reserved);
        if more >= less {
            self.bytes.fetch_add(more - less, SeqCst);
        } else {
            self.bytes.fetch_sub(less - more, SeqCst);
        }
        self.reserved.fetch_sub(reserved, SeqCst);
        *charged = now;
    }

    /// The state of a file, with one more anchor; and whether it was not known before. A file
    /// that was not known is charged by the caller's `bytes` and as one file.
    pub(crate) fn register(&self, identity: HostFileId, bytes: u64) -> (Arc<FileState>, bool) {
        let mut shard = self.shard(identity);
        if let Some(file) = shard.get(&identity) {
            file.references.fetch_add(1, SeqCst);
            return (file.clone(), false);
        }
        self.bytes.fetch_add(bytes, SeqCst);
        self.files.fetch_add(1, SeqCst);
        let file = Self::new_state(identity, bytes, 1);
        shard.insert(identity, file.clone());
        (file, true)
    }

    /// Registers a file that was just made and has been reserved: one anchor, no charge yet.
    pub(crate) fn register_new(&self, identity: HostFileId) -> Arc<FileState> {
        let file = Self::new_state(identity, 0, 1);
        file.lacks_xattrs.store(true, SeqCst);
        self.shard(identity).insert(identity, file.clone());
        file
    }

    /// Counts a file that is there when the tree is opened; again when it has several names.
    pub(crate) fn count_existing(&self, identity: HostFileId, bytes: u64) {
        let mut shard = self.shard(identity);
        shard.entry(identity).or_insert_with(|| {
            self.bytes.fetch_add(bytes, SeqCst);
            self.files.fetch_add(1, SeqCst);
            Self::new_state(identity, bytes, 0)
        });
    }

    /// Lets an anchor go. With the last one of a file without names its space is free.
    pub(crate) fn release(&self, file: &FileState) {
        let mut shard = self.shard(file.id);
        if file.references.fetch_sub(1, SeqCst) == 1 && file.is_unlinked.load(SeqCst) {
            shard.remove(&file.id);
            drop(shard);
            self.settle(&mut file.lock(), 0, 0);
            self.release_file();
        }
    }

    fn new_state(identity: HostFileId, bytes: u64, anchors: usize) -> Arc<FileState> {
        Arc::new(FileState {
            id: identity,
            charged: Mutex::new(bytes),
            references: AtomicUsize::new(anchors),
            is_unlinked: AtomicBool::new(false),
            lacks_xattrs: AtomicBool::new(false),
        })
    }

    fn shard(&self, identity: HostFileId) -> MutexGuard<'_, HashMap<HostFileId, Arc<FileState>>> {
        lock(&self.files_by_id[identity.1 as usize % SHARDS])
    }
}

fn add_within_limit(counter: &AtomicU64, amount: u64, limit: u64) -> bool {
    let add = |used: u64| used.checked_add(amount).filter(|sum| *sum <= limit);
    counter.fetch_update(SeqCst, SeqCst, add).is_ok()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account() -> Account {
        Account::new(Limit {
            bytes: 100,
            files: 2,
        })
    }

    #[test]
    fn reservations_stop_at_the_limit() {
        let account = account();
        assert!(account.reserve(60));
        assert!(!account.reserve(41));
        assert!(account.reserve(40));
        assert!(!account.reserve(u64::MAX));
        assert!(account.reserve_file() && account.reserve_file() && !account.reserve_file());
    }

    #[test]
    fn settling_replaces_the_reservation() {
        let account = account();
        let mut charged = 0;
        assert!(account.reserve(80));
        account.settle(&mut charged, 50, 80);
        assert_eq!((account.used().0, charged), (50, 50));
        account.settle(&mut charged, 10, 0);
        assert_eq!(account.used().0, 10);
    }

    #[test]
    fn an_unlinked_file_counts_until_its_anchors_drop() {
        let account = account();
        let (file, new) = account.register((1, 7), 30);
        assert!(new);
        assert!(!account.register((1, 7), 99).1);
        file.set_unlinked();
        account.release(&file);
        assert_eq!(account.used(), (30, 1));
        account.release(&file);
        assert_eq!(account.used(), (0, 0));
    }
}
