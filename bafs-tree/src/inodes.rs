//! The files that an agent refers to, by number. Makes no system call.

use std::collections::HashMap;
use std::sync::Arc;

use bafs_proto::file_op::Attr;
use bafs_proto::ids::InodeNo;

use crate::account::Identity;
use crate::anchor::Anchor;
use crate::errno::{self, Outcome};

/// Numbers from here on are given to files whose own number is taken. No file system in use
/// reaches them by itself.
const SPARE_FIRST: u64 = 1 << 62;

/// Numbers from here to [`SPARE_FIRST`] are given by agents.
const GIVEN_FIRST: u64 = 1 << 61;

#[derive(Debug)]
struct Entry {
    identity: Identity,
    /// `None` once the file has no name and nobody has it open: its space must be given back at
    /// once, although the agent may still remember the number for a while.
    anchor: Option<Arc<Anchor>>,
    references: u64,
    handles: u64,
    last: Option<Attr>,
}

/// References by number.
#[derive(Debug, Default)]
pub(crate) struct Inodes {
    by_number: HashMap<u64, Entry>,
    by_identity: HashMap<Identity, u64>,
    spares: u64,
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

    /// Counts one more reference to a file, and gives its number. The second value is an anchor
    /// that was not needed: drop it outside of the lock.
    pub(crate) fn refer(
        &mut self,
        identity: Identity,
        anchor: Anchor,
    ) -> (InodeNo, Option<Anchor>) {
        if let Some(number) = self.by_identity.get(&identity)
            && let Some(entry) = self.by_number.get_mut(number)
        {
            entry.references += 1;
            return (InodeNo(*number), Some(anchor));
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

    /// The file with this identity, if somebody has it open.
    pub(crate) fn open(&self, identity: Identity) -> Option<&Anchor> {
        let entry = self.by_number.get(self.by_identity.get(&identity)?)?;
        entry.anchor.as_deref().filter(|_| entry.handles > 0)
    }

    /// The file lost its last name: if nobody has it open, lets it go and remembers its last
    /// attributes. What is returned is to be dropped outside of the lock.
    pub(crate) fn bury(&mut self, identity: Identity, last: Attr) -> Option<Arc<Anchor>> {
        let number = *self.by_identity.get(&identity)?;
        let entry = self.by_number.get_mut(&number)?;
        if entry.handles > 0 {
            return None;
        }
        entry.last = Some(Attr {
            ino: InodeNo(number),
            ..last
        });
        // The host may give the file's own number to a new file now.
        self.by_identity.remove(&identity);
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
            },
        );
    }
}
