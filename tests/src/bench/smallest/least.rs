//! The smallest file system that passes a directory through the kernel's FUSE: what the crate and
//! the kernel cost by themselves, without limits, leases or accounts. Not a file system to use: it
//! knows files and directories only, and one user.
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

use super::{BELIEVE, GENERATION, Smallest, absence, config};
use crate::bench::machine::SpreadDirectories;

/// Hidden first argument: this process passes a directory through.
pub(in crate::bench) const LEAST_PROCESS: &str = "--datapath-least";

/// Longest extended attribute that is passed on.
const XATTR_BYTES_MAX: usize = 256;
/// Last argument of a process that passes through strictly.
const STRICT: &str = "strict";

/// What a handle stands for.
#[derive(Clone)]
enum Open {
    File(Arc<File>),
    Directory(Arc<Vec<(OsString, Option<FileAttr>)>>),
}

/// What the file system does beside passing files through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::bench) enum Kind {
    /// Nothing.
    Bare,
    /// The kernel asks it for permissions, and for extended attributes.
    Strict,
}

struct Least {
    kind: Kind,
    /// Where each known number is.
    paths: Mutex<HashMap<u64, PathBuf>>,
    open: Mutex<HashMap<u64, Open>>,
    next: AtomicU64,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_i32)
}

fn attributes(ino: u64, found: &Metadata) -> FileAttr {
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

impl Least {
    fn path(&self, ino: INodeNo) -> io::Result<PathBuf> {
        let found = locked(&self.paths).get(&ino.0).cloned();
        found.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn below(&self, parent: INodeNo, name: &OsStr) -> io::Result<PathBuf> {
        Ok(self.path(parent)?.join(name))
    }

    fn look(&self, path: PathBuf) -> io::Result<FileAttr> {
        let found = fs::symlink_metadata(&path)?;
        locked(&self.paths).insert(found.ino(), path);
        Ok(attributes(found.ino(), &found))
    }

    fn keep(&self, open: Open) -> FileHandle {
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        locked(&self.open).insert(handle, open);
        FileHandle(handle)
    }

    fn file(&self, handle: FileHandle) -> io::Result<Arc<File>> {
        match locked(&self.open).get(&handle.0) {
            Some(Open::File(file)) => Ok(Arc::clone(file)),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn list(&self, ino: INodeNo) -> io::Result<Vec<(OsString, Option<FileAttr>)>> {
        let path = self.path(ino)?;
        let mut all = vec![(OsString::from("."), None), (OsString::from(".."), None)];
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            all.push((entry.file_name(), Some(self.look(entry.path())?)));
        }
        Ok(all)
    }
}

/// Answers, or says the error.
macro_rules! answer {
    ($reply:ident, $result:expr, $done:expr) => {
        match $result {
            Ok(value) => $done(value),
            Err(error) => $reply.error(errno(&error)),
        }
    };
}

impl Filesystem for Least {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_DO_READDIRPLUS
            | InitFlags::FUSE_READDIRPLUS_AUTO
            | InitFlags::FUSE_HANDLE_KILLPRIV_V2;
        // Only what the kernel offers is asked for, so it cannot refuse.
        let _ = config.add_capabilities(wanted & config.capabilities());
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.below(parent, name).and_then(|path| self.look(path)) {
            Ok(found) => reply.entry(&BELIEVE, &found, GENERATION),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                reply.entry(&BELIEVE, &absence(), GENERATION);
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let found = self.path(ino).and_then(fs::symlink_metadata);
        answer!(reply, found, |found| {
            reply.attr(&BELIEVE, &attributes(ino.0, &found));
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
        let done = self.path(ino).and_then(|path| {
            if let Some(size) = size {
                OpenOptions::new().write(true).open(&path)?.set_len(size)?;
            }
            fs::symlink_metadata(path)
        });
        answer!(reply, done, |found| {
            reply.attr(&BELIEVE, &attributes(ino.0, &found));
        });
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, name: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        let made = self.below(parent, name).and_then(|path| {
            fs::create_dir(&path)?;
            self.look(path)
        });
        answer!(reply, made, |made| reply.entry(&BELIEVE, &made, GENERATION));
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
        let made = self.below(parent, name).and_then(|path| {
            let options = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .mode(mode)
                .clone();
            let file = options.open(&path)?;
            Ok((self.look(path)?, self.keep(Open::File(Arc::new(file)))))
        });
        answer!(reply, made, |(made, handle)| {
            let flags = FopenFlags::FOPEN_KEEP_CACHE;
            reply.created(&BELIEVE, &made, GENERATION, handle, flags);
        });
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let done = self.below(parent, name).and_then(fs::remove_file);
        answer!(reply, done, |()| reply.ok());
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let done = self.below(parent, name).and_then(fs::remove_dir);
        answer!(reply, done, |()| reply.ok());
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
        let done = self.below(parent, name).and_then(|from| {
            let to = self.below(new_parent, new_name)?;
            fs::rename(from, &to)?;
            self.look(to)
        });
        answer!(reply, done, |_| reply.ok());
    }

    fn open(&self, _: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let opened = self.path(ino).and_then(|path| {
            let is_read_only = flags.0 & rustix::fs::OFlags::ACCMODE.bits() as i32 == 0;
            OpenOptions::new()
                .read(true)
                .write(!is_read_only)
                .open(path)
        });
        answer!(reply, opened, |file| {
            let handle = self.keep(Open::File(Arc::new(file)));
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
        let read = self.file(handle).and_then(|file| {
            let mut bytes = vec![0; size as usize];
            let count = file.read_at(&mut bytes, offset)?;
            bytes.truncate(count);
            Ok(bytes)
        });
        answer!(reply, read, |bytes: Vec<u8>| reply.data(&bytes));
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
            .file(handle)
            .and_then(|file| file.write_all_at(data, offset));
        answer!(reply, written, |()| reply.written(data.len() as u32));
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
        locked(&self.open).remove(&handle.0);
        reply.ok();
    }

    fn opendir(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        answer!(reply, self.list(ino), |all| {
            let handle = self.keep(Open::Directory(Arc::new(all)));
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
        let open = locked(&self.open).get(&handle.0).cloned();
        let Some(Open::Directory(all)) = open else {
            return reply.error(Errno::EBADF);
        };
        let mut own = absence();
        own.kind = FileType::Directory;
        for (at, (name, found)) in all.iter().enumerate().skip(offset as usize) {
            // Of the first two the kernel wants no attributes.
            let shown = found.as_ref().unwrap_or(&own);
            let number = if shown.ino.0 == 0 { ino } else { shown.ino };
            if reply.add(number, at as u64 + 1, name, &BELIEVE, shown, GENERATION) {
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
        locked(&self.open).remove(&handle.0);
        reply.ok();
    }

    fn getxattr(&self, _: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        if self.kind == Kind::Bare {
            // The kernel does not ask again.
            return reply.error(Errno::ENOSYS);
        }
        let mut value = vec![0; XATTR_BYTES_MAX];
        let read = self.path(ino).and_then(|path| {
            let length = lgetxattr(path, name, value.as_mut_slice())?;
            value.truncate(length);
            Ok(value)
        });
        answer!(reply, read, |value: Vec<u8>| match value.len() as u32 {
            length if size == 0 => reply.size(length),
            length if length > size => reply.error(Errno::ERANGE),
            _ => reply.data(&value),
        });
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let found = self.path(INodeNo::ROOT).and_then(|path| Ok(statvfs(path)?));
        answer!(reply, found, |found: rustix::fs::StatVfs| {
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
pub(in crate::bench) struct LeastShown {
    process: Smallest,
    _source: SpreadDirectories,
}

impl LeastShown {
    pub(in crate::bench) fn start(kind: Kind) -> Result<Self> {
        let source = SpreadDirectories::new()?;
        let shown = source.create_directory("shown")?;
        let more: &[&str] = match kind {
            Kind::Strict => &[STRICT],
            Kind::Bare => &[],
        };
        Ok(Self {
            process: Smallest::start(LEAST_PROCESS, &shown, more)?,
            _source: source,
        })
    }

    pub(in crate::bench) fn path(&self) -> &Path {
        self.process.path()
    }
}

/// Passes a directory through until it is unmounted. Arguments: the directory, where to show it,
/// and whether strictly.
pub(in crate::bench) fn least_process(arguments: &[String]) -> Result<()> {
    let (source, shown, kind) = match arguments {
        [source, shown] => (source, shown, Kind::Bare),
        [source, shown, kind] if kind == STRICT => (source, shown, Kind::Strict),
        _ => bail!("a directory and a place to show it are needed"),
    };
    let root = (INodeNo::ROOT.0, PathBuf::from(source));
    let least = Least {
        kind,
        paths: Mutex::new(HashMap::from([root])),
        open: Mutex::default(),
        next: AtomicU64::new(1),
    };
    let mut config = config();
    if kind == Kind::Strict {
        config.mount_options.push(MountOption::DefaultPermissions);
    }
    Session::new(least, shown, &config)?.run()?;
    Ok(())
}
