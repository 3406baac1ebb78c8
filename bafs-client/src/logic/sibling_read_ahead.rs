//! Which files of a directory to fetch before a program asks for them. Fetches nothing.
//!
//! When a program reads one file of a directory, the next ones are likely to follow. An agent
//! fetches at most as many files ahead as the programs have read in the directory. So it moves at
//! most twice the files that they want, and a program that reads a whole directory needs few calls.
//! The next files are those of the next numbers: they were made one after the other, and lie so on
//! the disk. The same holds for the directories in a directory.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::InodeNo;

use crate::limits::SIBLINGS_MAX;

/// Files that were listed, and how many of each directory were read.
#[derive(Debug, Default)]
pub struct SiblingReadAhead {
    /// Listed files that nobody has read or fetched, by directory and number.
    unread: BTreeSet<(InodeNo, InodeNo)>,
    /// Directories of the listed files, read or not.
    directories: BTreeMap<InodeNo, InodeNo>,
    /// Files that were fetched, or are being fetched, and that no program has asked for.
    ahead: BTreeSet<InodeNo>,
    /// Files that are being fetched.
    inflight: BTreeSet<InodeNo>,
    counts: BTreeMap<InodeNo, ReadCounts>,
}

/// Files of one directory.
#[derive(Debug, Default)]
struct ReadCounts {
    /// That programs read.
    read: u64,
    /// That were fetched and that no program has read.
    ahead: u64,
    is_fetching: bool,
}

/// Whether a file is fetched ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// It is.
    Take,
    /// It is not, and never will be.
    Skip,
    /// Neither it nor those behind it are fetched now.
    Stop,
}

/// What became of a file that was to be fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fetched {
    /// It is here.
    Yes,
    /// It is not, and another attempt would not help.
    No,
    /// The reply had no room for it.
    NoRoom,
}

impl SiblingReadAhead {
    /// A listing of a directory showed a file.
    pub fn note_listed(&mut self, directory: InodeNo, ino: InodeNo) {
        if self.directories.len() < SIBLINGS_MAX && !self.directories.contains_key(&ino) {
            self.directories.insert(ino, directory);
            self.unread.insert((directory, ino));
        }
    }

    /// A program reads a file; whether it is the first time.
    pub fn note_read(&mut self, ino: InodeNo) -> bool {
        let Some(directory) = self.directories.get(&ino).copied() else {
            return false;
        };
        let was_ahead = self.ahead.remove(&ino);
        let is_first = was_ahead || self.unread.remove(&(directory, ino));
        if is_first {
            let counts = self.counts.entry(directory).or_default();
            counts.read += 1;
            counts.ahead -= u64::from(was_ahead).min(counts.ahead);
        }
        is_first
    }

    /// Whether a file is being fetched.
    pub fn is_inflight(&self, ino: InodeNo) -> bool {
        self.inflight.contains(&ino)
    }

    /// The files to fetch, now that a program has read this one: none while others of its directory
    /// are being fetched, or while half as many as were read are here. They count as fetched.
    pub fn choose(
        &mut self,
        ino: InodeNo,
        mut find: impl FnMut(InodeNo) -> Choice,
    ) -> Vec<InodeNo> {
        let Some(directory) = self.directories.get(&ino).copied() else {
            return Vec::new();
        };
        let Some(counts) = self.counts.get_mut(&directory) else {
            return Vec::new();
        };
        if counts.is_fetching || counts.ahead * 2 > counts.read {
            return Vec::new();
        }
        let count_max = counts.read - counts.ahead;
        let (first, last) = (InodeNo(u64::MIN), InodeNo(u64::MAX));
        let behind = self.unread.range((directory, ino)..=(directory, last));
        let before = self.unread.range((directory, first)..(directory, ino));
        let (mut chosen, mut skipped) = (Vec::new(), Vec::new());
        for &(_, other) in behind.chain(before) {
            if chosen.len() as u64 >= count_max {
                break;
            }
            match find(other) {
                Choice::Take => chosen.push(other),
                Choice::Skip => skipped.push(other),
                Choice::Stop => break,
            }
        }
        counts.ahead += chosen.len() as u64;
        counts.is_fetching = !chosen.is_empty();
        for other in chosen.iter().chain(&skipped) {
            self.unread.remove(&(directory, *other));
        }
        self.inflight.extend(&chosen);
        self.ahead.extend(&chosen);
        chosen
    }

    /// What [`Self::choose`] gave was fetched, or could not be.
    pub fn end_fetch(&mut self, results: impl IntoIterator<Item = (InodeNo, Fetched)>) {
        for (ino, fetched) in results {
            self.inflight.remove(&ino);
            let Some(directory) = self.directories.get(&ino).copied() else {
                continue;
            };
            let Some(counts) = self.counts.get_mut(&directory) else {
                continue;
            };
            counts.is_fetching = false;
            if fetched != Fetched::Yes && self.ahead.remove(&ino) {
                counts.ahead -= 1.min(counts.ahead);
                if fetched == Fetched::NoRoom {
                    self.unread.insert((directory, ino));
                }
            }
        }
    }

    /// A file changes: it is not fetched ahead any more.
    pub fn discard(&mut self, ino: InodeNo) {
        if let Some(directory) = self.directories.remove(&ino) {
            self.unread.remove(&(directory, ino));
            let was_ahead = self.ahead.remove(&ino);
            if let Some(counts) = self.counts.get_mut(&directory) {
                counts.ahead -= u64::from(was_ahead).min(counts.ahead);
                // Nobody tells any more how its fetch ended.
                counts.is_fetching &= !self.inflight.contains(&ino);
            }
        }
    }

    /// The kernel does not know a file or directory any more.
    pub fn forget(&mut self, ino: InodeNo) {
        self.discard(ino);
        self.counts.remove(&ino);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIRECTORY: InodeNo = InodeNo(2);

    /// Files 10, 11 and so on of one directory.
    fn listed(count: u64) -> SiblingReadAhead {
        let mut siblings = SiblingReadAhead::default();
        for ino in 10..10 + count {
            siblings.note_listed(DIRECTORY, InodeNo(ino));
        }
        siblings
    }

    /// Reads a file as a program does; how many calls that takes.
    fn read(siblings: &mut SiblingReadAhead, ino: InodeNo) -> usize {
        let is_here = siblings.ahead.contains(&ino);
        assert!(siblings.note_read(ino));
        let chosen = siblings.choose(ino, |_| Choice::Take);
        let calls = usize::from(!is_here) + usize::from(!chosen.is_empty());
        siblings.end_fetch(chosen.into_iter().map(|ino| (ino, Fetched::Yes)));
        calls
    }

    #[test]
    fn a_directory_read_whole_takes_few_calls() {
        let mut siblings = listed(1_000);
        let calls: usize = (10..1_010)
            .map(|ino| read(&mut siblings, InodeNo(ino)))
            .sum();
        assert!(calls <= 24, "{calls} calls");
        assert!(siblings.unread.is_empty() && siblings.ahead.is_empty());
    }

    #[test]
    fn no_more_files_are_fetched_than_read() {
        let mut siblings = listed(1_000);
        for ino in (10..1_010).step_by(100) {
            siblings.note_read(InodeNo(ino));
            let chosen = siblings.choose(InodeNo(ino), |_| Choice::Take);
            siblings.end_fetch(chosen.into_iter().map(|ino| (ino, Fetched::Yes)));
        }
        assert!(siblings.ahead.len() <= 10, "{}", siblings.ahead.len());
        assert_eq!(siblings.choose(InodeNo(5), |_| Choice::Take), []);
    }

    #[test]
    fn files_without_room_are_fetched_later() {
        let mut siblings = listed(4);
        let (one, two, three) = (InodeNo(10), InodeNo(11), InodeNo(12));
        siblings.note_read(one);
        assert_eq!(siblings.choose(one, |_| Choice::Take), [two]);
        assert!(siblings.is_inflight(two));
        siblings.end_fetch([(two, Fetched::NoRoom)]);
        assert_eq!(siblings.choose(one, |_| Choice::Take), [two]);
        siblings.end_fetch([(two, Fetched::No)]);
        let mut seen = Vec::new();
        let chosen = siblings.choose(one, |ino| {
            seen.push(ino);
            Choice::Skip
        });
        assert_eq!((chosen, seen), (vec![], vec![three, InodeNo(13)]));
    }

    #[test]
    fn a_file_that_changes_is_not_fetched() {
        let mut siblings = listed(3);
        siblings.note_read(InodeNo(10));
        siblings.discard(InodeNo(11));
        assert_eq!(
            siblings.choose(InodeNo(10), |_| Choice::Take),
            [InodeNo(12)]
        );
        siblings.discard(InodeNo(12));
        siblings.end_fetch([(InodeNo(12), Fetched::Yes)]);
        siblings.note_listed(DIRECTORY, InodeNo(13));
        assert_eq!(
            siblings.choose(InodeNo(10), |_| Choice::Take),
            [InodeNo(13)]
        );
    }
}
