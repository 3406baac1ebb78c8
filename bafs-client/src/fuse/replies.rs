//! Answers of a tree as replies to the kernel, one function per form of reply.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;

use bafs_proto::file_op::{Caller, DirectoryEntry, Errno, FileOp, FileReply, FileResult};
use bafs_proto::ids::HandleId;
use bafs_proto::limits::NAME_BYTES_MAX;
use fuser::{
    FileHandle, FopenFlags, Generation, INodeNo, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite,
    ReplyXattr,
};
use nix::libc;

use super::convert::{self, absence, errno};
use crate::limits::DIRECTORY_PAGE_BYTES;
use crate::tree::Done;
use crate::volume::{Mode, Volume};

/// Inode numbers are never used again within a session.
const GENERATION: Generation = Generation(0);

/// Block size in which the kernel is told sizes, in bytes.
const STAT_BLOCK_BYTES: u32 = 4096;

/// What the kernel gets when a tree answers in a form that does not fit the question.
const NONSENSE: fuser::Errno = fuser::Errno::EIO;

pub(super) fn error_of(result: FileResult) -> fuser::Errno {
    result.map_or_else(errno, |_| NONSENSE)
}

pub(super) fn entry(mode: Mode, is_lookup: bool, reply: ReplyEntry) -> Done {
    Box::new(move |result, _| match result {
        Ok(FileReply::Attr(attr)) if attr.ino.0 != 0 => {
            reply.entry(&mode.believe, &convert::attr(&attr), GENERATION);
        }
        Err(Errno(libc::ENOENT)) if is_lookup && mode.believe_absence => {
            reply.entry(&mode.believe, &absence(), GENERATION);
        }
        other => reply.error(error_of(other)),
    })
}

pub(super) fn attr(mode: Mode, reply: ReplyAttr) -> Done {
    Box::new(move |result, _| match result {
        Ok(FileReply::Attr(attr)) => reply.attr(&mode.believe, &convert::attr(&attr)),
        other => reply.error(error_of(other)),
    })
}

pub(super) fn empty(reply: ReplyEmpty) -> Done {
    Box::new(move |result, _| match result {
        Ok(_) => reply.ok(),
        Err(error) => reply.error(errno(error)),
    })
}

pub(super) fn bytes(reply: ReplyData) -> Done {
    Box::new(move |result, _| match result {
        Ok(FileReply::Bytes(bytes)) => reply.data(&bytes),
        other => reply.error(error_of(other)),
    })
}

pub(super) fn data(reply: ReplyData) -> Done {
    Box::new(move |result, data| match result {
        Ok(FileReply::Read { length }) if length as usize == data.len() => reply.data(data),
        other => reply.error(error_of(other)),
    })
}

pub(super) fn opened(flags: FopenFlags, reply: ReplyOpen) -> Done {
    Box::new(move |result, _| match result {
        Ok(FileReply::Opened { handle, .. }) => reply.opened(FileHandle(handle.0), flags),
        other => reply.error(error_of(other)),
    })
}

pub(super) fn created(mode: Mode, flags: FopenFlags, reply: ReplyCreate) -> Done {
    Box::new(move |result, _| match result {
        Ok(FileReply::Opened { handle, attr }) => {
            let attr = convert::attr(&attr);
            reply.created(
                &mode.believe,
                &attr,
                GENERATION,
                FileHandle(handle.0),
                flags,
            );
        }
        other => reply.error(error_of(other)),
    })
}

pub(super) fn written(reply: ReplyWrite) -> Done {
    Box::new(move |result, _| match result {
        Ok(FileReply::Written { length }) => {
            reply.written(u32::try_from(length).unwrap_or(u32::MAX));
        }
        other => reply.error(error_of(other)),
    })
}

pub(super) fn position(reply: ReplyLseek) -> Done {
    Box::new(move |result, _| match result {
        Ok(FileReply::Position(at)) => match i64::try_from(at) {
            Ok(at) => reply.offset(at),
            Err(_) => reply.error(fuser::Errno::EOVERFLOW),
        },
        other => reply.error(error_of(other)),
    })
}

pub(super) fn xattr(size: u32, reply: ReplyXattr) -> Done {
    Box::new(move |result, _| match result {
        Ok(FileReply::Bytes(bytes)) => match u32::try_from(bytes.len()) {
            Ok(length) if size == 0 => reply.size(length),
            Ok(length) if length <= size => reply.data(&bytes),
            _ => reply.error(fuser::Errno::ERANGE),
        },
        other => reply.error(error_of(other)),
    })
}

pub(super) fn stat_fs(reply: ReplyStatfs) -> Done {
    Box::new(move |result, _| match result {
        Ok(FileReply::StatFs(stat)) => {
            let block = u64::from(STAT_BLOCK_BYTES);
            let free = stat.free_bytes / block;
            reply.statfs(
                stat.size_bytes.div_ceil(block),
                free,
                free,
                stat.size_files,
                stat.free_files,
                STAT_BLOCK_BYTES,
                NAME_BYTES_MAX as u32,
                STAT_BLOCK_BYTES,
            );
        }
        other => reply.error(error_of(other)),
    })
}

pub(super) fn read_directory(handle: HandleId, cookie: u64, plus: bool) -> FileOp {
    FileOp::ReadDirectory {
        handle,
        cookie,
        bytes_max: DIRECTORY_PAGE_BYTES,
        plus,
    }
}

pub(super) fn entries(mut reply: ReplyDirectory) -> Done {
    Box::new(move |result, _| match result {
        Ok(FileReply::Entries(entries)) => {
            for entry in entries {
                let (ino, kind) = (INodeNo(entry.ino.0), convert::kind(entry.mode));
                // What does not fit is asked for again, from the last cookie that did.
                if reply.add(ino, entry.cookie, kind, OsStr::from_bytes(&entry.name)) {
                    break;
                }
            }
            reply.ok();
        }
        other => reply.error(error_of(other)),
    })
}

/// Lists a directory with attributes. Each listed entry counts one reference, so what does not
/// fit is forgotten; what vanished meanwhile is left out.
pub(super) fn entries_plus(
    volume: Arc<Volume>,
    caller: Caller,
    handle: HandleId,
    cookie: u64,
    reply: ReplyDirectoryPlus,
) {
    let listing = Arc::clone(&volume);
    let finish: Done = Box::new(move |result, _| match result {
        Ok(FileReply::Entries(entries)) => {
            match (
                entries.last().map(|last| last.cookie),
                entries.iter().all(is_gone),
            ) {
                // An empty reply would mean the end of the directory.
                (Some(last), true) => entries_plus(volume, caller, handle, last, reply),
                _ => add_entries(&volume, caller, entries, reply),
            }
        }
        other => reply.error(error_of(other)),
    });
    listing.run(caller, read_directory(handle, cookie, true), &[], finish);
}

fn is_gone(entry: &DirectoryEntry) -> bool {
    entry.attr.is_none() && !is_dots(entry)
}

fn is_dots(entry: &DirectoryEntry) -> bool {
    entry.name == b"." || entry.name == b".."
}

fn add_entries(
    volume: &Arc<Volume>,
    caller: Caller,
    entries: Vec<DirectoryEntry>,
    mut reply: ReplyDirectoryPlus,
) {
    let believe = volume.mode().believe;
    let mut is_full = false;
    let mut forgotten = Vec::new();
    for entry in entries {
        let (attr, ttl) = match &entry.attr {
            Some(attr) => (convert::attr(attr), believe),
            None if is_dots(&entry) => (dots(&entry), Duration::ZERO),
            None => continue,
        };
        is_full = is_full || {
            let name = OsStr::from_bytes(&entry.name);
            reply.add(
                INodeNo(entry.ino.0),
                entry.cookie,
                name,
                &ttl,
                &attr,
                GENERATION,
            )
        };
        if is_full && !is_dots(&entry) {
            forgotten.push(FileOp::Forget {
                ino: entry.ino,
                count: 1,
            });
        }
    }
    reply.ok();
    for op in forgotten {
        volume.run(caller, op, &[], Box::new(|_, _| {}));
    }
}

/// The kernel takes only number and type of `.` and `..`.
fn dots(entry: &DirectoryEntry) -> fuser::FileAttr {
    fuser::FileAttr {
        ino: INodeNo(entry.ino.0),
        kind: fuser::FileType::Directory,
        ..absence()
    }
}
