//! A tree behind a server: a scratch volume of another node, or a directory of a home.
//!
//! [`RemoteTree`] has one session with the server. Each operation is a call with a batch of one.
//! The writer of a scratch volume may reply to the program before the server does (delegation).
//!
//! ```text
//!  run ─┬─ not delegated ─▶ run_operation ─▶ translate numbers ─▶ RunFileOps ─▶ server
//!       └─ delegated ─▶ logic::delegation decides ─┬─ reply now, append to the operation log
//!                                                  └─ ask the server after a position of the log
//!                           log_shipping.rs: log ─▶ batches in order ─▶ server
//! ```
//!
//! * `InodeMap` maps the kernel's inode numbers and handles to those of the session. The kernel's
//!   numbers stay, but each incarnation of the server has its own.
//! * `small_file_reads.rs` reads small files whole, several by one call.
//! * `file_sync.rs` makes files durable while what was written is on its way.
//! * `reader_files.rs` opens small files without the server, for sessions that only read.
//! * `begun_task.rs` lets a thread of the kernel's requests send by itself.
//! * `call_retry.rs` repeats a call until its deadline. `InProgress`, or any reply to this session,
//!   extends the deadline, up to 20 times.
//! * Batches carry numbers, so a repeated call never runs an operation twice.
//! * `session_recovery.rs` acts when the server answers `SessionUnknown` after a restart. It opens
//!   the tree again, finds files and handles by what they are, and finds out whether operations
//!   under way have run.
//! * `forget_queue.rs` tells the server which files the kernel dropped. That also renews the lease,
//!   as does an empty batch each second.
//!
//! **Errors.** An operation returns its errno. Every other error loses the volume: the deadline
//! passed, `Fenced`, `VolumeLost`, or a state that cannot be proven after a restart. `NoSpace`
//! alone is survivable. `VolumeHealth` reports the first loss to the job, and the program gets an
//! errno.
//!
//! **Concurrency.** An operation runs in the calling thread until it waits for its reply, and then
//! as a task of the runtime. The inode map has a mutex that is held over no call. One task at a
//! time recovers a session (`recovery_lock`), and the others wait for it.
//!
//! **End.** [`RemoteTree`] is closed after the log is at the server. An agent that is killed leaves
//! the session to its lease (60 s) or to the next writer.
//! `docs/decisions/0013-resume-after-server-restart.md` and `0018-write-delegation.md` have the
//! reasons.

mod begun_task;
mod call_retry;
mod delegation;
mod fetch_ahead;
mod file_sync;
mod forget_queue;
mod log_recovery;
mod log_shipping;
mod log_waits;
mod name_listing;
mod operation_outcome;
mod reader_files;
mod reply_translation;
mod session_recovery;
mod small_file_reads;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use bafs_proto::buffer::Buffer;
use bafs_proto::file_op::{Caller, Errno, FileOp, FileReply, FileResult, TreeStat};
use bafs_proto::ids::{AgentId, Epoch, InodeNo};
use bafs_proto::message::{
    AssignedNumbers, CloseTree, FileResults, OpenTree, RunFileOps, TreeRef, TreeSession,
};
use bafs_proto::time::{Deadline, KeepaliveDeadline};
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use self::begun_task::{BegunTask, begin_here};
pub use self::delegation::Durability;
use self::delegation::{EarlyAnswer, SessionDelegation, errno_of_failure};
use self::session_recovery::InflightRename;
use super::completion::Completion;
use super::server::Server;
use crate::clock;
use crate::limits::{
    CLOSE_AND_EXTEND_TIMEOUT_MS, CLOSE_TIMEOUT_MS, FORGET_BATCH_MAX, RETRY_PAUSE_MS_MIN,
};
use crate::logic::attribute_updates::is_change;
use crate::logic::inode_map::InodeMap;
use crate::logic::reader_files::ReaderFiles;
use crate::logic::small_files::FetchAhead;
use crate::volume_health::{VolumeHealth, is_fatal};

/// A session with a tree of a server.
#[derive(Debug)]
pub struct RemoteTree {
    session: Arc<RemoteSession>,
    runtime: Handle,
    renewal_task: JoinHandle<()>,
    shipping_task: OnceLock<Arc<BegunTask>>,
}

/// State of an agent's session with a tree, over all incarnations of its server.
#[derive(Debug)]
pub(super) struct RemoteSession {
    pub(super) server: Server,
    pub(super) tree: TreeRef,
    pub(super) agent: AgentId,
    pub(super) is_writable: bool,
    pub(super) health: VolumeHealth,
    link: Mutex<SessionLink>,
    inode_map: Mutex<InodeMap>,
    /// Who makes the session again, or finds a file again, does so alone.
    pub(super) recovery_lock: tokio::sync::Mutex<()>,
    /// Operations under way that take names away: what is not found may be found when they end.
    pub(super) inflight_renames: AtomicUsize,
    /// When the server last answered anything.
    pub(super) last_reply_at: Mutex<Instant>,
    /// References that the kernel dropped; nobody waits for them, so they travel together.
    pub(super) forgets: Mutex<(Epoch, Vec<FileOp>)>,
    /// Set before the session is ended on purpose.
    is_closing: AtomicBool,
    /// What the one writer of a volume may answer by itself.
    delegation: OnceLock<SessionDelegation>,
    /// Small files of a volume that is only read.
    reader_files: Option<Mutex<ReaderFiles>>,
}

/// A session as one life of the server knows it.
#[derive(Debug, Clone)]
pub(super) struct SessionLink {
    pub(super) tree_session: TreeSession,
    /// The last number given to a batch.
    sequence: Arc<AtomicU64>,
}

/// The number of a batch, that of the batch that must run before it, and how it calls what it
/// makes.
pub(super) type BatchNumbers = (u64, Option<u64>, Vec<AssignedNumbers>);

/// Why operations have no result.
#[derive(Debug)]
pub(super) enum SessionFailure {
    /// The server does not know the session any more. Whether the operations may have run in it.
    SessionForgotten { maybe_ran: bool },
    /// A file is not where it was; the text says which.
    FileMissing(String),
    /// An operation fails by itself.
    OperationRefused(Errno),
    /// The call failed for good; what that means for the volume is done.
    CallFailed(ErrorCode),
}

impl SessionLink {
    pub(super) fn new(opened: TreeSession) -> Self {
        Self {
            tree_session: opened,
            sequence: Arc::default(),
        }
    }

    /// The number of a batch that begins now.
    pub(super) fn next_sequence(&self) -> u64 {
        self.sequence.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The numbers of a batch that may run at any time.
    pub(super) fn unordered_numbers(&self) -> BatchNumbers {
        (self.next_sequence(), None, Vec::new())
    }
}

impl RemoteTree {
    /// Opens a tree and keeps its lease alive. Must be called within a tokio runtime, which then
    /// makes all calls.
    ///
    /// # Errors
    /// What the server answers, or the last transient error when the deadline passes.
    pub async fn open(
        server: Server,
        tree: TreeRef,
        agent: AgentId,
        writable: bool,
        health: VolumeHealth,
    ) -> Result<Self> {
        let call = OpenTree {
            tree: tree.clone(),
            agent,
            writable,
            yields: false,
            resumed_incarnation: None,
        };
        let deadline = server.deadline();
        let (opened, _) = server
            .pool
            .call_with_retries(&server.address, &server.token, call, Bytes::new(), deadline)
            .await?;
        let mut known = InodeMap::new(opened.epoch);
        known.set_early_handles_max(opened.early_handles_max);
        let session = Arc::new(RemoteSession {
            reader_files: Self::reader_files(&tree, writable),
            server,
            tree,
            agent,
            is_writable: writable,
            health,
            link: Mutex::new(SessionLink::new(opened)),
            inode_map: Mutex::new(known),
            recovery_lock: tokio::sync::Mutex::default(),
            inflight_renames: AtomicUsize::new(0),
            last_reply_at: Mutex::new(clock::now()),
            forgets: Mutex::new((opened.epoch, Vec::new())),
            is_closing: AtomicBool::new(false),
            delegation: OnceLock::new(),
        });
        let renewal = tokio::spawn(Arc::clone(&session).renew_lease());
        Ok(Self {
            session,
            runtime: Handle::current(),
            renewal_task: renewal,
            shipping_task: OnceLock::new(),
        })
    }

    /// Those of a session that only reads a volume. In a home, only the server knows who may open a
    /// file.
    fn reader_files(tree: &TreeRef, is_writable: bool) -> Option<Mutex<ReaderFiles>> {
        let is_reader = matches!(tree, TreeRef::Volume(_)) && !is_writable;
        is_reader.then(Mutex::default)
    }

    /// From now on answers what is sure to succeed before the server has run it, if this session
    /// is the one writer of a volume; an agent's death loses nothing that is promised. Must be
    /// called within a tokio runtime.
    pub async fn delegate(&self, durability: Durability) {
        if !self.session.is_sole_writer() || self.session.delegation.get().is_some() {
            return;
        }
        let delegated = self.session.begin_delegation(durability).await;
        if self.session.delegation.set(delegated).is_ok()
            && let Some(own) = self.session.delegation.get()
        {
            let log = Arc::clone(&self.session).ship_log();
            let shipping = BegunTask::spawn(&self.runtime, log);
            let _ = own.shipping_task.set(Arc::downgrade(&shipping));
            let _ = self.shipping_task.set(shipping);
        }
    }

    pub(super) fn session(&self) -> Arc<RemoteSession> {
        Arc::clone(&self.session)
    }

    pub(super) fn server(&self) -> &Server {
        &self.session.server
    }

    pub(super) fn tree(&self) -> &TreeRef {
        &self.session.tree
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.session.link().tree_session.epoch
    }

    pub(super) fn is_lost(&self) -> bool {
        self.session.health.loss().is_some()
    }

    pub(super) fn run(&self, caller: Caller, op: FileOp, data: &[u8], done: Completion) {
        if let FileOp::Forget { ino, count } = op {
            self.forget(ino, count);
            return done(Ok(FileReply::Done), &[]);
        }
        let session = Arc::clone(&self.session);
        let Some(own) = self.session.delegation.get() else {
            if let Some(opened) = session.open_small_file(&op) {
                return done(Ok(opened), &[]);
            }
            let data = Buffer::from_slice(data).freeze();
            return begin_here(&self.runtime, async move {
                let (result, data) = session.answer_alone(caller, op, data).await;
                done(result, &data);
            });
        };
        let (decision, done) = match session.answer_early(own, caller, &op, data, done) {
            EarlyAnswer::Given(files) => {
                return session.fetch_ahead(own, FetchAhead::Files(files));
            }
            EarlyAnswer::Missing(decision, done) => (decision, done),
        };
        let asked = (caller, op, Buffer::from_slice(data).freeze());
        let session = Arc::clone(&self.session);
        begin_here(&self.runtime, async move {
            if let Some(own) = session.delegation.get() {
                let (result, data) = session.answer_with_server(own, asked, decision).await;
                done(result, &data);
            }
        });
    }

    /// What the volume held, and its disk, when the latest of its operations was told.
    pub(super) fn latest_stat(&self) -> Option<TreeStat> {
        let own = self.session.delegation.get()?;
        own.lock_state().latest_stat
    }

    /// Whether changes were answered that have not reached the server.
    pub(super) fn has_unsent_changes(&self) -> bool {
        let own = self.session.delegation.get();
        own.is_some_and(|own| own.lock_state().delegation.log.has_operation(is_change))
    }

    /// Whether [`Self::close_file`] has something to wait for.
    pub(super) fn has_blocking_close(&self) -> bool {
        let own = self.session.delegation.get();
        own.is_some_and(SessionDelegation::has_blocking_close)
    }

    /// A program closes a file; answers when that may be told.
    pub(super) fn close_file(&self, ino: InodeNo, done: Completion) {
        match self.session.delegation.get() {
            Some(own) => self.session.close_file(own, ino, done),
            None => done(Ok(FileReply::Done), &[]),
        }
    }

    /// Ends the session politely, and asks the server to keep what was written so long. A server
    /// that does not answer ends it by its lease.
    pub(crate) async fn close(&self, keep_ms: u64) {
        if let Some(own) = self.session.delegation.get() {
            self.session.wait_for_log(own).await;
        }
        self.renewal_task.abort();
        self.session.is_closing.store(true, Ordering::Release);
        let RemoteSession {
            server,
            tree,
            health: volume_status,
            ..
        } = &*self.session;
        if volume_status.loss().is_some() {
            return;
        }
        let keep_ms = if self.session.is_writable { keep_ms } else { 0 };
        let call = CloseTree {
            tree: tree.clone(),
            epoch: self.session.link().tree_session.epoch,
            lifetime_ms_min: keep_ms,
        };
        let ms = if keep_ms == 0 {
            CLOSE_TIMEOUT_MS
        } else {
            CLOSE_AND_EXTEND_TIMEOUT_MS
        };
        let deadline = Deadline::after_ms(ms);
        let closed = server
            .pool
            .call_with_retries(&server.address, &server.token, call, Bytes::new(), deadline)
            .await;
        match closed {
            Ok(_) => {}
            Err(error) if keep_ms > 0 => {
                tracing::warn!(?tree, %error, "whether the volume is kept longer is not known");
            }
            Err(error) => {
                tracing::debug!(?tree, %error, "session not closed; its lease ends it");
            }
        }
    }

    fn forget(&self, ino: InodeNo, count: u64) {
        let queued = match self.session.delegation.get() {
            Some(own) => self.session.forget_later(own, ino, count),
            None => self.session.forget_at_once(ino, count),
        };
        if queued >= FORGET_BATCH_MAX {
            let session = Arc::clone(&self.session);
            self.runtime
                .spawn(async move { session.send_forgets().await });
        }
    }
}

impl Drop for RemoteTree {
    fn drop(&mut self) {
        self.renewal_task.abort();
        if let Some(shipping) = self.shipping_task.get() {
            shipping.stop();
        }
    }
}

impl RemoteSession {
    /// Answers an operation without a delegation.
    async fn answer_alone(&self, caller: Caller, op: FileOp, data: Bytes) -> (FileResult, Bytes) {
        if let Some(read) = self.read_small_file(&op).await {
            return read;
        }
        let (result, data) = self.run_operation(caller, op.clone(), data).await;
        self.note_small_files(&op, &result);
        (result, data)
    }

    /// Runs an operation, over restarts of the server if there are any.
    pub(super) async fn run_operation(
        &self,
        caller: Caller,
        op: FileOp,
        data: Bytes,
    ) -> (FileResult, Bytes) {
        let mut timeout = KeepaliveDeadline::new(self.server.deadline());
        let _renaming = InflightRename::begin(self, &op);
        let mut maybe_ran = false;
        let failure = loop {
            if self.wait_for_missing(&op).await {
                timeout = KeepaliveDeadline::new(self.server.deadline());
            }
            let deadline = timeout.deadline();
            if !maybe_ran && let Err(errno) = self.open_deferred_handles(&op).await {
                return (Err(errno), Bytes::new());
            }
            let link = self.link();
            let attempt = async {
                if maybe_ran && let Some(reply) = self.find_outcome(&link, &op, deadline).await? {
                    return Ok((Ok(reply), Bytes::new()));
                }
                maybe_ran = false;
                self.try_operation(&link, caller, &op, &data, deadline)
                    .await
            };
            match attempt.await {
                Ok((result, body)) => {
                    match self.translate_result(link.tree_session.epoch, &op, result) {
                        Some(result) => return (result, body),
                        // An answer in numbers of a session that ended meanwhile.
                        None => {
                            maybe_ran = true;
                            timeout.extend();
                        }
                    }
                }
                Err(SessionFailure::SessionForgotten { maybe_ran: ran }) => {
                    maybe_ran |= ran;
                    // It is there again, however long the one before it was at it.
                    timeout.extend();
                    if let Err(failure) = self.reopen_session(&link, timeout.deadline()).await {
                        break failure;
                    }
                }
                Err(failure) => break failure,
            }
        };
        (Err(errno_of_failure(failure)), Bytes::new())
    }

    /// What an operation names may have to be made again in a restarted server first. Not so where
    /// it changes something: then all before it had run, and what is behind may wait for it.
    async fn wait_for_missing(&self, op: &FileOp) -> bool {
        let own = self.delegation.get().filter(|_| !is_change(op));
        let is_missing = || {
            let known = self.inode_map();
            known.translate(op).is_err() && !known.is_deferred_read(op)
        };
        let Some(own) = own.filter(|_| is_missing()) else {
            return false;
        };
        self.wait_for_log(own).await;
        true
    }

    async fn try_operation(
        &self,
        link: &SessionLink,
        caller: Caller,
        op: &FileOp,
        data: &Bytes,
        deadline: Deadline,
    ) -> Result<(FileResult, Bytes), SessionFailure> {
        if let FileOp::Release { handle } | FileOp::ReleaseDirectory { handle } = op
            && self.inode_map().is_stale(*handle)
        {
            return Ok((Ok(FileReply::Done), Bytes::new()));
        }
        let (result, body) = match self.open_and_read(link, op, deadline).await? {
            Some(read) => read,
            None => {
                let asked = self.translate(link, op, deadline).await?;
                self.run_in_session(link, caller, asked, data, deadline)
                    .await?
            }
        };
        match result {
            Ok(FileReply::Read { length }) if length as usize != body.len() => {
                let text = "the server's data are shorter or longer than it says";
                Err(self.fail_call(Error::new(ErrorCode::Malformed, text), false))
            }
            result => Ok((result, body)),
        }
    }

    /// Runs one operation, in numbers of the session.
    pub(super) async fn run_in_session(
        &self,
        link: &SessionLink,
        caller: Caller,
        op: FileOp,
        data: &Bytes,
        deadline: Deadline,
    ) -> Result<(FileResult, Bytes), SessionFailure> {
        let (mut results, body) = self
            .run_batch(
                link,
                caller,
                (vec![op], link.unordered_numbers()),
                data,
                deadline,
            )
            .await?;
        match results.pop() {
            Some(result) => Ok((result, body)),
            None => Err(SessionFailure::CallFailed(ErrorCode::Malformed)),
        }
    }

    /// Runs a batch once, however often it must be sent. An error that ends the session ends the
    /// volume too; whoever waits for it gets the code.
    pub(super) async fn run_batch(
        &self,
        link: &SessionLink,
        caller: Caller,
        (ops, (sequence, after, given)): (Vec<FileOp>, BatchNumbers),
        data: &Bytes,
        deadline: Deadline,
    ) -> Result<(Vec<FileResult>, Bytes), SessionFailure> {
        let count = ops.len();
        let call = RunFileOps {
            tree: self.tree.clone(),
            epoch: link.tree_session.epoch,
            sequence,
            after_sequence: after,
            caller,
            ops,
            assigned_numbers: given,
        };
        let mut maybe_ran = false;
        let calling = self.call_with_retries(call, data, deadline, &mut maybe_ran);
        let Some(answer) = self.health.run_unless_lost(calling).await else {
            return Err(SessionFailure::CallFailed(ErrorCode::VolumeLost));
        };
        let answer = answer.and_then(|(FileResults { results }, body)| {
            if results.len() == count {
                return Ok((results, body));
            }
            let text = format!("{} results for {count} operations", results.len());
            Err(Error::new(ErrorCode::Malformed, text))
        });
        match answer {
            Ok(answer) => Ok(answer),
            // It was this agent that opened another session, and then the operations did not run.
            Err(error) if error.code == ErrorCode::Fenced && self.is_replaced(link).await => {
                Err(SessionFailure::SessionForgotten { maybe_ran })
            }
            Err(error) => Err(self.fail_call(error, maybe_ran)),
        }
    }

    /// Whether the session of a link is not the present one; waits a moment for one that is
    /// being opened.
    async fn is_replaced(&self, link: &SessionLink) -> bool {
        let deadline = Deadline::after_ms(CLOSE_TIMEOUT_MS);
        loop {
            let nobody_opens = self.recovery_lock.try_lock().is_ok();
            if self.link().tree_session.epoch != link.tree_session.epoch {
                return true;
            }
            if nobody_opens || deadline.remaining().is_zero() {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(RETRY_PAUSE_MS_MIN)).await;
        }
    }

    fn fail_call(&self, error: Error, maybe_ran: bool) -> SessionFailure {
        let code = error.code;
        if code == ErrorCode::SessionUnknown {
            if !self.is_closing.load(Ordering::Acquire) {
                return SessionFailure::SessionForgotten { maybe_ran };
            }
            // The mount is gone, so only a `Release` can be under way: the session's end, which
            // overtook it, has closed its file.
            tracing::debug!(tree = ?self.tree, "an operation came after the end of its session");
        } else if is_fatal(&error) {
            self.health.mark_lost(error);
        }
        SessionFailure::CallFailed(code)
    }

    pub(super) fn link(&self) -> SessionLink {
        lock(&self.link).clone()
    }

    /// A new life of the server knows the session; files and handles are found when needed.
    pub(super) fn set_link(&self, opened: TreeSession) {
        // The table first: whoever has the new link finds the table of the new session.
        {
            let mut known = self.inode_map();
            known.begin_session(opened.epoch);
            known.set_early_handles_max(opened.early_handles_max);
        }
        *lock(&self.link) = SessionLink::new(opened);
    }

    /// Whether names are being taken away.
    pub(super) fn has_inflight_renames(&self) -> bool {
        self.inflight_renames.load(Ordering::Acquire) > 0
    }

    pub(super) fn inode_map(&self) -> MutexGuard<'_, InodeMap> {
        lock(&self.inode_map)
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No holder leaves what it changes half-changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
