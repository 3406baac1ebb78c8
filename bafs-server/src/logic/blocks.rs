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
use bafs_proto::volume::Replacement;
use lru::LruCache;

use self::files::{Files, Kept};

/// A file system gives space in pieces of this many bytes, so blocks are charged in them.
pub(crate) const CHARGE_BYTES: u64 = 4096;

/// Digests of blocks that were here once: they expose a peer that sends other bytes.
const REMEMBERED_MAX: NonZeroUsize = NonZeroUsize::new(1 << 16).expect("is not zero");

/// Copies have little room where it is less than such a part of what others are the primaries of: a
/// scan drives each of them out before it is read again.
const LITTLE_ROOM: u64 = 4;

/// Of copies that would drive out others there, one of so many is kept. What is read often is so
/// kept soon, and a scan does not write all that it reads to disk in vain (Qureshi et al., Adaptive
/// insertion policies, 2007: bimodal insertion, with their rate).
const KEPT_OF_COPIES: u32 = 32;

/// How readers that ask nobody are followed: their uses are taken over when so many blocks have
/// left since the last time, or one sixteenth of all.
const UNSEEN_EVICTIONS_MAX: usize = 64;

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

/// What those who read without asking must be told of a block: its mark and its digest when its
/// bytes may be read.
pub(crate) type Change = (BlockKey, Option<(u32, Digest)>);

/// Nothing can make room for the block, or it is on its way in or out: it is passed through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NoRoom;

/// The blocks of one cache volume.
pub(crate) struct BlockTable {
    capacity_bytes: u64,
    /// All that readers may ask for.
    source_bytes: u64,
    replacement: Replacement,
    used_bytes: u64,
    primary: LruCache<BlockKey, Held>,
    secondary: LruCache<BlockKey, Held>,
    pinned: LruCache<BlockKey, Held>,
    primary_bytes: u64,
    secondary_bytes: u64,
    pinned_bytes: u64,
    /// Being written or being freed, with what is charged: not to be touched by anyone else.
    moving: BTreeMap<BlockKey, u64>,
    files: Files,
    remembered: LruCache<BlockKey, Digest>,
    next_stamp: u64,
    /// Copies that found others in their place where there is little room for them.
    crowded_out: u32,
    /// Files that are held, and what they are charged for by class.
    kept: BTreeMap<FileIndex, Kept>,
    /// What changed since it was told; `None` when nobody wants to know.
    changes: Option<Vec<Change>>,
    /// Evictions since uses were taken over; `None` before the first time.
    unseen_evictions: Option<usize>,
}

impl Held {
    /// What this very copy is known by to those who read without asking; never 0.
    fn mark(&self) -> u32 {
        let marks = u64::from(u32::MAX);
        // It returns after four thousand million other blocks: no read lasts that long.
        u32::try_from(self.stamp % marks).map_or(1, |mark| mark + 1)
    }

    fn change(&self, key: BlockKey) -> Change {
        (key, self.verified.then(|| (self.mark(), self.digest)))
    }
}

impl BlockTable {
    /// A table of a volume that keeps at most so many bytes in so many files.
    pub(crate) fn new(capacity_bytes: u64, capacity_files: u64, replacement: Replacement) -> Self {
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
            moving: BTreeMap::new(),
            files: Files::new(capacity_files),
            remembered: LruCache::new(REMEMBERED_MAX),
            next_stamp: 1,
            crowded_out: 0,
            kept: BTreeMap::new(),
            changes: None,
            unseen_evictions: None,
        }
    }

    /// The same for a source of so many bytes.
    pub(crate) fn of_source(self, source_bytes: u64) -> Self {
        Self {
            source_bytes,
            ..self
        }
    }

    /// From now on changes are written down; returns what holds now.
    pub(crate) fn follow(&mut self) -> Vec<Change> {
        self.changes = Some(Vec::new());
        let all = self.primary.iter().chain(self.secondary.iter());
        let all = all.chain(self.pinned.iter());
        all.map(|(key, held)| held.change(*key)).collect()
    }

    /// From now on nobody wants to know of changes; returns the blocks that are here.
    pub(crate) fn unfollow(&mut self) -> Vec<BlockKey> {
        self.changes = None;
        let all = self.primary.iter().chain(self.secondary.iter());
        let all = all.chain(self.pinned.iter());
        all.map(|(key, _)| *key).collect()
    }

    /// Changes since this was called last, oldest first.
    pub(crate) fn take_changes(&mut self) -> Vec<Change> {
        self.changes
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    /// Whether a block of this length drives others out, and uses that nobody told must be taken
    /// over first.
    pub(crate) fn wants_uses(&self, length: u32) -> bool {
        let enough = UNSEEN_EVICTIONS_MAX.max(self.len() / 16);
        self.used_bytes + charge(length) > self.capacity_bytes
            && self.unseen_evictions.is_none_or(|unseen| unseen >= enough)
    }

    /// Takes over uses, the latest last.
    pub(crate) fn note_uses(&mut self, keys: impl IntoIterator<Item = BlockKey>) {
        for key in keys {
            self.promote(key);
        }
        self.unseen_evictions = Some(0);
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
    pub(crate) fn reclassify(&mut self, key: BlockKey, class: CopyClass) -> Option<Held> {
        for former in ALL_CLASSES.into_iter().filter(|former| *former != class) {
            let (list, bytes) = self.list(former);
            if let Some(held) = list.pop(&key) {
                *bytes -= charge(held.length);
                let (list, bytes) = self.list(class);
                list.put(key, held);
                *bytes += charge(held.length);
                if let Some(kept) = self.kept.get_mut(&key.file) {
                    *kept.bytes(former) -= charge(held.length);
                    *kept.bytes(class) += charge(held.length);
                }
                return Some(held);
            }
        }
        None
    }

    /// Takes out blocks of at least so many bytes, because the disk has no room for what was
    /// promised. They stay charged until [`BlockTable::freed`].
    pub(crate) fn give_way(&mut self, bytes: u64) -> Vec<Victim> {
        let mut victims = Vec::new();
        let mut given = 0;
        while given < bytes
            && let Some(victim) = self.next_victim(CopyClass::Primary)
        {
            given += charge(victim.length);
            self.moving.insert(victim.key, charge(victim.length));
            victims.push(victim);
        }
        victims
    }

    /// Number of blocks that are here.
    pub(crate) fn len(&self) -> usize {
        self.primary.len() + self.secondary.len() + self.pinned.len()
    }

    /// Finds a block and counts this as its latest use.
    pub(crate) fn find(&mut self, key: BlockKey) -> Option<Held> {
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
    pub(crate) fn holds(&self, key: BlockKey) -> bool {
        self.peek(key).is_some()
    }

    /// Whether a block is here and was compared with its digest; no use of it.
    pub(crate) fn is_readable(&self, key: BlockKey) -> bool {
        self.peek(key).is_some_and(|held| held.verified)
    }

    /// Whether the block is still the one that was found with this stamp.
    pub(crate) fn is_same(&self, key: BlockKey, stamp: u64) -> bool {
        self.peek(key).is_some_and(|held| held.stamp == stamp)
    }

    /// Notes that the bytes of the block were compared with its digest.
    pub(crate) fn mark_verified(&mut self, key: BlockKey, stamp: u64) {
        if self.is_same(key, stamp) {
            self.set_verified(key, true);
        }
    }

    /// Somebody got other bytes than those of the block: nobody gets it again before its bytes
    /// were compared with its digest anew.
    pub(crate) fn doubt(&mut self, key: BlockKey) {
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
            held.verified = verified;
            let change = held.change(key);
            self.changed(change);
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
        let charge = charge(length);
        if self.moving.contains_key(&key)
            || self.holds(key)
            || !self.files.admits(key.file)
            || charge > self.reachable_bytes(class)
        {
            return Err(NoRoom);
        }
        let is_full = self.used_bytes + charge > self.capacity_bytes;
        if is_full && class == CopyClass::Secondary && self.has_little_room_for_copies() {
            self.crowded_out = self.crowded_out.wrapping_add(1);
            if !self.crowded_out.is_multiple_of(KEPT_OF_COPIES) {
                return Err(NoRoom);
            }
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
        self.files.add(key);
        Ok(victims)
    }

    /// The space of a victim or of a removed block is free on disk.
    pub(crate) fn freed(&mut self, key: BlockKey) {
        if let Some(charged) = self.moving.remove(&key) {
            self.used_bytes -= charged;
            self.files.remove(key);
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
        self.changed(held.change(key));
        self.files.note_put(key);
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
    /// [`BlockTable::freed`], which must not come while its file is held: its place on disk must
    /// stay as it is. Does nothing if it is no longer the block with this stamp.
    pub(crate) fn remove(&mut self, key: BlockKey, stamp: u64) -> Option<Held> {
        if !self.is_same(key, stamp) {
            return None;
        }
        let mut taken = None;
        for class in ALL_CLASSES {
            let (list, bytes) = self.list(class);
            if let Some(held) = list.pop(&key) {
                *bytes -= charge(held.length);
                taken = Some((held, class));
            }
        }
        let (held, class) = taken?;
        if let Some(kept) = self.kept.get_mut(&key.file) {
            *kept.bytes(class) -= charge(held.length);
            kept.hurt = true;
        }
        self.changed((key, None));
        self.remembered.put(key, held.digest);
        self.moving.insert(key, charge(held.length));
        Some(held)
    }

    /// Every block with its class, the one used last first, secondary ones last.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockKey, Held, CopyClass)> + '_ {
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

    fn peek(&self, key: BlockKey) -> Option<&Held> {
        self.primary
            .peek(&key)
            .or_else(|| self.secondary.peek(&key))
            .or_else(|| self.pinned.peek(&key))
    }

    /// The blocks of a class, and the space that they are charged for.
    fn list(&mut self, class: CopyClass) -> (&mut LruCache<BlockKey, Held>, &mut u64) {
        match class {
            CopyClass::Primary => (&mut self.primary, &mut self.primary_bytes),
            CopyClass::Secondary => (&mut self.secondary, &mut self.secondary_bytes),
            CopyClass::Pinned => (&mut self.pinned, &mut self.pinned_bytes),
        }
    }

    fn changed(&mut self, change: Change) {
        if let Some(changes) = &mut self.changes {
            changes.push(change);
        }
    }

    /// Bytes that a new block of this class could get, by driving others out.
    pub(crate) fn reachable_bytes(&self, class: CopyClass) -> u64 {
        let mut movable = self.movable_bytes(CopyClass::Secondary);
        if class != CopyClass::Secondary {
            movable += self.movable_bytes(CopyClass::Primary);
        }
        // What could not be freed on disk may take more than there is, for a while.
        (self.capacity_bytes + movable).saturating_sub(self.used_bytes)
    }

    /// Which block of a class goes first.
    pub(crate) fn replacement(&self) -> Replacement {
        self.replacement
    }

    /// Bytes that new blocks of this class can take so that none of them leaves before older ones:
    /// what is fetched for later must be among them.
    pub(crate) fn lasting_bytes(&self, class: CopyClass) -> u64 {
        let is_crowded = class == CopyClass::Secondary && self.has_little_room_for_copies();
        match self.replacement {
            Replacement::Lru if !is_crowded => self.reachable_bytes(class),
            // The newest goes first, or is passed through.
            _ => self.capacity_bytes.saturating_sub(self.used_bytes),
        }
    }

    fn has_little_room_for_copies(&self) -> bool {
        let own = self.primary_bytes + self.pinned_bytes;
        let room = self.capacity_bytes.saturating_sub(own);
        room < self.source_bytes.saturating_sub(own) / LITTLE_ROOM
    }

    /// Bytes of a class that may leave.
    fn movable_bytes(&self, class: CopyClass) -> u64 {
        let (all, kept): (_, u64) = match class {
            CopyClass::Primary => (
                self.primary_bytes,
                self.kept.values().map(|kept| kept.primary_bytes).sum(),
            ),
            CopyClass::Secondary => (
                self.secondary_bytes,
                self.kept.values().map(|kept| kept.secondary_bytes).sum(),
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
            if self.movable_bytes(class) == 0 {
                continue;
            }
            while let Some((key, held)) = self.pop(class) {
                if self.kept.contains_key(&key.file) {
                    self.put_behind(class, key, held);
                    continue;
                }
                return Some(self.evicted(key, held, class));
            }
        }
        None
    }

    /// A block has left its list for good.
    fn evicted(&mut self, key: BlockKey, held: Held, class: CopyClass) -> Victim {
        let (_, bytes) = self.list(class);
        *bytes -= charge(held.length);
        self.remembered.put(key, held.digest);
        self.changed((key, None));
        self.unseen_evictions = self.unseen_evictions.map(|unseen| unseen + 1);
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

    fn pop(&mut self, class: CopyClass) -> Option<(BlockKey, Held)> {
        let replacement = self.replacement;
        let (list, _) = self.list(class);
        match replacement {
            Replacement::Lru => list.pop_lru(),
            Replacement::Mru => list.pop_mru(),
        }
    }

    /// Puts a block that must stay back to where the search for victims comes last.
    fn put_behind(&mut self, class: CopyClass, key: BlockKey, held: Held) {
        let replacement = self.replacement;
        let (list, _) = self.list(class);
        list.put(key, held);
        if replacement == Replacement::Mru {
            list.demote(&key);
        }
    }
}

/// What a block of this length takes on disk, in bytes.
pub(crate) fn charge(length: u32) -> u64 {
    u64::from(length).next_multiple_of(CHARGE_BYTES)
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
    fn a_scan_drives_out_few_copies_where_they_have_little_room() {
        let replaced = |source: u64| {
            let mut table = table(4, Replacement::Lru).of_source(source * u64::from(BLOCK));
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
    fn pinned_blocks_stay_and_are_let_go_when_they_are_pinned_no_more() {
        for replacement in [Replacement::Lru, Replacement::Mru] {
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
            assert_eq!(table.give_way(1), vec![]);
            assert!(table.reclassify(key(3), CopyClass::Secondary).is_some());
            assert_eq!(put(&mut table, 4, CopyClass::Primary), Ok(vec![3]));
        }
    }

    #[test]
    fn who_gives_way_to_a_full_disk_stays_charged_until_it_is_off() {
        let mut table = table(4, Replacement::Lru);
        for (block, class) in [(0, CopyClass::Primary), (1, CopyClass::Secondary)] {
            assert_eq!(put(&mut table, block, class), Ok(vec![]));
        }
        let keys = |victims: Vec<Victim>| victims.iter().map(|v| v.key).collect::<Vec<_>>();
        assert_eq!(keys(table.give_way(1)), [key(1)]);
        assert_eq!(table.used_bytes(), 2 * u64::from(BLOCK));
        table.freed(key(1));
        assert_eq!(table.used_bytes(), u64::from(BLOCK));
        assert_eq!(keys(table.give_way(u64::MAX)), [key(0)]);
        assert_eq!(table.give_way(1), vec![]);
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
        let empty = table.take_empty_files();
        empty.into_iter().for_each(|file| table.file_gone(file));
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
    fn what_is_stuck_beyond_the_capacity_is_no_room_until_it_is_freed() {
        let mut table = table(2, Replacement::Lru);
        for block in 0..2 {
            assert_eq!(put(&mut table, block, CopyClass::Primary), Ok(vec![]));
        }
        let victims = table.reserve(key(2), BLOCK, CopyClass::Primary);
        let victim = victims.expect("room")[0];
        table.stuck(victim.key, BLOCK);
        assert_eq!(table.used_bytes(), 3 * u64::from(BLOCK));
        // A block of its own may go, but that makes no room yet.
        assert_eq!(
            table.reserve(key(3), BLOCK, CopyClass::Secondary),
            Err(NoRoom)
        );
        table.cancel(key(2));
        table.freed(victim.key);
        assert_eq!(table.used_bytes(), u64::from(BLOCK));
        assert_eq!(put(&mut table, 3, CopyClass::Primary), Ok(vec![]));
    }

    #[test]
    fn a_held_file_with_damage_is_given_to_nobody_else() {
        let mut table = table(4, Replacement::Lru);
        for block in 0..2 {
            assert_eq!(put(&mut table, block, CopyClass::Primary), Ok(vec![]));
        }
        let file = key(0).file;
        assert!(table.hold(file, 2) && table.hold(file, 2));
        let held = table.find(key(1)).expect("is held");
        assert!(table.remove(key(1), held.stamp).is_some());
        assert!(!table.hold(file, 2));
        assert_eq!(table.holders(file), 2);
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

    fn only_block(file: u32) -> BlockKey {
        BlockKey {
            file: FileIndex(file),
            block: BlockIndex(0),
        }
    }

    /// Puts a block as a careful caller does that has too many files.
    fn put_file(table: &mut BlockTable, file: u32, class: CopyClass) -> Result<Vec<u32>, NoRoom> {
        let mut gone = Vec::new();
        if table.lacks_place(FileIndex(file)) {
            for victim in table.give_up_file(class) {
                gone.push(victim.key.file.0);
                table.freed(victim.key);
            }
            for empty in table.take_empty_files() {
                table.file_gone(empty);
            }
        }
        table.reserve(only_block(file), BLOCK, class)?;
        table.put(only_block(file), BLOCK, Digest([0; 32]), class, true);
        Ok(gone)
    }

    #[test]
    fn a_file_without_blocks_gives_its_place_to_another_once_it_is_off_the_disk() {
        let mut table = BlockTable::new(9 * u64::from(BLOCK), 1, Replacement::Lru);
        assert_eq!(put_file(&mut table, 0, CopyClass::Primary), Ok(vec![]));
        let victims = table.give_up_file(CopyClass::Primary);
        assert_eq!(table.used_bytes(), u64::from(BLOCK), "it is still on disk");
        table.freed(victims[0].key);
        assert_eq!((table.used_bytes(), table.used_files()), (0, 1));
        assert_eq!(table.take_empty_files(), [FileIndex(0)]);
        assert_eq!(table.take_empty_files(), [], "somebody is at it");
        for file in 0..2 {
            let refused = table.reserve(only_block(file), BLOCK, CopyClass::Primary);
            assert_eq!(refused, Err(NoRoom), "file {file}");
        }
        table.file_gone(FileIndex(0));
        assert_eq!(table.used_files(), 0);
        assert_eq!(put_file(&mut table, 1, CopyClass::Primary), Ok(vec![]));
    }

    #[test]
    fn with_too_many_files_the_one_goes_that_is_next_and_may_go_as_a_whole() {
        for (replacement, first) in [(Replacement::Lru, 1), (Replacement::Mru, 4)] {
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
                assert!(table.hold(FileIndex(file), 1));
            }
            let last = if first == 1 { 4 } else { 1 };
            assert_eq!(put_file(&mut table, 8, CopyClass::Primary), Ok(vec![last]));
        }
    }

    #[test]
    fn what_was_open_as_a_whole_counts_as_used_when_it_is_closed() {
        let mut table = BlockTable::new(3 * u64::from(BLOCK), 9, Replacement::Lru);
        for file in 0..3 {
            assert_eq!(put_file(&mut table, file, CopyClass::Primary), Ok(vec![]));
        }
        assert!(table.hold(FileIndex(0), 1));
        table.let_go(FileIndex(0));
        let victims = table.reserve(only_block(3), BLOCK, CopyClass::Primary);
        assert_eq!(victims.map(|victims| victims[0].key.file.0), Ok(1));
    }

    #[test]
    fn the_blocks_of_a_held_file_stay() {
        for replacement in [Replacement::Lru, Replacement::Mru] {
            let mut table = BlockTable::new(4 * u64::from(BLOCK), 9, replacement);
            let other = |block| BlockKey {
                file: FileIndex(1),
                block: BlockIndex(block),
            };
            for block in 0..2 {
                assert_eq!(put(&mut table, block, CopyClass::Primary), Ok(vec![]));
            }
            assert!(!table.hold(FileIndex(0), 3), "one is not here");
            assert!(table.hold(FileIndex(0), 2) && table.hold(FileIndex(0), 2));
            for block in 0..20 {
                let victims = table.reserve(other(block), BLOCK, CopyClass::Primary);
                for victim in victims.expect("two blocks may go") {
                    assert_eq!(victim.key.file, FileIndex(1));
                    table.freed(victim.key);
                }
                table.put(
                    other(block),
                    BLOCK,
                    Digest([0; 32]),
                    CopyClass::Primary,
                    true,
                );
            }
            assert!(table.holds(key(0)) && table.holds(key(1)));
            table.let_go(FileIndex(0));
            assert!(table.is_held(FileIndex(0)));
            let left: Vec<_> = (0..20).filter(|n| table.holds(other(*n))).collect();
            for block in left {
                let held = table.find(other(block)).expect("is held");
                table.remove(other(block), held.stamp);
            }
            // Their space is charged until it is freed: nothing else may go.
            assert_eq!(
                table.reserve(other(20), BLOCK, CopyClass::Primary),
                Err(NoRoom)
            );
            table.let_go(FileIndex(0));
            let victims = table.reserve(other(20), BLOCK, CopyClass::Primary);
            assert_eq!(victims.map(|victims| victims[0].key.file), Ok(FileIndex(0)));
        }
    }

    #[test]
    fn an_unchecked_block_is_not_held() {
        let mut table = table(2, Replacement::Lru);
        let restored = table.restore(key(0), BLOCK, Digest([0; 32]), CopyClass::Primary);
        assert_eq!(restored, Ok(()));
        assert!(!table.hold(FileIndex(0), 1));
        let held = table.find(key(0)).expect("is held");
        table.mark_verified(key(0), held.stamp);
        assert!(table.hold(FileIndex(0), 1));
    }

    #[test]
    fn uses_that_were_not_told_count_once_they_are() {
        let mut table = table(3, Replacement::Lru);
        for block in 0..3 {
            assert!(!table.wants_uses(BLOCK));
            assert_eq!(put(&mut table, block, CopyClass::Primary), Ok(vec![]));
        }
        assert!(table.wants_uses(BLOCK));
        table.note_uses([key(1), key(0), key(77)]);
        assert!(!table.wants_uses(BLOCK));
        assert_eq!(put(&mut table, 3, CopyClass::Primary), Ok(vec![2]));
        assert_eq!(put(&mut table, 4, CopyClass::Primary), Ok(vec![1]));
        for block in 5..5 + UNSEEN_EVICTIONS_MAX as u64 {
            assert!(put(&mut table, block, CopyClass::Primary).is_ok());
        }
        assert!(table.wants_uses(BLOCK));
    }

    proptest! {
        /// Who follows the changes knows at any time which blocks may be read, and never takes
        /// one copy of a block for another.
        #[test]
        fn changes_tell_what_is_here(
            steps in prop::collection::vec((0u64..12, any::<bool>(), 0u8..6), 1..200),
        ) {
            let mut table = table(6, Replacement::Lru);
            let mut told: BTreeMap<BlockKey, u32> = BTreeMap::new();
            let mut seen = BTreeSet::new();
            for (block, primary, what) in steps {
                let class = if primary { CopyClass::Primary } else { CopyClass::Secondary };
                let held = table.find(key(block));
                match (what, held) {
                    (0, Some(held)) => {
                        table.remove(key(block), held.stamp);
                        table.freed(key(block));
                    }
                    (1, Some(held)) => table.mark_verified(key(block), held.stamp),
                    (2, _) => drop(table.restore(key(block), BLOCK, Digest([0; 32]), class)),
                    (3, _) => {
                        let mark = |told: Option<_>| told.map_or(0, |(mark, _)| mark);
                        let all = table.follow().into_iter();
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
                    let held = table.peek(key(block)).filter(|held| held.verified);
                    let expected = held.map_or(0, Held::mark);
                    prop_assert_eq!(told.get(&key(block)).copied().unwrap_or(0), expected);
                }
            }
        }

        #[test]
        fn the_sums_are_right_and_the_capacity_is_kept(
            steps in prop::collection::vec((0u64..20, 1u32..20_000, 0usize..3, 0u8..6), 1..200),
            mru in any::<bool>(),
        ) {
            let replacement = if mru { Replacement::Mru } else { Replacement::Lru };
            let mut table = BlockTable::new(60_000, 1, replacement);
            for (block, length, class, what) in steps {
                let class = ALL_CLASSES[class];
                match what {
                    0 => drop(table.find(key(block))),
                    4 => drop(table.reclassify(key(block), class)),
                    5 => for victim in table.give_way(u64::from(length)) {
                        prop_assert!(victim.class != CopyClass::Pinned);
                        table.freed(victim.key);
                    },
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
                let by_class = ALL_CLASSES.map(|class| table.class_bytes(class));
                prop_assert_eq!(sum, by_class.iter().sum::<u64>());
                prop_assert!(sum <= 60_000);
            }
        }
    }
}
