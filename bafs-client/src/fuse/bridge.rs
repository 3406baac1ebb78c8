//! One volume as the kernel's file system: what its requests have in common. Answers none.

use std::sync::{Arc, OnceLock};

use bafs_proto::file_op::FileOp;
use bafs_proto::ids::{HandleId, InodeNo};
use fuser::{
    FileHandle, FopenFlags, INodeNo, InitFlags, KernelConfig, Notifier, ReplyEmpty, ReplyEntry,
    Request,
};

use super::convert::caller;
use super::replies;
use super::whole::WholeFiles;
use crate::tree::Done;
use crate::volume::Volume;

/// One volume as the kernel's file system.
#[derive(Debug)]
pub(super) struct Bridge {
    pub(super) volume: Arc<Volume>,
    /// Whether the kernel can do without opening files, and directories.
    pub(super) no_open: bool,
    pub(super) no_opendir: bool,
    /// Files that the kernel may read by itself; `None` when it does not offer to.
    pub(super) whole_files: Option<Arc<WholeFiles>>,
    /// The way to tell the kernel something that it did not ask for; set once there is a session.
    pub(super) notifier: Arc<OnceLock<Notifier>>,
}

impl Bridge {
    pub(super) fn new(volume: Arc<Volume>) -> Self {
        Self {
            volume,
            no_open: false,
            no_opendir: false,
            whole_files: None,
            notifier: Arc::default(),
        }
    }

    /// A file that was never opened is known by its number.
    pub(super) fn handle(&self, ino: INodeNo, handle: FileHandle) -> HandleId {
        if self.volume.mode().stateless {
            HandleId(ino.0)
        } else {
            HandleId(handle.0)
        }
    }

    pub(super) fn open_handle(&self, ino: INodeNo, handle: Option<FileHandle>) -> Option<HandleId> {
        handle
            .filter(|_| !self.volume.mode().stateless)
            .map(|handle| self.handle(ino, handle))
    }

    pub(super) fn file_flags(&self) -> FopenFlags {
        if self.volume.mode().cached {
            FopenFlags::FOPEN_KEEP_CACHE
        } else {
            FopenFlags::FOPEN_DIRECT_IO
        }
    }

    pub(super) fn directory_flags(&self) -> FopenFlags {
        if self.volume.mode().cached {
            FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_CACHE_DIR
        } else {
            FopenFlags::empty()
        }
    }

    /// Runs an operation whose answer is attributes of a name.
    pub(super) fn entry(&self, request: &Request, op: FileOp, reply: ReplyEntry) {
        let is_lookup = matches!(op, FileOp::Lookup { .. });
        let finish = replies::entry(self.volume.mode(), is_lookup, reply);
        self.volume.run(caller(request), op, &[], finish);
    }

    /// Runs an operation whose answer says nothing.
    pub(super) fn empty(&self, request: &Request, op: FileOp, reply: ReplyEmpty) {
        self.volume
            .run(caller(request), op, &[], replies::empty(reply));
    }

    /// Runs an operation that changes the content of a file. When an ordinary user does it
    /// (`by_ordinary`), the file loses the right to run as its owner first.
    pub(super) fn change(
        &self,
        request: &Request,
        (ino, op): (INodeNo, FileOp),
        data: &[u8],
        by_ordinary: bool,
        done: Done,
    ) {
        let (caller, ino) = (caller(request), InodeNo(ino.0));
        let mode = by_ordinary.then(|| self.volume.loses_privilege(ino, caller));
        let Some(mode) = mode.flatten() else {
            return self.volume.run(caller, op, data, done);
        };
        let notifier = Arc::clone(&self.notifier);
        let finish: Done = Box::new(move |result, data| {
            // The kernel left the mode to us and still believes the old one.
            let told = notifier
                .get()
                .map(|it| it.inval_inode(INodeNo(ino.0), -1, 0));
            if let Some(Err(error)) = told {
                tracing::debug!(%error, "the kernel keeps the attributes of {ino:?}");
            }
            done(result, data);
        });
        self.volume
            .run_without_privilege(caller, (ino, mode), op, data, finish);
    }

    /// Asks the kernel for what suits the volume, as far as it offers that.
    ///
    /// Not asked for: `FUSE_ATOMIC_O_TRUNC`, with which `open(O_RDONLY | O_TRUNC)` of a running
    /// program empties the file before the kernel refuses with `ETXTBSY`; `FUSE_ASYNC_DIO`, with
    /// which the pieces of a write overtake each other, and pages stay in memory that direct writes
    /// of libaio have made old.
    pub(super) fn negotiate(&mut self, config: &mut KernelConfig) {
        let mut wanted = InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_DO_READDIRPLUS
            | InitFlags::FUSE_READDIRPLUS_AUTO
            | InitFlags::FUSE_CACHE_SYMLINKS
            | InitFlags::FUSE_HANDLE_KILLPRIV_V2
            | InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP;
        let mode = self.volume.mode();
        if mode.stateless {
            wanted |= InitFlags::FUSE_NO_OPEN_SUPPORT | InitFlags::FUSE_NO_OPENDIR_SUPPORT;
        }
        if mode.whole_files {
            wanted |= InitFlags::FUSE_PASSTHROUGH;
        }
        if !mode.cached {
            // A link that somebody else replaces must be read again.
            wanted.remove(InitFlags::FUSE_CACHE_SYMLINKS);
        }
        let given = wanted & config.capabilities();
        // Only what the kernel offers is asked for, so it cannot refuse.
        let _ = config.add_capabilities(given);
        self.no_open = given.contains(InitFlags::FUSE_NO_OPEN_SUPPORT);
        self.no_opendir = given.contains(InitFlags::FUSE_NO_OPENDIR_SUPPORT);
        // A file system on top of this one needs a level, and there are two.
        if given.contains(InitFlags::FUSE_PASSTHROUGH) && config.set_max_stack_depth(1).is_ok() {
            self.whole_files = Some(Arc::default());
        }
    }
}
