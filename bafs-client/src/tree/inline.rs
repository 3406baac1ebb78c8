//! A scratch volume of this machine whose directory the server has handed over: operations run in
//! the calling thread, and for a writer this process accounts for the space. The server keeps the
//! lease and may want everything back.

use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use bafs_proto::door::{DoorRequest, HandedOver, HandedTree};
use bafs_proto::file_op::{Caller, FileOp, FileResult};
use bafs_proto::{Error, ErrorCode, Result};
use bafs_tree::{Limit, Session, Tree, TreeUse};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::{Done, LocalTree, RemoteTree};
use crate::door::{DoorConnection, Parcel};
use crate::errno::errno_of;
use crate::fate::Fate;
use crate::limits::CLOSE_MS;

/// How often the server is told what a volume holds, when that has changed.
const TELL: Duration = Duration::from_secs(1);

/// A handed-over tree.
#[derive(Debug)]
pub struct InlineTree {
    local: Arc<LocalTree>,
    kept: Arc<Kept>,
    lease: RemoteTree,
    runtime: Handle,
    watching: JoinHandle<()>,
}

/// What is kept until it must be given back.
#[derive(Debug)]
struct Kept(RwLock<Option<Held>>);

#[derive(Debug)]
struct Held {
    // In the order of giving back: first nothing is open any more, then the lock goes.
    session: Session,
    tree: Arc<Tree>,
    _lock: Option<OwnedFd>,
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
        fate: &Fate,
    ) -> Result<Self, (RemoteTree, Error)> {
        let held = match open(parcel, writable).await {
            Ok(held) => held,
            Err(why) => return Err((lease, why)),
        };
        let connection = held.connection.clone();
        let kept = Arc::new(Kept(RwLock::new(Some(held))));
        let run = kept.clone();
        let local = LocalTree::new(move |caller, op, data, out| run.run(caller, op, data, out));
        let watching = tokio::spawn(watch(kept.clone(), connection, writable, fate.clone()));
        Ok(Self {
            local: Arc::new(local),
            kept,
            lease,
            runtime: Handle::current(),
            watching,
        })
    }

    pub(super) fn run(&self, caller: Caller, op: FileOp, data: &[u8], done: Done) {
        // These wait for the disk, and the few threads that serve a volume have more to do.
        let waits = matches!(
            op,
            FileOp::Fsync { .. } | FileOp::FsyncDirectory { .. } | FileOp::CopyRange { .. }
        );
        if !waits {
            return self.local.run(caller, &op, data, done);
        }
        let local = self.local.clone();
        self.runtime
            .spawn_blocking(move || local.run(caller, &op, &[], done));
    }

    /// Gives the tree back and ends the session.
    pub(super) async fn close(&self) {
        self.watching.abort();
        if !self.lease.is_lost()
            && let Some((connection, used)) = self.kept.told()
        {
            // The server counts for itself; this is for whoever asks in between.
            let limit = Duration::from_millis(CLOSE_MS);
            let _ = tokio::time::timeout(limit, connection.call(used)).await;
        }
        give_back(&self.kept).await;
        self.lease.close().await;
    }
}

impl Drop for InlineTree {
    fn drop(&mut self) {
        self.watching.abort();
    }
}

impl Kept {
    fn run(&self, caller: Caller, op: &FileOp, data: &[u8], out: &mut Vec<u8>) -> FileResult {
        // A panic of an operation leaves the session as usable as one through a server.
        let kept = self.0.read().unwrap_or_else(PoisonError::into_inner);
        match &*kept {
            Some(held) => held.session.run(caller, op, data, out),
            None => Err(errno_of(ErrorCode::VolumeLost)),
        }
    }

    /// What the server should know of the volume's use, and the way to tell it.
    fn told(&self) -> Option<(Arc<DoorConnection>, DoorRequest)> {
        let kept = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let held = kept.as_ref()?;
        let (bytes, files) = held.tree.used();
        Some((held.connection.clone(), DoorRequest::Used { bytes, files }))
    }

    /// When this returns, no operation runs and none will.
    fn give_back(&self) {
        drop(
            self.0
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .take(),
        );
    }
}

async fn open(parcel: Parcel, writable: bool) -> Result<Held> {
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
    let opening = tokio::task::spawn_blocking(move || open_tree(root, &header, writable));
    let broken = |error: &dyn std::fmt::Display| {
        let text = format!("open the handed-over directory: {error}");
        Error::new(ErrorCode::ServerFault, text)
    };
    let tree = opening.await.map_err(|error| broken(&error))?;
    let tree = tree.map_err(|error| broken(&error))?;
    Ok(Held {
        session: tree.session(writable),
        tree,
        _lock: lock,
        connection: Arc::new(connection),
    })
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

/// Tells the server what the volume holds, until everything must be given back.
async fn watch(kept: Arc<Kept>, connection: Arc<DoorConnection>, writable: bool, fate: Fate) {
    let mut last = None;
    let why = loop {
        tokio::select! {
            why = connection.over() => break why,
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
    fate.lose(why);
    drop(connection);
    give_back(&kept).await;
}

async fn give_back(kept: &Arc<Kept>) {
    let kept = kept.clone();
    // Waits for operations that run.
    if let Err(error) = tokio::task::spawn_blocking(move || kept.give_back()).await {
        tracing::error!(%error, "a handed-over directory was not given back");
    }
}

fn malformed(text: &str) -> Error {
    Error::new(ErrorCode::Malformed, text)
}
