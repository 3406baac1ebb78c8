//! The smallest file system that passes a directory through the kernel's FUSE: the cost of the
//! crate and the kernel by themselves, without limits, leases or accounts. Not a file system to
//! use: it knows files and directories only, and one user.
//!
//! The bare one lets everybody do everything and has no extended attributes, which spares the
//! kernel questions that it has to ask of a volume; the strict one has both, as libfuse's own
//! `passthrough_hp`.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, INodeNo,
    InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs,
    ReplyWrite, ReplyXattr, Request, Session, TimeOrNow, WriteFlags,
};
use rustix::fs::{lgetxattr, statvfs};

use super::{ATTRIBUTE_TTL, GENERATION, MinimalFileSystem, negative_attributes, session_config};
use crate::bench::machine::SpreadDirectories;

/// Hidden first argument: this process passes a directory through.
pub(in crate::bench) const FORWARDING_PROCESS: &str = "--forwarding-file-system";

/// Longest extended attribute that is passed on.
const XATTR_BYTES_MAX: usize = 256;
/// Last argument of a process that passes through strictly.
const STRICT_ARGUMENT: &str = "strict";

/// The object of a handle.
#[derive(Clone)]
enum OpenObject {
    File(Arc<File>),
    Directory(Arc<Vec<(OsString, Option<FileAttr>)>>),
}

/// Extra work of the file system besides passing files through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::bench) enum ForwardingMode {
    /// None.
    Bare,
    /// The kernel asks it for permissions, and for extended attributes.
    Strict,
}

struct ForwardingFileSystem {
    mode: ForwardingMode,
    /// Where each known number is.
    paths: Mutex<HashMap<u64, PathBuf>>,
    open_objects: Mutex<HashMap<u64, OpenObject>>,
    next_number: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn to_errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_i32)
}

fn file_attributes(ino: u64, found: &Metadata) -> FileAttr {
    let time = |seconds: i64, nanoseconds: i64| {
        UNIX_EPOCH + Duration::new(seconds.max(0) as u64, nanoseconds as u32)
    };
    FileAttr {
        ino: INodeNo(ino),
        size: found.len(),
        blocks: found.blocks(),
        atime: time(found.atime(), found.atime_nsec()),
        mtime: time(found.mtime(), found.mtime_nsec()),
        ctime: time(found.ctime(), found.ctime_nsec()),
        crtime: UNIX_EPOCH,
        kind: match found.is_dir() {
            true => FileType::Directory,
            false => FileType::RegularFile,
        },
        perm: (found.mode() & 0o7777) as u16,
        nlink: found.nlink() as u32,
        uid: found.uid(),
        gid: found.gid(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl ForwardingFileSystem {
    fn path_of(&self, ino: INodeNo) -> io::Result<PathBuf> {
        let found = lock(&self.paths).get(&ino.0).cloned();
        found.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn child_path(&self, parent: INodeNo, name: &OsStr) -> io::Result<PathBuf> {
        Ok(self.path_of(parent)?.join(name))
    }

    fn insert_path(&self, path: PathBuf) -> io::Result<FileAttr> {
        let found = fs::symlink_metadata(&path)?;
        lock(&self.paths).insert(found.ino(), path);
        Ok(file_attributes(found.ino(), &found))
    }

    fn insert_open(&self, open: OpenObject) -> FileHandle {
        let handle = self.next_number.fetch_add(1, Ordering::Relaxed);
        lock(&self.open_objects).insert(handle, open);
        FileHandle(handle)
    }

    fn open_file(&self, handle: FileHandle) -> io::Result<Arc<File>> {
        match lock(&self.open_objects).get(&handle.0) {
            Some(OpenObject::File(file)) => Ok(Arc::clone(file)),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn list_directory(&self, ino: INodeNo) -> io::Result<Vec<(OsString, Option<FileAttr>)>> {
        let path = self.path_of(ino)?;
        let mut all = vec![(OsString::from("."), None), (OsString::from(".."), None)];
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            all.push((entry.file_name(), Some(self.insert_path(entry.path())?)));
        }
        Ok(all)
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

impl Filesystem for ForwardingFileSystem {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_DO_READDIRPLUS
            | InitFlags::FUSE_READDIRPLUS_AUTO
            | InitFlags::FUSE_HANDLE_KILLPRIV_V2;
        // Only capabilities that the kernel offers are requested, so it cannot reject them.
        let _ = config.add_capabilities(wanted & config.capabilities());
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self
            .child_path(parent, name)
            .and_then(|path| self.insert_path(path))
        {
            Ok(found) => reply.entry(&ATTRIBUTE_TTL, &found, GENERATION),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                reply.entry(&ATTRIBUTE_TTL, &negative_attributes(), GENERATION);
            }
            Err(error) => reply.error(to_errno(&error)),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let found = self.path_of(ino).and_then(fs::symlink_metadata);
        reply_or_error!(reply, found, |found| {
            reply.attr(&ATTRIBUTE_TTL, &file_attributes(ino.0, &found));
        });
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let done = self.path_of(ino).and_then(|path| {
            if let Some(size) = size {
                OpenOptions::new().write(true).open(&path)?.set_len(size)?;
            }
            fs::symlink_metadata(path)
        });
        reply_or_error!(reply, done, |found| {
            reply.attr(&ATTRIBUTE_TTL, &file_attributes(ino.0, &found));
        });
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, name: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        let made = self.child_path(parent, name).and_then(|path| {
            fs::create_dir(&path)?;
            self.insert_path(path)
        });
        reply_or_error!(reply, made, |made| reply.entry(
            &ATTRIBUTE_TTL,
            &made,
            GENERATION
        ));
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        let made = self.child_path(parent, name).and_then(|path| {
            let options = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .mode(mode)
                .clone();
            let file = options.open(&path)?;
            Ok((
                self.insert_path(path)?,
                self.insert_open(OpenObject::File(Arc::new(file))),
            ))
        });
        reply_or_error!(reply, made, |(made, handle)| {
            let flags = FopenFlags::FOPEN_KEEP_CACHE;
            reply.created(&ATTRIBUTE_TTL, &made, GENERATION, handle, flags);
        });
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let done = self.child_path(parent, name).and_then(fs::remove_file);
        reply_or_error!(reply, done, |()| reply.ok());
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let done = self.child_path(parent, name).and_then(fs::remove_dir);
        reply_or_error!(reply, done, |()| reply.ok());
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        _: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let done = self.child_path(parent, name).and_then(|from| {
            let to = self.child_path(new_parent, new_name)?;
            fs::rename(from, &to)?;
            self.insert_path(to)
        });
        reply_or_error!(reply, done, |_| reply.ok());
    }

    fn open(&self, _: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let opened = self.path_of(ino).and_then(|path| {
            let is_read_only = flags.0 & rustix::fs::OFlags::ACCMODE.bits() as i32 == 0;
            OpenOptions::new()
                .read(true)
                .write(!is_read_only)
                .open(path)
        });
        reply_or_error!(reply, opened, |file| {
            let handle = self.insert_open(OpenObject::File(Arc::new(file)));
            reply.opened(handle, FopenFlags::FOPEN_KEEP_CACHE);
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
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let read = self.open_file(handle).and_then(|file| {
            let mut bytes = vec![0; size as usize];
            let count = file.read_at(&mut bytes, offset)?;
            bytes.truncate(count);
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
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = self
            .open_file(handle)
            .and_then(|file| file.write_all_at(data, offset));
        reply_or_error!(reply, written, |()| reply.written(data.len() as u32));
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
        lock(&self.open_objects).remove(&handle.0);
        reply.ok();
    }

    fn opendir(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply_or_error!(reply, self.list_directory(ino), |all| {
            let handle = self.insert_open(OpenObject::Directory(Arc::new(all)));
            let flags = FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_CACHE_DIR;
            reply.opened(handle, flags);
        });
    }

    fn readdirplus(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let open = lock(&self.open_objects).get(&handle.0).cloned();
        let Some(OpenObject::Directory(all)) = open else {
            return reply.error(Errno::EBADF);
        };
        let mut own = negative_attributes();
        own.kind = FileType::Directory;
        for (at, (name, found)) in all.iter().enumerate().skip(offset as usize) {
            // Of the first two the kernel wants no attributes.
            let shown = found.as_ref().unwrap_or(&own);
            let number = if shown.ino.0 == 0 { ino } else { shown.ino };
            if reply.add(
                number,
                at as u64 + 1,
                name,
                &ATTRIBUTE_TTL,
                shown,
                GENERATION,
            ) {
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
        lock(&self.open_objects).remove(&handle.0);
        reply.ok();
    }

    fn getxattr(&self, _: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        if self.mode == ForwardingMode::Bare {
            // The kernel does not ask again.
            return reply.error(Errno::ENOSYS);
        }
        let mut value = vec![0; XATTR_BYTES_MAX];
        let read = self.path_of(ino).and_then(|path| {
            let length = lgetxattr(path, name, value.as_mut_slice())?;
            value.truncate(length);
            Ok(value)
        });
        reply_or_error!(reply, read, |value: Vec<u8>| match value.len() as u32 {
            length if size == 0 => reply.size(length),
            length if length > size => reply.error(Errno::ERANGE),
            _ => reply.data(&value),
        });
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let found = self
            .path_of(INodeNo::ROOT)
            .and_then(|path| Ok(statvfs(path)?));
        reply_or_error!(reply, found, |found: rustix::fs::StatVfs| {
            let size = found.f_bsize as u32;
            let (blocks, free) = (found.f_blocks, found.f_bfree);
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
}

/// The process with an empty directory, until it is dropped.
pub(in crate::bench) struct ForwardingMount {
    process: MinimalFileSystem,
    _source: SpreadDirectories,
}

impl ForwardingMount {
    pub(in crate::bench) fn start(kind: ForwardingMode) -> Result<Self> {
        let source = SpreadDirectories::new()?;
        let shown = source.create_directory("shown")?;
        let more: &[&str] = match kind {
            ForwardingMode::Strict => &[STRICT_ARGUMENT],
            ForwardingMode::Bare => &[],
        };
        Ok(Self {
            process: MinimalFileSystem::start(FORWARDING_PROCESS, &shown, more)?,
            _source: source,
        })
    }

    pub(in crate::bench) fn path(&self) -> &Path {
        self.process.path()
    }
}

/// Passes a directory through until it is unmounted. Arguments: the directory, where to show it,
/// and whether strictly.
pub(in crate::bench) fn run_forwarding_process(arguments: &[String]) -> Result<()> {
    let (source, shown, kind) = match arguments {
        [source, shown] => (source, shown, ForwardingMode::Bare),
        [source, shown, kind] if kind == STRICT_ARGUMENT => (source, shown, ForwardingMode::Strict),
        _ => bail!("a directory and a place to show it are needed"),
    };
    let root = (INodeNo::ROOT.0, PathBuf::from(source));
    let least = ForwardingFileSystem {
        mode: kind,
        paths: Mutex::new(HashMap::from([root])),
        open_objects: Mutex::default(),
        next_number: AtomicU64::new(1),
    };
    let mut config = session_config();
    if kind == ForwardingMode::Strict {
        config.mount_options.push(MountOption::DefaultPermissions);
    }
    Session::new(least, shown, &config)?.run()?;
    Ok(())
}
