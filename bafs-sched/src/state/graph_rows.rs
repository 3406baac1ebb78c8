//! What the journal keeps of the workflow's jobs and volumes, and how it is put back.

use std::borrow::Cow;

use bafs_proto::ids::ServerId;
use bafs_workflow::{JobIndex, VolumeIndex};
use serde::{Deserialize, Serialize};

use crate::state::failure_history::FailureHistory;
use crate::state::jobs::{Graph, JobNode, JobState, VolumeNode};
use crate::state::pipeline_status::Standing;
use crate::state::recorded::{Row, RowChanges, is_default};

/// What the journal keeps of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct JobRow {
    state: JobState,
    #[serde(default, skip_serializing_if = "is_default")]
    took_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    last_server: Option<ServerId>,
    #[serde(default, skip_serializing_if = "is_default")]
    ended: u32,
    #[serde(
        default,
        rename = "troubles",
        skip_serializing_if = "FailureHistory::is_empty"
    )]
    failure_history: FailureHistory,
}

impl Row for JobNode {
    type Kept = JobRow;

    fn kept(&self) -> Cow<'_, JobRow> {
        Cow::Owned(JobRow {
            state: self.state,
            took_ms: self.took_ms,
            last_server: self.last_server,
            ended: self.ended,
            failure_history: self.failure_history.clone(),
        })
    }
}

/// What the journal keeps of a volume of the workflow.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct VolumeRow {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    writer: Option<JobIndex>,
    #[serde(default, skip_serializing_if = "is_default")]
    extracts_left: u32,
}

impl Row for VolumeNode {
    type Kept = VolumeRow;

    fn kept(&self) -> Cow<'_, VolumeRow> {
        Cow::Owned(VolumeRow {
            writer: self.writer,
            extracts_left: self.extracts_left,
        })
    }
}

impl Graph {
    /// Puts back states of jobs, and with them every count that depends on them.
    pub(crate) fn restore_jobs(&mut self, rows: RowChanges<u32, JobRow>) {
        for (job, row) in rows.set {
            let job = JobIndex(job);
            self.set_state(job, row.state);
            let node = self.job_mut(job);
            node.took_ms = row.took_ms;
            node.last_server = row.last_server;
            node.ended = row.ended;
            node.failure_history = row.failure_history;
        }
    }

    /// Puts back which pipelines are under way and which were rolled back.
    pub(crate) fn restore_standing(&mut self, rows: RowChanges<u32, Standing>) {
        for (pipeline, standing) in rows.set {
            self.change_standing(pipeline, standing);
        }
    }

    /// Puts back who writes volumes and which files of them are not at home.
    pub(crate) fn restore_volumes(&mut self, rows: RowChanges<u32, VolumeRow>) {
        for (volume, row) in rows.set {
            let volume = VolumeIndex(volume);
            self.volume_mut(volume).writer = row.writer;
            while self.volume(volume).extracts_left > row.extracts_left {
                self.close_extract(volume);
            }
            while self.volume(volume).extracts_left < row.extracts_left {
                self.reopen_extract(volume);
            }
        }
    }
}
