//! The descriptors of files that are referred to: as many are open as the process can spare, and
//! the others are opened again when they are needed. Knows no names.
//!
//! The kernel's handles of files (`open_by_handle_at(2)`) find a file wherever its names go, and
//! never another one under its number. They need a privilege, and a file system that has them;
//! without, all descriptors stay open.

use std::collections::VecDeque;
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

/// Something that is open and was not promised.
#[derive(Debug)]
pub(crate) struct InTime(());

impl InTime {
    pub(crate) fn new() -> Self {
        IN_TIME.fetch_add(1, Relaxed);
        Self(())
    }
}

impl Drop for InTime {
    fn drop(&mut self) {
        IN_TIME.fetch_sub(1, Relaxed);
    }
}

/// Whether one more may be opened that was not promised: those that come at the same moment may
/// all be it. Where nothing is promised, only the system says no.
///
/// # Errors
/// `ENFILE` when the rest is kept for what was promised.
pub(crate) fn check_in_time() -> Outcome<()> {
    let kept = KEPT.load(Relaxed);
    if kept == 0 {
        return Ok(());
    }
    let limit = limit();
    let others = limit / PART + limit / OTHERS_PART;
    let left = limit.saturating_sub(others).saturating_sub(kept);
    match IN_TIME.load(Relaxed) < left {
        true => Ok(()),
        false => Err(errno::NFILE),
    }
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
