//! What became of operations of the log when the server forgot the session. They ran in their
//! order, so those that ran are the first of them; how many is told by names, of which each has one
//! operation at most. The rest runs once more: to write or set the same again changes nothing.

use std::collections::{BTreeMap, VecDeque};

use bafs_proto::file_op::{Caller, FileOp};
use bafs_proto::ids::InodeNo;
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode};
use bytes::Bytes;

use super::delegated::{Delegated, Sent};
use super::remote::{Link, Session, Trouble};
use crate::logic::image::{is_directory, is_regular};
use crate::logic::log::{Entry, name_of};

impl Session {
    /// Goes on after a batch did not come through; the rest goes to the session that it gives.
    pub(super) async fn recover(
        &self,
        own: &Delegated,
        sent: &mut VecDeque<Sent>,
        mut trouble: Trouble,
    ) -> Link {
        // They went to the same session, or they would not be on their way.
        for batch in sent.drain(..) {
            let _ = batch.answer.await;
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
        let makers: BTreeMap<InodeNo, usize> = entries
            .iter()
            .enumerate()
            .filter_map(|(at, entry)| entry.made.0.map(|ino| (ino, at)))
            .collect();
        let mut absent: BTreeMap<InodeNo, bool> = BTreeMap::new();
        for (at, entry) in entries.iter().enumerate().rev() {
            let Some((parent, name, makes)) = name_of(&entry.op) else {
                continue;
            };
            let mut above = vec![parent];
            while let Some(maker) = above.last().and_then(|ino| makers.get(ino))
                && let Some((higher, _, _)) = name_of(&entries[*maker].op)
            {
                above.push(higher);
            }
            let mut is_missing = false;
            // From the top: a directory that was not made yet has no names.
            for ino in above.iter().rev() {
                let Some(maker) = makers.get(ino) else {
                    continue;
                };
                if let Some(known) = absent.get(ino) {
                    is_missing |= known;
                } else if let Some((parent, name, _)) = name_of(&entries[*maker].op) {
                    is_missing =
                        is_missing || self.find(link, parent, name, deadline).await?.is_none();
                    absent.insert(*ino, is_missing);
                }
                if is_missing {
                    break;
                }
            }
            if is_missing {
                continue;
            }
            let found = self.find(link, parent, name, deadline).await?;
            match found {
                Some(attr) if makes => {
                    let may_be_half_made =
                        is_directory(&attr) || is_regular(&attr) && attr.size == 0;
                    if may_be_half_made && self.take_away(link, entry, deadline).await? {
                        return Ok(at);
                    }
                    return Ok(at + 1);
                }
                None if !makes => return Ok(at + 1),
                _ => {}
            }
        }
        Ok(0)
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
