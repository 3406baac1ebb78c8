//! The files that an agent refers to, by number.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bafs_proto::file_op::Attr;
use bafs_proto::ids::InodeNo;
use bafs_proto::limits::{GIVEN_FIRST, SPARE_FIRST};

use crate::account::Identity;
use crate::anchor::Anchor;
use crate::descriptors::open_max;
use crate::errno::{self, Outcome};

#[derive(Debug)]
struct Entry {
    identity: Identity,
    /// `None` once the file has no name, nobody has it open, and its space was needed.
    anchor: Option<Arc<Anchor>>,
    references: u64,
    handles: u64,
    last: Option<Attr>,
    /// When the file lost its last name, in the order of [`Inodes::nameless`].
    nameless: Option<u64>,
}

/// Unit of a file's blocks, in bytes (inode(7)).
const BLOCK_BYTES: u64 = 512;

/// Files without names that are kept at most, each by a descriptor; a smaller part of the
/// descriptors that may be open counts, too.
const NAMELESS_MAX: usize = 1_024;
const NAMELESS_PART: usize = 4;

/// References by number.
#[derive(Debug, Default)]
pub(crate) struct Inodes {
    by_number: HashMap<u64, Entry>,
    by_identity: HashMap<Identity, u64>,
    spares: u64,
    /// Numbers of files without names. The agent's kernel may have looked one up just before it
    /// lost its name, and still open it then, so it stays until it is forgotten: or until its space
    /// is needed, for a program that removes a file may use its space at once.
    nameless: BTreeMap<u64, u64>,
    nameless_last: u64,
    /// What burying all of them would free. Kept, as each batch of operations asks for it.
    buriable: Space,
}

/// Space that files take.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Space {
    bytes: u64,
    files: u64,
}

impl Entry {
    /// What burying the file would free: nothing while it has a name, or somebody has it open.
    fn buriable(&self) -> Space {
        match self.last {
            Some(last) if self.nameless.is_some() && self.handles == 0 => Space {
                bytes: last.blocks * BLOCK_BYTES,
                files: 1,
            },
            _ => Space::default(),
        }
    }
}

impl Inodes {
    /// A table that knows the root, for ever.
    pub(crate) fn new(root: Anchor, identity: Identity) -> Self {
        let mut table = Self::default();
        table.insert(InodeNo::ROOT.0, identity, root);
        table
    }

    /// The file of a number.
    pub(crate) fn get(&self, ino: InodeNo) -> Outcome<Arc<Anchor>> {
        self.by_number
            .get(&ino.0)
            .and_then(|entry| entry.anchor.clone())
            .ok_or(errno::STALE)
    }

    /// The file of the host with this identity, if the agent refers to it.
    pub(crate) fn referred(&self, identity: Identity) -> Option<Arc<Anchor>> {
        let number = self.by_identity.get(&identity)?;
        self.by_number.get(number)?.anchor.clone()
    }

    /// Counts one more reference to a file if the agent refers to it already, and gives its number.
    pub(crate) fn refer_again(&mut self, identity: Identity) -> Option<InodeNo> {
        let number = *self.by_identity.get(&identity)?;
        self.by_number.get_mut(&number)?.references += 1;
        Some(InodeNo(number))
    }

    /// Counts one more reference to a file, and gives its number. The second value is an anchor
    /// that was not needed: drop it outside of the lock.
    pub(crate) fn refer(
        &mut self,
        identity: Identity,
        anchor: Anchor,
    ) -> (InodeNo, Option<Anchor>) {
        if let Some(ino) = self.refer_again(identity) {
            return (ino, Some(anchor));
        }
        let mut number = identity.1;
        if number <= InodeNo::ROOT.0
            || number >= SPARE_FIRST
            || self.by_number.contains_key(&number)
        {
            number = SPARE_FIRST + self.spares;
            self.spares += 1;
        }
        self.insert(number, identity, anchor);
        (InodeNo(number), None)
    }

    /// Whether an agent may give a file this number.
    pub(crate) fn is_givable(&self, wished: InodeNo) -> bool {
        (GIVEN_FIRST..SPARE_FIRST).contains(&wished.0) && !self.by_number.contains_key(&wished.0)
    }

    /// Gives a file that was just made another number, which must be free and in the agents' range.
    pub(crate) fn renumber(&mut self, ino: InodeNo, wished: InodeNo) -> Outcome<()> {
        if ino == InodeNo::ROOT || !self.is_givable(wished) {
            return Err(errno::INVAL);
        }
        let entry = self.by_number.remove(&ino.0).ok_or(errno::STALE)?;
        self.by_identity.insert(entry.identity, wished.0);
        self.by_number.insert(wished.0, entry);
        Ok(())
    }

    /// The number of a file that is known, else the one that it would probably get.
    pub(crate) fn number(&self, identity: Identity) -> InodeNo {
        InodeNo(
            self.by_identity
                .get(&identity)
                .copied()
                .unwrap_or(identity.1),
        )
    }

    /// Drops references; what is returned is to be dropped outside of the lock.
    pub(crate) fn forget(&mut self, ino: InodeNo, count: u64) -> Option<Arc<Anchor>> {
        let entry = self.by_number.get_mut(&ino.0)?;
        entry.references = entry.references.saturating_sub(count);
        if entry.references > 0 || ino == InodeNo::ROOT {
            return None;
        }
        let entry = self.by_number.remove(&ino.0)?;
        self.count(entry.buriable(), Space::default());
        if self.by_identity.get(&entry.identity) == Some(&ino.0) {
            self.by_identity.remove(&entry.identity);
        }
        if let Some(since) = entry.nameless {
            self.nameless.remove(&since);
        }
        entry.anchor
    }

    /// Takes note that a handle of the file was opened.
    pub(crate) fn handle_opened(&mut self, ino: InodeNo) {
        self.change(ino.0, |entry| entry.handles += 1);
    }

    /// Takes note that a handle was closed.
    pub(crate) fn handle_closed(&mut self, ino: InodeNo) {
        self.change(ino.0, |entry| {
            entry.handles = entry.handles.saturating_sub(1)
        });
    }

    /// The file lost its last name, or nobody has it open any more, and `found` still shows it:
    /// keeps it for whoever may open it yet, and remembers its last attributes. What is returned is
    /// to be dropped outside of the lock.
    pub(crate) fn unname(
        &mut self,
        identity: Identity,
        last: Attr,
        found: &Arc<OwnedFd>,
    ) -> Option<Arc<Anchor>> {
        let number = *self.by_identity.get(&identity)?;
        let next = self.nameless_last + 1;
        let since = self.change(number, |entry| {
            if let Some(anchor) = &entry.anchor {
                anchor.keep(found);
            }
            entry.last = Some(Attr {
                ino: InodeNo(number),
                ..last
            });
            *entry.nameless.get_or_insert(next)
        })?;
        if since == next {
            self.nameless_last = next;
            self.nameless.insert(next, number);
        }
        if self.nameless.len() <= NAMELESS_MAX.min(open_max() / NAMELESS_PART) {
            return None;
        }
        let oldest = self.nameless.values().copied();
        let oldest = oldest.take(NAMELESS_MAX).find(|it| self.is_unused(*it))?;
        self.bury(oldest)
    }

    /// Lets all files go that have no names and that nobody has open: their space is needed. What
    /// is returned is to be dropped outside of the lock.
    pub(crate) fn bury_all(&mut self) -> Vec<Arc<Anchor>> {
        let unused = self.nameless.values().copied();
        let unused: Vec<_> = unused.filter(|it| self.is_unused(*it)).collect();
        let gone = unused.into_iter().filter_map(|it| self.bury(it));
        gone.collect()
    }

    /// Bytes and files that [`Self::bury_all`] would free, about.
    pub(crate) fn nameless(&self) -> (u64, u64) {
        (self.buriable.bytes, self.buriable.files)
    }

    /// Changes an entry, and counts what that does to the space that may be had.
    fn change<T>(&mut self, number: u64, change: impl FnOnce(&mut Entry) -> T) -> Option<T> {
        let entry = self.by_number.get_mut(&number)?;
        let before = entry.buriable();
        let changed = change(entry);
        let after = entry.buriable();
        self.count(before, after);
        Some(changed)
    }

    fn count(&mut self, before: Space, after: Space) {
        let Space { bytes, files } = &mut self.buriable;
        *bytes = *bytes + after.bytes - before.bytes;
        *files = *files + after.files - before.files;
    }

    fn is_unused(&self, number: u64) -> bool {
        self.by_number
            .get(&number)
            .is_some_and(|entry| entry.handles == 0)
    }

    fn bury(&mut self, number: u64) -> Option<Arc<Anchor>> {
        let (since, identity, anchor) = self.change(number, |entry| {
            (entry.nameless.take(), entry.identity, entry.anchor.take())
        })?;
        if let Some(since) = since {
            self.nameless.remove(&since);
        }
        // The host may give the file's own number to a new file now.
        self.by_identity.remove(&identity);
        anchor
    }

    /// The last attributes of a file that is gone.
    pub(crate) fn last(&self, ino: InodeNo) -> Option<Attr> {
        self.by_number.get(&ino.0).and_then(|entry| entry.last)
    }

    fn insert(&mut self, number: u64, identity: Identity, anchor: Anchor) {
        self.by_identity.insert(identity, number);
        if number != InodeNo::ROOT.0 {
            anchor.refer();
        }
        let anchor = Some(Arc::new(anchor));
        self.by_number.insert(
            number,
            Entry {
                identity,
                anchor,
                references: 1,
                handles: 0,
                last: None,
                nameless: None,
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use rustix::fs::fstat;

    use super::*;
    use crate::anchor::identity;
    use crate::attributes::attr;
    use crate::tree::Tree;

    /// [`Inodes::nameless`], found by a look at each.
    fn looked_at(table: &Inodes) -> (u64, u64) {
        let numbers = table.nameless.values();
        let unused = numbers.filter(|number| table.is_unused(**number));
        let blocks = unused.filter_map(|number| table.by_number.get(number)?.last);
        blocks.fold((0, 0), |(bytes, files), last| {
            (bytes + last.blocks * BLOCK_BYTES, files + 1)
        })
    }

    #[test]
    fn what_files_without_names_hold_is_counted_right_whatever_happens() {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::open(directory.path(), None).unwrap();
        let mut table = Inodes::new(Anchor::root(&tree), tree.identity());
        let files: Vec<OwnedFd> = (0..16)
            .map(|number| {
                let path = directory.path().join(number.to_string());
                fs::write(&path, "content").unwrap();
                File::open(path).unwrap().into()
            })
            .collect();
        let mut dice = 1_u64;
        let mut roll = |sides: u64| {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005);
            dice = dice.wrapping_add(1);
            (dice >> 33) % sides
        };
        let mut most = 0;
        for step in 0..10_000 {
            let fd = &files[roll(16) as usize];
            let stat = fstat(fd).unwrap();
            let identity = identity(&stat);
            let ino = table.number(identity);
            match roll(64) {
                0 => drop(table.bury_all()),
                1..16 => {
                    let (anchor, _) = Anchor::new(&tree, fd.try_clone().unwrap()).unwrap();
                    table.refer(identity, anchor);
                }
                16..32 => {
                    let blocks = roll(100);
                    let last = Attr {
                        blocks,
                        ..attr(ino, &stat)
                    };
                    table.unname(identity, last, &Arc::new(fd.try_clone().unwrap()));
                }
                32..44 => table.handle_opened(ino),
                44..54 => table.handle_closed(ino),
                _ => drop(table.forget(ino, 1)),
            }
            let (bytes, files) = table.nameless();
            assert_eq!((bytes, files), looked_at(&table), "step {step}");
            most = most.max(files);
        }
        assert!(most > 1, "several files had no names at once");
    }
}
