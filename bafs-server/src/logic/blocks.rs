//! Which blocks a cache volume holds and which goes when space is short; the only user of `lru`.
//! Moves no byte: the caller writes after [`BlockTable::reserve`] and frees what it was told to.
//!
//! Space is charged before a block is written and a victim's space is reused only by the
//! reservation that freed it, so that the disk never holds more than the capacity.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;

use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex};
use bafs_proto::volume::Replacement;
use lru::LruCache;

/// A file system gives space in pieces of this many bytes, so blocks are charged in them.
pub(crate) const CHARGE_BYTES: u64 = 4096;

/// Digests of blocks that were here once: they expose a peer that sends other bytes.
const REMEMBERED_MAX: NonZeroUsize = NonZeroUsize::new(1 << 16).expect("is not zero");

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
}

/// A block that is on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Held {
    /// Digest made at its origin.
    pub(crate) digest: Digest,
    /// Length in bytes.
    pub(crate) length: u32,
    /// Whether its bytes were compared with the digest since this process started.
    pub(crate) verified: bool,
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

/// Nothing can make room for the block, or it is on its way in or out: it is passed through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NoRoom;

/// The blocks of one cache volume.
pub(crate) struct BlockTable {
    capacity_bytes: u64,
    capacity_files: u64,
    replacement: Replacement,
    used_bytes: u64,
    primary: LruCache<BlockKey, Held>,
    secondary: LruCache<BlockKey, Held>,
    primary_bytes: u64,
    secondary_bytes: u64,
    /// Being written or being freed, with what is charged: not to be touched by anyone else.
    moving: BTreeMap<BlockKey, u64>,
    files: BTreeSet<FileIndex>,
    remembered: LruCache<BlockKey, Digest>,
    next_stamp: u64,
}

impl BlockTable {
    /// A table of a volume that keeps at most so many bytes in so many files.
    pub(crate) fn new(capacity_bytes: u64, capacity_files: u64, replacement: Replacement) -> Self {
        Self {
            capacity_bytes,
            capacity_files,
            replacement,
            used_bytes: 0,
            primary: LruCache::unbounded(),
            secondary: LruCache::unbounded(),
            primary_bytes: 0,
            secondary_bytes: 0,
            moving: BTreeMap::new(),
            files: BTreeSet::new(),
            remembered: LruCache::new(REMEMBERED_MAX),
            next_stamp: 1,
        }
    }

    /// Space that is in use or promised, in bytes.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Bytes of primary and of secondary copies.
    pub(crate) fn class_bytes(&self) -> (u64, u64) {
        (self.primary_bytes, self.secondary_bytes)
    }

    /// Files that have or had blocks here.
    pub(crate) fn used_files(&self) -> u64 {
        self.files.len() as u64
    }

    /// Number of blocks that are here.
    pub(crate) fn len(&self) -> usize {
        self.primary.len() + self.secondary.len()
    }

    /// Finds a block and counts this as its latest use.
    pub(crate) fn find(&mut self, key: BlockKey) -> Option<Held> {
        self.primary
            .get(&key)
            .or_else(|| self.secondary.get(&key))
            .copied()
    }

    /// Whether a block is here; no use of it.
    pub(crate) fn holds(&self, key: BlockKey) -> bool {
        self.peek(key).is_some()
    }

    /// Whether the block is still the one that was found with this stamp.
    pub(crate) fn is_same(&self, key: BlockKey, stamp: u64) -> bool {
        self.peek(key).is_some_and(|held| held.stamp == stamp)
    }

    /// Notes that the bytes of the block were compared with its digest.
    pub(crate) fn mark_verified(&mut self, key: BlockKey, stamp: u64) {
        let held = match self.primary.peek_mut(&key) {
            Some(held) => Some(held),
            None => self.secondary.peek_mut(&key),
        };
        if let Some(held) = held.filter(|held| held.stamp == stamp) {
            held.verified = true;
        }
    }

    /// Digest of a block that is here or was here not long ago.
    pub(crate) fn digest_of(&self, key: BlockKey) -> Option<Digest> {
        let held = self.peek(key).map(|held| held.digest);
        held.or_else(|| self.remembered.peek(&key).copied())
    }

    /// Reserves space for a block. The victims are no longer in the table; the caller frees their
    /// space on disk, says [`BlockTable::freed`] for each, and only then writes.
    ///
    /// Secondary copies go first, and a secondary copy never drives out a primary one.
    ///
    /// # Errors
    /// `NoRoom`: the block is not kept.
    pub(crate) fn reserve(
        &mut self,
        key: BlockKey,
        length: u32,
        class: CopyClass,
    ) -> Result<Vec<Victim>, NoRoom> {
        let charge = charge(length);
        let new_file = !self.files.contains(&key.file);
        if self.moving.contains_key(&key)
            || self.holds(key)
            || (new_file && self.used_files() >= self.capacity_files)
            || charge > self.reachable_bytes(class)
        {
            return Err(NoRoom);
        }
        let mut victims = Vec::new();
        while self.used_bytes + charge > self.capacity_bytes {
            let victim = self
                .next_victim(class)
                .expect("reachable bytes were counted");
            self.used_bytes -= self::charge(victim.length);
            self.moving.insert(victim.key, 0);
            victims.push(victim);
        }
        self.used_bytes += charge;
        assert!(
            self.used_bytes <= self.capacity_bytes,
            "more is promised than there is"
        );
        self.moving.insert(key, charge);
        self.files.insert(key.file);
        Ok(victims)
    }

    /// The space of a victim or of a removed block is free on disk.
    pub(crate) fn freed(&mut self, key: BlockKey) {
        if let Some(charged) = self.moving.remove(&key) {
            self.used_bytes -= charged;
        }
    }

    /// The space of a victim could not be freed: it stays charged and the block stays away.
    pub(crate) fn stuck(&mut self, key: BlockKey, length: u32) {
        if self.moving.get(&key) == Some(&0) {
            self.moving.insert(key, charge(length));
            self.used_bytes += charge(length);
        }
    }

    /// A reserved block is on disk.
    pub(crate) fn put(
        &mut self,
        key: BlockKey,
        length: u32,
        digest: Digest,
        class: CopyClass,
        verified: bool,
    ) {
        let charged = self.moving.remove(&key);
        assert_eq!(
            charged,
            Some(charge(length)),
            "a block is put where space was reserved"
        );
        let held = Held {
            digest,
            length,
            verified,
            stamp: self.next_stamp,
        };
        self.next_stamp += 1;
        let (list, bytes) = self.list(class);
        list.put(key, held);
        *bytes += charge(length);
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
        if self.used_bytes + charge(length) > self.capacity_bytes {
            return Err(NoRoom);
        }
        self.reserve(key, length, class)?;
        self.put(key, length, digest, class, false);
        Ok(())
    }

    /// A reserved block was not written; its space is free again. Call it after what was written
    /// in part is off the disk.
    pub(crate) fn cancel(&mut self, key: BlockKey) {
        self.freed(key);
    }

    /// Takes a block out because its bytes are bad. Its space stays charged until
    /// [`BlockTable::freed`]. Does nothing if it is no longer the block with this stamp.
    pub(crate) fn remove(&mut self, key: BlockKey, stamp: u64) -> Option<Held> {
        if !self.is_same(key, stamp) {
            return None;
        }
        let mut taken = None;
        for class in [CopyClass::Primary, CopyClass::Secondary] {
            let (list, bytes) = self.list(class);
            if let Some(held) = list.pop(&key) {
                *bytes -= charge(held.length);
                taken = Some(held);
            }
        }
        let held = taken?;
        self.remembered.put(key, held.digest);
        self.moving.insert(key, charge(held.length));
        Some(held)
    }

    /// Every block with its class, the one used last first, primary ones before secondary ones.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockKey, Held, CopyClass)> + '_ {
        let primary = self
            .primary
            .iter()
            .map(|(key, held)| (*key, *held, CopyClass::Primary));
        let secondary = self
            .secondary
            .iter()
            .map(|(key, held)| (*key, *held, CopyClass::Secondary));
        primary.chain(secondary)
    }

    fn peek(&self, key: BlockKey) -> Option<&Held> {
        self.primary
            .peek(&key)
            .or_else(|| self.secondary.peek(&key))
    }

    /// The blocks of a class, and the space that they are charged for.
    fn list(&mut self, class: CopyClass) -> (&mut LruCache<BlockKey, Held>, &mut u64) {
        match class {
            CopyClass::Primary => (&mut self.primary, &mut self.primary_bytes),
            CopyClass::Secondary => (&mut self.secondary, &mut self.secondary_bytes),
        }
    }

    /// Bytes that a new block of this class could get, by driving others out.
    fn reachable_bytes(&self, class: CopyClass) -> u64 {
        let free = self.capacity_bytes - self.used_bytes;
        match class {
            CopyClass::Primary => free + self.primary_bytes + self.secondary_bytes,
            CopyClass::Secondary => free + self.secondary_bytes,
        }
    }

    fn next_victim(&mut self, for_class: CopyClass) -> Option<Victim> {
        let classes: &[CopyClass] = match for_class {
            CopyClass::Primary => &[CopyClass::Secondary, CopyClass::Primary],
            CopyClass::Secondary => &[CopyClass::Secondary],
        };
        for &class in classes {
            let replacement = self.replacement;
            let (list, bytes) = self.list(class);
            let popped = match replacement {
                Replacement::Lru => list.pop_lru(),
                Replacement::Mru => list.pop_mru(),
            };
            if let Some((key, held)) = popped {
                *bytes -= charge(held.length);
                self.remembered.put(key, held.digest);
                return Some(Victim {
                    key,
                    length: held.length,
                    class,
                });
            }
        }
        None
    }
}

/// What a block of this length takes on disk, in bytes.
pub(crate) fn charge(length: u32) -> u64 {
    u64::from(length).next_multiple_of(CHARGE_BYTES)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BLOCK: u32 = 8192;

    fn key(block: u64) -> BlockKey {
        BlockKey {
            file: FileIndex(0),
            block: BlockIndex(block),
        }
    }

    fn table(blocks: u64, replacement: Replacement) -> BlockTable {
        BlockTable::new(blocks * u64::from(BLOCK), 1, replacement)
    }

    /// Puts a block as a well-behaved caller does, and returns who had to go for it.
    fn put(table: &mut BlockTable, block: u64, class: CopyClass) -> Result<Vec<u64>, NoRoom> {
        let victims = table.reserve(key(block), BLOCK, class)?;
        for victim in &victims {
            table.freed(victim.key);
        }
        table.put(key(block), BLOCK, Digest([block as u8; 32]), class, true);
        Ok(victims.iter().map(|victim| victim.key.block.0).collect())
    }

    #[test]
    fn lru_drops_the_oldest_and_mru_the_latest() {
        for (replacement, expected) in [(Replacement::Lru, 1), (Replacement::Mru, 0)] {
            let mut table = table(3, replacement);
            for block in 0..3 {
                assert_eq!(put(&mut table, block, CopyClass::Primary), Ok(vec![]));
            }
            assert!(table.find(key(0)).is_some());
            assert_eq!(put(&mut table, 3, CopyClass::Primary), Ok(vec![expected]));
        }
    }

    #[test]
    fn secondary_copies_go_first_and_drive_out_no_primary() {
        let mut table = table(3, Replacement::Lru);
        assert_eq!(put(&mut table, 0, CopyClass::Primary), Ok(vec![]));
        assert_eq!(put(&mut table, 1, CopyClass::Secondary), Ok(vec![]));
        assert_eq!(put(&mut table, 2, CopyClass::Primary), Ok(vec![]));
        assert_eq!(put(&mut table, 3, CopyClass::Secondary), Ok(vec![1]));
        assert_eq!(put(&mut table, 4, CopyClass::Primary), Ok(vec![3]));
        assert_eq!(put(&mut table, 5, CopyClass::Secondary), Err(NoRoom));
        assert_eq!(put(&mut table, 6, CopyClass::Primary), Ok(vec![0]));
    }

    #[test]
    fn a_block_on_its_way_is_left_alone() {
        let mut table = table(1, Replacement::Lru);
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
        table.freed(key(0));
        table.cancel(key(1));
        assert_eq!(table.used_bytes(), 0);
        assert_eq!(put(&mut table, 0, CopyClass::Primary), Ok(vec![]));
    }

    #[test]
    fn a_victim_that_stays_on_disk_stays_charged() {
        let mut table = table(2, Replacement::Lru);
        for block in 0..2 {
            assert_eq!(put(&mut table, block, CopyClass::Primary), Ok(vec![]));
        }
        let victims = table
            .reserve(key(2), BLOCK, CopyClass::Primary)
            .expect("room");
        table.cancel(key(2));
        table.stuck(victims[0].key, BLOCK);
        assert_eq!(table.used_bytes(), 2 * u64::from(BLOCK));
        assert_eq!(
            table.reserve(victims[0].key, BLOCK, CopyClass::Primary),
            Err(NoRoom)
        );
    }

    #[test]
    fn bad_blocks_go_once_and_their_digest_is_remembered() {
        let mut table = table(2, Replacement::Lru);
        assert_eq!(put(&mut table, 7, CopyClass::Secondary), Ok(vec![]));
        let held = table.find(key(7)).expect("is held");
        assert_eq!(table.remove(key(7), held.stamp + 1), None);
        assert_eq!(table.remove(key(7), held.stamp), Some(held));
        assert_eq!(table.remove(key(7), held.stamp), None);
        assert_eq!(table.used_bytes(), u64::from(BLOCK));
        table.freed(key(7));
        assert_eq!(table.used_bytes(), 0);
        assert_eq!(table.digest_of(key(7)), Some(Digest([7; 32])));
    }

    #[test]
    fn files_are_limited_too() {
        let mut table = table(8, Replacement::Lru);
        assert_eq!(put(&mut table, 0, CopyClass::Primary), Ok(vec![]));
        let other = BlockKey {
            file: FileIndex(1),
            block: BlockIndex(0),
        };
        assert_eq!(table.reserve(other, BLOCK, CopyClass::Primary), Err(NoRoom));
    }

    proptest! {
        #[test]
        fn the_sums_are_right_and_the_capacity_is_kept(
            steps in prop::collection::vec((0u64..20, 1u32..20_000, any::<bool>(), 0u8..4), 1..200),
            mru in any::<bool>(),
        ) {
            let replacement = if mru { Replacement::Mru } else { Replacement::Lru };
            let mut table = BlockTable::new(60_000, 1, replacement);
            for (block, length, primary, what) in steps {
                let class = if primary { CopyClass::Primary } else { CopyClass::Secondary };
                match what {
                    0 => drop(table.find(key(block))),
                    1 => if let Some(held) = table.find(key(block)) {
                        table.remove(key(block), held.stamp);
                        table.freed(key(block));
                    },
                    _ => if let Ok(victims) = table.reserve(key(block), length, class) {
                        for victim in victims {
                            table.freed(victim.key);
                        }
                        if what == 2 {
                            table.put(key(block), length, Digest([0; 32]), class, true);
                        } else {
                            table.cancel(key(block));
                        }
                    },
                }
                let sum: u64 = table.iter().map(|(_, held, _)| charge(held.length)).sum();
                prop_assert_eq!(sum, table.used_bytes());
                prop_assert_eq!(sum, table.primary_bytes + table.secondary_bytes);
                prop_assert!(sum <= 60_000);
            }
        }
    }
}
