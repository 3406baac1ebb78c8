//! What the answers of a server teach about its tree, and their numbers put into the kernel's.
//! Asks nothing.

use bafs_proto::file_op::{Attr, FileOp, FileReply, FileResult};
use bafs_proto::ids::Epoch;
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
            for entry in entries {
                if let (Some(parent), Some(attr)) = (directory, &mut entry.attr) {
                    attr.ino = inodes.record_lookup(parent, &entry.name, attr);
                    entry.ino = attr.ino;
                } else if let Some(ino) = inodes.inode_by_server(entry.ino) {
                    entry.ino = ino;
                }
            }
        }
        _ => {}
    }
}

fn open_parameters_of(attr: &Attr, flags: i32, is_directory: bool) -> OpenParameters {
    OpenParameters {
        ino: attr.ino,
        flags,
        is_directory,
    }
}
