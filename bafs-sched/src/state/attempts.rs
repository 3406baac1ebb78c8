//! Attempts to run jobs.

use std::collections::BTreeSet;

use bafs_proto::Error;
use bafs_proto::ids::{ExecutionId, ServerId, VolumeId};
use bafs_proto::time::Time;
use bafs_workflow::VolumeIndex;
use serde::{Deserialize, Serialize};

use crate::action::MountedVolume;
use crate::state::recorded::{is_default, whole_rows};

/// Where an attempt is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum AttemptState {
    /// Its volumes are being created.
    Preparing,
    /// The node was asked to start it.
    Starting,
    /// The node runs it.
    Running,
    /// The node was asked to kill it.
    Stopping,
}

/// One attempt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Attempt {
    pub(crate) execution: ExecutionId,
    pub(crate) server: ServerId,
    pub(crate) slots: u32,
    /// Memory that it asked for, in bytes; 0 if it did not.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) memory_bytes: u64,
    /// When it took its slots.
    pub(crate) since: Time,
    pub(crate) stage: AttemptState,
    /// Its volumes, in the order of the job's mounts.
    pub(crate) uses: Vec<MountedVolume>,
    /// Volumes that are not ready yet. Rebuilt from these.
    #[serde(skip)]
    pub(crate) missing: BTreeSet<VolumeId>,
    /// Nodes of volumes that were not ready when it began, until all are.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) made_on: BTreeSet<ServerId>,
    /// While stopping: the failure of the environment that is the reason, if one is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) fault: Option<Error>,
    /// Volumes that it surely left as they were, once its report is there.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) unchanged: BTreeSet<VolumeIndex>,
}

whole_rows!(Attempt);

impl Attempt {
    pub(crate) fn uses(&self, id: VolumeId) -> bool {
        self.uses.iter().any(|used| used.id == id)
    }
}
