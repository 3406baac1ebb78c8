//! The files that an agent refers to, by number.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bafs_proto::file_op::Attr;
use bafs_proto::ids::InodeNo;
use bafs_proto::limits::{AGENT_NUMBER_FIRST, SUBSTITUTE_NUMBER_FIRST};

use crate::account::HostFileId;
use crate::descriptor_limits::path_descriptors_max;
use crate::errno::{self, Outcome};
use crate::file_reference::FileReference;

#[derive(Debug)]
struct InodeEntry {
    host_file_id: HostFileId,
    /// `None` once the file has no name, nobody has it open, and its space was needed.
    file_reference: Option<Arc<FileReference>>,
    references: u64,
    handles: u64,
    last_attr: Option<Attr>,
    /// When the file lost its last name, in the order of `Inodes::nameless`.
    unlinked_order: Option<u64>,
}

/// Unit of a file's blocks, in bytes (inode(7)).
const BLOCK_BYTES: u64 = 512;

/// Files without names that are kept at most, each by a descriptor; a smaller part of the
/// descriptors that may be open counts, too.
const UNLINKED_MAX: usize = 1_024;
const UNLINKED_DIVISOR: usize = 4;

/// References by number.
#[derive(Debug, Default)]
pub(crate) struct Inodes {
    by_number: HashMap<u64, InodeEntry>,
    by_host_file_id: HashMap<HostFileId, u64>,
    substitutes: u64,
    /// Numbers of files without names. The agent's kernel may have looked one up just before it
    /// lost its name, and still open it then, so it stays until it is forgotten: or until its space
    /// is needed, for a program that removes a file may use its space at once.
    unlinked: BTreeMap<u64, u64>,
    unlinked_last: u64,
    /// What burying all of them would free. Kept, as each batch of operations asks for it.
    reclaimable: SpaceUse,
}

/// Space that files take.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct SpaceUse {
    bytes: u64,
    files: u64,
}

impl InodeEntry {
    /// What burying the file would free: nothing while it has a name, or somebody has it open.
    fn reclaimable(&self) -> SpaceUse {
        match self.last_attr {
            Some(last) if self.unlinked_order.is_some() && self.handles == 0 => SpaceUse {
                bytes: last.blocks * BLOCK_BYTES,
                files: 1,
            },
            _ => SpaceUse::default(),
        }
    }
}

impl Inodes {
    /// A table that knows the root, for ever.
    pub(crate) fn new(root: FileReference, identity: HostFileId) -> Self {
        let mut table = Self::default();
        table.insert(InodeNo::ROOT.0, identity, root);
        table
    }

    /// The file of a number.
    pub(crate) fn get(&self, ino: InodeNo) -> Outcome<Arc<FileReference>> {
        self.by_number
            .get(&ino.0)
            .and_then(|entry| entry.file_reference.clone())
            .ok_or(errno::STALE)
    }

    /// The file of the host with this identity, if the agent refers to it.
    pub(crate) fn find_by_host_file_id(&self, identity: HostFileId) -> Option<Arc<FileReference>> {
        let number = self.by_host_file_id.get(&identity)?;
        self.by_number.get(number)?.file_reference.clone()
    }

    /// Counts one more reference to a file if the agent refers to it already, and gives its number.
    pub(crate) fn add_reference_if_known(&mut self, identity: HostFileId) -> Option<InodeNo> {
        let number = *self.by_host_file_id.get(&identity)?;
        self.by_number.get_mut(&number)?.references += 1;
        Some(InodeNo(number))
    }

    /// Counts one more reference to a file, and gives its number. The second value is an anchor
    /// that was not needed: drop it outside of the lock.
    pub(crate) fn add_reference(
        &mut self,
        identity: HostFileId,
        file_reference: FileReference,
    ) -> (InodeNo, Option<FileReference>) {
        if let Some(ino) = self.add_reference_if_known(identity) {
            return (ino, Some(file_reference));
        }
        let mut number = identity.1;
        if number <= InodeNo::ROOT.0
            || number >= SUBSTITUTE_NUMBER_FIRST
            || self.by_number.contains_key(&number)
        {
            number = SUBSTITUTE_NUMBER_FIRST + self.substitutes;
            self.substitutes += 1;
        }
        self.insert(number, identity, file_reference);
        (InodeNo(number), None)
    }

    /// Whether an agent may give a file this number.
    pub(crate) fn is_assignable(&self, wished: InodeNo) -> bool {
        (AGENT_NUMBER_FIRST..SUBSTITUTE_NUMBER_FIRST).contains(&wished.0)
            && !self.by_number.contains_key(&wished.0)
    }

    /// Gives a file that was just made another number, which must be free and in the agents' range.
    pub(crate) fn renumber(&mut self, ino: InodeNo, wished: InodeNo) -> Outcome<()> {
        if ino == InodeNo::ROOT || !self.is_assignable(wished) {
            return Err(errno::INVAL);
        }
        let entry = self.by_number.remove(&ino.0).ok_or(errno::STALE)?;
        self.by_host_file_id.insert(entry.host_file_id, wished.0);
        self.by_number.insert(wished.0, entry);
        Ok(())
    }

    /// The number of a file that is known, else the one that it would probably get.
    pub(crate) fn number_of(&self, identity: HostFileId) -> InodeNo {
        InodeNo(
            self.by_host_file_id
                .get(&identity)
                .copied()
                .unwrap_or(identity.1),
        )
    }

    /// Drops references; what is returned is to be dropped outside of the lock.
    pub(crate) fn forget(&mut self, ino: InodeNo, count: u64) -> Option<Arc<FileReference>> {
        let entry = self.by_number.get_mut(&ino.0)?;
        entry.references = entry.references.saturating_sub(count);
        if entry.references > 0 || ino == InodeNo::ROOT {
            return None;
        }
        let entry = self.by_number.remove(&ino.0)?;
        self.update_reclaimable(entry.reclaimable(), SpaceUse::default());
        if self.by_host_file_id.get(&entry.host_file_id) == Some(&ino.0) {
            self.by_host_file_id.remove(&entry.host_file_id);
        }
        if let Some(since) = entry.unlinked_order {
            self.unlinked.remove(&since);
        }
        entry.file_reference
    }

    /// Takes note that a handle of the file was opened.
    pub(crate) fn note_handle_opened(&mut self, ino: InodeNo) {
        self.update_entry(ino.0, |entry| entry.handles += 1);
    }

    /// Takes note that a handle was closed.
    pub(crate) fn note_handle_closed(&mut self, ino: InodeNo) {
        self.update_entry(ino.0, |entry| {
            entry.handles = entry.handles.saturating_sub(1)
        });
    }

    /// The file lost its last name, or nobody has it open any more, and `found` still shows it:
    /// keeps it for whoever may open it yet, and remembers its last attributes. What is returned is
    /// to be dropped outside of the lock.
    pub(crate) fn mark_unlinked(
        &mut self,
        identity: HostFileId,
        last: Attr,
        found: &Arc<OwnedFd>,
    ) -> Option<Arc<FileReference>> {
        let number = *self.by_host_file_id.get(&identity)?;
        let next = self.unlinked_last + 1;
        let since = self.update_entry(number, |entry| {
            if let Some(file_reference) = &entry.file_reference {
                file_reference.pin_descriptor(found);
            }
            entry.last_attr = Some(Attr {
                ino: InodeNo(number),
                ..last
            });
            *entry.unlinked_order.get_or_insert(next)
        })?;
        if since == next {
            self.unlinked_last = next;
            self.unlinked.insert(next, number);
        }
        if self.unlinked.len() <= UNLINKED_MAX.min(path_descriptors_max() / UNLINKED_DIVISOR) {
            return None;
        }
        let oldest = self.unlinked.values().copied();
        let oldest = oldest.take(UNLINKED_MAX).find(|it| self.is_unused(*it))?;
        self.release_entry(oldest)
    }

    /// Lets all files go that have no names and that nobody has open: their space is needed. What
    /// is returned is to be dropped outside of the lock.
    pub(crate) fn release_unlinked(&mut self) -> Vec<Arc<FileReference>> {
        let unused = self.unlinked.values().copied();
        let unused: Vec<_> = unused.filter(|it| self.is_unused(*it)).collect();
        let gone = unused.into_iter().filter_map(|it| self.release_entry(it));
        gone.collect()
    }

    /// Bytes and files that [`Self::release_unlinked`] would free, about.
    pub(crate) fn reclaimable_use(&self) -> (u64, u64) {
        (self.reclaimable.bytes, self.reclaimable.files)
    }

    /// Changes an entry, and counts what that does to the space that may be had.
    fn update_entry<T>(
        &mut self,
        number: u64,
        change: impl FnOnce(&mut InodeEntry) -> T,
    ) -> Option<T> {
        let entry = self.by_number.get_mut(&number)?;
        let before = entry.reclaimable();
        let changed = change(entry);
        let after = entry.reclaimable();
        self.update_reclaimable(before, after);
        Some(changed)
    }

    fn update_reclaimable(&mut self, before: SpaceUse, after: SpaceUse) {
        let SpaceUse { bytes, files } = &mut self.reclaimable;
        *bytes = *bytes + after.bytes - before.bytes;
        *files = *files + after.files - before.files;
    }

    fn is_unused(&self, number: u64) -> bool {
        self.by_number
            .get(&number)
            .is_some_and(|entry| entry.handles == 0)
    }

    fn release_entry(&mut self, number: u64) -> Option<Arc<FileReference>> {
        let (since, identity, file_reference) = self.update_entry(number, |entry| {
            (
                entry.unlinked_order.take(),
                entry.host_file_id,
                entry.file_reference.take(),
            )
        })?;
        if let Some(since) = since {
            self.unlinked.remove(&since);
        }
        // The host may give the file's own number to a new file now.
        self.by_host_file_id.remove(&identity);
        file_reference
    }

    /// The last attributes of a file that is gone.
    pub(crate) fn last_attr(&self, ino: InodeNo) -> Option<Attr> {
        self.by_number.get(&ino.0).and_then(|entry| entry.last_attr)
    }

    fn insert(&mut self, number: u64, identity: HostFileId, file_reference: FileReference) {
        self.by_host_file_id.insert(identity, number);
        if number != InodeNo::ROOT.0 {
            file_reference.allow_closing();
        }
        let file_reference = Some(Arc::new(file_reference));
        self.by_number.insert(
            number,
            InodeEntry {
                host_file_id: identity,
                file_reference,
                references: 1,
                handles: 0,
                last_attr: None,
                unlinked_order: None,
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use rustix::fs::fstat;

    use super::*;
    use crate::host_file::{host_file_id, to_attr};
    use crate::tree::Tree;

    /// [`Inodes::nameless`], found by a look at each.
    fn count_reclaimable(table: &Inodes) -> (u64, u64) {
        let numbers = table.unlinked.values();
        let unused = numbers.filter(|number| table.is_unused(**number));
        let blocks = unused.filter_map(|number| table.by_number.get(number)?.last_attr);
        blocks.fold((0, 0), |(bytes, files), last| {
            (bytes + last.blocks * BLOCK_BYTES, files + 1)
        })
    }

    #[test]
    fn unnamed_files_are_always_counted_correctly() {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::open(directory.path(), None).unwrap();
        let mut table = Inodes::new(FileReference::root(&tree), tree.root_id());
        let files: Vec<OwnedFd> = (0..16)
            .map(|number| {
                let path = directory.path().join(number.to_string());
                fs::write(&path, "content").unwrap();
                File::open(path).unwrap().into()
            })
            .collect();
        let mut rng = 1_u64;
        let mut roll = |sides: u64| {
            rng = rng.wrapping_mul(6_364_136_223_846_793_005);
            rng = rng.wrapping_add(1);
            (rng >> 33) % sides
        };
        let mut most = 0;
        for step in 0..10_000 {
            let fd = &files[roll(16) as usize];
            let stat = fstat(fd).unwrap();
            let identity = host_file_id(&stat);
            let ino = table.number_of(identity);
            match roll(64) {
                0 => drop(table.release_unlinked()),
                1..16 => {
                    let (file_reference, _) =
                        FileReference::new(&tree, fd.try_clone().unwrap()).unwrap();
                    table.add_reference(identity, file_reference);
                }
                16..32 => {
                    let blocks = roll(100);
                    let last = Attr {
                        blocks,
                        ..to_attr(ino, &stat)
                    };
                    table.mark_unlinked(identity, last, &Arc::new(fd.try_clone().unwrap()));
                }
                32..44 => table.note_handle_opened(ino),
                44..54 => table.note_handle_closed(ino),
                _ => drop(table.forget(ino, 1)),
            }
            let (bytes, files) = table.reclaimable_use();
            assert_eq!((bytes, files), count_reclaimable(&table), "step {step}");
            most = most.max(files);
        }
        assert!(most > 1, "several files had no names at once");
    }
}
