//! The requests of a mirror: each becomes a system call on the directory, and a record.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use bafs_profile::trace::AccessKind;
use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags,
    ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyIoctl,
    ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use rustix::fs::{
    CWD, FallocateFlags, FileType as NodeKind, Mode, OFlags, Timestamps, fallocate, mknodat,
    renameat_with, statvfs,
};

use super::conversions::{file_attributes, open_path, to_errno, to_timespec};
use super::file_table::OpenObject;
use super::mirror_file_system::MirrorFileSystem;

/// Looks at one file within this time count once: without it, each step of a path would be one.
const ATTRIBUTE_TTL: Duration = Duration::from_secs(1);
const GENERATION: Generation = Generation(0);
/// Read-ahead of less than a page: the kernel reads the pages of mappings one by one. It takes
/// no 0.
const READ_AHEAD_BYTES: u32 = 1;

/// Replies with the result or the error.
macro_rules! reply_or_error {
    ($reply:ident, $result:expr, $done:expr) => {
        match $result {
            Ok(value) => $done(value),
            Err(error) => $reply.error(to_errno(&error)),
        }
    };
}

impl Filesystem for MirrorFileSystem {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = InitFlags::FUSE_PARALLEL_DIROPS | InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP;
        // Only what the kernel offers is asked for, so it cannot refuse.
        let _ = config.add_capabilities(wanted & config.capabilities());
        let _ = config.set_max_readahead(READ_AHEAD_BYTES);
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.child_path(parent, name).and_then(|path| {
            let (attributes, _) = self.find(&path)?;
            if attributes.kind == FileType::RegularFile {
                self.record_use(request, &path, attributes.size, AccessKind::Stat);
            }
            Ok(attributes)
        });
        reply_or_error!(reply, found, |found| {
            reply.entry(&ATTRIBUTE_TTL, &found, GENERATION);
        });
    }

    fn getattr(&self, request: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let found = self.metadata(ino).map(|found| file_attributes(ino, &found));
        if let (Ok(found), Ok(path)) = (&found, self.relative_path(ino))
            && found.kind == FileType::RegularFile
        {
            self.record_use(request, &path, found.size, AccessKind::Stat);
        }
        reply_or_error!(reply, found, |found| reply.attr(&ATTRIBUTE_TTL, &found));
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
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let times = (atime.is_some() || mtime.is_some()).then(|| Timestamps {
            last_access: to_timespec(atime),
            last_modification: to_timespec(mtime),
        });
        let done = self.change_attributes(request, ino, (mode, uid, gid), size, times);
        reply_or_error!(reply, done, |found| reply.attr(&ATTRIBUTE_TTL, &found));
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        let read = self.relative_path(ino).and_then(|path| {
            let target = fs::read_link(self.real(&path))?;
            let shown = self.shown_path(&path);
            self.recorder.record_link(&shown, &target.to_string_lossy());
            Ok(target)
        });
        reply_or_error!(reply, read, |target: PathBuf| {
            reply.data(target.as_os_str().as_encoded_bytes());
        });
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let made = self.child_path(parent, name).and_then(|path| {
            let real = self.real(&path);
            let kind = NodeKind::from_raw_mode(mode);
            mknodat(CWD, &real, kind, Mode::from_raw_mode(mode), rdev.into())?;
            fs::set_permissions(&real, fs::Permissions::from_mode(mode & 0o7777))?;
            if kind == NodeKind::RegularFile {
                self.record_use(request, &path, 0, AccessKind::Other);
            }
            Ok(self.find(&path)?.0)
        });
        reply_or_error!(reply, made, |made| reply.entry(
            &ATTRIBUTE_TTL,
            &made,
            GENERATION
        ));
    }

    fn mkdir(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        reply: ReplyEntry,
    ) {
        let made = self.child_path(parent, name).and_then(|path| {
            let real = self.real(&path);
            fs::DirBuilder::new().mode(mode).create(&real)?;
            fs::set_permissions(&real, fs::Permissions::from_mode(mode & 0o7777))?;
            self.recorder.record_made_directory(&self.shown_path(&path));
            Ok(self.find(&path)?.0)
        });
        reply_or_error!(reply, made, |made| reply.entry(
            &ATTRIBUTE_TTL,
            &made,
            GENERATION
        ));
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let done = self.child_path(parent, name).and_then(|path| {
            let real = self.real(&path);
            let is_file = fs::symlink_metadata(&real).is_ok_and(|found| found.is_file());
            fs::remove_file(real)?;
            self.lock().remove(&path);
            if is_file {
                self.recorder
                    .record_removal(request.pid(), &self.shown_path(&path));
            }
            Ok(())
        });
        reply_or_error!(reply, done, |()| reply.ok());
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let done = self.child_path(parent, name).and_then(|path| {
            fs::remove_dir(self.real(&path))?;
            self.lock().remove(&path);
            Ok(())
        });
        reply_or_error!(reply, done, |()| reply.ok());
    }

    fn symlink(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let made = self.child_path(parent, name).and_then(|path| {
            symlink(target, self.real(&path))?;
            Ok(self.find(&path)?.0)
        });
        reply_or_error!(reply, made, |made| reply.entry(
            &ATTRIBUTE_TTL,
            &made,
            GENERATION
        ));
    }

    fn link(
        &self,
        request: &Request,
        ino: INodeNo,
        new_parent: INodeNo,
        new_name: &OsStr,
        reply: ReplyEntry,
    ) {
        let made = self.relative_path(ino).and_then(|path| {
            let target = self.child_path(new_parent, new_name)?;
            fs::hard_link(self.real(&path), self.real(&target))?;
            let (attributes, _) = self.find(&target)?;
            self.record_use(request, &target, attributes.size, AccessKind::Other);
            Ok(attributes)
        });
        reply_or_error!(reply, made, |made| reply.entry(
            &ATTRIBUTE_TTL,
            &made,
            GENERATION
        ));
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let done = self.child_path(parent, name).and_then(|source| {
            if flags.contains(RenameFlags::RENAME_EXCHANGE) {
                // Two files would exchange their histories; no program of a batch needs it.
                return Err(rustix::io::Errno::INVAL.into());
            }
            let target = self.child_path(new_parent, new_name)?;
            let kernel_flags = rustix::fs::RenameFlags::from_bits_retain(flags.bits());
            renameat_with(
                CWD,
                self.real(&source),
                CWD,
                self.real(&target),
                kernel_flags,
            )?;
            self.lock().rename(&source, &target);
            let [source, target] = [source, target].map(|path| self.shown_path(&path));
            self.recorder.record_rename(request.pid(), &source, &target);
            Ok(())
        });
        reply_or_error!(reply, done, |()| reply.ok());
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let access = OFlags::from_bits_retain(flags.0 as u32) & OFlags::RWMODE;
        let opened = match self.relative_path(ino) {
            Ok(path) => open_path(&self.real(&path), access)
                .and_then(|file| self.insert_file(request, (&path, ino), file, false)),
            Err(error) => self.reopen_removed(ino, access, error),
        };
        reply_or_error!(reply, opened, |handle| {
            reply.opened(handle, FopenFlags::FOPEN_DIRECT_IO);
        });
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let made = self.make_file(request, (parent, name), mode, flags);
        reply_or_error!(reply, made, |(attributes, handle)| {
            let direct = FopenFlags::FOPEN_DIRECT_IO;
            reply.created(&ATTRIBUTE_TTL, &attributes, GENERATION, handle, direct);
        });
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let read = self.open_file(handle).and_then(|file| {
            let mut bytes = vec![0; size as usize];
            let mut count = 0;
            while count < bytes.len() {
                match file.read_at(&mut bytes[count..], offset + count as u64)? {
                    0 => break,
                    more => count += more,
                }
            }
            bytes.truncate(count);
            // A call has an owner of locks; a page of a mapping has none.
            let kind = match lock_owner {
                Some(_) => AccessKind::Read,
                None => AccessKind::MappedRead,
            };
            self.recorder
                .record_data(handle.0, kind, offset, count as u64);
            Ok(bytes)
        });
        reply_or_error!(reply, read, |bytes: Vec<u8>| reply.data(&bytes));
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = self.open_file(handle).and_then(|file| {
            file.write_all_at(data, offset)?;
            let kind = match write_flags.contains(WriteFlags::FUSE_WRITE_CACHE) {
                true => AccessKind::MappedWrite,
                false => AccessKind::Write,
            };
            self.recorder
                .record_data(handle.0, kind, offset, data.len() as u64);
            Ok(())
        });
        reply_or_error!(reply, written, |()| reply.written(data.len() as u32));
    }

    fn flush(&self, _: &Request, _: INodeNo, handle: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        self.recorder.record_close(handle.0);
        reply.ok();
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.recorder.forget_handle(handle.0);
        self.lock().close(handle.0);
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, handle: FileHandle, _: bool, reply: ReplyEmpty) {
        let done = self.open_file(handle).and_then(|file| file.sync_all());
        reply_or_error!(reply, done, |()| reply.ok());
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let done = self.open_file(handle).and_then(|file| {
            let mode = FallocateFlags::from_bits_retain(mode as u32);
            Ok(fallocate(&file, mode, offset, length)?)
        });
        reply_or_error!(reply, done, |()| reply.ok());
    }

    fn opendir(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply_or_error!(reply, self.list_directory(ino), |handle| {
            reply.opened(handle, FopenFlags::empty());
        });
    }

    fn readdir(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let open = self.lock().open_object(handle.0);
        let Some(OpenObject::Directory(all)) = open else {
            return reply.error(Errno::EBADF);
        };
        for (at, (name, kind)) in all.iter().enumerate().skip(offset as usize) {
            let number = match at {
                0 | 1 => Some(ino),
                _ => {
                    let mut table = self.lock();
                    let path = table.child(ino, name);
                    path.map(|path| table.number(&path))
                }
            };
            if reply.add(number.unwrap_or(ino), at as u64 + 1, *kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.lock().close(handle.0);
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let found = statvfs(&self.source).map_err(io::Error::from);
        reply_or_error!(reply, found, |found: rustix::fs::StatVfs| {
            let size = found.f_bsize as u32;
            let (blocks, free) = (found.f_blocks, found.f_bavail);
            reply.statfs(
                blocks,
                free,
                free,
                found.f_files,
                found.f_ffree,
                size,
                255,
                size,
            );
        });
    }

    fn getxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, reply: ReplyXattr) {
        // The kernel does not ask again.
        reply.error(Errno::ENOSYS);
    }

    fn listxattr(&self, _: &Request, _: INodeNo, _: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }

    fn setxattr(
        &self,
        _: &Request,
        _: INodeNo,
        _: &OsStr,
        _: &[u8],
        _: i32,
        _: u32,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn ioctl(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: IoctlFlags,
        _: u32,
        _: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }

    fn lseek(&self, _: &Request, _: INodeNo, _: FileHandle, _: i64, _: i32, reply: ReplyLseek) {
        reply.error(Errno::ENOSYS);
    }

    fn copy_file_range(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        // The kernel then reads and writes, which is recorded.
        reply.error(Errno::ENOSYS);
    }
}
