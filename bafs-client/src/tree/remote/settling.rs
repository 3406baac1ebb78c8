//! What became of operations of the log when the server forgot the session. They ran in their
//! order, so those that ran are the first of them; how many is told by names, which
//! `logic/settling.rs` chooses. The rest runs once more: to write or set the same changes nothing.

use std::collections::VecDeque;

use bafs_proto::file_op::{Caller, FileOp};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode};
use bytes::Bytes;

use super::delegated::Delegated;
use super::shipping::Sent;
use super::{Link, Session, Trouble};
use crate::logic::log::Entry;
use crate::logic::settling::Search;

impl Session {
    /// Goes on after a batch did not come through; the rest goes to the session that it gives.
    /// `sent` begins with the oldest that is not settled if `from_oldest`.
    pub(super) async fn recover(
        &self,
        own: &Delegated,
        (sent, mut from_oldest): (&mut VecDeque<Sent>, bool),
        mut trouble: Trouble,
    ) -> Link {
        // They went to the same session, or they would not be on their way.
        for mut batch in sent.drain(..) {
            match (&mut batch.answer).await {
                Ok(Ok(results)) if from_oldest => self.settle(own, &batch, results),
                // It is found again what has run, but not what has failed.
                Ok(Ok(results)) => self.note_failure(own, &batch, &results),
                _ => from_oldest = false,
            }
        }
        let deadline = self.server.deadline();
        while let Trouble::Forgotten { .. } = trouble {
            let link = self.link();
            match self.go_on(own, &link, deadline).await {
                Ok(()) => return link,
                Err(Trouble::Forgotten { maybe_ran }) => {
                    trouble = match self.resume(&link, deadline).await {
                        Ok(()) => Trouble::Forgotten { maybe_ran },
                        Err(trouble) => trouble,
                    };
                }
                Err(other) => trouble = other,
            }
        }
        // The loss is recorded where it was found; this is for what was only refused.
        let text = "operations that were answered cannot be brought to the restarted server";
        let refused = Error::new(ErrorCode::SessionUnknown, format!("{text}: {trouble:?}"));
        self.fate.lose(refused);
        self.link()
    }

    /// Settles what has run in sessions before this one.
    async fn go_on(&self, own: &Delegated, link: &Link, deadline: Deadline) -> Result<(), Trouble> {
        let (first, entries) = {
            let state = own.state();
            let log = &state.delegation.log;
            let positions = log.settled()..log.sent();
            let entries: Vec<Entry> = positions.filter_map(|at| log.entry(at).cloned()).collect();
            (log.settled(), entries)
        };
        // The session that answers must be a new one, or nothing was forgotten.
        let probe = FileOp::StatFs;
        let nothing = Bytes::new();
        let (told, _) = self
            .ask(link, Caller::default(), probe, &nothing, deadline)
            .await?;
        tracing::debug!(entries = entries.len(), ?told, "settling after a restart");
        let ran = self.how_many_ran(link, &entries, deadline).await?;
        let mut state = own.state();
        for _ in first..first + ran as u64 {
            state.delegation.settle(&mut self.known(), None);
        }
        state.delegation.log.rewind();
        self.after_settling(own, state);
        Ok(())
    }

    /// How many of the first entries surely ran.
    async fn how_many_ran(
        &self,
        link: &Link,
        entries: &[Entry],
        deadline: Deadline,
    ) -> Result<usize, Trouble> {
        let mut search = Search::new(entries);
        let mut last = None;
        while let Some(look) = search.next_look() {
            let found = self.find(link, look.parent, look.name, deadline).await?;
            search.tell(look, found.is_some());
            if let Some(attr) = found.filter(|_| look.makes) {
                last = Some((search.ran(), attr));
            }
        }
        let ran = search.ran();
        let Some(at) = ran.checked_sub(1) else {
            return Ok(0);
        };
        // The last one may have been under way.
        let may_be_half_made = last.is_some_and(|(behind, attr)| {
            behind == ran && (attr.is_directory() || attr.is_regular() && attr.size == 0)
        });
        if may_be_half_made && self.take_away(link, &entries[at], deadline).await? {
            return Ok(at);
        }
        Ok(ran)
    }

    /// Removes what may lack its owner and mode, so that it is made again; not if it has content.
    async fn take_away(
        &self,
        link: &Link,
        entry: &Entry,
        deadline: Deadline,
    ) -> Result<bool, Trouble> {
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
            .ask(link, Caller::default(), op, &nothing, deadline)
            .await?;
        Ok(result.is_ok())
    }
}
