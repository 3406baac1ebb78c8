//! A cache volume: names and attributes from memory, data block by block from the storage server
//! next to the job. Read-only; what is not a read is refused.

mod blocks;
mod local_blocks;

use std::cell::RefCell;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bafs_proto::file_op::{Errno, FileOp, FileReply, FileResult};
use bafs_proto::hash::Digest;
use bafs_proto::ids::{FileIndex, HandleId, InodeNo, VolumeId};
use bafs_proto::job_report::ObservedInputs;
use bafs_proto::limits::{IO_BYTES_MAX, MANIFEST_ENTRIES_MAX};
use bafs_proto::message::{ManifestPage, PeerCheck, ReadManifest, SourceEntry, SourceKind};
use bafs_proto::{Error, ErrorCode, Result};
use bafs_tree::BlockLayout;
use bytes::Bytes;
use nix::libc;
use tokio::runtime::Handle;

use self::blocks::BlockFetcher;
use self::local_blocks::LocalBlocks;
use super::completion::Completion;
use super::server::Server;
use crate::errno::errno_of;
use crate::limits::{DEFAULT_READ_AHEAD_KIB, PASSTHROUGH_FILE_BYTES_MIN};
use crate::logic::manifest_tree::{ManifestFile, ManifestTree, Owner};
use crate::logic::observed_names::ObservedNames;
use crate::logic::read_ahead_filter::{ReadAheadFilter, ReadPurpose};
use crate::volume_health::{VolumeHealth, is_fatal};
use crate::volume_mode::FileReads;

/// Bytes that an entry takes in the kernel's form beside its name.
const ENTRY_BYTES: u32 = 152;

thread_local! {
    /// Where a thread that answers the kernel puts what it reads from a file; it grows to the
    /// blocks of the longest read.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A cache volume with its names in memory.
#[derive(Debug)]
pub struct CacheTree {
    manifest_tree: ManifestTree,
    observed_names: Mutex<ObservedNames>,
    /// Blocks on this machine, or why there are none to be had.
    local_blocks: Result<Arc<LocalBlocks>>,
    blocks: Arc<BlockFetcher>,
    read_ahead_filter: Mutex<ReadAheadFilter>,
    /// The kernel's read-ahead.
    read_ahead_bytes: AtomicU64,
    peer_check: PeerCheck,
    health: VolumeHealth,
    runtime: Handle,
}

impl CacheTree {
    /// Reads the manifest of a cache volume. Must be called within a tokio runtime, which then
    /// fetches the blocks. All files belong to `owner`.
    ///
    /// # Errors
    /// What the server answers; `SourceChanged` when the manifest changed while it was read;
    /// `Malformed` when it is no tree.
    pub async fn open(
        server: Server,
        volume: VolumeId,
        owner: Owner,
        health: VolumeHealth,
    ) -> Result<Self> {
        let CacheManifest {
            manifest,
            block_bytes,
            peer_check,
            top,
            entries,
        } = read_manifest(&server, volume).await?;
        let places = (
            BlockLayout::from_manifest(&entries, block_bytes),
            block_bytes,
        );
        let directory = ManifestTree::build(&top, entries, owner, block_bytes)?;
        let near = LocalBlocks::open(&server, volume, manifest, places, health.clone()).await;
        let near = near.map(Arc::new).inspect_err(|why| {
            tracing::info!(%why, "blocks of the volume come through the network");
        });
        let here = near.as_ref().ok().cloned();
        let blocks = Arc::new(BlockFetcher::new(
            server,
            volume,
            (manifest, block_bytes),
            here,
        ));
        Ok(Self {
            manifest_tree: directory,
            observed_names: Mutex::default(),
            local_blocks: near,
            blocks,
            read_ahead_filter: Mutex::default(),
            read_ahead_bytes: AtomicU64::new(u64::from(DEFAULT_READ_AHEAD_KIB) << 10),
            peer_check,
            health,
            runtime: Handle::current(),
        })
    }

    /// What tells the node that blocks of other nodes are right, for people.
    pub fn explain_peer_check(&self) -> &'static str {
        match self.peer_check {
            PeerCheck::Home => "home vouches for blocks of other nodes",
            PeerCheck::FirstReader => "the node that read a block first is trusted",
            PeerCheck::Nothing => "the node trusts other nodes",
        }
    }

    /// Whether the source is one file instead of a directory.
    pub fn is_single_file(&self) -> bool {
        self.manifest_tree.is_single_file()
    }

    /// The name of the file that is all of the volume, if it is but one file.
    pub fn only_file(&self) -> Option<String> {
        match &self.manifest_tree.source_entries(InodeNo::ROOT)[..] {
            [only] if only.kind == SourceKind::File => Some(only.path.clone()),
            _ => None,
        }
    }

    pub(super) fn describe(&self, ino: InodeNo) -> Option<(String, u64)> {
        Some((
            self.manifest_tree.path(ino)?.to_owned(),
            self.manifest_tree.file(ino)?.size,
        ))
    }

    pub(super) fn passthrough_support(&self) -> (FileReads, String) {
        let (files, bytes) = self.manifest_tree.files_and_bytes();
        let mean = bytes.checked_div(files).unwrap_or(0);
        match &self.local_blocks {
            Err(why) => {
                let text = format!("blocks come through the network: {why}");
                (FileReads::Agent, text)
            }
            Ok(_) if mean < PASSTHROUGH_FILE_BYTES_MIN => {
                let text = format!(
                    "the agent reads local blocks directly; files have {mean} bytes on average, so \
                     it opens them without a request"
                );
                (FileReads::Agent, text)
            }
            Ok(_) => {
                let text = format!(
                    "the agent reads local blocks directly, and the kernel reads complete local \
                     files; files have {mean} bytes on average"
                );
                (FileReads::Passthrough, text)
            }
        }
    }

    pub(super) fn open_passthrough(&self, ino: InodeNo) -> Option<(OwnedFd, u64)> {
        let (file, near) = (
            self.manifest_tree.file(ino)?,
            self.local_blocks.as_ref().ok()?,
        );
        // A small file, or one that is not here to its end, is not worth a question.
        let last = file.size.checked_sub(1)? / self.blocks.block_bytes();
        if file.size < PASSTHROUGH_FILE_BYTES_MIN || !near.has(file, 0) || !near.has(file, last) {
            return None;
        }
        match near.pin_file(file.index) {
            Ok(opened) => Some((opened, file.size)),
            Err(why) => {
                tracing::debug!(file = %file.index, %why, "not handed over whole");
                None
            }
        }
    }

    pub(super) fn release_passthrough(&self, ino: InodeNo) {
        if let (Some(file), Ok(near)) = (self.manifest_tree.file(ino), &self.local_blocks) {
            near.unpin_file(file.index);
        }
    }

    pub(super) fn is_speculative_read(&self, ino: InodeNo, offset: u64, length: u32) -> bool {
        let Some(file) = self.manifest_tree.file(ino) else {
            return false;
        };
        let range = offset..offset.saturating_add(u64::from(length));
        let lengths = (
            self.read_ahead_bytes.load(Ordering::Relaxed),
            self.blocks.block_bytes(),
        );
        let mut around = self
            .read_ahead_filter
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let purpose = around.classify_read(file.index, &range, lengths, || {
            self.blocks.has_all(file, &range)
        });
        drop(around);
        if let ReadPurpose::DemandWindow(all) = purpose {
            // Page by page it would wait for one block after the other.
            let blocks = Arc::clone(&self.blocks);
            let all = all.start..all.end.min(file.size);
            self.runtime
                .spawn(async move { drop(blocks.read(file, &all).await) });
            return false;
        }
        purpose == ReadPurpose::Speculative
    }

    /// The kernel reads ahead, and around pages of mapped memory, as many bytes.
    pub(super) fn set_read_ahead_bytes(&self, bytes: u64) {
        self.read_ahead_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Handles are inode numbers: the kernel may leave out opening and closing.
    pub(super) fn run(&self, op: FileOp, done: Completion) {
        match op {
            FileOp::Read {
                handle,
                offset,
                length,
            } => self.read(handle, offset, length, done),
            other => done(self.answer(&other), &[]),
        }
    }

    fn answer(&self, op: &FileOp) -> FileResult {
        let directory = &self.manifest_tree;
        let attr = |ino| directory.attr(ino).ok_or(Errno(libc::ENOENT));
        let entered = match op {
            FileOp::Lookup { parent: ino, .. } | FileOp::OpenDirectory { ino } => Some(*ino),
            FileOp::ReadDirectory { handle, .. } => Some(InodeNo(handle.0)),
            _ => None,
        };
        // Its bits may permit it, above all to root.
        if entered.is_some_and(|ino| directory.is_unreadable(ino)) {
            return Err(Errno(libc::EACCES));
        }
        match op {
            FileOp::Lookup { parent, name } => {
                let found = directory.lookup(*parent, name);
                match &found {
                    Some(attr) => self.lock_names().note_found(attr.ino),
                    None => self.lock_names().note_missing(*parent, name),
                }
                found.map(FileReply::Attr).ok_or(Errno(libc::ENOENT))
            }
            FileOp::GetAttr { ino, .. } => attr(*ino).map(FileReply::Attr),
            FileOp::ReadLink { ino } => directory
                .symlink(*ino)
                .map(|target| FileReply::Bytes(target.to_vec()))
                .ok_or(Errno(libc::EINVAL)),
            FileOp::Open { ino, .. } | FileOp::OpenDirectory { ino } => Ok(FileReply::Opened {
                handle: HandleId(ino.0),
                attr: attr(*ino)?,
            }),
            FileOp::ReadDirectory {
                handle,
                cookie,
                bytes_max,
                ..
            } => self.list_directory(InodeNo(handle.0), *cookie, *bytes_max),
            FileOp::StatFs => Ok(FileReply::StatFs(directory.stat())),
            FileOp::Forget { .. }
            | FileOp::Release { .. }
            | FileOp::ReleaseDirectory { .. }
            | FileOp::Fsync { .. }
            | FileOp::FsyncDirectory { .. } => Ok(FileReply::Done),
            FileOp::GetXattr { .. } => Err(Errno(libc::ENODATA)),
            FileOp::ListXattr { .. } => Ok(FileReply::Bytes(Vec::new())),
            FileOp::Seek { .. } | FileOp::ReadFile { .. } | FileOp::ListDirectory { .. } => {
                Err(Errno(libc::EOPNOTSUPP))
            }
            FileOp::Read { .. }
            | FileOp::SetAttr { .. }
            | FileOp::MakeNode { .. }
            | FileOp::MakeDirectory { .. }
            | FileOp::MakeSymlink { .. }
            | FileOp::MakeLink { .. }
            | FileOp::Unlink { .. }
            | FileOp::RemoveDirectory { .. }
            | FileOp::Rename { .. }
            | FileOp::Create { .. }
            | FileOp::Write { .. }
            | FileOp::SetXattr { .. }
            | FileOp::RemoveXattr { .. }
            | FileOp::Allocate { .. }
            | FileOp::CopyRange { .. } => Err(Errno(libc::EROFS)),
        }
    }

    fn lock_names(&self) -> MutexGuard<'_, ObservedNames> {
        // No holder leaves them half-changed.
        let names = self.observed_names.lock();
        names.unwrap_or_else(PoisonError::into_inner)
    }

    /// What of the source was seen so far, if that is known exactly.
    pub(super) fn observed_inputs(&self) -> Option<ObservedInputs> {
        self.lock_names().inputs(&self.manifest_tree)
    }

    fn list_directory(&self, ino: InodeNo, cookie: u64, bytes_max: u32) -> FileResult {
        self.lock_names().note_listed(ino);
        let mut entries = Vec::new();
        let mut left = bytes_max;
        let listed = self.manifest_tree.read_entries(ino, cookie, |entry| {
            left = left.saturating_sub(ENTRY_BYTES + entry.name.len() as u32);
            entries.push(entry);
            left > 0
        });
        listed
            .map(|()| FileReply::Entries(entries))
            .ok_or(Errno(libc::ENOTDIR))
    }

    fn read(&self, handle: HandleId, offset: u64, length: u32, done: Completion) {
        let Some(file) = self.manifest_tree.file(InodeNo(handle.0)) else {
            return done(Err(Errno(libc::EISDIR)), &[]);
        };
        let length = u64::from(length.min(IO_BYTES_MAX));
        let range = offset.min(file.size)..offset.saturating_add(length).min(file.size);
        if range.is_empty() {
            return done(Ok(FileReply::Read { length: 0 }), &[]);
        }
        let Some(done) = self.read_local(file, &range, done) else {
            return;
        };
        if let Some(data) = self.blocks.get_buffered(file, &range) {
            return complete_read(done, &data);
        }
        let (blocks, volume_status) = (Arc::clone(&self.blocks), self.health.clone());
        self.runtime.spawn(async move {
            fetch_and_complete(&blocks, &volume_status, file, range, done).await
        });
    }
}

impl CacheTree {
    /// Answers a read of blocks that are all on this machine; gives `done` back otherwise.
    fn read_local(
        &self,
        file: ManifestFile,
        range: &Range<u64>,
        done: Completion,
    ) -> Option<Completion> {
        let Ok(near) = &self.local_blocks else {
            return Some(done);
        };
        let mut buffer = BUFFER.take();
        let left = match near.read(file, range, &mut buffer) {
            Some(place) => {
                complete_read(done, &buffer[place]);
                None
            }
            None => Some(done),
        };
        BUFFER.set(buffer);
        left
    }
}

async fn fetch_and_complete(
    blocks: &BlockFetcher,
    health: &VolumeHealth,
    file: ManifestFile,
    range: Range<u64>,
    done: Completion,
) {
    match health.run_unless_lost(blocks.read(file, &range)).await {
        Some(Ok(data)) => complete_read(done, &data),
        Some(Err(error)) => {
            let errno = errno_of(error.code);
            // The volume itself was granted: it is this file that the home may not read.
            if is_fatal(&error) && error.code != ErrorCode::RightMissing {
                health.mark_lost(error);
            }
            done(Err(errno), &[]);
        }
        None => done(Err(errno_of(ErrorCode::VolumeLost)), &[]),
    }
}

fn complete_read(done: Completion, data: &[u8]) {
    // At most IO_BYTES_MAX were asked for.
    let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
    done(Ok(FileReply::Read { length }), data);
}

/// What a cache volume shows.
struct CacheManifest {
    manifest: Digest,
    block_bytes: u32,
    peer_check: PeerCheck,
    top: SourceEntry,
    entries: Vec<SourceEntry>,
}

async fn read_manifest(server: &Server, volume: VolumeId) -> Result<CacheManifest> {
    let mut entries: Vec<SourceEntry> = Vec::new();
    let mut digest = None;
    loop {
        let first = FileIndex(u32::try_from(entries.len()).unwrap_or(u32::MAX));
        let call = ReadManifest { volume, first };
        let deadline = server.deadline();
        let (page, _) = server
            .pool
            .call_with_retries(&server.address, &server.token, call, Bytes::new(), deadline)
            .await?;
        let ManifestPage {
            manifest,
            block_bytes,
            peer_check,
            root: top,
            entries: more_entries,
            has_more: more,
        } = page;
        if *digest.get_or_insert(manifest) != manifest {
            let text = "the source changed its generation during the mount; mount again";
            return Err(Error::new(ErrorCode::SourceChanged, text));
        }
        let stuck = more && more_entries.is_empty();
        entries.extend(more_entries);
        if stuck || block_bytes == 0 || entries.len() > MANIFEST_ENTRIES_MAX {
            return Err(Error::new(
                ErrorCode::Malformed,
                "the manifest is not usable",
            ));
        }
        if !more {
            return Ok(CacheManifest {
                manifest,
                block_bytes,
                peer_check,
                top,
                entries,
            });
        }
    }
}
