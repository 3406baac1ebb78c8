//! Trees of scratch volumes that agents work on. Opens each tree once and remembers which sessions
//! write, so that the node can ask for the right that a session needs.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bafs_proto::ids::{Epoch, VolumeId};
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

use super::{Storage, blocking, lost};
use crate::counters::Counters;
use crate::trees::TreeSessions;

/// Most sessions whose right is remembered: twice what may be open. An agent whose session was
/// forgotten opens the tree again.
const SESSIONS_MAX: usize = 8192;

/// Trees and sessions of this server.
#[derive(Debug)]
pub(super) struct OpenTrees {
    sessions: TreeSessions,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    trees: BTreeMap<VolumeId, Arc<OnceCell<Arc<Tree>>>>,
    rights: BTreeMap<(Epoch, VolumeId), Right>,
}

impl OpenTrees {
    pub(super) fn new(counters: Counters) -> Self {
        Self {
            sessions: TreeSessions::new(counters),
            state: Mutex::default(),
        }
    }

    /// The open tree of a volume.
    pub(super) async fn tree(&self, spec: &VolumeSpec, root: PathBuf) -> Result<Arc<Tree>> {
        let cell = self.state().trees.entry(spec.id).or_default().clone();
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
        let mut state = self.state();
        state.trees.remove(&id);
        state.rights.retain(|(_, volume), _| *volume != id);
    }

    pub(super) async fn sweep(&self, now: Time) {
        self.sessions.sweep(now).await;
    }

    fn remember(&self, session: TreeSession, id: VolumeId, right: Right) {
        let mut state = self.state();
        state.rights.insert((session.epoch, id), right);
        if state.rights.len() > SESSIONS_MAX {
            state.rights.pop_first();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Storage {
    /// The right that calls of this session need, or `None` when there is no such session.
    pub fn session_right(&self, id: VolumeId, epoch: Epoch) -> Option<Right> {
        self.trees.state().rights.get(&(epoch, id)).copied()
    }

    /// Opens the tree of a scratch volume.
    ///
    /// # Errors
    /// `VolumeLost`, `Busy`, `WrongState`; `Unsupported` for a tree that is no volume's.
    pub async fn open_tree(&self, call: OpenTree) -> Result<TreeSession> {
        let id = volume_of(&call.tree)?;
        let root = self.scratch(id)?;
        let spec = self
            .volumes()
            .get(id)
            .map(|row| row.spec.clone())
            .ok_or_else(|| lost(id))?;
        let tree = self.if_lives(id, self.trees.tree(&spec, root)).await?;
        let right = if call.writable {
            Right::Write
        } else {
            Right::Read
        };
        let session = self.trees.sessions.open(tree, call).await?;
        self.trees.remember(session, id, right);
        // A deletion may have come between; it must not leave a tree open.
        if self.volumes().get(id).is_none() {
            self.trees.drop_volume(id).await;
            return Err(lost(id));
        }
        Ok(session)
    }

    /// Runs operations of a session.
    ///
    /// # Errors
    /// `VolumeLost`, `SessionUnknown`, `Fenced`.
    pub async fn run_file_ops(
        &self,
        call: RunFileOps,
        body: Bytes,
    ) -> Result<(FileResults, Bytes)> {
        let id = volume_of(&call.tree)?;
        self.scratch(id)?;
        if self.session_right(id, call.epoch).is_none() {
            let text = format!(
                "no session {} with volume {id}; open its tree again",
                call.epoch
            );
            return Err(Error::new(ErrorCode::SessionUnknown, text));
        }
        self.if_lives(id, self.trees.sessions.run(call, body)).await
    }

    /// Ends a session.
    ///
    /// # Errors
    /// `Unsupported` for a tree that is no volume's.
    pub async fn close_tree(&self, call: &CloseTree) -> Result<Done> {
        let id = volume_of(&call.tree)?;
        self.trees.sessions.close(call).await;
        self.trees.state().rights.remove(&(call.epoch, id));
        Ok(Done)
    }
}

fn volume_of(tree: &TreeRef) -> Result<VolumeId> {
    match tree {
        TreeRef::Volume(id) => Ok(*id),
        TreeRef::Home(path) => {
            let text = format!("a node has no home; ask the home server for '{path}'");
            Err(Error::new(ErrorCode::Unsupported, text))
        }
    }
}
