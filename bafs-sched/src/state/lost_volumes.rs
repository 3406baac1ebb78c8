//! Volumes that were complete when their node was given up.

use bafs_workflow::{JobIndex, VolumeIndex};
use serde::{Deserialize, Serialize};

use crate::space::Space;
use crate::state::recorded::whole_rows;

/// What is known of a volume since its node was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum LostVolumeState {
    /// Nothing: the node is not back.
    NodeLost,
    /// The node is back and has not said yet whether it has it.
    Requested,
    /// The node has it. Of no use before other nodes say what they have.
    Found,
}

/// A volume that was complete when its node was given up, and that no job was writing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct LostVolume {
    pub(crate) volume: VolumeIndex,
    pub(crate) size: Space,
    /// Jobs that were done and whose output it has.
    pub(crate) writers: Vec<JobIndex>,
    /// Whether it was a copy of what was elsewhere.
    pub(crate) is_copy: bool,
    /// The last id that the run had given then.
    pub(crate) noted_at: u64,
    pub(crate) state: LostVolumeState,
}

whole_rows!(LostVolume);

impl LostVolume {
    /// Whether its node is back and it may be used again.
    pub(crate) fn is_awaited(&self) -> bool {
        self.state != LostVolumeState::NodeLost
    }
}
