//! What goes into the queue and what comes out of it: facts in the past tense, decisions as plain
//! data. Both are what its journal keeps.

use serde::{Deserialize, Serialize};

use crate::control::{Resources, WorkflowId};

/// What a user may have at once; nothing means no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserQuota {
    /// Processor slots.
    pub slots: Option<u64>,
    /// Bytes of storage.
    pub bytes: Option<u64>,
}

/// How the queue works; kept in the journal, so that a restart decides alike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueSettings {
    /// Name of the policy that orders workflows.
    pub order: String,
    /// After so long, half of what a user had counts, in milliseconds.
    pub half_life_ms: u64,
    /// A turn of the whole cluster takes so long, in milliseconds, where parts are too small.
    pub turn_ms: u64,
    /// Workflows that run at once.
    pub runs_max: usize,
    /// Workflows that wait, are held or run at once; more are refused.
    pub workflows_max: usize,
    /// Ended workflows are forgotten after so long, in milliseconds.
    pub history_ms: u64,
    /// Most ended workflows that are remembered.
    pub history_max: usize,
}

impl Default for QueueSettings {
    fn default() -> Self {
        Self {
            order: "fair-share".to_owned(),
            // A day: the default half-life of HTCondor's accountant (PRIORITY_HALFLIFE).
            half_life_ms: 24 * 3_600_000,
            turn_ms: 10 * 60_000,
            // Each is a process of 30 to 60 MB.
            runs_max: 16,
            workflows_max: 100_000,
            history_ms: 30 * 24 * 3_600_000,
            history_max: 10_000,
        }
    }
}

/// What a run used since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunUsage {
    /// Time of slots, in milliseconds.
    pub slot_ms: u64,
    /// Bytes that crossed the link to home.
    pub home_bytes: u64,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunOutcome {
    /// All is done and at home.
    Complete,
    /// It failed, and why.
    Failed(String),
    /// Somebody cancelled it.
    Cancelled,
}

/// A fact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueueEvent {
    /// The service started with these settings.
    SettingsChanged(QueueSettings),
    /// A user was added, or changed; the generation is the next one.
    UserAdded {
        /// The user.
        user: String,
        /// Paths of homes that the user's workflows may read and write; the empty one means all.
        homes: Vec<String>,
        /// What the user may have.
        quota: UserQuota,
    },
    /// A user was removed: identities of the generation are refused.
    UserRemoved {
        /// The user.
        user: String,
    },
    /// A workflow was handed in; its text is on stable storage.
    WorkflowSubmitted {
        /// The next number.
        id: WorkflowId,
        /// Whose it is.
        user: String,
        /// Name of the file.
        name: String,
        /// Its place among those of the user.
        priority: i32,
        /// Chosen by whoever handed it in, or empty.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        key: String,
        /// The most that it can use.
        wanted: Resources,
        /// The least with which it can end.
        needed: Resources,
        /// Earlier workflows whose results go to the same places: it starts when they have ended.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        after: Vec<WorkflowId>,
    },
    /// Its user holds it.
    WorkflowHeld(WorkflowId),
    /// Its user holds it no more.
    WorkflowReleased(WorkflowId),
    /// Its user wants it gone.
    RemovalRequested(WorkflowId),
    /// Its user gave it another place.
    PriorityChanged {
        /// Which.
        id: WorkflowId,
        /// The place.
        priority: i32,
    },
    /// The nodes of the cluster have so much in all.
    CapacityFound(Resources),
    /// What runs have used since their starts.
    UsageReported(Vec<(WorkflowId, RunUsage)>),
    /// A run ended.
    RunEnded {
        /// Which.
        id: WorkflowId,
        /// How.
        outcome: RunOutcome,
    },
    /// Time passed.
    Ticked,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueueDecision {
    /// Its run starts.
    Start(WorkflowId),
    /// Runs get other parts of the cluster.
    ChangeShares(Vec<(WorkflowId, Resources)>),
    /// Its run is cancelled.
    Cancel(WorkflowId),
    /// It is no longer remembered, and its directory goes.
    Forget(WorkflowId),
}
