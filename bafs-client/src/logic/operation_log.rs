//! Operations that were answered before their server ran them, in their order, until it has. What
//! waits is bounded by whoever appends.

use std::collections::{BTreeMap, VecDeque};

use bafs_proto::file_op::{ByName, Caller, FileOp};
use bafs_proto::ids::{Epoch, HandleId, InodeNo};
use bytes::Bytes;

/// No session has this number: an entry has none of its numbers.
pub const NO_SESSION: Epoch = Epoch(0);

/// An operation that was answered.
#[derive(Debug, Clone)]
pub struct LogEntry {
    /// On whose behalf.
    pub caller: Caller,
    /// What was asked, in the kernel's numbers.
    pub op: FileOp,
    /// The same in the numbers of a session; those of [`NO_SESSION`] mean nothing.
    pub translated: (Epoch, FileOp),
    /// What a write writes.
    pub data: Bytes,
    /// Numbers of what it makes.
    pub created: (Option<InodeNo>, Option<HandleId>),
    /// Files whose server has not all of their state before it has run.
    pub files: [Option<InodeNo>; 3],
    /// The most space that it can take.
    pub cost: Space,
}

/// Space, promised or free.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Space {
    /// In bytes.
    pub bytes: u64,
    /// In files.
    pub files: u64,
}

/// The operations that have not been settled. Positions count all that ever were appended.
#[derive(Debug, Default)]
pub struct OperationLog {
    entries: VecDeque<LogEntry>,
    acknowledged: u64,
    sent: u64,
    bytes: u64,
    unsent_bytes: u64,
    promised_space: Space,
    /// Names that entries make (`true`) or remove, by the last entry about each and the position
    /// behind it. An entry makes or removes a name that no other has, so that whether it has run
    /// can be seen by the name; but what one makes a later one may rename.
    pending_names: BTreeMap<(InodeNo, ByName), (bool, u64)>,
    /// The position behind the last entry about a file.
    last_positions: BTreeMap<InodeNo, u64>,
}

impl OperationLog {
    /// The position behind the last entry.
    pub fn end_position(&self) -> u64 {
        self.acknowledged + self.entries.len() as u64
    }

    /// Everything before this position has run.
    pub fn acknowledged_position(&self) -> u64 {
        self.acknowledged
    }

    /// Everything before this position is on its way.
    pub fn sent_position(&self) -> u64 {
        self.sent
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether an operation of such a kind waits.
    pub fn has_operation(&self, is_such: impl Fn(&FileOp) -> bool) -> bool {
        self.entries.iter().any(|entry| is_such(&entry.op))
    }

    /// Bytes of data that wait.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Space that the entries can take at most.
    pub fn promised_space(&self) -> Space {
        self.promised_space
    }

    /// What must be settled before the server knows all of a file; `None` if it does.
    pub fn last_position_of(&self, ino: InodeNo) -> Option<u64> {
        self.last_positions.get(&ino).copied()
    }

    /// What an entry does to a name.
    pub fn pending_name(&self, parent: InodeNo, name: &ByName) -> Option<bool> {
        let last = self.pending_names.get(&(parent, name.clone()));
        last.map(|(makes, _)| *makes)
    }

    /// The file that an entry gave a name which nobody else knows yet.
    pub fn pending_rename(&self, parent: InodeNo, name: &ByName) -> Option<InodeNo> {
        let (_, end) = self.pending_names.get(&(parent, name.clone()))?;
        let entry = self.entry(end.checked_sub(1)?)?;
        let FileOp::Rename {
            new_parent,
            new_name,
            ..
        } = &entry.op
        else {
            return None;
        };
        let [_, _, ino] = entry.files;
        ino.filter(|_| (*new_parent, new_name) == (parent, name))
    }

    /// Appends an operation; gives the position behind it.
    pub fn append(&mut self, entry: LogEntry) -> u64 {
        let end = self.end_position() + 1;
        self.bytes += entry.data.len() as u64;
        self.unsent_bytes += entry.data.len() as u64;
        self.promised_space.bytes += entry.cost.bytes;
        self.promised_space.files += entry.cost.files;
        for ino in entry.files.iter().flatten() {
            self.last_positions.insert(*ino, end);
        }
        for (parent, name, makes) in changed_names(&entry.op) {
            self.pending_names
                .insert((parent, name.clone()), (makes, end));
        }
        self.entries.push_back(entry);
        end
    }

    /// The entry at a position, if it is not settled.
    pub fn entry(&self, position: u64) -> Option<&LogEntry> {
        let index = position.checked_sub(self.acknowledged)?;
        self.entries.get(usize::try_from(index).ok()?)
    }

    /// The next entries to send, at most `most`, all of one caller and of not much more than so
    /// many bytes; they count as sent.
    pub fn take_unsent(&mut self, most: usize, bytes_max: usize) -> Vec<LogEntry> {
        let mut taken: Vec<LogEntry> = Vec::new();
        let mut bytes = 0;
        while let Some(entry) = self.entry(self.sent) {
            let length = entry.data.len();
            let is_full = taken.len() >= most || (bytes > 0 && bytes + length > bytes_max);
            if is_full
                || taken
                    .first()
                    .is_some_and(|first| !is_same_caller(first, entry))
            {
                break;
            }
            bytes += length;
            taken.push(entry.clone());
            self.sent += 1;
            self.unsent_bytes -= length as u64;
        }
        taken
    }

    /// Entries that were not sent, and their bytes.
    pub fn unsent(&self) -> (u64, u64) {
        (self.end_position() - self.sent, self.unsent_bytes)
    }

    /// The oldest entry has run.
    pub fn acknowledge(&mut self) -> Option<LogEntry> {
        let entry = self.entries.pop_front()?;
        if self.sent == self.acknowledged {
            self.sent += 1;
            self.unsent_bytes -= entry.data.len() as u64;
        }
        self.acknowledged += 1;
        self.bytes -= entry.data.len() as u64;
        self.promised_space.bytes -= entry.cost.bytes;
        self.promised_space.files -= entry.cost.files;
        for ino in entry.files.iter().flatten() {
            if self
                .last_positions
                .get(ino)
                .is_some_and(|end| *end <= self.acknowledged)
            {
                self.last_positions.remove(ino);
            }
        }
        for (parent, name, _) in changed_names(&entry.op) {
            let key = (parent, name.clone());
            if self
                .pending_names
                .get(&key)
                .is_some_and(|(_, end)| *end <= self.acknowledged)
            {
                self.pending_names.remove(&key);
            }
        }
        Some(entry)
    }

    /// What is not settled must be sent again, to a session that may have other numbers for all.
    pub fn rewind_sent(&mut self) {
        self.sent = self.acknowledged;
        self.unsent_bytes = self.bytes;
        for entry in &mut self.entries {
            entry.translated.0 = NO_SESSION;
        }
    }
}

fn is_same_caller(one: &LogEntry, other: &LogEntry) -> bool {
    (one.caller.uid, one.caller.gid) == (other.caller.uid, other.caller.gid)
}

/// All names that an operation makes (`true`) or removes.
fn changed_names(op: &FileOp) -> impl Iterator<Item = (InodeNo, &ByName, bool)> {
    let moved = match op {
        FileOp::Rename { parent, name, .. } => Some((*parent, name, false)),
        _ => None,
    };
    moved.into_iter().chain(marker_name(op))
}

/// The name that tells whether an operation has run: it makes (`true`) or removes it.
pub fn marker_name(op: &FileOp) -> Option<(InodeNo, &ByName, bool)> {
    match op {
        FileOp::Rename {
            new_parent,
            new_name,
            ..
        } => Some((*new_parent, new_name, true)),
        FileOp::Create { parent, name, .. } | FileOp::MakeDirectory { parent, name, .. } => {
            Some((*parent, name, true))
        }
        FileOp::Unlink { parent, name } | FileOp::RemoveDirectory { parent, name } => {
            Some((*parent, name, false))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(uid: u32, op: FileOp, bytes: usize) -> LogEntry {
        LogEntry {
            caller: Caller {
                uid,
                ..Caller::default()
            },
            translated: (Epoch(1), op.clone()),
            op,
            data: Bytes::from(vec![0; bytes]),
            created: (None, None),
            files: [Some(InodeNo(7)), None, None],
            cost: Space {
                bytes: 10,
                files: 1,
            },
        }
    }

    #[test]
    fn batches_have_one_caller_and_bounded_size() {
        let mut log = OperationLog::default();
        for (uid, bytes) in [(1, 600), (1, 600), (1, 10), (2, 10), (2, 10)] {
            log.append(entry(uid, FileOp::StatFs, bytes));
        }
        let mut sizes = Vec::new();
        loop {
            let batch = log.take_unsent(2, 1000);
            if batch.is_empty() {
                break;
            }
            sizes.push(batch.len());
        }
        assert_eq!(sizes, [1, 2, 2]);
        assert_eq!(
            (
                log.sent_position(),
                log.acknowledged_position(),
                log.bytes()
            ),
            (5, 0, 1230)
        );
        assert_eq!(log.last_position_of(InodeNo(7)), Some(5));
        for _ in 0..3 {
            log.acknowledge();
        }
        log.rewind_sent();
        assert_eq!((log.sent_position(), log.unsent()), (3, (2, 20)));
        let again = log.take_unsent(9, 1000);
        assert!(again.iter().all(|entry| entry.translated.0 == NO_SESSION));
        while log.acknowledge().is_some() {}
        assert_eq!(
            (log.last_position_of(InodeNo(7)), log.promised_space()),
            (None, Space::default())
        );
    }

    #[test]
    fn names_are_remembered_until_their_entries_ran() {
        let (parent, name) = (InodeNo::ROOT, b"a".to_vec());
        let mut log = OperationLog::default();
        log.append(entry(
            1,
            FileOp::Unlink {
                parent,
                name: name.clone(),
            },
            0,
        ));
        assert_eq!(log.pending_name(parent, &name), Some(false));
        log.acknowledge();
        assert_eq!(log.pending_name(parent, &name), None);
    }

    #[test]
    fn renamed_names_are_remembered_until_the_rename_ran() {
        let parent = InodeNo::ROOT;
        let (name, new_name) = (b"a".to_vec(), b"b".to_vec());
        let mut log = OperationLog::default();
        let create = FileOp::Create {
            parent,
            name: name.clone(),
            mode: 0o644,
            flags: 0,
        };
        log.append(entry(1, create, 0));
        let rename = FileOp::Rename {
            parent,
            name: name.clone(),
            new_parent: parent,
            new_name: new_name.clone(),
            flags: 0,
        };
        log.append(entry(1, rename, 0));
        let both = |log: &OperationLog| {
            (
                log.pending_name(parent, &name),
                log.pending_name(parent, &new_name),
            )
        };
        assert_eq!(both(&log), (Some(false), Some(true)));
        log.acknowledge();
        assert_eq!(
            both(&log),
            (Some(false), Some(true)),
            "only its making has run"
        );
        log.acknowledge();
        assert_eq!(both(&log), (None, None));
    }
}
