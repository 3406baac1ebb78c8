//! The blocks of a cache volume on disk: one sparse file for each source file. Fetches nothing.
//!
//! Order of writing: data, then journal, then table; of dropping: table, then journal, then data.
//! So the table never names bytes that are not there, and the journal may promise too much (the
//! digest tells) but what it forgot is swept at the next start.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use bafs_proto::Result;
use bafs_proto::buffer::Buffer;
use bafs_proto::hash::Digest;
use bafs_proto::ids::FileIndex;
use bytes::Bytes;
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::io::Errno;

use super::fault;
use super::journal::{self, Journal, JournalEntry};
use super::keep::is_full;
use super::near::{self, NearMap};
pub(crate) use super::run::Run;
use crate::counters::Counters;
use crate::logic::blocks::{BlockKey, BlockTable, CopyClass, StoredBlock, charged_bytes};

/// Blocks that were read from disk.
#[derive(Debug)]
pub(crate) struct Local {
    /// Bytes of the whole run; anything where a block is not here.
    pub(crate) bytes: Buffer,
    /// Digest of each block that is here.
    pub(crate) digests: Vec<Option<Digest>>,
}

impl Local {
    /// All of a run, which is here.
    pub(super) fn whole(self) -> (Vec<Digest>, Bytes) {
        let digests = self.digests.into_iter().flatten().collect();
        (digests, self.bytes.freeze())
    }

    /// None of a run.
    pub(crate) fn nothing(run: &Run) -> Self {
        Self {
            bytes: Buffer::with_unspecified_content(run.bytes()),
            digests: vec![None; run.count],
        }
    }
}

/// The blocks of one generation of a cache volume.
pub(crate) struct CacheDisk {
    pub(super) directory: PathBuf,
    pub(super) block_bytes: u32,
    shelf: Mutex<Shelf>,
    pub(super) journal: Journal,
    /// Held while a file is held or let go, so that looking who has it open disturbs nobody.
    pub(super) holding: Mutex<()>,
    /// Files whose bytes were all compared with their digests, and when they changed last.
    compared: Mutex<BTreeMap<FileIndex, near::Stamp>>,
    /// What the table gave up and is still on disk, because somebody has it open or the disk
    /// refused.
    left: Mutex<Vec<(BlockKey, u32)>>,
    /// Whether damage was found where somebody reads without digests.
    pub(super) hurt: AtomicBool,
    /// Held for reading while what is written is on disk but not in the table, for writing while
    /// the journal is made anew of the table.
    pub(super) keeping: RwLock<()>,
    /// True when the generation is over. Whoever changes the disk holds it for reading.
    retired: RwLock<bool>,
    /// Bytes that it leaves free on its file system; 0 until jobs found that full.
    pub(super) spare: AtomicU64,
    pub(super) counters: Counters,
}

/// The table of blocks, and what agents are told of it.
struct Shelf {
    table: BlockTable,
    near: Option<NearMap>,
}

/// The table of blocks for whoever holds it. What changes in it, agents of this machine see before
/// anybody else can hold it.
pub(crate) struct TableGuard<'a>(MutexGuard<'a, Shelf>);

impl Deref for TableGuard<'_> {
    type Target = BlockTable;

    fn deref(&self) -> &BlockTable {
        &self.0.table
    }
}

impl DerefMut for TableGuard<'_> {
    fn deref_mut(&mut self) -> &mut BlockTable {
        &mut self.0.table
    }
}

impl Drop for TableGuard<'_> {
    fn drop(&mut self) {
        let Shelf { table, near } = &mut *self.0;
        if let Some(near) = near {
            near.tell(table.take_changes());
        }
    }
}

impl TableGuard<'_> {
    /// What agents are told; `None` while there are none.
    pub(super) fn near(&mut self) -> &mut Option<NearMap> {
        &mut self.0.near
    }

    /// Whether an agent found other bytes in a block than there should be.
    fn is_doubted(&mut self, key: BlockKey) -> bool {
        self.0
            .near
            .as_ref()
            .is_some_and(|near| near.take_doubt(key))
    }

    /// Takes over what agents used without asking, if a block of this length drives others out.
    pub(super) fn note_near_uses(&mut self, length: u32) {
        if self.is_use_import_due(length) {
            let uses = self.0.near.as_ref().map(NearMap::take_uses);
            self.import_uses(uses.unwrap_or_default());
        }
    }
}

impl CacheDisk {
    /// Opens the blocks in `directory`, made if it is not there; `table` must be empty.
    ///
    /// # Errors
    /// `ServerFault` when the disk does not do it.
    pub(crate) fn open(
        directory: PathBuf,
        block_bytes: u32,
        mut table: BlockTable,
        counters: Counters,
    ) -> Result<Self> {
        let blocks = directory.join("blocks");
        std::fs::create_dir_all(&blocks).map_err(|e| fault("make the directory", &blocks, e))?;
        let left = near::leave_survivors(&directory)?;
        let (journal, entries) = Journal::open(directory.join("journal"))?;
        let mut live: BTreeMap<BlockKey, (usize, u32, Digest, CopyClass)> = BTreeMap::new();
        for (age, entry) in entries.into_iter().enumerate() {
            match entry {
                JournalEntry::Keep {
                    key,
                    length,
                    digest,
                    class,
                } if length <= block_bytes => {
                    live.insert(key, (age, length, digest, class));
                }
                JournalEntry::Keep { key, .. } | JournalEntry::Drop { key } => {
                    live.remove(&key);
                }
            }
        }
        let lost = live.keys().filter(|key| left.contains(&key.file));
        let lost: Vec<_> = lost.map(|key| JournalEntry::Drop { key: *key }).collect();
        journal.append(&lost)?;
        live.retain(|key, _| !left.contains(&key.file));
        let mut by_age: Vec<_> = live.into_iter().collect();
        by_age.sort_by_key(|(_, (age, ..))| *age);
        for (key, (_, length, digest, class)) in by_age {
            // What finds no room any more is swept below.
            let _ = table.restore(key, length, digest, class);
        }
        let shelf = Mutex::new(Shelf { table, near: None });
        let retired = RwLock::new(false);
        let disk = Self {
            directory,
            block_bytes,
            shelf,
            journal,
            holding: Mutex::new(()),
            compared: Mutex::default(),
            left: Mutex::default(),
            hurt: AtomicBool::new(false),
            keeping: RwLock::default(),
            retired,
            spare: AtomicU64::new(0),
            counters,
        };
        disk.sweep()?;
        Ok(disk)
    }

    /// The table of blocks. Hold it shortly: every read needs it.
    pub(crate) fn table(&self) -> TableGuard<'_> {
        TableGuard(self.shelf.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether any block of a run is here; no use of it.
    pub(crate) fn holds_some(&self, run: &Run) -> bool {
        let table = self.table();
        (0..run.count).any(|n| table.contains(run.key(n)))
    }

    /// Whether all blocks of a run are here; no use of them.
    pub(crate) fn holds_all(&self, run: &Run) -> bool {
        let table = self.table();
        (0..run.count).all(|n| table.contains(run.key(n)))
    }

    /// Counts what is here of a run as used now.
    pub(crate) fn use_all(&self, run: &Run) {
        let mut table = self.table();
        for n in 0..run.count {
            table.find(run.key(n));
        }
    }

    /// Somebody got damaged bytes of a run from here: they are compared with their digests before
    /// anybody gets them again.
    pub(crate) fn doubt(&self, run: &Run) {
        let mut table = self.table();
        (0..run.count).for_each(|n| table.mark_unverified(run.key(n)));
    }

    /// Whether agents on this machine can read all blocks of a run by themselves.
    pub(crate) fn shows_all(&self, run: &Run) -> bool {
        let mut table = self.table();
        let readable = (0..run.count).all(|n| table.is_readable(run.key(n)));
        readable && table.near().is_some()
    }

    /// Reads the blocks of a run that are here (waits for the disk). Bytes that do not match
    /// their digest are dropped and counted.
    ///
    /// # Errors
    /// `ServerFault` when the system does not let this process read now.
    pub(crate) fn read(&self, run: &Run) -> Result<Local> {
        let found: Vec<Option<StoredBlock>> = {
            let mut table = self.table();
            let find = |n| {
                if table.is_doubted(run.key(n)) {
                    table.mark_unverified(run.key(n));
                }
                table.find(run.key(n))
            };
            (0..run.count).map(find).collect()
        };
        let mut local = Local::nothing(run);
        if found.iter().all(Option::is_none) {
            return Ok(local);
        }
        let mut bad = vec![false; run.count];
        let path = self.path_of(run.file);
        let refused = |e| fault("read blocks", &path, e);
        let file = match open_blocks(OpenOptions::new().read(true), &path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(refused(e)),
            file => file.ok(),
        };
        let mut start = 0;
        while start < run.count {
            let here = found[start..]
                .iter()
                .take_while(|held| held.is_some())
                .count();
            if here == 0 {
                start += 1;
                continue;
            }
            let mut read = |n: usize, count: usize| {
                let target = &mut local.bytes[run.range(n, count)];
                let file = file.as_ref().ok_or(std::io::ErrorKind::UnexpectedEof)?;
                file.read_exact_at(target, run.at(n))
            };
            if read(start, here).is_err() {
                // Some of them may be good.
                for (n, bad) in bad.iter_mut().enumerate().skip(start).take(here) {
                    *bad = match read(n, 1) {
                        Err(e) if !is_damage(&e) => return Err(refused(e)),
                        read => read.is_err(),
                    };
                }
            }
            start += here;
        }
        self.check(run, &found, &mut bad, &mut local);
        Ok(local)
    }

    /// Compares what is read for the first time with its digest, and leaves out what was dropped
    /// while it was read.
    fn check(&self, run: &Run, found: &[Option<StoredBlock>], bad: &mut [bool], local: &mut Local) {
        let mut checked = Vec::new();
        for (n, held) in found.iter().enumerate() {
            if let Some(held) = held.filter(|held| !held.is_verified && !bad[n]) {
                bad[n] = Digest::of(&local.bytes[run.range(n, 1)]) != held.digest;
                checked.push((run.key(n), held.stamp));
            }
        }
        if bad.contains(&true) {
            self.drop_bad(run, found, bad);
        }
        let mut table = self.table();
        for (key, stamp) in checked {
            table.mark_verified(key, stamp);
        }
        for (n, held) in found.iter().enumerate() {
            // A block that was dropped meanwhile may have been read as a hole.
            let same = held.filter(|held| table.has_stamp(run.key(n), held.stamp));
            local.digests[n] = same.filter(|_| !bad[n]).map(|held| held.digest);
        }
    }

    /// Notes what is out of the table and still on disk.
    pub(super) fn free_later(&self, pieces: impl IntoIterator<Item = (BlockKey, u32)>) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        left.extend(pieces);
    }

    /// Frees what was noted so, as far as nobody has it open, unless the generation is over (waits
    /// for the disk).
    ///
    /// # Errors
    /// `ServerFault` when the disk does not do it; it is still noted then.
    pub(super) fn tidy(&self) -> Result<()> {
        match *self.retired() {
            true => Ok(()),
            false => self.free_left(),
        }
    }

    /// As [`CacheDisk::tidy`], for who knows that the generation goes on.
    pub(super) fn free_left(&self) -> Result<()> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        if left.is_empty() {
            self.drop_empty_files();
            return Ok(());
        }
        let (stay, go): (Vec<_>, Vec<_>) = {
            let table = self.table();
            left.drain(..)
                .partition(|(key, _)| table.is_file_held(key.file))
        };
        *left = stay;
        let freed = self.punch(&go);
        if freed.is_ok() {
            let mut table = self.table();
            go.iter().for_each(|(key, _)| table.release_space(*key));
            drop(table);
            self.drop_empty_files();
            return freed;
        }
        // One that the disk refuses must not keep the others.
        let mut refused = Ok(());
        for piece in go {
            match self.punch(&[piece]) {
                Ok(()) => self.table().release_space(piece.0),
                Err(error) => {
                    left.push(piece);
                    refused = Err(error);
                }
            }
        }
        self.drop_empty_files();
        refused
    }

    /// Files whose bytes were compared, with their state then.
    pub(super) fn compared(&self) -> MutexGuard<'_, BTreeMap<FileIndex, near::Stamp>> {
        self.compared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes why blocks are here, as far as they are (waits for the disk).
    ///
    /// # Errors
    /// `ServerFault` when the disk does not do it: then the next start sees the old classes.
    pub(crate) fn reclassify(&self, classes: &[(BlockKey, CopyClass)]) -> Result<()> {
        let retired = self.retired.read().unwrap_or_else(PoisonError::into_inner);
        if *retired {
            return Ok(());
        }
        let mut entries = Vec::new();
        {
            let mut table = self.table();
            for &(key, class) in classes {
                if let Some(StoredBlock { length, digest, .. }) = table.reclassify(key, class) {
                    entries.push(JournalEntry::Keep {
                        key,
                        length,
                        digest,
                        class,
                    });
                }
            }
        }
        if entries.is_empty() {
            return Ok(());
        }
        self.journal.append(&entries)?;
        // What left meanwhile may have been journalled before: it must not come back.
        let mut left = Vec::new();
        for entry in entries {
            if let JournalEntry::Keep { key, .. } = entry
                && !self.table().contains(key)
            {
                left.push(JournalEntry::Drop { key });
            }
        }
        self.journal.append(&left)
    }

    /// Whether the generation is over.
    pub(crate) fn is_retired(&self) -> bool {
        *self.retired.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the generation: from here on nothing changes on disk. Waits for changes under way.
    pub(crate) fn retire(&self) {
        *self.retired.write().unwrap_or_else(PoisonError::into_inner) = true;
        // Its files may live on in the next generation, which tells nobody of this one.
        self.count_near_reads();
        let mut table = self.table();
        let blocks = table.stop_change_log();
        if let Some(near) = table.near().take() {
            near.tell(blocks.into_iter().map(|key| (key, None)));
        }
    }

    /// Whether the generation is over; it does not end while the answer is held.
    pub(super) fn retired(&self) -> RwLockReadGuard<'_, bool> {
        self.retired.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Undoes [`CacheDisk::retire`]: its successor could not be made.
    pub(crate) fn resume(&self) {
        *self.retired.write().unwrap_or_else(PoisonError::into_inner) = false;
    }

    /// Lets a new generation in `target` begin with the blocks of the files in `same`, which maps
    /// old places in the manifest to new ones. This generation must be retired.
    ///
    /// # Errors
    /// `ServerFault` when the disk does not do it.
    pub(crate) fn bequeath(
        &self,
        target: &Path,
        same: &BTreeMap<FileIndex, FileIndex>,
    ) -> Result<()> {
        let blocks = target.join("blocks");
        std::fs::create_dir_all(&blocks).map_err(|e| fault("make the directory", &blocks, e))?;
        let mut entries = Vec::new();
        let mut files = BTreeMap::new();
        for entry in self.live() {
            if let JournalEntry::Keep {
                key,
                length,
                digest,
                class,
            } = entry
                && let Some(&file) = same.get(&key.file)
            {
                files.insert(key.file, file);
                let key = BlockKey { file, ..key };
                entries.push(JournalEntry::Keep {
                    key,
                    length,
                    digest,
                    class,
                });
            }
        }
        for (old, new) in files {
            let (old, new) = (self.path_of(old), blocks.join(new.to_string()));
            match std::fs::hard_link(&old, &new) {
                // Whoever removed it: the digests tell that its blocks are not there.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                linked => linked.map_err(|e| fault("link the blocks", &new, e))?,
            }
        }
        journal::write_whole(&target.join("journal"), &entries)
    }

    /// What the journal must say at least, oldest use first.
    pub(super) fn live(&self) -> Vec<JournalEntry> {
        let table = self.table();
        let kept = table.iter().map(|(key, held, class)| {
            let StoredBlock { length, digest, .. } = held;
            JournalEntry::Keep {
                key,
                length,
                digest,
                class,
            }
        });
        let mut entries: Vec<_> = kept.collect();
        entries.reverse();
        entries
    }

    /// Journals that the blocks go, and gives their space back to the file system.
    pub(super) fn punch(&self, pieces: &[(BlockKey, u32)]) -> Result<()> {
        let drops: Vec<_> = pieces
            .iter()
            .map(|(key, _)| JournalEntry::Drop { key: *key })
            .collect();
        match self.journal.append(&drops) {
            // It takes them when the blocks are gone. Until then it promises too much, which shows.
            Err(error) if is_full(&error) => {
                self.punch_all(pieces)?;
                self.journal.append(&drops)
            }
            Err(error) => Err(error),
            Ok(()) => self.punch_all(pieces),
        }
    }

    fn punch_all(&self, pieces: &[(BlockKey, u32)]) -> Result<()> {
        for (key, length) in pieces {
            let path = self.path_of(key.file);
            let file = match open_blocks(OpenOptions::new().write(true), &path) {
                Ok(file) => file,
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
                Err(e) => return Err(fault("free a block", &path, e)),
            };
            let start = key.block.0 * u64::from(self.block_bytes);
            punch_hole(&file, start, charged_bytes(*length))
                .map_err(|e| fault("free a block", &path, e))?;
        }
        Ok(())
    }

    /// Frees everything on disk that the table does not know: what a crash left half-made.
    fn sweep(&self) -> Result<()> {
        let blocks = self.directory.join("blocks");
        let broken = |e| fault("sweep the cache", &blocks, e);
        let mut known: BTreeMap<String, Vec<(u64, u64)>> = BTreeMap::new();
        for (key, held, _) in self.table().iter() {
            let start = key.block.0 * u64::from(self.block_bytes);
            let range = (start, start + u64::from(held.length));
            known.entry(key.file.to_string()).or_default().push(range);
        }
        for entry in std::fs::read_dir(&blocks).map_err(broken)? {
            let entry = entry.map_err(broken)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(mut ranges) = known.remove(&name) else {
                std::fs::remove_file(entry.path()).map_err(broken)?;
                continue;
            };
            ranges.sort_unstable();
            let file = match open_blocks(OpenOptions::new().write(true), &entry.path()) {
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
                file => file.map_err(broken)?,
            };
            let mut end = 0;
            for (start, next) in ranges {
                if start > end {
                    punch_hole(&file, end, start - end).map_err(broken)?;
                }
                end = next;
            }
            // A file that is too short shows when its last block is read.
            if file.metadata().map_err(broken)?.len() > end {
                file.set_len(end).map_err(broken)?;
            }
        }
        Ok(())
    }

    pub(super) fn path_of(&self, file: FileIndex) -> PathBuf {
        self.directory.join("blocks").join(file.to_string())
    }
}

/// Whether a failed read says something of the block, and not of this process or its system.
fn is_damage(error: &std::io::Error) -> bool {
    let is_medium = error.raw_os_error() == Some(Errno::IO.raw_os_error());
    is_medium || error.kind() == std::io::ErrorKind::UnexpectedEof
}

/// Opens a file of blocks. A link at its place is none of ours and goes: nothing is read or written
/// through it.
pub(super) fn open_blocks(options: &mut OpenOptions, path: &Path) -> std::io::Result<File> {
    // Nor is anybody waited for, should it be a pipe.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    options.custom_flags(flags.bits().cast_signed());
    match options.open(path) {
        Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
            std::fs::remove_file(path)?;
            options.open(path)
        }
        opened => opened,
    }
}

fn punch_hole(file: &File, start: u64, length: u64) -> std::io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    loop {
        match fallocate(file, flags, start, length) {
            Err(Errno::INTR) => {}
            done => return Ok(done?),
        }
    }
}
