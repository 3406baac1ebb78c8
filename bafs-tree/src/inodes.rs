//! The files that an agent refers to, by number.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bafs_proto::file_op::Attr;
use bafs_proto::ids::InodeNo;

use crate::account::Identity;
use crate::anchor::Anchor;
use crate::descriptors::open_max;
use crate::errno::{self, Outcome};

/// Numbers from here on are given to files whose own number is taken. No file system in use
/// reaches them by itself.
const SPARE_FIRST: u64 = 1 << 62;

/// Numbers from here to [`SPARE_FIRST`] are given by agents.
const GIVEN_FIRST: u64 = 1 << 61;

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
        if let Some(entry) = self.by_number.get_mut(&ino.0) {
            entry.handles += 1;
        }
    }

    /// Takes note that a handle was closed.
    pub(crate) fn handle_closed(&mut self, ino: InodeNo) {
        if let Some(entry) = self.by_number.get_mut(&ino.0) {
            entry.handles = entry.handles.saturating_sub(1);
        }
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
        let entry = self.by_number.get_mut(&number)?;
        if let Some(anchor) = &entry.anchor {
            anchor.keep(found);
        }
        entry.last = Some(Attr {
            ino: InodeNo(number),
            ..last
        });
        if entry.nameless.is_none() {
            self.nameless_last += 1;
            entry.nameless = Some(self.nameless_last);
            self.nameless.insert(self.nameless_last, number);
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
        let numbers = self.nameless.values();
        let unused = numbers.filter(|it| self.is_unused(**it));
        let blocks = unused.filter_map(|it| self.by_number.get(it)?.last.map(|last| last.blocks));
        blocks.fold((0, 0), |(bytes, files), blocks| {
            (bytes + blocks * BLOCK_BYTES, files + 1)
        })
    }

    fn is_unused(&self, number: u64) -> bool {
        self.by_number
            .get(&number)
            .is_some_and(|entry| entry.handles == 0)
    }

    fn bury(&mut self, number: u64) -> Option<Arc<Anchor>> {
        let entry = self.by_number.get_mut(&number)?;
        if let Some(since) = entry.nameless.take() {
            self.nameless.remove(&since);
        }
        // The host may give the file's own number to a new file now.
        self.by_identity.remove(&entry.identity);
        entry.anchor.take()
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
