//! What the kernel offers and no safe library wraps: one system call, the ring by which it
//! hands over requests for files, and who sent a signal. Holds no policy.
#![allow(unsafe_code)]

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use nix::libc;
use nix::unistd::{ForkResult, Pid};

/// Marks every open descriptor from `first` upwards as closed on the next `exec`.
///
/// Nothing is closed in this process, so descriptors owned by other code stay valid.
pub(crate) fn close_on_exec_from(first: u32) -> io::Result<()> {
    // SAFETY: the call takes three integers and touches no memory of ours. With CLOEXEC it
    // closes no descriptor, so no owner of a descriptor can observe a change.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            first,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    if answer == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Closes every open descriptor from `first` upwards, in a process that was just made by [`fork`]:
/// none of its owners there is used or dropped any more.
pub(crate) fn close_from(first: u32) -> io::Result<()> {
    // SAFETY: the call takes three integers and touches no memory of ours. The owners of what it
    // closes are of the process that was copied, and stay unused in the copy.
    let answer = unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) };
    if answer == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Makes a copy of this process, which has the calling thread only. Gives its number to the
/// caller, and nothing to the copy.
///
/// The copy must end with `exit`, and wait for no other thread of this process.
pub(crate) fn fork() -> nix::Result<Option<Pid>> {
    // SAFETY: callers have one thread, or a second one that only waits for a socket and a clock.
    // The C library makes its allocator whole again in the copy.
    match unsafe { nix::unistd::fork() }? {
        ForkResult::Parent { child } => Ok(Some(child)),
        ForkResult::Child => Ok(None),
    }
}

/// Where the arguments of this process begin and end, and of its copies.
static ARGUMENT_AREA: OnceLock<(usize, usize)> = OnceLock::new();

/// Looks for the place of this process' arguments, once for it and all copies of it.
fn argument_area() -> io::Result<(usize, usize)> {
    if let Some(area) = ARGUMENT_AREA.get() {
        return Ok(*area);
    }
    let stat = fs::read_to_string("/proc/self/stat")?;
    // proc_pid_stat(5): the second field is in brackets and may hold anything; 48 and 49 are where
    // the arguments begin and end.
    let fields = stat.rsplit(')').next().unwrap_or_default();
    let mut addresses = fields.split_whitespace().skip(45);
    let mut next = || addresses.next().and_then(|text| text.parse::<usize>().ok());
    let area = next().zip(next()).ok_or(io::ErrorKind::InvalidData)?;
    Ok(*ARGUMENT_AREA.get_or_init(|| area))
}

/// Has lists of processes show these words for this process, as far as those fit that it was
/// started with. It must have one thread, and must not ask for its arguments any more.
pub(crate) fn set_process_title(words: &[&str]) -> io::Result<()> {
    let (start, end) = argument_area()?;
    let length = end.saturating_sub(start);
    if start == 0 || length == 0 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut title = words.join("\0").into_bytes();
    title.truncate(length - 1);
    // SAFETY: the kernel says that these bytes hold the arguments of this process, which it wrote
    // there at its start; they are writable and stay mapped. No other thread reads them now, and
    // they end with a zero byte as before.
    unsafe {
        let area = start as *mut u8;
        std::ptr::write_bytes(area, 0, length);
        std::ptr::copy_nonoverlapping(title.as_ptr(), area, title.len());
    }
    Ok(())
}

/// Blocks of so many bytes are taken from the kernel, and given back to it, one by one. Smaller
/// ones are used again; a session's buffer is larger, and mostly never used.
#[cfg(target_env = "gnu")]
const MMAP_THRESHOLD_BYTES: libc::c_int = 4 << 20;

/// What an arena keeps free at its end, in bytes, and how many arenas there are.
#[cfg(target_env = "gnu")]
const ARENA_FREE_BYTES: libc::c_int = 8 << 20;
#[cfg(target_env = "gnu")]
const ARENAS_MAX: libc::c_int = 8;

/// Bounds what the allocator keeps that nobody uses.
pub(crate) fn limit_allocator() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [
        (libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
        (libc::M_TRIM_THRESHOLD, ARENA_FREE_BYTES),
        (libc::M_ARENA_MAX, ARENAS_MAX),
    ] {
        // SAFETY: the call takes two integers and changes what the allocator does from then on.
        // It refuses values that it cannot use, and works as before then.
        unsafe { libc::mallopt(parameter, value) };
    }
}

/// Who sent a signal that a key of the terminal stands for: the kernel.
const SI_KERNEL: i32 = 0x80;

/// Notes of each signal of a kind whether the kernel sent it, before anybody else here hears of it
/// who asks to hear it later than this.
pub(crate) fn record_signal_origin(
    signal: i32,
    is_from_kernel: &'static AtomicBool,
) -> io::Result<()> {
    let note = |info: &libc::siginfo_t| {
        is_from_kernel.store(info.si_code == SI_KERNEL, Ordering::SeqCst);
    };
    // SAFETY: a signal may interrupt anything, and what is done then only stores a value, which
    // waits for no lock and takes no memory.
    unsafe { signal_hook_registry::register_sigaction(signal, note) }.map(drop)
}

/// Has a signal do nothing in this process until somebody here asks to hear it. Programs that it
/// starts have the default action, which they would not have of a signal that is ignored.
pub(crate) fn disregard_signal(signal: i32) -> io::Result<()> {
    // SAFETY: a signal may interrupt anything, and nothing is done then.
    unsafe { signal_hook_registry::register(signal, || ()) }.map(drop)
}

/// Bytes of what surrounds a request (`struct fuse_uring_req_header`).
pub(crate) const HEADER_BYTES: usize = 288;

/// The commands of `enum fuse_uring_cmd`.
const COMMAND_REGISTER: u32 = 1;
const COMMAND_COMMIT_AND_FETCH: u32 = 2;

/// Stands for the descriptor by which other threads wake the ring's, where entries are numbers.
const WAKER_ENTRY: u64 = u64::MAX;

/// A kernel that takes nothing of what a ring is registered with is asked so often.
const REGISTER_ATTEMPTS_MAX: usize = 500;

/// Pause before the kernel is asked again that had no memory.
const NO_MEMORY_PAUSE: Duration = Duration::from_millis(1);

/// Where the kernel writes one request, and reads its answer.
pub(crate) struct RingBuffers {
    header: [u8; HEADER_BYTES],
    payload: Box<[u8]>,
}

impl fmt::Debug for RingBuffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffers({})", self.payload.len())
    }
}

impl RingBuffers {
    /// Room for names and data of so many bytes.
    pub(crate) fn new(payload: usize) -> Box<Self> {
        Box::new(Self {
            header: [0; HEADER_BYTES],
            payload: vec![0; payload].into_boxed_slice(),
        })
    }

    /// What surrounds the request.
    pub(crate) fn header(&self) -> &[u8; HEADER_BYTES] {
        &self.header
    }

    /// As [`Self::header`], to answer.
    pub(crate) fn header_mut(&mut self) -> &mut [u8; HEADER_BYTES] {
        &mut self.header
    }

    /// Names and data of the request.
    pub(crate) fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// As [`Self::payload`], to answer.
    pub(crate) fn payload_mut(&mut self) -> &mut [u8] {
        &mut self.payload
    }

    /// The two parts as the kernel is told them, which also tells these buffers from others.
    fn io_vectors(&mut self) -> [libc::iovec; 2] {
        let header = libc::iovec {
            iov_base: self.header.as_mut_ptr().cast(),
            iov_len: HEADER_BYTES,
        };
        let payload = libc::iovec {
            iov_base: self.payload.as_mut_ptr().cast(),
            iov_len: self.payload.len(),
        };
        [header, payload]
    }
}

/// What a ring has to say.
#[derive(Debug)]
pub(crate) enum RingEvent {
    /// Another thread wrote to the waker.
    Woken,
    /// The entry with this number has a request.
    Request(usize, Box<RingBuffers>),
    /// The kernel takes one of the entries no more.
    EntryRefused(io::Error),
}

/// The ring by which the kernel hands requests of one processor over. It stays in the thread that
/// registered it, which the kernel interrupts to write into the buffers that it has.
///
/// Buffers are a `Box` while they are ours. While the kernel may write into them, nobody has more
/// than their address, so no reference to them exists.
pub(crate) struct Ring {
    uring: IoUring<squeue::Entry128, cqueue::Entry>,
    device: OwnedFd,
    waker: OwnedFd,
    processor: u16,
    entries: Vec<RingEntry>,
}

struct RingEntry {
    /// Buffers that the kernel has.
    lent_buffers: Option<NonNull<RingBuffers>>,
    /// What the kernel was told of them. It reads this when the entry is registered.
    io_vectors: Box<[libc::iovec; 2]>,
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ring({})", self.processor)
    }
}

/// Memory shared with the kernel for one ring, before there is a mount.
pub(crate) struct PreparedRing(IoUring<squeue::Entry128, cqueue::Entry>);

impl fmt::Debug for PreparedRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Prepared")
    }
}

impl PreparedRing {
    /// Makes a ring that takes so many requests at once.
    ///
    /// Not asked for: `IORING_SETUP_DEFER_TASKRUN`, with which a request that waits for its thread
    /// in vain (which waits for something else) would hold up whoever unmounts.
    pub(crate) fn new(entries: u32) -> io::Result<Self> {
        // One place more for the waker.
        Ok(Self(IoUring::builder().build(entries + 1)?))
    }
}

impl Ring {
    /// Tells the kernel to hand requests of `processor` over by this ring, each into one of
    /// `entries` buffers with `payload` bytes.
    pub(crate) fn register(
        prepared: PreparedRing,
        (device, waker): (OwnedFd, OwnedFd),
        processor: u16,
        (entries, payload): (usize, usize),
    ) -> io::Result<Self> {
        let mut ring = Self {
            uring: prepared.0,
            device,
            waker,
            processor,
            entries: Vec::with_capacity(entries),
        };
        for index in 0..entries {
            let mut buffers = RingBuffers::new(payload);
            ring.entries.push(RingEntry {
                lent_buffers: None,
                io_vectors: Box::new(buffers.io_vectors()),
            });
            ring.submit_buffers(index, buffers, None)?;
        }
        ring.arm_waker()?;
        // The kernel may take a part of what is there at once. Meanwhile all requests wait, so
        // that a kernel which takes nothing must not be asked for ever.
        for _ in 0..REGISTER_ATTEMPTS_MAX {
            if ring.uring.submission().is_empty() {
                return Ok(ring);
            }
            ignore_transient(ring.uring.submit())?;
        }
        Err(io::Error::from_raw_os_error(libc::EAGAIN))
    }

    /// Answers the request in `buffers` and asks for the next one; the kernel hears of it at the
    /// next [`Self::wait`].
    pub(crate) fn commit(
        &mut self,
        index: usize,
        buffers: Box<RingBuffers>,
        request: u64,
    ) -> io::Result<()> {
        self.submit_buffers(index, buffers, Some(request))
    }

    fn submit_buffers(
        &mut self,
        index: usize,
        mut buffers: Box<RingBuffers>,
        answered: Option<u64>,
    ) -> io::Result<()> {
        let entry = &mut self.entries[index];
        let known = entry
            .io_vectors
            .iter()
            .map(|part| (part.iov_base, part.iov_len));
        let given = buffers
            .io_vectors()
            .map(|part| (part.iov_base, part.iov_len));
        // The kernel knows an entry's memory from its registration: no other may come back.
        assert!(
            entry.lent_buffers.is_none() && known.eq(given),
            "foreign buffers"
        );
        let operation = answered.map_or(COMMAND_REGISTER, |_| COMMAND_COMMIT_AND_FETCH);
        // `struct fuse_uring_cmd_req`.
        let mut command = [0; 80];
        command[8..16].copy_from_slice(&answered.unwrap_or_default().to_ne_bytes());
        command[16..18].copy_from_slice(&self.processor.to_ne_bytes());
        let device = types::Fd(self.device.as_raw_fd());
        let mut request = opcode::UringCmd80::new(device, operation)
            .cmd(command)
            .addr(
                answered
                    .is_none()
                    .then_some(entry.io_vectors.as_ptr() as u64),
            )
            .build()
            .user_data(index as u64);
        if answered.is_none() {
            let at: *mut squeue::Entry128 = &raw mut request;
            // SAFETY: an `Entry128` is a `struct io_uring_sqe` (`repr(C)`, 128 bytes), whose field
            // `len` are the four bytes from 24 on; the library has no other way to set it. Two
            // parts are what `addr` points to, and the entry keeps them where they are.
            unsafe { at.cast::<u8>().add(24).cast::<u32>().write_unaligned(2) };
        }
        entry.lent_buffers = Some(NonNull::from(Box::leak(buffers)));
        // SAFETY: the descriptor lives as long as the ring. What the kernel writes into is heap
        // memory that is not freed before the kernel gave it back: `lent` has its only address,
        // and a `Box` is made of it only when the entry completes.
        let pushed = unsafe { self.uring.submission().push(&request) };
        pushed.map_err(|_| io::Error::other("the ring has no room for an entry of its own"))
    }

    fn arm_waker(&mut self) -> io::Result<()> {
        let waker = types::Fd(self.waker.as_raw_fd());
        let request = opcode::PollAdd::new(waker, libc::POLLIN as u32)
            .build()
            .user_data(WAKER_ENTRY);
        // SAFETY: the operation touches no memory of ours, and the descriptor lives as long as the
        // ring.
        let pushed = unsafe { self.uring.submission().push(&request.into()) };
        pushed.map_err(|_| io::Error::other("the ring has no room for its waker"))
    }

    /// Hands over what was committed.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        let nothing = self.uring.submission().is_empty();
        match nothing {
            true => Ok(()),
            false => ignore_transient(self.uring.submit()),
        }
    }

    /// Hands over what was committed and waits until there is an event.
    pub(crate) fn wait(&mut self) -> io::Result<()> {
        ignore_transient(self.uring.submit_and_wait(1))
    }

    /// As [`Self::wait`], for so long at most.
    pub(crate) fn wait_for(&mut self, longest: Duration) -> io::Result<()> {
        let longest = types::Timespec::from(longest);
        let arguments = types::SubmitArgs::new().timespec(&longest);
        let waited = self.uring.submitter().submit_with_args(1, &arguments);
        match waited {
            Err(error) if error.raw_os_error() == Some(libc::ETIME) => Ok(()),
            waited => ignore_transient(waited),
        }
    }

    /// The next event that is there.
    pub(crate) fn next_event(&mut self) -> io::Result<Option<RingEvent>> {
        let Some(completed) = self.uring.completion().next() else {
            return Ok(None);
        };
        let (result, number) = (completed.result(), completed.user_data());
        if number == WAKER_ENTRY {
            self.arm_waker()?;
            return Ok(Some(RingEvent::Woken));
        }
        let index = number as usize;
        let entry = self.entries.get_mut(index);
        let Some(lent) = entry.and_then(|entry| entry.lent_buffers.take()) else {
            return Err(io::Error::other(
                "an entry completed that was not under way",
            ));
        };
        // SAFETY: the address came from a `Box` that was leaked for the kernel, once. The kernel
        // completed the entry, so it writes no more, and nobody else has the address.
        let buffers = unsafe { Box::from_raw(lent.as_ptr()) };
        Ok(Some(match result {
            0.. => RingEvent::Request(index, buffers),
            error => RingEvent::EntryRefused(io::Error::from_raw_os_error(-error)),
        }))
    }

    /// How many buffers of this ring the kernel has. What it has when the ring is dropped, is never
    /// freed.
    pub(crate) fn lent_count(&self) -> usize {
        let lent = self
            .entries
            .iter()
            .filter(|entry| entry.lent_buffers.is_some());
        lent.count()
    }

    /// What other threads write to.
    pub(crate) fn waker(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.waker.as_fd()
    }
}

/// Whether the kernel will take later what it does not take now: whoever asked looks for events and
/// asks again.
fn ignore_transient(asked: io::Result<usize>) -> io::Result<()> {
    let Err(error) = asked else { return Ok(()) };
    match error.raw_os_error() {
        // There are events that must be taken first.
        Some(libc::EINTR | libc::EBUSY) => Ok(()),
        // No memory for what was asked.
        Some(libc::EAGAIN) => {
            thread::sleep(NO_MEMORY_PAUSE);
            Ok(())
        }
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transient_kernel_errors_do_not_fail_a_ring() {
        let answer = |code| ignore_transient(Err(io::Error::from_raw_os_error(code)));
        for code in [libc::EINTR, libc::EBUSY, libc::EAGAIN] {
            assert!(answer(code).is_ok(), "{code}");
        }
        for code in [libc::EBADF, libc::EINVAL, libc::EFAULT, libc::ENXIO] {
            assert!(answer(code).is_err(), "{code}");
        }
        assert!(ignore_transient(Ok(0)).is_ok());
    }
}
