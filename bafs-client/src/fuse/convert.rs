//! Kernel forms to protocol forms and back. Decides nothing, answers nobody.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bafs_proto::file_op::{Attr, ByName, Caller, Errno, FileTime, SetTime};
use fuser::{FileAttr, FileType, INodeNo, Request, TimeOrNow};
use nix::libc;

pub(super) fn caller_of(request: &Request) -> Caller {
    Caller {
        uid: request.uid(),
        gid: request.gid(),
        pid: request.pid(),
    }
}

pub(super) fn to_name(name: &OsStr) -> ByName {
    name.as_bytes().to_vec()
}

pub(super) fn to_errno(errno: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(errno.0)
}

pub(super) fn to_file_attr(attr: &Attr) -> FileAttr {
    FileAttr {
        ino: INodeNo(attr.ino.0),
        size: attr.size,
        blocks: attr.blocks,
        atime: to_system_time(attr.atime),
        mtime: to_system_time(attr.mtime),
        ctime: to_system_time(attr.ctime),
        crtime: UNIX_EPOCH,
        kind: file_type(attr.mode),
        perm: (attr.mode & 0o7777) as u16,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: attr.block_size,
        flags: 0,
    }
}

/// Number 0 tells the kernel that a name is not there and that it may believe so.
pub(super) fn absent_attr() -> FileAttr {
    FileAttr {
        ino: INodeNo(0),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: FileType::RegularFile,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 0,
        flags: 0,
    }
}

/// Attributes of which the kernel takes only number and type: those of `.` and `..` in a listing.
pub(super) fn type_only_attr(ino: INodeNo, mode: u32) -> FileAttr {
    FileAttr {
        ino,
        kind: file_type(mode),
        ..absent_attr()
    }
}

pub(super) fn file_type(mode: u32) -> FileType {
    match mode & libc::S_IFMT {
        libc::S_IFDIR => FileType::Directory,
        libc::S_IFLNK => FileType::Symlink,
        libc::S_IFIFO => FileType::NamedPipe,
        libc::S_IFSOCK => FileType::Socket,
        libc::S_IFCHR => FileType::CharDevice,
        libc::S_IFBLK => FileType::BlockDevice,
        _ => FileType::RegularFile,
    }
}

fn to_system_time(time: FileTime) -> SystemTime {
    let nanoseconds = Duration::from_nanos(u64::from(time.nanoseconds));
    let seconds = Duration::from_secs(time.seconds.unsigned_abs());
    let whole = if time.seconds < 0 {
        UNIX_EPOCH.checked_sub(seconds)
    } else {
        UNIX_EPOCH.checked_add(seconds)
    };
    whole
        .and_then(|whole| whole.checked_add(nanoseconds))
        .unwrap_or(UNIX_EPOCH)
}

pub(super) fn to_set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(time) => SetTime::At(to_file_time(time)),
    }
}

fn to_file_time(time: SystemTime) -> FileTime {
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => FileTime {
            seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
            nanoseconds: since.subsec_nanos(),
        },
        Err(before) => {
            // fuser 0.18 counts the nanoseconds of such a time backwards (its `time.rs` says
            // TODO): what arrives here is the sum of both parts' sizes, so they are taken apart.
            let sizes = before.duration();
            FileTime {
                seconds: -i64::try_from(sizes.as_secs()).unwrap_or(i64::MAX),
                nanoseconds: sizes.subsec_nanos(),
            }
        }
    }
}

/// The part of the flags of `open(2)` that concerns the tree.
///
/// Appending is said with each write instead: the kernel also writes mapped pages through any
/// handle, and at their own place. Direct I/O has no meaning beyond this kernel.
pub(super) fn open_flags(flags: i32) -> i32 {
    let about_access = libc::O_ACCMODE | libc::O_TRUNC | libc::O_NOATIME;
    flags & (about_access | libc::O_SYNC | libc::O_DSYNC)
}

/// As [`open_flags`], for a file that is made at the same time.
pub(super) fn create_flags(flags: i32) -> i32 {
    open_flags(flags) | flags & libc::O_EXCL
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_the_epoch_are_converted() {
        // For times to set see the mount test `attributes_are_kept`.
        let told = to_system_time(FileTime {
            seconds: -2,
            nanoseconds: 500_000_000,
        });
        assert_eq!(told, UNIX_EPOCH - Duration::from_millis(1_500));
        let far = FileTime {
            seconds: i64::MIN,
            nanoseconds: 999_999_999,
        };
        assert!(to_system_time(far) <= UNIX_EPOCH);
    }

    #[test]
    fn local_open_flags_are_not_sent() {
        let flags = libc::O_RDWR | libc::O_APPEND | libc::O_DIRECT | libc::O_CREAT | libc::O_EXCL;
        assert_eq!(open_flags(flags), libc::O_RDWR);
        let made = libc::O_RDWR | libc::O_TRUNC | libc::O_EXCL;
        assert_eq!(create_flags(flags | libc::O_TRUNC), made);
    }
}
