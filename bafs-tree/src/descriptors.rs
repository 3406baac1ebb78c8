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
const PART: u64 = 4;

/// Where the number of descriptors has no limit, or nearly none.
const OPEN_MAX: u64 = 1 << 16;

/// Part of the process's descriptors that is left for connections and the like.
const OTHERS_PART: u64 = 8;

/// The same where no opens were promised.
const SOLE_OTHERS_PART: u64 = 16;

/// So many times what is free a job may have open, and a process so many times what its job may
/// still open: alone, seven eighths of all.
const OF_FREE: u64 = 8;

/// Descriptors that are kept for files whose opening was promised.
static KEPT: AtomicU64 = AtomicU64::new(0);

/// Files and directories that are open and were not promised.
static IN_TIME: AtomicU64 = AtomicU64::new(0);

/// Those that may be closed, by the time since they were opened.
static OPEN: Mutex<VecDeque<Weak<Slot>>> = Mutex::new(VecDeque::new());

/// A descriptor that opens nothing (`O_PATH`), or the way to have it again.
#[derive(Debug)]
pub(crate) struct Slot {
    fd: Mutex<Option<Arc<OwnedFd>>>,
    handle: OnceLock<FileHandle>,
    /// Used since somebody last looked for one to close.
    is_used: AtomicBool,
    /// Never closed.
    is_kept: AtomicBool,
}

impl Slot {
    pub(crate) fn new(fd: Arc<OwnedFd>) -> Arc<Self> {
        Arc::new(Self {
            fd: Mutex::new(Some(fd)),
            handle: OnceLock::new(),
            is_used: AtomicBool::new(true),
            is_kept: AtomicBool::new(false),
        })
    }

    /// The descriptor; `mount` is one by which it can be had again.
    ///
    /// # Errors
    /// `ESTALE` when the file is gone, `ENFILE` when the process has no descriptor left.
    pub(crate) fn fd(self: &Arc<Self>, mount: Option<BorrowedFd<'_>>) -> Outcome<Arc<OwnedFd>> {
        self.is_used.store(true, Relaxed);
        let mut held = lock(&self.fd);
        if let Some(fd) = &*held {
            return Ok(fd.clone());
        }
        let (handle, mount) = self.handle.get().zip(mount).ok_or(errno::STALE)?;
        let fd = Arc::new(open_handle(mount, handle)?);
        *held = Some(fd.clone());
        drop(held);
        self.may_close();
        Ok(fd)
    }

    /// From now on the descriptor may be closed when there are too many; closes others now.
    pub(crate) fn may_close(self: &Arc<Self>) {
        let mut open = lock(&OPEN);
        open.push_back(Arc::downgrade(self));
        let mut looks = open.len();
        while open.len() > open_max() && looks > 0 {
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
    pub(crate) fn keep(&self, fd: &Arc<OwnedFd>) {
        self.is_kept.store(true, Relaxed);
        lock(&self.fd).get_or_insert_with(|| fd.clone());
    }

    fn close(&self) -> bool {
        let mut held = lock(&self.fd);
        // Asked with the lock held, in which `keep` looks for the descriptor.
        if self.is_kept.load(Relaxed) {
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
pub struct KeptDescriptors(Arc<AtomicU64>);

impl KeptDescriptors {
    /// How many they are now.
    pub fn count(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Nothing is promised any more.
    pub fn give_back(&self) {
        KEPT.fetch_sub(self.0.swap(0, Relaxed), Relaxed);
    }
}

/// The same, given back at the latest when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct Kept(KeptDescriptors);

impl Kept {
    pub(crate) fn new(count: u32) -> Self {
        let count = u64::from(count);
        KEPT.fetch_add(count, Relaxed);
        Self(KeptDescriptors(Arc::new(AtomicU64::new(count))))
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.count()
    }

    pub(crate) fn shared(&self) -> KeptDescriptors {
        self.0.clone()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.give_back();
    }
}

/// What one job has open, over all its sessions with this process: it may have so many files open
/// as leave some for others, and a process of it as leave some for its others. Clones are the same.
#[derive(Debug, Clone, Default)]
pub struct DescriptorShare(Arc<Mutex<Held>>);

#[derive(Debug, Default)]
struct Held {
    all: u64,
    /// By the process that opened it.
    by_opener: HashMap<u32, u64>,
}

impl DescriptorShare {
    /// The share of all sessions that are given none: of an agent, which works for one job.
    pub(crate) fn of_process() -> Self {
        static OWN: OnceLock<DescriptorShare> = OnceLock::new();
        OWN.get_or_init(Self::default).clone()
    }

    /// Whether nobody else has this share.
    pub fn is_unused(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    fn held(&self, opener: u32) -> (u64, u64) {
        let held = lock(&self.0);
        let own = held.by_opener.get(&opener).copied();
        (held.all, own.unwrap_or(0))
    }
}

/// Something that is open and was not promised.
#[derive(Debug)]
pub(crate) struct InTime {
    share: DescriptorShare,
    opener: u32,
}

impl InTime {
    pub(crate) fn new(share: &DescriptorShare, opener: u32) -> Self {
        IN_TIME.fetch_add(1, Relaxed);
        let mut held = lock(&share.0);
        held.all += 1;
        *held.by_opener.entry(opener).or_default() += 1;
        drop(held);
        let share = share.clone();
        Self { share, opener }
    }
}

impl Drop for InTime {
    fn drop(&mut self) {
        IN_TIME.fetch_sub(1, Relaxed);
        let mut held = lock(&self.share.0);
        held.all -= 1;
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
pub(crate) fn check_in_time(share: &DescriptorShare, opener: u32) -> Outcome<()> {
    let (limit, kept) = (limit(), KEPT.load(Relaxed));
    // Whoever keeps descriptors for others' early opens has many connections too.
    let others = match kept {
        0 => SOLE_OTHERS_PART,
        _ => OTHERS_PART,
    };
    let taken = limit / PART + limit / others + kept + IN_TIME.load(Relaxed);
    let free = limit.saturating_sub(taken);
    let (job, own) = share.held(opener);
    match is_within_share(free, job, own) {
        true => Ok(()),
        false if job == 0 => Err(errno::NFILE),
        false => Err(errno::MFILE),
    }
}

/// Whether one who has `own` open, of a job that has `job`, may open one more of those that are
/// `free`. The bound follows what is free, so that there is always some for one who has few,
/// however many others take all they can get.
fn is_within_share(free: u64, job: u64, own: u64) -> bool {
    let of_job = free.saturating_mul(OF_FREE).saturating_sub(job);
    own < of_job.saturating_mul(OF_FREE)
}

/// Whether a file of the file system of `mount` can be opened by its handle.
pub(crate) fn can_open_again(mount: impl AsFd) -> bool {
    let mount = mount.as_fd();
    file_handle(mount).is_ok_and(|handle| open_handle(mount, &handle).is_ok())
}

/// How many of these descriptors may be open.
pub(crate) fn open_max() -> usize {
    usize::try_from((limit() / PART).clamp(1, OPEN_MAX)).unwrap_or(1)
}

/// Descriptors that this process may have, since it first asked.
fn limit() -> u64 {
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

    /// How many of `all` each of these jobs gets, of one process each, when all take what they can.
    fn taken(all: u64, jobs: usize) -> Vec<u64> {
        let mut held = vec![0; jobs];
        loop {
            let mut is_over = true;
            for at in 0..jobs {
                let free = all - held.iter().sum::<u64>();
                if is_within_share(free, held[at], held[at]) {
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
            let held = taken(10_000, jobs);
            let free = 10_000 - held.iter().sum::<u64>();
            assert!(free >= 40, "{jobs} jobs leave {free}");
            // Another job, and another process of the first.
            assert!((0..20).all(|few| is_within_share(free - few, few, few)));
            assert!((0..3).all(|few| is_within_share(free - few, held[0] + few, few)));
        }
        assert!(taken(10_000, 1)[0] > 8_500, "alone it has nearly all");
        let both = taken(10_000, 2);
        assert!(both[0].abs_diff(both[1]) <= 1, "{both:?}");
    }

    #[test]
    fn a_greedy_process_leaves_descriptors_for_its_job() {
        let held = taken(10_000, 1)[0];
        let others = (0..).take_while(|few| is_within_share(10_000 - held - few, held + few, *few));
        assert!(others.count() > 50);
        assert!(!is_within_share(10_000 - held, held, held));
        assert!(!is_within_share(0, 0, 0));
    }

    #[test]
    fn what_is_closed_is_no_longer_held() {
        let share = DescriptorShare::default();
        let (first, second) = (InTime::new(&share, 7), InTime::new(&share, 8));
        assert_eq!((share.held(7), share.held(9)), ((2, 1), (2, 0)));
        drop((first, second));
        assert_eq!(share.held(7), (0, 0));
        assert!(lock(&share.0).by_opener.is_empty());
    }
}
