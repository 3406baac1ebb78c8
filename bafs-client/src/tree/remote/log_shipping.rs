//! Brings what the one writer of a volume was told to its server: in batches, in order, and again
//! after a restart. What may be told is decided in `logic/delegation.rs`; what became of batches
//! that a restart met on their way is found out in `log_recovery.rs`.

use std::collections::VecDeque;
use std::sync::{Arc, MutexGuard};

use bafs_proto::file_op::{BodyRange, Caller, Errno, FileOp, FileReply, FileResult};
use bafs_proto::ids::Epoch;
use bafs_proto::message::AssignedNumbers;
use bafs_proto::{Error, ErrorCode};
use bytes::{Bytes, BytesMut};
use nix::libc;
use tokio::sync::oneshot;

use super::begun_task::begin_here;
use super::delegation::{DelegationState, PendingAnswer, SessionDelegation, free_space};
use super::{BatchNumbers, RemoteSession, SessionFailure, SessionLink};
use crate::limits::{BATCH_BYTES, BATCH_OPS_MAX};
use crate::logic::operation_log::LogEntry;

/// Data of a batch, in bytes, that are sent by the thread which sends the log. To encrypt and copy
/// so many takes as long as to wake another thread, some 30 µs.
const BYTES_SENT_HERE_MAX: usize = 64 << 10;

/// What became of a batch.
type BatchAnswer = Result<Vec<FileResult>, SessionFailure>;

/// A batch on its way.
pub(super) struct SentBatch {
    /// The session that it went to, and the position of its first entry in the log.
    epoch: Epoch,
    first_position: u64,
    /// For each entry whether it was left out, because nothing of it is left to do.
    is_skipped: Vec<bool>,
    /// The count of operations that had taken space without the log.
    query_count: u64,
    pub(super) answer: oneshot::Receiver<BatchAnswer>,
}

impl RemoteSession {
    /// Sends what is in the log for as long as the volume is there.
    pub(super) async fn ship_log(self: Arc<Self>) {
        let Some(own) = self.delegation.get() else {
            return;
        };
        let mut sent = VecDeque::<SentBatch>::new();
        // The session that all of them go to, and the last of them.
        let (mut link, mut last) = (self.link(), 0);
        while self.health.loss().is_none() {
            own.lock_state().inflight_batches = sent.len();
            let mut failure = None;
            if link.tree_session.epoch != self.link().tree_session.epoch {
                // Somebody else has found out.
                failure = Some(SessionFailure::SessionForgotten { maybe_ran: true });
            } else if own.lock_state().is_batch_due() {
                match self.send_batch(own, &link, &mut last).await {
                    Ok(batch) => sent.push_back(batch),
                    Err(other) => failure = Some(other),
                }
                if failure.is_none() {
                    continue;
                }
            }
            if let Some(failure) = failure {
                (link, last) = (self.recover_log(own, (&mut sent, true), failure).await, 0);
                continue;
            }
            let Some(oldest) = sent.front_mut() else {
                self.health.run_unless_lost(own.wake.notified()).await;
                continue;
            };
            let answer = tokio::select! {
                answer = &mut oldest.answer => answer,
                () = own.wake.notified() => continue,
            };
            let Some(batch) = sent.pop_front() else {
                continue;
            };
            match answer {
                Ok(Ok(results)) => self.acknowledge_batch(own, &batch, results),
                Ok(Err(failure)) => {
                    (link, last) = (self.recover_log(own, (&mut sent, false), failure).await, 0);
                }
                Err(error) => {
                    let text = format!("a batch was not sent: {error}");
                    self.health
                        .mark_lost(Error::new(ErrorCode::ServerFault, text));
                }
            }
        }
        self.fail_pending_answers(own);
    }

    /// Puts the next batch on its way.
    async fn send_batch(
        self: &Arc<Self>,
        own: &SessionDelegation,
        link: &SessionLink,
        last: &mut u64,
    ) -> Result<SentBatch, SessionFailure> {
        let (first, entries, spent) = {
            let delegation = &mut own.lock_state().delegation;
            let first = delegation.log.sent_position();
            let entries = delegation.log.take_unsent(BATCH_OPS_MAX, BATCH_BYTES);
            (first, entries, delegation.query_count())
        };
        let count = entries.len();
        let caller = entries
            .first()
            .map(|entry| entry.caller)
            .unwrap_or_default();
        let caller = Caller { pid: 0, ..caller };
        let mut ops = Vec::with_capacity(count + 1);
        let mut given = Vec::new();
        let mut left_out = Vec::with_capacity(count);
        let with_data = entries
            .iter()
            .filter(|entry| !entry.data.is_empty())
            .count();
        let total: usize = entries.iter().map(|entry| entry.data.len()).sum();
        let (mut body, mut whole) = (BytesMut::new(), Bytes::new());
        if with_data > 1 {
            body.reserve(total);
        }
        for entry in &entries {
            let op = self.translate_entry(link, entry).await?;
            left_out.push(op.is_none());
            let Some(mut op) = op else { continue };
            if let FileOp::Write { data, .. } = &mut op {
                *data = BodyRange {
                    start: body.len() as u32,
                    length: entry.data.len() as u32,
                };
                if with_data > 1 {
                    body.extend_from_slice(&entry.data);
                } else {
                    whole = entry.data.clone();
                }
            }
            if entry.created != (None, None) {
                given.push(AssignedNumbers {
                    op_index: ops.len() as u32,
                    ino: entry.created.0,
                    handle: entry.created.1,
                });
            }
            ops.push(op);
        }
        ops.push(FileOp::StatFs);
        let body = if with_data > 1 { body.freeze() } else { whole };
        let sequence = link.next_sequence();
        let after = std::mem::replace(last, sequence);
        let epoch = link.tree_session.epoch;
        let batch = (ops, (sequence, Some(after), given));
        let answer = self.begin_batch(own, link, caller, batch, body);
        own.lock_state().last_batch = Some((epoch, sequence));
        own.sent.send_replace(first + count as u64);
        Ok(SentBatch {
            epoch,
            first_position: first,
            is_skipped: left_out,
            query_count: spent,
            answer,
        })
    }

    /// Calls, a small batch from this thread.
    fn begin_batch(
        self: &Arc<Self>,
        own: &SessionDelegation,
        link: &SessionLink,
        caller: Caller,
        batch: (Vec<FileOp>, BatchNumbers),
        body: Bytes,
    ) -> oneshot::Receiver<BatchAnswer> {
        let (session, link) = (Arc::clone(self), link.clone());
        let is_small = body.len() <= BYTES_SENT_HERE_MAX;
        let (tell, answer) = oneshot::channel();
        let calling = async move {
            let deadline = session.server.deadline();
            let ran = session.run_batch(&link, caller, batch, &body, deadline);
            // Nobody wants the answer of a volume that is closed.
            let _ = tell.send(ran.await.map(|(results, _)| results));
        };
        match is_small {
            true => begin_here(&own.runtime, calling),
            // Several processors encrypt several of them.
            false => drop(own.runtime.spawn(calling)),
        }
        answer
    }

    /// Takes in the answers of the oldest batch.
    pub(super) fn acknowledge_batch(
        &self,
        own: &SessionDelegation,
        batch: &SentBatch,
        results: Vec<FileResult>,
    ) {
        self.check_batch(own, batch, &results);
        let mut results = results.into_iter();
        let mut state = own.lock_state();
        for left_out in &batch.is_skipped {
            let result = if *left_out { None } else { results.next() };
            let mut known = self.inode_map();
            // Numbers of a session that ended meanwhile mean nothing.
            let reply = result
                .and_then(Result::ok)
                .filter(|_| known.epoch() == batch.epoch);
            state.delegation.acknowledge(&mut known, reply.as_ref());
        }
        if let Some(Ok(stat @ FileReply::StatFs(_))) = results.next() {
            state
                .delegation
                .set_free_space(free_space(Some(&stat)), batch.query_count);
        }
        self.publish_acknowledged(own, state);
    }

    /// Ends the volume if an operation of a batch, which was answered, was not done.
    pub(super) fn check_batch(
        &self,
        own: &SessionDelegation,
        batch: &SentBatch,
        results: &[FileResult],
    ) {
        let failed = {
            let mut state = own.lock_state();
            if let Some(Ok(FileReply::StatFs(stat))) = results.last() {
                state.latest_stat = Some(*stat);
            }
            let ran = (batch.first_position..).zip(&batch.is_skipped);
            let ran = ran.filter(|(_, left_out)| !**left_out).zip(results);
            let mut entries =
                ran.filter_map(|((at, _), result)| Some((state.delegation.log.entry(at)?, result)));
            entries
                .find_map(|(entry, result)| Some((entry.op.clone(), entry_failure(entry, result)?)))
        };
        if let Some((op, errno)) = failed {
            self.fail_answered(&op, errno);
        }
    }

    /// Tells everybody how far the log is settled.
    pub(super) fn publish_acknowledged(
        &self,
        own: &SessionDelegation,
        mut state: MutexGuard<'_, DelegationState>,
    ) {
        let settled = state.delegation.log.acknowledged_position();
        let mut queued = 0;
        while let Some(&(position, ino, count)) = state.pending_forgets.front() {
            if position > settled {
                break;
            }
            state.pending_forgets.pop_front();
            queued = self.queue_forgets(&mut state, ino, count).max(queued);
        }
        let answers = state.take_ready_answers();
        drop(state);
        own.acknowledged.send_replace(settled);
        // What has run may have failed.
        let sender = match self.health.loss() {
            None => PendingAnswer::send,
            Some(_) => PendingAnswer::send_failure,
        };
        answers.into_iter().for_each(sender);
    }

    /// An operation that was answered has failed: what the program believes is not true.
    fn fail_answered(&self, op: &FileOp, errno: Errno) {
        let code = match errno.0 {
            libc::ENOSPC => ErrorCode::NoSpaceBytes,
            _ => ErrorCode::ServerFault,
        };
        let (why, op) = (
            std::io::Error::from_raw_os_error(errno.0),
            format!("{op:?}"),
        );
        let op = op.split([' ', '(']).next().unwrap_or_default();
        let text = format!(
            "the server failed an operation that returned early ({op}): {why}; check the server's \
             disk, then run the program again"
        );
        self.health.mark_lost(Error::new(code, text));
    }

    /// An entry in numbers of the session; `None` when nothing of it is left to do.
    async fn translate_entry(
        &self,
        link: &SessionLink,
        entry: &LogEntry,
    ) -> Result<Option<FileOp>, SessionFailure> {
        if entry.translated.0 == link.tree_session.epoch {
            return Ok(Some(entry.translated.1.clone()));
        }
        // A restarted server knows none of the numbers any more.
        if let (FileOp::Open { .. }, Some(given)) = (&entry.op, entry.created.1)
            && !self.inode_map().is_numbered_open(given)
        {
            // It is opened again when somebody needs it.
            return Ok(None);
        }
        if let FileOp::Release { handle } = entry.op
            && self.inode_map().is_stale(handle)
        {
            return Ok(None);
        }
        let deadline = self.server.deadline();
        if let (FileOp::Rename { .. }, Some(ino)) = (&entry.op, entry.files[2]) {
            // What comes later may need the file, which cannot be found by its names meanwhile.
            let needed = FileOp::GetAttr { ino, handle: None };
            self.translate(link, &needed, deadline).await?;
        }
        let op = self.translate(link, &entry.op, deadline).await?;
        let mut known = self.inode_map();
        if known.epoch() != link.tree_session.epoch {
            return Err(SessionFailure::SessionForgotten { maybe_ran: false });
        }
        let before = entry.created.0.and_then(|ino| known.recreate_inode(ino));
        if let Some(given) = entry.created.1 {
            known.reopen_numbered(given);
        }
        drop(known);
        if let Some((ino, count)) = before {
            self.queue_forget(link.tree_session.epoch, FileOp::Forget { ino, count });
        }
        Ok(Some(op))
    }
}

/// How an operation fell short of what was answered, if it did.
fn entry_failure(entry: &LogEntry, result: &FileResult) -> Option<Errno> {
    let length = entry.data.len() as u64;
    match result {
        Err(errno) => Some(*errno),
        Ok(FileReply::Written { length: written }) if *written == length => None,
        // As a rule the place for the rest was missing.
        Ok(_) if matches!(entry.op, FileOp::Write { .. }) => Some(Errno(libc::ENOSPC)),
        Ok(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::file_op::BodyRange;
    use bafs_proto::ids::HandleId;

    use super::*;
    use crate::logic::operation_log::{NO_SESSION, Space};

    #[test]
    fn short_writes_of_acknowledged_data_are_failures() {
        let op = FileOp::Write {
            handle: HandleId(1),
            offset: 0,
            data: BodyRange {
                start: 0,
                length: 4,
            },
            append: false,
        };
        let entry = LogEntry {
            caller: Caller::default(),
            translated: (NO_SESSION, op.clone()),
            op,
            data: Bytes::from_static(b"four"),
            created: (None, None),
            files: [None, None, None],
            cost: Space::default(),
        };
        let written = |length| entry_failure(&entry, &Ok(FileReply::Written { length }));
        assert_eq!(written(4), None);
        assert_eq!(written(3), Some(Errno(libc::ENOSPC)));
        let other = Errno(libc::EIO);
        assert_eq!(entry_failure(&entry, &Err(other)), Some(other));
    }
}
