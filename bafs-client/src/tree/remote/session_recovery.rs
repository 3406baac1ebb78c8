//! Goes on with a tree after its server forgot the session: opens it again, and finds files and
//! handles again by what they are. What cannot be proved is never guessed: then the volume is
//! lost. What became of operations that were under way is found out in `operation_outcome.rs`.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bafs_proto::file_op::{ByName, Caller, Errno, FileOp, FileReply, FileResult};
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
            yields: false,
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
    pub(super) async fn provide_object(
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

    /// Opens a file that no session was told of, and reads it, with one call. Nothing where that
    /// is not the case, or somebody else is about to open something.
    pub(super) async fn open_and_read(
        &self,
        link: &SessionLink,
        op: &FileOp,
        deadline: Deadline,
    ) -> Result<Option<(FileResult, Bytes)>, SessionFailure> {
        let FileOp::Read {
            handle,
            offset,
            length,
        } = *op
        else {
            return Ok(None);
        };
        let Ok(_turn) = self.recovery_lock.try_lock() else {
            return Ok(None);
        };
        let open = {
            let known = self.inode_map();
            let is_fit = known.epoch() == link.tree_session.epoch && known.is_deferred_read(op);
            let opening = known.open_parameters(handle).filter(|_| is_fit);
            opening
                .zip(known.deferred_number(handle))
                .and_then(|it| match known.route(it.0.ino) {
                    InodeRoute::Present(ino) => Some((ino, it.0.flags, it.1)),
                    InodeRoute::ByName(..) | InodeRoute::Unreachable => None,
                })
        };
        let Some((ino, flags, number)) = open else {
            return Ok(None);
        };
        let flags = flags & !ONE_TIME_FLAGS;
        let read = FileOp::Read {
            handle: number,
            offset,
            length,
        };
        let (sequence, after, mut given) = link.unordered_numbers();
        given.push(AssignedNumbers {
            op_index: 0,
            ino: None,
            handle: Some(number),
        });
        let batch = (
            vec![FileOp::Open { ino, flags }, read],
            (sequence, after, given),
        );
        let caller = Caller::default();
        let (mut results, body) = self
            .run_batch(link, caller, batch, &Bytes::new(), deadline)
            .await?;
        let read = results.pop();
        match (results.pop(), read) {
            (Some(Ok(FileReply::Opened { handle: opened, .. })), Some(read)) => {
                let mut known = self.inode_map();
                if known.epoch() != link.tree_session.epoch {
                    return Err(SessionFailure::SessionForgotten { maybe_ran: false });
                }
                known.reopen(handle, opened);
                Ok(Some((read, body)))
            }
            // Whoever opens it alone knows what to do.
            _ => Ok(None),
        }
    }

    pub(super) fn is_sole_writer(&self) -> bool {
        self.is_writable && matches!(self.tree, TreeRef::Volume(_))
    }

    /// What the job uses is not there as it was. Where others write too that is one file's affair.
    fn missing_failure(&self, why: &str) -> SessionFailure {
        if !self.is_sole_writer() {
            tracing::warn!(tree = ?self.tree, why, "a stale file");
            return SessionFailure::OperationRefused(Errno(libc::ESTALE));
        }
        self.fail_volume(Error::new(ErrorCode::SessionUnknown, why))
    }

    pub(super) fn fail_volume(&self, error: Error) -> SessionFailure {
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
