//! Trees of scratch volumes that agents work on. Who accounts for a tree is in `tree_owner.rs`, the
//! sessions themselves are in `tree_sessions.rs` of the crate.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bafs_proto::ids::{AgentId, Epoch, VolumeId};
use bafs_proto::message::{
    CloseTree, Done, FileResults, OpenTree, RunFileOps, TreeRef, TreeSession,
};
use bafs_proto::time::{Deadline, Time};
use bafs_proto::token::Right;
use bafs_proto::volume::VolumeSpec;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_tree::Limit;
use bytes::Bytes;

use super::tree_owner::{VolumeTree, give_back_deadline};
use super::{Storage, Store, blocking, volume_lost_error};
use crate::counters::Counters;
use crate::fd_passing::{Handoff, HandoffFactory};
use crate::full_disk::DiskFullFlag;
use crate::tree_sessions::{TreeDirectory, TreeSessions};

/// An answer is on its way so long before the deadline, to arrive in time.
const REPLY_MARGIN: Duration = Duration::from_millis(200);

/// Trees and sessions of this server.
#[derive(Debug)]
pub(super) struct ScratchTrees {
    sessions: TreeSessions,
    trees: Mutex<BTreeMap<VolumeId, Arc<VolumeTree>>>,
}

impl ScratchTrees {
    pub(super) fn new(volumes: PathBuf, life: u32, counters: Counters) -> Self {
        Self {
            sessions: TreeSessions::in_directory(TreeDirectory(Some(volumes)), life, counters),
            trees: Mutex::default(),
        }
    }

    /// The tree of a volume.
    fn volume_tree(&self, spec: &VolumeSpec, root: PathBuf) -> Arc<VolumeTree> {
        let limit = Limit {
            bytes: spec.size_bytes,
            files: spec.size_files,
        };
        let tree = || Arc::new(VolumeTree::new(spec.id, root, limit, spec.limit));
        self.trees().entry(spec.id).or_insert_with(tree).clone()
    }

    /// Bytes and files that a volume uses: when an agent accounts for it, as last told.
    pub(super) async fn usage(&self, spec: &VolumeSpec, root: PathBuf) -> Result<(u64, u64)> {
        let volume = self.volume_tree(spec, root);
        let mut hold = volume.lock_owner().await;
        Ok(volume
            .open_for_reader(&mut hold, give_back_deadline())
            .await?
            .used())
    }

    /// Ends everything that has to do with a volume that is no more.
    pub(super) async fn drop_volume(&self, id: VolumeId) {
        self.sessions.drop_tree(&TreeRef::Volume(id)).await;
        let volume = self.trees().remove(&id);
        if let Some(volume) = volume {
            volume.end_all_users(volume_lost_error(id)).await;
        }
    }

    /// Where it is noted that somebody found the disk full.
    pub(super) fn full_disk(&self) -> &DiskFullFlag {
        self.sessions.full_disk()
    }

    pub(super) async fn sweep(&self, now: Time) {
        self.sessions.sweep(now).await;
        let volumes: Vec<_> = {
            let trees = self.trees();
            trees.iter().map(|(id, tree)| (*id, tree.clone())).collect()
        };
        for (id, volume) in volumes {
            volume.recall_if(|epoch| !self.sessions.is_open(&TreeRef::Volume(id), epoch));
        }
    }

    /// Volumes that agents have, and whose operations nobody counts.
    pub(super) fn watched_volumes(&self) -> Vec<Arc<VolumeTree>> {
        let trees = self.trees();
        let watched = trees.values().filter(|tree| tree.is_watched());
        watched.cloned().collect()
    }

    fn trees(&self) -> MutexGuard<'_, BTreeMap<VolumeId, Arc<VolumeTree>>> {
        self.trees.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Storage {
    /// Opens the tree of a scratch volume. A writer waits until an earlier one on this machine,
    /// that accounts for the tree itself, has given it back or is dead.
    ///
    /// # Errors
    /// `VolumeLost`, `Busy`, `WrongState`; `Unsupported` for a tree that is no volume's; `Fenced`
    /// for a session that goes on when another agent has written since.
    pub async fn open_tree(&self, call: OpenTree, deadline: Deadline) -> Result<TreeSession> {
        let left = deadline.remaining().saturating_sub(REPLY_MARGIN);
        let until = Deadline::after(left);
        let id = volume_id(&call.tree)?;
        let volume = self.tree_of(id)?;
        let opening = async {
            if call.writable && call.resumed_incarnation.is_none() {
                let sessions = &self.trees.sessions;
                sessions.wait_for_writer_end(&call.tree, call.agent).await;
            }
            let mut hold = volume.lock_owner().await;
            let tree = if call.writable {
                let (store, agent, resumes) = (
                    self.store.clone(),
                    call.agent,
                    call.resumed_incarnation.is_some(),
                );
                blocking(move || note_writer(&store, id, agent, resumes)).await?;
                if VolumeTree::is_owned_by_agent(&hold) {
                    self.trees.sessions.fence(&call.tree).await;
                }
                let text = format!("another agent writes volume {id} now");
                let why = Error::new(ErrorCode::Fenced, text);
                volume.open_for_writer(&mut hold, why, until).await?
            } else {
                volume.open_for_reader(&mut hold, until).await?
            };
            self.trees.sessions.open(tree, call).await
        };
        let session = self.or_volume_lost(id, opening).await?;
        // A deletion may have come between; it must not leave a tree open.
        if self.volumes().get(id).is_none() {
            self.trees.drop_volume(id).await;
            return Err(volume_lost_error(id));
        }
        Ok(session)
    }

    /// Checks, by `allow`, whether an agent may have a tree handed over: it needs the right of its
    /// session. What is returned does it.
    ///
    /// # Errors
    /// What `allow` answers; `SessionUnknown`, `Fenced`, `VolumeLost`; `Unsupported` for a tree
    /// that is no volume's.
    pub fn prepare_tree_handoff(
        self: &Arc<Self>,
        tree: TreeRef,
        epoch: Epoch,
        allow: impl FnOnce(Right) -> Result<()>,
    ) -> Result<HandoffFactory> {
        volume_id(&tree)?;
        self.trees.sessions.authorise(&tree, epoch, allow)?;
        let storage = self.clone();
        Ok(Box::new(move || {
            Box::pin(async move { storage.hand_over_tree(&tree, epoch).await })
        }))
    }

    async fn hand_over_tree(&self, tree: &TreeRef, epoch: Epoch) -> Result<Handoff> {
        let id = volume_id(tree)?;
        let volume = self.tree_of(id)?;
        let mut hold = volume.lock_owner().await;
        let shown = volume
            .open_for_reader(&mut hold, give_back_deadline())
            .await?;
        let handoff = self
            .trees
            .sessions
            .hand_to_agent(tree, epoch, |right| match right {
                Right::Write => volume.hand_to_writer(&mut hold, epoch),
                _ => volume.hand_to_reader(&shown),
            })?;
        self.counters.add("tree_handoffs", 1);
        Ok(handoff)
    }

    fn tree_of(&self, id: VolumeId) -> Result<Arc<VolumeTree>> {
        let root = self.scratch_tree_path(id)?;
        let volumes = self.volumes();
        let row = volumes.get(id).ok_or_else(|| volume_lost_error(id))?;
        Ok(self.trees.volume_tree(&row.spec, root))
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
        let id = volume_id(&call.tree)?;
        let sessions = &self.trees.sessions;
        let running = async {
            sessions.authorise(&call.tree, call.epoch, allow)?;
            self.scratch_tree_path(id)?;
            sessions.run(call, body).await
        };
        self.or_volume_lost(id, running).await
    }

    /// The right that a call of a session needs which has its volume kept for so long. One of a
    /// session that is no more is told so if it may read, but keeps no volume by that.
    pub(crate) fn session_right(
        &self,
        tree: &TreeRef,
        epoch: Epoch,
        lifetime_ms_min: u64,
    ) -> Right {
        let known = self.trees.sessions.right(tree, epoch);
        known.unwrap_or(match lifetime_ms_min {
            0 => Right::Read,
            _ => Right::Write,
        })
    }

    /// Ends a session, if `allow` grants the right that it needs. A volume that it may write is
    /// kept as long as the call asks for before that is answered.
    ///
    /// # Errors
    /// What `allow` answers; `Unsupported` for a tree that is no volume's; `ServerFault` when the
    /// longer lifetime cannot be made durable.
    pub async fn close_tree(
        self: &Arc<Self>,
        call: &CloseTree,
        allow: impl FnOnce(Right) -> Result<()>,
    ) -> Result<Done> {
        let id = volume_id(&call.tree)?;
        let sessions = &self.trees.sessions;
        let right = self.session_right(&call.tree, call.epoch, call.lifetime_ms_min);
        if call.lifetime_ms_min == 0 || right == Right::Read {
            sessions.close(call, allow).await?;
            return Ok(Done);
        }
        // First, and also without a session: what holds results may outlive it, and the call may be
        // repeated.
        allow(Right::Write)?;
        self.extend_lifetime(id, call.lifetime_ms_min).await?;
        sessions.close(call, |_| Ok(())).await?;
        Ok(Done)
    }
}

/// Takes note of a writer. One that goes on where an earlier life of the server left it must be
/// the last that wrote: this life does not know whom it would fence.
fn note_writer(store: &Store, id: VolumeId, agent: AgentId, resumes: bool) -> Result<()> {
    if resumes && store.last_writer(id) != Some(agent) {
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
pub(crate) fn volume_id(tree: &TreeRef) -> Result<VolumeId> {
    match tree {
        TreeRef::Volume(id) => Ok(*id),
        TreeRef::Home(path) => {
            let text = format!("a node has no home; ask the home server for '{path}'");
            Err(Error::new(ErrorCode::Unsupported, text))
        }
    }
}
