//! Answers of a tree as replies to the kernel, one function per form of reply.

use std::sync::Arc;

use bafs_proto::file_op::{Attr, Caller, DirectoryEntry, Errno, FileOp, FileReply, FileResult};
use bafs_proto::ids::{HandleId, InodeNo};
use fuser::FopenFlags;
use nix::libc;

use super::convert::to_errno;
use super::reply_traits::{
    AttrReply, CreateReply, DataReply, DirectoryPlusReply, DirectoryReply, EmptyReply, EntryReply,
    OpenReply, SeekReply, StatReply, WriteReply, XattrReply,
};
use crate::limits::DIRECTORY_PAGE_BYTES;
use crate::logic::early_listings::is_early_listing;
use crate::tree::Completion;
use crate::volume::{KernelCache, Volume};

/// What the kernel gets when a tree answers in a form that does not fit the question.
const MISMATCHED_REPLY: fuser::Errno = fuser::Errno::EIO;

pub(super) fn kernel_error(result: FileResult) -> fuser::Errno {
    result.map_or_else(to_errno, |_| MISMATCHED_REPLY)
}

pub(super) fn entry_completion(
    cache: KernelCache,
    is_lookup: bool,
    reply: impl EntryReply,
) -> Completion {
    Box::new(move |result, _| match result {
        Ok(FileReply::Attr(attr)) if attr.ino.0 != 0 => {
            reply.send_entry(cache.attribute_ttl(), &attr);
        }
        Err(Errno(libc::ENOENT)) if is_lookup && cache.is_caching() => {
            reply.send_absent(cache.attribute_ttl());
        }
        other => reply.send_error(kernel_error(other)),
    })
}

pub(super) fn attr_completion(cache: KernelCache, reply: impl AttrReply) -> Completion {
    Box::new(move |result, _| match result {
        Ok(FileReply::Attr(attr)) => reply.send_attr(cache.attribute_ttl(), &attr),
        other => reply.send_error(kernel_error(other)),
    })
}

pub(super) fn empty_completion(reply: impl EmptyReply) -> Completion {
    Box::new(move |result, _| match result {
        Ok(_) => reply.send_done(),
        Err(error) => reply.send_error(to_errno(error)),
    })
}

pub(super) fn length_completion(reply: impl DataReply) -> Completion {
    Box::new(move |result, _| match result {
        Ok(FileReply::Bytes(bytes)) => reply.send_data(&bytes),
        other => reply.send_error(kernel_error(other)),
    })
}

pub(super) fn data_completion(reply: impl DataReply) -> Completion {
    Box::new(move |result, data| match result {
        Ok(FileReply::Read { length }) if length as usize == data.len() => reply.send_data(data),
        other => reply.send_error(kernel_error(other)),
    })
}

pub(super) fn open_completion(
    flags: impl FnOnce(&Attr) -> FopenFlags + Send + 'static,
    reply: impl OpenReply,
) -> Completion {
    Box::new(move |result, _| match result {
        Ok(FileReply::Opened { handle, attr }) => reply.send_handle(handle, flags(&attr)),
        other => reply.send_error(kernel_error(other)),
    })
}

/// The kernel keeps the names of a directory, unless their places mean something to one handle
/// only.
pub(super) fn open_directory_completion(flags: FopenFlags, reply: impl OpenReply) -> Completion {
    Box::new(move |result, _| match result {
        Ok(FileReply::Opened { handle, .. }) if is_early_listing(handle) => {
            reply.send_handle(handle, FopenFlags::empty());
        }
        Ok(FileReply::Opened { handle, .. }) => reply.send_handle(handle, flags),
        other => reply.send_error(kernel_error(other)),
    })
}

pub(super) fn create_completion(
    cache: KernelCache,
    flags: FopenFlags,
    reply: impl CreateReply,
) -> Completion {
    Box::new(move |result, _| match result {
        Ok(FileReply::Opened { handle, attr }) => {
            reply.send_created(cache.attribute_ttl(), &attr, handle, flags);
        }
        other => reply.send_error(kernel_error(other)),
    })
}

pub(super) fn write_completion(reply: impl WriteReply) -> Completion {
    Box::new(move |result, _| match result {
        Ok(FileReply::Written { length }) => {
            reply.send_count(u32::try_from(length).unwrap_or(u32::MAX));
        }
        other => reply.send_error(kernel_error(other)),
    })
}

pub(super) fn seek_completion(reply: impl SeekReply) -> Completion {
    Box::new(move |result, _| match result {
        Ok(FileReply::Position(at)) => match i64::try_from(at) {
            Ok(at) => reply.send_position(at),
            Err(_) => reply.send_error(fuser::Errno::EOVERFLOW),
        },
        other => reply.send_error(kernel_error(other)),
    })
}

pub(super) fn xattr_completion(size: u32, reply: impl XattrReply) -> Completion {
    Box::new(move |result, _| match result {
        Ok(FileReply::Bytes(bytes)) => match u32::try_from(bytes.len()) {
            Ok(length) if size == 0 => reply.send_length(length),
            Ok(length) if length <= size => reply.send_value(&bytes),
            _ => reply.send_error(fuser::Errno::ERANGE),
        },
        other => reply.send_error(kernel_error(other)),
    })
}

pub(super) fn stat_completion(reply: impl StatReply) -> Completion {
    Box::new(move |result, _| match result {
        Ok(FileReply::StatFs(stat)) => reply.send_stat(stat),
        other => reply.send_error(kernel_error(other)),
    })
}

pub(super) fn read_directory_operation(handle: HandleId, cookie: u64, plus: bool) -> FileOp {
    FileOp::ReadDirectory {
        handle,
        cookie,
        bytes_max: DIRECTORY_PAGE_BYTES,
        plus,
    }
}

pub(super) fn directory_completion(mut reply: impl DirectoryReply) -> Completion {
    Box::new(move |result, _| match result {
        Ok(FileReply::Entries(entries)) => {
            for entry in &entries {
                // What does not fit is asked for again, from the last cookie that did.
                if !reply.add_entry(entry) {
                    break;
                }
            }
            reply.send_entries();
        }
        other => reply.send_error(kernel_error(other)),
    })
}

/// Lists a directory with attributes. Each listed entry counts one reference, so what does not
/// fit is forgotten; what vanished meanwhile is left out.
pub(super) fn list_with_attributes(
    volume: Arc<Volume>,
    caller: Caller,
    (directory, handle): (InodeNo, HandleId),
    cookie: u64,
    reply: impl DirectoryPlusReply,
) {
    let listing = Arc::clone(&volume);
    let finish: Completion = Box::new(move |result, _| match result {
        Ok(FileReply::Entries(entries)) => {
            match (
                entries.last().map(|last| last.cookie),
                entries.iter().all(is_gone),
            ) {
                // An empty reply would mean the end of the directory.
                (Some(last), true) => {
                    list_with_attributes(volume, caller, (directory, handle), last, reply);
                }
                _ => add_entries(&volume, directory, entries, reply),
            }
        }
        other => reply.send_error(kernel_error(other)),
    });
    listing.run(
        caller,
        read_directory_operation(handle, cookie, true),
        &[],
        finish,
    );
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
    mut reply: impl DirectoryPlusReply,
) {
    let believe = volume.mode().kernel_cache.attribute_ttl();
    let mut is_full = false;
    let mut forgotten = Vec::new();
    for entry in entries {
        if is_gone(&entry) {
            continue;
        }
        is_full = is_full || !reply.add_entry(&entry, believe);
        volume.record_listing(directory, &entry);
        if is_full && !is_dots(&entry) {
            forgotten.push(entry.ino);
        }
    }
    reply.send_entries();
    for ino in forgotten {
        volume.forget(ino, 1);
    }
}
