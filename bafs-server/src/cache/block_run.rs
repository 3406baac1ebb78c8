//! Runs of neighbouring blocks: where each block begins and how long it is. Reads and writes
//! nothing.

use std::ops::Range;

use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex};
use bytes::Bytes;

use crate::logic::blocks::BlockKey;

/// A block with the digest of its origin.
pub(crate) type Block = (Bytes, Digest);

/// All blocks of a run: their digests and their bytes.
pub(crate) type RunData = (Vec<Digest>, Bytes);

/// Neighbouring blocks of one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockRun {
    /// The file.
    pub(crate) file: FileIndex,
    /// The first block.
    pub(crate) first: u64,
    /// Number of blocks.
    pub(crate) count: usize,
    /// Length of the last one in bytes; all others have the block size.
    pub(crate) last_bytes: u32,
    /// Block size in bytes.
    pub(crate) block_bytes: u32,
}

impl BlockRun {
    /// The block at place `n` of the run.
    pub(crate) fn key(&self, n: usize) -> BlockKey {
        BlockKey {
            file: self.file,
            block: BlockIndex(self.first + n as u64),
        }
    }

    /// All blocks of the run.
    pub(crate) fn keys(&self) -> impl Iterator<Item = BlockKey> + use<> {
        let run = *self;
        (0..run.count).map(move |n| run.key(n))
    }

    /// Where the block at place `n` begins in its file, in bytes.
    pub(crate) fn offset(&self, n: usize) -> u64 {
        (self.first + n as u64) * u64::from(self.block_bytes)
    }

    /// Length of the whole run in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.range(0, self.count).end
    }

    /// Length of the block at place `n`, in bytes.
    pub(crate) fn length(&self, n: usize) -> usize {
        self.range(n, 1).len()
    }

    /// Where `count` blocks from place `n` on are in the bytes of the run.
    pub(crate) fn range(&self, n: usize, count: usize) -> Range<usize> {
        let block_bytes = self.block_bytes as usize;
        let short = if n + count == self.count && count > 0 {
            block_bytes - self.last_bytes as usize
        } else {
            0
        };
        n * block_bytes..(n + count) * block_bytes - short
    }

    /// The part of the run that begins at place `n` and has `count` blocks.
    pub(crate) fn part(&self, n: usize, count: usize) -> Self {
        let last_bytes = self.length(n + count - 1) as u32;
        Self {
            first: self.first + n as u64,
            count,
            last_bytes,
            ..*self
        }
    }

    /// Cuts the data of the run into its blocks.
    pub(crate) fn split(&self, (digests, bytes): &RunData) -> Vec<Block> {
        let block = |(n, digest): (usize, &Digest)| (bytes.slice(self.range(n, 1)), *digest);
        digests.iter().enumerate().map(block).collect()
    }
}

/// Groups ascending numbers into ranges without a gap.
pub(crate) fn contiguous_ranges(numbers: &[usize]) -> impl Iterator<Item = Range<usize>> + '_ {
    let groups = numbers.chunk_by(|one, next| one + 1 == *next);
    groups.map(|group| group[0]..group[group.len() - 1] + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_numbers_form_one_range() {
        let found: Vec<_> = contiguous_ranges(&[0, 1, 2, 5, 7, 8]).collect();
        assert_eq!(found, [0..3, 5..6, 7..9]);
        assert_eq!(contiguous_ranges(&[]).count(), 0);
    }
}
