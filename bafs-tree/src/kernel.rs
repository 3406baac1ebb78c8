//! The one system call that no crate wraps: which parts of a file have space (`FIEMAP`).
#![allow(unsafe_code)]

use std::mem::size_of;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

/// Extents asked for at once.
const EXTENTS: usize = 32;

const FIEMAP_EXTENT_LAST: u32 = 1;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Extent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

#[repr(C)]
struct Map {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [Extent; EXTENTS],
}

// `FS_IOC_FIEMAP` is `_IOWR('f', 11, struct fiemap)`; the struct counts without its extents.
nix::ioctl_readwrite_bad!(
    fiemap,
    nix::request_code_readwrite!(b'f', 11, size_of::<Map>() - EXTENTS * size_of::<Extent>()),
    Map
);

/// The parts of `range` that have space in the file, in order; `None` when the file system does
/// not tell. Space that was promised to data in memory counts.
pub(crate) fn allocated(file: impl AsFd, range: Range<u64>) -> Option<Vec<Range<u64>>> {
    let mut found = Vec::new();
    let mut start = range.start;
    while start < range.end {
        let mut map = Map {
            start,
            length: range.end - start,
            flags: 0,
            mapped_extents: 0,
            extent_count: EXTENTS as u32,
            reserved: 0,
            extents: [Extent::default(); EXTENTS],
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
