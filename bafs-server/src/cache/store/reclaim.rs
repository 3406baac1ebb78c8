//! Gives space of blocks back to the file system: victims, blocks that others had open, and
//! leftovers of a crash. Decides no replacement; the table does.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::sync::atomic::Ordering;

use bafs_proto::Result;
use rustix::fs::{StatVfs, statvfs};

use super::block_files::{open_blocks, punch_hole};
use super::disk::CacheDisk;
use super::journal::JournalEntry;
use crate::cache::errors::{disk_fault, is_disk_full};
use crate::cache::locks::lock;
use crate::logic::blocks::{BlockKey, CopyClass, Victim, charged_bytes};

impl CacheDisk {
    /// Queues blocks that are out of the table and still on disk.
    pub(super) fn queue_free(&self, blocks: impl IntoIterator<Item = (BlockKey, u32)>) {
        lock(&self.free_queue).extend(blocks);
    }

    /// Frees queued blocks that nobody has open, unless the generation has ended (waits for the
    /// disk).
    ///
    /// # Errors
    /// `ServerFault` when the disk fails; the blocks stay queued.
    pub(crate) fn free_queued(&self) -> Result<()> {
        match *self.retired() {
            true => Ok(()),
            false => self.free_queued_now(),
        }
    }

    /// As [`CacheDisk::free_queued`], for callers that keep the generation from ending.
    pub(super) fn free_queued_now(&self) -> Result<()> {
        let mut queue = lock(&self.free_queue);
        if queue.is_empty() {
            self.remove_empty_files();
            return Ok(());
        }
        let (held, free): (Vec<_>, Vec<_>) = {
            let table = self.table();
            queue
                .drain(..)
                .partition(|(key, _)| table.is_file_held(key.file))
        };
        *queue = held;
        let mut result = self.free_blocks(&free);
        if result.is_ok() {
            let mut table = self.table();
            free.iter().for_each(|(key, _)| table.release_space(*key));
        } else {
            // One block that the disk refuses must not keep the others.
            result = Ok(());
            for block in free {
                match self.free_blocks(&[block]) {
                    Ok(()) => self.table().release_space(block.0),
                    Err(error) => {
                        queue.push(block);
                        result = Err(error);
                    }
                }
            }
        }
        self.remove_empty_files();
        result
    }

    /// Frees the blocks that a reservation drove out.
    pub(super) fn free_victims(&self, victims: &[Victim]) -> Result<()> {
        if victims.is_empty() {
            return Ok(());
        }
        let blocks: Vec<_> = victims.iter().map(|v| (v.key, v.length)).collect();
        let freed = self.free_blocks(&blocks);
        let mut table = self.table();
        for victim in victims {
            match &freed {
                Ok(()) => table.release_space(victim.key),
                Err(_) => table.keep_charged(victim.key, victim.length),
            }
        }
        drop(table);
        self.count_evicted(victims);
        self.remove_empty_files();
        if freed.is_err() {
            self.queue_free(blocks);
        }
        freed
    }

    /// Journals that the blocks go, and gives their space back to the file system.
    pub(super) fn free_blocks(&self, blocks: &[(BlockKey, u32)]) -> Result<()> {
        let drops: Vec<_> = blocks
            .iter()
            .map(|(key, _)| JournalEntry::Drop { key: *key })
            .collect();
        match self.journal.append(&drops) {
            // A full disk takes the entries once the blocks are gone. Until then the journal
            // promises too much, which the digests show.
            Err(error) if is_disk_full(&error) => {
                self.punch_blocks(blocks)?;
                self.journal.append(&drops)
            }
            Err(error) => Err(error),
            Ok(()) => self.punch_blocks(blocks),
        }
    }

    fn punch_blocks(&self, blocks: &[(BlockKey, u32)]) -> Result<()> {
        for (key, length) in blocks {
            let path = self.path_of(key.file);
            let file = match open_blocks(OpenOptions::new().write(true), &path) {
                Ok(file) => file,
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
                Err(e) => return Err(disk_fault("free a block", &path, e)),
            };
            let start = key.block.0 * u64::from(self.block_bytes);
            punch_hole(&file, start, charged_bytes(*length))
                .map_err(|e| disk_fault("free a block", &path, e))?;
        }
        Ok(())
    }

    /// Removes files without blocks from the disk. A file that stays is tried again with the next.
    pub(super) fn remove_empty_files(&self) {
        let empty = self.table().take_empty_files();
        for file in empty {
            self.verified_files().remove(&file);
            match std::fs::remove_file(self.path_of(file)) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    tracing::debug!(%file, %error, "a file without blocks is still on disk");
                    self.table().cancel_file_removal(file);
                }
                _ => self.table().finish_file_removal(file),
            }
        }
    }

    pub(super) fn count_evicted(&self, victims: &[Victim]) {
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

    /// Leaves so many bytes free on its file system from now on. While there are fewer, the disk
    /// stores nothing new and frees blocks. Blocks that others have open are freed by later calls.
    pub(crate) fn reserve_free_bytes(&self, bytes: u64) {
        self.set_free_bytes_min(bytes);
        let missing = self.missing_free_bytes();
        if missing > 0 && !self.evict_for_full_disk(missing) {
            // Earlier victims may be free now.
            let _ = self.free_queued_now();
        }
    }

    /// Stores nothing new from now on while fewer bytes are free.
    pub(crate) fn set_free_bytes_min(&self, bytes: u64) {
        self.free_bytes_min.store(bytes, Ordering::Relaxed);
    }

    /// Bytes that its file system lacks of those that are to be free.
    pub(super) fn missing_free_bytes(&self) -> u64 {
        match self.free_bytes_min.load(Ordering::Relaxed) {
            0 => 0,
            free_bytes_min => {
                let disk = statvfs(&self.directory);
                let free = |disk: StatVfs| disk.f_bavail.saturating_mul(disk.f_frsize);
                free_bytes_min.saturating_sub(disk.map_or(u64::MAX, free))
            }
        }
    }

    /// Keeps at most so many bytes in so many files from now on. Blocks that are over that leave at
    /// once, unless others have them open.
    pub(super) fn set_capacity(&self, bytes: u64, files: u64) {
        let victims = {
            let mut table = self.table();
            table.set_capacity(bytes, files);
            let excess = table.used_bytes().saturating_sub(bytes);
            table.evict_bytes(excess)
        };
        self.queue_free(victims.iter().map(|v| (v.key, v.length)));
        if let Err(error) = self.free_queued() {
            tracing::warn!(%error, "blocks over the capacity of a cache are still on disk");
        }
    }

    /// Frees so many bytes on a full disk, as far as there are. Tells whether it freed any.
    pub(super) fn evict_for_full_disk(&self, bytes: u64) -> bool {
        let victims = self.table().evict_bytes(bytes);
        let evicted = victims.len() as u64;
        self.counters.add("cache_evicted_for_full_disk", evicted);
        self.queue_free(victims.iter().map(|v| (v.key, v.length)));
        self.free_queued_now().is_ok() && evicted > 0
    }

    /// Frees everything on disk that the table does not know: what a crash left half-made.
    pub(super) fn sweep(&self) -> Result<()> {
        let blocks = self.directory.join("blocks");
        let broken = |e| disk_fault("sweep the cache", &blocks, e);
        let mut stored: BTreeMap<String, Vec<(u64, u64)>> = BTreeMap::new();
        for (key, block, _) in self.table().iter() {
            let start = key.block.0 * u64::from(self.block_bytes);
            let range = (start, start + u64::from(block.length));
            stored.entry(key.file.to_string()).or_default().push(range);
        }
        for entry in std::fs::read_dir(&blocks).map_err(broken)? {
            let entry = entry.map_err(broken)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(mut ranges) = stored.remove(&name) else {
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
            // A read of the last block detects a file that is too short.
            if file.metadata().map_err(broken)?.len() > end {
                file.set_len(end).map_err(broken)?;
            }
        }
        Ok(())
    }
}
