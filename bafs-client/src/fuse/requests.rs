//! Each request of the kernel as one operation on a volume. Takes no decision of its own.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use bafs_proto::file_op::{AttrChange, BodyRange, FileOp};
use bafs_proto::ids::InodeNo;
use bafs_proto::limits::IO_BYTES_MAX;
use fuser::{
    BsdFileFlags, CopyFileRangeFlags, FileHandle, Filesystem, INodeNo, IoctlFlags, KernelConfig,
    LockOwner, OpenFlags, PollEvents, PollFlags, PollNotifier, RenameFlags, ReplyAttr, ReplyCreate,
    ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek,
    ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use nix::libc;

use super::bridge::Bridge;
use super::convert::{self, caller, name};
use super::{operations, replies};
use crate::limits::COPY_BYTES_MAX;

/// Requests that the kernel may have under way without anybody waiting (read-ahead, write-back).
const BACKGROUND_MAX: u16 = 64;

impl Filesystem for Bridge {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        self.negotiate(config);
        let _ = config.set_max_write(IO_BYTES_MAX);
        let _ = config.set_max_background(BACKGROUND_MAX);
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, at: &OsStr, reply: ReplyEntry) {
        self.entry(request, operations::lookup(parent, at), reply);
    }

    fn forget(&self, request: &Request, ino: INodeNo, count: u64) {
        let op = operations::forget(ino, count);
        self.volume
            .run(caller(request), op, &[], Box::new(|_, _| {}));
    }

    fn getattr(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        let op = FileOp::GetAttr {
            ino: InodeNo(ino.0),
            handle: self.open_handle(ino, handle),
        };
        let finish = replies::attr(self.volume.mode(), reply);
        self.volume.run(caller(request), op, &[], finish);
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
            mode: mode.map(|mode| mode & 0o7777),
            uid,
            gid,
            size,
            atime: atime.map(convert::set_time),
            mtime: mtime.map(convert::set_time),
        };
        let handle = self.open_handle(ino, handle);
        let op = FileOp::SetAttr {
            ino: InodeNo(ino.0),
            handle,
            change,
        };
        let finish = replies::attr(self.volume.mode(), reply);
        self.volume.run(caller(request), op, &[], finish);
    }

    fn readlink(&self, request: &Request, ino: INodeNo, reply: ReplyData) {
        let op = operations::read_link(ino);
        self.volume
            .run(caller(request), op, &[], replies::bytes(reply));
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
        self.entry(
            request,
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
        self.entry(request, operations::make_directory(parent, at, mode), reply);
    }

    fn unlink(&self, request: &Request, parent: INodeNo, at: &OsStr, reply: ReplyEmpty) {
        self.empty(request, operations::unlink(parent, at), reply);
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, at: &OsStr, reply: ReplyEmpty) {
        self.empty(request, operations::remove_directory(parent, at), reply);
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        at: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        self.entry(request, operations::make_symlink(parent, at, target), reply);
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
        self.empty(
            request,
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
        self.entry(request, operations::make_link(ino, parent, at), reply);
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let whole_files = self.whole_files.as_ref();
        let whole_files = whole_files.filter(|files| !files.is_refused());
        let is_stateless = self.volume.mode().stateless;
        if let Some(whole_files) = whole_files.filter(|_| is_stateless) {
            return whole_files.open(&self.volume, InodeNo(ino.0), self.file_flags(), reply);
        }
        if self.no_open {
            // Not a failure: it tells the kernel never to ask again, for any file.
            return reply.error(fuser::Errno::ENOSYS);
        }
        let op = FileOp::Open {
            ino: InodeNo(ino.0),
            flags: convert::open_flags(flags.0),
        };
        let finish = match whole_files {
            Some(whole_files) => whole_files.opened(&self.volume, self.file_flags(), reply),
            None => replies::opened(self.file_flags(), reply),
        };
        self.volume.run(caller(request), op, &[], finish);
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
        let flags = convert::create_flags(flags);
        let op = FileOp::Create {
            parent: InodeNo(parent.0),
            name: name(at),
            mode,
            flags,
        };
        let finish = replies::created(self.volume.mode(), self.file_flags(), reply);
        self.volume.run(caller(request), op, &[], finish);
    }

    fn read(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let (ino, handle) = (InodeNo(ino.0), self.handle(ino, handle));
        self.volume.read(
            caller(request),
            ino,
            handle,
            offset,
            size,
            replies::data(reply),
        );
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
        // Mapped pages have their own place, whatever handle they come through.
        let mapped = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let op = FileOp::Write {
            handle: self.handle(ino, handle),
            offset,
            // The kernel sends at most what `init` allowed.
            data: BodyRange {
                start: 0,
                length: data.len() as u32,
            },
            // Where all changes come through this kernel it knows where the end is, and it may send
            // the pieces of a large write all at once.
            append: flags.0 & libc::O_APPEND != 0 && !mapped && !self.volume.mode().cached,
        };
        let kills = write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        let mut finish = replies::written(reply);
        if mapped {
            finish = self.volume.deferred(data.len(), finish);
        }
        self.change(request, (ino, op), data, kills, finish);
    }

    fn flush(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        if self.volume.close_waits() {
            let finish = replies::empty(reply);
            return self.volume.close_file(InodeNo(ino.0), finish);
        }
        // The kernel still writes mapped pages back before it closes; it only stops asking.
        reply.error(fuser::Errno::ENOSYS);
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
        if let Some(whole_files) = &self.whole_files {
            whole_files.release(&self.volume, InodeNo(ino.0));
        }
        if self.volume.mode().stateless {
            return reply.ok();
        }
        self.empty(
            request,
            FileOp::Release {
                handle: self.handle(ino, handle),
            },
            reply,
        );
    }

    fn fsync(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        data_only: bool,
        reply: ReplyEmpty,
    ) {
        self.empty(
            request,
            FileOp::Fsync {
                handle: self.handle(ino, handle),
                data_only,
            },
            reply,
        );
    }

    fn opendir(&self, request: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        if self.no_opendir {
            // As with `open`.
            return reply.error(fuser::Errno::ENOSYS);
        }
        let op = operations::open_directory(ino);
        let finish = replies::opened(self.directory_flags(), reply);
        self.volume.run(caller(request), op, &[], finish);
    }

    fn readdir(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        cookie: u64,
        reply: ReplyDirectory,
    ) {
        let op = replies::read_directory(self.handle(ino, handle), cookie, false);
        self.volume
            .run(caller(request), op, &[], replies::entries(reply));
    }

    fn readdirplus(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        cookie: u64,
        reply: ReplyDirectoryPlus,
    ) {
        let handle = self.handle(ino, handle);
        replies::entries_plus(
            Arc::clone(&self.volume),
            caller(request),
            handle,
            cookie,
            reply,
        );
    }

    fn releasedir(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.empty(
            request,
            FileOp::ReleaseDirectory {
                handle: self.handle(ino, handle),
            },
            reply,
        );
    }

    fn fsyncdir(
        &self,
        request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        _data_only: bool,
        reply: ReplyEmpty,
    ) {
        self.empty(request, operations::sync_directory(ino), reply);
    }

    fn statfs(&self, request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        self.volume.run(
            caller(request),
            FileOp::StatFs,
            &[],
            replies::stat_fs(reply),
        );
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
        self.empty(request, operations::set_xattr(ino, at, value, flags), reply);
    }

    fn getxattr(&self, request: &Request, ino: INodeNo, at: &OsStr, size: u32, reply: ReplyXattr) {
        let op = operations::get_xattr(ino, at);
        self.volume
            .run(caller(request), op, &[], replies::xattr(size, reply));
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let op = operations::list_xattr(ino);
        self.volume
            .run(caller(request), op, &[], replies::xattr(size, reply));
    }

    fn removexattr(&self, request: &Request, ino: INodeNo, at: &OsStr, reply: ReplyEmpty) {
        self.empty(request, operations::remove_xattr(ino, at), reply);
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
        let op = FileOp::Allocate {
            handle: self.handle(ino, handle),
            mode,
            offset,
            length,
        };
        self.change(request, (ino, op), &[], true, replies::empty(reply));
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
        let op = FileOp::Seek {
            handle: self.handle(ino, handle),
            offset,
            whence,
        };
        self.volume
            .run(caller(request), op, &[], replies::position(reply));
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
        let op = FileOp::CopyRange {
            source: self.handle(source_ino, source),
            source_offset,
            target: self.handle(target_ino, target),
            target_offset,
            length: length.min(COPY_BYTES_MAX),
        };
        let finish = replies::written(reply);
        self.change(request, (target_ino, op), &[], true, finish);
    }
}
