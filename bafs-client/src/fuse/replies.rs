//! Answers of a tree as replies to the kernel, one function per form of reply.

use std::sync::Arc;

use bafs_proto::file_op::{Attr, Caller, DirectoryEntry, Errno, FileOp, FileReply, FileResult};
use bafs_proto::ids::{HandleId, InodeNo};
use fuser::FopenFlags;
use nix::libc;

use super::answers::{
    AnswerAttr, AnswerCreate, AnswerData, AnswerEmpty, AnswerEntries, AnswerEntriesPlus,
    AnswerEntry, AnswerOpen, AnswerPosition, AnswerStat, AnswerWrite, AnswerXattr,
};
use super::convert::errno;
use crate::limits::DIRECTORY_PAGE_BYTES;
use crate::tree::Done;
use crate::volume::{Mode, Volume};

/// What the kernel gets when a tree answers in a form that does not fit the question.
const NONSENSE: fuser::Errno = fuser::Errno::EIO;

pub(super) fn error_of(result: FileResult) -> fuser::Errno {
    result.map_or_else(errno, |_| NONSENSE)
}

pub(super) fn entry(mode: Mode, is_lookup: bool, reply: impl AnswerEntry) -> Done {
    Box::new(move |result, _| match result {
        Ok(FileReply::Attr(attr)) if attr.ino.0 != 0 => {
            reply.entry(mode.believe, &attr);
        }
        Err(Errno(libc::ENOENT)) if is_lookup && mode.believe_absence => {
            reply.absent(mode.believe);
        }
        other => reply.refuse(error_of(other)),
    })
}

pub(super) fn attr(mode: Mode, reply: impl AnswerAttr) -> Done {
    Box::new(move |result, _| match result {
        Ok(FileReply::Attr(attr)) => reply.attr(mode.believe, &attr),
        other => reply.refuse(error_of(other)),
    })
}

pub(super) fn empty(reply: impl AnswerEmpty) -> Done {
    Box::new(move |result, _| match result {
        Ok(_) => reply.done(),
        Err(error) => reply.refuse(errno(error)),
    })
}

pub(super) fn bytes(reply: impl AnswerData) -> Done {
    Box::new(move |result, _| match result {
        Ok(FileReply::Bytes(bytes)) => reply.bytes(&bytes),
        other => reply.refuse(error_of(other)),
    })
}

pub(super) fn data(reply: impl AnswerData) -> Done {
    Box::new(move |result, data| match result {
        Ok(FileReply::Read { length }) if length as usize == data.len() => reply.bytes(data),
        other => reply.refuse(error_of(other)),
    })
}

pub(super) fn opened(
    flags: impl FnOnce(&Attr) -> FopenFlags + Send + 'static,
    reply: impl AnswerOpen,
) -> Done {
    Box::new(move |result, _| match result {
        Ok(FileReply::Opened { handle, attr }) => reply.handle(handle, flags(&attr)),
        other => reply.refuse(error_of(other)),
    })
}

pub(super) fn created(mode: Mode, flags: FopenFlags, reply: impl AnswerCreate) -> Done {
    Box::new(move |result, _| match result {
        Ok(FileReply::Opened { handle, attr }) => {
            reply.made(mode.believe, &attr, handle, flags);
        }
        other => reply.refuse(error_of(other)),
    })
}

pub(super) fn written(reply: impl AnswerWrite) -> Done {
    Box::new(move |result, _| match result {
        Ok(FileReply::Written { length }) => {
            reply.count(u32::try_from(length).unwrap_or(u32::MAX));
        }
        other => reply.refuse(error_of(other)),
    })
}

pub(super) fn position(reply: impl AnswerPosition) -> Done {
    Box::new(move |result, _| match result {
        Ok(FileReply::Position(at)) => match i64::try_from(at) {
            Ok(at) => reply.position(at),
            Err(_) => reply.refuse(fuser::Errno::EOVERFLOW),
        },
        other => reply.refuse(error_of(other)),
    })
}

pub(super) fn xattr(size: u32, reply: impl AnswerXattr) -> Done {
    Box::new(move |result, _| match result {
        Ok(FileReply::Bytes(bytes)) => match u32::try_from(bytes.len()) {
            Ok(length) if size == 0 => reply.length(length),
            Ok(length) if length <= size => reply.value(&bytes),
            _ => reply.refuse(fuser::Errno::ERANGE),
        },
        other => reply.refuse(error_of(other)),
    })
}

pub(super) fn stat_fs(reply: impl AnswerStat) -> Done {
    Box::new(move |result, _| match result {
        Ok(FileReply::StatFs(stat)) => reply.stat(stat),
        other => reply.refuse(error_of(other)),
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

pub(super) fn entries(mut reply: impl AnswerEntries) -> Done {
    Box::new(move |result, _| match result {
        Ok(FileReply::Entries(entries)) => {
            for entry in &entries {
                // What does not fit is asked for again, from the last cookie that did.
                if !reply.list(entry) {
                    break;
                }
            }
            reply.listed();
        }
        other => reply.refuse(error_of(other)),
    })
}

/// Lists a directory with attributes. Each listed entry counts one reference, so what does not
/// fit is forgotten; what vanished meanwhile is left out.
pub(super) fn entries_plus(
    volume: Arc<Volume>,
    caller: Caller,
    (directory, handle): (InodeNo, HandleId),
    cookie: u64,
    reply: impl AnswerEntriesPlus,
) {
    let listing = Arc::clone(&volume);
    let finish: Done = Box::new(move |result, _| match result {
        Ok(FileReply::Entries(entries)) => {
            match (
                entries.last().map(|last| last.cookie),
                entries.iter().all(is_gone),
            ) {
                // An empty reply would mean the end of the directory.
                (Some(last), true) => {
                    entries_plus(volume, caller, (directory, handle), last, reply);
                }
                _ => add_entries(&volume, directory, entries, reply),
            }
        }
        other => reply.refuse(error_of(other)),
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
    directory: InodeNo,
    entries: Vec<DirectoryEntry>,
    mut reply: impl AnswerEntriesPlus,
) {
    let believe = volume.mode().believe;
    let mut is_full = false;
    let mut forgotten = Vec::new();
    for entry in entries {
        if is_gone(&entry) {
            continue;
        }
        is_full = is_full || !reply.list(&entry, believe);
        volume.listed(directory, &entry);
        if is_full && !is_dots(&entry) {
            forgotten.push(entry.ino);
        }
    }
    reply.listed();
    for ino in forgotten {
        volume.forget(ino, 1);
    }
}
