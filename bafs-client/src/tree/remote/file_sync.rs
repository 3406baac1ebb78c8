//! Makes files durable for the one writer of a volume, while what it wrote is still on its way: the
//! sync travels behind the log, and the server runs it when that has run.

use std::sync::Arc;

use bafs_proto::file_op::{Caller, Errno, FileOp, FileReply, FileResult};
use bytes::Bytes;
use nix::libc;

use super::delegation::SessionDelegation;
use super::{RemoteSession, SessionLink};
use crate::limits::BATCH_BYTES;

/// Data on its way, in bytes, from which on the disk begins before all of it has come: a network of
/// 1 GB/s needs 4 ms for so much, and a call 0.2 ms.
const EARLY_SYNC_BYTES_MIN: u64 = 4 * BATCH_BYTES as u64;

impl RemoteSession {
    /// Syncs a file with all that is before a position of the log. `None` for other operations, and
    /// where there is nothing to wait for or the session ended: then the server is asked anew.
    pub(super) async fn sync_behind_log(
        self: &Arc<Self>,
        own: &SessionDelegation,
        (caller, op): (Caller, &FileOp),
        position: u64,
    ) -> Option<FileResult> {
        if !matches!(op, FileOp::Fsync { .. }) || *own.acknowledged.borrow() >= position {
            return None;
        }
        let (early, behind) = tokio::join!(
            self.begin_sync(own, caller, op),
            self.run_sync(own, (caller, op), position)
        );
        if early.is_err() {
            // A disk tells of each failure once.
            return Some(early);
        }
        // What is synced is all that was written only if that has run.
        self.wait_for_position(own, position).await;
        behind.map(|result| self.fail_if_lost(result))
    }

    /// Has the disk begin, if much is on its way.
    async fn begin_sync(&self, own: &SessionDelegation, caller: Caller, op: &FileOp) -> FileResult {
        let done = Ok(FileReply::Done);
        let FileOp::Fsync { handle, .. } = *op else {
            return done;
        };
        let link = self.link();
        let op = FileOp::Fsync {
            handle,
            data_only: true,
        };
        let is_large = own.lock_state().delegation.log.bytes() >= EARLY_SYNC_BYTES_MIN;
        let Some(op) = self.translate_at_once(&link, &op).filter(|_| is_large) else {
            return done;
        };
        let (nothing, deadline) = (Bytes::new(), self.server.deadline());
        let ran = self.run_in_session(&link, caller, op, &nothing, deadline);
        match ran.await {
            // The server may not have opened the file yet.
            Ok((Err(errno), _)) if errno != Errno(libc::EBADF) => Err(errno),
            _ => done,
        }
    }

    /// Sends the sync when all before the position is on its way.
    async fn run_sync(
        &self,
        own: &SessionDelegation,
        (caller, op): (Caller, &FileOp),
        position: u64,
    ) -> Option<FileResult> {
        self.wait_until_sent(own, position).await;
        let link = self.link();
        let after = {
            let state = own.lock_state();
            let (epoch, sequence) = state.last_batch?;
            let is_sent = state.delegation.log.sent_position() >= position;
            (is_sent && epoch == link.tree_session.epoch).then_some(sequence)?
        };
        let op = self.translate_at_once(&link, op)?;
        let (nothing, deadline) = (Bytes::new(), self.server.deadline());
        let numbers = (link.next_sequence(), Some(after), Vec::new());
        let batch = (vec![op], numbers);
        let ran = self.run_batch(&link, caller, batch, &nothing, deadline);
        ran.await.ok()?.0.pop()
    }

    /// An operation in numbers of a session that has, or will have, all that it names.
    fn translate_at_once(&self, link: &SessionLink, op: &FileOp) -> Option<FileOp> {
        let known = self.inode_map();
        let is_present = known.epoch() == link.tree_session.epoch;
        known.translate(op).ok().filter(|_| is_present)
    }
}
