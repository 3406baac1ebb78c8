//! Trees of scratch volumes that agents work on. Who accounts for a tree is in `tree_owner.rs`, the
//! sessions themselves are in `tree_sessions.rs` of the crate.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bafs_proto::ids::{AgentId, Epoch, VolumeId};
use bafs_proto::message::{OpenTree, TreeRef, TreeSession};
use bafs_proto::time::{Deadline, Time};
use bafs_proto::token::Right;
use bafs_proto::volume::VolumeSpec;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_tree::Limit;

use super::store::Store;
use super::tree_owner::{VolumeTree, give_back_deadline, lease_held_error};
use super::volume_errors::volume_lost_error;
use crate::counters::Counters;
use crate::errors::run_blocking;
use crate::fd_passing::Handoff;
use crate::full_disk::DiskFullFlag;
use crate::tree_sessions::{TreeDirectory, TreeSessions};

/// Trees and sessions of this server.
#[derive(Debug)]
pub(super) struct ScratchTrees {
    store: Arc<Store>,
    sessions: TreeSessions,
    counters: Counters,
    trees: Mutex<BTreeMap<VolumeId, Arc<VolumeTree>>>,
}

impl ScratchTrees {
    pub(super) fn new(store: Arc<Store>, counters: Counters) -> Self {
        let directory = TreeDirectory(Some(store.volume_directory()));
        Self {
            sessions: TreeSessions::in_directory(directory, store.incarnation(), counters.clone()),
            counters,
            store,
            trees: Mutex::default(),
        }
    }

    pub(super) fn sessions(&self) -> &TreeSessions {
        &self.sessions
    }

    /// The tree of a volume.
    pub(super) fn volume_tree(&self, spec: &VolumeSpec) -> Arc<VolumeTree> {
        let root = self.store.tree_path(spec.id);
        let limit = Limit {
            bytes: spec.size_bytes,
            files: spec.size_files,
        };
        let counters = self.counters.clone();
        let tree = || Arc::new(VolumeTree::new(spec.id, root, limit, spec.limit, counters));
        self.trees().entry(spec.id).or_insert_with(tree).clone()
    }

    /// Bytes and files that a volume uses: when an agent accounts for it, as last told.
    pub(super) async fn usage(&self, spec: &VolumeSpec) -> Result<(u64, u64)> {
        let volume = self.volume_tree(spec);
        let mut hold = volume.lock_owner().await;
        Ok(volume
            .open_for_reader(&mut hold, give_back_deadline())
            .await?
            .used())
    }

    /// Opens the tree of a volume for a session. A writer waits until an earlier one on this
    /// machine, that accounts for the tree itself, has given it back or is dead.
    ///
    /// # Errors
    /// `Busy`; `Fenced` for a session that goes on when another agent has written since;
    /// `LeaseHeld` for one that yields to another writer.
    pub(super) async fn open(
        &self,
        volume: &VolumeTree,
        call: OpenTree,
        until: Deadline,
    ) -> Result<TreeSession> {
        let (id, resumes) = (volume.id(), call.resumed_incarnation.is_some());
        if call.writable && !resumes {
            let sessions = &self.sessions;
            sessions.wait_for_writer_end(&call.tree, call.agent).await;
        }
        let mut hold = volume.lock_owner().await;
        if call.writable && call.yields {
            let has_writer = self.sessions.has_writer(&call.tree, call.agent);
            if has_writer || VolumeTree::is_owned_by_agent(&hold) {
                return Err(lease_held_error(id));
            }
        }
        let tree = if call.writable {
            let (store, agent) = (self.store.clone(), call.agent);
            run_blocking(move || note_writer(&store, id, agent, resumes)).await?;
            if VolumeTree::is_owned_by_agent(&hold) {
                self.sessions.fence(&call.tree).await;
            }
            let text = format!("another agent writes volume {id} now");
            let why = Error::new(ErrorCode::Fenced, text);
            volume.open_for_writer(&mut hold, why, until).await?
        } else {
            volume.open_for_reader(&mut hold, until).await?
        };
        self.sessions.open(tree, call).await
    }

    /// Lets a volume hold so much from now on.
    ///
    /// # Errors
    /// As [`VolumeTree::set_limit`].
    pub(super) async fn set_limit(&self, spec: &VolumeSpec, limit: Limit) -> Result<()> {
        let volume = self.volume_tree(spec);
        let mut hold = volume.lock_owner().await;
        volume.set_limit(&mut hold, limit).await
    }

    /// Hands the tree of a volume over to the agent of a session.
    ///
    /// # Errors
    /// `SessionUnknown`, `Fenced`, `Busy`, `ServerFault`.
    pub(super) async fn hand_over(
        &self,
        volume: &VolumeTree,
        tree: &TreeRef,
        epoch: Epoch,
    ) -> Result<Handoff> {
        let mut hold = volume.lock_owner().await;
        let shown = volume
            .open_for_reader(&mut hold, give_back_deadline())
            .await?;
        self.sessions
            .hand_to_agent(tree, epoch, |right| match right {
                Right::Write => volume.hand_to_writer(&mut hold, epoch),
                _ => volume.hand_to_reader(&shown),
            })
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
