//! The blocks of one generation on this node, with the manifest and the pins that belong to them.
//! Fetches nothing.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use bafs_proto::ids::{BlockIndex, FileIndex};
use bafs_proto::limits::BODY_BYTES_MAX;
use bafs_proto::{Error, ErrorCode, Result};
use tokio::sync::watch;

use super::disk::{CacheDisk, DiskRead};
use super::file_checks::FileChecks;
use super::manifest::Manifest;
use super::pins::Pins;
use crate::cache::block_run::BlockRun;
use crate::cache::errors::run_blocking;
use crate::counters::Counters;
use crate::logic::blocks::{BlockKey, BlockTable, CopyClass};

/// What is stored of one generation.
pub(crate) struct BlockStore {
    /// The files of the source.
    pub(crate) manifest: Arc<Manifest>,
    /// The blocks that are here.
    pub(crate) disk: CacheDisk,
    capacity_bytes: AtomicU64,
    /// Which paths are pinned.
    pub(crate) pins: Arc<Pins>,
    pub(super) checks: FileChecks,
    /// Why agents must give back what they got, once they must.
    pub(super) recall: Mutex<watch::Sender<Option<Error>>>,
    /// Held while blocks are written.
    pub(super) writing: tokio::sync::Mutex<()>,
}

impl BlockStore {
    /// Opens the blocks in `directory`, made if it is not there; `table` must be empty (waits for
    /// the disk).
    ///
    /// # Errors
    /// `ServerFault` when the disk fails.
    pub(crate) fn open(
        directory: PathBuf,
        manifest: Manifest,
        table: BlockTable,
        capacity_bytes: u64,
        pins: Arc<Pins>,
        counters: Counters,
    ) -> Result<Self> {
        Ok(Self {
            disk: CacheDisk::open(directory, manifest.block_bytes(), table, counters)?,
            manifest: Arc::new(manifest),
            capacity_bytes: AtomicU64::new(capacity_bytes),
            pins,
            checks: FileChecks::default(),
            recall: Mutex::default(),
            writing: tokio::sync::Mutex::default(),
        })
    }

    /// Most bytes that it keeps.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes.load(Ordering::Relaxed)
    }

    /// Keeps at most so many bytes in so many files from now on, and evicts what is over that
    /// (waits for the disk).
    pub(crate) fn set_capacity(&self, bytes: u64, files: u64) {
        self.capacity_bytes.store(bytes, Ordering::Relaxed);
        self.disk.set_capacity(bytes, files);
    }

    /// The wanted blocks as far as the file goes; `None` when these are none.
    ///
    /// # Errors
    /// `Malformed` when they do not fit a reply, or there is no such file.
    pub(crate) fn find_run(
        &self,
        file: FileIndex,
        first: BlockIndex,
        count: u32,
    ) -> Result<Option<BlockRun>> {
        if count == 0 {
            return Ok(None);
        }
        let block_bytes = self.manifest.block_bytes();
        if u64::from(count) * u64::from(block_bytes) > u64::from(BODY_BYTES_MAX) {
            let text = format!("{count} blocks of {block_bytes} bytes do not fit a reply");
            return Err(Error::new(ErrorCode::Malformed, text));
        }
        let blocks = self.manifest.blocks_of(self.manifest.file(file)?);
        let count = blocks.saturating_sub(first.0).min(u64::from(count));
        match count {
            0 => Ok(None),
            _ => self.run(file, first.0, count).map(Some),
        }
    }

    /// `count` blocks of a file from `first` on, which must be in it.
    ///
    /// # Errors
    /// `Malformed` when there is no such file.
    pub(crate) fn run(&self, file: FileIndex, first: u64, count: u64) -> Result<BlockRun> {
        let entry = self.manifest.file(file)?;
        let last = BlockIndex(first + count - 1);
        Ok(BlockRun {
            file,
            first,
            count: count as usize,
            last_bytes: self.manifest.length_of(entry, last),
            block_bytes: self.manifest.block_bytes(),
        })
    }

    /// Reads the blocks of a run that are here.
    ///
    /// # Errors
    /// `ServerFault` when the system does not let this process read now.
    pub(crate) async fn read(self: &Arc<Self>, run: BlockRun) -> Result<DiskRead> {
        if !self.disk.has_some(&run) {
            return Ok(DiskRead::nothing(&run));
        }
        let store = self.clone();
        run_blocking(move || store.disk.read(&run)).await?
    }

    /// Changes the classes of the blocks that are here.
    ///
    /// # Errors
    /// `ServerFault` when the disk fails: then the next start sees the old classes.
    pub(crate) async fn reclassify(
        self: &Arc<Self>,
        classes: Vec<(BlockKey, CopyClass)>,
    ) -> Result<()> {
        let store = self.clone();
        run_blocking(move || store.disk.reclassify(&classes)).await?
    }

    /// The class of a block of a file, on its primary node or on another node.
    pub(crate) fn class_of(&self, file: FileIndex, is_primary: bool) -> CopyClass {
        let entry = self.manifest.entries().get(file.0 as usize);
        match is_primary {
            true if entry.is_some_and(|entry| self.pins.covers(&entry.path)) => CopyClass::Pinned,
            true => CopyClass::Primary,
            false => CopyClass::Secondary,
        }
    }

    /// Says why blocks are not stored, and what to do.
    pub(crate) fn log_bypass(&self) {
        let table = self.disk.table();
        tracing::info!(
            capacity_bytes = self.capacity_bytes(),
            used_bytes = table.used_bytes(),
            capacity_files = table.capacity_files(),
            used_files = table.used_files(),
            pinned_bytes = table.class_bytes(CopyClass::Pinned),
            "a cache volume has no space for some blocks, so each read fetches them again; give it \
             more bytes or files, or unpin blocks"
        );
    }
}
