//! How far to read ahead of readers that go through a file in order. Reads nothing itself.
//!
//! The calls do not say who reads, so readers are told apart by where they are: whoever goes on
//! where an earlier read ended is the same one. What is asked ahead of a reader never exceeds a
//! quarter of what it has read in order, so that at most a fifth of what is fetched for it can be
//! in vain, and nothing for one who reads here and there.

use std::collections::VecDeque;

use bafs_proto::ids::FileIndex;

/// Most bytes ahead of one reader.
pub(crate) const AHEAD_BYTES_MAX: u64 = 8 << 20;

/// Room for copies is enough for so many readers.
const SHARING_READERS: u64 = 4;

/// Nothing is fetched ahead of a reader that has read less than this in order, in bytes.
const ORDERLY_BYTES_MIN: u64 = 512 << 10;

/// A read this close to where another one ended goes on there, in bytes: the kernel asks for
/// several pieces at once, and they may overtake each other.
const NEAR_BYTES: u64 = 256 << 10;

/// Most readers that are told apart, in all and in one file.
const READERS_MAX: usize = 256;
const READERS_OF_FILE_MAX: usize = 16;

/// The readers of a cache volume, as far as they are known; the latest last.
#[derive(Debug, Default)]
pub(crate) struct Readers(VecDeque<Reading>);

#[derive(Debug, Clone, Copy)]
struct Reading {
    file: FileIndex,
    /// Where it will go on, in blocks.
    next: u64,
    /// What it read in order, in blocks.
    orderly: u64,
    /// Everything before this block was asked for ahead.
    ahead: u64,
}

/// A read of blocks of one file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
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
    /// Most bytes ahead of the reader that are still here when it comes to them.
    pub(crate) kept_bytes: u64,
}

/// How many bytes ahead of a reader are still here when it comes to them, where copies of what
/// others are the primary of find so much room: several readers share it, and what was read stays
/// in it until something drives it out.
pub(crate) fn kept_of(room_bytes: u64) -> u64 {
    room_bytes / SHARING_READERS
}

impl Readers {
    /// Notes a read. Returns the first block and the number of blocks to fetch ahead, at most
    /// `blocks_max`, when it is time to.
    pub(crate) fn note(&mut self, step: Step, blocks_max: u64) -> Option<(u64, u64)> {
        let near = (NEAR_BYTES / u64::from(step.block_bytes)).max(1);
        let end = step.first + step.count;
        let is_near = |reading: &Reading| {
            // Blocks that are here may be read without asking: the reader comes back behind what
            // was fetched ahead of it.
            reading.file == step.file
                && step.first <= reading.next.max(reading.ahead) + near
                && end + near >= reading.next
        };
        // The nearest one: several may read the same file close to each other.
        let found = (0..self.0.len())
            .filter(|n| is_near(&self.0[*n]))
            .min_by_key(|n| self.0[*n].next.abs_diff(step.first));
        let mut reading = match found.and_then(|n| self.0.remove(n)) {
            Some(reading) => reading,
            None => {
                self.forget_one(step.file);
                Reading {
                    file: step.file,
                    next: step.first,
                    orderly: 0,
                    ahead: 0,
                }
            }
        };
        reading.orderly += end.saturating_sub(reading.next);
        reading.next = reading.next.max(end);
        let wanted = ahead_of(&reading, step, blocks_max);
        if let Some((first, count)) = wanted {
            reading.ahead = first + count;
        }
        self.0.push_back(reading);
        wanted
    }

    fn forget_one(&mut self, file: FileIndex) {
        let of_file = self.0.iter().filter(|reading| reading.file == file).count();
        if of_file >= READERS_OF_FILE_MAX {
            let oldest = self.0.iter().position(|reading| reading.file == file);
            oldest.and_then(|n| self.0.remove(n));
        } else if self.0.len() >= READERS_MAX {
            self.0.pop_front();
        }
    }
}

fn ahead_of(reading: &Reading, step: Step, blocks_max: u64) -> Option<(u64, u64)> {
    let block_bytes = u64::from(step.block_bytes);
    if reading.orderly * block_bytes < ORDERLY_BYTES_MIN {
        return None;
    }
    let most = AHEAD_BYTES_MAX.min(step.kept_bytes) / block_bytes;
    let window = (reading.orderly / 4).min(most);
    let until = (reading.next + window).min(step.blocks);
    let from = reading.ahead.max(reading.next);
    let count = until.saturating_sub(from).min(blocks_max);
    // Not in drops, unless it is the last one.
    let enough = count >= window.div_ceil(2) || from + count == step.blocks;
    (count > 0 && enough).then_some((from, count))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u32 = 64 << 10;
    const PLENTY: u64 = 1 << 20;

    fn step(first: u64, count: u64, blocks: u64) -> Step {
        Step {
            file: FileIndex(1),
            first,
            count,
            blocks,
            block_bytes: BLOCK,
            kept_bytes: u64::MAX,
        }
    }

    /// Reads these blocks one after the other; returns what was asked for ahead.
    fn go(readers: &mut Readers, firsts: impl Iterator<Item = u64>, count: u64) -> Vec<(u64, u64)> {
        firsts
            .filter_map(|first| readers.note(step(first, count, 10_000), PLENTY))
            .collect()
    }

    #[test]
    fn a_scan_is_followed_ever_further_and_each_block_asked_for_once() {
        let mut readers = Readers::default();
        let asked = go(&mut readers, (0..4_000).step_by(2), 2);
        assert!(
            asked
                .windows(2)
                .all(|pair| pair[0].0 + pair[0].1 <= pair[1].0)
        );
        let largest = asked.iter().map(|(_, count)| *count).max();
        assert!(largest >= Some(AHEAD_BYTES_MAX / u64::from(BLOCK) / 2));
        let whole: u64 = asked.iter().map(|(_, count)| *count).sum();
        assert!(whole > 3_900, "{whole}");
    }

    #[test]
    fn what_is_ahead_is_at_most_a_quarter_of_what_was_read() {
        for length in 1..600 {
            let mut readers = Readers::default();
            let asked = go(&mut readers, 0..length, 1);
            let beyond = asked.last().map_or(0, |(first, count)| first + count);
            assert!(beyond.saturating_sub(length) <= length / 4, "{length}");
        }
    }

    #[test]
    fn who_reads_the_rest_without_asking_is_still_known() {
        let mut readers = Readers::default();
        let (mut next, mut asked) = (0, Vec::new());
        while next < 3_000 {
            if let Some((first, count)) = readers.note(step(next, 1, 10_000), PLENTY) {
                asked.push(count);
                next = first + count;
            } else {
                next += 1;
            }
        }
        assert_eq!(asked.last(), Some(&(AHEAD_BYTES_MAX / u64::from(BLOCK))));
        assert_eq!(readers.0.len(), 1);
    }

    #[test]
    fn no_more_is_ahead_than_is_kept_until_it_is_read() {
        let beyond = |room_bytes: u64| {
            let mut readers = Readers::default();
            let kept_bytes = kept_of(room_bytes);
            let ahead = (0..2_000).filter_map(|first| {
                let step = Step {
                    kept_bytes,
                    ..step(first, 1, 10_000)
                };
                let (from, count) = readers.note(step, PLENTY)?;
                Some((from + count - first - 1) * u64::from(BLOCK))
            });
            ahead.max()
        };
        assert_eq!(beyond(u64::MAX), Some(AHEAD_BYTES_MAX));
        assert_eq!(beyond(16 << 20), Some(4 << 20));
        assert_eq!([0, 1 << 17].map(beyond), [None, None]);
    }

    #[test]
    fn random_reads_cost_nothing() {
        let mut readers = Readers::default();
        let places = (0..5_000u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 7);
        assert_eq!(go(&mut readers, places.map(|place| place % 9_000), 1), []);
    }

    #[test]
    fn the_end_of_the_file_is_the_end() {
        let mut readers = Readers::default();
        let asked: Vec<_> = (0..40)
            .filter_map(|first| readers.note(step(first, 1, 41), PLENTY))
            .collect();
        assert_eq!(asked.last().map(|(first, count)| first + count), Some(41));
    }

    #[test]
    fn readers_side_by_side_and_overtaking_pieces_are_told_apart() {
        let mut readers = Readers::default();
        let mut asked = Vec::new();
        for n in 0..200 {
            // Two readers, each of whose pairs of pieces comes in the wrong order.
            for start in [0, 5_000] {
                for first in [start + 2 * n + 1, start + 2 * n] {
                    asked.extend(readers.note(step(first, 1, 10_000), PLENTY));
                }
            }
        }
        assert!(asked.iter().any(|(first, _)| *first > 5_000));
        assert!(asked.iter().any(|(first, _)| *first < 5_000));
        assert_eq!(readers.0.len(), 2);
    }

    #[test]
    fn the_budget_is_kept_and_memory_bounded() {
        let mut readers = Readers::default();
        for first in 0..1_000 {
            let asked = readers.note(step(first, 1, 10_000), 3);
            assert!(asked.is_none_or(|(_, count)| count <= 3));
        }
        for file in 0..1_000 {
            for first in [0, 100, 200] {
                let file = FileIndex(file);
                readers.note(
                    Step {
                        file,
                        ..step(first, 1, 900)
                    },
                    PLENTY,
                );
            }
        }
        assert!(readers.0.len() <= READERS_MAX);
    }
}
