//! A scratch volume of this machine whose directory the server has handed over: operations run in
//! the calling thread, and for a writer this process accounts for the space. The server keeps the
//! lease and may want everything back; when it restarts, it is given the lock, and gives it again.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock, RwLockWriteGuard};
use std::time::Duration;

use bafs_proto::fd_passing::{HandoffHeader, HandoffRequest, HandoffTarget, TreeHandoff};
use bafs_proto::file_op::{Caller, FileOp, FileResult};
use bafs_proto::ids::InodeNo;
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_tree::{Limit, Session, Tree, TreeUse};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::blocking_operations::BlockingOperations;
use super::completion::Completion;
use super::local::LocalTree;
use super::remote;
use super::remote::RemoteTree;
use crate::errno::errno_of;
use crate::fd_passing::{self, HandoffConnection, HandoffError, ReceivedHandoff};
use crate::limits::{CLOSE_TIMEOUT_MS, PASSTHROUGH_FILE_BYTES_MIN};

/// How often the server is told what a volume holds, when that has changed.
const USAGE_REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Pause between two attempts to have a tree handed over again: the door of a node that starts
/// opens a little later than its other ears.
const HANDOFF_RETRY_PAUSE: Duration = Duration::from_millis(100);

/// A handed-over tree.
#[derive(Debug)]
pub struct InlineTree {
    local: Arc<LocalTree>,
    lent: Arc<LentTree>,
    lease: RemoteTree,
    runtime: Handle,
    reporting_task: JoinHandle<()>,
    blocking_operations: Arc<BlockingOperations>,
    is_writable: bool,
}

/// What is kept until it must be given back.
#[derive(Debug)]
struct LentTree {
    state: RwLock<LentTreeState>,
    /// Whether operations wait for the server to come back.
    is_blocked: Mutex<bool>,
    /// Whether nobody needs the answers of those any more.
    is_abandoned: AtomicBool,
    unblocked: Condvar,
}

#[derive(Debug)]
struct LentTreeState {
    held: Option<LentSession>,
    /// The lock is the server's, so nothing may run.
    is_paused: bool,
}

#[derive(Debug)]
struct LentSession {
    // In the order of giving back: first nothing is open any more, then the lock goes.
    session: Session,
    tree: Arc<Tree>,
    lock: Option<OwnedFd>,
    connection: Arc<HandoffConnection>,
}

impl InlineTree {
    /// Runs the operations of a tree that was handed over. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// The session, which is of no use any more, and what broke on the way.
    pub(super) async fn open(
        lease: RemoteTree,
        handoff: ReceivedHandoff,
        writable: bool,
    ) -> Result<Self, (RemoteTree, Error)> {
        let held = match open_handoff(handoff, writable).await {
            Ok(held) => held,
            Err(why) => return Err((lease, why)),
        };
        let connection = held.connection.clone();
        let kept = Arc::new(LentTree::new(held));
        let run = kept.clone();
        let local = LocalTree::new(move |caller, op, data, out| run.run(caller, op, data, out));
        let session = lease.session();
        let watching = tokio::spawn(report_usage(kept.clone(), connection, writable, session));
        Ok(Self {
            local: Arc::new(local),
            lent: kept,
            lease,
            runtime: Handle::current(),
            reporting_task: watching,
            blocking_operations: Arc::default(),
            is_writable: writable,
        })
    }

    pub(super) fn run(&self, caller: Caller, op: FileOp, data: &[u8], done: Completion) {
        if self.blocking_operations.is_blocking(&op) {
            let (local, data) = (self.local.clone(), data.to_vec());
            self.runtime
                .spawn_blocking(move || local.run(caller, &op, &data, done));
            return;
        }
        if !self.blocking_operations.is_tracked(&op) {
            return self.local.run(caller, &op, data, done);
        }
        let (waits, noted) = (self.blocking_operations.clone(), op.clone());
        let done: Completion = Box::new(move |result: FileResult, data: &[u8]| {
            waits.record_result(&noted, &result);
            done(result, data);
        });
        self.local.run(caller, &op, data, done);
    }

    /// Whether the data of an operation are kept until it has run.
    pub(super) fn is_copying_data(&self, op: &FileOp) -> bool {
        self.blocking_operations.is_blocking(op)
    }

    /// Has operations that wait for a server fail, as nobody needs their answers any more.
    pub(super) fn stop_waiting(&self) {
        self.lent.stop_waiting();
    }

    /// Whether nothing is changed through this tree.
    pub(super) fn is_read_only(&self) -> bool {
        !self.is_writable
    }

    /// The open file of a large file, with its size in bytes.
    pub(super) fn open_passthrough(&self, ino: InodeNo) -> Option<(OwnedFd, u64)> {
        let state = self.lent.state.read();
        let state = state.unwrap_or_else(PoisonError::into_inner);
        let held = state.held.as_ref().filter(|_| !state.is_paused)?;
        held.session.open_large(ino, PASSTHROUGH_FILE_BYTES_MIN)
    }

    /// Gives the tree back and ends the session.
    pub(super) async fn close(&self, keep_ms: u64) {
        self.reporting_task.abort();
        if !self.lease.is_lost()
            && let Some((connection, used)) = self.lent.usage_report()
        {
            // The server counts for itself; this is for whoever asks in between.
            let limit = Duration::from_millis(CLOSE_TIMEOUT_MS);
            let _ = tokio::time::timeout(limit, connection.call(used)).await;
        }
        return_in_background(&self.lent).await;
        self.lease.close(keep_ms).await;
    }
}

impl Drop for InlineTree {
    fn drop(&mut self) {
        self.reporting_task.abort();
    }
}

impl LentTree {
    fn new(held: LentSession) -> Self {
        let state = LentTreeState {
            held: Some(held),
            is_paused: false,
        };
        Self {
            state: RwLock::new(state),
            is_blocked: Mutex::new(false),
            is_abandoned: AtomicBool::new(false),
            unblocked: Condvar::new(),
        }
    }

    fn run(&self, caller: Caller, op: &FileOp, data: &[u8], out: &mut Vec<u8>) -> FileResult {
        loop {
            {
                // A panic of an operation leaves the session as usable as one through a server.
                let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
                if !state.is_paused {
                    return match &state.held {
                        Some(held) => held.session.run(caller, op, data, out),
                        None => Err(errno_of(ErrorCode::VolumeLost)),
                    };
                }
            }
            let mut is_shut = self
                .is_blocked
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            if self.is_abandoned.load(Ordering::Relaxed) {
                return Err(errno_of(ErrorCode::VolumeLost));
            }
            while *is_shut && !self.is_abandoned.load(Ordering::Relaxed) {
                let waiting = self.unblocked.wait(is_shut);
                is_shut = waiting.unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn stop_waiting(&self) {
        let _is_shut = self
            .is_blocked
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.is_abandoned.store(true, Ordering::Relaxed);
        self.unblocked.notify_all();
    }

    /// What the server should know of the volume's use, and the way to tell it.
    fn usage_report(&self) -> Option<(Arc<HandoffConnection>, HandoffRequest)> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        let held = state.held.as_ref()?;
        let (bytes, files) = held.tree.used();
        Some((
            held.connection.clone(),
            HandoffRequest::ReportUse { bytes, files },
        ))
    }

    /// When this returns, no operation runs until there is a lock again, and nobody is kept out.
    fn pause(&self) {
        self.set_blocked(true);
        let mut state = self.write();
        match &mut state.held {
            Some(held) => held.lock = None,
            // Given back meanwhile: nothing will run, and nobody has to wait for that.
            None => return self.set_blocked(false),
        }
        state.is_paused = true;
    }

    /// Goes on with the same session below another lock, if the directory is the same.
    fn resume(
        &self,
        root: &OwnedFd,
        lock: Option<OwnedFd>,
        connection: &Arc<HandoffConnection>,
    ) -> Result<()> {
        let mut state = self.write();
        let Some(held) = &mut state.held else {
            return Err(malformed_error("the tree was given back meanwhile"));
        };
        let is_same = held.tree.is_same_directory(root);
        if !is_same.map_err(|error| transfer_error(&error))? {
            return Err(malformed_error("the server handed another directory over"));
        }
        (held.lock, held.connection) = (lock, Arc::clone(connection));
        state.is_paused = false;
        drop(state);
        self.set_blocked(false);
        Ok(())
    }

    /// When this returns, no operation runs and none will.
    fn return_handoff(&self) {
        let held = {
            let mut state = self.write();
            state.is_paused = false;
            state.held.take()
        };
        self.set_blocked(false);
        drop(held);
    }

    fn write(&self) -> RwLockWriteGuard<'_, LentTreeState> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_blocked(&self, is_shut: bool) {
        *self
            .is_blocked
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = is_shut;
        self.unblocked.notify_all();
    }
}

async fn open_handoff(handoff: ReceivedHandoff, writable: bool) -> Result<LentSession> {
    let (header, root, lock, connection) = unpack_handoff(handoff, writable)?;
    let opening = tokio::task::spawn_blocking(move || open_tree(root, &header, writable));
    let tree = opening.await.map_err(|error| transfer_error(&error))?;
    let tree = tree.map_err(|error| transfer_error(&error))?;
    Ok(LentSession {
        session: Session::new(tree.clone(), writable).without_btimes(),
        tree,
        lock,
        connection: Arc::new(connection),
    })
}

type HandoffParts = (TreeHandoff, OwnedFd, Option<OwnedFd>, HandoffConnection);

fn unpack_handoff(handoff: ReceivedHandoff, writable: bool) -> Result<HandoffParts> {
    let ReceivedHandoff {
        header,
        files,
        connection,
    } = handoff;
    let HandoffHeader::Tree(header) = header else {
        return Err(malformed_error("the server handed something else over"));
    };
    let mut files = files.into_iter();
    let (root, lock) = (files.next(), files.next());
    let root = root.ok_or_else(|| malformed_error("no directory was handed over"))?;
    if writable && lock.is_none() {
        return Err(malformed_error("no lock was handed over"));
    }
    Ok((header, root, lock, connection))
}

fn open_tree(root: OwnedFd, header: &TreeHandoff, writable: bool) -> std::io::Result<Arc<Tree>> {
    let limit = Limit {
        bytes: header.size_bytes,
        files: header.size_files,
    };
    if writable {
        return Tree::open_at(root, Some(limit), None);
    }
    let used = (header.used_bytes, header.used_files);
    Tree::open_read_only(root, Arc::new(TreeUse::new(limit, used)))
}

/// Tells the server what the volume holds, until everything must be given back. A server that is
/// gone is waited for up to the deadline.
async fn report_usage(
    lent: Arc<LentTree>,
    mut connection: Arc<HandoffConnection>,
    writable: bool,
    session: Arc<remote::RemoteSession>,
) {
    let mut last = None;
    let mut link = session.link();
    let why = loop {
        tokio::select! {
            why = connection.wait_until_revoked() => {
                if why.code != ErrorCode::Unreachable {
                    break why;
                }
                tracing::warn!(tree = ?session.tree, %why, "operations wait for the server");
                match reacquire(&lent, &session, writable, &link).await {
                    Ok(again) => connection = again,
                    Err(error) => break error,
                }
                (link, last) = (session.link(), None);
            }
            () = tokio::time::sleep(USAGE_REPORT_INTERVAL) => {}
        }
        let now = lent.usage_report().filter(|_| writable);
        if let Some((_, used)) = now
            && last.as_ref() != Some(&used)
        {
            last = Some(used.clone());
            // Its end is heard above; slowness is no harm.
            let _ = connection.call(used).await;
        }
    };
    session.health.mark_lost(why);
    // Their threads are needed to give everything back.
    lent.stop_waiting();
    drop(connection);
    return_in_background(&lent).await;
}

/// Gives a new life of the server the lock, so that it can count the tree and know its writer, and
/// has both handed over again. What is open stays open: another writer in between would have made
/// the server refuse.
async fn reacquire(
    lent: &Arc<LentTree>,
    session: &Arc<remote::RemoteSession>,
    writable: bool,
    before: &remote::SessionLink,
) -> Result<Arc<HandoffConnection>> {
    let pausing = Arc::clone(lent);
    // Waits for operations that run.
    let paused = tokio::task::spawn_blocking(move || pausing.pause()).await;
    paused.map_err(|error| transfer_error(&error))?;
    let deadline = session.server.deadline();
    let received = refetch_handoff(session, before.clone(), deadline).await?;
    let (_, root, lock, connection) = unpack_handoff(received, writable)?;
    let connection = Arc::new(connection);
    lent.resume(&root, lock, &connection)?;
    tracing::warn!(tree = ?session.tree, "the server is back; operations continue");
    Ok(connection)
}

async fn refetch_handoff(
    session: &remote::RemoteSession,
    mut link: remote::SessionLink,
    deadline: Deadline,
) -> Result<ReceivedHandoff> {
    let mut is_forgotten = true;
    loop {
        // Each session that is opened fences the one before, so not more of them than needed.
        if is_forgotten && session.reopen_session(&link, deadline).await.is_err() {
            // It is recorded where it was found.
            let text = "the storage server on this machine ended";
            return Err(session
                .health
                .loss()
                .cloned()
                .unwrap_or_else(|| Error::new(ErrorCode::Unreachable, text)));
        }
        link = session.link();
        let what = HandoffTarget::Tree {
            tree: session.tree.clone(),
            epoch: link.tree_session.epoch,
        };
        match fd_passing::fetch_handoff(&session.server, what).await {
            Ok(received) => return Ok(received),
            Err(error)
                if session.health.loss().is_some()
                    || deadline.remaining() <= HANDOFF_RETRY_PAUSE =>
            {
                let text = "the server restarted and does not hand over the volume again";
                return Err(Error::from(error).context(text));
            }
            Err(error) => {
                tracing::debug!(?error, "not handed over again yet");
                is_forgotten = match error {
                    HandoffError::Refused(why) => {
                        matches!(why.code, ErrorCode::SessionUnknown | ErrorCode::Fenced)
                    }
                    // It may be handed over already; only another session may have it again.
                    HandoffError::Interrupted(_) => true,
                };
            }
        }
        tokio::time::sleep(HANDOFF_RETRY_PAUSE).await;
    }
}

async fn return_in_background(lent: &Arc<LentTree>) {
    let kept = lent.clone();
    // Waits for operations that run.
    if let Err(error) = tokio::task::spawn_blocking(move || kept.return_handoff()).await {
        tracing::error!(%error, "a handed-over directory was not given back");
    }
}

fn transfer_error(error: &dyn std::fmt::Display) -> Error {
    let text = format!("open the handed-over directory: {error}");
    Error::new(ErrorCode::ServerFault, text)
}

fn malformed_error(text: &str) -> Error {
    Error::new(ErrorCode::Malformed, text)
}
