//! One volume of a job as the kernel's requests see it: counts, applies ownership, and fails
//! everything once the volume is lost. Free of kernel types; the tree does the work.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bafs_proto::file_op::{
    Attr, AttrChange, Caller, DirectoryEntry, Errno, FileOp, FileReply, FileResult, TreeStat,
};
use bafs_proto::ids::{HandleId, InodeNo};
use bafs_proto::job_report::VolumeUse;
use bafs_proto::{Error, ErrorCode};
use nix::libc;
use tokio::sync::oneshot;

use crate::clock;
use crate::errno::kernel_safe_errno;
use crate::logic::manifest_tree::Owner;
use crate::memory;
use crate::sandbox::Access;
use crate::set_id_files::{SetIdFiles, clear_set_id_bits};
use crate::tree::{Completion, DataPath, Tree};
use crate::usage::{VolumeUsage, without_counts};
use crate::volume_health::VolumeHealth;
pub use crate::volume_mode::{FileReads, KernelCache, VolumeMode};

/// Owners of files, as the job sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ownership {
    /// As the tree says.
    AsStored,
    /// One user owns everything: in a user name space no other number has a meaning.
    SingleOwner {
        /// The owner in the kernel's eyes.
        visible_owner: Owner,
        /// The owner that new files get.
        stored_owner: Owner,
    },
}

/// A volume of a job: a tree, its mode, its owners and its counters. After the first data loss
/// every operation fails.
#[derive(Debug)]
pub struct Volume {
    name: String,
    tree: Tree,
    mode: VolumeMode,
    ownership: Ownership,
    /// How it is reached, for people.
    access_path: String,
    health: VolumeHealth,
    usage: VolumeUsage,
    set_id_files: SetIdFiles,
    /// Whether the last write that nobody waited for failed.
    has_failed_background_write: AtomicBool,
}

impl Volume {
    /// A volume that shows `tree`.
    pub fn new(
        name: &str,
        tree: Tree,
        mode: VolumeMode,
        ownership: Ownership,
        health: VolumeHealth,
        usage: VolumeUsage,
    ) -> Self {
        if mode.access == Access::ReadOnly {
            usage.expect_no_changes();
        }
        Self {
            name: name.to_owned(),
            tree,
            mode,
            ownership,
            access_path: String::new(),
            health,
            usage,
            set_id_files: SetIdFiles::default(),
            has_failed_background_write: AtomicBool::new(false),
        }
    }

    /// The same volume, with how it is reached and why not in a faster way, for people.
    pub fn with_access_path(self, access_path: String) -> Self {
        Self {
            access_path,
            ..self
        }
    }

    /// Name of the mount.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How the kernel treats it.
    pub fn mode(&self) -> VolumeMode {
        self.mode
    }

    /// A listing told of a file, which the kernel then opens without asking for its name.
    pub(crate) fn record_listing(&self, directory: InodeNo, entry: &DirectoryEntry) {
        if self.usage.is_collecting_names() && entry.name != b"." && entry.name != b".." {
            self.usage.record_listing(entry.ino, directory, &entry.name);
        }
    }

    /// Whether it is lost, and how it becomes so.
    pub fn health(&self) -> &VolumeHealth {
        &self.health
    }

    /// What the job did to it so far.
    pub fn usage(&self) -> VolumeUse {
        self.usage_with(None, None)
    }

    /// The job is over: whoever reads from here on does so for us.
    pub fn stop_counting_reads(&self) {
        self.usage.stop_counting_reads();
        self.tree.stop_watching_reads();
    }

    /// As [`Self::usage`], with what `Self::held` and [`Self::is_changed`] answered.
    pub fn usage_with(&self, final_stat: Option<TreeStat>, is_changed: Option<bool>) -> VolumeUse {
        let describe = |ino| self.tree.describe(ino);
        let used = VolumeUse {
            access_path: self.access_path.clone(),
            inputs: self.tree.observed_inputs(),
            ..self.usage.report(&self.name, final_stat, describe)
        };
        without_counts(used, is_changed, self.tree.first_read())
    }

    /// Whether anything differs from what it was before the job, where nobody counts operations.
    pub async fn is_changed(&self) -> Option<bool> {
        self.tree.is_changed(self.mode.access).await
    }

    /// What a volume that may be written holds now; nothing when it does not answer. Of one that
    /// was lost to a full disk, what the server told last: else nobody would know that it was full.
    pub async fn current_stat(self: &Arc<Self>) -> Option<TreeStat> {
        if self.mode.access == Access::ReadOnly || !self.mode.kernel_cache.is_caching() {
            return None;
        }
        let (told, answer) = oneshot::channel();
        let done: Completion = Box::new(move |result, _| {
            // Nobody waits any more: then nobody needs it.
            let _ = told.send(result);
        });
        let caller = Caller {
            uid: 0,
            gid: 0,
            pid: 0,
        };
        self.run(caller, FileOp::StatFs, &[], done);
        match answer.await {
            Ok(Ok(FileReply::StatFs(stat))) => Some(stat),
            _ => {
                let loss = self.health.loss();
                let is_full = loss.is_some_and(|loss| loss.code == ErrorCode::NoSpaceBytes);
                is_full.then(|| self.tree.latest_stat()).flatten()
            }
        }
    }

    /// The name of the file that is all of the volume, if it is known to be but one file.
    pub fn only_file(&self) -> Option<String> {
        self.tree.only_file()
    }

    /// Whether the volume is one file instead of a directory.
    pub fn is_single_file(&self) -> bool {
        self.tree.is_single_file()
    }

    /// The path of its operations.
    pub fn data_path(&self) -> DataPath {
        self.tree.data_path()
    }

    /// Bytes that the kernel should read ahead of a sequential reader, in KiB.
    pub fn read_ahead_kib(&self) -> u32 {
        self.tree.read_ahead_kib()
    }

    /// The kernel reads so many bytes ahead, and around pages of mapped memory.
    pub fn set_read_ahead_bytes(&self, bytes: u64) {
        self.tree.set_read_ahead_bytes(bytes);
    }

    /// The directory that is shown as it is, if the kernel does all by itself and nothing is to be
    /// mounted.
    pub fn directory(&self) -> Option<&Path> {
        self.tree.directory()
    }

    /// Has operations that wait for a server fail: its job is being killed.
    pub fn stop_waiting(&self) {
        self.tree.stop_waiting();
    }

    /// Whether changes were answered that have not reached the server.
    pub fn has_unsent_changes(&self) -> bool {
        self.tree.has_unsent_changes()
    }

    /// Ends the session with the server, and asks it to keep what was written so long, in
    /// milliseconds.
    pub async fn close(&self, keep_ms: u64) {
        self.tree.close(keep_ms).await;
    }

    /// Runs an operation; `data` is what a write writes. `done` is called once, here or later.
    pub fn run(self: &Arc<Self>, caller: Caller, op: FileOp, data: &[u8], done: Completion) {
        if self.health.loss().is_some() {
            return done(Err(Errno(libc::EIO)), &[]);
        }
        if let FileOp::SetAttr {
            ino,
            handle,
            change,
        } = &op
            && self.is_owner_noop(change)
        {
            return self.touch_owner(caller, (*ino, *handle), done);
        }
        let op = match self.apply_ownership(op, caller) {
            Ok(op) => op,
            Err(errno) => return done(Err(errno), &[]),
        };
        // What it holds the agent asks for itself.
        if caller.pid != 0 || !matches!(op, FileOp::StatFs) {
            self.usage.record_operation(&op);
        }
        let seen = ReplyContext::of(&op, self.mode.kernel_cache, &self.usage);
        self.run_observed(caller, op, data, seen, done);
    }

    fn run_observed(
        self: &Arc<Self>,
        caller: Caller,
        op: FileOp,
        data: &[u8],
        context: ReplyContext,
        done: Completion,
    ) {
        let start = clock::now();
        self.usage.begin_call(start);
        let volume = Arc::clone(self);
        let held = memory::reserve_memory(self.tree.copied_bytes(&op, data));
        let finish = move |result: FileResult, data: &[u8]| {
            let result = match result {
                Ok(reply) => Ok(volume.observe_reply(reply, context)),
                Err(errno) => Err(volume.record_failure(errno)),
            };
            volume.usage.end_call(start, clock::now());
            done(result, data);
            drop(held);
        };
        self.tree
            .run(self.to_stored_owner(caller), op, data, Box::new(finish));
    }

    /// The kernel forgot a file. Nobody waits for that, so it is no call that counts.
    pub fn forget(&self, ino: InodeNo, count: u64) {
        if self.health.loss().is_none() {
            let op = FileOp::Forget { ino, count };
            let ignored: Completion = Box::new(|_, _| {});
            self.tree.run(Caller::default(), op, &[], ignored);
        }
    }

    /// Whether the close of a file has something to wait for.
    pub fn has_blocking_close(&self) -> bool {
        self.tree.has_blocking_close()
    }

    /// A program closes a file: `done` is called when what it did with it is as safe as promised.
    pub fn close_file(self: &Arc<Self>, ino: InodeNo, done: Completion) {
        if self.health.loss().is_some() {
            return done(Err(Errno(libc::EIO)), &[]);
        }
        let start = clock::now();
        self.usage.begin_call(start);
        let volume = Arc::clone(self);
        let finish = move |result: FileResult, data: &[u8]| {
            volume.usage.end_call(start, clock::now());
            done(result.map_err(|errno| volume.record_failure(errno)), data);
        };
        self.tree.close_file(ino, Box::new(finish));
    }

    /// Whether a read through the page cache is only the kernel's guess, which may be refused.
    pub fn is_speculative_read(&self, ino: InodeNo, offset: u64, length: u32) -> bool {
        self.tree.is_speculative_read(ino, offset, length)
    }

    /// Reads from an open file.
    pub fn read(
        self: &Arc<Self>,
        caller: Caller,
        ino: InodeNo,
        handle: HandleId,
        offset: u64,
        length: u32,
        done: Completion,
    ) {
        if self.health.loss().is_some() {
            return done(Err(Errno(libc::EIO)), &[]);
        }
        let op = FileOp::Read {
            handle,
            offset,
            length,
        };
        self.run_observed(caller, op, &[], ReplyContext::Range(ino, offset), done);
    }

    /// The open file of a file that stays wholly on this machine until
    /// [`Self::release_passthrough`], and its size in bytes.
    pub fn open_passthrough(&self, ino: InodeNo) -> Option<(OwnedFd, u64)> {
        let held = || self.tree.open_passthrough(ino);
        self.health.loss().map_or_else(held, |_| None)
    }

    /// The kernel reads a file by itself from now on. What it reads is not seen here: the file
    /// counts as read once, and wholly.
    pub fn record_passthrough(&self, ino: InodeNo, size: u64) {
        self.usage.record_whole_read(ino, size);
    }

    /// Undoes [`Self::open_passthrough`].
    pub fn release_passthrough(&self, ino: InodeNo) {
        self.tree.release_passthrough(ino);
    }

    /// Changes the bits that [`Self::mode_without_set_id`] names, then runs `op`.
    pub fn run_with_set_id_cleared(
        self: &Arc<Self>,
        caller: Caller,
        (ino, mode): (InodeNo, u32),
        op: FileOp,
        data: &[u8],
        done: Completion,
    ) {
        let change = AttrChange {
            mode: Some(mode),
            ..AttrChange::default()
        };
        let volume = Arc::clone(self);
        let data = data.to_vec();
        let then = move |result: FileResult, _: &[u8]| match result {
            Ok(_) => volume.run(caller, op, &data, done),
            Err(errno) => done(Err(errno), &[]),
        };
        self.run(
            caller,
            FileOp::SetAttr {
                ino,
                handle: None,
                change,
            },
            &[],
            Box::new(then),
        );
    }

    /// The permission bits that a file must get before `caller` changes its content; `None` if
    /// nothing changes.
    pub fn mode_without_set_id(&self, ino: InodeNo, caller: Caller) -> Option<u32> {
        self.set_id_files.mode_after_change(ino, caller)
    }

    /// Takes the answer to a write of `length` bytes that nobody waits for: should it fail, the
    /// program hears of it when it closes the file at best, so whoever started the program is told
    /// as well. The kernel takes a part that was written for the whole, so that fails too.
    pub fn track_background_write(self: &Arc<Self>, length: usize, done: Completion) -> Completion {
        let volume = Arc::clone(self);
        Box::new(move |result, data| {
            let result = result.and_then(|reply| match reply {
                FileReply::Written { length: written } if written < length as u64 => {
                    Err(Errno(libc::ENOSPC))
                }
                reply => Ok(reply),
            });
            // Beyond the largest file, where the kernel would not have collected it if it knew: the
            // program's own error, which fsync or close tells it.
            if volume.mode.kernel_cache == KernelCache::WriteBack
                && result == Err(Errno(libc::EFBIG))
            {
                return done(result, data);
            }
            if let Err(errno) = result {
                let code = match errno.0 {
                    libc::ENOSPC | libc::EDQUOT => ErrorCode::NoSpaceBytes,
                    _ => ErrorCode::ServerFault,
                };
                let what = match volume.mode.kernel_cache {
                    KernelCache::WriteBack => "data that the program wrote to the kernel's cache",
                    _ => "data that the program wrote to mapped memory",
                };
                // The kernel may have a thousand pieces more that fail in the same way.
                if !volume
                    .has_failed_background_write
                    .swap(true, Ordering::Relaxed)
                {
                    let text = format!("{what} are lost: {errno:?}");
                    volume.health.report_data_loss(Error::new(code, text));
                }
            } else {
                volume
                    .has_failed_background_write
                    .store(false, Ordering::Relaxed);
            }
            done(result, data);
        })
    }

    /// The error that the program gets; what the volume had no space for is counted.
    fn record_failure(&self, errno: Errno) -> Errno {
        self.usage.record_failure(errno);
        kernel_safe_errno(errno)
    }

    fn to_stored_owner(&self, caller: Caller) -> Caller {
        match self.ownership {
            Ownership::AsStored => caller,
            Ownership::SingleOwner {
                stored_owner: stored,
                ..
            } => Caller {
                uid: stored.uid,
                gid: stored.gid,
                ..caller
            },
        }
    }

    /// Adapts a change of ownership, and of content, to who may change what.
    fn apply_ownership(&self, op: FileOp, caller: Caller) -> Result<FileOp, Errno> {
        let FileOp::SetAttr {
            ino,
            handle,
            mut change,
        } = op
        else {
            return Ok(op);
        };
        if let Ownership::SingleOwner {
            visible_owner: shown,
            ..
        } = self.ownership
        {
            if !is_owner_kept(&change, shown) {
                return Err(Errno(libc::EPERM));
            }
            (change.uid, change.gid) = (None, None);
        }
        let takes_away = change.size.is_some() || change.uid.is_some() || change.gid.is_some();
        if takes_away && change.mode.is_none() {
            change.mode = self.mode_without_set_id(ino, caller);
        }
        if change == AttrChange::default() {
            return Ok(FileOp::GetAttr { ino, handle });
        }
        Ok(FileOp::SetAttr {
            ino,
            handle,
            change,
        })
    }

    /// Whether a change gives a file the owner that all have, and does nothing else.
    fn is_owner_noop(&self, change: &AttrChange) -> bool {
        let Ownership::SingleOwner {
            visible_owner: shown,
            ..
        } = self.ownership
        else {
            return false;
        };
        let only_owner = AttrChange {
            uid: change.uid,
            gid: change.gid,
            ..AttrChange::default()
        };
        let gives_one = change.uid.is_some() || change.gid.is_some();
        gives_one && *change == only_owner && is_owner_kept(change, shown)
    }

    /// Does to a file what a change of its owner does beside that. The tree is not told an owner:
    /// it may belong to a user that cannot give files to ours.
    fn touch_owner(
        self: &Arc<Self>,
        caller: Caller,
        (ino, handle): (InodeNo, Option<HandleId>),
        done: Completion,
    ) {
        let volume = Arc::clone(self);
        let then = move |result: FileResult, data: &[u8]| match result {
            Ok(FileReply::Attr(attr)) if !attr.is_symlink() => {
                let mode = match attr.is_directory() {
                    true => attr.mode & 0o7777,
                    false => clear_set_id_bits(attr.mode, || true),
                };
                // Be it the one that it has: the time of change moves.
                let change = AttrChange {
                    mode: Some(mode),
                    ..AttrChange::default()
                };
                let op = FileOp::SetAttr {
                    ino,
                    handle,
                    change,
                };
                volume.run(caller, op, &[], done);
            }
            other => done(other, data),
        };
        self.run(caller, FileOp::GetAttr { ino, handle }, &[], Box::new(then));
    }

    fn observe_reply(&self, reply: FileReply, context: ReplyContext) -> FileReply {
        match reply {
            FileReply::Attr(attr) => {
                let attr = self.observe_attr(attr);
                context.record_name(&self.usage, self.mode.kernel_cache, &attr);
                FileReply::Attr(attr)
            }
            FileReply::Opened { handle, attr } => {
                let attr = self.observe_attr(attr);
                context.record_name(&self.usage, self.mode.kernel_cache, &attr);
                if !self.mode.kernel_cache.is_caching() {
                    self.usage.record_size(attr.ino, attr.size);
                }
                FileReply::Opened { handle, attr }
            }
            FileReply::Entries(mut entries) => {
                for entry in &mut entries {
                    entry.attr = entry.attr.map(|attr| self.observe_attr(attr));
                }
                FileReply::Entries(entries)
            }
            FileReply::Written { length } => {
                self.usage.record_write(length);
                FileReply::Written { length }
            }
            FileReply::Read { length } => {
                if let ReplyContext::Range(ino, offset) = context {
                    self.usage.record_read(ino, offset, length.into());
                }
                FileReply::Read { length }
            }
            reply @ (FileReply::Done
            | FileReply::Bytes(_)
            | FileReply::StatFs(_)
            | FileReply::Position(_)) => reply,
        }
    }

    fn observe_attr(&self, mut attr: Attr) -> Attr {
        if let Ownership::SingleOwner {
            visible_owner: shown,
            ..
        } = self.ownership
        {
            (attr.uid, attr.gid) = (shown.uid, shown.gid);
        }
        self.set_id_files.observe_attr(&attr);
        attr
    }
}

/// Whether a change leaves a file to this owner.
fn is_owner_kept(change: &AttrChange, owner: Owner) -> bool {
    let is = |wanted: Option<u32>, own| wanted.is_none_or(|wanted| wanted == own);
    is(change.uid, owner.uid) && is(change.gid, owner.gid)
}

/// What an answer tells beside itself.
enum ReplyContext {
    Nothing,
    /// The name of a file: for the report on touched pages of trees without any caching (a cache
    /// volume knows its names, and scratch volumes do not report pages), and until the first opened
    /// file is known.
    Name(InodeNo, Vec<u8>),
    /// A read of this file, from this byte on.
    Range(InodeNo, u64),
}

impl ReplyContext {
    fn of(op: &FileOp, cache: KernelCache, usage: &VolumeUsage) -> Self {
        if cache == KernelCache::Immutable || (cache.is_caching() && !usage.is_collecting_names()) {
            return Self::Nothing;
        }
        match op {
            FileOp::Lookup { parent, name }
            | FileOp::Create { parent, name, .. }
            | FileOp::MakeDirectory { parent, name, .. }
            | FileOp::MakeLink { parent, name, .. } => Self::Name(*parent, name.clone()),
            _ => Self::Nothing,
        }
    }

    fn record_name(&self, usage: &VolumeUsage, cache: KernelCache, attr: &Attr) {
        if let Self::Name(parent, name) = self {
            if !cache.is_caching() {
                usage.record_name(attr.ino, *parent, name, attr.size);
            }
            usage.record_lookup(attr.ino, *parent, name);
        }
    }
}
