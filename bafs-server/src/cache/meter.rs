//! What a cache volume did, in numbers, and what was asked of each of its peers. Decides nothing.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bafs_proto::ids::{FileIndex, ServerId};

use crate::counters::Counters;
use crate::logic::blocks::BlockKey;

/// The counters of a cache volume; they outlive its generations.
#[derive(Debug)]
pub(crate) struct Meter {
    counts: Counters,
    by_peer: Mutex<BTreeMap<ServerId, Counters>>,
}

impl Meter {
    /// Counters that are part of those of the whole node.
    pub(crate) fn new(node: &Counters) -> Self {
        Self {
            counts: node.child(),
            by_peer: Mutex::default(),
        }
    }

    /// Adds to a counter of the volume and of the node.
    pub(crate) fn add(&self, name: &str, amount: u64) {
        self.counts.add(name, amount);
    }

    /// Adds to a counter of one peer.
    pub(crate) fn add_for(&self, peer: ServerId, name: &str, amount: u64) {
        let mut by_peer = self.by_peer.lock().unwrap_or_else(PoisonError::into_inner);
        by_peer.entry(peer).or_default().add(name, amount);
    }

    /// The counters of the volume.
    pub(crate) fn counts(&self) -> &Counters {
        &self.counts
    }

    /// The counters of a peer.
    pub(crate) fn of_peer(&self, peer: ServerId) -> BTreeMap<String, u64> {
        let by_peer = self.by_peer.lock().unwrap_or_else(PoisonError::into_inner);
        by_peer
            .get(&peer)
            .map(Counters::snapshot)
            .unwrap_or_default()
    }
}

/// A set of blocks, a bit for each.
#[derive(Debug, Default)]
pub(crate) struct BlockSet(Mutex<BTreeMap<FileIndex, Vec<u64>>>);

impl BlockSet {
    /// Adds a block. Tells whether it is new.
    pub(crate) fn insert(&self, key: BlockKey) -> bool {
        let (word, bit) = place(key);
        let mut files = self.lock();
        let words = files.entry(key.file).or_default();
        if words.len() <= word {
            words.resize(word + 1, 0);
        }
        let is_new = words[word] & bit == 0;
        words[word] |= bit;
        is_new
    }

    /// Takes a block out. Tells whether it was in.
    pub(crate) fn remove(&self, key: BlockKey) -> bool {
        let (word, bit) = place(key);
        let mut files = self.lock();
        let Some(word) = files
            .get_mut(&key.file)
            .and_then(|words| words.get_mut(word))
        else {
            return false;
        };
        let was_in = *word & bit != 0;
        *word &= !bit;
        was_in
    }

    /// Whether a block is in.
    pub(crate) fn contains(&self, key: BlockKey) -> bool {
        let (word, bit) = place(key);
        let files = self.lock();
        let word = files.get(&key.file).and_then(|words| words.get(word));
        word.is_some_and(|word| word & bit != 0)
    }

    /// The blocks of some files, given by their old and new numbers, under the new ones.
    pub(crate) fn renumbered(&self, files: &BTreeMap<FileIndex, FileIndex>) -> Self {
        let sets = self.lock();
        let kept = files
            .iter()
            .filter_map(|(old, new)| Some((*new, sets.get(old)?.clone())));
        Self(Mutex::new(kept.collect()))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<FileIndex, Vec<u64>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn place(key: BlockKey) -> (usize, u64) {
    ((key.block.0 / 64) as usize, 1 << (key.block.0 % 64))
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::BlockIndex;

    use super::*;

    #[test]
    fn a_block_set_inserts_each_block_once() {
        let set = BlockSet::default();
        for block in [0, 63, 64, 1000] {
            let key = BlockKey {
                file: FileIndex(2),
                block: BlockIndex(block),
            };
            assert!(!set.remove(key));
            assert!(set.insert(key));
            assert!(!set.insert(key));
            let files =
                BTreeMap::from([(FileIndex(2), FileIndex(5)), (FileIndex(9), FileIndex(2))]);
            let moved = set.renumbered(&files);
            let file = FileIndex(5);
            assert!(set.contains(key) && !moved.contains(key));
            assert!(moved.contains(BlockKey { file, ..key }));
            assert!(set.remove(key));
            assert!(!set.contains(key));
            assert!(!set.remove(key));
        }
    }
}
