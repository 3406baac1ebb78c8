//! Each request of the kernel that is more than one operation, whichever way it came and the
//! answer goes. What is one operation and no more, is in `operations.rs`.

use std::sync::Arc;

use bafs_proto::file_op::{AttrChange, BodyRange, Caller, FileOp};
use bafs_proto::ids::InodeNo;
use fuser::{Errno, FileHandle, INodeNo, OpenFlags, WriteFlags};
use nix::libc;

use super::answers::{
    AnswerAttr, AnswerCreate, AnswerData, AnswerEmpty, AnswerEntries, AnswerEntriesPlus,
    AnswerOpen, AnswerPosition, AnswerStat, AnswerWrite, AnswerXattr,
};
use super::bridge::Bridge;
use super::convert::{self, name};
use super::{operations, replies};
use crate::limits::COPY_BYTES_MAX;

/// Where in which open file something begins.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spot {
    pub(super) ino: INodeNo,
    pub(super) handle: FileHandle,
    pub(super) offset: u64,
}

impl Bridge {
    pub(super) fn get_attr(
        &self,
        caller: Caller,
        ino: INodeNo,
        handle: Option<FileHandle>,
        reply: impl AnswerAttr,
    ) {
        let op = FileOp::GetAttr {
            ino: InodeNo(ino.0),
            handle: self.open_handle(ino, handle),
        };
        let finish = replies::attr(self.volume.mode(), reply);
        self.volume.run(caller, op, &[], finish);
    }

    pub(super) fn set_attr(
        &self,
        caller: Caller,
        ino: INodeNo,
        handle: Option<FileHandle>,
        change: AttrChange,
        reply: impl AnswerAttr,
    ) {
        let change = AttrChange {
            mode: change.mode.map(|mode| mode & 0o7777),
            ..change
        };
        let op = FileOp::SetAttr {
            ino: InodeNo(ino.0),
            handle: self.open_handle(ino, handle),
            change,
        };
        let finish = replies::attr(self.volume.mode(), reply);
        self.volume.run(caller, op, &[], finish);
    }

    pub(super) fn read_link(&self, caller: Caller, ino: INodeNo, reply: impl AnswerData) {
        let op = operations::read_link(ino);
        self.volume.run(caller, op, &[], replies::bytes(reply));
    }

    pub(super) fn open_file(
        &self,
        caller: Caller,
        ino: INodeNo,
        flags: OpenFlags,
        reply: impl AnswerOpen,
    ) {
        if self.agreed().no_open {
            // Not a failure: it tells the kernel never to ask again, for any file.
            return reply.refuse(Errno::ENOSYS);
        }
        let writes_only = flags.0 & libc::O_ACCMODE == libc::O_WRONLY;
        let finish = replies::opened(self.flags_of_open(writes_only), reply);
        let finish = self.opening(finish);
        self.volume
            .run(caller, operations::open_file(ino, flags), &[], finish);
    }

    pub(super) fn create_file(
        &self,
        caller: Caller,
        (parent, at): (INodeNo, &std::ffi::OsStr),
        mode: u32,
        flags: i32,
        reply: impl AnswerCreate,
    ) {
        let op = FileOp::Create {
            parent: InodeNo(parent.0),
            name: name(at),
            mode,
            flags: convert::create_flags(flags),
        };
        let finish = replies::created(self.volume.mode(), self.file_flags(), reply);
        self.volume.run(caller, op, &[], self.opening(finish));
    }

    pub(super) fn read_file(
        &self,
        caller: Caller,
        at: Spot,
        (size, flags): (u32, OpenFlags),
        reply: impl AnswerData,
    ) {
        // A direct read is no guess, and would fail.
        let by_pages = flags.0 & libc::O_DIRECT == 0;
        if by_pages && self.volume.is_guess(InodeNo(at.ino.0), at.offset, size) {
            return reply.refuse(Errno::EIO);
        }
        let (ino, handle) = (InodeNo(at.ino.0), self.handle(at.ino, at.handle));
        let finish = replies::data(reply);
        self.volume
            .read(caller, ino, handle, at.offset, size, finish);
    }

    pub(super) fn write_file(
        &self,
        caller: Caller,
        at: Spot,
        data: &[u8],
        (write_flags, flags): (WriteFlags, OpenFlags),
        reply: impl AnswerWrite,
    ) {
        // Pages that the kernel kept, mapped or collected, have their own place, whatever handle
        // they come through.
        let is_of_pages = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let op = FileOp::Write {
            handle: self.handle(at.ino, at.handle),
            offset: at.offset,
            // The kernel sends at most what `init` allowed.
            data: BodyRange {
                start: 0,
                length: data.len() as u32,
            },
            // Where all changes come through this kernel it knows where the end is, and it may send
            // the pieces of a large write all at once.
            append: flags.0 & libc::O_APPEND != 0 && !is_of_pages && !self.volume.mode().cached,
        };
        let kills = write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        let mut finish = replies::written(reply);
        if is_of_pages {
            finish = self.volume.deferred(data.len(), finish);
        }
        if let Some(collected) = &self.agreed().collected {
            finish = collected.moving(false, finish);
        }
        self.change(caller, (at.ino, op), data, kills, finish);
    }

    pub(super) fn close_file(&self, ino: INodeNo, reply: impl AnswerEmpty) {
        if self.volume.close_waits() {
            let finish = replies::empty(reply);
            return self.volume.close_file(InodeNo(ino.0), finish);
        }
        // The kernel still writes mapped pages back before it closes; it only stops asking.
        reply.refuse(Errno::ENOSYS);
    }

    pub(super) fn release_file(
        &self,
        caller: Caller,
        ino: INodeNo,
        handle: FileHandle,
        reply: impl AnswerEmpty,
    ) {
        if let Some(whole_files) = &self.agreed().whole_files {
            whole_files.release(&self.volume, InodeNo(ino.0));
        }
        if self.volume.mode().stateless {
            return reply.done();
        }
        let handle = self.handle(ino, handle);
        let mut finish = replies::empty(reply);
        if let Some(collected) = &self.agreed().collected {
            finish = collected.moving(true, finish);
        }
        self.volume
            .run(caller, FileOp::Release { handle }, &[], finish);
    }

    pub(super) fn sync_file(
        &self,
        caller: Caller,
        (ino, handle): (INodeNo, FileHandle),
        data_only: bool,
        reply: impl AnswerEmpty,
    ) {
        let handle = self.handle(ino, handle);
        self.empty(caller, FileOp::Fsync { handle, data_only }, reply);
    }

    pub(super) fn open_directory(&self, caller: Caller, ino: INodeNo, reply: impl AnswerOpen) {
        if self.agreed().no_opendir {
            // As with files.
            return reply.refuse(Errno::ENOSYS);
        }
        let op = operations::open_directory(ino);
        let flags = self.directory_flags();
        let finish = replies::opened(move |_| flags, reply);
        self.volume.run(caller, op, &[], finish);
    }

    /// Lists from the cookie that `at` has as offset.
    pub(super) fn list(&self, caller: Caller, at: Spot, reply: impl AnswerEntries) {
        let op = replies::read_directory(self.handle(at.ino, at.handle), at.offset, false);
        self.volume.run(caller, op, &[], replies::entries(reply));
    }

    /// As [`Self::list`], with attributes.
    pub(super) fn list_plus(&self, caller: Caller, at: Spot, reply: impl AnswerEntriesPlus) {
        let (volume, handle) = (Arc::clone(&self.volume), self.handle(at.ino, at.handle));
        let directory = InodeNo(at.ino.0);
        replies::entries_plus(volume, caller, (directory, handle), at.offset, reply);
    }

    pub(super) fn release_directory(
        &self,
        caller: Caller,
        (ino, handle): (INodeNo, FileHandle),
        reply: impl AnswerEmpty,
    ) {
        let handle = self.handle(ino, handle);
        self.empty(caller, FileOp::ReleaseDirectory { handle }, reply);
    }

    pub(super) fn stat(&self, caller: Caller, reply: impl AnswerStat) {
        let finish = replies::stat_fs(reply);
        self.volume.run(caller, FileOp::StatFs, &[], finish);
    }

    /// Reads an extended attribute, or the list of them, into so many bytes; none: its length.
    pub(super) fn xattr(&self, caller: Caller, op: FileOp, size: u32, reply: impl AnswerXattr) {
        let finish = replies::xattr(size, reply);
        self.volume.run(caller, op, &[], finish);
    }

    pub(super) fn allocate(
        &self,
        caller: Caller,
        at: Spot,
        length: u64,
        mode: i32,
        reply: impl AnswerEmpty,
    ) {
        let op = FileOp::Allocate {
            handle: self.handle(at.ino, at.handle),
            mode,
            offset: at.offset,
            length,
        };
        self.change(caller, (at.ino, op), &[], true, replies::empty(reply));
    }

    pub(super) fn seek(
        &self,
        caller: Caller,
        (ino, handle): (INodeNo, FileHandle),
        offset: i64,
        whence: i32,
        reply: impl AnswerPosition,
    ) {
        if self.agreed().collected.is_some() || self.volume.mode().stateless {
            // The tree does not have yet what the kernel has collected, or knows of no holes: the
            // kernel, which then takes all up to the end for data, is never wrong.
            return reply.refuse(Errno::ENOSYS);
        }
        let op = FileOp::Seek {
            handle: self.handle(ino, handle),
            offset,
            whence,
        };
        self.volume.run(caller, op, &[], replies::position(reply));
    }

    pub(super) fn copy(
        &self,
        caller: Caller,
        source: Spot,
        target: Spot,
        length: u64,
        reply: impl AnswerWrite,
    ) {
        let op = FileOp::CopyRange {
            source: self.handle(source.ino, source.handle),
            source_offset: source.offset,
            target: self.handle(target.ino, target.handle),
            target_offset: target.offset,
            length: length.min(COPY_BYTES_MAX),
        };
        let finish = replies::written(reply);
        self.change(caller, (target.ino, op), &[], true, finish);
    }
}
