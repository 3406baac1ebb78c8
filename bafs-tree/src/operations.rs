//! Runs the operations of a session: which one does what, and under which numbers. The operations
//! themselves are in files of their kind: `data.rs`, `attributes.rs`, `name_operations.rs`,
//! `listing.rs`; those on the tables of a session are in `session.rs`.

use bafs_proto::file_op::{Caller, FileOp, FileReply, FileResult};
use bafs_proto::ids::{HandleId, InodeNo};
use rustix::fs::{AtFlags, OFlags};

use crate::descriptor_limits::check_synchronous_open;
use crate::errno;
use crate::name_operations::NewEntry;
use crate::operation_kind::{caller_errno, is_change_op, is_open_op};
use crate::session::Session;

impl Session {
    /// Runs one operation for `caller`. What it reads is appended to `out`; what it writes is a
    /// part of `data`.
    ///
    /// # Errors
    /// The errno that the same system call gives on the host; `ESTALE` for a number that the
    /// session does not know, `EROFS` for a change in a session that is not writable, `ENOSPC`
    /// at the tree's limit, `EMFILE` beyond the caller's share of the descriptors of this process,
    /// `ENFILE` when none is left.
    pub fn run(&self, caller: Caller, op: &FileOp, data: &[u8], out: &mut Vec<u8>) -> FileResult {
        if is_open_op(op) && !self.is_resumed {
            check_synchronous_open(&self.descriptor_use, caller.pid)?;
        }
        self.run_unchecked(caller, op, data, out)
    }

    fn run_unchecked(
        &self,
        caller: Caller,
        op: &FileOp,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> FileResult {
        if !self.writable && is_change_op(op) {
            return Err(errno::ROFS);
        }
        match self.run_once(caller, op, data, out) {
            Err(errno::NOSPC) if self.release_unlinked() => self.run_once(caller, op, data, out),
            done => done.map_err(|error| caller_errno(op, error)),
        }
    }

    fn run_once(&self, caller: Caller, op: &FileOp, data: &[u8], out: &mut Vec<u8>) -> FileResult {
        match op {
            FileOp::Read {
                handle,
                offset,
                length,
            } => self.read(*handle, *offset, *length, out),
            FileOp::ReadFile { ino, bytes_max } => self.read_file(*ino, *bytes_max, out),
            FileOp::Write {
                handle,
                offset,
                data: range,
                append,
            } => self.write(*handle, *offset, *range, *append, data),
            FileOp::Lookup { parent, name } => self.lookup(*parent, name),
            FileOp::Forget { ino, count } => {
                self.forget(*ino, *count);
                Ok(FileReply::Done)
            }
            FileOp::GetAttr { ino, handle } => self.get_attr(*ino, *handle),
            FileOp::SetAttr {
                ino,
                handle,
                change,
            } => self.set_attr(*ino, *handle, change),
            FileOp::ReadLink { ino } => self.read_link(*ino),
            FileOp::StatFs => Ok(FileReply::StatFs(self.stat_tree())),
            FileOp::Fsync { handle, data_only } => self.sync(*handle, *data_only),
            FileOp::Allocate {
                handle,
                mode,
                offset,
                length,
            } => self.allocate(*handle, *mode, *offset, *length),
            FileOp::Seek {
                handle,
                offset,
                whence,
            } => self.seek(*handle, *offset, *whence),
            FileOp::CopyRange {
                source,
                source_offset,
                target,
                target_offset,
                length,
            } => self.copy_range(
                (*source, *source_offset),
                (*target, *target_offset),
                *length,
            ),
            FileOp::Open { ino, flags } => self.open((*ino, *flags), caller.pid),
            FileOp::Release { handle } => self.release(*handle),
            FileOp::OpenDirectory { .. }
            | FileOp::ReadDirectory { .. }
            | FileOp::ListDirectory { .. }
            | FileOp::ReleaseDirectory { .. }
            | FileOp::FsyncDirectory { .. } => self.run_on_directories(caller, op),
            FileOp::SetXattr { .. }
            | FileOp::GetXattr { .. }
            | FileOp::ListXattr { .. }
            | FileOp::RemoveXattr { .. } => self.run_on_xattrs(op),
            _ => self.run_on_names(caller, op),
        }
    }

    fn run_on_directories(&self, caller: Caller, op: &FileOp) -> FileResult {
        match op {
            FileOp::OpenDirectory { ino } => self.open_directory(*ino, caller.pid),
            FileOp::ReadDirectory {
                handle,
                cookie,
                bytes_max,
                plus,
            } => self.read_directory(*handle, *cookie, *bytes_max, *plus),
            FileOp::ListDirectory {
                ino,
                cookie,
                bytes_max,
            } => self.list_directory(*ino, *cookie, *bytes_max),
            FileOp::ReleaseDirectory { handle } => self.release_directory(*handle),
            FileOp::FsyncDirectory { ino } => self.sync_directory(*ino),
            _ => self.run_on_names(caller, op),
        }
    }

    /// Runs one operation that makes or opens a file, which the session calls by the given numbers
    /// from then on.
    ///
    /// # Errors
    /// As [`Self::run`]; `EEXIST` where a file is there already; `EINVAL` for numbers that are
    /// taken or not for agents to give, or that the operation makes nothing for: it has not run.
    pub fn run_numbered(
        &self,
        (caller, op, data): (Caller, &FileOp, &[u8]),
        (ino, handle): (Option<InodeNo>, Option<HandleId>),
        out: &mut Vec<u8>,
    ) -> FileResult {
        let makes_file = matches!(op, FileOp::Create { .. } | FileOp::MakeDirectory { .. });
        let opens = matches!(op, FileOp::Create { .. } | FileOp::Open { .. });
        if (ino, handle) == (None, None) {
            return self.run(caller, op, data, out);
        }
        let is_fit = ino.is_none_or(|ino| makes_file && self.inodes().is_assignable(ino))
            && handle.is_none_or(|handle| opens && self.handles().is_assignable(handle));
        if !is_fit {
            return Err(errno::INVAL);
        }
        let mut op = op.clone();
        if let FileOp::Create { flags, .. } = &mut op {
            // What is there already has a number by which others may know it.
            *flags |= OFlags::EXCL.bits().cast_signed();
        }
        let is_promised =
            handle.is_some() && self.handles().early_count() < self.reserved_descriptors.count();
        let mut reply = match is_promised {
            true => self.run_unchecked(caller, &op, data, out)?,
            false => self.run(caller, &op, data, out)?,
        };
        if let (Some(ino), FileReply::Attr(attr) | FileReply::Opened { attr, .. }) =
            (ino, &mut reply)
        {
            self.inodes().renumber(attr.ino, ino)?;
            attr.ino = ino;
        }
        if let (Some(wished), FileReply::Opened { handle, attr }) = (handle, &mut reply) {
            let numbers = (wished, attr.ino);
            self.handles().renumber(*handle, numbers, is_promised)?;
            *handle = wished;
        }
        Ok(reply)
    }

    fn run_on_xattrs(&self, op: &FileOp) -> FileResult {
        match op {
            FileOp::SetXattr {
                ino,
                name,
                value,
                flags,
            } => self.set_xattr(*ino, name, value, *flags),
            FileOp::GetXattr { ino, name } => self.get_xattr(*ino, name),
            FileOp::ListXattr { ino } => self.list_xattr(*ino),
            FileOp::RemoveXattr { ino, name } => self.remove_xattr(*ino, name),
            _ => Err(errno::INVAL),
        }
    }

    fn run_on_names(&self, caller: Caller, op: &FileOp) -> FileResult {
        match op {
            FileOp::MakeNode {
                parent,
                name,
                mode,
                rdev,
            } => {
                let entry = NewEntry {
                    caller,
                    parent: *parent,
                    name,
                    mode: Some(*mode),
                };
                self.make_node(&entry, *mode, *rdev)
            }
            FileOp::MakeDirectory { parent, name, mode } => {
                let mode = Some(*mode & 0o1777);
                self.make_directory(&NewEntry {
                    caller,
                    parent: *parent,
                    name,
                    mode,
                })
            }
            FileOp::MakeSymlink {
                parent,
                name,
                target,
            } => {
                let entry = NewEntry {
                    caller,
                    parent: *parent,
                    name,
                    mode: None,
                };
                self.make_symlink(&entry, target)
            }
            FileOp::Create {
                parent,
                name,
                mode,
                flags,
            } => {
                let entry = NewEntry {
                    caller,
                    parent: *parent,
                    name,
                    mode: Some(*mode),
                };
                self.create(&entry, *flags)
            }
            FileOp::MakeLink { ino, parent, name } => self.make_link(*ino, *parent, name),
            FileOp::Unlink { parent, name } => self.unlink(*parent, name, AtFlags::empty()),
            FileOp::RemoveDirectory { parent, name } => {
                self.unlink(*parent, name, AtFlags::REMOVEDIR)
            }
            FileOp::Rename {
                parent,
                name,
                new_parent,
                new_name,
                flags,
            } => self.rename((*parent, name), (*new_parent, new_name), *flags),
            _ => Err(errno::INVAL),
        }
    }
}
