//! Files on their way home.

use std::collections::BTreeSet;

use bafs_proto::ids::{ExtractionId, VolumeId};
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode};
use serde::{Deserialize, Serialize};

use crate::state::failed_logs::FailedLogs;
use crate::state::observed_access::RunWarning;
use crate::state::recorded::{kept, whole_rows};
use crate::state::tracked::{Keys, Rows, Table};

/// Where an extraction is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ExtractionState {
    /// The volume's writers are not all done.
    Waiting,
    /// The server was asked.
    Sending(ExtractionId, VolumeId),
    /// Failed for the moment; the same extraction goes on later.
    Paused(ExtractionId, VolumeId),
    /// Durable at home.
    Done,
    /// Given up; the file stays where it is, for the user to fetch.
    Kept(VolumeId),
    /// Will not be: the job that should have written it is dead.
    Failed,
}

/// A file that does not get home.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Failing {
    /// When it failed first since it last got on.
    pub(crate) since: Time,
    /// How it failed last.
    pub(crate) error: Error,
}

/// A result that could not be sent home.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnsentResult {
    /// What the user is told of it: what failed, where it stays, and how to fetch it.
    pub message: String,
    /// What failed alone.
    pub failure: String,
    /// The name of the node that keeps it, and the volume there; nothing if no node does.
    pub place: Option<(String, VolumeId)>,
}

/// All extractions, in the order of the workflow's list.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Extractions {
    pub(crate) stages: Rows<ExtractionState>,
    /// When a server was asked for each last.
    pub(crate) asked: Rows<Time>,
    pub(crate) faults: Rows<u32>,
    pub(crate) failing: Table<u32, Failing>,
    /// What the user is told at the end of each that is given up.
    pub(crate) given_up: Table<u32, RunWarning>,
    /// Kinds of refusals that the user was told of.
    pub(crate) told: Keys<ErrorCode>,
    pub(crate) by_id: Table<ExtractionId, u32>,
    /// Files that are no results.
    pub(crate) logs: FailedLogs,
    pub(crate) done: u64,
    pub(crate) failed: u64,
    pub(crate) bytes: u64,
}

whole_rows!(ExtractionState, Failing);

kept! {
    /// What was written of the extractions.
    ExtractionChanges of Extractions;
    values { done: u64, failed: u64, bytes: u64 }
    tables {
        stages: Rows<ExtractionState>,
        asked: Rows<Time>,
        faults: Rows<u32>,
        failing: Table<u32, Failing>,
        given_up: Table<u32, RunWarning>,
        told: Keys<ErrorCode>,
        by_id: Table<ExtractionId, u32>,
    }
    indexed {}
    parts { logs: FailedLogs }
    rebuilt {}
}

impl Extractions {
    pub(crate) fn new(extracts: usize) -> Self {
        Self {
            stages: vec![ExtractionState::Waiting; extracts].into(),
            asked: vec![Time::default(); extracts].into(),
            faults: vec![0; extracts].into(),
            failing: Table::default(),
            given_up: Table::default(),
            told: Keys::default(),
            by_id: Table::default(),
            logs: FailedLogs::default(),
            done: 0,
            failed: 0,
            bytes: 0,
        }
    }

    /// Whether nothing is left to send.
    pub(crate) fn is_final(&self) -> bool {
        self.done + self.failed == self.stages.len() as u64 && self.logs.is_empty()
    }

    /// Extractions that a server was asked for: position, id and volume.
    pub(crate) fn under_way(&self) -> impl Iterator<Item = (u32, ExtractionId, VolumeId)> {
        let asked = self.by_id.iter();
        let asked = asked.filter_map(|(id, index)| match self.stages[*index as usize] {
            ExtractionState::Sending(_, volume) => Some((*index, *id, volume)),
            _ => None,
        });
        asked.chain(self.logs.under_way())
    }

    /// Whether nothing was done about an extraction yet.
    pub(crate) fn is_waiting(&self, index: u32) -> bool {
        self.stages[index as usize] == ExtractionState::Waiting
    }

    /// An extraction from this volume that was begun: its id, and whether a server is asked for it
    /// now.
    pub(crate) fn begun(&self, index: u32, volume: VolumeId) -> Option<(ExtractionId, bool)> {
        match self.stages[index as usize] {
            ExtractionState::Sending(extract, of) if of == volume => Some((extract, true)),
            ExtractionState::Paused(extract, of) if of == volume => Some((extract, false)),
            _ => None,
        }
    }

    /// Volumes that stay when the run ends, as they hold results that could not be sent.
    pub(crate) fn kept(&self) -> BTreeSet<VolumeId> {
        // Only what was refused is kept.
        let refused = self.failing.keys();
        let kept = refused.filter_map(|index| match self.stages[*index as usize] {
            ExtractionState::Kept(id) => Some(id),
            _ => None,
        });
        kept.collect()
    }

    /// The volume of an extraction that a server was asked for.
    pub(crate) fn volume_of(&self, extract: ExtractionId) -> Option<VolumeId> {
        let Some(index) = self.by_id.get(&extract) else {
            return self.logs.volume_of(extract);
        };
        match self.stages[*index as usize] {
            ExtractionState::Sending(_, id) | ExtractionState::Paused(_, id) => Some(id),
            _ => None,
        }
    }

    /// Where the results are that could not be sent, and how to fetch each.
    pub(crate) fn messages(&self) -> impl Iterator<Item = &RunWarning> {
        self.given_up.values()
    }

    /// Volumes that hold finished files which are not at home.
    pub(crate) fn holders(&self) -> BTreeSet<VolumeId> {
        let holder = |stage: &ExtractionState| match *stage {
            ExtractionState::Sending(_, id)
            | ExtractionState::Paused(_, id)
            | ExtractionState::Kept(id) => Some(id),
            ExtractionState::Waiting | ExtractionState::Done | ExtractionState::Failed => None,
        };
        self.stages.iter().filter_map(holder).collect()
    }

    /// Time in which nothing could be tried does not count.
    pub(crate) fn put_off(&mut self, ms: u64) {
        for failing in self.failing.values_mut() {
            failing.since = failing.since.plus_ms(ms);
        }
        // When others were asked nobody asks any more.
        for index in self.by_id.values() {
            let at = *index as usize;
            self.asked[at] = self.asked[at].plus_ms(ms);
        }
        self.logs.put_off(ms);
    }

    /// Whether no server was asked for anything that it has not answered.
    pub(crate) fn is_quiet(&self) -> bool {
        self.by_id.is_empty() && self.logs.is_empty()
    }
}
