//! Verifies received blocks and writes them to disk, as far as there is room. Drops blocks that are
//! damaged there. Fetches nothing.

use std::fs::{File, OpenOptions};
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bafs_proto::hash::Digest;
use bafs_proto::ids::FileIndex;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use rustix::io::{Errno, pwritev};

use super::block_files::open_blocks;
use super::block_store::BlockStore;
use super::disk::CacheDisk;
use super::journal::{JournalEntry, JournaledBlock};
use crate::cache::block_run::{Block, BlockRun, contiguous_ranges};
use crate::cache::errors::{disk_fault, is_disk_full, run_blocking};
use crate::logic::blocks::{BlockKey, CopyClass, StoredBlock, Victim};

/// What is freed at once when the file system is full although the volume is not, in bytes.
const FULL_DISK_BYTES: u64 = 1 << 20;

/// Most blocks of one write: what a system call takes (`IOV_MAX`).
const WRITE_BLOCKS_MAX: usize = 1024;

/// Who sent blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum BlockOrigin {
    Home,
    /// Another node, with what home says of the blocks, if it says something.
    Peer(Option<Vec<Digest>>),
}

impl BlockStore {
    /// Cuts a body into the blocks of a run and compares each with its digest. A digest from a peer
    /// must also be the one that home says, or that this server has seen before. Absent blocks are
    /// `None`.
    ///
    /// # Errors
    /// From a peer `DigestMismatch`. From home `ServerFault`: the bytes at home may be good.
    pub(crate) async fn verify(
        self: &Arc<Self>,
        run: BlockRun,
        digests: Vec<Digest>,
        body: Bytes,
        origin: BlockOrigin,
    ) -> Result<Vec<Option<Block>>> {
        let store = self.clone();
        let (code, sender) = match origin {
            BlockOrigin::Peer(_) => (ErrorCode::DigestMismatch, "another node"),
            BlockOrigin::Home => (ErrorCode::ServerFault, "home"),
        };
        let verified = run_blocking(move || store.cut_and_verify(&run, digests, &body, &origin));
        verified.await?.map_err(|why| {
            self.disk.counters.add("cache_digest_failures", 1);
            Error::new(code, format!("blocks from {sender}: {why}"))
        })
    }

    fn cut_and_verify(
        &self,
        run: &BlockRun,
        digests: Vec<Digest>,
        body: &Bytes,
        origin: &BlockOrigin,
    ) -> Result<Vec<Option<Block>>, &'static str> {
        if digests.len() != run.count {
            return Err("their number is not what was asked for");
        }
        let mut blocks = Vec::with_capacity(run.count);
        let mut start = 0;
        for (n, digest) in digests.into_iter().enumerate() {
            if digest.is_of_no_bytes() {
                blocks.push(None);
                continue;
            }
            let end = start + run.length(n);
            if end > body.len() {
                return Err("there are too few bytes");
            }
            let bytes = body.slice(start..end);
            start = end;
            if Digest::of(&bytes) != digest {
                return Err("the bytes do not match the digest");
            }
            if let BlockOrigin::Peer(said) = origin {
                let said = said.as_ref().map(|said| said[n]);
                let right = said.or_else(|| self.disk.table().digest_of(run.key(n)));
                if right.is_some_and(|right| right != digest) {
                    return Err("the digest is not the one of home");
                }
            }
            blocks.push(Some((bytes, digest)));
        }
        match start == body.len() {
            true => Ok(blocks),
            false => Err("there are too many bytes"),
        }
    }

    /// Writes the verified blocks of a run to disk, as far as there is room. Returns the number of
    /// blocks that it does not store.
    ///
    /// # Errors
    /// `ServerFault`.
    pub(crate) async fn insert(
        self: &Arc<Self>,
        run: BlockRun,
        blocks: Vec<Block>,
        class: CopyClass,
    ) -> Result<usize> {
        // Writers of one file wait for each other in the kernel, and burn a processor meanwhile.
        let one_at_a_time = self.writing.lock().await;
        let store = self.clone();
        let inserted = run_blocking(move || {
            let bypassed = store.disk.insert(&run, &blocks, class);
            let stores_some = bypassed < run.count;
            (bypassed, stores_some && store.is_newly_complete(run.file))
        });
        let (bypassed, is_newly_complete) = inserted.await?;
        drop(one_at_a_time);
        if is_newly_complete {
            drop(self.start_file_check(run.file));
        }
        Ok(bypassed)
    }
}

impl CacheDisk {
    /// Writes the verified blocks of a run, as far as there is room (waits for the disk). Returns
    /// the number of blocks that it does not store: there is no room, the disk is full, or the
    /// generation has ended.
    fn insert(&self, run: &BlockRun, blocks: &[Block], class: CopyClass) -> usize {
        debug_assert_eq!(run.count, blocks.len());
        let retired = self.retired();
        if *retired || self.missing_free_bytes() > 0 {
            return run.count;
        }
        let insertion = self.insertions.read();
        self.free_file_slot(run.file, class);
        let (places, victims) = self.reserve(run, class);
        if places.is_empty() {
            return run.count;
        }
        let journaled = |n: &usize| JournaledBlock {
            key: run.key(*n),
            length: run.length(*n) as u32,
            digest: blocks[*n].1,
            class,
        };
        let entries: Vec<_> = places.iter().map(journaled).collect();
        let entries: Vec<_> = entries.into_iter().map(JournalEntry::Keep).collect();
        let write = || {
            for places in contiguous_ranges(&places) {
                let bytes: Vec<_> = blocks[places.clone()].iter().map(|(b, _)| b).collect();
                self.write(run, places.start, &bytes)?;
            }
            self.journal.append(&entries)
        };
        let mut written = self.free_victims(&victims).and_then(|()| write());
        // Others fill the disk too. Then the volume shrinks, rather than store nothing new. Its
        // victims leave the disk first, or it would hold more than it may.
        while written.as_ref().is_err_and(is_disk_full) && self.evict_for_full_disk(FULL_DISK_BYTES)
        {
            written = self.free_queued_now().and_then(|()| write());
        }
        if let Err(error) = written {
            tracing::warn!(%error, blocks = places.len(), "blocks are passed through, not stored");
            self.cancel_reservation(run, &places);
            return run.count;
        }
        let blocks_here = {
            let mut table = self.table();
            for &n in &places {
                table.insert(run.key(n), run.length(n) as u32, blocks[n].1, class, true);
            }
            table.len()
        };
        drop(insertion);
        self.compact_journal(blocks_here);
        run.count - places.len()
    }

    fn compact_journal(&self, blocks_here: usize) {
        if !self.journal.is_long(blocks_here) {
            return;
        }
        let _alone = self.insertions.write();
        let live = || self.live_blocks().into_iter().map(JournalEntry::Keep);
        let compacted = self.journal.compact(blocks_here, || live().collect());
        if let Err(error) = compacted {
            tracing::warn!(%error, "the cache journal stays long");
        }
    }

    /// Reserves space. Returns the places in the run of the blocks that got some, and the blocks
    /// that must leave first.
    fn reserve(&self, run: &BlockRun, class: CopyClass) -> (Vec<usize>, Vec<Victim>) {
        let (mut places, mut victims) = (Vec::with_capacity(run.count), Vec::new());
        let mut table = self.table();
        for n in 0..run.count {
            let length = run.length(n) as u32;
            table.import_agent_uses(length);
            if let Ok(gone) = table.reserve(run.key(n), length, class) {
                places.push(n);
                victims.extend(gone);
            }
        }
        (places, victims)
    }

    /// Undoes a reservation, whatever was written.
    fn cancel_reservation(&self, run: &BlockRun, places: &[usize]) {
        let block = |n: &usize| (run.key(*n), run.length(*n) as u32);
        let blocks: Vec<_> = places.iter().map(block).collect();
        if self.free_blocks(&blocks).is_err() {
            return self.queue_free(blocks);
        }
        let mut table = self.table();
        blocks
            .iter()
            .for_each(|(key, _)| table.cancel_reservation(*key));
        drop(table);
        self.remove_empty_files();
    }

    /// Evicts a whole file when there are too many for another one.
    fn free_file_slot(&self, file: FileIndex, class: CopyClass) {
        let victims = {
            let mut table = self.table();
            if !table.has_no_file_slot(file) {
                return;
            }
            table.import_agent_uses(self.block_bytes);
            table.evict_file(class)
        };
        self.count_evicted(&victims);
        self.queue_free(victims.iter().map(|v| (v.key, v.length)));
        if let Err(error) = self.free_queued_now() {
            tracing::debug!(%error, "an evicted file is still on disk");
        }
    }

    /// Blocks that are gone because somebody removed, replaced or truncated their file. They must
    /// leave the table before the file grows again: then zeros are in their places.
    fn find_truncated(
        &self,
        file: FileIndex,
        opened: &File,
    ) -> std::io::Result<Vec<(BlockKey, StoredBlock)>> {
        // No block enters the locked table that was written after the look at the file.
        let table = self.table();
        let size = opened.metadata()?.len();
        Ok(table.blocks_beyond(file, self.block_bytes, size))
    }

    /// Takes the damaged blocks of a run out of the table.
    pub(super) fn drop_bad(&self, run: &BlockRun, found: &[Option<StoredBlock>], bad: &[bool]) {
        let retired = self.retired();
        let bad = found.iter().enumerate().filter(|(n, _)| bad[*n]);
        let bad = bad.filter_map(|(n, stored)| Some((run.key(n), (*stored)?)));
        if *retired {
            // A generation that has ended has lost its files to the next one.
            let mut table = self.table();
            bad.for_each(|(key, stored)| {
                table.remove(key, stored.stamp);
            });
            return;
        }
        self.drop_damaged(bad);
    }

    /// Takes damaged blocks out of the table of a running generation.
    fn drop_damaged(&self, damaged: impl IntoIterator<Item = (BlockKey, StoredBlock)>) {
        let mut gone = Vec::new();
        for (key, stored) in damaged {
            if self.table().remove(key, stored.stamp).is_none() {
                continue;
            }
            self.verified_files().remove(&key.file);
            // A program may read this place through the kernel. The disk gives it an error there,
            // not a hole.
            self.has_damage_under_readers
                .fetch_or(self.table().is_file_held(key.file), Ordering::Relaxed);
            gone.push((key, stored.length));
        }
        if let Some((first, _)) = gone.first() {
            self.counters
                .add("cache_digest_failures", gone.len() as u64);
            tracing::warn!(file = %first.file, block = %first.block, blocks = gone.len(),
                directory = %self.directory.display(),
                "cached blocks are damaged on disk, from this one on; they are fetched again");
        }
        self.queue_free(gone);
        if let Err(error) = self.free_queued_now() {
            tracing::debug!(%error, "damaged blocks are still on disk");
        }
    }

    /// Writes neighbouring blocks at once: one system call, and the page cache takes larger pieces.
    fn write(&self, run: &BlockRun, first: usize, blocks: &[&Bytes]) -> Result<()> {
        let path = self.path_of(run.file);
        let not_opened = |e| disk_fault("open the blocks", &path, e);
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false);
        let file = open_blocks(&mut options, &path).map_err(not_opened)?;
        let truncated = self.find_truncated(run.file, &file);
        let truncated = truncated.map_err(not_opened)?;
        if !truncated.is_empty() {
            self.drop_damaged(truncated);
        }
        let mut offset = run.offset(first);
        for blocks in blocks.chunks(WRITE_BLOCKS_MAX) {
            let mut slices: Vec<_> = blocks.iter().map(|bytes| IoSlice::new(bytes)).collect();
            let mut left = slices.as_mut_slice();
            while !left.is_empty() {
                let written = match pwritev(&file, left, offset) {
                    Ok(0) => Err(std::io::ErrorKind::WriteZero.into()),
                    Err(Errno::INTR) => continue,
                    written => written.map_err(std::io::Error::from),
                };
                let written = written.map_err(|e| disk_fault("write blocks", &path, e))?;
                offset += written as u64;
                IoSlice::advance_slices(&mut left, written);
            }
        }
        Ok(())
    }
}
