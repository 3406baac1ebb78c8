//! Blocks of a cache volume that lie on this machine: read from their files without asking the
//! node. Fetches nothing; what is not here, or goes away meanwhile, is left to a call.

use std::collections::BTreeMap;
use std::fs::File as OsFile;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use bafs_proto::buffer::Buffer;
use bafs_proto::fd_passing::{HandoffHeader, HandoffReply, HandoffRequest, HandoffTarget};
use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex, VolumeId};
use bafs_proto::limits::BODY_BYTES_MAX;
use bafs_proto::{Error, ErrorClass, ErrorCode, Result};
use bafs_tree::{BlockLayout, BlockMap};
use bytes::Bytes;
use rustix::fs::{Mode, OFlags, openat};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::clock;
use crate::fd_passing::{self, HandoffConnection};
use crate::limits::{LOCAL_BLOCK_FILES_MAX, PIN_FILE_TIMEOUT_MS};
use crate::logic::manifest_tree::ManifestFile;
use crate::tree::Server;
use crate::volume_health::VolumeHealth;

/// A node that was silent at its door is asked for whole files again after so long.
const SILENT_NODE_PAUSE: Duration = Duration::from_secs(10);

/// What the node on this machine handed over, for as long as it may be used.
#[derive(Debug)]
pub(super) struct LocalBlocks {
    /// `None` once the node took it back or is gone.
    blocks: Arc<RwLock<Option<Arc<LocalBlockStore>>>>,
    connection: Arc<HandoffConnection>,
    revocation_task: JoinHandle<()>,
    runtime: Handle,
    /// How long the node may take to give a whole file.
    pin_timeout: Duration,
    /// When the node did not: others need not wait as well, for a while.
    silent_since: Mutex<Option<Instant>>,
}

/// The blocks that are here. Dropped, nothing of them is open any more.
#[derive(Debug)]
struct LocalBlockStore {
    map: BlockMap,
    block_bytes: u64,
    directory: OwnedFd,
    files: Mutex<OpenBlockFiles>,
    /// Bytes that were read.
    read_bytes: AtomicU64,
    /// Its lock tells the node, and a later life of it, that somebody uses the blocks.
    _users_lock: OwnedFd,
}

/// What the node did about blocks that it was asked for.
#[derive(Debug)]
pub(super) enum BlockDelivery {
    /// They can be read here now.
    Local,
    /// They came, with the digest of each.
    Bytes(Vec<Digest>, Bytes),
}

/// The files that were used last, open.
#[derive(Debug, Default)]
struct OpenBlockFiles {
    open: BTreeMap<FileIndex, (Arc<OsFile>, u64)>,
    use_count: u64,
}

impl LocalBlocks {
    /// Asks the node for its blocks. Must be called within a tokio runtime. When the node takes
    /// them back because the volume is over, `fate` hears of it; when the node is gone, calls tell.
    ///
    /// # Errors
    /// Why there is nothing to be had: the node is on another machine, or does not give it.
    pub(super) async fn open(
        server: &Server,
        volume: VolumeId,
        manifest: Digest,
        (places, block_bytes): (Option<BlockLayout>, u32),
        health: VolumeHealth,
    ) -> Result<Self> {
        let unusable = |why: String| Error::new(ErrorCode::Unsupported, why);
        let places = places
            .ok_or_else(|| unusable("the volume has too many blocks for a map".to_owned()))?;
        let what = HandoffTarget::Cache { volume, manifest };
        let handoff = fd_passing::fetch_handoff(server, what).await?;
        let HandoffHeader::Cache(header) = handoff.header else {
            return Err(unusable("something else was handed over".to_owned()));
        };
        let files = <[OwnedFd; 4]>::try_from(handoff.files);
        let Ok([directory, present, used, users]) = files else {
            return Err(unusable("too few files were handed over".to_owned()));
        };
        if header.manifest != manifest {
            return Err(unusable(
                "another state of the source was handed over".to_owned(),
            ));
        }
        let map = BlockMap::open(places, [present.as_fd(), used.as_fd()])
            .map_err(|error| unusable(format!("the block map is not usable: {error}")))?;
        let blocks = Arc::new(RwLock::new(Some(Arc::new(LocalBlockStore {
            map,
            block_bytes: u64::from(block_bytes),
            directory,
            files: Mutex::default(),
            read_bytes: AtomicU64::new(0),
            _users_lock: users,
        }))));
        let connection = Arc::new(handoff.connection);
        let (watched, given) = (Arc::clone(&connection), Arc::clone(&blocks));
        let watch = tokio::spawn(async move {
            let why = watched.wait_until_revoked().await;
            given.write().unwrap_or_else(PoisonError::into_inner).take();
            if why.class() == ErrorClass::VolumeLost {
                health.mark_lost(why);
            } else {
                tracing::info!(%why, "the agent requests blocks on this machine from now on");
            }
        });
        Ok(Self {
            blocks,
            connection,
            revocation_task: watch,
            runtime: Handle::current(),
            pin_timeout: Duration::from_millis(server.op_deadline_ms.min(PIN_FILE_TIMEOUT_MS)),
            silent_since: Mutex::new(None),
        })
    }

    /// Whether a block may be here.
    pub(super) fn has(&self, file: ManifestFile, block: u64) -> bool {
        self.blocks()
            .is_some_and(|blocks| blocks.map.has_block(file.index.0, block))
    }

    /// Reads the blocks of `range`, which is within the file, into `buffer`, and says where in it
    /// the range is; `None` when they are not all here.
    pub(super) fn read(
        &self,
        file: ManifestFile,
        range: &Range<u64>,
        buffer: &mut Vec<u8>,
    ) -> Option<Range<usize>> {
        self.blocks()?.read(file, range, buffer)
    }

    /// The open file of a file that is wholly here, which the node keeps whole until
    /// [`LocalBlocks::unpin_file`]. Waits for the node; not to be called by a thread of the
    /// runtime.
    ///
    /// # Errors
    /// Why the node does not give it.
    pub(super) fn pin_file(&self, file: FileIndex) -> Result<OwnedFd> {
        let silent_since = *self.silent_since();
        if silent_since.is_some_and(|since| clock::now() < since + SILENT_NODE_PAUSE) {
            return Err(timeout_error());
        }
        let asking = self.connection.call(HandoffRequest::PinFile { file });
        let asking = async { tokio::time::timeout(self.pin_timeout, asking).await };
        let Ok(answer) = self.runtime.block_on(asking) else {
            // It may still hold the file, for nobody.
            *self.silent_since() = Some(clock::now());
            self.unpin_file(file);
            return Err(timeout_error());
        };
        match answer? {
            (HandoffReply::Pinned, mut files) if files.len() == 1 => Ok(files.remove(0)),
            _ => {
                let text = "the node's answer does not fit the question";
                Err(Error::new(ErrorCode::Malformed, text))
            }
        }
    }

    /// Has the node bring blocks of a file, from wherever it has or gets them.
    ///
    /// # Errors
    /// The node's; `Unreachable` when it is gone, `DeadlineExceeded` when it takes long.
    pub(super) async fn fetch(
        &self,
        file: FileIndex,
        first: BlockIndex,
        count: u32,
    ) -> Result<BlockDelivery> {
        let request = HandoffRequest::ReadBlocks { file, first, count };
        match self.connection.call(request).await? {
            (HandoffReply::NowLocal, files) if files.is_empty() => Ok(BlockDelivery::Local),
            (HandoffReply::Blocks(digests), mut files) if files.len() == 1 => {
                let bytes = read_contents(&OsFile::from(files.remove(0)));
                let text = |error| format!("blocks in memory cannot be read: {error}");
                let bytes = bytes.map_err(|error| Error::new(ErrorCode::Malformed, text(error)))?;
                Ok(BlockDelivery::Bytes(digests, bytes))
            }
            _ => {
                let text = "the node's answer does not fit the question";
                Err(Error::new(ErrorCode::Malformed, text))
            }
        }
    }

    /// Gives a file back. Waits for nothing.
    pub(super) fn unpin_file(&self, file: FileIndex) {
        let connection = Arc::clone(&self.connection);
        self.runtime.spawn(async move {
            let told = connection.call(HandoffRequest::ReleaseFile { file }).await;
            if let Err(error) = told {
                tracing::debug!(%file, %error, "a whole file is given back with the connection");
            }
        });
    }

    fn silent_since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.silent_since
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn blocks(&self) -> Option<Arc<LocalBlockStore>> {
        self.blocks
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

fn timeout_error() -> Error {
    let text = "the node does not pass descriptors; the agent reads files block by block";
    Error::new(ErrorCode::DeadlineExceeded, text)
}

/// Bytes of a file that a node made in memory, at most as many as one call may carry.
fn read_contents(file: &OsFile) -> std::io::Result<Bytes> {
    let length = file.metadata()?.len().min(u64::from(BODY_BYTES_MAX));
    let mut bytes = Buffer::with_unspecified_content(usize::try_from(length).unwrap_or(0));
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes.freeze())
}

impl Drop for LocalBlocks {
    fn drop(&mut self) {
        // It holds the connection, whose end gives everything back.
        self.revocation_task.abort();
    }
}

impl LocalBlockStore {
    fn read(
        &self,
        file: ManifestFile,
        range: &Range<u64>,
        buffer: &mut Vec<u8>,
    ) -> Option<Range<usize>> {
        let index = file.index.0;
        let blocks = range.start / self.block_bytes..range.end.div_ceil(self.block_bytes);
        if !blocks.clone().all(|block| self.map.has_block(index, block)) {
            return None;
        }
        let start = blocks.start * self.block_bytes;
        let end = (blocks.end * self.block_bytes).min(file.size);
        let length = usize::try_from(end - start).ok()?;
        if buffer.len() < length {
            buffer.resize(length, 0);
        }
        let bytes = &mut buffer[..length];
        // The node takes a file without blocks off its disk, and makes another one for blocks that
        // come later: what is open may be the former.
        if !self.read_blocks(file.index, &blocks, bytes) {
            self.files().open.remove(&file.index);
            if !self.read_blocks(file.index, &blocks, bytes) {
                return None;
            }
        }
        let skip = usize::try_from(range.start - start).ok()?;
        let place = skip..skip + usize::try_from(range.end - range.start).ok()?;
        let bytes = range.end - range.start;
        let before = self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
        let kib = ((before + bytes) >> 10) - (before >> 10);
        let [kib, blocks] = [kib, blocks.end - blocks.start];
        let most = |count| u32::try_from(count).unwrap_or(u32::MAX);
        self.map.count_read(most(kib), most(blocks));
        Some(place)
    }

    /// Reads whole blocks, if they are here.
    fn read_blocks(&self, file: FileIndex, blocks: &Range<u64>, bytes: &mut [u8]) -> bool {
        let start = blocks.start * self.block_bytes;
        let read = || {
            self.file(file)?.read_exact_at(bytes, start).ok()?;
            let blocks = bytes.chunks(usize::try_from(self.block_bytes).ok()?);
            Some(blocks.map(Digest::of).collect())
        };
        self.map.read_if_unchanged(file.0, blocks.clone(), read)
    }

    fn files(&self) -> MutexGuard<'_, OpenBlockFiles> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, file: FileIndex) -> Option<Arc<OsFile>> {
        let mut files = self.files();
        files.use_count += 1;
        let uses = files.use_count;
        if let Some((opened, used)) = files.open.get_mut(&file) {
            *used = uses;
            return Some(Arc::clone(opened));
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let opened = openat(&self.directory, file.to_string(), flags, Mode::empty()).ok()?;
        let opened = Arc::new(OsFile::from(opened));
        if files.open.len() >= LOCAL_BLOCK_FILES_MAX {
            let oldest = files.open.iter().min_by_key(|(_, (_, used))| *used);
            if let Some(oldest) = oldest.map(|(file, _)| *file) {
                files.open.remove(&oldest);
            }
        }
        files.open.insert(file, (Arc::clone(&opened), uses));
        Some(opened)
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::message::{SourceEntry, SourceIdentity, SourceKind};

    use super::*;

    const BLOCK: u32 = 4096;

    #[test]
    fn a_recreated_block_file_is_reopened() {
        let directory = tempfile::tempdir().expect("directory");
        let entry = SourceEntry {
            path: "f".to_owned(),
            kind: SourceKind::File,
            identity: SourceIdentity {
                size: u64::from(BLOCK),
                mtime_ns: 1,
                ctime_ns: 1,
            },
            mode: 0o644,
        };
        let places =
            || BlockLayout::from_manifest(std::slice::from_ref(&entry), BLOCK).expect("places");
        let (told, files) = BlockMap::create(places()).expect("map");
        let [present, used] = [files[0].as_fd(), files[1].as_fd()];
        let near = LocalBlockStore {
            map: BlockMap::open(places(), [present, used]).expect("map"),
            block_bytes: u64::from(BLOCK),
            directory: OsFile::open(directory.path()).expect("open").into(),
            files: Mutex::default(),
            read_bytes: AtomicU64::new(0),
            _users_lock: OsFile::open(directory.path()).expect("open").into(),
        };
        let (path, index) = (directory.path().join("0"), FileIndex(0));
        let size = u64::from(BLOCK);
        for life in 1..4u8 {
            let bytes = vec![life; BLOCK as usize];
            std::fs::write(&path, &bytes).expect("write");
            told.set_block(0, 0, Some((u32::from(life), Digest::of(&bytes))));
            let mut buffer = Vec::new();
            let read = near.read(ManifestFile { index, size }, &(10..20), &mut buffer);
            assert_eq!(buffer[read.expect("it is here")], [life; 10]);
            told.set_block(0, 0, None);
            std::fs::remove_file(&path).expect("remove");
        }
    }
}
