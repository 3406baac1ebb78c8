//! Finds out which operations of the log have run when the server forgot the session. They ran in
//! their order, so those that ran are the first of them. Names show how many these are, and
//! `logic/recovery_search.rs` chooses the names. The rest runs once more: to write or set the same
//! again changes nothing.

use std::collections::VecDeque;

use bafs_proto::file_op::{Caller, FileOp};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode};
use bytes::Bytes;

use super::delegation::SessionDelegation;
use super::log_shipping::SentBatch;
use super::{RemoteSession, SessionFailure, SessionLink};
use crate::logic::operation_log::LogEntry;
use crate::logic::recovery_search::RecoverySearch;

impl RemoteSession {
    /// Goes on after a batch did not come through; the rest goes to the session that it gives.
    /// `sent` begins with the oldest that is not settled if `from_oldest`.
    pub(super) async fn recover_log(
        &self,
        own: &SessionDelegation,
        (sent, mut from_oldest): (&mut VecDeque<SentBatch>, bool),
        mut failure: SessionFailure,
    ) -> SessionLink {
        // They went to the same session, or they would not be on their way.
        for mut batch in sent.drain(..) {
            match (&mut batch.answer).await {
                Ok(Ok(results)) if from_oldest => self.acknowledge_batch(own, &batch, results),
                // It is found again what has run, but not what has failed.
                Ok(Ok(results)) => self.check_batch(own, &batch, &results),
                _ => from_oldest = false,
            }
        }
        let deadline = self.server.deadline();
        while let SessionFailure::SessionForgotten { .. } = failure {
            let link = self.link();
            match self.acknowledge_executed(own, &link, deadline).await {
                Ok(()) => return link,
                Err(SessionFailure::SessionForgotten { maybe_ran }) => {
                    failure = match self.reopen_session(&link, deadline).await {
                        Ok(()) => SessionFailure::SessionForgotten { maybe_ran },
                        Err(failure) => failure,
                    };
                }
                Err(other) => failure = other,
            }
        }
        // The loss is recorded where it was found; this is for what was only refused.
        let text = "the restarted server rejects operations that returned early";
        let refused = Error::new(ErrorCode::SessionUnknown, format!("{text}: {failure:?}"));
        self.health.mark_lost(refused);
        self.link()
    }

    /// Settles what has run in sessions before this one.
    async fn acknowledge_executed(
        &self,
        own: &SessionDelegation,
        link: &SessionLink,
        deadline: Deadline,
    ) -> Result<(), SessionFailure> {
        let (first, entries) = {
            let state = own.lock_state();
            let log = &state.delegation.log;
            let positions = log.acknowledged_position()..log.sent_position();
            let entries: Vec<LogEntry> =
                positions.filter_map(|at| log.entry(at).cloned()).collect();
            (log.acknowledged_position(), entries)
        };
        // The session that answers must be a new one, or nothing was forgotten.
        let probe = FileOp::StatFs;
        let nothing = Bytes::new();
        let (told, _) = self
            .run_in_session(link, Caller::default(), probe, &nothing, deadline)
            .await?;
        tracing::debug!(entries = entries.len(), ?told, "settling after a restart");
        let ran = self.count_executed(link, &entries, deadline).await?;
        let mut state = own.lock_state();
        for _ in first..first + ran as u64 {
            state.delegation.acknowledge(&mut self.inode_map(), None);
        }
        state.delegation.log.rewind_sent();
        self.publish_acknowledged(own, state);
        Ok(())
    }

    /// How many of the first entries surely ran.
    async fn count_executed(
        &self,
        link: &SessionLink,
        entries: &[LogEntry],
        deadline: Deadline,
    ) -> Result<usize, SessionFailure> {
        let mut search = RecoverySearch::new(entries);
        let mut last = None;
        while let Some(look) = search.next_probe() {
            let found = self
                .find_name(link, look.parent, look.name, deadline)
                .await?;
            search.record_probe(look, found.is_some());
            if let Some(attr) = found.filter(|_| look.is_creation) {
                last = Some((search.executed_count(), attr));
            }
        }
        let ran = search.executed_count();
        let Some(at) = ran.checked_sub(1) else {
            return Ok(0);
        };
        // The last one may have been under way.
        let may_be_half_made = last.is_some_and(|(behind, attr)| {
            behind == ran && (attr.is_directory() || attr.is_regular() && attr.size == 0)
        });
        if may_be_half_made
            && self
                .remove_unfinished_entry(link, &entries[at], deadline)
                .await?
        {
            return Ok(at);
        }
        Ok(ran)
    }

    /// Removes what may lack its owner and mode, so that it is made again; not if it has content.
    async fn remove_unfinished_entry(
        &self,
        link: &SessionLink,
        entry: &LogEntry,
        deadline: Deadline,
    ) -> Result<bool, SessionFailure> {
        let op = match &entry.op {
            FileOp::MakeDirectory { parent, name, .. } => FileOp::RemoveDirectory {
                parent: *parent,
                name: name.clone(),
            },
            FileOp::Create { parent, name, .. } => FileOp::Unlink {
                parent: *parent,
                name: name.clone(),
            },
            _ => return Ok(false),
        };
        let op = self.translate(link, &op, deadline).await?;
        let nothing = Bytes::new();
        let (result, _) = self
            .run_in_session(link, Caller::default(), op, &nothing, deadline)
            .await?;
        Ok(result.is_ok())
    }
}
