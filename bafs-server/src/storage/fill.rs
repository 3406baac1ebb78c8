//! Fills a scratch volume from a home path or from a volume of another server: lists, reads many
//! ranges at once, checks every digest, makes everything durable. What an older copy on this server
//! has need not travel again. Decides nothing about states.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bafs_proto::limits::PAGE_ENTRIES_MAX;
use bafs_proto::message::{SourceEntry, SourceKind};
use bafs_proto::path::check_relative;
use bafs_proto::replica::DataRange;
use bafs_proto::source_warning::SourceWarnings;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_tree::ROOT_FREE_BYTES;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::base_copy::{BaseCopy, KnownRange};
use super::confined_directory::{self, ConfinedDirectory};
use super::fill_source::{FillSource, RANGE_BYTES};
use super::fill_usage::FillUsage;
use super::flush::FileFlush;
use super::hard_links::HardLinks;
use super::listing_prefetch::ListingPrefetch;
use super::volume_errors::fill_disk_error;
use crate::errors::{join_result, run_blocking};
use crate::logic::space::Amount;
use crate::source::{PAGE_BYTES_MAX, entry_bytes};

/// Ranges under way at once: fills a link of 1 Gbit/s at 60 ms.
const RANGES_MAX: usize = 8;

/// Files or packs of files under way at once, so that small files overlap too.
const FILES_MAX: usize = 8;

/// Zeros in a row are left as a hole if they are as long as a block of a file system and where one
/// is: then a copy takes no more than what it was copied from.
const HOLE_BYTES_MIN: usize = 4096;

/// So many files are made durable one by one; if there are more, the whole file system is, which
/// costs the dirty data of others too but is one call.
const SINGLE_SYNCS_MAX: u64 = 64;

/// What fills a volume, and how much it may hold.
#[derive(Debug)]
pub(super) struct Fill {
    pub(super) source: FillSource,
    pub(super) limit: Amount,
    /// The tree of an older copy.
    pub(super) base_copy: Option<PathBuf>,
}

/// What became of a fill.
#[derive(Debug)]
pub(super) struct FillResult {
    /// Bytes of files that came over the network.
    pub(super) received_bytes: u64,
    /// What is not there as the source has it.
    pub(super) warnings: SourceWarnings,
}

/// Where a fill is.
struct FillProgress {
    root: Arc<ConfinedDirectory>,
    /// With the bytes of each that are counted.
    directories: Vec<(SourceEntry, u64)>,
    links: HardLinks,
    pack: FilePack,
    files: JoinSet<Result<()>>,
    made_files: u64,
}

/// Small files that are read with one call.
#[derive(Debug, Default)]
struct FilePack {
    files: Vec<(String, SourceEntry)>,
    bytes: u64,
    head_bytes: usize,
}

/// A file that is being copied.
struct FileCopy {
    root: Arc<ConfinedDirectory>,
    path: String,
    entry: Arc<SourceEntry>,
    ranges: Arc<Semaphore>,
    sync: SyncMode,
}

/// Whether a file is made durable by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SyncMode {
    EachFile,
    WholeFileSystem,
}

impl FilePack {
    fn has_room_for(&self, entry: &SourceEntry, bytes_max: u64) -> bool {
        self.files.len() < PAGE_ENTRIES_MAX
            && self.bytes + entry.identity.size <= bytes_max
            && self.head_bytes + entry_bytes(entry) <= PAGE_BYTES_MAX
    }

    fn add(&mut self, path: String, entry: SourceEntry) {
        self.bytes += entry.identity.size;
        self.head_bytes += entry_bytes(&entry);
        self.files.push((path, entry));
    }
}

impl Fill {
    /// Fills the empty directory `tree`; when this returns, its content is durable. Dropping the
    /// future stops the work.
    ///
    /// # Errors
    /// `TooLarge` when the source is larger than the limit; what the source answered;
    /// `DigestMismatch`; `NoSpaceBytes` when the disk is full, `ServerFault` when it refuses else.
    pub(super) async fn run(self, tree: &Path) -> Result<FillResult> {
        let root =
            Arc::new(ConfinedDirectory::open(tree).map_err(|e| fill_disk_error("tree", &e))?);
        // A home is not asked what is the same.
        let older = self.base_copy.filter(|_| !self.source.is_home());
        let filling = Arc::new(RunningFill {
            usage: FillUsage::new(self.limit),
            source: self.source,
            base_copy: older.and_then(|older| BaseCopy::open(&older)),
            ranges: Arc::new(Semaphore::new(RANGES_MAX)),
            warnings: Mutex::default(),
        });
        let mut progress = FillProgress {
            root,
            directories: Vec::new(),
            links: HardLinks::default(),
            pack: FilePack::default(),
            files: JoinSet::new(),
            made_files: 0,
        };
        let mut pages = ListingPrefetch::new(&filling.source, &filling.usage).await?;
        while let Some(listed) = pages.next(&filling.source).await? {
            for (place, entry) in listed.page.entries.iter().enumerate() {
                let is_new = match listed.file_id_at(place) {
                    Some(file) => progress.links.is_first(entry, file)?,
                    None => true,
                };
                if is_new {
                    filling.make_entry(entry, &mut progress).await?;
                }
            }
            filling.warnings().extend(listed.page.warnings);
            filling.start_pack(&mut progress).await?;
        }
        while let Some(done) = progress.files.join_next().await {
            join_result(done)?;
        }
        let this = filling.clone();
        run_blocking(move || {
            progress.links.make_links(&progress.root)?;
            finish_all(&progress, &this.usage)
        })
        .await?;
        let warnings = std::mem::take(&mut *filling.warnings());
        Ok(FillResult {
            received_bytes: filling.source.received_bytes.load(SeqCst),
            warnings,
        })
    }
}

/// A fill under way.
#[derive(Debug)]
pub(super) struct RunningFill {
    pub(super) source: FillSource,
    base_copy: Option<BaseCopy>,
    usage: FillUsage,
    ranges: Arc<Semaphore>,
    warnings: Mutex<SourceWarnings>,
}

impl RunningFill {
    /// What is not there as the source has it, so far.
    pub(super) fn warnings(&self) -> MutexGuard<'_, SourceWarnings> {
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes one entry, or has it made.
    async fn make_entry(
        self: &Arc<Self>,
        entry: &SourceEntry,
        progress: &mut FillProgress,
    ) -> Result<()> {
        check_relative(&entry.path)?;
        let is_root = entry.path.is_empty() && entry.kind == SourceKind::Directory;
        if !is_root {
            self.usage.add_file()?;
        }
        let path = self.source.target_path(entry)?;
        let root = progress.root.clone();
        match &entry.kind {
            SourceKind::Directory | SourceKind::UnreadableDirectory => {
                let mut entry = entry.clone();
                if entry.kind == SourceKind::UnreadableDirectory {
                    // The listing has noted it; here it is about those whom no right stops.
                    self.check_is_closed_to_jobs(&path)?;
                    entry.mode = 0;
                }
                let mut bytes = 0;
                if !is_root {
                    let this = self.clone();
                    bytes = run_blocking(move || {
                        let made = root.create_directory(&path);
                        let bytes = made.map_err(|e| fill_disk_error(&path, &e))?;
                        this.usage.add_bytes(bytes, &path)?;
                        Ok(bytes)
                    })
                    .await?;
                }
                progress.directories.push((entry, bytes));
                Ok(())
            }
            SourceKind::Symlink(target) => {
                let (target, mtime_ns) = (target.clone(), entry.identity.mtime_ns);
                let this = self.clone();
                run_blocking(move || {
                    let made = root.create_symlink(&path, &target, mtime_ns);
                    let bytes = made.map_err(|e| fill_disk_error(&path, &e))?;
                    this.usage.add_bytes(bytes, &path)
                })
                .await
            }
            SourceKind::File => {
                if let Some(bytes_max) = self.source.pack_bytes_max()
                    && entry.identity.size <= u64::from(RANGE_BYTES)
                {
                    if !progress.pack.has_room_for(entry, bytes_max) {
                        self.start_pack(progress).await?;
                    }
                    progress.pack.add(path, entry.clone());
                    return Ok(());
                }
                let sync = progress.wait_for_slot(1).await?;
                let copy = FileCopy {
                    root,
                    path,
                    entry: Arc::new(entry.clone()),
                    ranges: self.ranges.clone(),
                    sync,
                };
                progress.files.spawn(self.clone().copy_file(copy));
                Ok(())
            }
        }
    }

    /// Has the small files that were collected read and made.
    async fn start_pack(self: &Arc<Self>, progress: &mut FillProgress) -> Result<()> {
        let pack = std::mem::take(&mut progress.pack);
        if pack.files.is_empty() {
            return Ok(());
        }
        let sync = progress.wait_for_slot(pack.files.len() as u64).await?;
        let (this, root) = (self.clone(), progress.root.clone());
        progress.files.spawn(async move {
            let (pack, known) = this.clone().read_known_files(pack).await?;
            let data = match this.source.read_files(&pack.files, &known).await {
                Err(error) if this.is_unreadable(&error) => {
                    return this.copy_each(&root, pack, sync).await;
                }
                data => data?,
            };
            run_blocking(move || this.make_files(&root, &pack.files, &data, sync)).await
        });
        Ok(())
    }

    /// What the older copy has of small files.
    async fn read_known_files(
        self: Arc<Self>,
        pack: FilePack,
    ) -> Result<(FilePack, Vec<KnownRange>)> {
        run_blocking(move || {
            let files = pack
                .files
                .iter()
                .map(|(path, entry)| match &self.base_copy {
                    Some(older) => older.read_whole_file(path, entry),
                    None => KnownRange::default(),
                });
            let known = files.collect();
            Ok((pack, known))
        })
        .await
    }

    /// What the older copy has of a range of a file, if it has the file.
    async fn read_known_range(
        self: &Arc<Self>,
        path: &str,
        range: DataRange,
    ) -> Result<KnownRange> {
        if self.base_copy.is_none() {
            return Ok(KnownRange::default());
        }
        let (this, path) = (self.clone(), path.to_owned());
        let known = move || {
            this.base_copy
                .as_ref()
                .map(|older| older.read_range(&path, range))
        };
        run_blocking(move || Ok(known().unwrap_or_default())).await
    }

    /// Makes small files from their data, which follow each other.
    fn make_files(
        &self,
        root: &ConfinedDirectory,
        files: &[(String, SourceEntry)],
        mut data: &[u8],
        sync: SyncMode,
    ) -> Result<()> {
        for (path, entry) in files {
            let (own, rest) = data.split_at(usize::try_from(entry.identity.size).unwrap_or(0));
            data = rest;
            let file = create_file(root, path, entry)?;
            let beforehand = self.write_range(&file, 0, own, path)?;
            self.finish_file(&file, path, entry, beforehand, sync)?;
        }
        Ok(())
    }

    /// Copies the files of a pack one by one, of which the home may not read some.
    async fn copy_each(
        self: &Arc<Self>,
        root: &Arc<ConfinedDirectory>,
        pack: FilePack,
        sync: SyncMode,
    ) -> Result<()> {
        for (path, entry) in pack.files {
            let copy = FileCopy {
                root: root.clone(),
                path,
                entry: Arc::new(entry),
                ranges: self.ranges.clone(),
                sync,
            };
            self.clone().copy_file(copy).await?;
        }
        Ok(())
    }

    async fn copy_file(self: Arc<Self>, copy: FileCopy) -> Result<()> {
        let (root, path, entry) = (copy.root.clone(), copy.path.clone(), copy.entry.clone());
        match self.clone().copy_content(copy).await {
            Err(error) if self.is_unreadable(&error) => {
                self.make_unreadable(root, path, entry).await
            }
            done => done,
        }
    }

    async fn copy_content(self: Arc<Self>, copy: FileCopy) -> Result<()> {
        let FileCopy {
            root,
            path,
            entry,
            ranges,
            sync,
        } = copy;
        let (made, shown) = (entry.clone(), path.clone());
        let file = run_blocking(move || create_file(&root, &path, &made).map(Arc::new)).await?;
        let (mut under_way, mut beforehand) = (JoinSet::new(), 0);
        let mut flush = FileFlush::new(file.clone(), &shown);
        let mut next = Some(0);
        while let Some(from) = next {
            let map = self.source.map_file(&entry, from).await?;
            for range in map.ranges.iter().flat_map(|data| data.split(RANGE_BYTES)) {
                let stopped = |_| Error::new(ErrorCode::ServerFault, "the fill was stopped");
                let permit = ranges.clone().acquire_owned().await.map_err(stopped)?;
                while let Some(done) = under_way.try_join_next() {
                    beforehand += join_result(done)?;
                }
                flush.note_written(beforehand)?;
                let (this, entry, file) = (self.clone(), entry.clone(), file.clone());
                let path = shown.clone();
                under_way.spawn(async move {
                    let _permit = permit;
                    let known = this.read_known_range(&path, range).await?;
                    let data = this.source.read(&entry, range, &known).await?;
                    let write = move || this.write_range(&file, range.offset, &data, &entry.path);
                    run_blocking(write).await
                });
            }
            next = map.next;
        }
        while let Some(done) = under_way.join_next().await {
            beforehand += join_result(done)?;
        }
        flush.end().await?;
        run_blocking(move || self.finish_file(&file, &shown, &entry, beforehand, sync)).await
    }

    /// Writes a range, but leaves zeros as the holes they are. Gives the bytes that were taken for
    /// it, before anything was written.
    fn write_range(&self, file: &File, offset: u64, data: &[u8], path: &str) -> Result<u64> {
        let runs = data_ranges(data);
        let blocks = runs
            .iter()
            .map(|run| run.len().next_multiple_of(HOLE_BYTES_MIN));
        let bytes = blocks.sum::<usize>() as u64;
        self.usage.add_bytes(bytes, path)?;
        for run in runs {
            let at = offset + run.start as u64;
            let written = file.write_all_at(&data[run], at);
            written.map_err(|e| fill_disk_error(path, &e))?;
        }
        Ok(bytes)
    }

    /// Gives a file its bits and time, and counts what it takes.
    fn finish_file(
        &self,
        file: &File,
        path: &str,
        entry: &SourceEntry,
        beforehand: u64,
        sync: SyncMode,
    ) -> Result<()> {
        let finish = || {
            confined_directory::set_attributes(file, entry.mode, entry.identity.mtime_ns)?;
            if sync == SyncMode::EachFile {
                file.sync_all()?;
            }
            Ok(file.metadata()?.blocks() * 512)
        };
        let bytes = finish().map_err(|e: io::Error| fill_disk_error(path, &e))?;
        self.usage.replace_estimate(beforehand, bytes, path)?;
        self.source.count_file(entry.identity.size);
        Ok(())
    }
}

impl FillProgress {
    /// Waits until one more file or pack may be under way, and says how its files are made durable.
    async fn wait_for_slot(&mut self, files: u64) -> Result<SyncMode> {
        if self.files.len() >= FILES_MAX
            && let Some(done) = self.files.join_next().await
        {
            join_result(done)?;
        }
        self.made_files += files;
        Ok(if self.made_files <= SINGLE_SYNCS_MAX {
            SyncMode::EachFile
        } else {
            SyncMode::WholeFileSystem
        })
    }
}

/// Makes an empty file of the right size.
fn create_file(root: &ConfinedDirectory, path: &str, entry: &SourceEntry) -> Result<File> {
    let create = || {
        let file = root.create_file(path)?;
        file.set_len(entry.identity.size)?;
        Ok(file)
    };
    create().map_err(|e: io::Error| fill_disk_error(path, &e))
}

/// Where there is more than zeros.
fn data_ranges(data: &[u8]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (number, piece) in data.chunks(HOLE_BYTES_MIN).enumerate() {
        if piece.iter().all(|&byte| byte == 0) {
            continue;
        }
        let start = number * HOLE_BYTES_MIN;
        let end = start + piece.len();
        match runs.last_mut() {
            Some(run) if run.end == start => run.end = end,
            _ => runs.push(start..end),
        }
    }
    runs
}

/// Directories get their times and bits last, inside out: filling them changes both.
fn finish_all(progress: &FillProgress, taken: &FillUsage) -> Result<()> {
    let root = &progress.root;
    let syncs_all = progress.made_files > SINGLE_SYNCS_MAX;
    for (entry, counted) in progress.directories.iter().rev() {
        // The root stays ours to write, whatever it was at the source.
        let (mode, counted) = if entry.path.is_empty() {
            (entry.mode | 0o700, ROOT_FREE_BYTES)
        } else {
            (entry.mode, *counted)
        };
        let about = (mode, entry.identity.mtime_ns);
        let finished = root.finish_directory(&entry.path, about, !syncs_all);
        let bytes = finished.map_err(|e| fill_disk_error(&entry.path, &e))?;
        taken.add_bytes(bytes.saturating_sub(counted), &entry.path)?;
    }
    let top = root
        .open_directory("")
        .map_err(|e| fill_disk_error("tree", &e))?;
    let synced = if syncs_all {
        rustix::fs::syncfs(&top)
    } else {
        rustix::fs::fsync(&top)
    };
    synced.map_err(|e| fill_disk_error("tree", &e.into()))
}
