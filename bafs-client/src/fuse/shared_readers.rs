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

use super::file_system::VolumeFileSystem;
use super::ring::kernel_reply::KernelReply;
use super::ring::requests::{FuseRequestHead, dispatch, parse_forgets};
use crate::connection_end::{ConnectionEnd, ConnectionEndSender};
use crate::limits::{SHARED_READERS_MAX, SHARED_WRITE_BYTES_MAX};

/// What surrounds the largest write, in bytes.
pub(super) const WRITE_OVERHEAD_BYTES: usize = 4096;

static READERS: OnceLock<Arc<SharedReaders>> = OnceLock::new();

/// The threads, and the volumes that they serve.
#[derive(Debug)]
struct SharedReaders {
    epoll: OwnedFd,
    volumes: Mutex<BTreeMap<u64, Arc<ServedVolume>>>,
    next_key: AtomicU64,
    threads: AtomicUsize,
    idle_threads: AtomicUsize,
}

/// A volume that these threads serve.
#[derive(Debug)]
struct ServedVolume {
    device: Arc<OwnedFd>,
    bridge: VolumeFileSystem,
    /// Keeps the kernel's connection, and the way to tell it something unasked.
    session: Mutex<Option<Session<VolumeFileSystem>>>,
    connection_end: ConnectionEndSender,
}

impl ServedVolume {
    fn end(&self, end: ConnectionEnd) {
        // Before anybody hears of it: the connection shall be gone then.
        drop(lock(&self.session).take());
        self.connection_end.send_replace(Some(end));
    }
}

/// Has a volume served until the kernel's connection ends.
///
/// # Errors
/// The kernel gives no descriptor or thread.
pub(super) fn serve(
    (session, device): (Session<VolumeFileSystem>, Arc<OwnedFd>),
    bridge: VolumeFileSystem,
    over: ConnectionEndSender,
) -> io::Result<()> {
    let readers = get_or_start()?;
    // Another thread may take the request that woke this one.
    fcntl_setfl(&device, fcntl_getfl(&device)? | OFlags::NONBLOCK)?;
    let served = Arc::new(ServedVolume {
        device,
        bridge,
        session: Mutex::new(Some(session)),
        connection_end: over,
    });
    let key = readers.next_key.fetch_add(1, Ordering::Relaxed);
    lock(&readers.volumes).insert(key, Arc::clone(&served));
    let data = epoll::EventData::new_u64(key);
    if let Err(error) = epoll::add(&readers.epoll, &*served.device, data, READABLE_ONCE) {
        lock(&readers.volumes).remove(&key);
        return Err(error.into());
    }
    Ok(())
}

/// One thread hears of a request, which says when the next may be heard of.
const READABLE_ONCE: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ONESHOT);

fn get_or_start() -> io::Result<Arc<SharedReaders>> {
    if let Some(readers) = READERS.get() {
        return Ok(Arc::clone(readers));
    }
    let made = Arc::new(SharedReaders {
        epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
        volumes: Mutex::default(),
        next_key: AtomicU64::new(0),
        threads: AtomicUsize::new(0),
        idle_threads: AtomicUsize::new(0),
    });
    let readers = READERS.get_or_init(|| made);
    // The first one must start; who waits for the kernel below starts others.
    if readers.threads.load(Ordering::Relaxed) == 0 {
        readers.start_thread()?;
    }
    Ok(Arc::clone(readers))
}

impl SharedReaders {
    fn start_thread(self: &Arc<Self>) -> io::Result<()> {
        let count = self.threads.fetch_add(1, Ordering::AcqRel);
        if count >= SHARED_READERS_MAX {
            self.threads.fetch_sub(1, Ordering::AcqRel);
            return Ok(());
        }
        let own = Arc::clone(self);
        let started = thread::Builder::new()
            .name(format!("bafs-reader-{count}"))
            .spawn(move || own.serve_requests());
        if started.is_err() {
            self.threads.fetch_sub(1, Ordering::AcqRel);
        }
        started.map(drop)
    }

    fn serve_requests(self: Arc<Self>) {
        let _alive = ThreadCountGuard(&self);
        let mut buffer = vec![0; SHARED_WRITE_BYTES_MAX as usize + WRITE_OVERHEAD_BYTES];
        let mut events = Vec::with_capacity(1);
        loop {
            events.clear();
            self.idle_threads.fetch_add(1, Ordering::AcqRel);
            let waited = epoll::wait(&self.epoll, spare_capacity(&mut events), None);
            let others = self.idle_threads.fetch_sub(1, Ordering::AcqRel) - 1;
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
            let served = lock(&self.volumes).get(&key).cloned();
            if let Some(served) = served {
                self.serve_request(key, &served, &mut buffer);
            }
        }
    }

    /// Reads one request, lets others read the next, and handles it.
    fn serve_request(&self, key: u64, volume: &ServedVolume, buffer: &mut [u8]) {
        let read = nix::unistd::read(&*volume.device, buffer);
        let length = match read {
            Ok(length) => Some(length),
            // Taken by another, or by whoever interrupted it.
            Err(Errno::ENOENT | Errno::EINTR | Errno::EAGAIN) => None,
            Err(errno) => {
                tracing::debug!(%errno, "a FUSE session ended");
                return self.remove(key, volume, ConnectionEnd::from_errno(errno));
            }
        };
        let data = epoll::EventData::new_u64(key);
        if let Err(error) = epoll::modify(&self.epoll, &*volume.device, data, READABLE_ONCE) {
            tracing::error!(%error, "a volume is not served any more");
            return self.remove(key, volume, ConnectionEnd::Aborted);
        }
        if let Some(length) = length {
            handle_request(volume, &buffer[..length]);
        }
    }

    fn remove(&self, key: u64, volume: &ServedVolume, end: ConnectionEnd) {
        lock(&self.volumes).remove(&key);
        if let Err(error) = epoll::delete(&self.epoll, &*volume.device) {
            tracing::debug!(%error, "a device was not waited for");
        }
        volume.end(end);
    }
}

/// A thread that is counted until it ends, be it by a panic.
struct ThreadCountGuard<'a>(&'a SharedReaders);

impl Drop for ThreadCountGuard<'_> {
    fn drop(&mut self) {
        self.0.threads.fetch_sub(1, Ordering::AcqRel);
    }
}

fn handle_request(volume: &ServedVolume, request: &[u8]) {
    let Some((head, payload)) = FuseRequestHead::parse_device(request) else {
        return tracing::warn!(length = request.len(), "not a request");
    };
    if let Some(forgotten) = parse_forgets(&head, payload) {
        for (ino, count) in forgotten {
            volume.bridge.volume.forget(ino, count);
        }
        return;
    }
    let answer = KernelReply::through_device(Arc::clone(&volume.device), head.unique);
    dispatch(&volume.bridge, &head, payload, answer);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No holder leaves what it changes half-changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
