//! Runs of blocks: where each begins and how long it is. Reads and writes nothing.

use bafs_proto::ids::{BlockIndex, FileIndex};

use crate::logic::blocks::BlockKey;

/// Blocks of one file that follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
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

impl Run {
    /// The block at place `n` of the run.
    pub(crate) fn key(&self, n: usize) -> BlockKey {
        BlockKey {
            file: self.file,
            block: BlockIndex(self.first + n as u64),
        }
    }

    /// Where the block at place `n` begins in its file, in bytes.
    pub(crate) fn at(&self, n: usize) -> u64 {
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
    pub(crate) fn range(&self, n: usize, count: usize) -> std::ops::Range<usize> {
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
}
