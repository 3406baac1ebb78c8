//! What the kernel forgot: the server hears of it in bundles, which are signs of life too.

use std::sync::Arc;
use std::time::Duration;

use bafs_proto::file_op::{Caller, FileOp};
use bafs_proto::ids::{Epoch, InodeNo};
use bafs_proto::limits::BATCH_OPS_MAX;
use bytes::Bytes;

use super::delegation::{DelegationState, SessionDelegation};
use super::{RemoteSession, SessionFailure, lock};
use crate::limits::{FORGET_INTERVAL_MS, LEASE_RENEWAL_INTERVAL_MS_MAX};

impl RemoteSession {
    /// Takes note of what the kernel forgot; the answer is how much the server is to be told.
    pub(super) fn forget(&self, ino: InodeNo, count: u64) -> usize {
        let mut known = self.inode_map();
        let epoch = known.epoch();
        let dropped = known.forget(ino, count);
        drop(known);
        match dropped {
            Some((ino, count)) => self.queue_forget(epoch, FileOp::Forget { ino, count }),
            None => 0,
        }
    }

    /// The same where nothing on its way needs the file.
    pub(super) fn forget_at_once(&self, ino: InodeNo, count: u64) -> usize {
        let queued = self.forget(ino, count);
        if let Some(files) = &self.reader_files
            && !self.inode_map().has_inode(ino)
        {
            lock(files).forget(ino);
        }
        queued
    }

    /// Has an operation sent to which nobody needs the answer.
    pub(super) fn queue_forget(&self, epoch: Epoch, op: FileOp) -> usize {
        let mut forgets = lock(&self.forgets);
        if forgets.0 != epoch {
            // A new session holds nothing of what the old one held.
            *forgets = (epoch, Vec::new());
        }
        forgets.1.push(op);
        forgets.1.len()
    }

    /// The kernel dropped references; the server is told when nothing on its way needs them.
    pub(super) fn forget_later(&self, own: &SessionDelegation, ino: InodeNo, count: u64) -> usize {
        let mut state = own.lock_state();
        let end = state.delegation.log.end_position();
        if end > state.delegation.log.acknowledged_position() {
            state.pending_forgets.push_back((end, ino, count));
            return 0;
        }
        self.queue_forgets(&mut state, ino, count)
    }

    pub(super) fn queue_forgets(
        &self,
        state: &mut DelegationState,
        ino: InodeNo,
        count: u64,
    ) -> usize {
        let queued = self.forget(ino, count);
        if self.inode_map().has_inode(ino) {
            return queued;
        }
        state.delegation.metadata.forget(ino);
        state.delegation.forget_siblings(ino);
        let listed = state.delegation.metadata.take_all_listed(ino);
        let more = listed.into_iter();
        let more = more.map(|file| self.queue_forgets(state, file, 1)).max();
        queued.max(more.unwrap_or(0))
    }

    /// Shows interest before the lease ends, as long as the session lasts.
    pub(super) async fn renew_lease(self: Arc<Self>) {
        let lease_ms = self.link().tree_session.lease_ms;
        let pause_ms = (lease_ms / 3).clamp(1, LEASE_RENEWAL_INTERVAL_MS_MAX);
        let look_ms = pause_ms.min(FORGET_INTERVAL_MS);
        let mut silent_ms = 0;
        while self.health.loss().is_none() {
            tokio::time::sleep(Duration::from_millis(look_ms)).await;
            silent_ms += look_ms;
            if let Some(own) = self.delegation.get() {
                own.send_held_back();
            }
            // The server keeps what was removed until it hears that nobody knows it any more.
            let epoch = self.link().tree_session.epoch;
            let has_news = {
                let forgets = lock(&self.forgets);
                forgets.0 == epoch && !forgets.1.is_empty()
            };
            if silent_ms >= pause_ms || has_news {
                silent_ms = 0;
                self.send_forgets().await;
            }
        }
    }

    /// Sends what was forgotten, even if it is nothing: any call is a sign of life.
    pub(super) async fn send_forgets(&self) {
        let link = self.link();
        let forgets = {
            let mut forgets = lock(&self.forgets);
            if forgets.0 == link.tree_session.epoch {
                let count = forgets.1.len().min(BATCH_OPS_MAX);
                let rest = forgets.1.split_off(count);
                std::mem::replace(&mut forgets.1, rest)
            } else {
                Vec::new()
            }
        };
        let (caller, deadline) = (Caller::default(), self.server.deadline());
        let nothing = Bytes::new();
        let batch = (forgets, link.unordered_numbers());
        let sent = self.run_batch(&link, caller, batch, &nothing, deadline);
        // A loss is recorded where it is found; nothing else can be done about it here.
        if let Err(SessionFailure::SessionForgotten { .. }) = sent.await {
            let _ = self.reopen_session(&link, deadline).await;
        }
    }
}
