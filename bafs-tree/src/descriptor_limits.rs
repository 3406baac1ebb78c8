//! The descriptors of files that are referred to: as many are open as the process can spare, and
//! the others are opened again when they are needed. Knows no names.
//!
//! The kernel's handles of files (`open_by_handle_at(2)`) find a file wherever its names go, and
//! never another one under its number. They need a privilege, and a file system that has them;
//! without, all descriptors stay open.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use rustix::process::{Resource, getrlimit};

use crate::errno::{self, Outcome};
use crate::kernel::{FileHandle, file_handle, open_handle};

/// Part of the process's descriptors that these may take: files that programs have open, and
/// connections, need the rest.
const PATH_DESCRIPTOR_DIVISOR: u64 = 4;

/// Where the number of descriptors has no limit, or nearly none.
const PATH_DESCRIPTORS_MAX: u64 = 1 << 16;

/// Part of the process's descriptors that is left for connections and the like.
const CONNECTION_DIVISOR: u64 = 8;

/// The same where no opens were promised.
const CONNECTION_DIVISOR_WITHOUT_RESERVED: u64 = 16;

/// So many times what is free a job may have open, and a process so many times what its job may
/// still open.
const FREE_MULTIPLE: u64 = 8;

/// Part of the descriptors for opens in time that is only for jobs that have few, and of those that
/// a job may have for its processes that have few: however many others took all they could get, one
/// after the other.
const LAST_RESERVE_DIVISOR: u64 = 8;

/// A job that has so many open, or a process, has not few.
const FEW_OPENS_OF_JOB: u64 = 64;
const FEW_OPENS_OF_PROCESS: u64 = 16;

/// Descriptors that are kept for files whose opening was promised.
static RESERVED: AtomicU64 = AtomicU64::new(0);

/// Files and directories that are open and were not promised.
static SYNCHRONOUS_OPENS: AtomicU64 = AtomicU64::new(0);

/// Those that may be closed, by the time since they were opened.
static CLOSABLE: Mutex<VecDeque<Weak<PathDescriptor>>> = Mutex::new(VecDeque::new());

/// A descriptor that opens nothing (`O_PATH`), or the way to have it again.
#[derive(Debug)]
pub(crate) struct PathDescriptor {
    fd: Mutex<Option<Arc<OwnedFd>>>,
    handle: OnceLock<FileHandle>,
    /// Used since somebody last looked for one to close.
    is_used: AtomicBool,
    /// Never closed.
    is_pinned: AtomicBool,
}

impl PathDescriptor {
    pub(crate) fn new(fd: Arc<OwnedFd>) -> Arc<Self> {
        Arc::new(Self {
            fd: Mutex::new(Some(fd)),
            handle: OnceLock::new(),
            is_used: AtomicBool::new(true),
            is_pinned: AtomicBool::new(false),
        })
    }

    /// The descriptor; `mount` is one by which it can be had again.
    ///
    /// # Errors
    /// `ESTALE` when the file is gone, `ENFILE` when the process has no descriptor left.
    pub(crate) fn open_descriptor(
        self: &Arc<Self>,
        mount: Option<BorrowedFd<'_>>,
    ) -> Outcome<Arc<OwnedFd>> {
        self.is_used.store(true, Relaxed);
        let mut held = lock(&self.fd);
        if let Some(fd) = &*held {
            return Ok(fd.clone());
        }
        let (handle, mount) = self.handle.get().zip(mount).ok_or(errno::STALE)?;
        let fd = Arc::new(open_handle(mount, handle)?);
        *held = Some(fd.clone());
        drop(held);
        self.make_closable();
        Ok(fd)
    }

    /// From now on the descriptor may be closed when there are too many; closes others now.
    pub(crate) fn make_closable(self: &Arc<Self>) {
        let mut open = lock(&CLOSABLE);
        open.push_back(Arc::downgrade(self));
        let mut looks = open.len();
        while open.len() > path_descriptors_max() && looks > 0 {
            looks -= 1;
            let Some(slot) = open.pop_front().and_then(|slot| slot.upgrade()) else {
                continue;
            };
            if slot.is_used.swap(false, Relaxed) || !slot.close() {
                open.push_back(Arc::downgrade(&slot));
            }
        }
    }

    /// The file has lost its last name and is open: nothing leads to it but this.
    pub(crate) fn pin(&self, fd: &Arc<OwnedFd>) {
        self.is_pinned.store(true, Relaxed);
        lock(&self.fd).get_or_insert_with(|| fd.clone());
    }

    fn close(&self) -> bool {
        let mut held = lock(&self.fd);
        // Asked with the lock held, in which `pin` looks for the descriptor.
        if self.is_pinned.load(Relaxed) {
            return false;
        }
        let Some(fd) = &*held else { return true };
        if self.handle.get().is_none() {
            let Ok(handle) = file_handle(fd.as_fd()) else {
                return false;
            };
            let _ = self.handle.set(handle);
        }
        *held = None;
        true
    }
}

/// Descriptors that are kept for files whose opening was promised: until they are given back, which
/// needs nothing of the session that has them.
#[derive(Debug, Clone, Default)]
pub struct ReservedDescriptors(Arc<AtomicU64>);

impl ReservedDescriptors {
    /// How many they are now.
    pub fn count(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Nothing is promised any more.
    pub fn release(&self) {
        RESERVED.fetch_sub(self.0.swap(0, Relaxed), Relaxed);
    }
}

/// The same, given back at the latest when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct ReservedDescriptorsGuard(ReservedDescriptors);

impl ReservedDescriptorsGuard {
    pub(crate) fn new(count: u32) -> Self {
        let count = u64::from(count);
        RESERVED.fetch_add(count, Relaxed);
        Self(ReservedDescriptors(Arc::new(AtomicU64::new(count))))
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.count()
    }

    pub(crate) fn shared(&self) -> ReservedDescriptors {
        self.0.clone()
    }
}

impl Drop for ReservedDescriptorsGuard {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// What one job has open, over all its sessions with this process: it may have so many files open
/// as leave some for others, and a process of it as leave some for its others. Clones are the same.
#[derive(Debug, Clone, Default)]
pub struct JobDescriptorUse(Arc<Mutex<DescriptorCounts>>);

#[derive(Debug, Default)]
struct DescriptorCounts {
    total: u64,
    /// By the process that opened it.
    by_opener: HashMap<u32, u64>,
}

impl JobDescriptorUse {
    /// The share of all sessions that are given none: of an agent, which works for one job.
    pub(crate) fn own_job() -> Self {
        static OWN: OnceLock<JobDescriptorUse> = OnceLock::new();
        OWN.get_or_init(Self::default).clone()
    }

    /// Whether nobody else has this share.
    pub fn is_unshared(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    fn counts(&self, opener: u32) -> (u64, u64) {
        let held = lock(&self.0);
        let own = held.by_opener.get(&opener).copied();
        (held.total, own.unwrap_or(0))
    }
}

/// Something that is open and was not promised.
#[derive(Debug)]
pub(crate) struct SynchronousOpen {
    share: JobDescriptorUse,
    opener: u32,
}

impl SynchronousOpen {
    pub(crate) fn new(share: &JobDescriptorUse, opener: u32) -> Self {
        SYNCHRONOUS_OPENS.fetch_add(1, Relaxed);
        let mut held = lock(&share.0);
        held.total += 1;
        *held.by_opener.entry(opener).or_default() += 1;
        drop(held);
        let share = share.clone();
        Self { share, opener }
    }
}

impl Drop for SynchronousOpen {
    fn drop(&mut self) {
        SYNCHRONOUS_OPENS.fetch_sub(1, Relaxed);
        let mut held = lock(&self.share.0);
        held.total -= 1;
        if let Some(own) = held.by_opener.get_mut(&self.opener) {
            *own -= 1;
            if *own == 0 {
                held.by_opener.remove(&self.opener);
            }
        }
    }
}

/// Whether a process of a job may have one more opened that was not promised: those that come at
/// the same moment may all be it.
///
/// # Errors
/// `EMFILE` when the process or its job would take the share of others; `ENFILE` when there is none
/// left for one that has none.
pub(crate) fn check_synchronous_open(share: &JobDescriptorUse, opener: u32) -> Outcome<()> {
    // Whoever keeps descriptors for others' early opens has many connections too.
    let others = match RESERVED.load(Relaxed) {
        0 => CONNECTION_DIVISOR_WITHOUT_RESERVED,
        _ => CONNECTION_DIVISOR,
    };
    let free = FreeDescriptors::with_connection_divisor(others);
    let (job, own) = share.counts(opener);
    match free.can_open(job, own) {
        true => Ok(()),
        false if job == 0 => Err(errno::NFILE),
        false => Err(errno::MFILE),
    }
}

/// Descriptors that may be promised from now on: what comes out of what others leave for those who
/// have few is not among them.
pub fn reservable_descriptors() -> u64 {
    FreeDescriptors::with_connection_divisor(CONNECTION_DIVISOR).without_last_reserve()
}

/// Descriptors that nothing has and nothing was promised.
#[derive(Debug, Clone, Copy)]
struct FreeDescriptors {
    /// All that there can be.
    total: u64,
    free: u64,
}

impl FreeDescriptors {
    fn with_connection_divisor(others: u64) -> Self {
        let limit = descriptor_limit();
        let most = limit - limit / PATH_DESCRIPTOR_DIVISOR - limit / others;
        let taken = RESERVED.load(Relaxed) + SYNCHRONOUS_OPENS.load(Relaxed);
        let now = most.saturating_sub(taken);
        Self {
            total: most,
            free: now,
        }
    }

    fn without_last_reserve(self) -> u64 {
        self.free.saturating_sub(self.total / LAST_RESERVE_DIVISOR)
    }

    /// Whether one who has `own` open, of a job that has `job`, may open one more. The bound
    /// follows what is free: who is alone has nearly all, and of many at once each has the same.
    fn can_open(self, job: u64, own: u64) -> bool {
        let free = match job < FEW_OPENS_OF_JOB {
            true => self.free,
            false => self.without_last_reserve(),
        };
        let whole = free.saturating_mul(FREE_MULTIPLE);
        let of_job = match own < FEW_OPENS_OF_PROCESS {
            true => whole,
            false => whole - whole / LAST_RESERVE_DIVISOR,
        };
        own < of_job.saturating_sub(job).saturating_mul(FREE_MULTIPLE)
    }
}

/// Whether a file of the file system of `mount` can be opened by its handle.
pub(crate) fn can_open_by_handle(mount: impl AsFd) -> bool {
    let mount = mount.as_fd();
    file_handle(mount).is_ok_and(|handle| open_handle(mount, &handle).is_ok())
}

/// How many of these descriptors may be open.
pub(crate) fn path_descriptors_max() -> usize {
    usize::try_from((descriptor_limit() / PATH_DESCRIPTOR_DIVISOR).clamp(1, PATH_DESCRIPTORS_MAX))
        .unwrap_or(1)
}

/// Descriptors that this process may have, since it first asked.
fn descriptor_limit() -> u64 {
    static LIMIT: OnceLock<u64> = OnceLock::new();
    *LIMIT.get_or_init(|| getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No holder leaves what it changes half-changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: u64 = 10_000;

    /// Whether a process that has `own` open, of a job that has `job`, may open one more when
    /// `held` are open.
    fn can_open(held: u64, job: u64, own: u64) -> bool {
        let (most, now) = (ALL, ALL - held);
        FreeDescriptors {
            total: most,
            free: now,
        }
        .can_open(job, own)
    }

    /// How many one more process can open, of a job that has `job`, when `held` are open.
    fn openable_count(held: u64, job: u64) -> u64 {
        let opened = (0..).take_while(|own| can_open(held + own, job + own, *own));
        opened.count() as u64
    }

    /// How many each of these jobs gets, of one process each, when all take what they can at once.
    fn opened_by_jobs(jobs: usize) -> Vec<u64> {
        let mut held = vec![0; jobs];
        loop {
            let mut is_over = true;
            for at in 0..jobs {
                if can_open(held.iter().sum(), held[at], held[at]) {
                    held[at] += 1;
                    is_over = false;
                }
            }
            if is_over {
                return held;
            }
        }
    }

    #[test]
    fn a_greedy_job_leaves_descriptors_for_others() {
        for jobs in [1, 2, 5, 20] {
            let held = opened_by_jobs(jobs);
            let all = held.iter().sum();
            assert!(
                openable_count(all, 0) >= FEW_OPENS_OF_JOB,
                "{jobs} jobs: {held:?}"
            );
            let least = held.iter().min();
            let difference = held.iter().max().zip(least).map(|(max, min)| max - min);
            assert!(difference <= Some(1), "{held:?}");
        }
        assert!(
            opened_by_jobs(1)[0] > ALL * 2 / 3,
            "alone it has nearly all"
        );
    }

    #[test]
    fn successive_greedy_jobs_leave_descriptors_for_others() {
        let mut held = 0;
        for job in 0..15 {
            let more = openable_count(held, 0);
            assert!(more >= FEW_OPENS_OF_JOB, "job {job} opens {more}");
            held += more;
        }
    }

    #[test]
    fn a_greedy_process_leaves_descriptors_for_its_job() {
        let mut held = openable_count(0, 0);
        assert!(!can_open(held, held, held));
        for process in 0..5 {
            let more = openable_count(held, held);
            assert!(
                more >= FEW_OPENS_OF_PROCESS,
                "process {process} opens {more}"
            );
            held += more;
        }
        assert!(!can_open(ALL, 0, 0), "there are none");
    }

    #[test]
    fn closing_releases_held_descriptors() {
        let share = JobDescriptorUse::default();
        let (first, second) = (
            SynchronousOpen::new(&share, 7),
            SynchronousOpen::new(&share, 8),
        );
        assert_eq!((share.counts(7), share.counts(9)), ((2, 1), (2, 0)));
        drop((first, second));
        assert_eq!(share.counts(7), (0, 0));
        assert!(lock(&share.0).by_opener.is_empty());
    }
}
