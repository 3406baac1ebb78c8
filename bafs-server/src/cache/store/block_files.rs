//! Calls on the files that hold blocks: open them safely, give back space, see who locks them.
//! Knows no table.

use std::fs::{File, OpenOptions};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, FlockOperation, OFlags, fallocate, flock};
use rustix::io::Errno;

/// Size of a file, and the times of its last changes of bytes and of anything, in seconds and
/// nanoseconds.
pub(super) type FileStamp = (u64, [i64; 4]);

/// Opens a file of blocks. A link at its place is not ours and is removed, so nothing is read or
/// written through it.
pub(super) fn open_blocks(options: &mut OpenOptions, path: &Path) -> std::io::Result<File> {
    // A pipe at its place must not block either.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    options.custom_flags(flags.bits().cast_signed());
    match options.open(path) {
        Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
            std::fs::remove_file(path)?;
            options.open(path)
        }
        opened => opened,
    }
}

pub(super) fn punch_hole(file: &File, start: u64, length: u64) -> std::io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    loop {
        match fallocate(file, flags, start, length) {
            Err(Errno::INTR) => {}
            done => return Ok(done?),
        }
    }
}

/// Whether a failed read says that the block is damaged. Other errors concern this process or its
/// system.
pub(super) fn is_damage(error: &std::io::Error) -> bool {
    let is_medium = error.raw_os_error() == Some(Errno::IO.raw_os_error());
    is_medium || error.kind() == std::io::ErrorKind::UnexpectedEof
}

pub(super) fn file_stamp(file: &File) -> std::io::Result<FileStamp> {
    let metadata = file.metadata()?;
    let times = [
        metadata.mtime(),
        metadata.mtime_nsec(),
        metadata.ctime(),
        metadata.ctime_nsec(),
    ];
    Ok((metadata.len(), times))
}

/// Whether nobody else has a lock on an open file. It leaves no lock behind. On a file system
/// without locks no agent got a file.
pub(super) fn is_unlocked(file: BorrowedFd<'_>) -> bool {
    let locked = flock(file, FlockOperation::NonBlockingLockExclusive);
    let _ = flock(file, FlockOperation::Unlock);
    locked != Err(Errno::WOULDBLOCK)
}
