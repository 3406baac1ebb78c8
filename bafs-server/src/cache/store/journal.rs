//! The journal of the blocks on disk: which came, which left. Knows no policy.
//!
//! Records have one length and a check sum, so a start finds a torn tail and cuts it. Nothing is
//! synced: the first read of a block compares it with its digest, and a start frees blocks that the
//! journal has forgotten.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use bafs_proto::hash::{self, Digest};
use bafs_proto::ids::{BlockIndex, FileIndex};
use bafs_proto::{Result, codec};
use serde::{Deserialize, Serialize};

use crate::cache::errors::disk_fault;
use crate::cache::locks::lock;
use crate::logic::blocks::{BlockKey, CopyClass, StoredBlock};

/// Bytes of an encoded record: kind, class, file, block, length, digest, check sum.
const RECORD_BYTES: usize = 1 + 1 + 4 + 8 + 4 + 32 + 8;

/// The journal is written anew when it has so many more records than there are blocks.
const SURPLUS_RECORDS_MAX: usize = 4096;

/// A block as the journal describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct JournaledBlock {
    pub(super) key: BlockKey,
    pub(super) length: u32,
    pub(super) digest: Digest,
    pub(super) class: CopyClass,
}

impl JournaledBlock {
    /// A block of the table.
    pub(super) fn new(key: BlockKey, stored: StoredBlock, class: CopyClass) -> Self {
        Self {
            key,
            length: stored.length,
            digest: stored.digest,
            class,
        }
    }
}

/// One change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum JournalEntry {
    /// The block is on disk.
    Keep(JournaledBlock),
    /// The block is no longer on disk, or will be swept.
    Drop { key: BlockKey },
}

#[derive(Serialize, Deserialize)]
struct JournalRecord {
    /// 0 drops a block, 1 keeps a primary copy, 2 a secondary one, 3 a pinned one.
    kind: u8,
    /// Version of the record's form.
    version: u8,
    file: u32,
    block: u64,
    length: u32,
    digest: Digest,
    check: u64,
}

const VERSION: u8 = 1;

impl JournalRecord {
    fn of(entry: JournalEntry) -> Self {
        let (kind, key, length, digest) = match entry {
            JournalEntry::Keep(block) => {
                let kind = match block.class {
                    CopyClass::Primary => 1,
                    CopyClass::Secondary => 2,
                    CopyClass::Pinned => 3,
                };
                (kind, block.key, block.length, block.digest)
            }
            JournalEntry::Drop { key } => (0, key, 0, Digest([0; 32])),
        };
        let (file, block) = (key.file.0, key.block.0);
        let mut record = Self {
            kind,
            version: VERSION,
            file,
            block,
            length,
            digest,
            check: 0,
        };
        record.check = record.sum();
        record
    }

    fn sum(&self) -> u64 {
        hash::rendezvous_score(&[
            &[self.kind, self.version],
            &self.file.to_le_bytes(),
            &self.block.to_le_bytes(),
            &self.length.to_le_bytes(),
            &self.digest.0,
        ])
    }

    fn entry(&self) -> Option<JournalEntry> {
        if self.version != VERSION || self.check != self.sum() {
            return None;
        }
        let key = BlockKey {
            file: FileIndex(self.file),
            block: BlockIndex(self.block),
        };
        let class = match self.kind {
            0 => return Some(JournalEntry::Drop { key }),
            1 => CopyClass::Primary,
            2 => CopyClass::Secondary,
            3 => CopyClass::Pinned,
            _ => return None,
        };
        Some(JournalEntry::Keep(JournaledBlock {
            key,
            length: self.length,
            digest: self.digest,
            class,
        }))
    }
}

fn encode(entries: &[JournalEntry]) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(entries.len() * RECORD_BYTES);
    for &entry in entries {
        bytes.extend(codec::encode(&JournalRecord::of(entry))?);
    }
    debug_assert_eq!(bytes.len(), entries.len() * RECORD_BYTES);
    Ok(bytes)
}

/// A journal that takes entries.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    state: Mutex<JournalState>,
}

#[derive(Debug)]
struct JournalState {
    file: File,
    records: usize,
}

impl JournalState {
    fn is_long(&self, blocks: usize) -> bool {
        self.records > 2 * blocks + SURPLUS_RECORDS_MAX
    }
}

impl Journal {
    /// Opens the journal at `path`, made if it is not there, cuts a torn tail, and returns it with
    /// its entries in order.
    ///
    /// # Errors
    /// `ServerFault` when the disk fails.
    pub(super) fn open(path: PathBuf) -> Result<(Self, Vec<JournalEntry>)> {
        let mut file = append_to(&path)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)
            .map_err(|e| disk_fault("read the cache journal", &path, e))?;
        let mut entries = Vec::new();
        for piece in bytes.chunks_exact(RECORD_BYTES) {
            let entry = codec::decode::<JournalRecord>(piece)
                .ok()
                .and_then(|record| record.entry());
            let Some(entry) = entry else { break };
            entries.push(entry);
        }
        let good = entries.len() * RECORD_BYTES;
        if good < bytes.len() {
            tracing::warn!(path = %path.display(), lost_bytes = bytes.len() - good,
                "cut a torn cache journal; its blocks are fetched again when they are needed");
            file.set_len(good as u64)
                .map_err(|e| disk_fault("cut the cache journal", &path, e))?;
        }
        let state = Mutex::new(JournalState {
            file,
            records: entries.len(),
        });
        Ok((Self { path, state }, entries))
    }

    /// Adds entries with one write.
    ///
    /// # Errors
    /// `ServerFault` when the disk refuses them; then none of them counts.
    pub(super) fn append(&self, entries: &[JournalEntry]) -> Result<()> {
        let bytes = encode(entries)?;
        let mut state = self.lock();
        let before = (state.records * RECORD_BYTES) as u64;
        if let Err(error) = state.file.write_all(&bytes) {
            // A part of a record would hide every later one from the next life.
            state
                .file
                .set_len(before)
                .map_err(|e| disk_fault("mend the cache journal", &self.path, e))?;
            return Err(disk_fault("write the cache journal", &self.path, error));
        }
        state.records += entries.len();
        Ok(())
    }

    /// Whether the journal is much longer than it must be for so many blocks.
    pub(super) fn is_long(&self, blocks: usize) -> bool {
        self.lock().is_long(blocks)
    }

    /// Rewrites the journal when it is much longer than it must be. `live` gives the entries to
    /// keep, oldest use first; no append runs meanwhile.
    ///
    /// # Errors
    /// `ServerFault` when the disk fails; the old journal stays.
    pub(super) fn compact(
        &self,
        blocks: usize,
        live: impl FnOnce() -> Vec<JournalEntry>,
    ) -> Result<()> {
        let mut state = self.lock();
        // Another thread may have rewritten it meanwhile.
        if !state.is_long(blocks) {
            return Ok(());
        }
        let entries = live();
        // Opened by its first name: it is the one to append to, whatever happens from here on.
        let file = write_beside(&self.path, &entries)?;
        put_in_place(&self.path)?;
        *state = JournalState {
            file,
            records: entries.len(),
        };
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, JournalState> {
        lock(&self.state)
    }
}

/// Puts a journal of exactly these entries at `path`, in place of what was there.
///
/// # Errors
/// `ServerFault` when the disk fails.
pub(super) fn write_whole(path: &Path, entries: &[JournalEntry]) -> Result<()> {
    write_beside(path, entries)?;
    put_in_place(path)
}

/// Makes a journal that will be at `path`; it can be appended to.
fn write_beside(path: &Path, entries: &[JournalEntry]) -> Result<File> {
    let temporary = path.with_extension("new");
    std::fs::write(&temporary, encode(entries)?)
        .map_err(|e| disk_fault("write the cache journal anew", path, e))?;
    append_to(&temporary)
}

fn put_in_place(path: &Path) -> Result<()> {
    std::fs::rename(path.with_extension("new"), path)
        .map_err(|e| disk_fault("write the cache journal anew", path, e))
}

fn append_to(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).append(true).create(true);
    options
        .open(path)
        .map_err(|e| disk_fault("open the cache journal", path, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keep(block: u64) -> JournalEntry {
        let key = BlockKey {
            file: FileIndex(3),
            block: BlockIndex(block),
        };
        let class = match block % 3 {
            0 => CopyClass::Primary,
            1 => CopyClass::Secondary,
            _ => CopyClass::Pinned,
        };
        JournalEntry::Keep(JournaledBlock {
            key,
            length: 9,
            digest: Digest::of(&[block as u8]),
            class,
        })
    }

    #[test]
    fn entries_come_back_in_order() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("journal");
        let (journal, entries) = Journal::open(path.clone()).expect("open");
        assert_eq!(entries, []);
        let drop = JournalEntry::Drop {
            key: BlockKey {
                file: FileIndex(3),
                block: BlockIndex(1),
            },
        };
        journal.append(&[keep(1), keep(2)]).expect("append");
        journal.append(&[drop]).expect("append");
        assert_eq!(
            Journal::open(path).expect("open").1,
            [keep(1), keep(2), drop]
        );
    }

    #[test]
    fn a_tail_torn_at_any_byte_is_cut() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("journal");
        let whole = encode(&[keep(1), keep(2), keep(3)]).expect("encode");
        for end in 0..whole.len() {
            std::fs::write(&path, &whole[..end]).expect("write");
            let (journal, entries) = Journal::open(path.clone()).expect("open");
            assert_eq!(entries.len(), end / RECORD_BYTES, "torn at {end}");
            journal.append(&[keep(9)]).expect("append");
            let (_, entries) = Journal::open(path.clone()).expect("open");
            assert_eq!(entries.last(), Some(&keep(9)), "torn at {end}");
        }
    }

    #[test]
    fn a_record_with_a_flipped_bit_is_rejected() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("journal");
        let whole = encode(&[keep(1), keep(2)]).expect("encode");
        for bit in 0..RECORD_BYTES * 8 {
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&path, &bytes).expect("write");
            assert_eq!(
                Journal::open(path.clone()).expect("open").1,
                [],
                "bit {bit}"
            );
        }
    }

    #[test]
    fn compaction_keeps_live_entries_and_later_appends() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("journal");
        let (journal, _) = Journal::open(path.clone()).expect("open");
        for _ in 0..SURPLUS_RECORDS_MAX / 64 + 1 {
            journal.append(&[keep(1); 64]).expect("append");
        }
        journal.compact(1, || vec![keep(1)]).expect("compact");
        journal.append(&[keep(2)]).expect("append");
        assert_eq!(Journal::open(path).expect("open").1, [keep(1), keep(2)]);
    }
}
