//! What the kernel can be told in answer to a request, one trait per form; fuser's replies are one
//! way to tell it, the ring's answers the other. Decides nothing.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use bafs_proto::file_op::{Attr, DirectoryEntry, TreeStat};
use bafs_proto::ids::HandleId;
use bafs_proto::limits::NAME_BYTES_MAX;
use fuser::{Errno, FileHandle, FopenFlags, Generation, INodeNo};

use super::convert::{self, absence};

/// Inode numbers are never used again within a session.
const GENERATION: Generation = Generation(0);

/// Block size in which the kernel is told sizes, in bytes.
pub(super) const STAT_BLOCK_BYTES: u32 = 4096;

/// Any request can fail.
pub(super) trait Refuse: Send + 'static {
    fn refuse(self, errno: Errno);
}

pub(super) trait AnswerEntry: Refuse {
    fn entry(self, believe: Duration, attr: &Attr);
    /// The name is not there, and the kernel may believe so.
    fn absent(self, believe: Duration);
}

pub(super) trait AnswerAttr: Refuse {
    fn attr(self, believe: Duration, attr: &Attr);
}

pub(super) trait AnswerEmpty: Refuse {
    fn done(self);
}

pub(super) trait AnswerData: Refuse {
    fn bytes(self, data: &[u8]);
}

pub(super) trait AnswerOpen: Refuse {
    fn handle(self, handle: HandleId, flags: FopenFlags);
}

pub(super) trait AnswerCreate: Refuse {
    fn made(self, believe: Duration, attr: &Attr, handle: HandleId, flags: FopenFlags);
}

pub(super) trait AnswerWrite: Refuse {
    fn count(self, bytes: u32);
}

pub(super) trait AnswerPosition: Refuse {
    fn position(self, at: i64);
}

pub(super) trait AnswerXattr: Refuse {
    fn length(self, bytes: u32);
    fn value(self, data: &[u8]);
}

pub(super) trait AnswerStat: Refuse {
    fn stat(self, stat: TreeStat);
}

pub(super) trait AnswerEntries: Refuse {
    /// Adds an entry; false if it does not fit any more.
    fn list(&mut self, entry: &DirectoryEntry) -> bool;
    fn listed(self);
}

pub(super) trait AnswerEntriesPlus: Refuse {
    /// Adds an entry with attributes, of which the kernel takes only number and type where there
    /// are none; false if it does not fit any more.
    fn list(&mut self, entry: &DirectoryEntry, believe: Duration) -> bool;
    fn listed(self);
}

/// fuser's replies tell an error all in the same way.
macro_rules! refuse {
    ($($reply:ident),*) => {
        $(impl Refuse for fuser::$reply {
            fn refuse(self, errno: Errno) {
                self.error(errno);
            }
        })*
    };
}

refuse!(
    ReplyEntry,
    ReplyAttr,
    ReplyEmpty,
    ReplyData,
    ReplyOpen,
    ReplyCreate,
    ReplyWrite,
    ReplyLseek,
    ReplyXattr,
    ReplyStatfs,
    ReplyDirectory,
    ReplyDirectoryPlus
);

impl AnswerEntry for fuser::ReplyEntry {
    fn entry(self, believe: Duration, attr: &Attr) {
        Self::entry(self, &believe, &convert::attr(attr), GENERATION);
    }

    fn absent(self, believe: Duration) {
        Self::entry(self, &believe, &absence(), GENERATION);
    }
}

impl AnswerAttr for fuser::ReplyAttr {
    fn attr(self, believe: Duration, attr: &Attr) {
        Self::attr(self, &believe, &convert::attr(attr));
    }
}

impl AnswerEmpty for fuser::ReplyEmpty {
    fn done(self) {
        self.ok();
    }
}

impl AnswerData for fuser::ReplyData {
    fn bytes(self, data: &[u8]) {
        self.data(data);
    }
}

impl AnswerOpen for fuser::ReplyOpen {
    fn handle(self, handle: HandleId, flags: FopenFlags) {
        self.opened(FileHandle(handle.0), flags);
    }
}

impl AnswerCreate for fuser::ReplyCreate {
    fn made(self, believe: Duration, attr: &Attr, handle: HandleId, flags: FopenFlags) {
        let (attr, handle) = (convert::attr(attr), FileHandle(handle.0));
        self.created(&believe, &attr, GENERATION, handle, flags);
    }
}

impl AnswerWrite for fuser::ReplyWrite {
    fn count(self, bytes: u32) {
        self.written(bytes);
    }
}

impl AnswerPosition for fuser::ReplyLseek {
    fn position(self, at: i64) {
        self.offset(at);
    }
}

impl AnswerXattr for fuser::ReplyXattr {
    fn length(self, bytes: u32) {
        self.size(bytes);
    }

    fn value(self, data: &[u8]) {
        self.data(data);
    }
}

impl AnswerStat for fuser::ReplyStatfs {
    fn stat(self, stat: TreeStat) {
        let blocks = stat.size_bytes.div_ceil(u64::from(STAT_BLOCK_BYTES));
        let free = stat.free_bytes / u64::from(STAT_BLOCK_BYTES);
        let (files, names) = (stat.size_files, NAME_BYTES_MAX as u32);
        let block = STAT_BLOCK_BYTES;
        self.statfs(
            blocks,
            free,
            free,
            files,
            stat.free_files,
            block,
            names,
            block,
        );
    }
}

impl AnswerEntries for fuser::ReplyDirectory {
    fn list(&mut self, entry: &DirectoryEntry) -> bool {
        let (ino, kind) = (INodeNo(entry.ino.0), convert::kind(entry.mode));
        !self.add(ino, entry.cookie, kind, OsStr::from_bytes(&entry.name))
    }

    fn listed(self) {
        self.ok();
    }
}

impl AnswerEntriesPlus for fuser::ReplyDirectoryPlus {
    fn list(&mut self, entry: &DirectoryEntry, believe: Duration) -> bool {
        let ino = INodeNo(entry.ino.0);
        let (attr, believe) = match &entry.attr {
            Some(attr) => (convert::attr(attr), believe),
            None => (convert::kind_only(ino, entry.mode), Duration::ZERO),
        };
        let name = OsStr::from_bytes(&entry.name);
        !self.add(ino, entry.cookie, name, &believe, &attr, GENERATION)
    }

    fn listed(self) {
        self.ok();
    }
}
