//! Which 4 KiB pages of a file were read. Counts distinct pages, not reads.

use std::collections::BTreeMap;

/// Size of a page in bytes; the unit in which "unique bytes needed" is counted.
pub const PAGE_BYTES: u64 = 4096;

/// Pages per piece of the bitmap: 128 MiB of the file in 4 KiB of memory at most.
const CHUNK_PAGES: u64 = 32_768;

/// The pages of one file that were read. Memory grows with what was touched, not with the file, and
/// small files take little: there may be very many.
#[derive(Debug, Clone, Default)]
pub struct PageSet {
    /// Each as long as its last page that was touched.
    first_chunk: Vec<u64>,
    other_chunks: BTreeMap<u64, Vec<u64>>,
}

impl PageSet {
    /// Records that `length` bytes from `offset` on were read.
    pub fn touch(&mut self, offset: u64, length: u64) {
        if length == 0 {
            return;
        }
        let last = offset.saturating_add(length - 1) / PAGE_BYTES;
        for page in offset / PAGE_BYTES..=last {
            let piece = match page / CHUNK_PAGES {
                0 => &mut self.first_chunk,
                number => self.other_chunks.entry(number).or_default(),
            };
            let bit = page % CHUNK_PAGES;
            let word = (bit / 64) as usize;
            if piece.len() <= word {
                piece.resize(word + 1, 0);
            }
            piece[word] |= 1 << (bit % 64);
        }
    }

    /// Runs of pages as (first page, number of pages), ascending and apart from each other.
    pub fn runs(&self) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let others = self
            .other_chunks
            .iter()
            .map(|(number, piece)| (*number, piece));
        for (number, piece) in std::iter::once((0, &self.first_chunk)).chain(others) {
            for (index, word) in piece.iter().enumerate() {
                let mut left = *word;
                while left != 0 {
                    let bit = left.trailing_zeros();
                    left &= left - 1;
                    let page = number * CHUNK_PAGES + index as u64 * 64 + u64::from(bit);
                    match runs.last_mut() {
                        Some((first, count)) if *first + *count == page => *count += 1,
                        _ => runs.push((page, 1)),
                    }
                }
            }
        }
        runs
    }
}

/// Joins the runs with the smallest gaps until at most `runs_max` are left (at least one). The
/// result covers all given pages and perhaps a few more.
pub fn join_runs(mut runs: Vec<(u64, u64)>, runs_max: usize) -> Vec<(u64, u64)> {
    let excess = runs.len().saturating_sub(runs_max.max(1));
    if excess == 0 {
        return runs;
    }
    let mut gaps: Vec<u64> = runs
        .windows(2)
        .map(|pair| pair[1].0 - run_end(pair[0]))
        .collect();
    let (_, widest, _) = gaps.select_nth_unstable(excess - 1);
    let widest = *widest;
    let mut to_join = excess;
    let mut kept: Vec<(u64, u64)> = Vec::with_capacity(runs.len() - excess);
    for run in runs.drain(..) {
        match kept.last_mut() {
            Some(last) if to_join > 0 && run.0 - run_end(*last) <= widest => {
                last.1 = run_end(run) - last.0;
                to_join -= 1;
            }
            _ => kept.push(run),
        }
    }
    kept
}

fn run_end(run: (u64, u64)) -> u64 {
    run.0 + run.1
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn pages_are_counted_once() {
        let mut pages = PageSet::default();
        pages.touch(0, 1);
        pages.touch(0, 4096);
        pages.touch(4095, 2);
        pages.touch(40_960, 0);
        pages.touch(81_920, 4097);
        assert_eq!(pages.runs(), [(0, 2), (20, 2)]);
    }

    #[test]
    fn page_ranges_at_u64_max_do_not_overflow() {
        let mut pages = PageSet::default();
        pages.touch(u64::MAX - 1, u64::MAX);
        assert_eq!(pages.runs(), [(u64::MAX / 4096, 1)]);
    }

    #[test]
    fn joining_runs_fills_small_gaps_first() {
        let runs = vec![(0, 1), (2, 1), (100, 5), (107, 1), (1000, 1)];
        assert_eq!(join_runs(runs.clone(), 5), runs);
        assert_eq!(join_runs(runs.clone(), 3), [(0, 3), (100, 8), (1000, 1)]);
        assert_eq!(join_runs(runs.clone(), 0), [(0, 1001)]);
        assert_eq!(join_runs(Vec::new(), 1), []);
    }

    proptest::proptest! {
        #[test]
        fn runs_equal_the_model(
            reads in proptest::collection::vec((0u64..300_000_000, 0u64..70_000), 0..60),
            runs_max in 1usize..20,
        ) {
            let mut pages = PageSet::default();
            let mut model = BTreeSet::new();
            for (offset, length) in reads {
                pages.touch(offset, length);
                if length > 0 {
                    model.extend(offset / 4096..=(offset + length - 1) / 4096);
                }
            }
            let flat = |runs: &[(u64, u64)]| -> BTreeSet<u64> {
                runs.iter().flat_map(|&(first, count)| first..first + count).collect()
            };
            let runs = pages.runs();
            assert_eq!(flat(&runs), model);
            assert!(runs.windows(2).all(|pair| run_end(pair[0]) < pair[1].0));
            let fewer = join_runs(runs, runs_max);
            assert!(fewer.len() <= runs_max);
            assert!(flat(&fewer).is_superset(&model));
        }
    }
}
