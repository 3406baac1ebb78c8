//! Which blocks a cache volume holds and which goes when space is short; the only user of `lru`.
//! Moves no byte: the caller writes after [`BlockTable::reserve`] and frees what it was told to.
//!
//! Space is charged before a block is written and a victim's space is reused only by the
//! reservation that freed it, so that the disk never holds more than the capacity.

mod files;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex};
use bafs_proto::volume::ReplacementPolicy;
use lru::LruCache;

use self::files::{FileHold, FileTable};

/// A file system gives space in pieces of this many bytes, so blocks are charged in them.
pub(crate) const ALLOCATION_UNIT_BYTES: u64 = 4096;

/// Digests of blocks that were here once: they expose a peer that sends other bytes.
const FORMER_DIGESTS_MAX: NonZeroUsize = NonZeroUsize::new(1 << 16).expect("is not zero");

/// Copies have little room where it is less than such a part of what others are the primaries of: a
/// scan drives each of them out before it is read again.
const SCARCE_COPY_DIVISOR: u64 = 4;

/// Of copies that would drive out others there, one of so many is kept. What is read often is so
/// kept soon, and a scan does not write all that it reads to disk in vain (Qureshi et al., Adaptive
/// insertion policies, 2007: bimodal insertion, with their rate).
const COPY_ADMISSION_INTERVAL: u32 = 32;

/// How readers that ask nobody are followed: their uses are taken over when so many blocks have
/// left since the last time, or one sixteenth of all.
const UNSYNCED_EVICTIONS_MAX: usize = 64;

/// A block of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct BlockKey {
    /// The file.
    pub(crate) file: FileIndex,
    /// The block of it.
    pub(crate) block: BlockIndex,
}

/// Why a block is here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyClass {
    /// This server is where others look for it.
    Primary,
    /// A convenience: another server has it too.
    Secondary,
    /// As primary, and never to leave.
    Pinned,
}

const ALL_CLASSES: [CopyClass; 3] = [CopyClass::Primary, CopyClass::Secondary, CopyClass::Pinned];

/// A block that is on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StoredBlock {
    /// Digest made at its origin.
    pub(crate) digest: Digest,
    /// Length in bytes.
    pub(crate) length: u32,
    /// Whether its bytes were compared with the digest since this process started.
    pub(crate) is_verified: bool,
    /// Differs each time that a block is put: who read without a lock sees whether it is the same.
    pub(crate) stamp: u64,
}

/// A block that must leave the disk before the reserved one is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Victim {
    /// The block.
    pub(crate) key: BlockKey,
    /// Its length in bytes.
    pub(crate) length: u32,
    /// Why it was here.
    pub(crate) class: CopyClass,
}

/// What those who read without asking must be told of a block: its mark and its digest when its
/// bytes may be read.
pub(crate) type BlockChange = (BlockKey, Option<(u32, Digest)>);

/// Nothing can make room for the block, or it is on its way in or out: it is passed through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NoRoom;

/// The blocks of one cache volume.
pub(crate) struct BlockTable {
    capacity_bytes: u64,
    /// All that readers may ask for.
    source_bytes: u64,
    replacement: ReplacementPolicy,
    used_bytes: u64,
    primary: LruCache<BlockKey, StoredBlock>,
    secondary: LruCache<BlockKey, StoredBlock>,
    pinned: LruCache<BlockKey, StoredBlock>,
    primary_bytes: u64,
    secondary_bytes: u64,
    pinned_bytes: u64,
    /// Being written or being freed, with what is charged: not to be touched by anyone else.
    blocks_in_transit: BTreeMap<BlockKey, u64>,
    files: FileTable,
    former_digests: LruCache<BlockKey, Digest>,
    next_stamp: u64,
    /// Copies that found others in their place where there is little room for them.
    rejected_copies: u32,
    /// Files that are held, and what they are charged for by class.
    file_holds: BTreeMap<FileIndex, FileHold>,
    /// What changed since it was told; `None` when nobody wants to know.
    changes: Option<Vec<BlockChange>>,
    /// Evictions since uses were taken over; `None` before the first time.
    unsynced_evictions: Option<usize>,
}

impl StoredBlock {
    /// What this very copy is known by to those who read without asking; never 0.
    fn mark(&self) -> u32 {
        let marks = u64::from(u32::MAX);
        // It returns after four thousand million other blocks: no read lasts that long.
        u32::try_from(self.stamp % marks).map_or(1, |mark| mark + 1)
    }

    fn block_change(&self, key: BlockKey) -> BlockChange {
        (key, self.is_verified.then(|| (self.mark(), self.digest)))
    }
}

impl BlockTable {
    /// A table of a volume that keeps at most so many bytes in so many files.
    pub(crate) fn new(
        capacity_bytes: u64,
        capacity_files: u64,
        replacement: ReplacementPolicy,
    ) -> Self {
        Self {
            capacity_bytes,
            source_bytes: 0,
            replacement,
            used_bytes: 0,
            primary: LruCache::unbounded(),
            secondary: LruCache::unbounded(),
            pinned: LruCache::unbounded(),
            primary_bytes: 0,
            secondary_bytes: 0,
            pinned_bytes: 0,
            blocks_in_transit: BTreeMap::new(),
            files: FileTable::new(capacity_files),
            former_digests: LruCache::new(FORMER_DIGESTS_MAX),
            next_stamp: 1,
            rejected_copies: 0,
            file_holds: BTreeMap::new(),
            changes: None,
            unsynced_evictions: None,
        }
    }

    /// The same for a source of so many bytes.
    pub(crate) fn with_source_bytes(self, source_bytes: u64) -> Self {
        Self {
            source_bytes,
            ..self
        }
    }

    /// From now on changes are written down; returns what holds now.
    pub(crate) fn start_change_log(&mut self) -> Vec<BlockChange> {
        self.changes = Some(Vec::new());
        let all = self.primary.iter().chain(self.secondary.iter());
        let all = all.chain(self.pinned.iter());
        all.map(|(key, held)| held.block_change(*key)).collect()
    }

    /// From now on nobody wants to know of changes; returns the blocks that are here.
    pub(crate) fn stop_change_log(&mut self) -> Vec<BlockKey> {
        self.changes = None;
        let all = self.primary.iter().chain(self.secondary.iter());
        let all = all.chain(self.pinned.iter());
        all.map(|(key, _)| *key).collect()
    }

    /// Changes since this was called last, oldest first.
    pub(crate) fn take_changes(&mut self) -> Vec<BlockChange> {
        self.changes
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    /// Whether a block of this length drives others out, and uses that nobody told must be taken
    /// over first.
    pub(crate) fn is_use_import_due(&self, length: u32) -> bool {
        let enough = UNSYNCED_EVICTIONS_MAX.max(self.len() / 16);
        self.used_bytes + charged_bytes(length) > self.capacity_bytes
            && self
                .unsynced_evictions
                .is_none_or(|unseen| unseen >= enough)
    }

    /// Takes over uses, the latest last.
    pub(crate) fn import_uses(&mut self, keys: impl IntoIterator<Item = BlockKey>) {
        for key in keys {
            self.promote(key);
        }
        self.unsynced_evictions = Some(0);
    }

    /// Space that is in use or promised, in bytes.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Bytes of the blocks of a class.
    pub(crate) fn class_bytes(&self, class: CopyClass) -> u64 {
        match class {
            CopyClass::Primary => self.primary_bytes,
            CopyClass::Secondary => self.secondary_bytes,
            CopyClass::Pinned => self.pinned_bytes,
        }
    }

    /// Changes why a block is here. Returns it if that was another class before.
    pub(crate) fn reclassify(&mut self, key: BlockKey, class: CopyClass) -> Option<StoredBlock> {
        for former in ALL_CLASSES.into_iter().filter(|former| *former != class) {
            let (list, bytes) = self.class_list(former);
            if let Some(held) = list.pop(&key) {
                *bytes -= charged_bytes(held.length);
                let (list, bytes) = self.class_list(class);
                list.put(key, held);
                *bytes += charged_bytes(held.length);
                if let Some(kept) = self.file_holds.get_mut(&key.file) {
                    *kept.bytes(former) -= charged_bytes(held.length);
                    *kept.bytes(class) += charged_bytes(held.length);
                }
                return Some(held);
            }
        }
        None
    }

    /// Takes out blocks of at least so many bytes, because the disk has no room for what was
    /// promised. They stay charged until [`BlockTable::release_space`].
    pub(crate) fn evict_bytes(&mut self, bytes: u64) -> Vec<Victim> {
        let mut victims = Vec::new();
        let mut given = 0;
        while given < bytes
            && let Some(victim) = self.next_victim(CopyClass::Primary)
        {
            given += charged_bytes(victim.length);
            self.blocks_in_transit
                .insert(victim.key, charged_bytes(victim.length));
            victims.push(victim);
        }
        victims
    }

    /// Keeps at most so many bytes in so many files from now on. What is over that leaves as new
    /// blocks come, if nobody evicts it before.
    pub(crate) fn set_capacity(&mut self, bytes: u64, files: u64) {
        self.capacity_bytes = bytes;
        self.files.set_capacity(files);
    }

    /// Number of blocks that are here.
    pub(crate) fn len(&self) -> usize {
        self.primary.len() + self.secondary.len() + self.pinned.len()
    }

    /// Finds a block and counts this as its latest use.
    pub(crate) fn find(&mut self, key: BlockKey) -> Option<StoredBlock> {
        self.primary
            .get(&key)
            .or_else(|| self.secondary.get(&key))
            .or_else(|| self.pinned.get(&key))
            .copied()
    }

    /// Why a block is here, if it is; no use of it.
    pub(crate) fn class_of(&self, key: BlockKey) -> Option<CopyClass> {
        if self.primary.contains(&key) {
            Some(CopyClass::Primary)
        } else if self.secondary.contains(&key) {
            Some(CopyClass::Secondary)
        } else {
            self.pinned.contains(&key).then_some(CopyClass::Pinned)
        }
    }

    /// Whether a block is here; no use of it.
    pub(crate) fn contains(&self, key: BlockKey) -> bool {
        self.peek(key).is_some()
    }

    /// Whether a block is here and was compared with its digest; no use of it.
    pub(crate) fn is_readable(&self, key: BlockKey) -> bool {
        self.peek(key).is_some_and(|held| held.is_verified)
    }

    /// Whether the block is still the one that was found with this stamp.
    pub(crate) fn has_stamp(&self, key: BlockKey, stamp: u64) -> bool {
        self.peek(key).is_some_and(|held| held.stamp == stamp)
    }

    /// Notes that the bytes of the block were compared with its digest.
    pub(crate) fn mark_verified(&mut self, key: BlockKey, stamp: u64) {
        if self.has_stamp(key, stamp) {
            self.set_verified(key, true);
        }
    }

    /// Somebody got other bytes than those of the block: nobody gets it again before its bytes
    /// were compared with its digest anew.
    pub(crate) fn mark_unverified(&mut self, key: BlockKey) {
        self.set_verified(key, false);
    }

    fn set_verified(&mut self, key: BlockKey, verified: bool) {
        let held = match self.primary.peek_mut(&key) {
            Some(held) => Some(held),
            None => match self.secondary.peek_mut(&key) {
                Some(held) => Some(held),
                None => self.pinned.peek_mut(&key),
            },
        };
        if let Some(held) = held {
            held.is_verified = verified;
            let change = held.block_change(key);
            self.note_change(change);
        }
    }

    /// Digest of a block that is here or was here not long ago.
    pub(crate) fn digest_of(&self, key: BlockKey) -> Option<Digest> {
        let held = self.peek(key).map(|held| held.digest);
        held.or_else(|| self.former_digests.peek(&key).copied())
    }

    /// Reserves space for a block. The victims are no longer in the table; the caller frees their
    /// space on disk, says [`BlockTable::release_space`] for each, and only then writes.
    ///
    /// Secondary copies go first, and a secondary copy never drives out a primary one. Where they
    /// have little room only some are kept.
    ///
    /// # Errors
    /// `NoRoom`: the block is not kept.
    pub(crate) fn reserve(
        &mut self,
        key: BlockKey,
        length: u32,
        class: CopyClass,
    ) -> Result<Vec<Victim>, NoRoom> {
        let charge = charged_bytes(length);
        if self.blocks_in_transit.contains_key(&key)
            || self.contains(key)
            || !self.files.has_room_for(key.file)
            || charge > self.attainable_bytes(class)
        {
            return Err(NoRoom);
        }
        let is_full = self.used_bytes + charge > self.capacity_bytes;
        if is_full && class == CopyClass::Secondary && self.has_little_room_for_copies() {
            self.rejected_copies = self.rejected_copies.wrapping_add(1);
            if !self.rejected_copies.is_multiple_of(COPY_ADMISSION_INTERVAL) {
                return Err(NoRoom);
            }
        }
        let mut victims = Vec::new();
        while self.used_bytes + charge > self.capacity_bytes {
            let victim = self
                .next_victim(class)
                .expect("reachable bytes were counted");
            self.used_bytes -= charged_bytes(victim.length);
            self.blocks_in_transit.insert(victim.key, 0);
            victims.push(victim);
        }
        self.used_bytes += charge;
        assert!(
            self.used_bytes <= self.capacity_bytes,
            "more is promised than there is"
        );
        self.blocks_in_transit.insert(key, charge);
        self.files.add(key);
        Ok(victims)
    }

    /// The space of a victim or of a removed block is free on disk.
    pub(crate) fn release_space(&mut self, key: BlockKey) {
        if let Some(charged) = self.blocks_in_transit.remove(&key) {
            self.used_bytes -= charged;
            self.files.remove(key);
        }
    }

    /// The space of a victim could not be freed: it stays charged and the block stays away.
    pub(crate) fn keep_charged(&mut self, key: BlockKey, length: u32) {
        if self.blocks_in_transit.get(&key) == Some(&0) {
            self.blocks_in_transit.insert(key, charged_bytes(length));
            self.used_bytes += charged_bytes(length);
        }
    }

    /// A reserved block is on disk.
    pub(crate) fn insert(
        &mut self,
        key: BlockKey,
        length: u32,
        digest: Digest,
        class: CopyClass,
        verified: bool,
    ) {
        let charged = self.blocks_in_transit.remove(&key);
        assert_eq!(
            charged,
            Some(charged_bytes(length)),
            "a block is put where space was reserved"
        );
        let held = StoredBlock {
            digest,
            length,
            is_verified: verified,
            stamp: self.next_stamp,
        };
        self.next_stamp += 1;
        self.note_change(held.block_change(key));
        self.files.note_insert(key);
        let (list, bytes) = self.class_list(class);
        list.put(key, held);
        *bytes += charged_bytes(length);
    }

    /// Puts a block that an earlier life of the server left on disk, if there is room for it
    /// without driving others out. Its bytes are believed only after their first check.
    pub(crate) fn restore(
        &mut self,
        key: BlockKey,
        length: u32,
        digest: Digest,
        class: CopyClass,
    ) -> Result<(), NoRoom> {
        if self.used_bytes + charged_bytes(length) > self.capacity_bytes {
            return Err(NoRoom);
        }
        self.reserve(key, length, class)?;
        self.insert(key, length, digest, class, false);
        Ok(())
    }

    /// A reserved block was not written; its space is free again. Call it after what was written
    /// in part is off the disk.
    pub(crate) fn cancel_reservation(&mut self, key: BlockKey) {
        self.release_space(key);
    }

    /// Takes a block out because its bytes are bad. Its space stays charged until
    /// [`BlockTable::release_space`], which must not come while its file is held: its place on disk
    /// must stay as it is. Does nothing if it is no longer the block with this stamp.
    pub(crate) fn remove(&mut self, key: BlockKey, stamp: u64) -> Option<StoredBlock> {
        if !self.has_stamp(key, stamp) {
            return None;
        }
        let mut taken = None;
        for class in ALL_CLASSES {
            let (list, bytes) = self.class_list(class);
            if let Some(held) = list.pop(&key) {
                *bytes -= charged_bytes(held.length);
                taken = Some((held, class));
            }
        }
        let (held, class) = taken?;
        if let Some(kept) = self.file_holds.get_mut(&key.file) {
            *kept.bytes(class) -= charged_bytes(held.length);
            kept.is_damaged = true;
        }
        self.note_change((key, None));
        self.former_digests.put(key, held.digest);
        self.blocks_in_transit
            .insert(key, charged_bytes(held.length));
        Some(held)
    }

    /// Every block with its class, the one used last first, secondary ones last.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockKey, StoredBlock, CopyClass)> + '_ {
        let primary = self
            .primary
            .iter()
            .map(|(key, held)| (*key, *held, CopyClass::Primary));
        let secondary = self
            .secondary
            .iter()
            .map(|(key, held)| (*key, *held, CopyClass::Secondary));
        let pinned = self
            .pinned
            .iter()
            .map(|(key, held)| (*key, *held, CopyClass::Pinned));
        pinned.chain(primary).chain(secondary)
    }

    fn peek(&self, key: BlockKey) -> Option<&StoredBlock> {
        self.primary
            .peek(&key)
            .or_else(|| self.secondary.peek(&key))
            .or_else(|| self.pinned.peek(&key))
    }

    /// The blocks of a class, and the space that they are charged for.
    fn class_list(&mut self, class: CopyClass) -> (&mut LruCache<BlockKey, StoredBlock>, &mut u64) {
        match class {
            CopyClass::Primary => (&mut self.primary, &mut self.primary_bytes),
            CopyClass::Secondary => (&mut self.secondary, &mut self.secondary_bytes),
            CopyClass::Pinned => (&mut self.pinned, &mut self.pinned_bytes),
        }
    }

    fn note_change(&mut self, change: BlockChange) {
        if let Some(changes) = &mut self.changes {
            changes.push(change);
        }
    }

    /// Bytes that a new block of this class could get, by driving others out.
    pub(crate) fn attainable_bytes(&self, class: CopyClass) -> u64 {
        let mut movable = self.evictable_bytes(CopyClass::Secondary);
        if class != CopyClass::Secondary {
            movable += self.evictable_bytes(CopyClass::Primary);
        }
        // What could not be freed on disk may take more than there is, for a while.
        (self.capacity_bytes + movable).saturating_sub(self.used_bytes)
    }

    /// Which block of a class goes first.
    pub(crate) fn replacement(&self) -> ReplacementPolicy {
        self.replacement
    }

    /// Bytes that new blocks of this class can take so that none of them leaves before older ones:
    /// what is fetched for later must be among them.
    pub(crate) fn retainable_bytes(&self, class: CopyClass) -> u64 {
        let is_crowded = class == CopyClass::Secondary && self.has_little_room_for_copies();
        match self.replacement {
            ReplacementPolicy::Lru if !is_crowded => self.attainable_bytes(class),
            // The newest goes first, or is passed through.
            _ => self.capacity_bytes.saturating_sub(self.used_bytes),
        }
    }

    fn has_little_room_for_copies(&self) -> bool {
        let own = self.primary_bytes + self.pinned_bytes;
        let room = self.capacity_bytes.saturating_sub(own);
        room < self.source_bytes.saturating_sub(own) / SCARCE_COPY_DIVISOR
    }

    /// Bytes of a class that may leave.
    fn evictable_bytes(&self, class: CopyClass) -> u64 {
        let (all, kept): (_, u64) = match class {
            CopyClass::Primary => (
                self.primary_bytes,
                self.file_holds
                    .values()
                    .map(|kept| kept.primary_bytes)
                    .sum(),
            ),
            CopyClass::Secondary => (
                self.secondary_bytes,
                self.file_holds
                    .values()
                    .map(|kept| kept.secondary_bytes)
                    .sum(),
            ),
            CopyClass::Pinned => (0, 0),
        };
        all - kept
    }

    fn next_victim(&mut self, for_class: CopyClass) -> Option<Victim> {
        let classes: &[CopyClass] = match for_class {
            CopyClass::Primary | CopyClass::Pinned => &[CopyClass::Secondary, CopyClass::Primary],
            CopyClass::Secondary => &[CopyClass::Secondary],
        };
        for &class in classes {
            if self.evictable_bytes(class) == 0 {
                continue;
            }
            while let Some((key, held)) = self.pop(class) {
                if self.file_holds.contains_key(&key.file) {
                    self.reinsert_last(class, key, held);
                    continue;
                }
                return Some(self.note_evicted(key, held, class));
            }
        }
        None
    }

    /// A block has left its list for good.
    fn note_evicted(&mut self, key: BlockKey, held: StoredBlock, class: CopyClass) -> Victim {
        let (_, bytes) = self.class_list(class);
        *bytes -= charged_bytes(held.length);
        self.former_digests.put(key, held.digest);
        self.note_change((key, None));
        self.unsynced_evictions = self.unsynced_evictions.map(|unseen| unseen + 1);
        Victim {
            key,
            length: held.length,
            class,
        }
    }

    /// Counts a use of a block.
    fn promote(&mut self, key: BlockKey) {
        let _ =
            self.primary.promote(&key) || self.secondary.promote(&key) || self.pinned.promote(&key);
    }

    fn pop(&mut self, class: CopyClass) -> Option<(BlockKey, StoredBlock)> {
        let replacement = self.replacement;
        let (list, _) = self.class_list(class);
        match replacement {
            ReplacementPolicy::Lru => list.pop_lru(),
            ReplacementPolicy::Mru => list.pop_mru(),
        }
    }

    /// Puts a block that must stay back to where the search for victims comes last.
    fn reinsert_last(&mut self, class: CopyClass, key: BlockKey, held: StoredBlock) {
        let replacement = self.replacement;
        let (list, _) = self.class_list(class);
        list.put(key, held);
        if replacement == ReplacementPolicy::Mru {
            list.demote(&key);
        }
    }
}

/// What a block of this length takes on disk, in bytes.
pub(crate) fn charged_bytes(length: u32) -> u64 {
    u64::from(length).next_multiple_of(ALLOCATION_UNIT_BYTES)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const BLOCK: u32 = 8192;

    fn key(block: u64) -> BlockKey {
        BlockKey {
            file: FileIndex(0),
            block: BlockIndex(block),
        }
    }

    fn table(blocks: u64, replacement: ReplacementPolicy) -> BlockTable {
        BlockTable::new(blocks * u64::from(BLOCK), 1, replacement)
    }

    /// Puts a block as a well-behaved caller does, and returns who had to go for it.
    fn put(table: &mut BlockTable, block: u64, class: CopyClass) -> Result<Vec<u64>, NoRoom> {
        let victims = table.reserve(key(block), BLOCK, class)?;
        for victim in &victims {
            table.release_space(victim.key);
        }
        table.insert(key(block), BLOCK, Digest([block as u8; 32]), class, true);
        Ok(victims.iter().map(|victim| victim.key.block.0).collect())
    }

    #[test]
    fn lru_drops_the_oldest_and_mru_the_latest() {
        for (replacement, expected) in [(ReplacementPolicy::Lru, 1), (ReplacementPolicy::Mru, 0)] {
            let mut table = table(3, replacement);
            for block in 0..3 {
                assert_eq!(put(&mut table, block, CopyClass::Primary), Ok(vec![]));
            }
            assert!(table.find(key(0)).is_some());
            assert_eq!(put(&mut table, 3, CopyClass::Primary), Ok(vec![expected]));
        }
    }

    #[test]
    fn secondary_copies_are_evicted_before_primary_ones() {
        let mut table = table(3, ReplacementPolicy::Lru);
        assert_eq!(put(&mut table, 0, CopyClass::Primary), Ok(vec![]));
        assert_eq!(put(&mut table, 1, CopyClass::Secondary), Ok(vec![]));
        assert_eq!(put(&mut table, 2, CopyClass::Primary), Ok(vec![]));
        assert_eq!(put(&mut table, 3, CopyClass::Secondary), Ok(vec![1]));
        assert_eq!(put(&mut table, 4, CopyClass::Primary), Ok(vec![3]));
        assert_eq!(put(&mut table, 5, CopyClass::Secondary), Err(NoRoom));
        assert_eq!(put(&mut table, 6, CopyClass::Primary), Ok(vec![0]));
    }

    #[test]
    fn a_scan_evicts_few_copies_in_small_caches() {
        let replaced = |source: u64| {
            let mut table =
                table(4, ReplacementPolicy::Lru).with_source_bytes(source * u64::from(BLOCK));
            for block in 0..2 {
                assert_eq!(put(&mut table, block, CopyClass::Primary), Ok(vec![]));
            }
            let scan = (2..2 + 2 + 80).map(|block| put(&mut table, block, CopyClass::Secondary));
            scan.filter(|put| put.as_ref().is_ok_and(|gone| !gone.is_empty()))
                .count()
        };
        assert_eq!(replaced(10), 80);
        assert_eq!(replaced(84), 2);
    }

    #[test]
    fn pinned_blocks_are_evictable_only_after_unpinning() {
        for replacement in [ReplacementPolicy::Lru, ReplacementPolicy::Mru] {
            let mut table = table(3, replacement);
            assert_eq!(put(&mut table, 0, CopyClass::Pinned), Ok(vec![]));
            assert_eq!(put(&mut table, 1, CopyClass::Primary), Ok(vec![]));
            assert!(table.reclassify(key(1), CopyClass::Pinned).is_some());
            assert!(table.reclassify(key(1), CopyClass::Pinned).is_none());
            assert_eq!(put(&mut table, 2, CopyClass::Secondary), Ok(vec![]));
            assert_eq!(put(&mut table, 3, CopyClass::Pinned), Ok(vec![2]));
            for class in ALL_CLASSES {
                assert_eq!(put(&mut table, 4, class), Err(NoRoom));
            }
            assert_eq!(table.evict_bytes(1), vec![]);
            assert!(table.reclassify(key(3), CopyClass::Secondary).is_some());
            assert_eq!(put(&mut table, 4, CopyClass::Primary), Ok(vec![3]));
        }
    }

    #[test]
    fn an_evicted_block_is_charged_until_freed() {
        let mut table = table(4, ReplacementPolicy::Lru);
        for (block, class) in [(0, CopyClass::Primary), (1, CopyClass::Secondary)] {
            assert_eq!(put(&mut table, block, class), Ok(vec![]));
        }
        let keys = |victims: Vec<Victim>| victims.iter().map(|v| v.key).collect::<Vec<_>>();
        assert_eq!(keys(table.evict_bytes(1)), [key(1)]);
        assert_eq!(table.used_bytes(), 2 * u64::from(BLOCK));
        table.release_space(key(1));
        assert_eq!(table.used_bytes(), u64::from(BLOCK));
        assert_eq!(keys(table.evict_bytes(u64::MAX)), [key(0)]);
        assert_eq!(table.evict_bytes(1), vec![]);
    }

    #[test]
    fn blocks_in_transit_cannot_be_reserved() {
        let mut table = table(1, ReplacementPolicy::Lru);
        assert_eq!(put(&mut table, 0, CopyClass::Primary), Ok(vec![]));
        let victims = table
            .reserve(key(1), BLOCK, CopyClass::Primary)
            .expect("room");
        assert_eq!(victims.len(), 1);
        // The victim may not come back before it is off the disk, nor anyone take its space.
        assert_eq!(
            table.reserve(key(0), BLOCK, CopyClass::Primary),
            Err(NoRoom)
        );
        assert_eq!(
            table.reserve(key(1), BLOCK, CopyClass::Primary),
            Err(NoRoom)
        );
        table.release_space(key(0));
        table.cancel_reservation(key(1));
        assert_eq!(table.used_bytes(), 0);
        let empty = table.take_empty_files();
        empty
            .into_iter()
            .for_each(|file| table.finish_file_removal(file));
        assert_eq!(put(&mut table, 0, CopyClass::Primary), Ok(vec![]));
    }

    #[test]
    fn an_undeletable_victim_stays_charged() {
        let mut table = table(2, ReplacementPolicy::Lru);
        for block in 0..2 {
            assert_eq!(put(&mut table, block, CopyClass::Primary), Ok(vec![]));
        }
        let victims = table
            .reserve(key(2), BLOCK, CopyClass::Primary)
            .expect("room");
        table.cancel_reservation(key(2));
        table.keep_charged(victims[0].key, BLOCK);
        assert_eq!(table.used_bytes(), 2 * u64::from(BLOCK));
        assert_eq!(
            table.reserve(victims[0].key, BLOCK, CopyClass::Primary),
            Err(NoRoom)
        );
    }

    #[test]
    fn stuck_blocks_take_space_until_they_are_freed() {
        let mut table = table(2, ReplacementPolicy::Lru);
        for block in 0..2 {
            assert_eq!(put(&mut table, block, CopyClass::Primary), Ok(vec![]));
        }
        let victims = table.reserve(key(2), BLOCK, CopyClass::Primary);
        let victim = victims.expect("room")[0];
        table.keep_charged(victim.key, BLOCK);
        assert_eq!(table.used_bytes(), 3 * u64::from(BLOCK));
        // A block of its own may go, but that makes no room yet.
        assert_eq!(
            table.reserve(key(3), BLOCK, CopyClass::Secondary),
            Err(NoRoom)
        );
        table.cancel_reservation(key(2));
        table.release_space(victim.key);
        assert_eq!(table.used_bytes(), u64::from(BLOCK));
        assert_eq!(put(&mut table, 3, CopyClass::Primary), Ok(vec![]));
    }

    #[test]
    fn a_damaged_held_file_gets_no_new_holders() {
        let mut table = table(4, ReplacementPolicy::Lru);
        for block in 0..2 {
            assert_eq!(put(&mut table, block, CopyClass::Primary), Ok(vec![]));
        }
        let file = key(0).file;
        assert!(table.hold_file(file, 2) && table.hold_file(file, 2));
        let held = table.find(key(1)).expect("is held");
        assert!(table.remove(key(1), held.stamp).is_some());
        assert!(!table.hold_file(file, 2));
        assert_eq!(table.hold_count(file), 2);
    }

    #[test]
    fn bad_blocks_are_removed_but_their_digests_kept() {
        let mut table = table(2, ReplacementPolicy::Lru);
        assert_eq!(put(&mut table, 7, CopyClass::Secondary), Ok(vec![]));
        let held = table.find(key(7)).expect("is held");
        assert_eq!(table.remove(key(7), held.stamp + 1), None);
        assert_eq!(table.remove(key(7), held.stamp), Some(held));
        assert_eq!(table.remove(key(7), held.stamp), None);
        assert_eq!(table.used_bytes(), u64::from(BLOCK));
        table.release_space(key(7));
        assert_eq!(table.used_bytes(), 0);
        assert_eq!(table.digest_of(key(7)), Some(Digest([7; 32])));
    }

    #[test]
    fn the_number_of_files_is_limited() {
        let mut table = table(8, ReplacementPolicy::Lru);
        assert_eq!(put(&mut table, 0, CopyClass::Primary), Ok(vec![]));
        let other = BlockKey {
            file: FileIndex(1),
            block: BlockIndex(0),
        };
        assert_eq!(table.reserve(other, BLOCK, CopyClass::Primary), Err(NoRoom));
    }

    fn only_block(file: u32) -> BlockKey {
        BlockKey {
            file: FileIndex(file),
            block: BlockIndex(0),
        }
    }

    /// Puts a block as a careful caller does that has too many files.
    fn put_file(table: &mut BlockTable, file: u32, class: CopyClass) -> Result<Vec<u32>, NoRoom> {
        let mut gone = Vec::new();
        if table.has_no_file_slot(FileIndex(file)) {
            for victim in table.evict_file(class) {
                gone.push(victim.key.file.0);
                table.release_space(victim.key);
            }
            for empty in table.take_empty_files() {
                table.finish_file_removal(empty);
            }
        }
        table.reserve(only_block(file), BLOCK, class)?;
        table.insert(only_block(file), BLOCK, Digest([0; 32]), class, true);
        Ok(gone)
    }

    #[test]
    fn an_empty_file_frees_its_slot_once_deleted() {
        let mut table = BlockTable::new(9 * u64::from(BLOCK), 1, ReplacementPolicy::Lru);
        assert_eq!(put_file(&mut table, 0, CopyClass::Primary), Ok(vec![]));
        let victims = table.evict_file(CopyClass::Primary);
        assert_eq!(table.used_bytes(), u64::from(BLOCK), "it is still on disk");
        table.release_space(victims[0].key);
        assert_eq!((table.used_bytes(), table.used_files()), (0, 1));
        assert_eq!(table.take_empty_files(), [FileIndex(0)]);
        assert_eq!(table.take_empty_files(), [], "somebody is at it");
        for file in 0..2 {
            let refused = table.reserve(only_block(file), BLOCK, CopyClass::Primary);
            assert_eq!(refused, Err(NoRoom), "file {file}");
        }
        table.finish_file_removal(FileIndex(0));
        assert_eq!(table.used_files(), 0);
        assert_eq!(put_file(&mut table, 1, CopyClass::Primary), Ok(vec![]));
    }

    #[test]
    fn the_file_limit_evicts_the_next_evictable_file() {
        for (replacement, first) in [(ReplacementPolicy::Lru, 1), (ReplacementPolicy::Mru, 4)] {
            let mut table = BlockTable::new(99 * u64::from(BLOCK), 5, replacement);
            assert_eq!(put_file(&mut table, 0, CopyClass::Pinned), Ok(vec![]));
            for file in 1..5 {
                assert_eq!(put_file(&mut table, file, CopyClass::Primary), Ok(vec![]));
            }
            assert!(put_file(&mut table, 5, CopyClass::Secondary).is_err());
            assert_eq!(put_file(&mut table, 5, CopyClass::Primary), Ok(vec![first]));
            assert_eq!(table.used_files(), 5);
            // A copy goes first, and one copy for another.
            let copy = table.reclassify(only_block(5), CopyClass::Secondary);
            assert!(copy.is_some());
            assert_eq!(put_file(&mut table, 6, CopyClass::Secondary), Ok(vec![5]));
            assert_eq!(put_file(&mut table, 7, CopyClass::Primary), Ok(vec![6]));
            // What somebody has open stays.
            for file in [2, 3, 7] {
                assert!(table.hold_file(FileIndex(file), 1));
            }
            let last = if first == 1 { 4 } else { 1 };
            assert_eq!(put_file(&mut table, 8, CopyClass::Primary), Ok(vec![last]));
        }
    }

    #[test]
    fn closing_a_file_counts_as_its_use() {
        let mut table = BlockTable::new(3 * u64::from(BLOCK), 9, ReplacementPolicy::Lru);
        for file in 0..3 {
            assert_eq!(put_file(&mut table, file, CopyClass::Primary), Ok(vec![]));
        }
        assert!(table.hold_file(FileIndex(0), 1));
        table.release_file(FileIndex(0));
        let victims = table.reserve(only_block(3), BLOCK, CopyClass::Primary);
        assert_eq!(victims.map(|victims| victims[0].key.file.0), Ok(1));
    }

    #[test]
    fn blocks_of_a_held_file_are_not_evicted() {
        for replacement in [ReplacementPolicy::Lru, ReplacementPolicy::Mru] {
            let mut table = BlockTable::new(4 * u64::from(BLOCK), 9, replacement);
            let other = |block| BlockKey {
                file: FileIndex(1),
                block: BlockIndex(block),
            };
            for block in 0..2 {
                assert_eq!(put(&mut table, block, CopyClass::Primary), Ok(vec![]));
            }
            assert!(!table.hold_file(FileIndex(0), 3), "one is not here");
            assert!(table.hold_file(FileIndex(0), 2) && table.hold_file(FileIndex(0), 2));
            for block in 0..20 {
                let victims = table.reserve(other(block), BLOCK, CopyClass::Primary);
                for victim in victims.expect("two blocks may go") {
                    assert_eq!(victim.key.file, FileIndex(1));
                    table.release_space(victim.key);
                }
                table.insert(
                    other(block),
                    BLOCK,
                    Digest([0; 32]),
                    CopyClass::Primary,
                    true,
                );
            }
            assert!(table.contains(key(0)) && table.contains(key(1)));
            table.release_file(FileIndex(0));
            assert!(table.is_file_held(FileIndex(0)));
            let left: Vec<_> = (0..20).filter(|n| table.contains(other(*n))).collect();
            for block in left {
                let held = table.find(other(block)).expect("is held");
                table.remove(other(block), held.stamp);
            }
            // Their space is charged until it is freed: nothing else may go.
            assert_eq!(
                table.reserve(other(20), BLOCK, CopyClass::Primary),
                Err(NoRoom)
            );
            table.release_file(FileIndex(0));
            let victims = table.reserve(other(20), BLOCK, CopyClass::Primary);
            assert_eq!(victims.map(|victims| victims[0].key.file), Ok(FileIndex(0)));
        }
    }

    #[test]
    fn an_unverified_block_cannot_be_held() {
        let mut table = table(2, ReplacementPolicy::Lru);
        let restored = table.restore(key(0), BLOCK, Digest([0; 32]), CopyClass::Primary);
        assert_eq!(restored, Ok(()));
        assert!(!table.hold_file(FileIndex(0), 1));
        let held = table.find(key(0)).expect("is held");
        table.mark_verified(key(0), held.stamp);
        assert!(table.hold_file(FileIndex(0), 1));
    }

    #[test]
    fn deferred_uses_count_once_reported() {
        let mut table = table(3, ReplacementPolicy::Lru);
        for block in 0..3 {
            assert!(!table.is_use_import_due(BLOCK));
            assert_eq!(put(&mut table, block, CopyClass::Primary), Ok(vec![]));
        }
        assert!(table.is_use_import_due(BLOCK));
        table.import_uses([key(1), key(0), key(77)]);
        assert!(!table.is_use_import_due(BLOCK));
        assert_eq!(put(&mut table, 3, CopyClass::Primary), Ok(vec![2]));
        assert_eq!(put(&mut table, 4, CopyClass::Primary), Ok(vec![1]));
        for block in 5..5 + UNSYNCED_EVICTIONS_MAX as u64 {
            assert!(put(&mut table, block, CopyClass::Primary).is_ok());
        }
        assert!(table.is_use_import_due(BLOCK));
    }

    proptest! {
        /// Who follows the changes knows at any time which blocks may be read, and never takes
        /// one copy of a block for another.
        #[test]
        fn the_change_log_matches_the_readable_blocks(
            steps in prop::collection::vec((0u64..12, any::<bool>(), 0u8..6), 1..200),
        ) {
            let mut table = table(6, ReplacementPolicy::Lru);
            let mut told: BTreeMap<BlockKey, u32> = BTreeMap::new();
            let mut seen = BTreeSet::new();
            for (block, primary, what) in steps {
                let class = if primary { CopyClass::Primary } else { CopyClass::Secondary };
                let held = table.find(key(block));
                match (what, held) {
                    (0, Some(held)) => {
                        table.remove(key(block), held.stamp);
                        table.release_space(key(block));
                    }
                    (1, Some(held)) => table.mark_verified(key(block), held.stamp),
                    (2, _) => drop(table.restore(key(block), BLOCK, Digest([0; 32]), class)),
                    (3, _) => {
                        let mark = |told: Option<_>| told.map_or(0, |(mark, _)| mark);
                        let all = table.start_change_log().into_iter();
                        told = all.map(|(key, told)| (key, mark(told))).collect();
                    }
                    _ => drop(put(&mut table, block, class)),
                }
                let follows = table.changes.is_some();
                for (key, told_now) in table.take_changes() {
                    let mark = told_now.map_or(0, |(mark, _)| mark);
                    let before = told.insert(key, mark);
                    if mark != 0 && before != Some(mark) {
                        prop_assert!(seen.insert(mark), "{mark} is used again");
                    }
                }
                for block in (0..12).filter(|_| follows) {
                    let held = table.peek(key(block)).filter(|held| held.is_verified);
                    let expected = held.map_or(0, StoredBlock::mark);
                    prop_assert_eq!(told.get(&key(block)).copied().unwrap_or(0), expected);
                }
            }
        }

        #[test]
        fn byte_sums_are_exact_and_within_capacity(
            steps in prop::collection::vec((0u64..20, 1u32..20_000, 0usize..3, 0u8..6), 1..200),
            mru in any::<bool>(),
        ) {
            let replacement = if mru { ReplacementPolicy::Mru } else { ReplacementPolicy::Lru };
            let mut table = BlockTable::new(60_000, 1, replacement);
            for (block, length, class, what) in steps {
                let class = ALL_CLASSES[class];
                match what {
                    0 => drop(table.find(key(block))),
                    4 => drop(table.reclassify(key(block), class)),
                    5 => for victim in table.evict_bytes(u64::from(length)) {
                        prop_assert!(victim.class != CopyClass::Pinned);
                        table.release_space(victim.key);
                    },
                    1 => if let Some(held) = table.find(key(block)) {
                        table.remove(key(block), held.stamp);
                        table.release_space(key(block));
                    },
                    _ => if let Ok(victims) = table.reserve(key(block), length, class) {
                        for victim in victims {
                            table.release_space(victim.key);
                        }
                        if what == 2 {
                            table.insert(key(block), length, Digest([0; 32]), class, true);
                        } else {
                            table.cancel_reservation(key(block));
                        }
                    },
                }
                let sum: u64 = table.iter().map(|(_, held, _)| charged_bytes(held.length)).sum();
                prop_assert_eq!(sum, table.used_bytes());
                let by_class = ALL_CLASSES.map(|class| table.class_bytes(class));
                prop_assert_eq!(sum, by_class.iter().sum::<u64>());
                prop_assert!(sum <= 60_000);
            }
        }
    }
}
