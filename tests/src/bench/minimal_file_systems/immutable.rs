//! The smallest file system that the kernel caches completely: files and directories are opened
//! without any message, names, attributes and pages never expire. It is the best case of a cache
//! volume whose files are in memory. Not a file system to use: its directory must not change.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use anyhow::{Result, bail};
use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, INodeNo, InitFlags, KernelConfig, LockOwner,
    MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyDirectoryPlus, ReplyEntry, ReplyOpen,
    Request, Session,
};

use super::{ATTRIBUTE_TTL, GENERATION, MinimalFileSystem, negative_attributes, session_config};

/// Hidden first argument: this process shows a directory that does not change.
pub(in crate::bench) const IMMUTABLE_PROCESS: &str = "--immutable-file-system";

/// A file or directory, with the numbers of its entries.
struct ImmutableNode {
    path: PathBuf,
    attributes: FileAttr,
    entries: Vec<(OsString, usize)>,
}

/// All files and directories; a number is a position in the list, from 1.
struct ImmutableFileSystem {
    nodes: Vec<ImmutableNode>,
    by_name: HashMap<(usize, OsString), usize>,
}

impl ImmutableFileSystem {
    fn read_tree(root: PathBuf) -> io::Result<Self> {
        let mut kept = Self {
            nodes: Vec::new(),
            by_name: HashMap::new(),
        };
        kept.add_node(root)?;
        Ok(kept)
    }

    fn add_node(&mut self, path: PathBuf) -> io::Result<usize> {
        let own = self.nodes.len() + 1;
        let found = fs::symlink_metadata(&path)?;
        self.nodes.push(ImmutableNode {
            attributes: file_attributes(own as u64, &found),
            path: path.clone(),
            entries: Vec::new(),
        });
        if found.is_dir() {
            for entry in fs::read_dir(path)? {
                let entry = entry?;
                let child = self.add_node(entry.path())?;
                self.by_name.insert((own, entry.file_name()), child);
                self.nodes[own - 1].entries.push((entry.file_name(), child));
            }
        }
        Ok(own)
    }

    fn find_node(&self, ino: INodeNo) -> Option<&ImmutableNode> {
        self.nodes.get((ino.0 as usize).checked_sub(1)?)
    }
}

fn file_attributes(ino: u64, found: &fs::Metadata) -> FileAttr {
    FileAttr {
        ino: INodeNo(ino),
        size: found.len(),
        blocks: found.blocks(),
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: match found.is_dir() {
            true => FileType::Directory,
            false => FileType::RegularFile,
        },
        perm: (found.mode() & 0o7777) as u16,
        nlink: 1,
        uid: found.uid(),
        gid: found.gid(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for ImmutableFileSystem {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_DO_READDIRPLUS
            | InitFlags::FUSE_NO_OPEN_SUPPORT
            | InitFlags::FUSE_NO_OPENDIR_SUPPORT;
        // Only capabilities that the kernel offers are requested, so it cannot reject them.
        let _ = config.add_capabilities(wanted & config.capabilities());
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.by_name.get(&(parent.0 as usize, name.to_owned()));
        match found.and_then(|number| self.find_node(INodeNo(*number as u64))) {
            Some(node) => reply.entry(&ATTRIBUTE_TTL, &node.attributes, GENERATION),
            None => reply.entry(&ATTRIBUTE_TTL, &negative_attributes(), GENERATION),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.find_node(ino) {
            Some(node) => reply.attr(&ATTRIBUTE_TTL, &node.attributes),
            None => reply.error(Errno::ESTALE),
        }
    }

    // That it cannot the kernel takes for leave to open, and keep all pages, without asking again.
    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.error(Errno::ENOSYS);
    }

    fn opendir(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.error(Errno::ENOSYS);
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let Some(node) = self.find_node(ino) else {
            return reply.error(Errno::ESTALE);
        };
        let mut bytes = vec![0; size as usize];
        match File::open(&node.path).and_then(|file| file.read_at(&mut bytes, offset)) {
            Ok(count) => reply.data(&bytes[..count]),
            Err(_) => reply.error(Errno::EIO),
        }
    }

    fn readdirplus(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let Some(node) = self.find_node(ino) else {
            return reply.error(Errno::ESTALE);
        };
        for (at, (name, number)) in node.entries.iter().enumerate().skip(offset as usize) {
            let number = INodeNo(*number as u64);
            let Some(child) = self.find_node(number) else {
                continue;
            };
            let shown = &child.attributes;
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
}

/// Shows a directory, in a process that lives until this is dropped.
pub(in crate::bench) fn start_immutable(source: &Path) -> Result<MinimalFileSystem> {
    MinimalFileSystem::start(IMMUTABLE_PROCESS, source, &[])
}

/// Shows a directory until it is unmounted. Arguments: the directory, and where to show it.
pub(in crate::bench) fn run_immutable_process(arguments: &[String]) -> Result<()> {
    let [source, shown] = arguments else {
        bail!("a directory and a place to show it are needed");
    };
    let kept = ImmutableFileSystem::read_tree(PathBuf::from(source))?;
    let mut config = session_config();
    // As caches are: else the kernel would ask for the time of the last access after each read.
    config.mount_options = vec![MountOption::RO, MountOption::DefaultPermissions];
    Session::new(kept, shown, &config)?.run()?;
    Ok(())
}
