//! Attributes, times and errors of a mirror, between this machine and the kernel. It keeps nothing.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use fuser::{Errno, FileAttr, FileType, INodeNo, TimeOrNow};
use rustix::fs::{OFlags, Timespec};

pub(super) fn to_errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_i32)
}

pub(super) fn stale() -> io::Error {
    rustix::io::Errno::STALE.into()
}

pub(super) fn file_attributes(ino: INodeNo, found: &Metadata) -> FileAttr {
    let time = |seconds: i64, nanoseconds: i64| {
        UNIX_EPOCH + Duration::new(seconds.max(0) as u64, nanoseconds as u32)
    };
    let kind = found.file_type();
    FileAttr {
        ino,
        size: found.len(),
        blocks: found.blocks(),
        atime: time(found.atime(), found.atime_nsec()),
        mtime: time(found.mtime(), found.mtime_nsec()),
        ctime: time(found.ctime(), found.ctime_nsec()),
        crtime: UNIX_EPOCH,
        kind: to_file_type(kind),
        perm: (found.mode() & 0o7777) as u16,
        nlink: found.nlink() as u32,
        uid: found.uid(),
        gid: found.gid(),
        rdev: found.rdev() as u32,
        blksize: 4096,
        flags: 0,
    }
}

pub(super) fn to_file_type(kind: fs::FileType) -> FileType {
    if kind.is_dir() {
        FileType::Directory
    } else if kind.is_symlink() {
        FileType::Symlink
    } else if kind.is_fifo() {
        FileType::NamedPipe
    } else if kind.is_socket() {
        FileType::Socket
    } else if kind.is_block_device() {
        FileType::BlockDevice
    } else if kind.is_char_device() {
        FileType::CharDevice
    } else {
        FileType::RegularFile
    }
}

pub(super) fn to_timespec(time: Option<TimeOrNow>) -> Timespec {
    let (seconds, nanoseconds) = match time {
        None => (0, rustix::fs::UTIME_OMIT),
        Some(TimeOrNow::Now) => (0, rustix::fs::UTIME_NOW),
        Some(TimeOrNow::SpecificTime(time)) => {
            let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
            (since.as_secs() as i64, i64::from(since.subsec_nanos()))
        }
    };
    Timespec {
        tv_sec: seconds,
        tv_nsec: nanoseconds,
    }
}

/// Opens for reading, too: the kernel reads what surrounds a change of a mapping. A file that may
/// be written but not read is opened for writing alone.
pub(super) fn open_path(path: &Path, access: OFlags) -> io::Result<File> {
    let is_written = access != OFlags::RDONLY;
    let opened = OpenOptions::new().read(true).write(is_written).open(path);
    match access == OFlags::WRONLY {
        true => opened.or_else(|_| OpenOptions::new().write(true).open(path)),
        false => opened,
    }
}
