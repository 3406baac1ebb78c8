//! What the queue knows of users and workflows. Decides nothing.

use std::collections::BTreeMap;

use bafs_proto::time::Time;
use serde::{Deserialize, Serialize};

use super::accountant::Usage;
use crate::control::{Resources, WorkflowId, WorkflowState};
use crate::event::{RunUsage, UserQuota};

/// A user.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserRecord {
    /// Grows when the user is added again: older identities are refused.
    pub generation: u64,
    /// Whether the user may hand in workflows.
    pub is_active: bool,
    /// Paths of homes that the user's workflows may read and write; the empty one means all.
    pub homes: Vec<String>,
    /// What the user may have at once.
    pub quota: UserQuota,
    /// What the user had.
    pub usage: Usage,
}

/// A workflow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkflowRecord {
    /// Whose it is.
    pub user: String,
    /// Name of the file.
    pub name: String,
    /// Its place among those of the user.
    pub priority: i32,
    /// Chosen by whoever handed it in, or empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub key: String,
    /// Where it is in its life.
    pub state: WorkflowState,
    /// Whether it has a run that has not ended; it may be held.
    pub has_run: bool,
    /// Whether its user wants it gone.
    pub is_unwanted: bool,
    /// Whether its run was told to end.
    pub is_cancelled: bool,
    /// When it was handed in.
    pub submitted: Time,
    /// When its run started.
    pub started: Option<Time>,
    /// When it ended.
    pub ended: Option<Time>,
    /// The most that it can use.
    pub wanted: Resources,
    /// The least with which it can end.
    pub needed: Resources,
    /// Earlier workflows whose results go to the same places.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<WorkflowId>,
    /// What its run may use.
    pub share: Resources,
    /// What its run has used, of which its user was charged.
    pub used: RunUsage,
    /// Why it failed.
    pub failure: Option<String>,
}

impl WorkflowRecord {
    /// Whether its run may start jobs.
    pub fn is_under_way(&self) -> bool {
        self.has_run && self.state == WorkflowState::Running && !self.is_cancelled
    }

    /// Whether its user wants it gone, but its run has not ended.
    pub fn is_being_removed(&self) -> bool {
        self.is_unwanted && self.has_run
    }
}

/// What a policy sees of the queue.
#[derive(Debug, Clone, Copy)]
pub struct QueueView<'q> {
    /// All users.
    pub users: &'q BTreeMap<String, UserRecord>,
    /// All workflows.
    pub workflows: &'q BTreeMap<WorkflowId, WorkflowRecord>,
    /// What the cluster has.
    pub capacity: Resources,
    /// After so long, half of what a user had counts.
    pub half_life_ms: u64,
    /// The time.
    pub now: Time,
}

impl QueueView<'_> {
    /// What a user had on average, of the resource of which it was most.
    pub fn past_share(&self, user: &str) -> f64 {
        let Some(record) = self.users.get(user) else {
            return 0.0;
        };
        let usage = record.usage.decayed(self.now, self.half_life_ms);
        usage.dominant_share(self.capacity, self.half_life_ms)
    }
}

/// Adds two amounts.
pub fn add(one: Resources, other: Resources) -> Resources {
    Resources {
        slots: one.slots.saturating_add(other.slots),
        bytes: one.bytes.saturating_add(other.bytes),
        home_bytes_per_s: one.home_bytes_per_s.saturating_add(other.home_bytes_per_s),
    }
}

/// Whether slots and space of `all` hold those of `part`. The link to home is never reserved: who
/// wants more of it than there is waits longer.
pub fn can_hold(all: Resources, part: Resources) -> bool {
    all.slots >= part.slots && all.bytes >= part.bytes
}
