//! Requests that come by fuser's session, each as a call of its handler. Takes no decision of its
//! own.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::time::SystemTime;

use bafs_proto::file_op::AttrChange;
use bafs_proto::ids::InodeNo;
use fuser::{
    BsdFileFlags, CopyFileRangeFlags, FileHandle, Filesystem, INodeNo, IoctlFlags, KernelConfig,
    LockOwner, OpenFlags, PollEvents, PollFlags, PollNotifier, RenameFlags, ReplyAttr, ReplyCreate,
    ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek,
    ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};

use super::convert::{self, caller_of};
use super::file_system::VolumeFileSystem;
use super::handlers::FilePosition;
use super::operations;
use crate::volume::KernelCache;

/// Requests that the kernel may have under way without anybody waiting (read-ahead, write-back).
const BACKGROUND_REQUESTS_MAX: u16 = 64;

impl Filesystem for VolumeFileSystem {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        self.negotiate(config);
        let _ = config.set_max_write(self.write_bytes_max());
        let _ = config.set_max_background(BACKGROUND_REQUESTS_MAX);
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, at: &OsStr, reply: ReplyEntry) {
        self.run_entry_operation(caller_of(request), operations::lookup(parent, at), reply);
    }

    fn forget(&self, _request: &Request, ino: INodeNo, count: u64) {
        self.volume.forget(InodeNo(ino.0), count);
    }

    fn getattr(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        self.get_attr(caller_of(request), ino, handle, reply);
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let change = AttrChange {
            mode,
            uid,
            gid,
            size,
            atime: atime.map(convert::to_set_time),
            mtime: mtime.map(convert::to_set_time),
        };
        self.set_attr(caller_of(request), ino, handle, change, reply);
    }

    fn readlink(&self, request: &Request, ino: INodeNo, reply: ReplyData) {
        self.read_link(caller_of(request), ino, reply);
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        at: &OsStr,
        mode: u32,
        _umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        self.run_entry_operation(
            caller_of(request),
            operations::make_node(parent, at, mode, rdev),
            reply,
        );
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        at: &OsStr,
        mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        self.run_entry_operation(
            caller_of(request),
            operations::make_directory(parent, at, mode),
            reply,
        );
    }

    fn unlink(&self, request: &Request, parent: INodeNo, at: &OsStr, reply: ReplyEmpty) {
        self.run_empty_operation(caller_of(request), operations::unlink(parent, at), reply);
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, at: &OsStr, reply: ReplyEmpty) {
        self.run_empty_operation(
            caller_of(request),
            operations::remove_directory(parent, at),
            reply,
        );
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        at: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        self.run_entry_operation(
            caller_of(request),
            operations::make_symlink(parent, at, target),
            reply,
        );
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        at: &OsStr,
        new_parent: INodeNo,
        new_at: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        self.run_empty_operation(
            caller_of(request),
            operations::rename((parent, at), (new_parent, new_at), flags),
            reply,
        );
    }

    fn link(
        &self,
        request: &Request,
        ino: INodeNo,
        parent: INodeNo,
        at: &OsStr,
        reply: ReplyEntry,
    ) {
        self.run_entry_operation(
            caller_of(request),
            operations::make_link(ino, parent, at),
            reply,
        );
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let files = self.features().passthrough.as_ref();
        let Some(files) = files.filter(|files| !files.is_refused()) else {
            return self.open_file(caller_of(request), ino, flags, reply);
        };
        if self.volume.mode().kernel_cache == KernelCache::Immutable {
            return files.open(&self.volume, InodeNo(ino.0), self.file_flags(), reply);
        }
        let finish = files.open_completion(&self.volume, self.file_flags(), reply);
        let op = operations::open_file(ino, flags);
        self.volume.run(caller_of(request), op, &[], finish);
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        at: &OsStr,
        mode: u32,
        _umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        self.create_file(caller_of(request), (parent, at), mode, flags, reply);
    }

    fn read(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let at = FilePosition {
            ino,
            handle,
            offset,
        };
        self.read_file(caller_of(request), at, (size, flags), reply);
    }

    fn write(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let at = FilePosition {
            ino,
            handle,
            offset,
        };
        self.write_file(caller_of(request), at, data, (write_flags, flags), reply);
    }

    fn flush(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        self.close_file(ino, reply);
    }

    fn release(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.release_file(caller_of(request), ino, handle, reply);
    }

    fn fsync(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        data_only: bool,
        reply: ReplyEmpty,
    ) {
        self.sync_file(caller_of(request), (ino, handle), data_only, reply);
    }

    fn opendir(&self, request: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        self.open_directory(caller_of(request), ino, reply);
    }

    fn readdir(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        cookie: u64,
        reply: ReplyDirectory,
    ) {
        let at = FilePosition {
            ino,
            handle,
            offset: cookie,
        };
        self.list_directory(caller_of(request), at, reply);
    }

    fn readdirplus(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        cookie: u64,
        reply: ReplyDirectoryPlus,
    ) {
        let at = FilePosition {
            ino,
            handle,
            offset: cookie,
        };
        self.list_directory_plus(caller_of(request), at, reply);
    }

    fn releasedir(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.release_directory(caller_of(request), (ino, handle), reply);
    }

    fn fsyncdir(
        &self,
        request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        _data_only: bool,
        reply: ReplyEmpty,
    ) {
        self.run_empty_operation(caller_of(request), operations::sync_directory(ino), reply);
    }

    fn statfs(&self, request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        self.stat_file_system(caller_of(request), reply);
    }

    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        at: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        self.run_empty_operation(
            caller_of(request),
            operations::set_xattr(ino, at, value, flags),
            reply,
        );
    }

    fn getxattr(&self, request: &Request, ino: INodeNo, at: &OsStr, size: u32, reply: ReplyXattr) {
        self.read_xattr(
            caller_of(request),
            operations::get_xattr(ino, at),
            size,
            reply,
        );
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        self.read_xattr(caller_of(request), operations::list_xattr(ino), size, reply);
    }

    fn removexattr(&self, request: &Request, ino: INodeNo, at: &OsStr, reply: ReplyEmpty) {
        self.run_empty_operation(caller_of(request), operations::remove_xattr(ino, at), reply);
    }

    fn ioctl(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _flags: IoctlFlags,
        _command: u32,
        _data: &[u8],
        _size_max: u32,
        reply: ReplyIoctl,
    ) {
        // Many programs ask any file whether it is a terminal.
        reply.error(fuser::Errno::ENOTTY);
    }

    fn poll(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _notifier: PollNotifier,
        _events: PollEvents,
        _flags: PollFlags,
        reply: ReplyPoll,
    ) {
        // As with `open`: the kernel then says by itself that files are always ready.
        reply.error(fuser::Errno::ENOSYS);
    }

    fn fallocate(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let at = FilePosition {
            ino,
            handle,
            offset,
        };
        self.allocate_range(caller_of(request), at, length, mode, reply);
    }

    fn lseek(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        self.seek_file(caller_of(request), (ino, handle), offset, whence, reply);
    }

    fn copy_file_range(
        &self,
        request: &Request,
        source_ino: INodeNo,
        source: FileHandle,
        source_offset: u64,
        target_ino: INodeNo,
        target: FileHandle,
        target_offset: u64,
        length: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let source = FilePosition {
            ino: source_ino,
            handle: source,
            offset: source_offset,
        };
        let target = FilePosition {
            ino: target_ino,
            handle: target,
            offset: target_offset,
        };
        self.copy_range(caller_of(request), source, target, length, reply);
    }
}
