//! One volume as the kernel's file system: what its requests have in common. Answers none.

use std::sync::{Arc, OnceLock};

use bafs_proto::file_op::{Attr, Caller, FileOp};
use bafs_proto::ids::{HandleId, InodeNo};
use bafs_proto::limits::IO_BYTES_MAX;
use fuser::{FileHandle, FopenFlags, INodeNo, InitFlags, KernelConfig, Notifier};

use super::completions;
use super::passthrough::PassthroughFiles;
use super::reply_traits::{EmptyReply, EntryReply};
use super::write_back::WriteBackTracker;
use crate::limits::SHARED_WRITE_BYTES_MAX;
use crate::tree::Completion;
use crate::volume::{FileReads, KernelCache, Volume};

const OWNER_READ_MODE: u32 = 0o400;

/// One volume as the kernel's file system. All clones are the same one.
#[derive(Debug, Clone)]
pub(super) struct VolumeFileSystem {
    pub(super) volume: Arc<Volume>,
    /// What the kernel and we agreed on; set before its first request.
    features: Arc<OnceLock<KernelFeatures>>,
    reader_mode: ReaderMode,
    /// The way to tell the kernel something that it did not ask for; set once there is a session.
    pub(super) notifier: Arc<OnceLock<Notifier>>,
}

/// Who takes the kernel's requests for a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReaderMode {
    /// Threads of its own, by its device.
    OwnThreads,
    /// A ring for each processor, beside such threads.
    Rings,
    /// Threads that read for all volumes beyond the first.
    SharedThreads,
}

/// What the kernel and we agreed on when the volume was mounted.
#[derive(Debug, Default)]
pub(super) struct KernelFeatures {
    /// Whether the kernel can do without opening files, and directories.
    pub(super) no_open: bool,
    pub(super) no_opendir: bool,
    /// Whether it waits for a ring before it asks anything.
    pub(super) has_rings: bool,
    /// Files that the kernel may read by itself; `None` when it does not offer to.
    pub(super) passthrough: Option<Arc<PassthroughFiles>>,
    /// Writes that the kernel collects; `None` when it sends each at once.
    pub(super) write_back: Option<WriteBackTracker>,
}

impl VolumeFileSystem {
    pub(super) fn new(volume: Arc<Volume>, serving: ReaderMode) -> Self {
        Self {
            volume,
            features: Arc::default(),
            reader_mode: serving,
            notifier: Arc::default(),
        }
    }

    pub(super) fn features(&self) -> &KernelFeatures {
        self.features.get_or_init(KernelFeatures::default)
    }

    pub(super) fn reader_mode(&self) -> ReaderMode {
        self.reader_mode
    }

    /// A file that was never opened is known by its number.
    pub(super) fn handle(&self, ino: INodeNo, handle: FileHandle) -> HandleId {
        if self.volume.mode().kernel_cache == KernelCache::Immutable {
            HandleId(ino.0)
        } else {
            HandleId(handle.0)
        }
    }

    pub(super) fn open_handle(&self, ino: INodeNo, handle: Option<FileHandle>) -> Option<HandleId> {
        handle
            .filter(|_| self.volume.mode().kernel_cache != KernelCache::Immutable)
            .map(|handle| self.handle(ino, handle))
    }

    pub(super) fn file_flags(&self) -> FopenFlags {
        if self.volume.mode().kernel_cache.is_caching() {
            FopenFlags::FOPEN_KEEP_CACHE
        } else {
            FopenFlags::FOPEN_DIRECT_IO
        }
    }

    /// What the kernel is told of an opened file. To collect writes it reads what surrounds them;
    /// a file that its owner may not read cannot be opened for that, so it is written directly.
    pub(super) fn open_flags(&self, writes_only: bool) -> impl Fn(&Attr) -> FopenFlags + use<> {
        let (flags, collects) = (self.file_flags(), self.features().write_back.is_some());
        move |attr| match writes_only && collects && attr.mode & OWNER_READ_MODE == 0 {
            true => FopenFlags::FOPEN_DIRECT_IO,
            false => flags,
        }
    }

    /// Takes the answer to a request that opens a file.
    pub(super) fn track_open(&self, done: Completion) -> Completion {
        match &self.features().write_back {
            Some(collected) => collected.track_open(done),
            None => done,
        }
    }

    pub(super) fn directory_flags(&self) -> FopenFlags {
        if self.volume.mode().kernel_cache.is_caching() {
            FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_CACHE_DIR
        } else {
            FopenFlags::empty()
        }
    }

    /// Runs an operation whose answer is attributes of a name.
    pub(super) fn run_entry_operation(&self, caller: Caller, op: FileOp, reply: impl EntryReply) {
        let is_lookup = matches!(op, FileOp::Lookup { .. });
        let finish =
            completions::entry_completion(self.volume.mode().kernel_cache, is_lookup, reply);
        self.volume.run(caller, op, &[], finish);
    }

    /// Runs an operation whose answer says nothing.
    pub(super) fn run_empty_operation(&self, caller: Caller, op: FileOp, reply: impl EmptyReply) {
        self.volume
            .run(caller, op, &[], completions::empty_completion(reply));
    }

    /// Runs an operation that changes the content of a file. When an ordinary user does it
    /// (`by_ordinary`), the file loses the right to run as its owner first.
    pub(super) fn run_content_change(
        &self,
        caller: Caller,
        (ino, op): (INodeNo, FileOp),
        data: &[u8],
        is_unprivileged: bool,
        done: Completion,
    ) {
        let ino = InodeNo(ino.0);
        let mode = is_unprivileged.then(|| self.volume.mode_without_set_id(ino, caller));
        let Some(mode) = mode.flatten() else {
            return self.volume.run(caller, op, data, done);
        };
        let notifier = Arc::clone(&self.notifier);
        let finish: Completion = Box::new(move |result, data| {
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
            .run_with_set_id_cleared(caller, (ino, mode), op, data, finish);
    }

    /// The largest write that the kernel may send, in bytes.
    pub(super) fn write_bytes_max(&self) -> u32 {
        match self.reader_mode {
            ReaderMode::OwnThreads | ReaderMode::Rings => IO_BYTES_MAX,
            ReaderMode::SharedThreads => SHARED_WRITE_BYTES_MAX,
        }
    }

    /// Asks the kernel for what suits the volume, as far as it offers that.
    ///
    /// Not asked for: `FUSE_ATOMIC_O_TRUNC`, with which `open(O_RDONLY | O_TRUNC)` of a running
    /// program empties the file before the kernel refuses with `ETXTBSY`; `FUSE_ASYNC_DIO`, with
    /// which the pieces of a write overtake each other, and pages stay in memory that direct writes
    /// of libaio have made old.
    pub(super) fn negotiate(&self, config: &mut KernelConfig) {
        let mut wanted = InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_DO_READDIRPLUS
            | InitFlags::FUSE_READDIRPLUS_AUTO
            | InitFlags::FUSE_CACHE_SYMLINKS
            | InitFlags::FUSE_HANDLE_KILLPRIV_V2
            | InitFlags::FUSE_ABORT_ERROR
            | InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP;
        let mode = self.volume.mode();
        if mode.kernel_cache == KernelCache::Immutable {
            wanted |= InitFlags::FUSE_NO_OPEN_SUPPORT | InitFlags::FUSE_NO_OPENDIR_SUPPORT;
        }
        // The readers that volumes share have no way to give the kernel a file.
        if mode.file_reads == FileReads::Passthrough
            && self.reader_mode != ReaderMode::SharedThreads
        {
            wanted |= InitFlags::FUSE_PASSTHROUGH;
        }
        if self.reader_mode == ReaderMode::Rings {
            wanted |= InitFlags::FUSE_OVER_IO_URING;
        }
        if mode.kernel_cache == KernelCache::WriteBack {
            wanted |= InitFlags::FUSE_WRITEBACK_CACHE;
        }
        if !mode.kernel_cache.is_caching() {
            // A link that somebody else replaces must be read again.
            wanted.remove(InitFlags::FUSE_CACHE_SYMLINKS);
        }
        let given = wanted & config.capabilities();
        // Only what the kernel offers is asked for, so it cannot refuse.
        let _ = config.add_capabilities(given);
        // A file system on top of this one needs a level, and there are two.
        let passes =
            given.contains(InitFlags::FUSE_PASSTHROUGH) && config.set_max_stack_depth(1).is_ok();
        // The kernel says this once.
        let _ = self.features.set(KernelFeatures {
            no_open: given.contains(InitFlags::FUSE_NO_OPEN_SUPPORT),
            no_opendir: given.contains(InitFlags::FUSE_NO_OPENDIR_SUPPORT),
            has_rings: given.contains(InitFlags::FUSE_OVER_IO_URING),
            passthrough: passes.then(Arc::default),
            write_back: given
                .contains(InitFlags::FUSE_WRITEBACK_CACHE)
                .then(WriteBackTracker::default),
        });
    }
}
