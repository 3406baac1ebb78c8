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

/// Nothing is fetched ahead of a reader that has read less than this in order, in bytes.
const ORDERLY_BYTES_MIN: u64 = 512 << 10;

/// A read this close to where another one ended goes on there, in bytes: the kernel asks for
/// several pieces at once, and they may overtake each other.
const NEAR_BYTES: u64 = 256 << 10;

/// The same for what is to stay, which moves no bytes when it is in vain: of two windows of the
/// kernel, which are asked for at once and each piece by piece, one may be ahead by all of it.
const NEAR_TO_KEEP_BYTES: u64 = 2 << 20;

/// Who asks for less than this part of its way so reads here and there: at most the rest is here
/// anyway.
const ASKED_PART: u64 = 4;

/// Most readers that are told apart, in all and in one file.
const READERS_MAX: usize = 256;
const READERS_OF_FILE_MAX: usize = 16;

/// The readers of a cache volume, as far as they are known; the latest last.
#[derive(Debug, Default)]
pub(crate) struct Readers {
    /// For whom something is fetched ahead.
    fetching: VecDeque<Reading>,
    /// For whom what is there stays.
    keeping: VecDeque<Reading>,
}

#[derive(Debug, Clone, Copy)]
struct Reading {
    file: FileIndex,
    /// Where it will go on, in blocks.
    next: u64,
    /// What it read in order, in blocks.
    orderly: u64,
    /// What it asked for since it was here, in blocks.
    asked: u64,
    began: u64,
    /// Everything before this block was asked for ahead, or to stay.
    done: u64,
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
    /// Most blocks that may wait for this reader: more would not stay until it comes.
    pub(crate) ahead_max: u64,
    /// Most blocks ahead of this reader that stay for it, if they are there.
    pub(crate) keep_max: u64,
}

/// What shall be done ahead of a reader, when it is time to: each the first block and the number
/// of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// To be fetched.
    pub(crate) fetch: Option<(u64, u64)>,
    /// To stay, if they are there.
    pub(crate) keep: Option<(u64, u64)>,
}

impl Readers {
    /// Notes a read. Returns what shall be done ahead of it; at most `blocks_max` blocks are to be
    /// fetched.
    pub(crate) fn note(&mut self, step: Step, blocks_max: u64) -> Wanted {
        let fetching = going_on(&mut self.fetching, step, NEAR_BYTES);
        let fetch = fetching.ahead_of(step, step.ahead_max, blocks_max);
        let orderly = fetching.orderly;
        let keeping = going_on(&mut self.keeping, step, NEAR_TO_KEEP_BYTES);
        keeping.forget_if_sparse(step);
        keeping.orderly = keeping.orderly.max(orderly);
        let keep = keeping.ahead_of(step, step.keep_max, u64::MAX);
        Wanted { fetch, keep }
    }
}

/// The reader whose read this is, as far as it has come now; it becomes the latest.
fn going_on(readers: &mut VecDeque<Reading>, step: Step, near_bytes: u64) -> &mut Reading {
    let near = (near_bytes / u64::from(step.block_bytes)).max(1);
    let end = step.first + step.count;
    let is_near = |reading: &Reading| {
        // Blocks that are here may be read without asking: the reader comes back behind what
        // was fetched ahead of it.
        reading.file == step.file
            && step.first <= reading.next.max(reading.done) + near
            && end + near >= reading.next
    };
    // The nearest one: several may read the same file close to each other.
    let found = (0..readers.len())
        .filter(|n| is_near(&readers[*n]))
        .min_by_key(|n| readers[*n].next.abs_diff(step.first));
    let mut reading = match found.and_then(|n| readers.remove(n)) {
        Some(reading) => reading,
        None => {
            forget_one(readers, step.file);
            Reading {
                file: step.file,
                next: step.first,
                orderly: 0,
                asked: 0,
                began: step.first,
                done: 0,
            }
        }
    };
    reading.asked += step.count;
    reading.orderly += end.saturating_sub(reading.next);
    reading.next = reading.next.max(end);
    readers.push_back(reading);
    readers.back_mut().expect("it was just added")
}

fn forget_one(readers: &mut VecDeque<Reading>, file: FileIndex) {
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

impl Reading {
    /// Lets who reads here and there begin anew.
    fn forget_if_sparse(&mut self, step: Step) {
        if self.asked * ASKED_PART < self.next - self.began {
            (self.orderly, self.asked, self.began) = (0, step.count, self.next - step.count);
        }
    }

    /// The blocks ahead of it that were not asked for yet, at most a window of `window_max`.
    fn ahead_of(&mut self, step: Step, window_max: u64, blocks_max: u64) -> Option<(u64, u64)> {
        let block_bytes = u64::from(step.block_bytes);
        if self.orderly * block_bytes < ORDERLY_BYTES_MIN {
            return None;
        }
        let window = (self.orderly / 4).min(AHEAD_BYTES_MAX / block_bytes);
        let window = window.min(window_max);
        let until = (self.next + window).min(step.blocks);
        let from = self.done.max(self.next);
        let count = until.saturating_sub(from).min(blocks_max);
        // Not in drops, unless it is the last one.
        let enough = count >= window.div_ceil(2) || from + count == step.blocks;
        if count == 0 || !enough {
            return None;
        }
        self.done = from + count;
        Some((from, count))
    }
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
            ahead_max: PLENTY,
            keep_max: 0,
        }
    }

    /// Reads these blocks one after the other; returns what was asked for ahead.
    fn go(readers: &mut Readers, firsts: impl Iterator<Item = u64>, count: u64) -> Vec<(u64, u64)> {
        firsts
            .filter_map(|first| readers.note(step(first, count, 10_000), PLENTY).fetch)
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
    fn no_more_waits_for_a_reader_than_stays_until_it_comes() {
        for ahead_max in [0, 1, 3, 16] {
            let (mut readers, mut beyond) = (Readers::default(), 0);
            for first in 0..600 {
                let step = Step {
                    ahead_max,
                    ..step(first, 1, 10_000)
                };
                if let Some((first, count)) = readers.note(step, PLENTY).fetch {
                    beyond = first + count;
                }
                assert!(beyond.saturating_sub(first + 1) <= ahead_max);
            }
            assert_eq!(beyond > 500, ahead_max > 0, "{ahead_max}");
        }
    }

    #[test]
    fn what_is_to_stay_is_told_once_and_within_its_bound_whatever_is_fetched() {
        for keep_max in [0, 5, 64] {
            let (mut readers, mut beyond) = (Readers::default(), 0);
            for first in 0..600 {
                let step = Step {
                    ahead_max: 3,
                    keep_max,
                    ..step(first, 1, 10_000)
                };
                if let Some((from, count)) = readers.note(step, 0).keep {
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
    fn what_is_to_stay_is_known_of_a_reader_whose_windows_overtake_each_other() {
        let (mut readers, mut longest) = (Readers::default(), 0);
        for window in (0..960).step_by(32) {
            for piece in (0..16).step_by(4) {
                for first in [window + 16 + piece, window + piece] {
                    let step = Step {
                        keep_max: 64,
                        ..step(first, 3, 10_000)
                    };
                    let kept = readers.note(step, 0).keep;
                    longest = longest.max(kept.map_or(0, |(_, count)| count));
                }
            }
        }
        assert!(longest >= 32, "{longest}");
    }

    #[test]
    fn who_reads_here_and_there_has_hardly_anything_stay() {
        for blocks in [700, 9_000] {
            let mut readers = Readers::default();
            let places =
                (0..5_000u64).map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 7) % blocks);
            let kept = places.filter_map(|place| {
                let step = Step {
                    keep_max: 64,
                    ..step(place, 1, blocks)
                };
                readers.note(step, 0).keep
            });
            let kept: u64 = kept.map(|(_, count)| count).sum();
            assert!(kept < 1_000, "{kept} of {blocks}");
        }
    }

    #[test]
    fn who_reads_the_rest_without_asking_is_still_known() {
        let mut readers = Readers::default();
        let (mut next, mut asked) = (0, Vec::new());
        while next < 3_000 {
            if let Some((first, count)) = readers.note(step(next, 1, 10_000), PLENTY).fetch {
                asked.push(count);
                next = first + count;
            } else {
                next += 1;
            }
        }
        assert_eq!(asked.last(), Some(&(AHEAD_BYTES_MAX / u64::from(BLOCK))));
        assert_eq!(readers.fetching.len(), 1);
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
            .filter_map(|first| readers.note(step(first, 1, 41), PLENTY).fetch)
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
                    asked.extend(readers.note(step(first, 1, 10_000), PLENTY).fetch);
                }
            }
        }
        assert!(asked.iter().any(|(first, _)| *first > 5_000));
        assert!(asked.iter().any(|(first, _)| *first < 5_000));
        assert_eq!(readers.fetching.len(), 2);
    }

    #[test]
    fn the_budget_is_kept_and_memory_bounded() {
        let mut readers = Readers::default();
        for first in 0..1_000 {
            let asked = readers.note(step(first, 1, 10_000), 3).fetch;
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
        assert!(readers.fetching.len() <= READERS_MAX);
    }
}
