//! The blocks of one generation on disk: one sparse file for each file of the source. Fetches
//! nothing.
//!
//! **Order of changes.** A new block goes to its file, then to the journal, then to the table. A
//! block that leaves goes out of the table, then out of the journal, then off the disk. So the
//! table never names bytes that are absent. The journal may promise too much, which the digests
//! show. The next start frees blocks that the journal has forgotten.
//!
//! **Order of locks.** `retired`, `insertions`, `hold_changes`, `free_queue`, the journal, the
//! table.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard};

use bafs_proto::Result;
use bafs_proto::buffer::Buffer;
use bafs_proto::hash::Digest;
use bafs_proto::ids::FileIndex;

use super::agent_map::AgentMap;
use super::block_files::{FileStamp, is_damage, open_blocks};
use super::former_agents::leave_files_to_former_agents;
use super::journal::{self, Journal, JournalEntry, JournaledBlock};
use crate::cache::block_run::{BlockRun, RunData};
use crate::cache::errors::disk_fault;
use crate::cache::locks::{lock, read_lock, write_lock};
use crate::counters::Counters;
use crate::logic::blocks::{BlockKey, BlockTable, CopyClass, StoredBlock};

/// The blocks of a run that were read from disk.
#[derive(Debug)]
pub(crate) struct DiskRead {
    /// Bytes of the whole run; anything where a block is absent.
    pub(crate) bytes: Buffer,
    /// Digest of each block that is here.
    pub(crate) digests: Vec<Option<Digest>>,
}

impl DiskRead {
    /// None of a run.
    pub(crate) fn nothing(run: &BlockRun) -> Self {
        Self {
            bytes: Buffer::with_unspecified_content(run.bytes()),
            digests: vec![None; run.count],
        }
    }

    /// Adds a block from elsewhere.
    pub(crate) fn put(&mut self, run: &BlockRun, n: usize, bytes: &[u8], digest: Digest) {
        self.bytes[run.range(n, 1)].copy_from_slice(bytes);
        self.digests[n] = Some(digest);
    }

    /// Places of the absent blocks.
    pub(crate) fn absent(&self) -> Vec<usize> {
        let places = 0..self.digests.len();
        places.filter(|n| self.digests[*n].is_none()).collect()
    }

    /// All of a run, when no block is absent.
    pub(crate) fn into_run_data(self) -> RunData {
        let digests = self.digests.into_iter().flatten().collect();
        (digests, self.bytes.freeze())
    }
}

/// The blocks of one generation of a cache volume.
pub(crate) struct CacheDisk {
    pub(super) directory: PathBuf,
    pub(super) block_bytes: u32,
    table: Mutex<PublishedTable>,
    pub(super) journal: Journal,
    /// Held while a file is held or released, so that a look at its lock disturbs no reader.
    pub(super) hold_changes: Mutex<()>,
    /// Files whose bytes were all compared with their digests, as they were then.
    verified_files: Mutex<BTreeMap<FileIndex, FileStamp>>,
    /// Blocks that are out of the table and still on disk, because a reader has them open or the
    /// disk refused.
    pub(super) free_queue: Mutex<Vec<(BlockKey, u32)>>,
    /// Whether damage was found in a file that is read without digests.
    pub(crate) has_damage_under_readers: AtomicBool,
    /// Held for reading while blocks are on disk but not in the table, for writing while the
    /// journal is rewritten from the table.
    pub(super) insertions: RwLock<()>,
    /// True when the generation has ended. Every change of the disk holds it for reading.
    retired: RwLock<bool>,
    /// Bytes that it leaves free on its file system; 0 until jobs found that full.
    pub(super) free_bytes_min: AtomicU64,
    pub(super) counters: Counters,
}

/// The table of blocks, and the map in which agents see it.
struct PublishedTable {
    table: BlockTable,
    agent_map: Option<AgentMap>,
}

/// The locked table of blocks. Agents of this machine see its changes before the lock is free.
pub(crate) struct TableGuard<'a>(MutexGuard<'a, PublishedTable>);

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
        let PublishedTable { table, agent_map } = &mut *self.0;
        if let Some(map) = agent_map {
            map.publish(table.take_changes());
        }
    }
}

impl TableGuard<'_> {
    /// The map of the agents; `None` while there are none.
    pub(super) fn agent_map(&mut self) -> &mut Option<AgentMap> {
        &mut self.0.agent_map
    }

    /// Whether an agent found wrong bytes in a block since the last call.
    fn take_mismatch(&mut self, key: BlockKey) -> bool {
        let map = self.0.agent_map.as_ref();
        map.is_some_and(|map| map.take_mismatch(key))
    }

    /// Imports what agents used without a request, if a block of this length drives others out.
    pub(super) fn import_agent_uses(&mut self, length: u32) {
        if self.is_use_import_due(length) {
            let uses = self.0.agent_map.as_ref().map(AgentMap::take_uses);
            self.import_uses(uses.unwrap_or_default());
        }
    }
}

impl CacheDisk {
    /// Opens the blocks in `directory`, made if it is not there; `table` must be empty.
    ///
    /// # Errors
    /// `ServerFault` when the disk fails.
    pub(super) fn open(
        directory: PathBuf,
        block_bytes: u32,
        mut table: BlockTable,
        counters: Counters,
    ) -> Result<Self> {
        let blocks = directory.join("blocks");
        std::fs::create_dir_all(&blocks)
            .map_err(|e| disk_fault("make the directory", &blocks, e))?;
        let left = leave_files_to_former_agents(&directory)?;
        let (journal, entries) = Journal::open(directory.join("journal"))?;
        let mut live: BTreeMap<BlockKey, (usize, JournaledBlock)> = BTreeMap::new();
        for (age, entry) in entries.into_iter().enumerate() {
            match entry {
                JournalEntry::Keep(block) if block.length <= block_bytes => {
                    live.insert(block.key, (age, block));
                }
                JournalEntry::Keep(JournaledBlock { key, .. }) | JournalEntry::Drop { key } => {
                    live.remove(&key);
                }
            }
        }
        let lost = live.keys().filter(|key| left.contains(&key.file));
        let lost: Vec<_> = lost.map(|key| JournalEntry::Drop { key: *key }).collect();
        journal.append(&lost)?;
        live.retain(|key, _| !left.contains(&key.file));
        let mut by_age: Vec<_> = live.into_values().collect();
        by_age.sort_by_key(|(age, _)| *age);
        for (_, block) in by_age {
            // Blocks without room are swept below.
            let _ = table.restore(block.key, block.length, block.digest, block.class);
        }
        let agent_map = None;
        let disk = Self {
            directory,
            block_bytes,
            table: Mutex::new(PublishedTable { table, agent_map }),
            journal,
            hold_changes: Mutex::new(()),
            verified_files: Mutex::default(),
            free_queue: Mutex::default(),
            has_damage_under_readers: AtomicBool::new(false),
            insertions: RwLock::default(),
            retired: RwLock::new(false),
            free_bytes_min: AtomicU64::new(0),
            counters,
        };
        disk.sweep()?;
        Ok(disk)
    }

    /// The table of blocks. Hold it shortly: every read needs it.
    pub(crate) fn table(&self) -> TableGuard<'_> {
        TableGuard(lock(&self.table))
    }

    /// Whether any block of a run is here. Does not count as a use.
    pub(crate) fn has_some(&self, run: &BlockRun) -> bool {
        let table = self.table();
        run.keys().any(|key| table.contains(key))
    }

    /// Whether all blocks of a run are here. Does not count as a use.
    pub(crate) fn has_all(&self, run: &BlockRun) -> bool {
        let table = self.table();
        run.keys().all(|key| table.contains(key))
    }

    /// Counts the blocks of a run that are here as used now.
    pub(crate) fn touch(&self, run: &BlockRun) {
        let mut table = self.table();
        for key in run.keys() {
            table.find(key);
        }
    }

    /// Has the blocks of a run compared with their digests before the next read gets them: a reader
    /// got damaged bytes from here.
    pub(crate) fn require_verification(&self, run: &BlockRun) {
        let mut table = self.table();
        run.keys().for_each(|key| table.mark_unverified(key));
    }

    /// Whether agents on this machine can read all blocks of a run without a request.
    pub(crate) fn can_agents_read(&self, run: &BlockRun) -> bool {
        let mut table = self.table();
        let are_readable = run.keys().all(|key| table.is_readable(key));
        are_readable && table.agent_map().is_some()
    }

    /// Reads the blocks of a run that are here (waits for the disk). It drops and counts blocks
    /// whose bytes do not match their digest.
    ///
    /// # Errors
    /// `ServerFault` when the system does not let this process read now.
    pub(crate) fn read(&self, run: &BlockRun) -> Result<DiskRead> {
        let found: Vec<Option<StoredBlock>> = {
            let mut table = self.table();
            let find = |key| {
                if table.take_mismatch(key) {
                    table.mark_unverified(key);
                }
                table.find(key)
            };
            run.keys().map(find).collect()
        };
        let mut read = DiskRead::nothing(run);
        if found.iter().all(Option::is_none) {
            return Ok(read);
        }
        let mut bad = vec![false; run.count];
        let path = self.path_of(run.file);
        let refused = |e| disk_fault("read blocks", &path, e);
        let file = match open_blocks(OpenOptions::new().read(true), &path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(refused(e)),
            file => file.ok(),
        };
        let mut start = 0;
        while start < run.count {
            let here = found[start..]
                .iter()
                .take_while(|block| block.is_some())
                .count();
            if here == 0 {
                start += 1;
                continue;
            }
            let mut read_part = |n: usize, count: usize| {
                let target = &mut read.bytes[run.range(n, count)];
                let file = file.as_ref().ok_or(std::io::ErrorKind::UnexpectedEof)?;
                file.read_exact_at(target, run.offset(n))
            };
            if read_part(start, here).is_err() {
                // Some of them may be good.
                for (n, bad) in bad.iter_mut().enumerate().skip(start).take(here) {
                    *bad = match read_part(n, 1) {
                        Err(e) if !is_damage(&e) => return Err(refused(e)),
                        done => done.is_err(),
                    };
                }
            }
            start += here;
        }
        self.verify(run, &found, &mut bad, &mut read);
        Ok(read)
    }

    /// Compares blocks with their digests at their first read. Leaves out blocks that left the
    /// table during the read.
    fn verify(
        &self,
        run: &BlockRun,
        found: &[Option<StoredBlock>],
        bad: &mut [bool],
        read: &mut DiskRead,
    ) {
        let mut verified = Vec::new();
        for (n, stored) in found.iter().enumerate() {
            if let Some(stored) = stored.filter(|stored| !stored.is_verified && !bad[n]) {
                bad[n] = Digest::of(&read.bytes[run.range(n, 1)]) != stored.digest;
                verified.push((run.key(n), stored.stamp));
            }
        }
        if bad.contains(&true) {
            self.drop_bad(run, found, bad);
        }
        let mut table = self.table();
        for (key, stamp) in verified {
            table.mark_verified(key, stamp);
        }
        for (n, stored) in found.iter().enumerate() {
            // A block that left the table meanwhile may have been read as a hole.
            let same = stored.filter(|stored| table.has_stamp(run.key(n), stored.stamp));
            read.digests[n] = same.filter(|_| !bad[n]).map(|stored| stored.digest);
        }
    }

    /// Files whose bytes were compared, as they were then.
    pub(super) fn verified_files(&self) -> MutexGuard<'_, BTreeMap<FileIndex, FileStamp>> {
        lock(&self.verified_files)
    }

    /// Changes the classes of the blocks that are here (waits for the disk).
    ///
    /// # Errors
    /// `ServerFault` when the disk fails: then the next start sees the old classes.
    pub(crate) fn reclassify(&self, classes: &[(BlockKey, CopyClass)]) -> Result<()> {
        let retired = self.retired();
        if *retired {
            return Ok(());
        }
        let changed: Vec<_> = {
            let mut table = self.table();
            let changed = classes.iter().filter_map(|&(key, class)| {
                let stored = table.reclassify(key, class)?;
                Some(JournaledBlock::new(key, stored, class))
            });
            changed.collect()
        };
        if changed.is_empty() {
            return Ok(());
        }
        let entries: Vec<_> = changed.iter().map(|b| JournalEntry::Keep(*b)).collect();
        self.journal.append(&entries)?;
        // A block may have left after the first lock, and its drop may precede these entries in the
        // journal. It must not come back.
        let drops: Vec<_> = {
            let table = self.table();
            let gone = changed.iter().filter(|block| !table.contains(block.key));
            gone.map(|block| JournalEntry::Drop { key: block.key })
                .collect()
        };
        self.journal.append(&drops)
    }

    /// Whether the generation has ended.
    pub(crate) fn is_retired(&self) -> bool {
        *self.retired()
    }

    /// Ends the generation: nothing changes on disk from here on. Waits for running changes.
    pub(crate) fn retire(&self) {
        *write_lock(&self.retired) = true;
        // Its files may live on in the next generation, which publishes nothing in this map.
        self.count_agent_reads();
        let mut table = self.table();
        let blocks = table.stop_change_log();
        if let Some(map) = table.agent_map().take() {
            map.publish(blocks.into_iter().map(|key| (key, None)));
        }
    }

    /// Whether the generation has ended. It does not end while the answer is held.
    pub(super) fn retired(&self) -> RwLockReadGuard<'_, bool> {
        read_lock(&self.retired)
    }

    /// Undoes [`CacheDisk::retire`] when the next generation could not be made.
    pub(crate) fn resume(&self) {
        *write_lock(&self.retired) = false;
    }

    /// Lets the next generation in `target` begin with the blocks of unchanged files; `unchanged`
    /// maps their old numbers to the new ones. This generation must be retired.
    ///
    /// # Errors
    /// `ServerFault` when the disk fails.
    pub(crate) fn link_unchanged(
        &self,
        target: &Path,
        unchanged: &BTreeMap<FileIndex, FileIndex>,
    ) -> Result<()> {
        let blocks = target.join("blocks");
        std::fs::create_dir_all(&blocks)
            .map_err(|e| disk_fault("make the directory", &blocks, e))?;
        let mut entries = Vec::new();
        let mut files = BTreeMap::new();
        for block in self.live_blocks() {
            if let Some(&file) = unchanged.get(&block.key.file) {
                files.insert(block.key.file, file);
                let key = BlockKey { file, ..block.key };
                entries.push(JournalEntry::Keep(JournaledBlock { key, ..block }));
            }
        }
        for (old, new) in files {
            let (old, new) = (self.path_of(old), blocks.join(new.to_string()));
            match std::fs::hard_link(&old, &new) {
                // Somebody removed the file: the digests show that its blocks are absent.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                linked => linked.map_err(|e| disk_fault("link the blocks", &new, e))?,
            }
        }
        journal::write_whole(&target.join("journal"), &entries)
    }

    /// The blocks that the journal must name at least, oldest use first.
    pub(super) fn live_blocks(&self) -> Vec<JournaledBlock> {
        let table = self.table();
        let blocks = table.iter();
        let blocks = blocks.map(|(key, stored, class)| JournaledBlock::new(key, stored, class));
        let mut blocks: Vec<_> = blocks.collect();
        blocks.reverse();
        blocks
    }

    pub(super) fn path_of(&self, file: FileIndex) -> PathBuf {
        self.directory.join("blocks").join(file.to_string())
    }
}
