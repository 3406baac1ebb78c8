//! Trees of scratch volumes that agents work on: opens each tree once. The sessions themselves are
//! in `trees.rs` of the crate.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bafs_proto::ids::{AgentId, VolumeId};
use bafs_proto::message::{
    CloseTree, Done, FileResults, OpenTree, RunFileOps, TreeRef, TreeSession,
};
use bafs_proto::time::Time;
use bafs_proto::token::Right;
use bafs_proto::volume::VolumeSpec;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_tree::{Limit, Tree};
use bytes::Bytes;
use tokio::sync::OnceCell;

use super::{Storage, Store, blocking, lost};
use crate::counters::Counters;
use crate::trees::TreeSessions;

/// Trees and sessions of this server.
#[derive(Debug)]
pub(super) struct OpenTrees {
    sessions: TreeSessions,
    open: Mutex<BTreeMap<VolumeId, Arc<OnceCell<Arc<Tree>>>>>,
}

impl OpenTrees {
    pub(super) fn new(life: u32, counters: Counters) -> Self {
        Self {
            sessions: TreeSessions::new(life, counters),
            open: Mutex::default(),
        }
    }

    /// The open tree of a volume.
    pub(super) async fn tree(&self, spec: &VolumeSpec, root: PathBuf) -> Result<Arc<Tree>> {
        let cell = self.open().entry(spec.id).or_default().clone();
        let limit = Limit {
            bytes: spec.size_bytes,
            files: spec.size_files,
        };
        let id = spec.id;
        let opening = || {
            blocking(move || {
                Tree::open(&root, Some(limit)).map_err(|e| {
                    Error::new(ErrorCode::ServerFault, format!("tree of volume {id}: {e}"))
                })
            })
        };
        cell.get_or_try_init(opening).await.cloned()
    }

    pub(super) async fn drop_volume(&self, id: VolumeId) {
        self.sessions.drop_tree(&TreeRef::Volume(id)).await;
        self.open().remove(&id);
    }

    pub(super) async fn sweep(&self, now: Time) {
        self.sessions.sweep(now).await;
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<VolumeId, Arc<OnceCell<Arc<Tree>>>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Storage {
    /// Opens the tree of a scratch volume.
    ///
    /// # Errors
    /// `VolumeLost`, `Busy`, `WrongState`; `Unsupported` for a tree that is no volume's; `Fenced`
    /// for a session that goes on when another agent has written since.
    pub async fn open_tree(&self, call: OpenTree) -> Result<TreeSession> {
        let id = volume_of(&call.tree)?;
        let root = self.scratch(id)?;
        let spec = self
            .volumes()
            .get(id)
            .map(|row| row.spec.clone())
            .ok_or_else(|| lost(id))?;
        let tree = self.if_lives(id, self.trees.tree(&spec, root)).await?;
        if call.writable {
            let (store, agent, resumes) = (self.store.clone(), call.agent, call.resumes.is_some());
            let noting = blocking(move || note_writer(&store, id, agent, resumes));
            self.if_lives(id, noting).await?;
        }
        let session = self.trees.sessions.open(tree, call).await?;
        // A deletion may have come between; it must not leave a tree open.
        if self.volumes().get(id).is_none() {
            self.trees.drop_volume(id).await;
            return Err(lost(id));
        }
        Ok(session)
    }

    /// Runs operations of a session, if `allow` grants the right that it needs.
    ///
    /// # Errors
    /// What `allow` answers, `VolumeLost`, `SessionUnknown`, `Fenced`.
    pub async fn run_file_ops(
        &self,
        call: RunFileOps,
        body: Bytes,
        allow: impl FnOnce(Right) -> Result<()>,
    ) -> Result<(FileResults, Bytes)> {
        let id = volume_of(&call.tree)?;
        let sessions = &self.trees.sessions;
        let running = async {
            sessions.admit(&call.tree, call.epoch, allow)?;
            self.scratch(id)?;
            sessions.run(call, body).await
        };
        self.if_lives(id, running).await
    }

    /// Ends a session, if `allow` grants the right that it needs.
    ///
    /// # Errors
    /// What `allow` answers; `Unsupported` for a tree that is no volume's.
    pub async fn close_tree(
        &self,
        call: &CloseTree,
        allow: impl FnOnce(Right) -> Result<()>,
    ) -> Result<Done> {
        volume_of(&call.tree)?;
        self.trees.sessions.close(call, allow).await?;
        Ok(Done)
    }
}

/// Takes note of a writer. One that goes on where an earlier life of the server left it must be
/// the last that wrote: this life does not know whom it would fence.
fn note_writer(store: &Store, id: VolumeId, agent: AgentId, resumes: bool) -> Result<()> {
    if resumes && store.writer(id) != Some(agent) {
        let text = format!("another agent has written volume {id} since");
        return Err(Error::new(ErrorCode::Fenced, text));
    }
    // A full disk must not keep a job from its volume; it then cannot go on after a restart.
    store
        .set_writer(id, agent)
        .or_else(|_| store.forget_writer(id))
        .map_err(|e| {
            let text = format!("cannot note the writer of volume {id}: {e}");
            Error::new(ErrorCode::ServerFault, text)
        })
}

/// The volume of a tree.
///
/// # Errors
/// `Unsupported` for a tree that is no volume's.
pub(crate) fn volume_of(tree: &TreeRef) -> Result<VolumeId> {
    match tree {
        TreeRef::Volume(id) => Ok(*id),
        TreeRef::Home(path) => {
            let text = format!("a node has no home; ask the home server for '{path}'");
            Err(Error::new(ErrorCode::Unsupported, text))
        }
    }
}
