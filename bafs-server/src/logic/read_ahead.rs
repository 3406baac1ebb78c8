//! How far to read ahead of readers that go through a file in order. Reads nothing itself.
//!
//! The calls do not say who reads, so readers are told apart by where they are: whoever goes on
//! where an earlier read ended is the same one. What is asked ahead of a reader never exceeds a
//! quarter of what it has read in order, so that at most a fifth of what is fetched for it can be
//! in vain, and nothing for one who reads here and there.

use std::collections::VecDeque;

use bafs_proto::ids::FileIndex;

/// Most bytes ahead of one reader.
pub(crate) const READ_AHEAD_BYTES_MAX: u64 = 8 << 20;

/// Nothing is fetched ahead of a reader that has read less than this in order, in bytes.
const SEQUENTIAL_BYTES_MIN: u64 = 512 << 10;

/// A read this close to where another one ended goes on there, in bytes: the kernel asks for
/// several pieces at once, and they may overtake each other.
const SEQUENTIAL_GAP_BYTES: u64 = 256 << 10;

/// The same for what is to stay, which moves no bytes when it is in vain: of two windows of the
/// kernel, which are asked for at once and each piece by piece, one may be ahead by all of it.
const RETENTION_GAP_BYTES: u64 = 2 << 20;

/// Who asks for less than this part of its way so reads here and there: at most the rest is here
/// anyway.
const SPARSE_DIVISOR: u64 = 4;

/// Most readers that are told apart, in all and in one file.
const READERS_MAX: usize = 256;
const READERS_OF_FILE_MAX: usize = 16;

/// The readers of a cache volume, as far as they are known; the latest last.
#[derive(Debug, Default)]
pub(crate) struct SequentialReaders {
    /// For whom something is fetched ahead.
    fetching: VecDeque<SequentialReader>,
    /// For whom what is there stays.
    retaining: VecDeque<SequentialReader>,
}

#[derive(Debug, Clone, Copy)]
struct SequentialReader {
    file: FileIndex,
    /// Where it will go on, in blocks.
    next_block: u64,
    /// What it read in order, in blocks.
    sequential_blocks: u64,
    /// What it asked for since it was here, in blocks.
    requested_blocks: u64,
    first_block: u64,
    /// Everything before this block was asked for ahead, or to stay.
    planned_until: u64,
}

/// A read of blocks of one file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockRead {
    /// The file.
    pub(crate) file: FileIndex,
    /// The first block.
    pub(crate) first: u64,
    /// Number of blocks.
    pub(crate) count: u64,
    /// Number of blocks of the file.
    pub(crate) blocks: u64,
    /// Size of a block in bytes.
    pub(crate) block_bytes: u32,
    /// Most blocks that may wait for this reader: more would not stay until it comes.
    pub(crate) read_ahead_max: u64,
    /// Most blocks ahead of this reader that stay for it, if they are there.
    pub(crate) retain_max: u64,
}

/// What shall be done ahead of a reader, when it is time to: each the first block and the number
/// of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReadAheadPlan {
    /// To be fetched.
    pub(crate) fetch: Option<(u64, u64)>,
    /// To stay, if they are there.
    pub(crate) retain: Option<(u64, u64)>,
}

impl SequentialReaders {
    /// Notes a read. Returns what shall be done ahead of it; at most `blocks_max` blocks are to be
    /// fetched.
    pub(crate) fn note_read(&mut self, step: BlockRead, blocks_max: u64) -> ReadAheadPlan {
        let fetching = continue_reader(&mut self.fetching, step, SEQUENTIAL_GAP_BYTES);
        let fetch = fetching.next_window(step, step.read_ahead_max, blocks_max);
        let orderly = fetching.sequential_blocks;
        let keeping = continue_reader(&mut self.retaining, step, RETENTION_GAP_BYTES);
        keeping.forget_if_sparse(step);
        keeping.sequential_blocks = keeping.sequential_blocks.max(orderly);
        let keep = keeping.next_window(step, step.retain_max, u64::MAX);
        ReadAheadPlan {
            fetch,
            retain: keep,
        }
    }
}

/// The reader whose read this is, as far as it has come now; it becomes the latest.
fn continue_reader(
    readers: &mut VecDeque<SequentialReader>,
    step: BlockRead,
    near_bytes: u64,
) -> &mut SequentialReader {
    let near = (near_bytes / u64::from(step.block_bytes)).max(1);
    let end = step.first + step.count;
    let is_near = |reading: &SequentialReader| {
        // Blocks that are here may be read without asking: the reader comes back behind what
        // was fetched ahead of it.
        reading.file == step.file
            && step.first <= reading.next_block.max(reading.planned_until) + near
            && end + near >= reading.next_block
    };
    // The nearest one: several may read the same file close to each other.
    let found = (0..readers.len())
        .filter(|n| is_near(&readers[*n]))
        .min_by_key(|n| readers[*n].next_block.abs_diff(step.first));
    let mut reading = match found.and_then(|n| readers.remove(n)) {
        Some(reading) => reading,
        None => {
            evict_reader(readers, step.file);
            SequentialReader {
                file: step.file,
                next_block: step.first,
                sequential_blocks: 0,
                requested_blocks: 0,
                first_block: step.first,
                planned_until: 0,
            }
        }
    };
    reading.requested_blocks += step.count;
    reading.sequential_blocks += end.saturating_sub(reading.next_block);
    reading.next_block = reading.next_block.max(end);
    readers.push_back(reading);
    readers.back_mut().expect("it was just added")
}

fn evict_reader(readers: &mut VecDeque<SequentialReader>, file: FileIndex) {
    let of_file = readers
        .iter()
        .filter(|reading| reading.file == file)
        .count();
    if of_file >= READERS_OF_FILE_MAX {
        let oldest = readers.iter().position(|reading| reading.file == file);
        oldest.and_then(|n| readers.remove(n));
    } else if readers.len() >= READERS_MAX {
        readers.pop_front();
    }
}

impl SequentialReader {
    /// Lets who reads here and there begin anew.
    fn forget_if_sparse(&mut self, step: BlockRead) {
        if self.requested_blocks * SPARSE_DIVISOR < self.next_block - self.first_block {
            (
                self.sequential_blocks,
                self.requested_blocks,
                self.first_block,
            ) = (0, step.count, self.next_block - step.count);
        }
    }

    /// The blocks ahead of it that were not asked for yet, at most a window of `window_max`.
    fn next_window(
        &mut self,
        step: BlockRead,
        window_max: u64,
        blocks_max: u64,
    ) -> Option<(u64, u64)> {
        let block_bytes = u64::from(step.block_bytes);
        if self.sequential_blocks * block_bytes < SEQUENTIAL_BYTES_MIN {
            return None;
        }
        let window = (self.sequential_blocks / 4).min(READ_AHEAD_BYTES_MAX / block_bytes);
        let window = window.min(window_max);
        let until = (self.next_block + window).min(step.blocks);
        let from = self.planned_until.max(self.next_block);
        let count = until.saturating_sub(from).min(blocks_max);
        // Not in drops, unless it is the last one.
        let enough = count >= window.div_ceil(2) || from + count == step.blocks;
        if count == 0 || !enough {
            return None;
        }
        self.planned_until = from + count;
        Some((from, count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u32 = 64 << 10;
    const PLENTY: u64 = 1 << 20;

    fn step(first: u64, count: u64, blocks: u64) -> BlockRead {
        BlockRead {
            file: FileIndex(1),
            first,
            count,
            blocks,
            block_bytes: BLOCK,
            read_ahead_max: PLENTY,
            retain_max: 0,
        }
    }

    /// Reads these blocks one after the other; returns what was asked for ahead.
    fn go(
        readers: &mut SequentialReaders,
        firsts: impl Iterator<Item = u64>,
        count: u64,
    ) -> Vec<(u64, u64)> {
        firsts
            .filter_map(|first| readers.note_read(step(first, count, 10_000), PLENTY).fetch)
            .collect()
    }

    #[test]
    fn readahead_grows_and_requests_each_block_once() {
        let mut readers = SequentialReaders::default();
        let asked = go(&mut readers, (0..4_000).step_by(2), 2);
        assert!(
            asked
                .windows(2)
                .all(|pair| pair[0].0 + pair[0].1 <= pair[1].0)
        );
        let largest = asked.iter().map(|(_, count)| *count).max();
        assert!(largest >= Some(READ_AHEAD_BYTES_MAX / u64::from(BLOCK) / 2));
        let whole: u64 = asked.iter().map(|(_, count)| *count).sum();
        assert!(whole > 3_900, "{whole}");
    }

    #[test]
    fn readahead_stays_within_a_quarter_of_reads() {
        for length in 1..600 {
            let mut readers = SequentialReaders::default();
            let asked = go(&mut readers, 0..length, 1);
            let beyond = asked.last().map_or(0, |(first, count)| first + count);
            assert!(beyond.saturating_sub(length) <= length / 4, "{length}");
        }
    }

    #[test]
    fn readahead_never_exceeds_the_ahead_limit() {
        for ahead_max in [0, 1, 3, 16] {
            let (mut readers, mut beyond) = (SequentialReaders::default(), 0);
            for first in 0..600 {
                let step = BlockRead {
                    read_ahead_max: ahead_max,
                    ..step(first, 1, 10_000)
                };
                if let Some((first, count)) = readers.note_read(step, PLENTY).fetch {
                    beyond = first + count;
                }
                assert!(beyond.saturating_sub(first + 1) <= ahead_max);
            }
            assert_eq!(beyond > 500, ahead_max > 0, "{ahead_max}");
        }
    }

    #[test]
    fn retained_blocks_are_reported_once_within_bounds() {
        for keep_max in [0, 5, 64] {
            let (mut readers, mut beyond) = (SequentialReaders::default(), 0);
            for first in 0..600 {
                let step = BlockRead {
                    read_ahead_max: 3,
                    retain_max: keep_max,
                    ..step(first, 1, 10_000)
                };
                if let Some((from, count)) = readers.note_read(step, 0).retain {
                    assert!(from >= beyond, "{from} was told");
                    beyond = from + count;
                }
                assert!(beyond.saturating_sub(first + 1) <= keep_max);
            }
            assert_eq!(beyond > 500, keep_max > 0, "{keep_max}");
        }
    }

    /// As a kernel does that asks for two windows at once: pieces of both come by turns, and a
    /// quarter of all blocks is read without asking.
    #[test]
    fn retention_recognises_readers_with_interleaved_windows() {
        let (mut readers, mut longest) = (SequentialReaders::default(), 0);
        for window in (0..960).step_by(32) {
            for piece in (0..16).step_by(4) {
                for first in [window + 16 + piece, window + piece] {
                    let step = BlockRead {
                        retain_max: 64,
                        ..step(first, 3, 10_000)
                    };
                    let kept = readers.note_read(step, 0).retain;
                    longest = longest.max(kept.map_or(0, |(_, count)| count));
                }
            }
        }
        assert!(longest >= 32, "{longest}");
    }

    #[test]
    fn random_readers_retain_few_blocks() {
        for blocks in [700, 9_000] {
            let mut readers = SequentialReaders::default();
            let places =
                (0..5_000u64).map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 7) % blocks);
            let kept = places.filter_map(|place| {
                let step = BlockRead {
                    retain_max: 64,
                    ..step(place, 1, blocks)
                };
                readers.note_read(step, 0).retain
            });
            let kept: u64 = kept.map(|(_, count)| count).sum();
            assert!(kept < 1_000, "{kept} of {blocks}");
        }
    }

    #[test]
    fn a_reader_skipping_prefetched_blocks_stays_recognised() {
        let mut readers = SequentialReaders::default();
        let (mut next, mut asked) = (0, Vec::new());
        while next < 3_000 {
            if let Some((first, count)) = readers.note_read(step(next, 1, 10_000), PLENTY).fetch {
                asked.push(count);
                next = first + count;
            } else {
                next += 1;
            }
        }
        assert_eq!(
            asked.last(),
            Some(&(READ_AHEAD_BYTES_MAX / u64::from(BLOCK)))
        );
        assert_eq!(readers.fetching.len(), 1);
    }

    #[test]
    fn random_reads_trigger_no_readahead() {
        let mut readers = SequentialReaders::default();
        let places = (0..5_000u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 7);
        assert_eq!(go(&mut readers, places.map(|place| place % 9_000), 1), []);
    }

    #[test]
    fn readahead_stops_at_the_end_of_file() {
        let mut readers = SequentialReaders::default();
        let asked: Vec<_> = (0..40)
            .filter_map(|first| readers.note_read(step(first, 1, 41), PLENTY).fetch)
            .collect();
        assert_eq!(asked.last().map(|(first, count)| first + count), Some(41));
    }

    #[test]
    fn interleaved_readers_are_tracked_separately() {
        let mut readers = SequentialReaders::default();
        let mut asked = Vec::new();
        for n in 0..200 {
            // Two readers, each of whose pairs of pieces comes in the wrong order.
            for start in [0, 5_000] {
                for first in [start + 2 * n + 1, start + 2 * n] {
                    asked.extend(readers.note_read(step(first, 1, 10_000), PLENTY).fetch);
                }
            }
        }
        assert!(asked.iter().any(|(first, _)| *first > 5_000));
        assert!(asked.iter().any(|(first, _)| *first < 5_000));
        assert_eq!(readers.fetching.len(), 2);
    }

    #[test]
    fn readahead_respects_its_budget_and_memory_bound() {
        let mut readers = SequentialReaders::default();
        for first in 0..1_000 {
            let asked = readers.note_read(step(first, 1, 10_000), 3).fetch;
            assert!(asked.is_none_or(|(_, count)| count <= 3));
        }
        for file in 0..1_000 {
            for first in [0, 100, 200] {
                let file = FileIndex(file);
                readers.note_read(
                    BlockRead {
                        file,
                        ..step(first, 1, 900)
                    },
                    PLENTY,
                );
            }
        }
        assert!(readers.fetching.len() <= READERS_MAX);
    }
}
