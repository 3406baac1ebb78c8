//! Which reads of a file nobody asked for: what the kernel reads around a page that a program
//! touches in mapped memory. Reads nothing itself.
//!
//! The kernel answers a fault in a mapped file by reading a whole read-ahead window, half of it
//! before the page (`do_sync_mmap_readahead` in mm/filemap.c), a hundred times before it believes
//! that the program jumps about. It does not say which page was touched. When such a read fails,
//! nobody is told of it: the kernel reads the one page that it needs. So it can be refused.

use std::collections::VecDeque;
use std::ops::Range;

use bafs_proto::ids::FileIndex;

/// Readers that are remembered, by the places where reads ended, and windows that were refused.
const READS_MAX: usize = 512;

/// The latest reads of the files of a volume.
#[derive(Debug, Default)]
pub struct Around {
    ends: VecDeque<(FileIndex, u64)>,
    refused: VecDeque<(FileIndex, Range<u64>)>,
}

impl Around {
    /// Notes a read of the bytes `range`. Tells whether it may be refused as one around a page, if
    /// the kernel's window is one of `windows` and blocks have `block` bytes (all in bytes).
    ///
    /// Never what the kernel must have: that is a folio, which begins at a multiple of its length,
    /// a power of two. Nor what a program seems to want all of: where an earlier read ended, and
    /// whole windows from the beginning of a block on, where reads of whole pieces begin. What the
    /// kernel adds to a window that it believes to have in part is a part of the next window.
    pub fn note(
        &mut self,
        file: FileIndex,
        range: &Range<u64>,
        windows: &[u64],
        block: u64,
    ) -> bool {
        let length = range.end - range.start;
        let is_folio = length.is_power_of_two() && range.start.is_multiple_of(length);
        let ended_at = |place: u64| self.ends.iter().position(|end| *end == (file, place));
        if let Some(reader) = ended_at(range.start) {
            self.ends.remove(reader);
        } else if !is_folio {
            let is_window = windows.contains(&length) && !range.start.is_multiple_of(block);
            // The second of two windows of one reader may come first.
            let goes_on = ended_at(range.start.saturating_sub(length)).is_some();
            if is_window && !goes_on || self.is_beside_refused(file, range) {
                keep(&mut self.refused, (file, range.clone()));
                return true;
            }
        }
        keep(&mut self.ends, (file, range.end));
        false
    }

    fn is_beside_refused(&self, file: FileIndex, range: &Range<u64>) -> bool {
        let beside =
            |refused: &Range<u64>| refused.end == range.start || refused.start == range.end;
        let mut refused = self.refused.iter();
        refused.any(|(of, window)| *of == file && beside(window))
    }
}

fn keep<T>(reads: &mut VecDeque<T>, read: T) {
    if reads.len() >= READS_MAX {
        reads.pop_front();
    }
    reads.push_back(read);
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = 64 << 10;
    const PAGE: u64 = 4096;
    const WINDOW: u64 = 1 << 20;
    const FILE: FileIndex = FileIndex(1);

    fn note(around: &mut Around, start: u64, length: u64) -> bool {
        around.note(FILE, &(start..start + length), &[WINDOW, 128 << 10], BLOCK)
    }

    #[test]
    fn a_window_around_a_page_that_nobody_read_up_to_is_refused() {
        let mut around = Around::default();
        for page in [10_001, 70_001, 20_003] {
            let start = page * PAGE - WINDOW / 2;
            assert!(note(&mut around, start, WINDOW), "{page}");
            assert!(!note(&mut around, page * PAGE, PAGE), "the page itself");
        }
        assert!(note(&mut around, 5 * PAGE, 128 << 10), "the usual window");
    }

    #[test]
    fn who_reads_in_order_is_refused_nothing() {
        let mut around = Around::default();
        assert!(!note(&mut around, 0, 128 << 10));
        let mut at = 128 << 10;
        for _ in 0..20 {
            assert!(!note(&mut around, at, WINDOW), "{at}");
            at += WINDOW;
        }
        // Two windows may come in the other order.
        assert!(!note(&mut around, at + WINDOW, WINDOW));
        assert!(!note(&mut around, at, WINDOW));
    }

    #[test]
    fn who_goes_through_mapped_memory_is_refused_once() {
        let mut around = Around::default();
        let first = 70_001 * PAGE;
        assert!(note(&mut around, first - WINDOW / 2, WINDOW));
        let mut at = first;
        while at < first + WINDOW / 2 {
            assert!(!note(&mut around, at, PAGE));
            at += PAGE;
        }
        assert!(!note(&mut around, at, WINDOW), "it went on there");
    }

    #[test]
    fn reads_of_whole_pieces_and_of_other_lengths_are_wanted() {
        let mut around = Around::default();
        assert!(!note(&mut around, 50 * WINDOW, WINDOW));
        assert!(!note(&mut around, 9 * WINDOW + 3 * BLOCK, WINDOW));
        assert!(!note(&mut around, 70 * WINDOW + PAGE, WINDOW - PAGE));
    }

    #[test]
    fn what_is_left_of_a_window_beside_refused_ones_is_refused() {
        let mut around = Around::default();
        let first = 70_001 * PAGE;
        assert!(note(&mut around, first, WINDOW));
        assert!(note(&mut around, first - 40 * PAGE, 40 * PAGE), "before");
        assert!(note(&mut around, first + WINDOW, 40 * PAGE), "behind");
    }

    #[test]
    fn what_the_kernel_must_have_is_never_refused() {
        let mut around = Around::default();
        let first = 70_001 * PAGE;
        assert!(note(&mut around, first, WINDOW));
        assert!(!note(&mut around, first - PAGE, PAGE));
        assert!(!note(&mut around, first + WINDOW, PAGE));
        assert!(!note(&mut around, 64 * WINDOW, WINDOW));
    }

    #[test]
    fn readers_of_other_files_do_not_count() {
        let mut around = Around::default();
        let other = FileIndex(2);
        assert!(!around.note(other, &(PAGE..5 * PAGE), &[WINDOW], BLOCK));
        assert!(note(&mut around, 5 * PAGE, WINDOW));
    }
}
