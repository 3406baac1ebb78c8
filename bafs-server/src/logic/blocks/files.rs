//! The files that the blocks of a cache volume belong to: how many have a place, which must stay
//! whole, which leave. Moves no byte.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::{BlockIndex, FileIndex};
use bafs_proto::volume::ReplacementPolicy;

use super::{BlockKey, BlockTable, CopyClass, StoredBlock, Victim, charged_bytes};

/// Most blocks that are looked at for a file that may leave, and while the table is held.
const SCANNED_BLOCKS_MAX: usize = 1 << 16;

/// The files of which something is on disk.
#[derive(Debug)]
pub(super) struct FileTable {
    capacity: u64,
    files: BTreeMap<FileIndex, FileBlocks>,
    /// Files without blocks that are still on disk, and whether somebody is at it.
    empty: BTreeMap<FileIndex, bool>,
}

/// Blocks of a file, those on their way in or out as well.
#[derive(Debug, Default)]
struct FileBlocks {
    count: u64,
    /// All of them are before this one.
    end: u64,
    /// All that were put since the file is here are before this one.
    inserted_end: u64,
}

/// A file whose blocks must stay: somebody reads them without any way to be told.
#[derive(Debug, Default)]
pub(super) struct FileHold {
    holders: u32,
    /// One of its blocks is found damaged: nobody else may have it.
    pub(super) is_damaged: bool,
    pub(super) primary_bytes: u64,
    pub(super) secondary_bytes: u64,
    pinned_bytes: u64,
}

impl FileHold {
    pub(super) fn bytes(&mut self, class: CopyClass) -> &mut u64 {
        match class {
            CopyClass::Primary => &mut self.primary_bytes,
            CopyClass::Secondary => &mut self.secondary_bytes,
            CopyClass::Pinned => &mut self.pinned_bytes,
        }
    }
}

impl FileTable {
    pub(super) fn set_capacity(&mut self, files: u64) {
        self.capacity = files;
    }

    /// At most so many files.
    pub(super) fn new(capacity: u64) -> Self {
        Self {
            capacity,
            files: BTreeMap::new(),
            empty: BTreeMap::new(),
        }
    }

    fn len(&self) -> u64 {
        (self.files.len() + self.empty.len()) as u64
    }

    /// Whether a block of this file finds a place, as far as the number of files goes.
    pub(super) fn has_room_for(&self, file: FileIndex) -> bool {
        self.files.contains_key(&file)
            || (!self.empty.contains_key(&file) && self.len() < self.capacity)
    }

    /// Counts a block that is reserved.
    pub(super) fn add(&mut self, key: BlockKey) {
        let blocks = self.files.entry(key.file).or_default();
        blocks.count += 1;
        blocks.end = blocks.end.max(key.block.0 + 1);
    }

    /// Takes note of a block that is on disk.
    pub(super) fn note_insert(&mut self, key: BlockKey) {
        if let Some(blocks) = self.files.get_mut(&key.file) {
            blocks.inserted_end = blocks.inserted_end.max(key.block.0 + 1);
        }
    }

    /// Counts a block that is off the disk.
    pub(super) fn remove(&mut self, key: BlockKey) {
        if let Some(blocks) = self.files.get_mut(&key.file) {
            blocks.count -= 1;
            if blocks.count == 0 {
                self.files.remove(&key.file);
                self.empty.insert(key.file, false);
            }
        }
    }
}

impl BlockTable {
    /// Files of which something is on disk.
    pub(crate) fn used_files(&self) -> u64 {
        self.files.len()
    }

    /// Most files of which something may be on disk.
    pub(crate) fn capacity_files(&self) -> u64 {
        self.files.capacity
    }

    /// Whether a block of a file finds no place because there are too many other files.
    pub(crate) fn has_no_file_slot(&self, file: FileIndex) -> bool {
        !self.files.has_room_for(file) && !self.files.empty.contains_key(&file)
    }

    /// Files that have blocks here, from `first` on.
    pub(crate) fn files_from(&self, first: FileIndex) -> impl Iterator<Item = FileIndex> + '_ {
        self.files.files.range(first..).map(|(file, _)| *file)
    }

    /// Blocks that cannot be in a file of `size` bytes, because they end behind it.
    pub(crate) fn blocks_beyond(
        &self,
        file: FileIndex,
        block_bytes: u32,
        size: u64,
    ) -> Vec<(BlockKey, StoredBlock)> {
        let put_end = self
            .files
            .files
            .get(&file)
            .map_or(0, |blocks| blocks.inserted_end);
        let block_bytes = u64::from(block_bytes);
        let keys = (size / block_bytes..put_end).map(|block| BlockKey {
            file,
            block: BlockIndex(block),
        });
        let end =
            |key: BlockKey, held: &StoredBlock| key.block.0 * block_bytes + u64::from(held.length);
        keys.filter_map(|key| Some((key, *self.peek(key)?)))
            .filter(|(key, held)| end(*key, held) > size)
            .collect()
    }

    /// Takes over the files that have no blocks any more, to take them off the disk. None of
    /// their blocks finds a place before [`BlockTable::finish_file_removal`].
    pub(crate) fn take_empty_files(&mut self) -> Vec<FileIndex> {
        let free = self.files.empty.iter_mut().filter(|(_, taken)| !**taken);
        free.map(|(file, taken)| {
            *taken = true;
            *file
        })
        .collect()
    }

    /// A file is off the disk.
    pub(crate) fn finish_file_removal(&mut self, file: FileIndex) {
        self.files.empty.remove(&file);
    }

    /// A file could not be taken off the disk.
    pub(crate) fn cancel_file_removal(&mut self, file: FileIndex) {
        if let Some(taken) = self.files.empty.get_mut(&file) {
            *taken = false;
        }
    }

    /// Takes out all blocks of a file, so that another one finds a place: that of the first block
    /// to go of which all may go for a block of this class. They stay charged until
    /// `BlockTable::freed`. Empty when there is none.
    pub(crate) fn evict_file(&mut self, for_class: CopyClass) -> Vec<Victim> {
        let blocks = self.find_file_victim(for_class).unwrap_or_default();
        let mut victims = Vec::with_capacity(blocks.len());
        for (key, class) in blocks {
            let (list, _) = self.class_list(class);
            if let Some(held) = list.pop(&key) {
                let victim = self.note_evicted(key, held, class);
                self.blocks_in_transit
                    .insert(key, charged_bytes(victim.length));
                victims.push(victim);
            }
        }
        victims
    }

    fn find_file_victim(&self, for_class: CopyClass) -> Option<Vec<(BlockKey, CopyClass)>> {
        use CopyClass::{Pinned, Primary, Secondary};
        self.file_of_first_victim(Secondary, &[Secondary])
            .or_else(|| match for_class {
                Secondary => None,
                Primary | Pinned => self.file_of_first_victim(Primary, &[Primary, Secondary]),
            })
    }

    /// The file of the first block of a class to go of which all blocks are of some classes.
    fn file_of_first_victim(
        &self,
        class: CopyClass,
        may_leave: &[CopyClass],
    ) -> Option<Vec<(BlockKey, CopyClass)>> {
        let list = match class {
            CopyClass::Primary => &self.primary,
            CopyClass::Secondary => &self.secondary,
            CopyClass::Pinned => &self.pinned,
        };
        let (mut oldest, mut latest) = (list.iter().rev(), list.iter());
        let next = || match self.replacement {
            ReplacementPolicy::Lru => oldest.next(),
            ReplacementPolicy::Mru => latest.next(),
        };
        let mut seen = BTreeSet::new();
        std::iter::from_fn(next)
            .take(SCANNED_BLOCKS_MAX)
            .filter(|(key, _)| seen.insert(key.file))
            .find_map(|(key, _)| self.evictable_blocks(key.file, may_leave))
    }

    /// All blocks of a file, unless one must stay, is on its way, or is of another class.
    fn evictable_blocks(
        &self,
        file: FileIndex,
        may_leave: &[CopyClass],
    ) -> Option<Vec<(BlockKey, CopyClass)>> {
        if self.is_file_held(file) {
            return None;
        }
        let FileBlocks { count, end, .. } = self.files.files.get(&file)?;
        let keys = (0..*end).map(|block| BlockKey {
            file,
            block: BlockIndex(block),
        });
        let blocks: Vec<_> = keys
            .filter_map(|key| Some((key, self.class_of(key)?)))
            .collect();
        let may_all = blocks.iter().all(|(_, class)| may_leave.contains(class));
        (may_all && blocks.len() as u64 == *count).then_some(blocks)
    }

    /// Whether all `blocks` blocks of a file are here, or on their way in or out.
    pub(crate) fn has_all_blocks(&self, file: FileIndex, blocks: u64) -> bool {
        let there = self.files.files.get(&file);
        there.is_some_and(|there| there.count == blocks)
    }

    /// Makes all `blocks` blocks of a file stay until [`BlockTable::release_file`], as often as
    /// this was called. Refuses, and does nothing, unless all of them are here and were checked.
    pub(crate) fn hold_file(&mut self, file: FileIndex, blocks: u64) -> bool {
        if let Some(kept) = self.file_holds.get_mut(&file) {
            kept.holders += u32::from(!kept.is_damaged);
            return !kept.is_damaged;
        }
        let mut kept = FileHold {
            holders: 1,
            ..FileHold::default()
        };
        for block in (0..blocks).map(BlockIndex) {
            let key = BlockKey { file, block };
            let Some(held) = self.peek(key).filter(|held| held.is_verified) else {
                return false;
            };
            let bytes = charged_bytes(held.length);
            if let Some(class) = self.class_of(key) {
                *kept.bytes(class) += bytes;
            }
        }
        self.file_holds.insert(file, kept);
        true
    }

    /// Undoes one [`BlockTable::hold_file`]. Who had the whole file may have read it, which nobody
    /// saw: with the last one, that counts as a use of each block.
    pub(crate) fn release_file(&mut self, file: FileIndex) {
        let Some(kept) = self.file_holds.get_mut(&file) else {
            return;
        };
        kept.holders -= 1;
        if kept.holders > 0 {
            return;
        }
        self.file_holds.remove(&file);
        let end = self.files.files.get(&file).map_or(0, |blocks| blocks.end);
        for block in (0..end).map(BlockIndex) {
            self.promote(BlockKey { file, block });
        }
    }

    /// Whether the blocks of a file must stay where they are.
    pub(crate) fn is_file_held(&self, file: FileIndex) -> bool {
        self.file_holds.contains_key(&file)
    }

    /// How often a file is held.
    pub(crate) fn hold_count(&self, file: FileIndex) -> u32 {
        self.file_holds.get(&file).map_or(0, |kept| kept.holders)
    }

    /// Number of files whose blocks must stay.
    pub(crate) fn held_file_count(&self) -> usize {
        self.file_holds.len()
    }
}
