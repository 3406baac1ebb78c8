//! Finds out whether an operation that was under way ran before the server forgot the session, by
//! the names and sizes that it left. What cannot be proved loses the volume.

use bafs_proto::file_op::{Attr, ByName, Caller, Errno, FileOp, FileReply};
use bafs_proto::ids::InodeNo;
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode};
use bytes::Bytes;
use nix::libc;

use super::{RemoteSession, SessionFailure, SessionLink};
use crate::logic::inode_map::{MissingObject, OpenParameters};

impl RemoteSession {
    /// Finds out whether an operation ran in the forgotten session: its answer if it did, `None`
    /// if it may run (again). The kernel keeps others from the names of an operation while it is
    /// under way, and nobody else writes a volume: so names tell.
    pub(super) async fn find_outcome(
        &self,
        link: &SessionLink,
        op: &FileOp,
        deadline: Deadline,
    ) -> Result<Option<FileReply>, SessionFailure> {
        match op {
            FileOp::Create { parent, name, .. }
            | FileOp::MakeNode { parent, name, .. }
            | FileOp::MakeSymlink { parent, name, .. }
            | FileOp::MakeDirectory { parent, name, .. } => {
                self.remove_unfinished(link, *parent, name, deadline)
                    .await?;
                Ok(None)
            }
            FileOp::MakeLink { ino, parent, name } => {
                let Some(found) = self.find_name(link, *parent, name, deadline).await? else {
                    return Ok(None);
                };
                if self
                    .provide_object(link, MissingObject::File(*ino), deadline)
                    .await?
                    != found.ino
                {
                    return Err(self.unproved_failure("a link"));
                }
                // The kernel is to have a reference of its own.
                self.look_up(link, *parent, name, deadline).await
            }
            FileOp::Unlink { parent, name } | FileOp::RemoveDirectory { parent, name } => {
                let found = self.find_name(link, *parent, name, deadline).await?;
                Ok(found.is_none().then_some(FileReply::Done))
            }
            FileOp::Rename { .. } => self.find_rename_outcome(link, op, deadline).await,
            FileOp::Write { append: true, .. } => {
                self.find_append_outcome(link, op, deadline).await
            }
            FileOp::SetXattr { flags, .. } if *flags & libc::XATTR_CREATE == 0 => Ok(None),
            FileOp::SetXattr { .. } | FileOp::RemoveXattr { .. } => {
                Err(self.unproved_failure("a change of an extended attribute"))
            }
            FileOp::Allocate { mode, .. } => {
                let shifts = libc::FALLOC_FL_COLLAPSE_RANGE | libc::FALLOC_FL_INSERT_RANGE;
                if mode & shifts == 0 {
                    return Ok(None);
                }
                Err(self.unproved_failure("a shift of a file's content"))
            }
            // They leave the same whether they run once or twice.
            FileOp::Lookup { .. }
            | FileOp::Forget { .. }
            | FileOp::GetAttr { .. }
            | FileOp::SetAttr { .. }
            | FileOp::ReadLink { .. }
            | FileOp::Open { .. }
            | FileOp::Read { .. }
            | FileOp::ReadFile { .. }
            | FileOp::ListDirectory { .. }
            | FileOp::Write { .. }
            | FileOp::Fsync { .. }
            | FileOp::Release { .. }
            | FileOp::OpenDirectory { .. }
            | FileOp::ReadDirectory { .. }
            | FileOp::ReleaseDirectory { .. }
            | FileOp::FsyncDirectory { .. }
            | FileOp::StatFs
            | FileOp::GetXattr { .. }
            | FileOp::ListXattr { .. }
            | FileOp::Seek { .. }
            | FileOp::CopyRange { .. } => Ok(None),
        }
    }

    /// Removes what a half-done operation made: it may lack its owner and mode.
    async fn remove_unfinished(
        &self,
        link: &SessionLink,
        parent: InodeNo,
        name: &ByName,
        deadline: Deadline,
    ) -> Result<(), SessionFailure> {
        let Some(found) = self.find_name(link, parent, name, deadline).await? else {
            return Ok(());
        };
        let is_directory = found.is_directory();
        let is_empty = is_directory || found.is_symlink() || found.size == 0;
        let is_new = self.inode_map().inode_by_name(parent, name).is_none();
        // The kernel makes only what it knows not to be there; if this looks otherwise, something
        // is wrong, and nothing is removed.
        if !is_empty || !is_new || (!is_directory && found.nlink != 1) {
            return Err(self.unproved_failure("the making of a file"));
        }
        let (place, name) = (parent, name.clone());
        let parent = self
            .provide_object(link, MissingObject::File(place), deadline)
            .await?;
        let op = if is_directory {
            FileOp::RemoveDirectory { parent, name }
        } else {
            FileOp::Unlink { parent, name }
        };
        let (result, _) = self
            .run_in_session(link, Caller::default(), op, &Bytes::new(), deadline)
            .await?;
        match result {
            Ok(_) => Ok(()),
            Err(_) => Err(self.unproved_failure("the making of a file")),
        }
    }

    async fn find_rename_outcome(
        &self,
        link: &SessionLink,
        op: &FileOp,
        deadline: Deadline,
    ) -> Result<Option<FileReply>, SessionFailure> {
        let FileOp::Rename {
            parent,
            name,
            new_parent,
            new_name,
            flags,
        } = op
        else {
            return Ok(None);
        };
        let Some(found) = self.find_name(link, *parent, name, deadline).await? else {
            return Ok(Some(FileReply::Done));
        };
        if flags & libc::RENAME_EXCHANGE == 0 {
            return Ok(None);
        }
        let (one, other) = {
            let known = self.inode_map();
            (
                known.inode_by_name(*parent, name),
                known.inode_by_name(*new_parent, new_name),
            )
        };
        let (Some(one), Some(other)) = (one, other) else {
            return Err(self.unproved_failure("an exchange of names"));
        };
        match found.ino {
            ino if ino == one => Ok(None),
            ino if ino == other => Ok(Some(FileReply::Done)),
            _ => Err(self.unproved_failure("an exchange of names")),
        }
    }

    /// The kernel says where it believed the end of the file to be, and nobody else appends.
    async fn find_append_outcome(
        &self,
        link: &SessionLink,
        op: &FileOp,
        deadline: Deadline,
    ) -> Result<Option<FileReply>, SessionFailure> {
        let FileOp::Write {
            handle,
            offset,
            data,
            ..
        } = op
        else {
            return Ok(None);
        };
        let length = u64::from(data.length);
        let opening = self.inode_map().open_parameters(*handle);
        let Some(OpenParameters { ino, .. }) = opening else {
            return Err(SessionFailure::OperationRefused(Errno(libc::EBADF)));
        };
        let place = self
            .provide_object(link, MissingObject::File(ino), deadline)
            .await?;
        let op = FileOp::GetAttr {
            ino: place,
            handle: None,
        };
        let (result, _) = self
            .run_in_session(link, Caller::default(), op, &Bytes::new(), deadline)
            .await?;
        match result {
            Ok(FileReply::Attr(attr)) if self.is_sole_writer() && attr.size == *offset => Ok(None),
            Ok(FileReply::Attr(attr))
                if self.is_sole_writer() && length > 0 && attr.size == offset + length =>
            {
                Ok(Some(FileReply::Written { length }))
            }
            _ => Err(self.unproved_failure("an append")),
        }
    }

    /// What a name leads to now, in the session's numbers; counts no reference.
    pub(super) async fn find_name(
        &self,
        link: &SessionLink,
        parent: InodeNo,
        name: &ByName,
        deadline: Deadline,
    ) -> Result<Option<Attr>, SessionFailure> {
        match self.look_up(link, parent, name, deadline).await? {
            Some(FileReply::Attr(attr)) => {
                let (ino, count) = (attr.ino, 1);
                self.queue_forget(link.tree_session.epoch, FileOp::Forget { ino, count });
                Ok(Some(attr))
            }
            _ => Ok(None),
        }
    }

    async fn look_up(
        &self,
        link: &SessionLink,
        parent: InodeNo,
        name: &ByName,
        deadline: Deadline,
    ) -> Result<Option<FileReply>, SessionFailure> {
        if !self.is_sole_writer() {
            return Err(self.unproved_failure("a change of names"));
        }
        let parent = self
            .provide_object(link, MissingObject::File(parent), deadline)
            .await?;
        let name = name.clone();
        let op = FileOp::Lookup { parent, name };
        let (result, _) = self
            .run_in_session(link, Caller::default(), op, &Bytes::new(), deadline)
            .await?;
        match result {
            Ok(reply @ FileReply::Attr(_)) => Ok(Some(reply)),
            Err(Errno(libc::ENOENT | libc::ENAMETOOLONG)) => Ok(None),
            _ => Err(self.unproved_failure("a change of names")),
        }
    }

    fn unproved_failure(&self, what: &str) -> SessionFailure {
        let text = format!("it is unknown whether {what} was complete when the server stopped");
        self.fail_volume(Error::new(ErrorCode::SessionUnknown, text))
    }
}
