//! Requests by the kernel's rings, one for each processor (FUSE over io_uring), beside fuser's
//! session: that one still mounts, agrees with the kernel, and takes what the kernel sends by its
//! device only (what is forgotten, and what we tell unasked). Handlers are the same for both.
//!
//! Once the kernel was asked for rings it holds all requests back until each processor has one. So
//! what can fail without the kernel is done before it is asked, and a ring that the kernel itself
//! refuses has it fall back to the device.

pub(super) mod kernel_reply;
mod outbox;
mod queue;
pub(super) mod requests;

use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};

use bafs_proto::limits::IO_BYTES_MAX;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use rustix::event::{EventfdFlags, eventfd};

use self::outbox::Outbox;
use self::queue::RingQueue;
use super::file_system::VolumeFileSystem;
use super::reader_slots::ring_entry_count;
use crate::kernel::{PreparedRing, Ring, RingEvent};
use crate::limits::RING_PROCESSORS_MAX;
use crate::memory::{self, MemoryReservation};

/// Where root lets rings be used.
const ENABLED_PATH: &str = "/sys/module/fuse/parameters/enable_uring";

/// Processors that the kernel wants a ring for each of.
const POSSIBLE_PROCESSORS_PATH: &str = "/sys/devices/system/cpu/possible";

/// What a thread needs to begin.
struct RingStart {
    device: OwnedFd,
    bridge: VolumeFileSystem,
}

/// The thread of one ring.
#[derive(Debug)]
struct RingThread {
    outbox: Arc<Outbox>,
    start: Sender<RingStart>,
    results: Receiver<io::Result<()>>,
    thread: JoinHandle<()>,
}

/// Why the kernel does not take a ring, in words.
#[derive(Debug)]
pub(super) struct RingRefused(pub(super) String);

/// A ring for each processor, for one volume.
#[derive(Debug)]
pub(super) struct Rings {
    threads: Vec<RingThread>,
    /// What their buffers take of the memory of the agent.
    _memory: MemoryReservation,
}

/// Lets the kernel use rings for mounts of this machine that request them, from now on.
///
/// # Errors
/// The system's: only root may do so, and the kernel must have rings.
pub fn enable_rings() -> io::Result<()> {
    fs::write(ENABLED_PATH, "Y")
}

impl Rings {
    /// Makes them, for a mount to come. `over` is called should one fail while it serves.
    ///
    /// # Errors
    /// Why there are none, in words.
    pub(super) fn prepare(on_failure: &Arc<dyn Fn() + Send + Sync>) -> Result<Self, String> {
        let enabled = fs::read_to_string(ENABLED_PATH).unwrap_or_default();
        if enabled.trim() != "Y" {
            let remedy = "root may write Y to it, or start the node with --enable-rings";
            return Err(format!("{ENABLED_PATH} is not Y; {remedy}"));
        }
        let possible = fs::read_to_string(POSSIBLE_PROCESSORS_PATH).unwrap_or_default();
        let processors = count_processors(&possible).ok_or_else(|| {
            format!("the machine may have processors {possible:?}; at most {RING_PROCESSORS_MAX}")
        })?;
        let entries = ring_entry_count(processors).ok_or_else(|| {
            "the buffers of its rings would take too much memory beside those of other volumes"
                .to_owned()
        })?;
        let bytes = usize::from(processors) * entries * IO_BYTES_MAX as usize;
        let mut rings = Self {
            threads: Vec::new(),
            _memory: memory::reserve_memory(bytes),
        };
        for processor in 0..processors {
            match spawn_ring_thread((processor, entries), Arc::clone(on_failure)) {
                Ok(served) => rings.threads.push(served),
                Err(error) => {
                    rings.stop();
                    return Err(format!("the kernel makes no ring: {error}"));
                }
            }
        }
        Ok(rings)
    }

    /// Tells the kernel of them, which asks by them from then on.
    ///
    /// # Errors
    /// [`RingRefused`]: the kernel asks by its device instead. Anything else: it asks nobody.
    pub(super) fn start(
        &self,
        device: BorrowedFd<'_>,
        bridge: &VolumeFileSystem,
    ) -> io::Result<Result<(), RingRefused>> {
        for served in &self.threads {
            let device = device.try_clone_to_owned()?;
            let bridge = bridge.clone();
            // A thread that is gone is seen below.
            let _ = served.start.send(RingStart { device, bridge });
        }
        let told: Vec<_> = self
            .threads
            .iter()
            .map(|served| served.results.recv())
            .collect();
        let mut refused = Ok(());
        for told in told {
            if let Err(error) = told.map_err(|_| io::Error::other("a thread ended"))? {
                refused = Err(RingRefused(format!(
                    "the kernel does not take a ring: {error}"
                )));
            }
        }
        Ok(refused)
    }

    /// Ends the threads, when the kernel asks nothing any more.
    pub(super) fn stop(self) {
        for served in &self.threads {
            served.outbox.request_stop();
        }
        for served in self.threads {
            drop(served.start);
            // A panic was reported when it happened.
            let _ = served.thread.join();
        }
    }
}

/// The number of processors, if their numbers have no gaps and there are not too many.
fn count_processors(possible: &str) -> Option<u16> {
    let last = match possible.trim() {
        "0" => 0,
        range => range.strip_prefix("0-")?.parse().ok()?,
    };
    (last < RING_PROCESSORS_MAX).then_some(last + 1)
}

fn spawn_ring_thread(
    (processor, entries): (u16, usize),
    on_failure: Arc<dyn Fn() + Send + Sync>,
) -> io::Result<RingThread> {
    let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let outbox = Arc::new(Outbox::new(waker.try_clone()?));
    let (start, started) = mpsc::channel();
    let (tell, told) = mpsc::channel();
    let own = Arc::clone(&outbox);
    let thread = thread::Builder::new()
        .name(format!("bafs-ring-{processor}"))
        .spawn(move || {
            run_ring(
                (processor, entries),
                waker,
                own,
                (&started, &tell),
                &on_failure,
            )
        })?;
    told.recv()
        .map_err(|_| io::Error::other("its thread ended"))??;
    Ok(RingThread {
        outbox,
        start,
        results: told,
        thread,
    })
}

/// Calls what it has when it is dropped, unless all went well: a ring that nobody serves lets its
/// processor's requests wait forever.
struct RingFailureGuard<'a>(Option<&'a (dyn Fn() + Send + Sync)>);

impl Drop for RingFailureGuard<'_> {
    fn drop(&mut self) {
        if let Some(over) = self.0 {
            over();
        }
    }
}

fn run_ring(
    (processor, entries): (u16, usize),
    waker: OwnedFd,
    outbox: Arc<Outbox>,
    (started, tell): (&Receiver<RingStart>, &Sender<io::Result<()>>),
    on_failure: &Arc<dyn Fn() + Send + Sync>,
) {
    pin_to_processor(processor);
    let prepared = PreparedRing::new(entries as u32);
    let (prepared, told) = match prepared {
        Ok(prepared) => (Some(prepared), Ok(())),
        Err(error) => (None, Err(error)),
    };
    // Nobody listens any more: then nobody starts it either.
    let _ = tell.send(told);
    let (Some(prepared), Ok(start)) = (prepared, started.recv()) else {
        return;
    };
    let mut alarm = RingFailureGuard(Some(on_failure.as_ref()));
    let size = (entries, IO_BYTES_MAX as usize);
    let ring = Ring::register(prepared, (start.device, waker), processor, size);
    let ring = ring.and_then(|mut ring| {
        let come = std::iter::from_fn(|| ring.next_event().transpose());
        let first = collect_accepted(come, entries)?;
        Ok((ring, first))
    });
    let (ring, first) = match ring {
        Ok(ring) => ring,
        Err(error) => {
            alarm.0 = None;
            let _ = tell.send(Err(error));
            return;
        }
    };
    let _ = tell.send(Ok(()));
    match RingQueue::new(ring, outbox, start.bridge, entries).serve(first) {
        Ok(()) => alarm.0 = None,
        Err(error) => tracing::error!(%error, processor, "a ring failed"),
    }
}

/// What came already besides the entries that the kernel refuses. One that it takes is enough: once
/// each processor has one, the kernel asks by rings and not by its device any more.
fn collect_accepted(
    events: impl Iterator<Item = io::Result<RingEvent>>,
    entries: usize,
) -> io::Result<Vec<RingEvent>> {
    let (mut first, mut refused) = (Vec::new(), 0);
    for event in events {
        match event? {
            RingEvent::EntryRefused(error) => {
                refused += 1;
                if refused == entries {
                    return Err(error);
                }
                tracing::debug!(%error, "the kernel refuses an entry of a ring");
            }
            event => first.push(event),
        }
    }
    Ok(first)
}

/// Keeps this thread on its processor, where that is allowed: there it costs least.
fn pin_to_processor(processor: u16) {
    let mut only = CpuSet::new();
    let set = only.set(usize::from(processor));
    if let Err(error) = set.and_then(|()| sched_setaffinity(Pid::from_raw(0), &only)) {
        tracing::debug!(%error, processor, "a ring's thread runs anywhere");
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use super::*;
    use crate::kernel::RingBuffers;

    fn refused_entry() -> io::Result<RingEvent> {
        Ok(RingEvent::EntryRefused(io::Error::from_raw_os_error(12)))
    }

    #[test]
    fn a_ring_needs_one_accepted_entry() {
        let first = collect_accepted([].into_iter(), 2).unwrap();
        assert!(first.is_empty());
        // A request that came at once is not lost beside an entry that was refused.
        let request = || Ok(RingEvent::Request(1, RingBuffers::new(8)));
        let first = collect_accepted([refused_entry(), request()].into_iter(), 2).unwrap();
        assert!(matches!(&first[..], [RingEvent::Request(1, _)]));
        let none = collect_accepted([refused_entry(), refused_entry()].into_iter(), 2).unwrap_err();
        assert_eq!(none.raw_os_error(), Some(12));
    }

    #[test]
    fn only_unexpected_ring_ends_raise_the_alarm() {
        let raised = AtomicUsize::new(0);
        let over = || {
            raised.fetch_add(1, Relaxed);
        };
        drop(RingFailureGuard(Some(&over)));
        assert_eq!(raised.load(Relaxed), 1);
        let mut calm = RingFailureGuard(Some(&over));
        calm.0 = None;
        drop(calm);
        assert_eq!(raised.load(Relaxed), 1, "it was told to end");
        let panics = || {
            let _alarm = RingFailureGuard(Some(&over));
            panic!("as a handler might");
        };
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        assert_eq!(raised.load(Relaxed), 2, "a panic is no order");
    }

    #[test]
    fn processor_counts_require_gapless_ranges() {
        let cases = [("0\n", Some(1)), ("0-1\n", Some(2)), ("0-15", Some(16))];
        for (possible, count) in cases {
            assert_eq!(count_processors(possible), count, "{possible:?}");
        }
        for possible in ["", "1-3", "0-1,4-5", "0-16", "0,2"] {
            assert_eq!(count_processors(possible), None, "{possible:?}");
        }
    }
}
