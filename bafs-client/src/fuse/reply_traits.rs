//! What the kernel can be told in answer to a request, one trait per form; fuser's replies are one
//! way to tell it, the ring's answers the other. Decides nothing.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use bafs_proto::file_op::{Attr, DirectoryEntry, TreeStat};
use bafs_proto::ids::HandleId;
use bafs_proto::limits::NAME_BYTES_MAX;
use fuser::{Errno, FileHandle, FopenFlags, Generation, INodeNo};

use super::convert::{self, absent_attr};

/// Inode numbers are never used again within a session.
const GENERATION: Generation = Generation(0);

/// Block size in which the kernel is told sizes, in bytes.
pub(super) const STAT_BLOCK_BYTES: u32 = 4096;

/// Any request can fail.
pub(super) trait ErrorReply: Send + 'static {
    fn send_error(self, errno: Errno);
}

pub(super) trait EntryReply: ErrorReply {
    fn send_entry(self, ttl: Duration, attr: &Attr);
    /// The name is not there, and the kernel may believe so.
    fn send_absent(self, ttl: Duration);
}

pub(super) trait AttrReply: ErrorReply {
    fn send_attr(self, ttl: Duration, attr: &Attr);
}

pub(super) trait EmptyReply: ErrorReply {
    fn send_done(self);
}

pub(super) trait DataReply: ErrorReply {
    fn send_data(self, data: &[u8]);
}

pub(super) trait OpenReply: ErrorReply {
    fn send_handle(self, handle: HandleId, flags: FopenFlags);
}

pub(super) trait CreateReply: ErrorReply {
    fn send_created(self, ttl: Duration, attr: &Attr, handle: HandleId, flags: FopenFlags);
}

pub(super) trait WriteReply: ErrorReply {
    fn send_count(self, bytes: u32);
}

pub(super) trait SeekReply: ErrorReply {
    fn send_position(self, at: i64);
}

pub(super) trait XattrReply: ErrorReply {
    fn send_length(self, bytes: u32);
    fn send_value(self, data: &[u8]);
}

pub(super) trait StatReply: ErrorReply {
    fn send_stat(self, stat: TreeStat);
}

pub(super) trait DirectoryReply: ErrorReply {
    /// Adds an entry; false if it does not fit any more.
    fn add_entry(&mut self, entry: &DirectoryEntry) -> bool;
    fn send_entries(self);
}

pub(super) trait DirectoryPlusReply: ErrorReply {
    /// Adds an entry with attributes, of which the kernel takes only number and type where there
    /// are none; false if it does not fit any more.
    fn add_entry(&mut self, entry: &DirectoryEntry, ttl: Duration) -> bool;
    fn send_entries(self);
}

/// fuser's replies tell an error all in the same way.
macro_rules! impl_error_reply {
    ($($reply:ident),*) => {
        $(impl ErrorReply for fuser::$reply {
            fn send_error(self, errno: Errno) {
                self.error(errno);
            }
        })*
    };
}

impl_error_reply!(
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

impl EntryReply for fuser::ReplyEntry {
    fn send_entry(self, ttl: Duration, attr: &Attr) {
        Self::entry(self, &ttl, &convert::to_file_attr(attr), GENERATION);
    }

    fn send_absent(self, ttl: Duration) {
        Self::entry(self, &ttl, &absent_attr(), GENERATION);
    }
}

impl AttrReply for fuser::ReplyAttr {
    fn send_attr(self, ttl: Duration, attr: &Attr) {
        Self::attr(self, &ttl, &convert::to_file_attr(attr));
    }
}

impl EmptyReply for fuser::ReplyEmpty {
    fn send_done(self) {
        self.ok();
    }
}

impl DataReply for fuser::ReplyData {
    fn send_data(self, data: &[u8]) {
        self.data(data);
    }
}

impl OpenReply for fuser::ReplyOpen {
    fn send_handle(self, handle: HandleId, flags: FopenFlags) {
        self.opened(FileHandle(handle.0), flags);
    }
}

impl CreateReply for fuser::ReplyCreate {
    fn send_created(self, ttl: Duration, attr: &Attr, handle: HandleId, flags: FopenFlags) {
        let (attr, handle) = (convert::to_file_attr(attr), FileHandle(handle.0));
        self.created(&ttl, &attr, GENERATION, handle, flags);
    }
}

impl WriteReply for fuser::ReplyWrite {
    fn send_count(self, bytes: u32) {
        self.written(bytes);
    }
}

impl SeekReply for fuser::ReplyLseek {
    fn send_position(self, at: i64) {
        self.offset(at);
    }
}

impl XattrReply for fuser::ReplyXattr {
    fn send_length(self, bytes: u32) {
        self.size(bytes);
    }

    fn send_value(self, data: &[u8]) {
        self.data(data);
    }
}

impl StatReply for fuser::ReplyStatfs {
    fn send_stat(self, stat: TreeStat) {
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

impl DirectoryReply for fuser::ReplyDirectory {
    fn add_entry(&mut self, entry: &DirectoryEntry) -> bool {
        let (ino, kind) = (INodeNo(entry.ino.0), convert::file_type(entry.mode));
        !self.add(ino, entry.cookie, kind, OsStr::from_bytes(&entry.name))
    }

    fn send_entries(self) {
        self.ok();
    }
}

impl DirectoryPlusReply for fuser::ReplyDirectoryPlus {
    fn add_entry(&mut self, entry: &DirectoryEntry, ttl: Duration) -> bool {
        let ino = INodeNo(entry.ino.0);
        let (attr, believe) = match &entry.attr {
            Some(attr) => (convert::to_file_attr(attr), ttl),
            None => (convert::type_only_attr(ino, entry.mode), Duration::ZERO),
        };
        let name = OsStr::from_bytes(&entry.name);
        !self.add(ino, entry.cookie, name, &believe, &attr, GENERATION)
    }

    fn send_entries(self) {
        self.ok();
    }
}
