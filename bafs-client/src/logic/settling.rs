//! How many operations of the log have run, told by names. They run in their order and each makes
//! or removes a name that no other does, so a look at one name tells of all before it or of all
//! behind it; only what a later one renames tells nothing before it is known that this has not
//! run. Asks nobody.

use std::collections::BTreeMap;

use bafs_proto::file_op::{FileOp, Name};
use bafs_proto::ids::InodeNo;

use super::log::{Entry, name_of};

/// A search for the first operation that has not run.
#[derive(Debug)]
pub struct Search<'a> {
    entries: &'a [Entry],
    /// The places of entries that make or remove a name.
    named: Vec<usize>,
    /// What makes the files that entries make.
    makers: BTreeMap<InodeNo, usize>,
    /// What renames the names that entries make.
    renamers: BTreeMap<(InodeNo, &'a Name), usize>,
    /// All before this one have run,
    ran: usize,
    /// and none from here on.
    not_run: usize,
}

/// Look whether this name is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look<'a> {
    at: usize,
    /// Whether its operation makes the name, or takes it away.
    pub makes: bool,
    /// The directory.
    pub parent: InodeNo,
    /// The name.
    pub name: &'a Name,
}

impl<'a> Search<'a> {
    /// Nothing is known of these entries.
    pub fn new(entries: &'a [Entry]) -> Self {
        let places = entries.iter().enumerate();
        let named = places.clone().filter(|(_, it)| name_of(&it.op).is_some());
        let renamers = places.clone().filter_map(|(at, entry)| match &entry.op {
            FileOp::Rename { parent, name, .. } => Some(((*parent, name), at)),
            _ => None,
        });
        let makers = places.filter_map(|(at, entry)| entry.made.0.map(|ino| (ino, at)));
        Self {
            entries,
            named: named.map(|(at, _)| at).collect(),
            makers: makers.collect(),
            renamers: renamers.collect(),
            ran: 0,
            not_run: entries.len(),
        }
    }

    /// The next name to look at; `None` when names have nothing more to tell.
    pub fn next_look(&self) -> Option<Look<'a>> {
        let first = self.named.partition_point(|at| *at < self.ran);
        let end = self.named.partition_point(|at| *at < self.not_run);
        let open = self.named.get(first..end)?;
        let mut look = self.look(*open.get(open.len() / 2)?)?;
        // A name that is not there may have been made and have another one by now.
        while let Some(renamer) = self.renamers.get(&(look.parent, look.name))
            && *renamer > look.at
            && *renamer < self.not_run
        {
            look = self.look(*renamer)?;
        }
        // A directory that may not be there yet is looked for first; who made it comes before.
        while let Some(maker) = self.makers.get(&look.parent)
            && *maker >= self.ran
            && *maker < look.at
        {
            look = self.look(*maker)?;
        }
        Some(look)
    }

    fn look(&self, at: usize) -> Option<Look<'a>> {
        let (parent, name, makes) = name_of(&self.entries.get(at)?.op)?;
        Some(Look {
            at,
            makes,
            parent,
            name,
        })
    }

    /// What a look showed.
    pub fn tell(&mut self, look: Look<'a>, is_there: bool) {
        if look.makes == is_there {
            self.ran = look.at + 1;
        } else {
            self.not_run = look.at;
        }
    }

    /// So many of the first entries have surely run.
    pub fn ran(&self) -> usize {
        self.ran
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use bafs_proto::file_op::Caller;
    use bafs_proto::ids::Epoch;
    use bytes::Bytes;

    use super::super::log::Room;
    use super::*;

    fn entry(op: FileOp, makes: Option<InodeNo>) -> Entry {
        Entry {
            caller: Caller::default(),
            asked: (Epoch(1), op.clone()),
            op,
            data: Bytes::new(),
            made: (makes, None),
            about: [None, None, None],
            cost: Room::default(),
        }
    }

    /// Numbers that look random and are the same each time.
    struct Dice(u64);

    impl Dice {
        fn below(&mut self, limit: usize) -> usize {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (self.0 >> 33) as usize % limit
        }
    }

    /// Directories below each other, files in them, names that go or become others, and operations
    /// on none.
    fn log(dice: &mut Dice, length: usize) -> (Vec<Entry>, BTreeSet<(InodeNo, Name)>) {
        let mut directories = vec![InodeNo::ROOT];
        let (mut entries, mut there) = (Vec::new(), BTreeSet::new());
        // Files under names that may still become others.
        let mut files = Vec::new();
        for number in 0..length {
            let parent = directories[dice.below(directories.len())];
            let name = number.to_string().into_bytes();
            let ino = InodeNo(100 + number as u64);
            entries.push(match dice.below(7) {
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
                    let (old_parent, old_name) = files.swap_remove(dice.below(files.len()));
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
                _ => entry(FileOp::StatFs, None),
            });
        }
        (entries, there)
    }

    #[test]
    fn a_few_looks_tell_how_many_ran() {
        for seed in 0..2_000 {
            let mut dice = Dice(seed);
            let length = 1 + dice.below(200);
            let (entries, mut there) = log(&mut dice, length);
            let ran = dice.below(length + 1);
            for entry in &entries[..ran] {
                if let FileOp::Rename { parent, name, .. } = &entry.op {
                    there.remove(&(*parent, name.clone()));
                }
                match name_of(&entry.op) {
                    Some((parent, name, true)) => there.insert((parent, name.clone())),
                    Some((parent, name, false)) => there.remove(&(parent, name.clone())),
                    None => false,
                };
            }
            let (mut search, mut looks) = (Search::new(&entries), 0);
            while let Some(look) = search.next_look() {
                let made = entries[..ran]
                    .iter()
                    .any(|it| it.made.0 == Some(look.parent));
                let is_before = look.parent == InodeNo::ROOT;
                assert!(made || is_before, "seed {seed}: no such directory yet");
                search.tell(look, there.contains(&(look.parent, look.name.clone())));
                looks += 1;
            }
            let named = |entry: &&Entry| name_of(&entry.op).is_some();
            let last = entries[..ran].iter().rposition(|entry| named(&entry));
            assert_eq!(search.ran(), last.map_or(0, |at| at + 1), "seed {seed}");
            assert!(
                looks <= 40,
                "seed {seed}: {looks} looks for {length} entries"
            );
        }
    }
}
