//! Operations on the content of open files, within the limit.

use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use bafs_proto::file_op::{BodyRange, FileOp, FileReply, FileResult};
use bafs_proto::ids::{HandleId, InodeNo};
use bafs_proto::limits::{BODY_BYTES_MAX, IO_BYTES_MAX};
use rustix::buffer::spare_capacity;
use rustix::fs::{
    Advice, FallocateFlags, FileType, OFlags, SeekFrom, copy_file_range, fadvise, fallocate,
    fdatasync, fstat, fsync, seek,
};
use rustix::io::{ReadWriteFlags, pread, pwrite, pwritev2};

use crate::account::{Account, SpaceDecision};
use crate::errno::{self, Outcome};
use crate::handles::OpenFile;
use crate::kernel;
use crate::session::Session;

/// Most that one copy moves before it answers, in bytes: a short copy is no error, and nobody
/// waits for long.
const COPY_BYTES_MAX: u64 = 64 << 20;

/// Space that was reserved for a change of a file.
struct RangeReservation {
    /// Bytes of the wanted range that fit, from its start.
    granted_bytes: u64,
    reserved_bytes: u64,
}

impl Session {
    pub(crate) fn read(
        &self,
        handle: HandleId,
        offset: u64,
        length: u32,
        out: &mut Vec<u8>,
    ) -> FileResult {
        if length > IO_BYTES_MAX {
            return Err(errno::INVAL);
        }
        let file = self.open_file(handle)?;
        let length = length as usize;
        out.reserve_exact(length);
        let done = append_all(out, length, |out, done| {
            let at = offset.saturating_add(done as u64);
            append_read(&file.fd, out, length - done, at)
        });
        done.map(|done| FileReply::Read {
            length: done as u32,
        })
    }

    /// Reads a whole file of at most `bytes_max` bytes, which is open only meanwhile.
    pub(crate) fn read_file(&self, ino: InodeNo, bytes_max: u32, out: &mut Vec<u8>) -> FileResult {
        if bytes_max > IO_BYTES_MAX {
            return Err(errno::INVAL);
        }
        let file_reference = self.file_reference(ino)?;
        match file_reference.kind() {
            FileType::RegularFile => {}
            FileType::Directory => return Err(errno::ISDIR),
            _ => return Err(errno::INVAL),
        }
        let fd = file_reference.open(OFlags::RDONLY)?;
        let size = fstat(&fd).map_err(errno::from_host)?.st_size;
        let length = u32::try_from(size).map_err(|_| errno::FBIG)?;
        if length > bytes_max {
            return Err(errno::FBIG);
        }
        let length = length as usize;
        out.reserve(length);
        let done = append_all(out, length, |out, done| {
            append_read(&fd, out, length - done, done as u64)
        });
        done.map(|done| FileReply::Read {
            length: done as u32,
        })
    }

    /// Has the disk read the small files of a batch together. The operations run one after the
    /// other, and would each wait for the disk. What fails here fails again when it is read.
    pub fn begin_reads(&self, ops: &[FileOp]) {
        let files = ops.iter().filter_map(|op| match op {
            FileOp::ReadFile { ino, bytes_max } => Some((*ino, *bytes_max)),
            _ => None,
        });
        let mut bytes = 0;
        // The first one is read at once.
        for (ino, bytes_max) in files.skip(1) {
            bytes += u64::from(bytes_max);
            // The reply has no room for more.
            if bytes > u64::from(BODY_BYTES_MAX) {
                return;
            }
            let Ok(file_reference) = self.file_reference(ino) else {
                continue;
            };
            if file_reference.kind() == FileType::RegularFile
                && let Ok(fd) = file_reference.open(OFlags::RDONLY)
            {
                let length = NonZeroU64::new(u64::from(bytes_max));
                let _ = fadvise(&fd, 0, length, Advice::WillNeed);
            }
        }
    }

    pub(crate) fn write(
        &self,
        handle: HandleId,
        offset: u64,
        range: BodyRange,
        append: bool,
        data: &[u8],
    ) -> FileResult {
        let (start, length) = (range.start as usize, range.length as usize);
        let data = start
            .checked_add(length)
            .and_then(|end| data.get(start..end));
        let data = data.ok_or(errno::INVAL)?;
        let file = self.open_file(handle)?;
        let Some((account, state)) = file.file_reference.account_entry() else {
            let length = write_all(file.fd.as_fd(), data, (!append).then_some(offset))?;
            return Ok(FileReply::Written { length });
        };
        let mut charged = state.lock();
        let offset = if append {
            let stat = fstat(&file.fd).map_err(errno::from_host)?;
            u64::try_from(stat.st_size).map_err(|_| errno::FBIG)?
        } else {
            offset
        };
        let mut grant = reserve_range(account, &file, offset, data.len() as u64)?;
        if grant.granted_bytes < data.len() as u64 && self.release_unlinked() {
            account.settle(&mut 0, 0, grant.reserved_bytes);
            grant = reserve_range(account, &file, offset, data.len() as u64)?;
        }
        let fits = &data[..usize::try_from(grant.granted_bytes).unwrap_or(data.len())];
        let done = write_all(file.fd.as_fd(), fits, Some(offset));
        settle_file(account, &file, &mut charged, grant.reserved_bytes);
        Ok(FileReply::Written { length: done? })
    }

    pub(crate) fn allocate(
        &self,
        handle: HandleId,
        mode: i32,
        offset: u64,
        length: u64,
    ) -> FileResult {
        let file = self.open_file(handle)?;
        let flags = FallocateFlags::from_bits_retain(mode.cast_unsigned());
        let call = || fallocate(&file.fd, flags, offset, length).map_err(errno::from_host);
        let Some((account, state)) = file.file_reference.account_entry() else {
            return call().map(|()| FileReply::Done);
        };
        let mut charged = state.lock();
        let takes_none = FallocateFlags::PUNCH_HOLE
            | FallocateFlags::COLLAPSE_RANGE
            | FallocateFlags::INSERT_RANGE;
        let mut reserved = 0;
        if !flags.intersects(takes_none) && length > 0 {
            let grant = reserve_range(account, &file, offset, length)?;
            reserved = grant.reserved_bytes;
            if grant.granted_bytes < length {
                account.settle(&mut 0, 0, reserved);
                return Err(errno::NOSPC);
            }
        }
        let done = call();
        settle_file(account, &file, &mut charged, reserved);
        done.map(|()| FileReply::Done)
    }

    pub(crate) fn seek(&self, handle: HandleId, offset: i64, whence: i32) -> FileResult {
        let file = self.open_file(handle)?;
        let offset = u64::try_from(offset).map_err(|_| errno::NXIO)?;
        let place = match whence {
            nix::libc::SEEK_DATA => SeekFrom::Data(offset),
            nix::libc::SEEK_HOLE => SeekFrom::Hole(offset),
            _ => return Err(errno::INVAL),
        };
        seek(&file.fd, place)
            .map(FileReply::Position)
            .map_err(errno::from_host)
    }

    pub(crate) fn copy_range(
        &self,
        (source, source_offset): (HandleId, u64),
        (target, target_offset): (HandleId, u64),
        length: u64,
    ) -> FileResult {
        let (source, target) = (self.open_file(source)?, self.open_file(target)?);
        let size = fstat(&source.fd).map_err(errno::from_host)?.st_size;
        let left = u64::try_from(size)
            .unwrap_or(0)
            .saturating_sub(source_offset);
        let length = length.min(left).min(COPY_BYTES_MAX);
        let copy = |length| copy((&source, source_offset), (&target, target_offset), length);
        let Some((account, state)) = target.file_reference.account_entry() else {
            return copy(length).map(|length| FileReply::Written { length });
        };
        let mut charged = state.lock();
        let grant = reserve_range(account, &target, target_offset, length)?;
        let done = copy(grant.granted_bytes);
        settle_file(account, &target, &mut charged, grant.reserved_bytes);
        done.map(|length| FileReply::Written { length })
    }

    pub(crate) fn sync(&self, handle: HandleId, data_only: bool) -> FileResult {
        let file = self.open_file(handle)?;
        let done = if data_only {
            fdatasync(&file.fd)
        } else {
            fsync(&file.fd)
        };
        // Writing out may have added blocks of the file's own index.
        let settled = file.file_reference.settle(&file.fd);
        done.map_err(errno::from_host)?;
        settled.map(|_| FileReply::Done)
    }
}

/// Appends `length` bytes, or all up to the end of the file; `more` appends what follows on so
/// many. Less than was asked for means that the file ends there, so what comes before an error does
/// not count: the kernel would cut the file for the job.
fn append_all(
    out: &mut Vec<u8>,
    length: usize,
    mut more: impl FnMut(&mut Vec<u8>, usize) -> rustix::io::Result<usize>,
) -> Outcome<usize> {
    let (start, mut done) = (out.len(), 0);
    while done < length {
        match more(out, done) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                out.truncate(start);
                return Err(errno::from_host(error));
            }
        }
    }
    Ok(done)
}

/// Appends at most `length` bytes of a file, for which there is room.
fn append_read(
    fd: impl AsFd,
    out: &mut Vec<u8>,
    length: usize,
    at: u64,
) -> rustix::io::Result<usize> {
    let start = out.len();
    if out.capacity() - start == length {
        return pread(fd, spare_capacity(out), at);
    }
    // All the room is more than was asked for, and a part of it must have been written before.
    out.resize(start + length, 0);
    let read = pread(fd, &mut out[start..], at);
    out.truncate(start + read.unwrap_or(0));
    read
}

/// Writes as much as the host takes; at the end of the file, whereever that is, without an offset.
fn write_all(fd: BorrowedFd<'_>, data: &[u8], offset: Option<u64>) -> Outcome<u64> {
    let mut done = 0;
    while done < data.len() {
        let rest = &data[done..];
        let wrote = match offset {
            Some(offset) => {
                let place = offset.checked_add(done as u64).ok_or(errno::FBIG)?;
                pwrite(fd, rest, place)
            }
            None => pwritev2(
                fd,
                &[std::io::IoSlice::new(rest)],
                0,
                ReadWriteFlags::APPEND,
            ),
        };
        match wrote {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) if done > 0 => break,
            Err(error) => return Err(errno::from_host(error)),
        }
    }
    Ok(done as u64)
}

/// Copies by the kernel, or by hand between file systems that do not know each other.
fn copy(
    (source, source_offset): (&OpenFile, u64),
    (target, target_offset): (&OpenFile, u64),
    length: u64,
) -> Outcome<u64> {
    use rustix::io::Errno as Host;
    let (mut from, mut to) = (source_offset, target_offset);
    let mut done = 0;
    while done < length {
        let rest = usize::try_from(length - done).unwrap_or(usize::MAX);
        match copy_file_range(&source.fd, Some(&mut from), &target.fd, Some(&mut to), rest) {
            Ok(0) => break,
            Ok(count) => done += count as u64,
            Err(Host::INTR) => {}
            Err(Host::XDEV | Host::OPNOTSUPP | Host::NOSYS) if done == 0 => {
                return copy_by_hand((source, source_offset), (target, target_offset), length);
            }
            Err(_) if done > 0 => break,
            Err(error) => return Err(errno::from_host(error)),
        }
    }
    Ok(done)
}

fn copy_by_hand(
    (source, source_offset): (&OpenFile, u64),
    (target, target_offset): (&OpenFile, u64),
    length: u64,
) -> Outcome<u64> {
    let mut buffer = Vec::with_capacity(IO_BYTES_MAX as usize);
    let mut done = 0;
    while done < length {
        buffer.clear();
        let place = source_offset + done;
        if pread(&source.fd, spare_capacity(&mut buffer), place).map_err(errno::from_host)? == 0 {
            break;
        }
        buffer.truncate(usize::try_from(length - done).unwrap_or(usize::MAX));
        let wrote = write_all(target.fd.as_fd(), &buffer, Some(target_offset + done))?;
        done += wrote;
        if wrote < buffer.len() as u64 {
            break;
        }
    }
    Ok(done)
}

/// Charges a file what it has now, in place of what was reserved.
fn settle_file(account: &Account, file: &OpenFile, charged: &mut u64, reserved: u64) {
    let now = fstat(&file.fd).map_or(*charged, |stat| {
        file.file_reference.tree().charge_bytes(&stat)
    });
    account.settle(charged, now, reserved);
}

/// Reserves space for bytes that are to be written: for all of them as if none had space yet,
/// or, when that does not fit, exactly for those that have none, as far as it goes.
fn reserve_range(
    account: &Account,
    file: &OpenFile,
    offset: u64,
    length: u64,
) -> Outcome<RangeReservation> {
    let block_bytes = file.file_reference.tree().block_bytes();
    let end = offset
        .checked_add(length)
        .filter(|end| i64::try_from(*end).is_ok());
    let end = end.ok_or(errno::FBIG)?;
    if length == 0 {
        return Ok(RangeReservation {
            granted_bytes: 0,
            reserved_bytes: 0,
        });
    }
    let start = offset - offset % block_bytes;
    let blocks = start..end.next_multiple_of(block_bytes);
    let worst = blocks.end - blocks.start;
    if account.try_reserve_worst_case(worst) {
        return Ok(RangeReservation {
            granted_bytes: length,
            reserved_bytes: worst,
        });
    }
    let present = allocated_in(file, &blocks, block_bytes);
    account.reserve_exactly(|free, may_settle| {
        let (fits_to, needed) = writable_prefix(&blocks, &present, free, block_bytes);
        if fits_to < blocks.end && may_settle {
            return SpaceDecision::Wait;
        }
        if fits_to <= offset {
            return SpaceDecision::Refuse;
        }
        SpaceDecision::Reserve(
            needed,
            RangeReservation {
                granted_bytes: fits_to.min(end) - offset,
                reserved_bytes: needed,
            },
        )
    })
}

/// The parts of `blocks` that have space in the file, in order; fewer where nobody knows.
fn allocated_in(file: &OpenFile, blocks: &Range<u64>, block_bytes: u64) -> Vec<Range<u64>> {
    match kernel::allocated_ranges(&file.fd, blocks.clone()) {
        Some(present) => present,
        None if file.file_reference.tree().is_tmpfs() => data_in(file, blocks, block_bytes),
        None => Vec::new(),
    }
}

/// The same by the holes of a file, where these are exact.
fn data_in(file: &OpenFile, blocks: &Range<u64>, block_bytes: u64) -> Vec<Range<u64>> {
    let mut present = Vec::new();
    let mut at = blocks.start;
    while at < blocks.end {
        let Ok(data) = seek(&file.fd, SeekFrom::Data(at)) else {
            break;
        };
        let Ok(hole) = seek(&file.fd, SeekFrom::Hole(data)) else {
            break;
        };
        // A file ends within a block that it has.
        let start = data.next_multiple_of(block_bytes);
        let end = hole.next_multiple_of(block_bytes).min(blocks.end);
        if start >= end {
            break;
        }
        present.push(start..end);
        at = end;
    }
    present
}

/// How far whole blocks from the start of `blocks` can be written when parts of them are `present`
/// and only `free` bytes can be added: the end, and the bytes that this adds.
fn writable_prefix(
    blocks: &Range<u64>,
    present: &[Range<u64>],
    free: u64,
    block_bytes: u64,
) -> (u64, u64) {
    let free = free - free % block_bytes;
    let (mut at, mut needed) = (blocks.start, 0);
    let ends = blocks.end..blocks.end;
    for part in present.iter().chain([&ends]) {
        let hole = part.start.saturating_sub(at);
        if needed + hole > free {
            return (at + (free - needed), free);
        }
        needed += hole;
        at = at.max(part.end);
    }
    (at, needed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_reserves_only_absent_blocks() {
        let blocks = 0..40;
        let prefix = |start, end, free| {
            writable_prefix(&blocks, std::slice::from_ref(&(start..end)), free, 10)
        };
        assert_eq!(prefix(40, 40, 20), (20, 20));
        assert_eq!(prefix(40, 40, 100), (40, 40));
        assert_eq!(prefix(0, 40, 0), (40, 0));
        assert_eq!(prefix(10, 20, 10), (20, 10));
        assert_eq!(prefix(10, 20, 29), (30, 20));
        assert_eq!(prefix(0, 10, 9), (10, 0));
        assert_eq!(prefix(10, 30, 9), (0, 0));
    }

    #[test]
    fn a_read_error_discards_the_partial_data() {
        use rustix::io::Errno as Host;
        let read = |told: &[rustix::io::Result<usize>]| {
            let (mut out, mut told) = (b"before".to_vec(), told.iter());
            let done = append_all(&mut out, 8, |out, done| {
                let more = *told.next().unwrap_or(&Ok(0));
                out.resize("before".len() + done + more.unwrap_or(0), b'x');
                more
            });
            (done, out)
        };
        let (done, out) = read(&[Ok(2), Err(Host::INTR), Ok(1)]);
        assert_eq!((done, &*out), (Ok(3), &b"beforexxx"[..]));
        let (done, out) = read(&[Ok(2), Err(Host::IO)]);
        assert_eq!(
            (done, &*out),
            (Err(errno::from_host(Host::IO)), &b"before"[..])
        );
    }
}
