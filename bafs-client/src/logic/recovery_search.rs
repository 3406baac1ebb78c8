//! How many operations of the log have run, told by names. They run in their order and each makes
//! or removes a name that no other does, so a look at one name tells of all before it or of all
//! behind it; only what a later one renames tells nothing before it is known that this has not
//! run. Asks nobody.

use std::collections::BTreeMap;

use bafs_proto::file_op::{ByName, FileOp};
use bafs_proto::ids::InodeNo;

use super::operation_log::{LogEntry, marker_name};

/// A search for the first operation that has not run.
#[derive(Debug)]
pub struct RecoverySearch<'a> {
    entries: &'a [LogEntry],
    /// The places of entries that make or remove a name.
    marker_entries: Vec<usize>,
    /// What makes the files that entries make.
    creators: BTreeMap<InodeNo, usize>,
    /// What renames the names that entries make.
    renamers: BTreeMap<(InodeNo, &'a ByName), usize>,
    /// What removes directories.
    removers: BTreeMap<InodeNo, usize>,
    /// All before this one have run,
    executed: usize,
    /// and none from here on.
    not_executed: usize,
}

/// Look whether this name is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NameProbe<'a> {
    entry_index: usize,
    /// Whether its operation makes the name, or takes it away.
    pub is_creation: bool,
    /// The directory.
    pub parent: InodeNo,
    /// The name.
    pub name: &'a ByName,
}

impl<'a> RecoverySearch<'a> {
    /// Nothing is known of these entries.
    pub fn new(entries: &'a [LogEntry]) -> Self {
        let places = entries.iter().enumerate();
        let named = places
            .clone()
            .filter(|(_, it)| marker_name(&it.op).is_some());
        let renamers = places.clone().filter_map(|(at, entry)| match &entry.op {
            FileOp::Rename { parent, name, .. } => Some(((*parent, name), at)),
            _ => None,
        });
        let removers = places.clone().filter_map(|(at, entry)| match entry.op {
            FileOp::RemoveDirectory { .. } => entry.files[1].map(|directory| (directory, at)),
            _ => None,
        });
        let makers = places.filter_map(|(at, entry)| entry.created.0.map(|ino| (ino, at)));
        Self {
            entries,
            marker_entries: named.map(|(at, _)| at).collect(),
            creators: makers.collect(),
            renamers: renamers.collect(),
            removers: removers.collect(),
            executed: 0,
            not_executed: entries.len(),
        }
    }

    /// The next name to look at; `None` when names have nothing more to tell.
    pub fn next_probe(&self) -> Option<NameProbe<'a>> {
        let first = self
            .marker_entries
            .partition_point(|at| *at < self.executed);
        let end = self
            .marker_entries
            .partition_point(|at| *at < self.not_executed);
        let open = self.marker_entries.get(first..end)?;
        let mut look = self.probe_at(*open.get(open.len() / 2)?)?;
        // A name that is not there may have been made and have another one by now.
        while let Some(renamer) = self.renamers.get(&(look.parent, look.name))
            && *renamer > look.entry_index
            && *renamer < self.not_executed
        {
            look = self.probe_at(*renamer)?;
        }
        // A directory that may not be there yet, or not any more, is looked for first. Each step
        // leads nearer to the root.
        for _ in 0..self.entries.len() {
            let maker = self.creators.get(&look.parent).copied();
            let maker = maker.filter(|at| (self.executed..look.entry_index).contains(at));
            let remover = self.removers.get(&look.parent).copied();
            let remover =
                remover.filter(|at| (look.entry_index + 1..self.not_executed).contains(at));
            let Some(other) = remover.or(maker) else {
                break;
            };
            look = self.probe_at(other)?;
        }
        Some(look)
    }

    fn probe_at(&self, at: usize) -> Option<NameProbe<'a>> {
        let (parent, name, makes) = marker_name(&self.entries.get(at)?.op)?;
        Some(NameProbe {
            entry_index: at,
            is_creation: makes,
            parent,
            name,
        })
    }

    /// What a look showed.
    pub fn record_probe(&mut self, look: NameProbe<'a>, is_there: bool) {
        if look.is_creation == is_there {
            self.executed = look.entry_index + 1;
        } else {
            self.not_executed = look.entry_index;
        }
    }

    /// So many of the first entries have surely run.
    pub fn executed_count(&self) -> usize {
        self.executed
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use bafs_proto::file_op::Caller;
    use bafs_proto::ids::Epoch;
    use bytes::Bytes;

    use super::super::operation_log::Space;
    use super::*;

    fn entry(op: FileOp, makes: Option<InodeNo>) -> LogEntry {
        LogEntry {
            caller: Caller::default(),
            translated: (Epoch(1), op.clone()),
            op,
            data: Bytes::new(),
            created: (makes, None),
            files: [None, None, None],
            cost: Space::default(),
        }
    }

    /// Numbers that look random and are the same each time.
    struct SeededNumbers(u64);

    impl SeededNumbers {
        fn below(&mut self, limit: usize) -> usize {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (self.0 >> 33) as usize % limit
        }
    }

    /// Directories below each other, files in them, names that go or become others, directories of
    /// before that are emptied and removed, and operations on none.
    fn random_log(
        rng: &mut SeededNumbers,
        length: usize,
    ) -> (Vec<LogEntry>, BTreeSet<(InodeNo, ByName)>) {
        let mut directories = vec![InodeNo::ROOT];
        let (mut entries, mut there) = (Vec::new(), BTreeSet::new());
        // Files under names that may still become others.
        let mut files = Vec::new();
        let mut old_directories = Vec::new();
        for number in 0..3 {
            let (ino, name) = (InodeNo(10 + number), format!("old-{number}").into_bytes());
            let inner: Vec<ByName> = (0..4).map(|it| vec![b'a' + it]).collect();
            there.insert((InodeNo::ROOT, name.clone()));
            there.extend(inner.iter().map(|file| (ino, file.clone())));
            old_directories.push((ino, name, inner));
        }
        for number in 0..length {
            let parent = directories[rng.below(directories.len())];
            let name = number.to_string().into_bytes();
            let ino = InodeNo(100 + number as u64);
            entries.push(match rng.below(8) {
                0 | 1 => {
                    files.push((parent, name.clone()));
                    let (mode, flags) = (0o644, 0);
                    let op = FileOp::Create {
                        parent,
                        name,
                        mode,
                        flags,
                    };
                    entry(op, Some(ino))
                }
                2 => {
                    directories.push(ino);
                    let mode = 0o755;
                    entry(FileOp::MakeDirectory { parent, name, mode }, Some(ino))
                }
                3 => {
                    // Of before the log, and so in a directory of before it.
                    let parent = InodeNo::ROOT;
                    there.insert((parent, name.clone()));
                    entry(FileOp::Unlink { parent, name }, None)
                }
                4 | 5 if !files.is_empty() => {
                    let (old_parent, old_name) = files.swap_remove(rng.below(files.len()));
                    files.push((parent, name.clone()));
                    let op = FileOp::Rename {
                        parent: old_parent,
                        name: old_name,
                        new_parent: parent,
                        new_name: name,
                        flags: 0,
                    };
                    entry(op, None)
                }
                6 if !old_directories.is_empty() => {
                    let at = rng.below(old_directories.len());
                    let (parent, _, inner) = &mut old_directories[at];
                    match inner.pop() {
                        Some(name) => {
                            let parent = *parent;
                            entry(FileOp::Unlink { parent, name }, None)
                        }
                        None => {
                            let (ino, name, _) = old_directories.swap_remove(at);
                            let parent = InodeNo::ROOT;
                            let files = [Some(parent), Some(ino), None];
                            let removal = entry(FileOp::RemoveDirectory { parent, name }, None);
                            LogEntry { files, ..removal }
                        }
                    }
                }
                _ => entry(FileOp::StatFs, None),
            });
        }
        (entries, there)
    }

    #[test]
    fn few_lookups_reveal_the_number_of_run_operations() {
        for seed in 0..2_000 {
            let mut random = SeededNumbers(seed);
            let length = 1 + random.below(200);
            let (entries, mut there) = random_log(&mut random, length);
            let ran = random.below(length + 1);
            for entry in &entries[..ran] {
                if let FileOp::Rename { parent, name, .. } = &entry.op {
                    there.remove(&(*parent, name.clone()));
                }
                match marker_name(&entry.op) {
                    Some((parent, name, true)) => there.insert((parent, name.clone())),
                    Some((parent, name, false)) => there.remove(&(parent, name.clone())),
                    None => false,
                };
            }
            let (mut search, mut looks) = (RecoverySearch::new(&entries), 0);
            while let Some(look) = search.next_probe() {
                let made = entries[..ran]
                    .iter()
                    .any(|it| it.created.0 == Some(look.parent));
                let is_before = look.parent.0 < 100;
                let is_removed = entries[..ran].iter().any(|it| {
                    let removes = matches!(it.op, FileOp::RemoveDirectory { .. });
                    removes && it.files[1] == Some(look.parent)
                });
                let is_there = (made || is_before) && !is_removed;
                assert!(is_there, "seed {seed}: no such directory");
                search.record_probe(look, there.contains(&(look.parent, look.name.clone())));
                looks += 1;
            }
            let named = |entry: &&LogEntry| marker_name(&entry.op).is_some();
            let last = entries[..ran].iter().rposition(|entry| named(&entry));
            assert_eq!(
                search.executed_count(),
                last.map_or(0, |at| at + 1),
                "seed {seed}"
            );
            assert!(
                looks <= 40,
                "seed {seed}: {looks} looks for {length} entries"
            );
        }
    }
}
