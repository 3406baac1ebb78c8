//! Each request of the kernel that is more than one operation, whichever way it came and the
//! answer goes. What is one operation and no more, is in `operations.rs`.

use std::sync::Arc;

use bafs_proto::file_op::{AttrChange, BodyRange, Caller, FileOp};
use bafs_proto::ids::InodeNo;
use fuser::{Errno, FileHandle, INodeNo, OpenFlags, WriteFlags};
use nix::libc;

use super::convert::{self, to_name};
use super::file_system::VolumeFileSystem;
use super::reply_traits::{
    AttrReply, CreateReply, DataReply, DirectoryPlusReply, DirectoryReply, EmptyReply, OpenReply,
    SeekReply, StatReply, WriteReply, XattrReply,
};
use super::{completions, operations};
use crate::limits::COPY_BYTES_MAX;
use crate::volume::KernelCache;

/// Where in which open file something begins.
#[derive(Debug, Clone, Copy)]
pub(super) struct FilePosition {
    pub(super) ino: INodeNo,
    pub(super) handle: FileHandle,
    pub(super) offset: u64,
}

impl VolumeFileSystem {
    pub(super) fn get_attr(
        &self,
        caller: Caller,
        ino: INodeNo,
        handle: Option<FileHandle>,
        reply: impl AttrReply,
    ) {
        let op = FileOp::GetAttr {
            ino: InodeNo(ino.0),
            handle: self.open_handle(ino, handle),
        };
        let finish = completions::attr_completion(self.volume.mode().kernel_cache, reply);
        self.volume.run(caller, op, &[], finish);
    }

    pub(super) fn set_attr(
        &self,
        caller: Caller,
        ino: INodeNo,
        handle: Option<FileHandle>,
        change: AttrChange,
        reply: impl AttrReply,
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
        let finish = completions::attr_completion(self.volume.mode().kernel_cache, reply);
        self.volume.run(caller, op, &[], finish);
    }

    pub(super) fn read_link(&self, caller: Caller, ino: INodeNo, reply: impl DataReply) {
        let op = operations::read_link(ino);
        self.volume
            .run(caller, op, &[], completions::length_completion(reply));
    }

    pub(super) fn open_file(
        &self,
        caller: Caller,
        ino: INodeNo,
        flags: OpenFlags,
        reply: impl OpenReply,
    ) {
        if self.features().no_open {
            // Not a failure: it tells the kernel never to ask again, for any file.
            return reply.send_error(Errno::ENOSYS);
        }
        let writes_only = flags.0 & libc::O_ACCMODE == libc::O_WRONLY;
        let finish = completions::open_completion(self.open_flags(writes_only), reply);
        let finish = self.track_open(finish);
        self.volume
            .run(caller, operations::open_file(ino, flags), &[], finish);
    }

    pub(super) fn create_file(
        &self,
        caller: Caller,
        (parent, at): (INodeNo, &std::ffi::OsStr),
        mode: u32,
        flags: i32,
        reply: impl CreateReply,
    ) {
        let op = FileOp::Create {
            parent: InodeNo(parent.0),
            name: to_name(at),
            mode,
            flags: convert::create_flags(flags),
        };
        let finish = completions::create_completion(
            self.volume.mode().kernel_cache,
            self.file_flags(),
            reply,
        );
        self.volume.run(caller, op, &[], self.track_open(finish));
    }

    pub(super) fn read_file(
        &self,
        caller: Caller,
        at: FilePosition,
        (size, flags): (u32, OpenFlags),
        reply: impl DataReply,
    ) {
        // A direct read is no guess, and would fail.
        let by_pages = flags.0 & libc::O_DIRECT == 0;
        if by_pages
            && self
                .volume
                .is_speculative_read(InodeNo(at.ino.0), at.offset, size)
        {
            return reply.send_error(Errno::EIO);
        }
        let (ino, handle) = (InodeNo(at.ino.0), self.handle(at.ino, at.handle));
        let finish = completions::data_completion(reply);
        self.volume
            .read(caller, ino, handle, at.offset, size, finish);
    }

    pub(super) fn write_file(
        &self,
        caller: Caller,
        at: FilePosition,
        data: &[u8],
        (write_flags, flags): (WriteFlags, OpenFlags),
        reply: impl WriteReply,
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
            append: flags.0 & libc::O_APPEND != 0
                && !is_of_pages
                && !self.volume.mode().kernel_cache.is_caching(),
        };
        let kills = write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        let mut finish = completions::write_completion(reply);
        if is_of_pages {
            finish = self.volume.track_background_write(data.len(), finish);
        }
        if let Some(collected) = &self.features().write_back {
            finish = collected.track_transfer(false, finish);
        }
        self.run_content_change(caller, (at.ino, op), data, kills, finish);
    }

    pub(super) fn close_file(&self, ino: INodeNo, reply: impl EmptyReply) {
        if self.volume.has_blocking_close() {
            let finish = completions::empty_completion(reply);
            return self.volume.close_file(InodeNo(ino.0), finish);
        }
        // The kernel still writes mapped pages back before it closes; it only stops asking.
        reply.send_error(Errno::ENOSYS);
    }

    pub(super) fn release_file(
        &self,
        caller: Caller,
        ino: INodeNo,
        handle: FileHandle,
        reply: impl EmptyReply,
    ) {
        if let Some(whole_files) = &self.features().passthrough {
            whole_files.release(&self.volume, InodeNo(ino.0));
        }
        if self.volume.mode().kernel_cache == KernelCache::Immutable {
            return reply.send_done();
        }
        let handle = self.handle(ino, handle);
        let mut finish = completions::empty_completion(reply);
        if let Some(collected) = &self.features().write_back {
            finish = collected.track_transfer(true, finish);
        }
        self.volume
            .run(caller, FileOp::Release { handle }, &[], finish);
    }

    pub(super) fn sync_file(
        &self,
        caller: Caller,
        (ino, handle): (INodeNo, FileHandle),
        data_only: bool,
        reply: impl EmptyReply,
    ) {
        let handle = self.handle(ino, handle);
        self.run_empty_operation(caller, FileOp::Fsync { handle, data_only }, reply);
    }

    pub(super) fn open_directory(&self, caller: Caller, ino: INodeNo, reply: impl OpenReply) {
        if self.features().no_opendir {
            // As with files.
            return reply.send_error(Errno::ENOSYS);
        }
        let op = operations::open_directory(ino);
        let flags = self.directory_flags();
        let finish = completions::open_directory_completion(flags, reply);
        self.volume.run(caller, op, &[], finish);
    }

    /// Lists from the cookie that `at` has as offset.
    pub(super) fn list_directory(
        &self,
        caller: Caller,
        at: FilePosition,
        reply: impl DirectoryReply,
    ) {
        let op =
            completions::read_directory_operation(self.handle(at.ino, at.handle), at.offset, false);
        self.volume
            .run(caller, op, &[], completions::directory_completion(reply));
    }

    /// As [`Self::list_directory`], with attributes.
    pub(super) fn list_directory_plus(
        &self,
        caller: Caller,
        at: FilePosition,
        reply: impl DirectoryPlusReply,
    ) {
        let (volume, handle) = (Arc::clone(&self.volume), self.handle(at.ino, at.handle));
        let directory = InodeNo(at.ino.0);
        completions::list_with_attributes(volume, caller, (directory, handle), at.offset, reply);
    }

    pub(super) fn release_directory(
        &self,
        caller: Caller,
        (ino, handle): (INodeNo, FileHandle),
        reply: impl EmptyReply,
    ) {
        let handle = self.handle(ino, handle);
        self.run_empty_operation(caller, FileOp::ReleaseDirectory { handle }, reply);
    }

    pub(super) fn stat_file_system(&self, caller: Caller, reply: impl StatReply) {
        let finish = completions::stat_completion(reply);
        self.volume.run(caller, FileOp::StatFs, &[], finish);
    }

    /// Reads an extended attribute, or the list of them, into so many bytes; none: its length.
    pub(super) fn read_xattr(&self, caller: Caller, op: FileOp, size: u32, reply: impl XattrReply) {
        let finish = completions::xattr_completion(size, reply);
        self.volume.run(caller, op, &[], finish);
    }

    pub(super) fn allocate_range(
        &self,
        caller: Caller,
        at: FilePosition,
        length: u64,
        mode: i32,
        reply: impl EmptyReply,
    ) {
        let op = FileOp::Allocate {
            handle: self.handle(at.ino, at.handle),
            mode,
            offset: at.offset,
            length,
        };
        self.run_content_change(
            caller,
            (at.ino, op),
            &[],
            true,
            completions::empty_completion(reply),
        );
    }

    pub(super) fn seek_file(
        &self,
        caller: Caller,
        (ino, handle): (INodeNo, FileHandle),
        offset: i64,
        whence: i32,
        reply: impl SeekReply,
    ) {
        if self.features().write_back.is_some()
            || self.volume.mode().kernel_cache == KernelCache::Immutable
        {
            // The tree does not have yet what the kernel has collected, or knows of no holes: the
            // kernel, which then takes all up to the end for data, is never wrong.
            return reply.send_error(Errno::ENOSYS);
        }
        let op = FileOp::Seek {
            handle: self.handle(ino, handle),
            offset,
            whence,
        };
        self.volume
            .run(caller, op, &[], completions::seek_completion(reply));
    }

    pub(super) fn copy_range(
        &self,
        caller: Caller,
        source: FilePosition,
        target: FilePosition,
        length: u64,
        reply: impl WriteReply,
    ) {
        let op = FileOp::CopyRange {
            source: self.handle(source.ino, source.handle),
            source_offset: source.offset,
            target: self.handle(target.ino, target.handle),
            target_offset: target.offset,
            length: length.min(COPY_BYTES_MAX),
        };
        let finish = completions::write_completion(reply);
        self.run_content_change(caller, (target.ino, op), &[], true, finish);
    }
}
