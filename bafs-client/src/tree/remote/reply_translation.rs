//! What the answers of a server teach about its tree, and their numbers put into the kernel's.
//! Asks nothing.

use bafs_proto::file_op::{Attr, DirectoryEntry, END_COOKIE, FileOp, FileReply, FileResult};
use bafs_proto::ids::{Epoch, InodeNo};
use nix::libc;

use super::RemoteSession;
use crate::logic::inode_map::{InodeMap, OpenParameters};

impl RemoteSession {
    /// Takes in what an answer says about names, numbers and handles, and puts it into the
    /// kernel's numbers. `None` when its own numbers mean nothing any more.
    pub(super) fn translate_result(
        &self,
        epoch: Epoch,
        op: &FileOp,
        result: FileResult,
    ) -> Option<FileResult> {
        let Ok(mut reply) = result else {
            return Some(result);
        };
        if let (FileOp::ListDirectory { ino, .. }, FileReply::Entries(entries)) = (op, &mut reply) {
            self.drop_changed_names(epoch, *ino, entries);
        }
        let mut known = self.inode_map();
        let is_present = known.epoch() == epoch;
        match (op, &mut reply) {
            (FileOp::Release { handle } | FileOp::ReleaseDirectory { handle }, _) => {
                known.close(*handle);
            }
            (
                FileOp::Unlink { parent, name } | FileOp::RemoveDirectory { parent, name },
                FileReply::Done,
            ) => known.remove_name(*parent, name),
            (
                FileOp::Rename {
                    parent,
                    name,
                    new_parent,
                    new_name,
                    flags,
                },
                FileReply::Done,
            ) => {
                let exchanges = flags & libc::RENAME_EXCHANGE != 0;
                known.rename((*parent, name), (*new_parent, new_name), exchanges);
            }
            (FileOp::GetAttr { ino, .. } | FileOp::SetAttr { ino, .. }, FileReply::Attr(attr)) => {
                attr.ino = *ino;
            }
            (_, FileReply::Attr(_) | FileReply::Opened { .. } | FileReply::Entries(_))
                if !is_present =>
            {
                return None;
            }
            (op, reply) => record_reply(&mut known, op, reply),
        }
        Some(Ok(reply))
    }
}

impl RemoteSession {
    /// Leaves out the entries of a listing whose names were made or removed since it began: what a
    /// name led to then says nothing of it now.
    fn drop_changed_names(
        &self,
        epoch: Epoch,
        directory: InodeNo,
        entries: &mut Vec<DirectoryEntry>,
    ) {
        let Some(own) = self.delegation.get() else {
            return;
        };
        let is_end = entries.last().is_some_and(|last| last.cookie == END_COOKIE);
        let metadata = &own.lock_state().delegation.metadata;
        entries.retain(|entry| {
            let is_changed = metadata.has_changed_name(directory, &entry.name);
            if let Some(attr) = entry.attr.filter(|_| is_changed) {
                let (ino, count) = (attr.ino, 1);
                self.queue_forget(epoch, FileOp::Forget { ino, count });
            }
            !is_changed
        });
        if let Some(last) = entries.last_mut().filter(|_| is_end) {
            last.cookie = END_COOKIE;
        }
    }
}

/// Takes note of what the present session has shown.
fn record_reply(inodes: &mut InodeMap, op: &FileOp, reply: &mut FileReply) {
    match (op, reply) {
        (
            FileOp::Lookup { parent, name }
            | FileOp::MakeNode { parent, name, .. }
            | FileOp::MakeDirectory { parent, name, .. }
            | FileOp::MakeSymlink { parent, name, .. }
            | FileOp::MakeLink { parent, name, .. },
            FileReply::Attr(attr),
        ) => attr.ino = inodes.record_lookup(*parent, name, attr),
        (
            FileOp::Create {
                parent,
                name,
                flags,
                ..
            },
            FileReply::Opened { handle, attr },
        ) => {
            attr.ino = inodes.record_lookup(*parent, name, attr);
            *handle = inodes.add_handle(open_parameters_of(attr, *flags, false), *handle);
        }
        (FileOp::Open { ino, flags }, FileReply::Opened { handle, attr }) => {
            attr.ino = *ino;
            *handle = inodes.add_handle(open_parameters_of(attr, *flags, false), *handle);
        }
        (FileOp::OpenDirectory { ino }, FileReply::Opened { handle, attr }) => {
            attr.ino = *ino;
            *handle = inodes.add_handle(open_parameters_of(attr, 0, true), *handle);
        }
        (FileOp::ReadDirectory { handle, .. }, FileReply::Entries(entries)) => {
            let directory = inodes.open_parameters(*handle).map(|opening| opening.ino);
            record_entries(inodes, directory, entries);
        }
        (FileOp::ListDirectory { ino, .. }, FileReply::Entries(entries)) => {
            record_entries(inodes, Some(*ino), entries);
        }
        _ => {}
    }
}

fn record_entries(
    inodes: &mut InodeMap,
    directory: Option<InodeNo>,
    entries: &mut [DirectoryEntry],
) {
    for entry in entries {
        if let (Some(parent), Some(attr)) = (directory, &mut entry.attr) {
            attr.ino = inodes.record_lookup(parent, &entry.name, attr);
            entry.ino = attr.ino;
        } else if let Some(ino) = inodes.inode_by_server(entry.ino) {
            entry.ino = ino;
        }
    }
}

fn open_parameters_of(attr: &Attr, flags: i32, is_directory: bool) -> OpenParameters {
    OpenParameters {
        ino: attr.ino,
        flags,
        is_directory,
    }
}
