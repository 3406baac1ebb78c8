//! What a cache volume did, in numbers, and what was asked of each of its peers. Decides nothing.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use bafs_proto::ids::{FileIndex, ServerId};

use super::block_run::BlockRun;
use crate::cache::locks::lock;
use crate::clock;
use crate::counters::Counters;
use crate::logic::blocks::{BlockKey, BlockTable, CopyClass};

/// The counters of a cache volume; they outlive its generations.
#[derive(Debug)]
pub(crate) struct VolumeCounters {
    all: Counters,
    by_peer: Mutex<BTreeMap<ServerId, Counters>>,
}

impl VolumeCounters {
    /// Counters that are part of those of the whole node.
    pub(crate) fn new(node: &Counters) -> Self {
        Self {
            all: node.child(),
            by_peer: Mutex::default(),
        }
    }

    /// The counters without those of single peers.
    pub(crate) fn all(&self) -> &Counters {
        &self.all
    }
}

/// The statistics of one generation of a cache volume.
#[derive(Debug)]
pub(crate) struct Statistics {
    volume: Arc<VolumeCounters>,
    /// Blocks that this server had as their primary node, from wherever. After a start: those that
    /// it still had.
    pub(crate) primary_blocks: BlockSet,
    /// Blocks that it read from home in place of their primary node, which lacks them so far.
    pub(crate) non_owner_reads: BlockSet,
    /// Blocks that were fetched ahead of a reader and not read since.
    pub(crate) prefetched_blocks: BlockSet,
    has_logged_bypass: AtomicBool,
}

impl Statistics {
    /// Those of the first generation of this life of the server.
    pub(crate) fn new(volume: Arc<VolumeCounters>) -> Self {
        Self {
            volume,
            primary_blocks: BlockSet::default(),
            non_owner_reads: BlockSet::default(),
            prefetched_blocks: BlockSet::default(),
            has_logged_bypass: AtomicBool::new(false),
        }
    }

    /// Those of the next generation. `unchanged` maps the files that keep their blocks to their new
    /// numbers.
    pub(crate) fn successor(&self, unchanged: &BTreeMap<FileIndex, FileIndex>) -> Self {
        Self {
            primary_blocks: self.primary_blocks.renumbered(unchanged),
            non_owner_reads: self.non_owner_reads.renumbered(unchanged),
            ..Self::new(self.volume.clone())
        }
    }

    /// Adds to a counter of the volume and of the node.
    pub(crate) fn add(&self, name: &str, amount: u64) {
        self.volume.all.add(name, amount);
    }

    /// Adds to a counter of one peer.
    pub(crate) fn add_for(&self, peer: ServerId, name: &str, amount: u64) {
        self.by_peer().entry(peer).or_default().add(name, amount);
    }

    /// The counters of the volume.
    pub(crate) fn counters(&self) -> &Counters {
        &self.volume.all
    }

    /// The counters of a peer.
    pub(crate) fn of_peer(&self, peer: ServerId) -> BTreeMap<String, u64> {
        let by_peer = self.by_peer();
        by_peer
            .get(&peer)
            .map(Counters::snapshot)
            .unwrap_or_default()
    }

    /// Counts the primary blocks that an earlier life of this server left: home has sent them once
    /// already.
    pub(crate) fn count_recovered(&self, table: &BlockTable) {
        let mut bytes = 0;
        for (key, stored, class) in table.iter() {
            if class != CopyClass::Secondary {
                self.primary_blocks.insert(key);
                bytes += u64::from(stored.length);
            }
        }
        self.add("cache_recovered_bytes", bytes);
    }

    /// Counts what an agent found here of a run, and what of it was fetched ahead.
    pub(crate) fn count_hits(&self, run: &BlockRun, is_here: impl Fn(usize) -> bool) {
        let (mut blocks, mut bytes, mut prefetched_bytes) = (0, 0, 0);
        for n in 0..run.count {
            let length = run.length(n) as u64;
            if self.prefetched_blocks.remove(run.key(n)) {
                prefetched_bytes += length;
            }
            if is_here(n) {
                (blocks, bytes) = (blocks + 1, bytes + length);
            }
        }
        self.add("cache_hits_local", blocks);
        self.add("cache_hit_local_bytes", bytes);
        if prefetched_bytes > 0 {
            self.add("cache_read_ahead_used_bytes", prefetched_bytes);
        }
    }

    /// Counts the time that an agent waited for blocks, from `began` (ticks) until now.
    pub(crate) fn count_wait(&self, began: u64) {
        let waited = clock::monotonic_us().saturating_sub(began);
        self.add("cache_wait_us", waited);
    }

    /// Counts blocks that came from home, each once over all of its primary nodes. `is_evicted`
    /// says which of them an earlier primary node had and lost; `is_primary` whether this server is
    /// their primary node.
    pub(crate) fn count_home_blocks(&self, run: &BlockRun, is_primary: bool, is_evicted: &[bool]) {
        let mut bytes = 0;
        for (n, is_evicted) in is_evicted.iter().enumerate() {
            if !is_primary {
                self.non_owner_reads.insert(run.key(n));
            } else if self.primary_blocks.insert(run.key(n)) && !is_evicted {
                bytes += run.length(n) as u64;
            }
        }
        self.add("cache_home_unique_bytes", bytes);
    }

    /// Counts blocks that are passed through without being stored. Tells whether they are the
    /// first.
    pub(crate) fn count_bypassed(&self, blocks: u64) -> bool {
        self.add("cache_bypassed_blocks", blocks);
        !self.has_logged_bypass.swap(true, Ordering::Relaxed)
    }

    fn by_peer(&self) -> MutexGuard<'_, BTreeMap<ServerId, Counters>> {
        lock(&self.volume.by_peer)
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
        lock(&self.0)
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
