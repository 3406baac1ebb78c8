//! What kind of operation one is: whether it opens or changes something, and so which errors it may
//! report. Runs nothing.

use bafs_proto::file_op::{Errno, FileOp};
use rustix::fs::OFlags;

use crate::errno;

/// Whether an operation leaves something open.
pub(crate) fn is_open_op(op: &FileOp) -> bool {
    matches!(
        op,
        FileOp::Open { .. } | FileOp::Create { .. } | FileOp::OpenDirectory { .. }
    )
}

/// What a caller is told of a failure. A disk that became read-only may refuse a read with `EROFS`
/// too; but to a program that says that it tried to write, which it did not.
pub(crate) fn caller_errno(op: &FileOp, error: Errno) -> Errno {
    match error {
        errno::ROFS if !is_change_op(op) => errno::IO,
        error => error,
    }
}

/// Whether an operation changes the tree, so that it needs a writable session.
pub(crate) fn is_change_op(op: &FileOp) -> bool {
    match op {
        FileOp::Open { flags, .. } => {
            let flags = OFlags::from_bits_retain(flags.cast_unsigned());
            flags.intersects(OFlags::WRONLY | OFlags::RDWR | OFlags::TRUNC)
        }
        FileOp::Lookup { .. }
        | FileOp::Forget { .. }
        | FileOp::GetAttr { .. }
        | FileOp::ReadLink { .. }
        | FileOp::Read { .. }
        | FileOp::ReadFile { .. }
        | FileOp::ListDirectory { .. }
        | FileOp::Fsync { .. }
        | FileOp::Release { .. }
        | FileOp::OpenDirectory { .. }
        | FileOp::ReadDirectory { .. }
        | FileOp::ReleaseDirectory { .. }
        | FileOp::FsyncDirectory { .. }
        | FileOp::StatFs
        | FileOp::GetXattr { .. }
        | FileOp::ListXattr { .. }
        | FileOp::Seek { .. } => false,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::{HandleId, InodeNo};

    use super::*;

    #[test]
    fn a_failed_read_never_reports_erofs() {
        let read = FileOp::Read {
            handle: HandleId(1),
            offset: 0,
            length: 1,
        };
        let open = |flags: OFlags| FileOp::Open {
            ino: InodeNo::ROOT,
            flags: flags.bits().cast_signed(),
        };
        assert_eq!(caller_errno(&read, errno::ROFS), errno::IO);
        assert_eq!(caller_errno(&open(OFlags::RDONLY), errno::ROFS), errno::IO);
        assert_eq!(caller_errno(&open(OFlags::RDWR), errno::ROFS), errno::ROFS);
        assert_eq!(caller_errno(&read, errno::NOENT), errno::NOENT);
    }
}
