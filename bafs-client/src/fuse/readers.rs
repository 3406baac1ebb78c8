//! A bounded number of threads that read the requests of any number of volumes: the first volumes
//! of an agent have threads of their own, the others share these. A thread with its buffers for
//! each volume would take more memory than an agent may.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use fuser::Session;
use nix::errno::Errno;
use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::bridge::Bridge;
use super::ending::{End, Over};
use super::ring::answers::Answer;
use super::ring::requests::{Head, dispatch, forgets};
use crate::limits::{SHARED_READERS_MAX, SHARED_WRITE_BYTES};

/// What surrounds the largest write, in bytes.
const SURROUNDINGS: usize = 4096;

static READERS: OnceLock<Arc<Readers>> = OnceLock::new();

/// The threads, and the volumes that they serve.
#[derive(Debug)]
struct Readers {
    epoll: OwnedFd,
    served: Mutex<BTreeMap<u64, Arc<Served>>>,
    next: AtomicU64,
    threads: AtomicUsize,
    idle: AtomicUsize,
}

/// A volume that these threads serve.
#[derive(Debug)]
struct Served {
    device: Arc<OwnedFd>,
    bridge: Bridge,
    /// Keeps the kernel's connection, and the way to tell it something unasked.
    session: Mutex<Option<Session<Bridge>>>,
    over: Over,
}

impl Served {
    fn end(&self, end: End) {
        // Before anybody hears of it: the connection shall be gone then.
        drop(lock(&self.session).take());
        self.over.send_replace(Some(end));
    }
}

/// Has a volume served until the kernel's connection ends.
///
/// # Errors
/// The kernel gives no descriptor or thread.
pub(super) fn serve(
    (session, device): (Session<Bridge>, Arc<OwnedFd>),
    bridge: Bridge,
    over: Over,
) -> io::Result<()> {
    let readers = readers()?;
    // Another thread may take the request that woke this one.
    fcntl_setfl(&device, fcntl_getfl(&device)? | OFlags::NONBLOCK)?;
    let served = Arc::new(Served {
        device,
        bridge,
        session: Mutex::new(Some(session)),
        over,
    });
    let key = readers.next.fetch_add(1, Ordering::Relaxed);
    lock(&readers.served).insert(key, Arc::clone(&served));
    let data = epoll::EventData::new_u64(key);
    if let Err(error) = epoll::add(&readers.epoll, &*served.device, data, ONE_REQUEST) {
        lock(&readers.served).remove(&key);
        return Err(error.into());
    }
    Ok(())
}

/// One thread hears of a request, which says when the next may be heard of.
const ONE_REQUEST: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ONESHOT);

fn readers() -> io::Result<Arc<Readers>> {
    if let Some(readers) = READERS.get() {
        return Ok(Arc::clone(readers));
    }
    let made = Arc::new(Readers {
        epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
        served: Mutex::default(),
        next: AtomicU64::new(0),
        threads: AtomicUsize::new(0),
        idle: AtomicUsize::new(0),
    });
    let readers = READERS.get_or_init(|| made);
    // The first one must start; who waits for the kernel below starts others.
    if readers.threads.load(Ordering::Relaxed) == 0 {
        readers.start_thread()?;
    }
    Ok(Arc::clone(readers))
}

impl Readers {
    fn start_thread(self: &Arc<Self>) -> io::Result<()> {
        let count = self.threads.fetch_add(1, Ordering::AcqRel);
        if count >= SHARED_READERS_MAX {
            self.threads.fetch_sub(1, Ordering::AcqRel);
            return Ok(());
        }
        let own = Arc::clone(self);
        let started = thread::Builder::new()
            .name(format!("bafs-reader-{count}"))
            .spawn(move || own.read_on());
        if started.is_err() {
            self.threads.fetch_sub(1, Ordering::AcqRel);
        }
        started.map(drop)
    }

    fn read_on(self: Arc<Self>) {
        let _alive = Alive(&self);
        let mut buffer = vec![0; SHARED_WRITE_BYTES as usize + SURROUNDINGS];
        let mut events = Vec::with_capacity(1);
        loop {
            events.clear();
            self.idle.fetch_add(1, Ordering::AcqRel);
            let waited = epoll::wait(&self.epoll, spare_capacity(&mut events), None);
            let others = self.idle.fetch_sub(1, Ordering::AcqRel) - 1;
            match waited {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => {
                    // Nobody serves these volumes without it.
                    tracing::error!(%error, "cannot wait for requests");
                    return;
                }
            }
            let Some(event) = events.first() else {
                continue;
            };
            if others == 0
                && let Err(error) = self.start_thread()
            {
                tracing::debug!(%error, "no thread more to read requests");
            }
            let key = event.data.u64();
            let served = lock(&self.served).get(&key).cloned();
            if let Some(served) = served {
                self.read_one(key, &served, &mut buffer);
            }
        }
    }

    /// Reads one request, lets others read the next, and handles it.
    fn read_one(&self, key: u64, served: &Served, buffer: &mut [u8]) {
        let read = nix::unistd::read(&*served.device, buffer);
        let length = match read {
            Ok(length) => Some(length),
            // Taken by another, or by whoever interrupted it.
            Err(Errno::ENOENT | Errno::EINTR | Errno::EAGAIN) => None,
            Err(errno) => {
                tracing::debug!(%errno, "a FUSE session ended");
                return self.forget(key, served, End::of(errno));
            }
        };
        let data = epoll::EventData::new_u64(key);
        if let Err(error) = epoll::modify(&self.epoll, &*served.device, data, ONE_REQUEST) {
            tracing::error!(%error, "a volume is not served any more");
            return self.forget(key, served, End::Aborted);
        }
        if let Some(length) = length {
            handle(served, &buffer[..length]);
        }
    }

    fn forget(&self, key: u64, served: &Served, end: End) {
        lock(&self.served).remove(&key);
        if let Err(error) = epoll::delete(&self.epoll, &*served.device) {
            tracing::debug!(%error, "a device was not waited for");
        }
        served.end(end);
    }
}

/// A thread that is counted until it ends, be it by a panic.
struct Alive<'a>(&'a Readers);

impl Drop for Alive<'_> {
    fn drop(&mut self) {
        self.0.threads.fetch_sub(1, Ordering::AcqRel);
    }
}

fn handle(served: &Served, request: &[u8]) {
    let Some((head, payload)) = Head::read_device(request) else {
        return tracing::warn!(length = request.len(), "not a request");
    };
    if let Some(forgotten) = forgets(&head, payload) {
        for (ino, count) in forgotten {
            served.bridge.volume.forget(ino, count);
        }
        return;
    }
    let answer = Answer::by_device(Arc::clone(&served.device), head.unique);
    dispatch(&served.bridge, &head, payload, answer);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No holder leaves what it changes half-changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
