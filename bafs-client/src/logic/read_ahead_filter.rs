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
const REMEMBERED_READS_MAX: usize = 512;

/// What a read is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadPurpose {
    /// Somebody asked for it, as far as can be told.
    Demand,
    /// Somebody asked for it, and for all of this window, which was refused.
    DemandWindow(Range<u64>),
    /// The kernel reads it around a page: it may be refused.
    Speculative,
}

/// The latest reads of the files of a volume.
#[derive(Debug, Default)]
pub struct ReadAheadFilter {
    read_ends: VecDeque<(FileIndex, u64)>,
    refused_windows: VecDeque<RefusedWindow>,
}

/// A window that was refused.
#[derive(Debug)]
struct RefusedWindow {
    file: FileIndex,
    range: Range<u64>,
    /// Somebody goes through it in order.
    is_sequential: bool,
}

impl ReadAheadFilter {
    /// Notes a read of the bytes `range`, where the kernel's window has `window` bytes and blocks
    /// have `block`. Nothing is a guess that costs nothing: that `is_here`.
    ///
    /// Never what the kernel must have: that is a folio, which begins at a multiple of its length,
    /// a power of two. Nor what a program seems to want all of: where an earlier read ended, behind
    /// a refused window that is read through, and whole windows from the beginning of a block on,
    /// where reads of whole pieces begin. What the kernel adds to a window that it believes to have
    /// in part is a part of the next window.
    ///
    /// The kernel asks for the next window long before a reader has come to its start: at a mark
    /// inside the window that it has, refused or not.
    pub fn classify_read(
        &mut self,
        file: FileIndex,
        range: &Range<u64>,
        (window, block): (u64, u64),
        is_local: impl FnOnce() -> bool,
    ) -> ReadPurpose {
        let length = range.end - range.start;
        let is_folio = length.is_power_of_two() && range.start.is_multiple_of(length);
        let ended_at = |place: u64| self.read_ends.iter().position(|end| *end == (file, place));
        let mut purpose = ReadPurpose::Demand;
        if let Some(reader) = ended_at(range.start) {
            self.read_ends.remove(reader);
            self.mark_sequential(file, range);
        } else if is_folio {
            // A page around which the kernel reads is in the middle of the window. Who begins with
            // the first one asked for all of it.
            let mut refused = self.refused_windows.iter_mut();
            let starts = |it: &&mut RefusedWindow| it.file == file && it.range.start == range.start;
            if let Some(all) = refused.find(starts).filter(|all| !all.is_sequential) {
                all.is_sequential = true;
                purpose = ReadPurpose::DemandWindow(all.range.clone());
            }
        } else {
            let is_window = length == window && !range.start.is_multiple_of(block);
            // The second of two windows of one reader may come first.
            let goes_on = ended_at(range.start.saturating_sub(length)).is_some()
                || self.is_after_sequential_window(file, range.start);
            let may_be_guess = !goes_on && (is_window || self.is_adjacent_to_refused(file, range));
            if may_be_guess && !is_local() {
                let refused = RefusedWindow {
                    file,
                    range: range.clone(),
                    is_sequential: false,
                };
                push_bounded(&mut self.refused_windows, refused);
                return ReadPurpose::Speculative;
            }
        }
        push_bounded(&mut self.read_ends, (file, range.end));
        purpose
    }

    /// A read went on where another had ended.
    fn mark_sequential(&mut self, file: FileIndex, range: &Range<u64>) {
        for refused in self.refused_windows.iter_mut().filter(|it| it.file == file) {
            refused.is_sequential |= refused.range.contains(&range.start);
        }
    }

    fn is_after_sequential_window(&self, file: FileIndex, start: u64) -> bool {
        let mut refused = self.refused_windows.iter();
        refused.any(|it| it.file == file && it.range.end == start && it.is_sequential)
    }

    fn is_adjacent_to_refused(&self, file: FileIndex, range: &Range<u64>) -> bool {
        let beside =
            |refused: &Range<u64>| refused.end == range.start || refused.start == range.end;
        let mut refused = self.refused_windows.iter();
        refused.any(|it| it.file == file && beside(&it.range))
    }
}

fn push_bounded<T>(reads: &mut VecDeque<T>, read: T) {
    if reads.len() >= REMEMBERED_READS_MAX {
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

    fn purpose(
        filter: &mut ReadAheadFilter,
        start: u64,
        length: u64,
        is_here: bool,
    ) -> ReadPurpose {
        let range = start..start + length;
        filter.classify_read(FILE, &range, (WINDOW, BLOCK), || is_here)
    }

    fn is_refused(filter: &mut ReadAheadFilter, start: u64, length: u64) -> bool {
        purpose(filter, start, length, false) == ReadPurpose::Speculative
    }

    #[test]
    fn reads_continuing_cached_pages_are_not_refused() {
        let mut around = ReadAheadFilter::default();
        let first = 70_001 * PAGE;
        assert_eq!(
            purpose(&mut around, first, WINDOW, true),
            ReadPurpose::Demand
        );
        assert!(!is_refused(&mut around, first + WINDOW, WINDOW));
        assert!(!is_refused(&mut around, first - 40 * PAGE, 40 * PAGE));
    }

    #[test]
    fn windows_around_random_pages_are_refused() {
        let mut around = ReadAheadFilter::default();
        for page in [10_001, 70_001, 20_003] {
            let start = page * PAGE - WINDOW / 2;
            assert!(is_refused(&mut around, start, WINDOW), "{page}");
            assert!(
                !is_refused(&mut around, page * PAGE, PAGE),
                "the page itself"
            );
        }
        let other = purpose(&mut around, 5 * PAGE, 128 << 10, false);
        assert_eq!(
            other,
            ReadPurpose::Demand,
            "windows have another length here"
        );
    }

    #[test]
    fn sequential_reads_are_never_refused() {
        let mut around = ReadAheadFilter::default();
        assert!(!is_refused(&mut around, 0, 128 << 10));
        let mut at = 128 << 10;
        for _ in 0..20 {
            assert!(!is_refused(&mut around, at, WINDOW), "{at}");
            at += WINDOW;
        }
        // Two windows may come in the other order.
        assert!(!is_refused(&mut around, at + WINDOW, WINDOW));
        assert!(!is_refused(&mut around, at, WINDOW));
    }

    /// As the kernel asks: for the next window when three quarters of the first were read, then
    /// when the first page of each was.
    #[test]
    fn sequential_mapped_reads_are_refused_once() {
        let mut around = ReadAheadFilter::default();
        let first = 70_001 * PAGE;
        assert!(is_refused(&mut around, first - WINDOW / 2, WINDOW));
        let next = first + WINDOW / 2;
        let mut at = first;
        while at < next {
            assert!(!is_refused(&mut around, at, PAGE));
            if at == first + WINDOW / 4 {
                assert!(!is_refused(&mut around, next, WINDOW));
            }
            at += PAGE;
        }
        for number in 1..9 {
            assert!(
                !is_refused(&mut around, next + number * WINDOW, WINDOW),
                "{number}"
            );
        }
    }

    #[test]
    fn a_sequential_reader_gets_a_refused_window_back() {
        let mut around = ReadAheadFilter::default();
        let first = 70_001 * PAGE;
        assert!(is_refused(&mut around, first, WINDOW));
        let all = first..first + WINDOW;
        let begun = purpose(&mut around, first, PAGE, false);
        assert_eq!(begun, ReadPurpose::DemandWindow(all));
        for page in 1..WINDOW / PAGE {
            let goes_on = purpose(&mut around, first + page * PAGE, PAGE, false);
            assert_eq!(goes_on, ReadPurpose::Demand, "{page}");
            if page == WINDOW / PAGE / 2 {
                assert!(!is_refused(&mut around, first + WINDOW, WINDOW));
            }
        }
        // Once.
        let again = purpose(&mut around, first, PAGE, false);
        assert_eq!(again, ReadPurpose::Demand);
    }

    #[test]
    fn aligned_and_unusual_read_lengths_are_accepted() {
        let mut around = ReadAheadFilter::default();
        assert!(!is_refused(&mut around, 50 * WINDOW, WINDOW));
        assert!(!is_refused(&mut around, 9 * WINDOW + 3 * BLOCK, WINDOW));
        assert!(!is_refused(&mut around, 70 * WINDOW + PAGE, WINDOW - PAGE));
    }

    #[test]
    fn remainders_beside_refused_windows_are_refused() {
        let mut around = ReadAheadFilter::default();
        let first = 70_001 * PAGE;
        assert!(is_refused(&mut around, first, WINDOW));
        assert!(
            is_refused(&mut around, first - 40 * PAGE, 40 * PAGE),
            "before"
        );
        assert!(is_refused(&mut around, first + WINDOW, 40 * PAGE), "behind");
    }

    #[test]
    fn mandatory_kernel_reads_are_never_refused() {
        let mut around = ReadAheadFilter::default();
        let first = 70_001 * PAGE;
        assert!(is_refused(&mut around, first, WINDOW));
        assert!(!is_refused(&mut around, first - PAGE, PAGE));
        assert!(!is_refused(&mut around, first + WINDOW, PAGE));
        assert!(!is_refused(&mut around, 64 * WINDOW, WINDOW));
    }

    #[test]
    fn readers_of_other_files_do_not_count() {
        let mut around = ReadAheadFilter::default();
        let (other, range) = (FileIndex(2), PAGE..5 * PAGE);
        let read = around.classify_read(other, &range, (WINDOW, BLOCK), || false);
        assert_eq!(read, ReadPurpose::Demand);
        assert!(is_refused(&mut around, 5 * PAGE, WINDOW));
    }
}
