//! The requests of a mirror: each becomes a system call on the directory, and a record.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{
    DirBuilderExt, FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, lchown,
    symlink,
};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bafs_profile::trace::AccessKind;
use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags,
    RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry,
    ReplyIoctl, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow,
    WriteFlags,
};
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType as NodeKind, Mode, OFlags, Timespec, Timestamps,
    fallocate, mknodat, renameat_with, statvfs, utimensat,
};

use super::file_table::{FileTable, OpenObject};
use crate::trace_recorder::{RecordedFile, TraceRecorder};

/// Looks at one file within this time count once: without it, each step of a path would be one.
const ATTRIBUTE_TTL: Duration = Duration::from_secs(1);
const GENERATION: Generation = Generation(0);
/// Read-ahead of less than a page: the kernel reads the pages of mappings one by one. It takes no 0.
const READ_AHEAD_BYTES: u32 = 1;

/// A directory that is shown, and whose use is recorded.
pub(super) struct MirrorFileSystem {
    source: PathBuf,
    shown: String,
    recorder: Arc<TraceRecorder>,
    table: Mutex<FileTable>,
}

/// Handles differ between all mirrors of a recorder.
static NEXT_HANDLE: AtomicU64 = AtomicU64::new(1);

fn to_errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_i32)
}

fn stale() -> io::Error {
    rustix::io::Errno::STALE.into()
}

fn file_attributes(ino: INodeNo, found: &Metadata) -> FileAttr {
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

fn to_file_type(kind: fs::FileType) -> FileType {
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

fn to_timespec(time: Option<TimeOrNow>) -> Timespec {
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

/// Replies with the result or the error.
macro_rules! reply_or_error {
    ($reply:ident, $result:expr, $done:expr) => {
        match $result {
            Ok(value) => $done(value),
            Err(error) => $reply.error(to_errno(&error)),
        }
    };
}

impl MirrorFileSystem {
    pub(super) fn new(source: &Path, shown: &str, recorder: Arc<TraceRecorder>) -> Self {
        Self {
            source: source.to_owned(),
            shown: shown.to_owned(),
            recorder,
            table: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, FileTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn relative_path(&self, ino: INodeNo) -> io::Result<PathBuf> {
        self.lock().path(ino).map(Path::to_owned).ok_or_else(stale)
    }

    fn child_path(&self, parent: INodeNo, name: &OsStr) -> io::Result<PathBuf> {
        self.lock().child(parent, name).ok_or_else(stale)
    }

    fn real(&self, path: &Path) -> PathBuf {
        // Joining an empty path would end with a slash.
        match path.as_os_str().is_empty() {
            true => self.source.clone(),
            false => self.source.join(path),
        }
    }

    /// The path as the program sees it.
    fn shown_path(&self, path: &Path) -> String {
        match path.as_os_str().is_empty() {
            true => self.shown.clone(),
            false => format!("{}/{}", self.shown, path.display()),
        }
    }

    fn find(&self, path: &Path) -> io::Result<(FileAttr, Metadata)> {
        let found = fs::symlink_metadata(self.real(path))?;
        let ino = self.lock().number(path);
        Ok((file_attributes(ino, &found), found))
    }

    fn record_use(&self, request: &Request, path: &Path, size_bytes: u64, kind: AccessKind) {
        let file = RecordedFile {
            path: &self.shown_path(path),
            size_bytes,
        };
        self.recorder.record_use(request.pid(), file, kind);
    }

    fn open_file(&self, handle: FileHandle) -> io::Result<Arc<File>> {
        match self.lock().open_object(handle.0) {
            Some(OpenObject::File(file, _)) => Ok(file),
            _ => Err(rustix::io::Errno::BADF.into()),
        }
    }

    /// Attributes by the path, or by an open file if that is gone.
    fn metadata(&self, ino: INodeNo) -> io::Result<Metadata> {
        match self.relative_path(ino) {
            Ok(path) => fs::symlink_metadata(self.real(&path)),
            Err(error) => {
                let open = self.lock().open_file_of(ino);
                open.ok_or(error)?.metadata()
            }
        }
    }

    fn insert_file(
        &self,
        request: &Request,
        (path, ino): (&Path, INodeNo),
        file: File,
        is_new: bool,
    ) -> io::Result<FileHandle> {
        let recorded = RecordedFile {
            path: &self.shown_path(path),
            size_bytes: file.metadata()?.len(),
        };
        let handle = NEXT_HANDLE.fetch_add(1, Ordering::Relaxed);
        self.recorder
            .record_open(request.pid(), recorded, handle, is_new);
        let object = OpenObject::File(Arc::new(file), ino);
        self.lock().insert_open(handle, object);
        Ok(FileHandle(handle))
    }

    fn list_directory(&self, ino: INodeNo) -> io::Result<FileHandle> {
        let path = self.relative_path(ino)?;
        let mut all = vec![
            (OsString::from("."), FileType::Directory),
            (OsString::from(".."), FileType::Directory),
        ];
        for entry in fs::read_dir(self.real(&path))? {
            let entry = entry?;
            all.push((entry.file_name(), to_file_type(entry.file_type()?)));
        }
        let handle = NEXT_HANDLE.fetch_add(1, Ordering::Relaxed);
        self.lock()
            .insert_open(handle, OpenObject::Directory(Arc::new(all)));
        Ok(FileHandle(handle))
    }

    fn change_attributes(
        &self,
        request: &Request,
        ino: INodeNo,
        (mode, uid, gid): (Option<u32>, Option<u32>, Option<u32>),
        size: Option<u64>,
        times: Option<Timestamps>,
    ) -> io::Result<FileAttr> {
        let path = self.relative_path(ino);
        let open = self.lock().open_file_of(ino);
        if let Some(size) = size {
            // An open file may be written whose path may not any more.
            let writable = || {
                OpenOptions::new()
                    .write(true)
                    .open(self.real(path.as_ref().ok()?))
                    .ok()
            };
            match writable() {
                Some(file) => file.set_len(size)?,
                None => open.as_ref().ok_or_else(stale)?.set_len(size)?,
            }
            if let Ok(path) = &path {
                let file = RecordedFile {
                    path: &self.shown_path(path),
                    size_bytes: size,
                };
                self.recorder.record_truncation(request.pid(), file);
            }
        }
        if let Ok(path) = &path {
            let real = self.real(path);
            if let Some(mode) = mode {
                fs::set_permissions(&real, fs::Permissions::from_mode(mode))?;
            }
            if uid.is_some() || gid.is_some() {
                lchown(&real, uid, gid)?;
            }
            if let Some(times) = times {
                utimensat(CWD, &real, &times, AtFlags::SYMLINK_NOFOLLOW)?;
            }
        }
        Ok(file_attributes(ino, &self.metadata(ino)?))
    }

    fn make_file(
        &self,
        request: &Request,
        (parent, name): (INodeNo, &OsStr),
        mode: u32,
        flags: i32,
    ) -> io::Result<(FileAttr, FileHandle)> {
        let path = self.child_path(parent, name)?;
        let real = self.real(&path);
        let flags = OFlags::from_bits_retain(flags as u32);
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(mode);
        // Another program may have made it in this moment.
        let (file, is_new) = match options.clone().create_new(true).open(&real) {
            Ok(file) => (file, true),
            Err(error) if flags.contains(OFlags::EXCL) => return Err(error),
            Err(_) => (options.open(&real)?, false),
        };
        if is_new {
            // The kernel has taken the caller's mask off.
            file.set_permissions(fs::Permissions::from_mode(mode))?;
        }
        let (attributes, _) = self.find(&path)?;
        let handle = self.insert_file(request, (&path, attributes.ino), file, is_new)?;
        Ok((attributes, handle))
    }
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
        let opened = self.relative_path(ino).and_then(|path| {
            let access = OFlags::from_bits_retain(flags.0 as u32) & OFlags::RWMODE;
            let real = self.real(&path);
            let writes = access != OFlags::RDONLY;
            let mut options = OpenOptions::new();
            options.read(true).write(writes);
            // A file that may be written but not read is opened for writing alone.
            let file = options.open(&real);
            let file = match (file, access == OFlags::WRONLY) {
                (Err(_), true) => OpenOptions::new().write(true).open(&real)?,
                (file, _) => file?,
            };
            self.insert_file(request, (&path, ino), file, false)
        });
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
