//! Goes on with a tree after its server forgot the session: opens it again, finds files and
//! handles again by what they are, and finds out what became of operations that were under way.
//! What cannot be proved is never guessed: then the volume is lost.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bafs_proto::file_op::{Attr, Caller, Errno, FileOp, FileReply, Name};
use bafs_proto::ids::{HandleId, InodeNo};
use bafs_proto::message::{GivenNumbers, OpenTree, TreeRef};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode};
use bytes::Bytes;
use nix::libc;

use tokio::sync::MutexGuard;

use super::{Link, Session, Trouble};
use crate::logic::known::{Missing, Opening, Way};

/// What an open flag does once must not be done again.
const ONCE: i32 = libc::O_TRUNC | libc::O_CREAT | libc::O_EXCL;

/// How often a file that is not found is looked for at least: a rename may just have ended.
const ATTEMPTS_MIN: u32 = 3;

/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(20);

impl Session {
    /// Opens the tree again, unless somebody else has done so since `link` was made.
    pub(in crate::tree) async fn resume(
        &self,
        link: &Link,
        deadline: Deadline,
    ) -> Result<(), Trouble> {
        let _turn = self.take_turn(deadline).await?;
        if self.link().opened.epoch != link.opened.epoch {
            return Ok(());
        }
        let server = &self.server;
        let call = OpenTree {
            tree: self.tree.clone(),
            agent: self.agent,
            writable: self.writable,
            resumes: Some(link.opened.machine),
        };
        let calling =
            server
                .pool
                .call_until(&server.address, &server.token, call, Bytes::new(), deadline);
        match self.fate.while_there(calling).await {
            Some(Ok((opened, _))) => {
                tracing::warn!(
                    address = server.address,
                    tree = ?self.tree,
                    "the server had forgotten the session; it goes on"
                );
                self.relink(opened);
                Ok(())
            }
            Some(Err(error)) => Err(self.give_up(error)),
            None => Err(Trouble::Failed(ErrorCode::VolumeLost)),
        }
    }

    /// The operation in numbers of the present session, which is given what it lacks first.
    pub(super) async fn translate(
        &self,
        link: &Link,
        op: &FileOp,
        deadline: Deadline,
    ) -> Result<FileOp, Trouble> {
        loop {
            let translated = {
                let known = self.known();
                if known.epoch() != link.opened.epoch {
                    return Err(Trouble::Forgotten { maybe_ran: false });
                }
                known.translate(op)
            };
            match translated {
                Ok(op) => return Ok(op),
                Err(missing) => drop(self.provide(link, missing, deadline).await?),
            }
        }
    }

    /// Gives the session something that it lacks; for a file the answer is its number.
    async fn provide(
        &self,
        link: &Link,
        missing: Missing,
        deadline: Deadline,
    ) -> Result<InodeNo, Trouble> {
        let mut attempts = 0;
        loop {
            let turn = self.take_turn(deadline).await?;
            if self.known().epoch() != link.opened.epoch {
                return Err(Trouble::Forgotten { maybe_ran: false });
            }
            // Somebody may have provided it meanwhile, which these then notice.
            let provided = match missing {
                Missing::File(ino) => self.place(link, ino, deadline).await,
                Missing::Handle(handle) => self.open_again(link, handle, deadline).await,
            };
            drop(turn);
            match provided {
                Err(Trouble::NotThere(why)) => {
                    // It may be on its way from one name to another.
                    attempts += 1;
                    let waits = attempts < ATTEMPTS_MIN || self.is_renaming();
                    if !waits || deadline.left() <= PAUSE {
                        return Err(self.cannot_go_on(&why));
                    }
                    tokio::time::sleep(PAUSE).await;
                }
                provided => return provided,
            }
        }
    }

    async fn take_turn(&self, deadline: Deadline) -> Result<MutexGuard<'_, ()>, Trouble> {
        let turn = tokio::time::timeout_at(deadline.instant().into(), self.turn.lock());
        turn.await.map_err(|_| {
            let text = "it did not answer in time";
            self.give_up(Error::new(ErrorCode::DeadlineExceeded, text))
        })
    }

    /// Finds a file again, with the directories that lead to it.
    async fn place(
        &self,
        link: &Link,
        ino: InodeNo,
        deadline: Deadline,
    ) -> Result<InodeNo, Trouble> {
        let mut wanted = vec![ino];
        loop {
            let Some(&file) = wanted.last() else {
                return Err(not_there("a directory is below itself"));
            };
            let (way, parent_way) = {
                let known = self.known();
                let way = known.way(file);
                let parent_way = match &way {
                    Way::Name(parent, _) => known.way(*parent),
                    _ => Way::Gone,
                };
                (way, parent_way)
            };
            match (way, parent_way) {
                (Way::Here(found), _) => {
                    wanted.pop();
                    if wanted.is_empty() {
                        return Ok(found);
                    }
                }
                (Way::Name(_, name), Way::Here(parent)) => {
                    self.find_again(link, file, parent, name, deadline).await?;
                }
                (Way::Name(parent, _), Way::Name(..)) if !wanted.contains(&parent) => {
                    wanted.push(parent);
                }
                // It was removed, and nobody reads or writes it: who has its number looks again.
                (Way::Gone, _) if file == ino && !self.known().is_open(ino) => {
                    return Err(Trouble::Refused(Errno(libc::ESTALE)));
                }
                _ => {
                    return Err(not_there("a file that the job uses has no name any more"));
                }
            }
        }
    }

    async fn find_again(
        &self,
        link: &Link,
        ino: InodeNo,
        parent: InodeNo,
        name: Name,
        deadline: Deadline,
    ) -> Result<(), Trouble> {
        let shown = String::from_utf8_lossy(&name).into_owned();
        let op = FileOp::Lookup { parent, name };
        let (result, _) = self
            .ask(link, Caller::default(), op, &Bytes::new(), deadline)
            .await?;
        match result {
            Ok(FileReply::Attr(attr)) => {
                let mut known = self.known();
                if known.epoch() != link.opened.epoch {
                    return Err(Trouble::Forgotten { maybe_ran: false });
                }
                if known.find_again(ino, &attr) {
                    return Ok(());
                }
                drop(known);
                Err(not_there(format!("'{shown}' is another file now")))
            }
            other => Err(not_there(format!("'{shown}' is not found: {other:?}"))),
        }
    }

    async fn open_again(
        &self,
        link: &Link,
        handle: HandleId,
        deadline: Deadline,
    ) -> Result<InodeNo, Trouble> {
        let (opening, is_stale, promised) = {
            let known = self.known();
            let promised = known.promised(handle);
            (known.opening(handle), known.is_stale(handle), promised)
        };
        let Some(Opening {
            ino,
            flags,
            is_directory,
        }) = opening
        else {
            return Err(Trouble::Refused(Errno(libc::EBADF)));
        };
        if !is_stale {
            return Ok(ino);
        }
        let ino = self.place(link, ino, deadline).await?;
        let flags = flags & !ONCE;
        let op = if is_directory {
            FileOp::OpenDirectory { ino }
        } else {
            FileOp::Open { ino, flags }
        };
        let (sequence, after, mut given) = link.number();
        given.extend(promised.map(|handle| GivenNumbers {
            op: 0,
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
                let mut known = self.known();
                if known.epoch() != link.opened.epoch {
                    return Err(Trouble::Forgotten { maybe_ran: false });
                }
                known.open_again(handle, opened);
                Ok(ino)
            }
            other => Err(not_there(format!("a file does not open again: {other:?}"))),
        }
    }

    /// Finds out whether an operation ran in the forgotten session: its answer if it did, `None`
    /// if it may run (again). The kernel keeps others from the names of an operation while it is
    /// under way, and nobody else writes a volume: so names tell.
    pub(super) async fn look(
        &self,
        link: &Link,
        op: &FileOp,
        deadline: Deadline,
    ) -> Result<Option<FileReply>, Trouble> {
        match op {
            FileOp::Create { parent, name, .. }
            | FileOp::MakeNode { parent, name, .. }
            | FileOp::MakeSymlink { parent, name, .. }
            | FileOp::MakeDirectory { parent, name, .. } => {
                self.unmake(link, *parent, name, deadline).await?;
                Ok(None)
            }
            FileOp::MakeLink { ino, parent, name } => {
                let Some(found) = self.find(link, *parent, name, deadline).await? else {
                    return Ok(None);
                };
                if self.provide(link, Missing::File(*ino), deadline).await? != found.ino {
                    return Err(self.unproved("a link"));
                }
                // The kernel is to have a reference of its own.
                self.look_up(link, *parent, name, deadline).await
            }
            FileOp::Unlink { parent, name } | FileOp::RemoveDirectory { parent, name } => {
                let found = self.find(link, *parent, name, deadline).await?;
                Ok(found.is_none().then_some(FileReply::Done))
            }
            FileOp::Rename { .. } => self.look_at_rename(link, op, deadline).await,
            FileOp::Write { append: true, .. } => self.look_at_append(link, op, deadline).await,
            FileOp::SetXattr { flags, .. } if *flags & libc::XATTR_CREATE == 0 => Ok(None),
            FileOp::SetXattr { .. } | FileOp::RemoveXattr { .. } => {
                Err(self.unproved("a change of an extended attribute"))
            }
            FileOp::Allocate { mode, .. } => {
                let shifts = libc::FALLOC_FL_COLLAPSE_RANGE | libc::FALLOC_FL_INSERT_RANGE;
                if mode & shifts == 0 {
                    return Ok(None);
                }
                Err(self.unproved("a shift of a file's content"))
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
    async fn unmake(
        &self,
        link: &Link,
        parent: InodeNo,
        name: &Name,
        deadline: Deadline,
    ) -> Result<(), Trouble> {
        let Some(found) = self.find(link, parent, name, deadline).await? else {
            return Ok(());
        };
        let is_directory = found.is_directory();
        let is_empty = is_directory || found.is_symlink() || found.size == 0;
        let is_new = self.known().named(parent, name).is_none();
        // The kernel makes only what it knows not to be there; if this looks otherwise, something
        // is wrong, and nothing is removed.
        if !is_empty || !is_new || (!is_directory && found.nlink != 1) {
            return Err(self.unproved("the making of a file"));
        }
        let (place, name) = (parent, name.clone());
        let parent = self.provide(link, Missing::File(place), deadline).await?;
        let op = if is_directory {
            FileOp::RemoveDirectory { parent, name }
        } else {
            FileOp::Unlink { parent, name }
        };
        let (result, _) = self
            .ask(link, Caller::default(), op, &Bytes::new(), deadline)
            .await?;
        match result {
            Ok(_) => Ok(()),
            Err(_) => Err(self.unproved("the making of a file")),
        }
    }

    async fn look_at_rename(
        &self,
        link: &Link,
        op: &FileOp,
        deadline: Deadline,
    ) -> Result<Option<FileReply>, Trouble> {
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
        let Some(found) = self.find(link, *parent, name, deadline).await? else {
            return Ok(Some(FileReply::Done));
        };
        if flags & libc::RENAME_EXCHANGE == 0 {
            return Ok(None);
        }
        let (one, other) = {
            let known = self.known();
            (
                known.named(*parent, name),
                known.named(*new_parent, new_name),
            )
        };
        let (Some(one), Some(other)) = (one, other) else {
            return Err(self.unproved("an exchange of names"));
        };
        match found.ino {
            ino if ino == one => Ok(None),
            ino if ino == other => Ok(Some(FileReply::Done)),
            _ => Err(self.unproved("an exchange of names")),
        }
    }

    /// The kernel says where it believed the end of the file to be, and nobody else appends.
    async fn look_at_append(
        &self,
        link: &Link,
        op: &FileOp,
        deadline: Deadline,
    ) -> Result<Option<FileReply>, Trouble> {
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
        let opening = self.known().opening(*handle);
        let Some(Opening { ino, .. }) = opening else {
            return Err(Trouble::Refused(Errno(libc::EBADF)));
        };
        let place = self.provide(link, Missing::File(ino), deadline).await?;
        let op = FileOp::GetAttr {
            ino: place,
            handle: None,
        };
        let (result, _) = self
            .ask(link, Caller::default(), op, &Bytes::new(), deadline)
            .await?;
        match result {
            Ok(FileReply::Attr(attr)) if self.is_sole_writer() && attr.size == *offset => Ok(None),
            Ok(FileReply::Attr(attr))
                if self.is_sole_writer() && length > 0 && attr.size == offset + length =>
            {
                Ok(Some(FileReply::Written { length }))
            }
            _ => Err(self.unproved("an append")),
        }
    }

    /// What a name leads to now, in the session's numbers; counts no reference.
    pub(super) async fn find(
        &self,
        link: &Link,
        parent: InodeNo,
        name: &Name,
        deadline: Deadline,
    ) -> Result<Option<Attr>, Trouble> {
        match self.look_up(link, parent, name, deadline).await? {
            Some(FileReply::Attr(attr)) => {
                let (ino, count) = (attr.ino, 1);
                self.queue(link.opened.epoch, FileOp::Forget { ino, count });
                Ok(Some(attr))
            }
            _ => Ok(None),
        }
    }

    async fn look_up(
        &self,
        link: &Link,
        parent: InodeNo,
        name: &Name,
        deadline: Deadline,
    ) -> Result<Option<FileReply>, Trouble> {
        if !self.is_sole_writer() {
            return Err(self.unproved("a change of names"));
        }
        let parent = self.provide(link, Missing::File(parent), deadline).await?;
        let name = name.clone();
        let op = FileOp::Lookup { parent, name };
        let (result, _) = self
            .ask(link, Caller::default(), op, &Bytes::new(), deadline)
            .await?;
        match result {
            Ok(reply @ FileReply::Attr(_)) => Ok(Some(reply)),
            Err(Errno(libc::ENOENT | libc::ENAMETOOLONG)) => Ok(None),
            _ => Err(self.unproved("a change of names")),
        }
    }

    pub(super) fn is_sole_writer(&self) -> bool {
        self.writable && matches!(self.tree, TreeRef::Volume(_))
    }

    fn unproved(&self, what: &str) -> Trouble {
        let text = format!("whether {what} was done when the server stopped cannot be told");
        self.give_up(Error::new(ErrorCode::SessionUnknown, text))
    }

    /// What the job uses is not there as it was. Where others write too that is one file's affair.
    fn cannot_go_on(&self, why: &str) -> Trouble {
        if !self.is_sole_writer() {
            tracing::warn!(tree = ?self.tree, why, "a stale file");
            return Trouble::Refused(Errno(libc::ESTALE));
        }
        self.give_up(Error::new(ErrorCode::SessionUnknown, why))
    }

    fn give_up(&self, error: Error) -> Trouble {
        let doing = format!(
            "the server at {} restarted under the job, which cannot go on",
            self.server.address
        );
        let code = error.code;
        self.fate.lose(error.context(doing));
        Trouble::Failed(code)
    }
}

/// Counts an operation that takes a name away, as long as it is under way.
pub(super) struct Renaming<'a>(Option<&'a AtomicUsize>);

impl<'a> Renaming<'a> {
    pub(super) fn of(session: &'a Session, op: &FileOp) -> Self {
        let counter = match op {
            FileOp::Unlink { .. } | FileOp::RemoveDirectory { .. } | FileOp::Rename { .. } => {
                session.renaming.fetch_add(1, Ordering::AcqRel);
                Some(&session.renaming)
            }
            _ => None,
        };
        Self(counter)
    }
}

impl Drop for Renaming<'_> {
    fn drop(&mut self) {
        if let Some(counter) = self.0 {
            counter.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn not_there(why: impl Into<String>) -> Trouble {
    Trouble::NotThere(why.into())
}
