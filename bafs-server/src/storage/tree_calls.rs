//! Calls about the trees of scratch volumes: sessions of agents, their hand-over, and what other
//! nodes read for replicas. Each use keeps the volume alive.

use std::sync::Arc;
use std::time::Duration;

use bafs_proto::ids::{Epoch, VolumeId};
use bafs_proto::message::{
    CloseTree, Done, FileResults, OpenTree, RunFileOps, SourceData, TreeRef, TreeSession,
};
use bafs_proto::replica::{
    FileMap, ListVolumeTree, MapVolumeFile, ReadVolumeFile, ReadVolumeFiles, TreePage,
};
use bafs_proto::time::Deadline;
use bafs_proto::token::Right;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use super::tree_owner::VolumeTree;
use super::volume_errors::volume_lost_error;
use super::{Storage, tree_listing};
use crate::errors::run_blocking;
use crate::fd_passing::{Handoff, HandoffFactory};

/// An answer is on its way so long before the deadline, to arrive in time.
const REPLY_MARGIN: Duration = Duration::from_millis(200);

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
        let opening = self.trees.open(&volume, call, until);
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
        self.trees.sessions().authorise(&tree, epoch, allow)?;
        let storage = self.clone();
        Ok(Box::new(move || {
            Box::pin(async move { storage.hand_over_tree(&tree, epoch).await })
        }))
    }

    async fn hand_over_tree(&self, tree: &TreeRef, epoch: Epoch) -> Result<Handoff> {
        let volume = self.tree_of(volume_id(tree)?)?;
        let handoff = self.trees.hand_over(&volume, tree, epoch).await?;
        self.counters.add("tree_handoffs", 1);
        Ok(handoff)
    }

    fn tree_of(&self, id: VolumeId) -> Result<Arc<VolumeTree>> {
        self.scratch_tree_path(id)?;
        let volumes = self.volumes();
        let row = volumes.get(id).ok_or_else(|| volume_lost_error(id))?;
        Ok(self.trees.volume_tree(&row.spec))
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
        let sessions = &self.trees.sessions();
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
        let known = self.trees.sessions().right(tree, epoch);
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
        let sessions = &self.trees.sessions();
        let right = self.session_right(&call.tree, call.epoch, call.lifetime_ms_min);
        let is_writer = sessions.right(&call.tree, call.epoch) == Some(Right::Write);
        if call.lifetime_ms_min == 0 || right == Right::Read {
            sessions.close(call, allow).await?;
        } else {
            // First, and also without a session: what holds results may outlive it, and the call
            // may be repeated.
            allow(Right::Write)?;
            self.extend_lifetime(id, call.lifetime_ms_min).await?;
            sessions.close(call, |_| Ok(())).await?;
        }
        if is_writer && let Ok(volume) = self.tree_of(id) {
            volume.note_orderly_end(call.epoch);
        }
        Ok(Done)
    }

    /// A page of the tree of a scratch volume.
    ///
    /// # Errors
    /// `VolumeLost`, `Busy` while it is being filled, `WrongState` for another kind, `BadPath`.
    pub async fn list_tree(&self, call: ListVolumeTree) -> Result<TreePage> {
        let tree = self.scratch_tree_path(call.volume)?;
        self.or_volume_lost(
            call.volume,
            run_blocking(move || tree_listing::list_tree(&tree, call.after.as_deref())),
        )
        .await
    }

    /// A range of a file of a scratch volume.
    ///
    /// # Errors
    /// As [`Self::list_tree`], and `NotFound` or `SourceChanged` for the file.
    pub async fn read_file(&self, call: ReadVolumeFile) -> Result<(SourceData, Bytes)> {
        let tree = self.scratch_tree_path(call.volume)?;
        self.or_volume_lost(
            call.volume,
            run_blocking(move || tree_listing::read_range(&tree, &call)),
        )
        .await
    }

    /// Small files of a scratch volume, whole.
    ///
    /// # Errors
    /// As [`Self::read_file`].
    pub async fn read_files(&self, call: ReadVolumeFiles) -> Result<(SourceData, Bytes)> {
        let tree = self.scratch_tree_path(call.volume)?;
        let volume = call.volume;
        let read = run_blocking(move || tree_listing::read_files(&tree, &call));
        self.or_volume_lost(volume, read).await
    }

    /// Where a file of a scratch volume has data.
    ///
    /// # Errors
    /// As [`Self::read_file`].
    pub async fn map_file(&self, call: MapVolumeFile) -> Result<FileMap> {
        let tree = self.scratch_tree_path(call.volume)?;
        let volume = call.volume;
        let map = run_blocking(move || tree_listing::map_file(&tree, &call));
        self.or_volume_lost(volume, map).await
    }
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
