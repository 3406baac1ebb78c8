//! Goes on with a tree after its server forgot the session: opens it again, finds files and
//! handles again by what they are, and finds out what became of operations that were under way.
//! What cannot be proved is never guessed: then the volume is lost.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bafs_proto::file_op::{Attr, ByName, Caller, Errno, FileOp, FileReply};
use bafs_proto::ids::{HandleId, InodeNo};
use bafs_proto::message::{AssignedNumbers, OpenTree, TreeRef};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode};
use bytes::Bytes;
use nix::libc;

use tokio::sync::MutexGuard;

use super::{RemoteSession, SessionFailure, SessionLink};
use crate::logic::inode_map::{InodeRoute, MissingObject, OpenParameters};

/// What an open flag does once must not be done again.
const ONE_TIME_FLAGS: i32 = libc::O_TRUNC | libc::O_CREAT | libc::O_EXCL;

/// How often a file that is not found is looked for at least: a rename may just have ended.
const LOCATE_ATTEMPTS_MIN: u32 = 3;

/// Pause between two looks.
const LOCATE_PAUSE: Duration = Duration::from_millis(20);

impl RemoteSession {
    /// Opens the tree again, unless somebody else has done so since `link` was made.
    pub(in crate::tree) async fn reopen_session(
        &self,
        link: &SessionLink,
        deadline: Deadline,
    ) -> Result<(), SessionFailure> {
        let _turn = self.lock_recovery(deadline).await?;
        if self.link().tree_session.epoch != link.tree_session.epoch {
            return Ok(());
        }
        let server = &self.server;
        let call = OpenTree {
            tree: self.tree.clone(),
            agent: self.agent,
            writable: self.is_writable,
            resumed_incarnation: Some(link.tree_session.machine_incarnation),
        };
        let calling = server.pool.call_with_retries(
            &server.address,
            &server.token,
            call,
            Bytes::new(),
            deadline,
        );
        match self.health.run_unless_lost(calling).await {
            Some(Ok((opened, _))) => {
                tracing::warn!(
                    address = server.address,
                    tree = ?self.tree,
                    "the server had lost the session; resuming it"
                );
                self.set_link(opened);
                Ok(())
            }
            Some(Err(error)) => Err(self.fail_volume(error)),
            None => Err(SessionFailure::CallFailed(ErrorCode::VolumeLost)),
        }
    }

    /// The operation in numbers of the present session, which is given what it lacks first.
    pub(super) async fn translate(
        &self,
        link: &SessionLink,
        op: &FileOp,
        deadline: Deadline,
    ) -> Result<FileOp, SessionFailure> {
        loop {
            let translated = {
                let known = self.inode_map();
                if known.epoch() != link.tree_session.epoch {
                    return Err(SessionFailure::SessionForgotten { maybe_ran: false });
                }
                known.translate(op)
            };
            match translated {
                Ok(op) => return Ok(op),
                Err(missing) => drop(self.provide_object(link, missing, deadline).await?),
            }
        }
    }

    /// Gives the session something that it lacks; for a file the answer is its number.
    async fn provide_object(
        &self,
        link: &SessionLink,
        missing: MissingObject,
        deadline: Deadline,
    ) -> Result<InodeNo, SessionFailure> {
        let mut attempts = 0;
        loop {
            let turn = self.lock_recovery(deadline).await?;
            if self.inode_map().epoch() != link.tree_session.epoch {
                return Err(SessionFailure::SessionForgotten { maybe_ran: false });
            }
            // Somebody may have provided it meanwhile, which these then notice.
            let provided = match missing {
                MissingObject::File(ino) => self.locate_file(link, ino, deadline).await,
                MissingObject::Handle(handle) => self.reopen_handle(link, handle, deadline).await,
            };
            drop(turn);
            match provided {
                Err(SessionFailure::FileMissing(why)) => {
                    // It may be on its way from one name to another.
                    attempts += 1;
                    let waits = attempts < LOCATE_ATTEMPTS_MIN || self.has_inflight_renames();
                    if !waits || deadline.remaining() <= LOCATE_PAUSE {
                        return Err(self.missing_failure(&why));
                    }
                    tokio::time::sleep(LOCATE_PAUSE).await;
                }
                provided => return provided,
            }
        }
    }

    async fn lock_recovery(
        &self,
        deadline: Deadline,
    ) -> Result<MutexGuard<'_, ()>, SessionFailure> {
        let turn = tokio::time::timeout_at(deadline.instant().into(), self.recovery_lock.lock());
        turn.await.map_err(|_| {
            let text = "it did not answer in time";
            self.fail_volume(Error::new(ErrorCode::DeadlineExceeded, text))
        })
    }

    /// Finds a file again, with the directories that lead to it.
    async fn locate_file(
        &self,
        link: &SessionLink,
        ino: InodeNo,
        deadline: Deadline,
    ) -> Result<InodeNo, SessionFailure> {
        let mut wanted = vec![ino];
        loop {
            let Some(&file) = wanted.last() else {
                return Err(file_missing("a directory is below itself"));
            };
            let (way, parent_way) = {
                let known = self.inode_map();
                let way = known.route(file);
                let parent_way = match &way {
                    InodeRoute::ByName(parent, _) => known.route(*parent),
                    _ => InodeRoute::Unreachable,
                };
                (way, parent_way)
            };
            match (way, parent_way) {
                (InodeRoute::Present(found), _) => {
                    wanted.pop();
                    if wanted.is_empty() {
                        return Ok(found);
                    }
                }
                (InodeRoute::ByName(_, name), InodeRoute::Present(parent)) => {
                    self.locate_by_name(link, file, parent, name, deadline)
                        .await?;
                }
                (InodeRoute::ByName(parent, _), InodeRoute::ByName(..))
                    if !wanted.contains(&parent) =>
                {
                    wanted.push(parent);
                }
                // It was removed, and nobody reads or writes it: who has its number looks again.
                (InodeRoute::Unreachable, _) if file == ino && !self.inode_map().is_open(ino) => {
                    return Err(SessionFailure::OperationRefused(Errno(libc::ESTALE)));
                }
                _ => {
                    return Err(file_missing("an open file of the job no longer has a name"));
                }
            }
        }
    }

    async fn locate_by_name(
        &self,
        link: &SessionLink,
        ino: InodeNo,
        parent: InodeNo,
        name: ByName,
        deadline: Deadline,
    ) -> Result<(), SessionFailure> {
        let shown = String::from_utf8_lossy(&name).into_owned();
        let op = FileOp::Lookup { parent, name };
        let (result, _) = self
            .run_in_session(link, Caller::default(), op, &Bytes::new(), deadline)
            .await?;
        match result {
            Ok(FileReply::Attr(attr)) => {
                let mut known = self.inode_map();
                if known.epoch() != link.tree_session.epoch {
                    return Err(SessionFailure::SessionForgotten { maybe_ran: false });
                }
                if known.rebind_found(ino, &attr) {
                    return Ok(());
                }
                drop(known);
                Err(file_missing(format!("'{shown}' is another file now")))
            }
            other => Err(file_missing(format!("'{shown}' is not found: {other:?}"))),
        }
    }

    async fn reopen_handle(
        &self,
        link: &SessionLink,
        handle: HandleId,
        deadline: Deadline,
    ) -> Result<InodeNo, SessionFailure> {
        let (opening, is_stale, promised) = {
            let known = self.inode_map();
            let promised = known.deferred_number(handle);
            (
                known.open_parameters(handle),
                known.is_stale(handle),
                promised,
            )
        };
        let Some(OpenParameters {
            ino,
            flags,
            is_directory,
        }) = opening
        else {
            return Err(SessionFailure::OperationRefused(Errno(libc::EBADF)));
        };
        if !is_stale {
            return Ok(ino);
        }
        let ino = self.locate_file(link, ino, deadline).await?;
        let flags = flags & !ONE_TIME_FLAGS;
        let op = if is_directory {
            FileOp::OpenDirectory { ino }
        } else {
            FileOp::Open { ino, flags }
        };
        let (sequence, after, mut given) = link.unordered_numbers();
        given.extend(promised.map(|handle| AssignedNumbers {
            op_index: 0,
            ino: None,
            handle: Some(handle),
        }));
        let batch = (vec![op], (sequence, after, given));
        let caller = Caller::default();
        let (mut results, _) = self
            .run_batch(link, caller, batch, &Bytes::new(), deadline)
            .await?;
        match results.pop() {
            Some(Ok(FileReply::Opened { handle: opened, .. })) => {
                let mut known = self.inode_map();
                if known.epoch() != link.tree_session.epoch {
                    return Err(SessionFailure::SessionForgotten { maybe_ran: false });
                }
                known.reopen(handle, opened);
                Ok(ino)
            }
            other => Err(file_missing(format!(
                "a file does not open again: {other:?}"
            ))),
        }
    }

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

    pub(super) fn is_sole_writer(&self) -> bool {
        self.is_writable && matches!(self.tree, TreeRef::Volume(_))
    }

    fn unproved_failure(&self, what: &str) -> SessionFailure {
        let text = format!("it is unknown whether {what} was complete when the server stopped");
        self.fail_volume(Error::new(ErrorCode::SessionUnknown, text))
    }

    /// What the job uses is not there as it was. Where others write too that is one file's affair.
    fn missing_failure(&self, why: &str) -> SessionFailure {
        if !self.is_sole_writer() {
            tracing::warn!(tree = ?self.tree, why, "a stale file");
            return SessionFailure::OperationRefused(Errno(libc::ESTALE));
        }
        self.fail_volume(Error::new(ErrorCode::SessionUnknown, why))
    }

    fn fail_volume(&self, error: Error) -> SessionFailure {
        let doing = format!(
            "the server at {} restarted, and the job cannot continue",
            self.server.address
        );
        let code = error.code;
        self.health.mark_lost(error.context(doing));
        SessionFailure::CallFailed(code)
    }
}

/// Counts an operation that takes a name away, as long as it is under way.
pub(super) struct InflightRename<'a>(Option<&'a AtomicUsize>);

impl<'a> InflightRename<'a> {
    pub(super) fn begin(session: &'a RemoteSession, op: &FileOp) -> Self {
        let counter = match op {
            FileOp::Unlink { .. } | FileOp::RemoveDirectory { .. } | FileOp::Rename { .. } => {
                session.inflight_renames.fetch_add(1, Ordering::AcqRel);
                Some(&session.inflight_renames)
            }
            _ => None,
        };
        Self(counter)
    }
}

impl Drop for InflightRename<'_> {
    fn drop(&mut self) {
        if let Some(counter) = self.0 {
            counter.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn file_missing(why: impl Into<String>) -> SessionFailure {
    SessionFailure::FileMissing(why.into())
}
