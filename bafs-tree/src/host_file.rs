//! Files as the host shows them: what identifies one, what kind it is, how its attributes travel,
//! and how it is opened as a path. Knows no tree.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use bafs_proto::file_op::{Attr, FileTime};
use bafs_proto::ids::InodeNo;
use rustix::fs::{FileType, Mode, OFlags, Stat, openat};

use crate::account::HostFileId;
use crate::errno::{self, Outcome};

pub(crate) fn host_file_id(stat: &Stat) -> HostFileId {
    (stat.st_dev, stat.st_ino)
}

pub(crate) fn file_type(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// Attributes as they travel.
pub(crate) fn to_attr(ino: InodeNo, stat: &Stat) -> Attr {
    let time = |seconds: i64, nanoseconds| FileTime {
        seconds,
        nanoseconds: u32::try_from(nanoseconds).unwrap_or(0),
    };
    Attr {
        ino,
        size: u64::try_from(stat.st_size).unwrap_or(0),
        blocks: u64::try_from(stat.st_blocks).unwrap_or(0),
        atime: time(stat.st_atime, stat.st_atime_nsec),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
        ctime: time(stat.st_ctime, stat.st_ctime_nsec),
        mode: stat.st_mode,
        nlink: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
        uid: stat.st_uid,
        gid: stat.st_gid,
        rdev: u32::try_from(stat.st_rdev).unwrap_or(0),
        block_size: u32::try_from(stat.st_blksize).unwrap_or(4096),
        btime_ns: 0,
    }
}

/// Opens a name as a path only.
pub(crate) fn open_path(parent: impl AsFd, name: &CStr) -> Outcome<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(parent, name, flags, Mode::empty()).map_err(errno::from_host)
}

/// A path that leads to what a descriptor shows.
pub(crate) fn proc_path(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}
