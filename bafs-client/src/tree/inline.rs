//! A scratch volume of this machine whose directory the server has handed over: operations run in
//! the calling thread, and for a writer this process accounts for the space. The server keeps the
//! lease and may want everything back; when it restarts, it is given the lock, and gives it again.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock, RwLockWriteGuard};
use std::time::Duration;

use bafs_proto::door::{DoorRequest, HandOverOf, HandedOver, HandedTree};
use bafs_proto::file_op::{Caller, FileOp, FileResult};
use bafs_proto::ids::InodeNo;
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_tree::{Limit, Session, Tree, TreeUse};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::remote;
use super::waits::Waits;
use super::{Done, LocalTree, RemoteTree};
use crate::door::{self, DoorConnection, NotOpened, Parcel};
use crate::errno::errno_of;
use crate::limits::{CLOSE_MS, WHOLE_FILE_BYTES};

/// How often the server is told what a volume holds, when that has changed.
const TELL: Duration = Duration::from_secs(1);

/// Pause between two attempts to have a tree handed over again: the door of a node that starts
/// opens a little later than its other ears.
const AGAIN: Duration = Duration::from_millis(100);

/// A handed-over tree.
#[derive(Debug)]
pub struct InlineTree {
    local: Arc<LocalTree>,
    kept: Arc<Loan>,
    lease: RemoteTree,
    runtime: Handle,
    watching: JoinHandle<()>,
    waits: Arc<Waits>,
    writable: bool,
}

/// What is kept until it must be given back.
#[derive(Debug)]
struct Loan {
    state: RwLock<State>,
    /// Whether operations wait for the server to come back.
    is_shut: Mutex<bool>,
    /// Whether nobody needs the answers of those any more.
    nobody_waits: AtomicBool,
    opened: Condvar,
}

#[derive(Debug)]
struct State {
    held: Option<Held>,
    /// The lock is the server's, so nothing may run.
    is_paused: bool,
}

#[derive(Debug)]
struct Held {
    // In the order of giving back: first nothing is open any more, then the lock goes.
    session: Session,
    tree: Arc<Tree>,
    lock: Option<OwnedFd>,
    connection: Arc<DoorConnection>,
}

impl InlineTree {
    /// Runs the operations of a tree that was handed over. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// The session, which is of no use any more, and what broke on the way.
    pub(super) async fn open(
        lease: RemoteTree,
        parcel: Parcel,
        writable: bool,
    ) -> Result<Self, (RemoteTree, Error)> {
        let held = match open(parcel, writable).await {
            Ok(held) => held,
            Err(why) => return Err((lease, why)),
        };
        let connection = held.connection.clone();
        let kept = Arc::new(Loan::new(held));
        let run = kept.clone();
        let local = LocalTree::new(move |caller, op, data, out| run.run(caller, op, data, out));
        let session = lease.session();
        let watching = tokio::spawn(watch(kept.clone(), connection, writable, session));
        Ok(Self {
            local: Arc::new(local),
            kept,
            lease,
            runtime: Handle::current(),
            watching,
            waits: Arc::default(),
            writable,
        })
    }

    pub(super) fn run(&self, caller: Caller, op: FileOp, data: &[u8], done: Done) {
        if self.waits.on(&op) {
            let (local, data) = (self.local.clone(), data.to_vec());
            self.runtime
                .spawn_blocking(move || local.run(caller, &op, &data, done));
            return;
        }
        if !self.waits.notes(&op) {
            return self.local.run(caller, &op, data, done);
        }
        let (waits, noted) = (self.waits.clone(), op.clone());
        let done: Done = Box::new(move |result: FileResult, data: &[u8]| {
            waits.after(&noted, &result);
            done(result, data);
        });
        self.local.run(caller, &op, data, done);
    }

    /// Whether the data of an operation are kept until it has run.
    pub(super) fn keeps_data(&self, op: &FileOp) -> bool {
        self.waits.on(op)
    }

    /// Has operations that wait for a server fail, as nobody needs their answers any more.
    pub(super) fn stop_waiting(&self) {
        self.kept.stop_waiting();
    }

    /// Whether nothing is changed through this tree.
    pub(super) fn is_read_only(&self) -> bool {
        !self.writable
    }

    /// The open file of a large file, with its size in bytes.
    pub(super) fn hold_whole(&self, ino: InodeNo) -> Option<(OwnedFd, u64)> {
        let state = self.kept.state.read();
        let state = state.unwrap_or_else(PoisonError::into_inner);
        let held = state.held.as_ref().filter(|_| !state.is_paused)?;
        held.session.open_large(ino, WHOLE_FILE_BYTES)
    }

    /// Gives the tree back and ends the session.
    pub(super) async fn close(&self, keep_ms: u64) {
        self.watching.abort();
        if !self.lease.is_lost()
            && let Some((connection, used)) = self.kept.told()
        {
            // The server counts for itself; this is for whoever asks in between.
            let limit = Duration::from_millis(CLOSE_MS);
            let _ = tokio::time::timeout(limit, connection.call(used)).await;
        }
        give_back(&self.kept).await;
        self.lease.close(keep_ms).await;
    }
}

impl Drop for InlineTree {
    fn drop(&mut self) {
        self.watching.abort();
    }
}

impl Loan {
    fn new(held: Held) -> Self {
        let state = State {
            held: Some(held),
            is_paused: false,
        };
        Self {
            state: RwLock::new(state),
            is_shut: Mutex::new(false),
            nobody_waits: AtomicBool::new(false),
            opened: Condvar::new(),
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
            let mut is_shut = self.is_shut.lock().unwrap_or_else(PoisonError::into_inner);
            if self.nobody_waits.load(Ordering::Relaxed) {
                return Err(errno_of(ErrorCode::VolumeLost));
            }
            while *is_shut && !self.nobody_waits.load(Ordering::Relaxed) {
                let waiting = self.opened.wait(is_shut);
                is_shut = waiting.unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn stop_waiting(&self) {
        let _is_shut = self.is_shut.lock().unwrap_or_else(PoisonError::into_inner);
        self.nobody_waits.store(true, Ordering::Relaxed);
        self.opened.notify_all();
    }

    /// What the server should know of the volume's use, and the way to tell it.
    fn told(&self) -> Option<(Arc<DoorConnection>, DoorRequest)> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        let held = state.held.as_ref()?;
        let (bytes, files) = held.tree.used();
        Some((held.connection.clone(), DoorRequest::Used { bytes, files }))
    }

    /// When this returns, no operation runs until there is a lock again, and nobody is kept out.
    fn pause(&self) {
        self.shut(true);
        let mut state = self.write();
        match &mut state.held {
            Some(held) => held.lock = None,
            // Given back meanwhile: nothing will run, and nobody has to wait for that.
            None => return self.shut(false),
        }
        state.is_paused = true;
    }

    /// Goes on with the same session below another lock, if the directory is the same.
    fn go_on(
        &self,
        root: &OwnedFd,
        lock: Option<OwnedFd>,
        connection: &Arc<DoorConnection>,
    ) -> Result<()> {
        let mut state = self.write();
        let Some(held) = &mut state.held else {
            return Err(malformed("the tree was given back meanwhile"));
        };
        let is_same = held.tree.is_at(root);
        if !is_same.map_err(|error| broken(&error))? {
            return Err(malformed("the server handed another directory over"));
        }
        (held.lock, held.connection) = (lock, Arc::clone(connection));
        state.is_paused = false;
        drop(state);
        self.shut(false);
        Ok(())
    }

    /// When this returns, no operation runs and none will.
    fn give_back(&self) {
        let held = {
            let mut state = self.write();
            state.is_paused = false;
            state.held.take()
        };
        self.shut(false);
        drop(held);
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn shut(&self, is_shut: bool) {
        *self.is_shut.lock().unwrap_or_else(PoisonError::into_inner) = is_shut;
        self.opened.notify_all();
    }
}

async fn open(parcel: Parcel, writable: bool) -> Result<Held> {
    let (header, root, lock, connection) = unpack(parcel, writable)?;
    let opening = tokio::task::spawn_blocking(move || open_tree(root, &header, writable));
    let tree = opening.await.map_err(|error| broken(&error))?;
    let tree = tree.map_err(|error| broken(&error))?;
    Ok(Held {
        session: tree.session(writable).that_tells_no_births(),
        tree,
        lock,
        connection: Arc::new(connection),
    })
}

type Unpacked = (HandedTree, OwnedFd, Option<OwnedFd>, DoorConnection);

fn unpack(parcel: Parcel, writable: bool) -> Result<Unpacked> {
    let Parcel {
        header,
        files,
        connection,
    } = parcel;
    let HandedOver::Tree(header) = header else {
        return Err(malformed("the server handed something else over"));
    };
    let mut files = files.into_iter();
    let (root, lock) = (files.next(), files.next());
    let root = root.ok_or_else(|| malformed("no directory was handed over"))?;
    if writable && lock.is_none() {
        return Err(malformed("no lock was handed over"));
    }
    Ok((header, root, lock, connection))
}

fn open_tree(root: OwnedFd, header: &HandedTree, writable: bool) -> std::io::Result<Arc<Tree>> {
    let limit = Limit {
        bytes: header.size_bytes,
        files: header.size_files,
    };
    if writable {
        return Tree::open_at(root, Some(limit), None);
    }
    let used = (header.used_bytes, header.used_files);
    Tree::open_beside(root, Arc::new(TreeUse::new(limit, used)))
}

/// Tells the server what the volume holds, until everything must be given back. A server that is
/// gone is waited for up to the deadline.
async fn watch(
    kept: Arc<Loan>,
    mut connection: Arc<DoorConnection>,
    writable: bool,
    session: Arc<remote::Session>,
) {
    let mut last = None;
    let mut link = session.link();
    let why = loop {
        tokio::select! {
            why = connection.over() => {
                if why.code != ErrorCode::Unreachable {
                    break why;
                }
                tracing::warn!(tree = ?session.tree, %why, "operations wait for the server");
                match take_again(&kept, &session, writable, &link).await {
                    Ok(again) => connection = again,
                    Err(error) => break error,
                }
                (link, last) = (session.link(), None);
            }
            () = tokio::time::sleep(TELL) => {}
        }
        let now = kept.told().filter(|_| writable);
        if let Some((_, used)) = now
            && last.as_ref() != Some(&used)
        {
            last = Some(used.clone());
            // Its end is heard above; slowness is no harm.
            let _ = connection.call(used).await;
        }
    };
    session.fate.lose(why);
    // Their threads are needed to give everything back.
    kept.stop_waiting();
    drop(connection);
    give_back(&kept).await;
}

/// Gives a new life of the server the lock, so that it can count the tree and know its writer, and
/// has both handed over again. What is open stays open: another writer in between would have made
/// the server refuse.
async fn take_again(
    kept: &Arc<Loan>,
    session: &Arc<remote::Session>,
    writable: bool,
    before: &remote::Link,
) -> Result<Arc<DoorConnection>> {
    let pausing = Arc::clone(kept);
    // Waits for operations that run.
    let paused = tokio::task::spawn_blocking(move || pausing.pause()).await;
    paused.map_err(|error| broken(&error))?;
    let deadline = session.server.deadline();
    let parcel = fetch_again(session, before.clone(), deadline).await?;
    let (_, root, lock, connection) = unpack(parcel, writable)?;
    let connection = Arc::new(connection);
    kept.go_on(&root, lock, &connection)?;
    tracing::warn!(tree = ?session.tree, "the server is back; operations go on");
    Ok(connection)
}

async fn fetch_again(
    session: &remote::Session,
    mut link: remote::Link,
    deadline: Deadline,
) -> Result<Parcel> {
    let mut is_forgotten = true;
    loop {
        // Each session that is opened fences the one before, so not more of them than needed.
        if is_forgotten && session.resume(&link, deadline).await.is_err() {
            // It is recorded where it was found.
            let text = "the storage server on this machine ended";
            return Err(session
                .fate
                .loss()
                .cloned()
                .unwrap_or_else(|| Error::new(ErrorCode::Unreachable, text)));
        }
        link = session.link();
        let what = HandOverOf::Tree {
            tree: session.tree.clone(),
            epoch: link.opened.epoch,
        };
        match door::fetch(&session.server, what).await {
            Ok(parcel) => return Ok(parcel),
            Err(error) if session.fate.loss().is_some() || deadline.left() <= AGAIN => {
                let text = "the server restarted and does not hand the volume over again";
                return Err(Error::from(error).context(text));
            }
            Err(error) => {
                tracing::debug!(?error, "not handed over again yet");
                is_forgotten = match error {
                    NotOpened::Refused(why) => {
                        matches!(why.code, ErrorCode::SessionUnknown | ErrorCode::Fenced)
                    }
                    // It may be handed over already; only another session may have it again.
                    NotOpened::Broken(_) => true,
                };
            }
        }
        tokio::time::sleep(AGAIN).await;
    }
}

async fn give_back(kept: &Arc<Loan>) {
    let kept = kept.clone();
    // Waits for operations that run.
    if let Err(error) = tokio::task::spawn_blocking(move || kept.give_back()).await {
        tracing::error!(%error, "a handed-over directory was not given back");
    }
}

fn broken(error: &dyn std::fmt::Display) -> Error {
    let text = format!("open the handed-over directory: {error}");
    Error::new(ErrorCode::ServerFault, text)
}

fn malformed(text: &str) -> Error {
    Error::new(ErrorCode::Malformed, text)
}
