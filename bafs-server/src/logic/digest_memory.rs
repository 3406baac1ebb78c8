//! Digests of blocks that were seen once, for a bounded number of blocks. Those that nobody asked
//! for lately are forgotten, half of all at a time. Hashes nothing.

use std::collections::BTreeMap;

use bafs_proto::hash::Digest;

/// Blocks of a file whose digests are kept and forgotten together.
const CHUNK_BLOCKS: u64 = 64;

/// What a chunk takes beside its digests, in digests.
const CHUNK_OVERHEAD: usize = 2;

/// Digests of blocks of files; `K` names a file.
#[derive(Debug)]
pub(crate) struct DigestMemory<K> {
    /// What was added or asked for since the last time that something was forgotten.
    recent: Chunks<K>,
    /// What was so before.
    older: Chunks<K>,
    digests_max: usize,
}

#[derive(Debug)]
struct Chunks<K> {
    /// By file and number of the chunk; unknown digests are [`Digest::ABSENT`].
    chunks: BTreeMap<(K, u64), Vec<Digest>>,
    /// Digests that fit into what it takes.
    size: usize,
}

impl<K: Ord> Chunks<K> {
    fn new() -> Self {
        Self {
            chunks: BTreeMap::new(),
            size: 0,
        }
    }

    fn take(&mut self, key: &(K, u64)) -> Option<Vec<Digest>> {
        let chunk = self.chunks.remove(key)?;
        self.size -= chunk.len() + CHUNK_OVERHEAD;
        Some(chunk)
    }

    fn put(&mut self, key: (K, u64), chunk: Vec<Digest>) {
        self.size += chunk.len() + CHUNK_OVERHEAD;
        let former = self.chunks.insert(key, chunk);
        self.size -= former.map_or(0, |former| former.len() + CHUNK_OVERHEAD);
    }
}

impl<K: Ord + Copy> DigestMemory<K> {
    /// A memory of about so many digests at most.
    pub(crate) fn new(digests_max: usize) -> Self {
        Self {
            recent: Chunks::new(),
            older: Chunks::new(),
            digests_max,
        }
    }

    /// Adds the digests of neighbouring blocks of a file.
    pub(crate) fn insert(&mut self, file: K, first: u64, digests: &[Digest]) {
        let mut block = first;
        let mut rest = digests;
        while !rest.is_empty() {
            let (number, place) = (block / CHUNK_BLOCKS, (block % CHUNK_BLOCKS) as usize);
            let count = rest.len().min(CHUNK_BLOCKS as usize - place);
            let (these, others) = rest.split_at(count);
            let mut chunk = self.take((file, number)).unwrap_or_default();
            if chunk.len() < place + count {
                chunk.resize(place + count, Digest::ABSENT);
            }
            chunk[place..place + count].copy_from_slice(these);
            self.put_recent((file, number), chunk);
            block += count as u64;
            rest = others;
        }
    }

    /// The digests of as many blocks as are known without a gap, from `first` on, at most `count`.
    pub(crate) fn known_from(&mut self, file: K, first: u64, count: usize) -> Vec<Digest> {
        let mut known = Vec::new();
        while known.len() < count {
            let block = first + known.len() as u64;
            let (number, place) = (block / CHUNK_BLOCKS, (block % CHUNK_BLOCKS) as usize);
            let Some(chunk) = self.take((file, number)) else {
                break;
            };
            let wanted = count - known.len();
            let rest = chunk.iter().skip(place).take(wanted);
            let before = known.len();
            known.extend(rest.take_while(|digest| **digest != Digest::ABSENT));
            let is_whole = place + known.len() - before == CHUNK_BLOCKS as usize;
            self.put_recent((file, number), chunk);
            if !is_whole {
                break;
            }
        }
        known
    }

    fn take(&mut self, key: (K, u64)) -> Option<Vec<Digest>> {
        self.recent.take(&key).or_else(|| self.older.take(&key))
    }

    fn put_recent(&mut self, key: (K, u64), chunk: Vec<Digest>) {
        self.recent.put(key, chunk);
        if self.recent.size > self.digests_max / 2 {
            self.older = std::mem::replace(&mut self.recent, Chunks::new());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(number: u64) -> Digest {
        Digest::of(&number.to_le_bytes())
    }

    fn digests(blocks: std::ops::Range<u64>) -> Vec<Digest> {
        blocks.map(digest).collect()
    }

    #[test]
    fn digests_are_known_up_to_the_gap() {
        let mut memory = DigestMemory::new(1 << 20);
        memory.insert(1, 10, &digests(10..200));
        memory.insert(1, 201, &digests(201..210));
        assert_eq!(memory.known_from(1, 10, 1000), digests(10..200));
        assert_eq!(memory.known_from(1, 60, 10), digests(60..70));
        assert_eq!(memory.known_from(1, 9, 5), []);
        assert_eq!(memory.known_from(1, 200, 5), []);
        assert_eq!(memory.known_from(2, 10, 5), [], "of another file");
        memory.insert(1, 200, &digests(200..201));
        assert_eq!(memory.known_from(1, 10, 1000), digests(10..210));
    }

    #[test]
    fn digests_in_use_outlast_others() {
        const MAX: usize = 4096;
        let mut memory = DigestMemory::new(MAX);
        memory.insert(0, 0, &digests(0..64));
        for file in 1..1000 {
            memory.insert(file, 0, &digests(0..64));
            assert_eq!(memory.known_from(0, 0, 64).len(), 64, "{file}");
            assert!(memory.recent.size + memory.older.size <= MAX + 200);
        }
        assert_eq!(memory.known_from(1, 0, 64), [], "forgotten");
        assert_eq!(memory.known_from(999, 0, 64).len(), 64);
    }
}
