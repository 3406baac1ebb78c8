//! What no crate wraps safely: which parts of a file have space (`FIEMAP`), memory that processes
//! share, and files by their handles.
#![allow(unsafe_code)]

use std::io;
use std::mem::size_of;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use nix::libc;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::errno::{self, Outcome};
use crate::shared_words::SharedAccess;

/// Extents asked for at once.
const EXTENTS_MAX: usize = 32;

const FIEMAP_EXTENT_LAST: u32 = 1;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct FiemapExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

#[repr(C)]
struct FiemapRequest {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [FiemapExtent; EXTENTS_MAX],
}

// `FS_IOC_FIEMAP` is `_IOWR('f', 11, struct fiemap)`; the struct counts without its extents.
nix::ioctl_readwrite_bad!(
    fiemap,
    nix::request_code_readwrite!(
        b'f',
        11,
        size_of::<FiemapRequest>() - EXTENTS_MAX * size_of::<FiemapExtent>()
    ),
    FiemapRequest
);

/// The parts of `range` that have space in the file, in order; `None` when the file system does
/// not tell. Space that was promised to data in memory counts.
pub(crate) fn allocated_ranges(file: impl AsFd, range: Range<u64>) -> Option<Vec<Range<u64>>> {
    let mut found = Vec::new();
    let mut start = range.start;
    while start < range.end {
        let mut map = FiemapRequest {
            start,
            length: range.end - start,
            flags: 0,
            mapped_extents: 0,
            extent_count: EXTENTS_MAX as u32,
            reserved: 0,
            extents: [FiemapExtent::default(); EXTENTS_MAX],
        };
        // SAFETY: the kernel writes at most `extent_count` extents behind the header, and `map`
        // has room for exactly that many; it lives until the call returns.
        unsafe { fiemap(file.as_fd().as_raw_fd(), &raw mut map) }.ok()?;
        let extents = map.extents.get(..map.mapped_extents as usize)?;
        let Some(last) = extents.last() else { break };
        for extent in extents {
            let end = extent.logical.saturating_add(extent.length).min(range.end);
            if end > extent.logical.max(range.start) {
                found.push(extent.logical.max(range.start)..end);
            }
        }
        if last.flags & FIEMAP_EXTENT_LAST != 0 {
            break;
        }
        start = last
            .logical
            .saturating_add(last.length.max(1))
            .max(start + 1);
    }
    Some(found)
}

/// Bytes of a handle at most (`MAX_HANDLE_SZ`).
const HANDLE_BYTES_MAX: usize = 128;

/// What the kernel calls a file by, whatever its names.
#[repr(C)]
#[derive(Debug, Clone)]
struct RawHandle {
    bytes: u32,
    kind: i32,
    data: [u8; HANDLE_BYTES_MAX],
}

/// What the kernel calls a file by, as short as it is.
#[derive(Debug, Clone)]
pub(crate) struct FileHandle {
    kind: i32,
    data: Box<[u8]>,
}

/// The handle of a file.
///
/// # Errors
/// `EOPNOTSUPP` where the file system has none.
pub(crate) fn file_handle(file: BorrowedFd<'_>) -> Outcome<FileHandle> {
    let mut raw = RawHandle {
        bytes: HANDLE_BYTES_MAX as u32,
        kind: 0,
        data: [0; HANDLE_BYTES_MAX],
    };
    let mut mount = 0;
    let handle = (&raw mut raw).cast();
    let fd = file.as_raw_fd();
    // SAFETY: the name is empty and ends with a zero; the kernel writes at most `bytes` bytes
    // behind the head of the handle, for which there is room.
    let done = unsafe {
        libc::name_to_handle_at(
            fd,
            c"".as_ptr(),
            handle,
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    if done != 0 {
        return Err(errno::from_last_os_error());
    }
    let data = raw.data.get(..raw.bytes as usize).ok_or(errno::INVAL)?;
    Ok(FileHandle {
        kind: raw.kind,
        data: data.into(),
    })
}

/// A descriptor that opens nothing of the file with a handle, on the file system of `mount`.
///
/// # Errors
/// `ESTALE` when it is gone, `EPERM` without the privilege.
pub(crate) fn open_handle(mount: BorrowedFd<'_>, handle: &FileHandle) -> Outcome<OwnedFd> {
    let mut raw = RawHandle {
        bytes: handle.data.len() as u32,
        kind: handle.kind,
        data: [0; HANDLE_BYTES_MAX],
    };
    let room = raw.data.get_mut(..handle.data.len());
    room.ok_or(errno::INVAL)?.copy_from_slice(&handle.data);
    let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    // SAFETY: the kernel reads `bytes` bytes behind the head of the handle, which are there.
    let fd = unsafe { libc::open_by_handle_at(mount.as_raw_fd(), (&raw mut raw).cast(), flags) };
    if fd < 0 {
        return Err(errno::from_last_os_error());
    }
    // SAFETY: the kernel has just made it, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Numbers of a file that is mapped into memory for as long as this lives.
#[derive(Debug)]
pub(crate) struct SharedMapping {
    start: NonNull<AtomicU32>,
    len: usize,
}

// SAFETY: the memory belongs to the value, which is bound to no thread.
unsafe impl Send for SharedMapping {}
// SAFETY: it is only used through atomic operations.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Maps the first `len` numbers of `file`, which must be sealed against becoming shorter, or
    /// belong to this process alone.
    pub(crate) fn new(file: BorrowedFd<'_>, len: usize, access: SharedAccess) -> io::Result<Self> {
        let prot = match access {
            SharedAccess::Read => ProtFlags::READ,
            SharedAccess::Write => ProtFlags::READ | ProtFlags::WRITE,
        };
        let bytes = len * size_of::<AtomicU32>();
        // SAFETY: the kernel chooses a place where nothing else is.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, prot, MapFlags::SHARED, file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn load(&self, index: usize, order: Ordering) -> Option<u32> {
        self.words().get(index).map(|word| word.load(order))
    }

    /// The numbers. Whoever mapped them only to read must not write.
    pub(crate) fn words(&self) -> &[AtomicU32] {
        // SAFETY: `len` numbers are mapped from `start` on, aligned to a page, until the value is
        // dropped; every bit pattern is a number, and other processes that change them are no
        // different from other threads.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        let bytes = self.len * size_of::<AtomicU32>();
        // SAFETY: the place was mapped by `new` with this length, and nobody borrows it any more.
        // An error means that it stays mapped, which harms nobody.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), bytes) };
    }
}
