//! A step of the core as the journal keeps it: what was told, what was decided, what was written.

use bafs_proto::time::Time;
use serde::{Deserialize, Serialize};

use crate::state::kept_state::StateChanges;
use crate::{Action, Decision, Event};

/// One step. Fields that come later have a default, so that journals without them are read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedStep {
    /// When the scheduler received the event.
    pub at: Time,
    /// The fact.
    pub event: Event,
    /// What was decided because of it, in this order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub decisions: Vec<Decision>,
    /// What was to be done because of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub actions: Vec<Action>,
    /// Rows of the state that it wrote.
    #[serde(default)]
    pub changes: StateChanges,
}
