//! Which operations on this machine wait for its disk, so that a thread of their own must: the few
//! that serve a volume have more to do. Runs nothing.

use std::collections::BTreeSet;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use bafs_proto::file_op::{FileOp, FileReply, FileResult};
use bafs_proto::ids::HandleId;
use nix::libc;

/// The handles whose writes are on the disk when they return.
#[derive(Debug, Default)]
pub(super) struct BlockingOperations(RwLock<BTreeSet<HandleId>>);

impl BlockingOperations {
    /// Whether an operation waits for the disk.
    pub(super) fn is_blocking(&self, op: &FileOp) -> bool {
        match op {
            FileOp::Fsync { .. } | FileOp::FsyncDirectory { .. } | FileOp::CopyRange { .. } => true,
            FileOp::Write { handle, .. } => self.read().contains(handle),
            _ => false,
        }
    }

    /// Whether [`Self::record_result`] has something to take note of: of most operations nothing.
    pub(super) fn is_tracked(&self, op: &FileOp) -> bool {
        match op {
            FileOp::Open { flags, .. } | FileOp::Create { flags, .. } => {
                flags & (libc::O_SYNC | libc::O_DSYNC) != 0
            }
            FileOp::Release { handle } => self.read().contains(handle),
            _ => false,
        }
    }

    /// An operation of which something is noted has run.
    pub(super) fn record_result(&self, op: &FileOp, result: &FileResult) {
        match (op, result) {
            (_, Ok(FileReply::Opened { handle, .. })) => {
                self.write().insert(*handle);
            }
            (FileOp::Release { handle }, _) => {
                self.write().remove(handle);
            }
            _ => {}
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeSet<HandleId>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeSet<HandleId>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::file_op::{Attr, BodyRange, FileTime};
    use bafs_proto::ids::InodeNo;

    use super::*;

    fn opened(number: u64) -> FileResult {
        let ino = InodeNo(7);
        Ok(FileReply::Opened {
            handle: HandleId(number),
            attr: Attr {
                ino,
                size: 0,
                blocks: 0,
                atime: FileTime::default(),
                mtime: FileTime::default(),
                ctime: FileTime::default(),
                mode: 0o100_644,
                nlink: 1,
                uid: 0,
                gid: 0,
                rdev: 0,
                block_size: 4096,
                btime_ns: 0,
            },
        })
    }

    #[test]
    fn only_synchronous_writes_wait_for_the_disk() {
        let waits = BlockingOperations::default();
        let write = |number| FileOp::Write {
            handle: HandleId(number),
            offset: 0,
            data: BodyRange {
                start: 0,
                length: 1,
            },
            append: false,
        };
        for (number, flags) in [(1, 0), (2, libc::O_DSYNC), (3, libc::O_SYNC)] {
            let flags = libc::O_WRONLY | flags;
            let open = FileOp::Open {
                ino: InodeNo(7),
                flags,
            };
            if waits.is_tracked(&open) {
                waits.record_result(&open, &opened(number));
            }
        }
        assert_eq!(
            [1, 2, 3].map(|n| waits.is_blocking(&write(n))),
            [false, true, true]
        );
        let handle = HandleId(2);
        assert!(waits.is_blocking(&FileOp::Fsync {
            handle,
            data_only: true
        }));
        assert!(waits.is_tracked(&FileOp::Release { handle }));
        waits.record_result(&FileOp::Release { handle }, &Ok(FileReply::Done));
        let handle = HandleId(1);
        assert!(!waits.is_tracked(&FileOp::Release { handle }));
        assert_eq!(
            [1, 2, 3].map(|n| waits.is_blocking(&write(n))),
            [false, false, true]
        );
    }
}
