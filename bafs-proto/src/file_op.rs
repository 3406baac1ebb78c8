//! File operations on a tree, in the terms of POSIX and of the FUSE kernel interface.
//!
//! One vocabulary for both ends: the agent translates kernel requests into [`FileOp`], and the
//! tree that executes them runs either in the agent (volume on this node) or behind a server.
//! This file executes nothing.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{HandleId, InodeNo};

/// A file name: any bytes but `/` and zero, as the kernel passes it.
pub type ByName = Vec<u8>;

/// A Linux errno, as a system call would set it.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Errno(pub i32);

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "errno {} ({})",
            self.0,
            std::io::Error::from_raw_os_error(self.0)
        )
    }
}

/// The process for which an operation runs. New files belong to its user and group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caller {
    /// User id of the calling process.
    pub uid: u32,
    /// Group id of the calling process.
    pub gid: u32,
    /// Process id of the caller, 0 when the kernel acts by itself.
    pub pid: u32,
}

/// A time stamp of a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileTime {
    /// Seconds since the Unix epoch; negative before it.
    pub seconds: i64,
    /// Nanoseconds, 0 to 999,999,999.
    pub nanoseconds: u32,
}

/// Attributes of a file, as `stat(2)` shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attr {
    /// The file.
    pub ino: InodeNo,
    /// Size in bytes.
    pub size: u64,
    /// Allocated space in units of 512 bytes.
    pub blocks: u64,
    /// Last access.
    pub atime: FileTime,
    /// Last change of the content.
    pub mtime: FileTime,
    /// Last change of content or attributes.
    pub ctime: FileTime,
    /// Type and permission bits (`st_mode`).
    pub mode: u32,
    /// Number of hard links.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device file.
    pub rdev: u32,
    /// Preferred I/O size in bytes.
    pub block_size: u32,
    /// When the file was made, in nanoseconds since the Unix epoch: with its number it tells the
    /// file from a later one. 0 where it is not told; answers that name a file tell it.
    pub btime_ns: u64,
}

/// Bits of [`Attr::mode`] that tell the type of a file, and the types that are told apart
/// (inode(7)).
pub const S_IFMT: u32 = 0o170_000;
/// A directory.
pub const S_IFDIR: u32 = 0o040_000;
/// A regular file.
pub const S_IFREG: u32 = 0o100_000;
/// A symbolic link.
pub const S_IFLNK: u32 = 0o120_000;

impl Attr {
    /// Whether these are attributes of a directory.
    pub fn is_directory(&self) -> bool {
        self.mode & S_IFMT == S_IFDIR
    }

    /// Whether these are attributes of a regular file.
    pub fn is_regular(&self) -> bool {
        self.mode & S_IFMT == S_IFREG
    }

    /// Whether these are attributes of a symbolic link.
    pub fn is_symlink(&self) -> bool {
        self.mode & S_IFMT == S_IFLNK
    }
}

/// A time to set with [`FileOp::SetAttr`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SetTime {
    /// The executing side's present time.
    Now,
    /// This time.
    At(FileTime),
}

/// What [`FileOp::SetAttr`] changes; `None` leaves a field as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttrChange {
    /// New permission bits.
    pub mode: Option<u32>,
    /// New owner.
    pub uid: Option<u32>,
    /// New group.
    pub gid: Option<u32>,
    /// New size in bytes: truncates or extends.
    pub size: Option<u64>,
    /// New access time.
    pub atime: Option<SetTime>,
    /// New modification time.
    pub mtime: Option<SetTime>,
}

/// The part of a request body that one operation of a batch uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BodyRange {
    /// First byte.
    pub start: u32,
    /// Number of bytes.
    pub length: u32,
}

/// One file operation on a tree, with inode numbers and handles of a session. Each corresponds to a
/// request of the FUSE kernel interface (fuse(4)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // fields carry the names of the system call's arguments
pub enum FileOp {
    /// Finds a name in a directory. Each success counts one reference until [`FileOp::Forget`].
    Lookup { parent: InodeNo, name: ByName },
    /// Drops references that lookups and creations gave.
    Forget { ino: InodeNo, count: u64 },
    /// Reads attributes, through the handle if there is one.
    GetAttr {
        ino: InodeNo,
        handle: Option<HandleId>,
    },
    /// Changes attributes, through the handle if there is one.
    SetAttr {
        ino: InodeNo,
        handle: Option<HandleId>,
        change: AttrChange,
    },
    /// Reads a symbolic link.
    ReadLink { ino: InodeNo },
    /// Makes a regular file, FIFO, socket or device file. The umask is already applied.
    MakeNode {
        parent: InodeNo,
        name: ByName,
        mode: u32,
        rdev: u32,
    },
    /// Makes a directory. The umask is already applied.
    MakeDirectory {
        parent: InodeNo,
        name: ByName,
        mode: u32,
    },
    /// Makes a symbolic link.
    MakeSymlink {
        parent: InodeNo,
        name: ByName,
        target: Vec<u8>,
    },
    /// Makes a hard link to `ino`.
    MakeLink {
        ino: InodeNo,
        parent: InodeNo,
        name: ByName,
    },
    /// Removes a name that is no directory.
    Unlink { parent: InodeNo, name: ByName },
    /// Removes an empty directory.
    RemoveDirectory { parent: InodeNo, name: ByName },
    /// Renames, with the flags of `renameat2(2)`.
    Rename {
        parent: InodeNo,
        name: ByName,
        new_parent: InodeNo,
        new_name: ByName,
        flags: u32,
    },
    /// Opens a file with the flags of `open(2)`, without `O_CREAT`, `O_EXCL`, `O_NOFOLLOW`.
    Open { ino: InodeNo, flags: i32 },
    /// Creates and opens a file. The umask is already applied.
    Create {
        parent: InodeNo,
        name: ByName,
        mode: u32,
        flags: i32,
    },
    /// Reads up to `length` bytes; the data are the body of the reply.
    Read {
        handle: HandleId,
        offset: u64,
        length: u32,
    },
    /// Reads a whole regular file of at most `bytes_max` bytes without a handle; the data are the
    /// body of the reply. A longer file fails with `EFBIG`.
    ReadFile { ino: InodeNo, bytes_max: u32 },
    /// Writes the given part of the body. With `append` the offset is the end of the file at that
    /// moment, whatever `offset` says.
    Write {
        handle: HandleId,
        offset: u64,
        data: BodyRange,
        append: bool,
    },
    /// Makes a file durable.
    Fsync { handle: HandleId, data_only: bool },
    /// Closes a file.
    Release { handle: HandleId },
    /// Opens a directory stream.
    OpenDirectory { ino: InodeNo },
    /// Reads entries after `cookie` (0 = from the start), at most about `bytes_max` encoded.
    /// With `plus` each entry but `.` and `..` is looked up and counts one reference.
    ReadDirectory {
        handle: HandleId,
        cookie: u64,
        bytes_max: u32,
        plus: bool,
    },
    /// Reads entries after `cookie` without a stream, each looked up as by
    /// [`FileOp::ReadDirectory`]. The last one of the directory has [`END_COOKIE`].
    ListDirectory {
        ino: InodeNo,
        cookie: u64,
        bytes_max: u32,
    },
    /// Closes a directory stream.
    ReleaseDirectory { handle: HandleId },
    /// Makes a directory durable.
    FsyncDirectory { ino: InodeNo },
    /// Reads the volume's limits and use.
    StatFs,
    /// Sets an extended attribute, with the flags of `setxattr(2)`.
    SetXattr {
        ino: InodeNo,
        name: ByName,
        value: Vec<u8>,
        flags: i32,
    },
    /// Reads an extended attribute.
    GetXattr { ino: InodeNo, name: ByName },
    /// Lists extended attributes, each name followed by a zero byte.
    ListXattr { ino: InodeNo },
    /// Removes an extended attribute.
    RemoveXattr { ino: InodeNo, name: ByName },
    /// `fallocate(2)`.
    Allocate {
        handle: HandleId,
        mode: i32,
        offset: u64,
        length: u64,
    },
    /// `lseek(2)` with `SEEK_DATA` or `SEEK_HOLE`.
    Seek {
        handle: HandleId,
        offset: i64,
        whence: i32,
    },
    /// `copy_file_range(2)`.
    CopyRange {
        source: HandleId,
        source_offset: u64,
        target: HandleId,
        target_offset: u64,
        length: u64,
    },
}

/// The cookie of the last entry that [`FileOp::ListDirectory`] gives of a directory.
pub const END_COOKIE: u64 = u64::MAX;

/// One entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectoryEntry {
    /// Name in the directory.
    pub name: ByName,
    /// File number.
    pub ino: InodeNo,
    /// Type bits of `st_mode`.
    pub mode: u32,
    /// Where to go on after this entry.
    pub cookie: u64,
    /// Attributes, when they were asked for and the entry still exists.
    pub attr: Option<Attr>,
}

/// A volume's limits and use, as `statfs(2)` shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeStat {
    /// Size in bytes.
    pub size_bytes: u64,
    /// Free bytes.
    pub free_bytes: u64,
    /// Size in files.
    pub size_files: u64,
    /// Free files.
    pub free_files: u64,
    /// Bytes that the disk below has free, for whoever comes first; nothing where none is known.
    pub disk_free_bytes: Option<u64>,
    /// Files, in the same way.
    pub disk_free_files: Option<u64>,
}

/// Result of a successful operation. The bytes of a read travel in the body of the reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // see FileOp
pub enum FileReply {
    /// Done, nothing to say.
    Done,
    /// Attributes (of the found, made or changed file).
    Attr(Attr),
    /// An open file and its attributes.
    Opened { handle: HandleId, attr: Attr },
    /// Target of a symbolic link, value or list of extended attributes.
    Bytes(Vec<u8>),
    /// The next `length` bytes of the reply body were read.
    Read { length: u32 },
    /// Bytes written or copied.
    Written { length: u64 },
    /// Entries of a directory; none at its end.
    Entries(Vec<DirectoryEntry>),
    /// Limits and use.
    StatFs(TreeStat),
    /// A position in a file.
    Position(u64),
}

/// Result of one operation.
pub type FileResult = Result<FileReply, Errno>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errno_debug_output_includes_the_message() {
        assert!(format!("{:?}", Errno(2)).contains("No such file"));
    }
}
