//! Writes fetched blocks to disk, as far as there is room for them, and gives up those that are
//! damaged there. Fetches nothing.

use std::fs::{File, OpenOptions};
use std::io::IoSlice;
use std::sync::atomic::Ordering;

use bafs_proto::hash::Digest;
use bafs_proto::ids::FileIndex;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use rustix::fs::{StatVfs, statvfs};
use rustix::io::{Errno, pwritev};

use super::disk::{CacheDisk, Run, open_blocks};
use super::fault;
use super::flights::Block;
use super::journal::JournalEntry;
use crate::logic::blocks::{BlockKey, CopyClass, StoredBlock, Victim};

/// What is freed at once when the file system is full although the volume is not, in bytes.
const FULL_DISK_BYTES: u64 = 1 << 20;

/// Most blocks of one write: what a system call takes (`IOV_MAX`).
const WRITE_BLOCKS_MAX: usize = 1024;

impl CacheDisk {
    /// Writes the blocks of a run, whose digests were verified, as far as there is room for them
    /// (waits for the disk). Returns how many are passed through instead: there is no room, the
    /// disk is full, or the generation is over.
    pub(crate) fn keep(&self, run: &Run, blocks: &[Block], class: CopyClass) -> usize {
        debug_assert_eq!(run.count, blocks.len());
        let retired = self.retired();
        if *retired || self.lacking_spare() > 0 {
            return run.count;
        }
        let keeping = self.keeping.read();
        self.make_place(run.file, class);
        let (kept, victims) = self.reserve(run, class);
        if kept.is_empty() {
            return run.count;
        }
        let entry = |n: &usize| keeps(run, *n, blocks[*n].1, class);
        let entries: Vec<_> = kept.iter().map(entry).collect();
        let write = || {
            for places in neighbours(&kept) {
                let bytes: Vec<_> = blocks[places.clone()].iter().map(|(b, _)| b).collect();
                self.write(run, places.start, &bytes)?;
            }
            self.journal.append(&entries)
        };
        let mut written = self.free_victims(&victims).and_then(|()| write());
        // Others fill the disk too: less is kept than was promised, rather than nothing new. What
        // had to go must be off the disk first, or it would hold more than it may.
        while written.as_ref().is_err_and(is_full) && self.give_way(FULL_DISK_BYTES) {
            written = self.free_left().and_then(|()| write());
        }
        if let Err(error) = written {
            tracing::warn!(%error, blocks = kept.len(), "blocks are passed through, not kept");
            self.cancel(run, &kept);
            return run.count;
        }
        let blocks_here = {
            let mut table = self.table();
            for &n in &kept {
                table.insert(run.key(n), run.length(n) as u32, blocks[n].1, class, true);
            }
            table.len()
        };
        drop(keeping);
        if self.journal.is_long(blocks_here) {
            let _alone = self.keeping.write();
            if let Err(error) = self.journal.compact(blocks_here, || self.live()) {
                tracing::warn!(%error, "the cache journal stays long");
            }
        }
        run.count - kept.len()
    }

    /// Reserves space: the places in the run of the blocks that got some, and who must go first.
    fn reserve(&self, run: &Run, class: CopyClass) -> (Vec<usize>, Vec<Victim>) {
        let (mut kept, mut victims) = (Vec::with_capacity(run.count), Vec::new());
        let mut table = self.table();
        for n in 0..run.count {
            let length = run.length(n) as u32;
            table.note_near_uses(length);
            if let Ok(gone) = table.reserve(run.key(n), length, class) {
                kept.push(n);
                victims.extend(gone);
            }
        }
        (kept, victims)
    }

    /// Undoes a reservation, whatever was written.
    fn cancel(&self, run: &Run, kept: &[usize]) {
        let piece = |n: &usize| (run.key(*n), run.length(*n) as u32);
        let pieces: Vec<_> = kept.iter().map(piece).collect();
        if self.punch(&pieces).is_err() {
            return self.free_later(pieces);
        }
        let mut table = self.table();
        pieces
            .iter()
            .for_each(|(key, _)| table.cancel_reservation(*key));
        drop(table);
        self.drop_empty_files();
    }

    /// Gives a whole file up when there are too many for another one.
    fn make_place(&self, file: FileIndex, class: CopyClass) {
        let victims = {
            let mut table = self.table();
            if !table.has_no_file_slot(file) {
                return;
            }
            table.note_near_uses(self.block_bytes);
            table.evict_file(class)
        };
        let pieces: Vec<_> = victims.iter().map(|v| (v.key, v.length)).collect();
        self.count_evicted(&victims);
        self.free_later(pieces);
        if let Err(error) = self.free_left() {
            tracing::debug!(%error, "a file that was given up is still on disk");
        }
    }

    /// Takes files that have no blocks any more off the disk; one that stays is tried again with
    /// the next.
    pub(super) fn drop_empty_files(&self) {
        let empty = self.table().take_empty_files();
        for file in empty {
            self.compared().remove(&file);
            match std::fs::remove_file(self.path_of(file)) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    tracing::debug!(%file, %error, "a file without blocks is still on disk");
                    self.table().cancel_file_removal(file);
                }
                _ => self.table().finish_file_removal(file),
            }
        }
    }

    fn count_evicted(&self, victims: &[Victim]) {
        for victim in victims {
            let counter = match victim.class {
                CopyClass::Primary => "cache_evicted_primary",
                CopyClass::Secondary => "cache_evicted_secondary",
                // Eviction never selects pinned blocks.
                CopyClass::Pinned => continue,
            };
            self.counters.add(counter, 1);
        }
    }

    fn free_victims(&self, victims: &[Victim]) -> Result<()> {
        if victims.is_empty() {
            return Ok(());
        }
        let pieces: Vec<_> = victims
            .iter()
            .map(|victim| (victim.key, victim.length))
            .collect();
        let freed = self.punch(&pieces);
        let mut table = self.table();
        for victim in victims {
            match &freed {
                Ok(()) => table.release_space(victim.key),
                Err(_) => table.keep_charged(victim.key, victim.length),
            }
        }
        drop(table);
        self.count_evicted(victims);
        self.drop_empty_files();
        if freed.is_err() {
            self.free_later(pieces);
        }
        freed
    }

    /// Leaves so many bytes free on its file system from now on: keeps nothing new while there is
    /// less, and gives up what it holds, at once or, where others have it open, bit by bit when
    /// this is called again.
    pub(crate) fn leave_free(&self, bytes: u64) {
        self.set_spare(bytes);
        let lacking = self.lacking_spare();
        if lacking > 0 && !self.give_way(lacking) {
            // What was given up before may be free now.
            let _ = self.free_left();
        }
    }

    /// Keeps nothing new from now on while less than that is free.
    pub(super) fn set_spare(&self, bytes: u64) {
        self.spare.store(bytes, Ordering::Relaxed);
    }

    /// What its file system lacks of the bytes that are to be free.
    fn lacking_spare(&self) -> u64 {
        match self.spare.load(Ordering::Relaxed) {
            0 => 0,
            spare => {
                let disk = statvfs(&self.directory);
                let free = |disk: StatVfs| disk.f_bavail.saturating_mul(disk.f_frsize);
                spare.saturating_sub(disk.map_or(u64::MAX, free))
            }
        }
    }

    /// Frees so many bytes on a full disk, as far as there are. Tells whether it freed any.
    fn give_way(&self, bytes: u64) -> bool {
        let victims = self.table().evict_bytes(bytes);
        if victims.is_empty() {
            return false;
        }
        let pieces: Vec<_> = victims.iter().map(|v| (v.key, v.length)).collect();
        let freed = self.punch(&pieces);
        self.counters
            .add("cache_evicted_for_full_disk", victims.len() as u64);
        if freed.is_err() {
            self.free_later(pieces);
            return false;
        }
        let mut table = self.table();
        victims
            .iter()
            .for_each(|victim| table.release_space(victim.key));
        drop(table);
        self.drop_empty_files();
        true
    }

    /// Blocks that are gone because somebody removed their file, put another thing in its place or
    /// cut it. They must be out of the table before the file grows again: as long as it is short
    /// they cannot be read, but then zeros are in their places.
    fn cut_off(
        &self,
        file: FileIndex,
        opened: &File,
    ) -> std::io::Result<Vec<(BlockKey, StoredBlock)>> {
        // While the table is held nothing is put that was written after the look.
        let table = self.table();
        let size = opened.metadata()?.len();
        Ok(table.blocks_beyond(file, self.block_bytes, size))
    }

    /// Takes those blocks of a run that were found damaged out of the table.
    pub(super) fn drop_bad(&self, run: &Run, found: &[Option<StoredBlock>], bad: &[bool]) {
        let retired = self.retired();
        let bad = found.iter().enumerate().filter(|(n, _)| bad[*n]);
        let bad = bad.filter_map(|(n, held)| Some((run.key(n), (*held)?)));
        if *retired {
            // A generation that is over has lost its files to the next one.
            let mut table = self.table();
            bad.for_each(|(key, held)| {
                table.remove(key, held.stamp);
            });
            return;
        }
        self.drop_damaged(bad);
    }

    /// Takes blocks that are not on disk as they should be out of the table; the generation goes
    /// on.
    fn drop_damaged(&self, damaged: impl IntoIterator<Item = (BlockKey, StoredBlock)>) {
        let mut gone = Vec::new();
        for (key, held) in damaged {
            if self.table().remove(key, held.stamp).is_none() {
                continue;
            }
            self.compared().remove(&key.file);
            // Somebody may read the place itself: what the disk gives him is an error, not a hole.
            self.hurt
                .fetch_or(self.table().is_file_held(key.file), Ordering::Relaxed);
            gone.push((key, held.length));
        }
        if let Some((first, _)) = gone.first() {
            self.counters
                .add("cache_digest_failures", gone.len() as u64);
            tracing::warn!(file = %first.file, block = %first.block, blocks = gone.len(),
                directory = %self.directory.display(),
                "cached blocks are damaged on disk, from this one on; they are fetched again");
        }
        self.free_later(gone);
        if let Err(error) = self.free_left() {
            tracing::debug!(%error, "damaged blocks are still on disk");
        }
    }

    /// Writes neighbouring blocks at once: one system call, and the page cache takes larger pieces.
    fn write(&self, run: &Run, first: usize, blocks: &[&Bytes]) -> Result<()> {
        let path = self.path_of(run.file);
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false);
        let file =
            open_blocks(&mut options, &path).map_err(|e| fault("open the blocks", &path, e))?;
        let cut_off = self.cut_off(run.file, &file);
        let cut_off = cut_off.map_err(|e| fault("open the blocks", &path, e))?;
        if !cut_off.is_empty() {
            self.drop_damaged(cut_off);
        }
        let mut offset = run.at(first);
        for blocks in blocks.chunks(WRITE_BLOCKS_MAX) {
            let mut slices: Vec<_> = blocks.iter().map(|bytes| IoSlice::new(bytes)).collect();
            let mut left = slices.as_mut_slice();
            while !left.is_empty() {
                let written = match pwritev(&file, left, offset) {
                    Ok(0) => Err(std::io::ErrorKind::WriteZero.into()),
                    Err(Errno::INTR) => continue,
                    written => written.map_err(std::io::Error::from),
                };
                let written = written.map_err(|e| fault("write blocks", &path, e))?;
                offset += written as u64;
                IoSlice::advance_slices(&mut left, written);
            }
        }
        Ok(())
    }
}

/// Runs of numbers that follow each other.
fn neighbours(numbers: &[usize]) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
    let groups = numbers.chunk_by(|one, next| one + 1 == *next);
    groups.map(|group| group[0]..group[group.len() - 1] + 1)
}

fn keeps(run: &Run, n: usize, digest: Digest, class: CopyClass) -> JournalEntry {
    JournalEntry::Keep {
        key: run.key(n),
        length: run.length(n) as u32,
        digest,
        class,
    }
}

/// Whether an error says that the disk has no room.
pub(super) fn is_full(error: &Error) -> bool {
    error.code == ErrorCode::NoSpaceBytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_blocks_are_written_together() {
        let found: Vec<_> = neighbours(&[0, 1, 2, 5, 7, 8]).collect();
        assert_eq!(found, [0..3, 5..6, 7..9]);
        assert_eq!(neighbours(&[]).count(), 0);
    }
}
