//! Which blocks of a cache volume lie on this machine, as a node tells its agents in shared memory
//! so that they read them without asking. Reads and writes no file itself.
//!
//! The node gives each copy of a block that may be read a mark of its own, takes the mark away
//! *before* it touches the bytes, and puts one there *after* they are whole. So bytes that were
//! read while the mark stayed the same are what the node put there
//! ([`BlockMap::read_if_unchanged`]). Beside the mark is a part of the block's digest, so that
//! damage on the disk shows too.

use std::io;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::fence;

use bafs_proto::hash::Digest;
use bafs_proto::message::{SourceEntry, SourceKind};

use crate::shared_words::{SHARED_WORDS_MAX, SharedAccess, SharedWords};

/// Numbers that a block has in the map: its mark, and the first eight bytes of its digest. Nobody
/// but the node writes them, so they need not withstand more than chance.
const BLOCK_WORDS: usize = 3;

/// Counts behind what agents say of blocks.
const READ_COUNTERS: usize = 2;

/// What an agent says of a block: it used it, or it found other bytes than the map says.
const USED: u32 = 1;
const MISMATCHED: u32 = 2;

/// What the map says of a block that may be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct BlockRecord {
    mark: u32,
    digest: [u32; 2],
}

/// Where the blocks of each file are in the map. Node and agent work it out alike, from the
/// manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockLayout {
    /// Place of the first block of each file, and the number of all blocks at the end.
    first_indexes: Vec<u32>,
}

impl BlockLayout {
    /// The places of the files of a manifest; `None` when there are too many blocks for a map.
    pub fn from_manifest(entries: &[SourceEntry], block_bytes: u32) -> Option<Self> {
        let block_bytes = u64::from(block_bytes.max(1));
        Self::new(entries.iter().map(|entry| match entry.kind {
            SourceKind::File => entry.identity.size.div_ceil(block_bytes),
            SourceKind::Directory | SourceKind::UnreadableDirectory | SourceKind::Symlink(_) => 0,
        }))
    }

    fn new(blocks: impl IntoIterator<Item = u64>) -> Option<Self> {
        let mut firsts = vec![0];
        let mut next = 0u64;
        for count in blocks {
            next = next.checked_add(count)?;
            firsts.push(u32::try_from(next).ok()?);
        }
        // Two numbers more are needed for what was read.
        (next < (SHARED_WORDS_MAX / BLOCK_WORDS) as u64).then_some(Self {
            first_indexes: firsts,
        })
    }

    /// Number of blocks of all files.
    fn count(&self) -> usize {
        self.first_indexes.last().copied().unwrap_or(0) as usize
    }

    /// The place of a block.
    fn index_of(&self, file: u32, block: u64) -> Option<usize> {
        let (first, end) = self.index_range_of(file)?;
        let place = usize::try_from(block).ok()?.checked_add(first)?;
        (place < end).then_some(place)
    }

    fn index_range_of(&self, file: u32) -> Option<(usize, usize)> {
        let file = file as usize;
        let (first, end) = (
            self.first_indexes.get(file)?,
            self.first_indexes.get(file + 1)?,
        );
        Some((*first as usize, *end as usize))
    }
}

/// A map of blocks, as the node writes it or an agent reads it.
#[derive(Debug)]
pub struct BlockMap {
    layout: BlockLayout,
    /// For each block a mark, 0 if it may not be read, and a part of its digest.
    records: SharedWords,
    /// What agents say of each block since the node last looked, and how many KiB and how many
    /// blocks they read.
    feedback: SharedWords,
}

impl BlockMap {
    /// Makes a map without any block, and the open files by which agents get at it.
    ///
    /// # Errors
    /// As the system says.
    pub fn create(places: BlockLayout) -> io::Result<(Self, [OwnedFd; 2])> {
        let length = places.count() + 1;
        let marks = length * BLOCK_WORDS;
        let (present, present_file) = SharedWords::create(marks, SharedAccess::Read)?;
        let counted = places.count() + READ_COUNTERS;
        let (used, used_file) = SharedWords::create(counted, SharedAccess::Write)?;
        let map = Self {
            layout: places,
            records: present,
            feedback: used,
        };
        Ok((map, [present_file, used_file]))
    }

    /// Takes the map that a node made for files at these places.
    ///
    /// # Errors
    /// `InvalidData` when the files are no map of so many blocks; as the system says.
    pub fn open(places: BlockLayout, [present, used]: [BorrowedFd<'_>; 2]) -> io::Result<Self> {
        let length = places.count() + 1;
        Ok(Self {
            records: SharedWords::map(present, length * BLOCK_WORDS, SharedAccess::Read)?,
            feedback: SharedWords::map(used, places.count() + READ_COUNTERS, SharedAccess::Write)?,
            layout: places,
        })
    }

    /// Gives a block a mark that no other copy of it had, and tells its digest; without them nobody
    /// may read it, and the caller may change its bytes.
    pub fn set_block(&self, file: u32, block: u64, told: Option<(u32, Digest)>) {
        let words = self.records.words().unwrap_or_default();
        let place = self.layout.index_of(file, block).map(|at| at * BLOCK_WORDS);
        let Some([mark, first, second]) = place.and_then(|at| words.get(at..at + BLOCK_WORDS))
        else {
            return;
        };
        // The bytes are whole before the mark is there, and the mark gone before they change.
        fence(SeqCst);
        if let Some((_, digest)) = &told {
            let part = digest_prefix(digest);
            first.store(part[0], SeqCst);
            second.store(part[1], SeqCst);
        }
        mark.store(told.map_or(0, |(mark, _)| mark), SeqCst);
        fence(SeqCst);
    }

    /// Whether a block may be read now.
    pub fn has_block(&self, file: u32, block: u64) -> bool {
        self.record_of(file, block).is_some()
    }

    /// Reads whole blocks of a file with `read`, which gives the digest of each in order; true when
    /// what it read are these blocks. Counts as a use of them. Other bytes than the node put there
    /// are told to it ([`BlockMap::take_mismatch`]).
    pub fn read_if_unchanged(
        &self,
        file: u32,
        blocks: Range<u64>,
        read: impl FnOnce() -> Option<Vec<Digest>>,
    ) -> bool {
        let look = || -> Option<Vec<BlockRecord>> {
            let blocks = blocks.clone();
            blocks.map(|block| self.record_of(file, block)).collect()
        };
        let Some(told) = look() else {
            return false;
        };
        fence(SeqCst);
        let digests = read();
        fence(SeqCst);
        let Some(digests) = digests.filter(|_| look().as_ref() == Some(&told)) else {
            return false;
        };
        let mut good = digests.len() == told.len();
        for ((block, told), digest) in blocks.zip(told).zip(digests) {
            let is_right = digest_prefix(&digest) == told.digest;
            good &= is_right;
            self.give_feedback(file, block, if is_right { USED } else { MISMATCHED });
        }
        good
    }

    /// Whether an agent found other bytes in a block than it should have, since this was asked
    /// last.
    pub fn take_mismatch(&self, file: u32, block: u64) -> bool {
        let words = self.feedback.words().unwrap_or_default();
        let word = self
            .layout
            .index_of(file, block)
            .and_then(|at| words.get(at));
        word.is_some_and(|word| {
            word.load(Relaxed) == MISMATCHED && word.swap(0, Relaxed) == MISMATCHED
        })
    }

    /// Counts what was read without asking: so many KiB, of so many blocks.
    pub fn count_read(&self, kib: u32, blocks: u32) {
        let words = self.feedback.words().unwrap_or_default();
        let counts = words.get(self.layout.count()..).unwrap_or_default();
        for (count, more) in counts.iter().zip([kib, blocks]) {
            count.fetch_add(more, Relaxed);
        }
    }

    /// How much was read without asking so far, in KiB and in blocks or parts of them, each modulo
    /// 2³².
    pub fn read_counts(&self) -> [u32; READ_COUNTERS] {
        let first = self.layout.count();
        [first, first + 1].map(|at| self.feedback.load(at, Relaxed).unwrap_or(0))
    }

    /// The blocks that were used since this was called last, in order of files and blocks.
    pub fn take_used_blocks(&self) -> Vec<(u32, u64)> {
        let words = self.feedback.words().unwrap_or_default();
        let mut uses = Vec::new();
        for file in 0..u32::try_from(self.layout.first_indexes.len() - 1).unwrap_or(0) {
            let Some((first, end)) = self.layout.index_range_of(file) else {
                break;
            };
            for (block, word) in (0..).zip(words.get(first..end).unwrap_or_default()) {
                if word.compare_exchange(USED, 0, Relaxed, Relaxed).is_ok() {
                    uses.push((file, block));
                }
            }
        }
        uses
    }

    fn record_of(&self, file: u32, block: u64) -> Option<BlockRecord> {
        let place = self.layout.index_of(file, block)? * BLOCK_WORDS;
        let load = |n| self.records.load(place + n, SeqCst);
        let mark = load(0).filter(|mark| *mark != 0)?;
        let digest = [load(1)?, load(2)?];
        Some(BlockRecord { mark, digest })
    }

    fn give_feedback(&self, file: u32, block: u64, what: u32) {
        let words = self.feedback.words().unwrap_or_default();
        if let Some(word) = self
            .layout
            .index_of(file, block)
            .and_then(|at| words.get(at))
        {
            // Looking first: all agents write here, and memory that nobody writes is shared.
            if word.load(Relaxed) < what {
                word.store(what, Relaxed);
            }
        }
    }
}

fn digest_prefix(digest: &Digest) -> [u32; 2] {
    let word = |at: usize| {
        let bytes = digest.0[at..at + 4].try_into();
        bytes.map_or(0, u32::from_le_bytes)
    };
    [word(0), word(4)]
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::{AtomicBool, AtomicU64};

    use super::*;

    fn pair(blocks: &[u64]) -> (BlockMap, BlockMap) {
        let places = BlockLayout::new(blocks.iter().copied()).expect("places");
        let (node, [present, used]) = BlockMap::create(places.clone()).expect("create");
        let agent = BlockMap::open(places, [present.as_fd(), used.as_fd()]).expect("open");
        (node, agent)
    }

    #[test]
    fn every_block_has_its_own_position() {
        let places = BlockLayout::new([2, 0, 3]).expect("places");
        let all: Vec<_> = (0..4)
            .flat_map(|file| (0..4).map(move |block| (file, block)))
            .filter_map(|(file, block)| places.index_of(file, block))
            .collect();
        assert_eq!(all, [0, 1, 2, 3, 4]);
        assert_eq!(places.index_of(2, u64::MAX), None);
        assert_eq!(BlockLayout::new([u64::MAX, 1]), None);
        assert_eq!(BlockLayout::new([SHARED_WORDS_MAX as u64]), None);
    }

    #[test]
    fn an_agent_reads_only_blocks_marked_present() {
        let (node, agent) = pair(&[3, 1]);
        let digest = Digest::of(b"block");
        let right = |count| move || Some(vec![digest; count]);
        assert!(!agent.read_if_unchanged(0, 0..1, right(1)));
        node.set_block(0, 0, Some((7, digest)));
        node.set_block(0, 1, Some((8, digest)));
        assert!(agent.read_if_unchanged(0, 0..2, right(2)));
        assert!(
            !agent.read_if_unchanged(0, 0..2, || None),
            "it could not be read"
        );
        assert!(!agent.read_if_unchanged(0, 0..2, right(1)), "too few");
        assert!(
            !agent.read_if_unchanged(0, 0..3, right(3)),
            "one is not there"
        );
        assert!(!agent.read_if_unchanged(1, 0..1, right(1)));
        assert!(!agent.read_if_unchanged(9, 0..1, right(1)));
        assert_eq!(node.take_used_blocks(), [(0, 0), (0, 1)]);
        assert_eq!(node.take_used_blocks(), []);
        // Other bytes than there should be: the node hears of it, once.
        assert!(!node.take_mismatch(0, 1));
        assert!(!agent.read_if_unchanged(0, 0..2, || Some(vec![digest, Digest::of(b"other")])));
        assert_eq!(node.take_used_blocks(), [(0, 0)]);
        assert!(node.take_mismatch(0, 1) && !node.take_mismatch(0, 1));
        // Gone, or another copy, at the end.
        assert!(!agent.read_if_unchanged(0, 0..1, || {
            node.set_block(0, 0, None);
            right(1)()
        }));
        assert!(!agent.read_if_unchanged(0, 1..2, || {
            node.set_block(0, 1, Some((9, digest)));
            right(1)()
        }));
        assert_eq!(node.take_used_blocks(), []);
        agent.count_read(3, 1);
        agent.count_read(4, 2);
        assert_eq!(node.read_counts(), [7, 3]);
    }

    #[test]
    fn a_map_of_another_shape_is_refused() {
        let places = |blocks| BlockLayout::new([blocks]).expect("places");
        let (_node, [present, used]) = BlockMap::create(places(5)).expect("create");
        let fds = || [present.as_fd(), used.as_fd()];
        assert!(BlockMap::open(places(5), fds()).is_ok());
        assert!(BlockMap::open(places(6), fds()).is_err());
        let swapped = BlockMap::open(places(5), [used.as_fd(), present.as_fd()]);
        assert!(swapped.is_err(), "nobody but the node may set marks");
    }

    /// A node that overwrites a block again and again, and readers of it.
    #[test]
    fn concurrent_overwrites_never_yield_wrong_bytes() {
        const BYTES: usize = 64 << 10;
        let file = tempfile::tempfile().expect("file");
        let (node, agent) = pair(&[1]);
        let digest = Digest::of(b"");
        let (over, good) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut bytes = vec![0u8; BYTES];
                    while !over.load(Relaxed) {
                        let read = || {
                            file.read_exact_at(&mut bytes, 0).ok()?;
                            // As if it were always right: marks alone must suffice.
                            Some(vec![digest])
                        };
                        if agent.read_if_unchanged(0, 0..1, read) {
                            assert!(bytes[0] != 0 && bytes.iter().all(|byte| *byte == bytes[0]));
                            good.fetch_add(1, Relaxed);
                        }
                    }
                });
            }
            let mut mark = 0u32;
            while good.load(Relaxed) < 200 || mark < 2_000 {
                mark += 1;
                file.write_all_at(&vec![0; BYTES], 0).expect("punch");
                file.write_all_at(&vec![(mark % 255 + 1) as u8; BYTES], 0)
                    .expect("write");
                node.set_block(0, 0, Some((mark, digest)));
                if mark.is_multiple_of(16) {
                    std::thread::yield_now();
                }
                node.set_block(0, 0, None);
            }
            over.store(true, Relaxed);
        });
    }
}
