//! The smallest file system that gives the kernel a file to read by itself: the cost of passthrough
//! without limits, leases, accounts or digests. It has one file, named `file`.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use fuser::{
    BackingId, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, INodeNo, InitFlags,
    KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyEmpty, ReplyEntry, ReplyOpen,
    Request, Session,
};

use super::{ATTRIBUTE_TTL, GENERATION, MinimalFileSystem, session_config};

/// Hidden first argument: this process shows a file, which the kernel reads by itself.
pub(in crate::bench) const PASSTHROUGH_PROCESS: &str = "--passthrough-file-system";

const FILE_NAME: &str = "file";
const FILE_INODE: INodeNo = INodeNo(2);

struct PassthroughFileSystem {
    file: File,
    size: u64,
    /// Files that the kernel has open, and their counts.
    backing: Mutex<(u32, Option<BackingId>)>,
}

impl PassthroughFileSystem {
    fn file_attributes(&self, ino: INodeNo) -> FileAttr {
        let is_file = ino == FILE_INODE;
        let time: SystemTime = UNIX_EPOCH;
        FileAttr {
            ino,
            size: if is_file { self.size } else { 4096 },
            blocks: self.size.div_ceil(512),
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind: match is_file {
                true => FileType::RegularFile,
                false => FileType::Directory,
            },
            perm: if is_file { 0o444 } else { 0o555 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl Filesystem for PassthroughFileSystem {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let refused = |_| io::Error::from(io::ErrorKind::Unsupported);
        config
            .add_capabilities(InitFlags::FUSE_PASSTHROUGH)
            .map_err(refused)?;
        // A file system on top of this one needs a level, and there are two.
        let depth = config.set_max_stack_depth(1);
        depth
            .map(drop)
            .map_err(|_| io::ErrorKind::Unsupported.into())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent == INodeNo::ROOT && name == FILE_NAME {
            reply.entry(
                &ATTRIBUTE_TTL,
                &self.file_attributes(FILE_INODE),
                GENERATION,
            );
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&ATTRIBUTE_TTL, &self.file_attributes(ino));
    }

    fn open(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let mut open = self.backing.lock().unwrap_or_else(PoisonError::into_inner);
        if open.1.is_none() {
            open.1 = match reply.open_backing(&self.file) {
                Ok(backing) => Some(backing),
                Err(_) => return reply.error(Errno::EIO),
            };
        }
        open.0 += 1;
        if let Some(backing) = &open.1 {
            reply.opened_passthrough(FileHandle(ino.0), FopenFlags::empty(), backing);
        }
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        let mut open = self.backing.lock().unwrap_or_else(PoisonError::into_inner);
        open.0 -= 1;
        if open.0 == 0 {
            open.1 = None;
        }
        reply.ok();
    }
}

/// The process with its file, until it is dropped.
pub(in crate::bench) struct PassthroughMount(MinimalFileSystem);

impl PassthroughMount {
    /// Shows a file to everybody.
    pub(in crate::bench) fn start(file: &Path) -> Result<Self> {
        let started = Self(MinimalFileSystem::start(PASSTHROUGH_PROCESS, file, &[])?);
        // The kernel takes files of root only.
        File::open(started.path()).context("the kernel does not read files by itself")?;
        Ok(started)
    }

    /// Where the file is.
    pub(in crate::bench) fn path(&self) -> PathBuf {
        self.0.path().join(FILE_NAME)
    }
}

/// Shows a file until it is unmounted. Arguments: the file, and where to show it.
pub(in crate::bench) fn run_passthrough_process(arguments: &[String]) -> Result<()> {
    let [file, shown] = arguments else {
        bail!("a file and a place to show it are needed");
    };
    let passing = PassthroughFileSystem {
        file: File::open(file)?,
        size: fs::metadata(file)?.len(),
        backing: Mutex::default(),
    };
    let mut config = session_config();
    // As caches are: else the kernel would ask for the time of the last access after each read.
    config.mount_options.push(MountOption::RO);
    Session::new(passing, shown, &config)?.run()?;
    Ok(())
}
