//! What others ask of a queue: the seam between the service and all that shows or steers it. It
//! has no transport and keeps nothing.

use std::fmt;
use std::str::FromStr;

use bafs_proto::Result;
use serde::{Deserialize, Serialize};

/// A workflow in the queue of one service; numbers are never used again.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct WorkflowId(pub u64);

impl fmt::Display for WorkflowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl FromStr for WorkflowId {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}

/// Where a workflow is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkflowState {
    /// It waits for its start.
    Queued,
    /// Its user holds it: it does not start, or starts no further job.
    Held,
    /// Its jobs run.
    Running,
    /// All jobs are done, and all results are at home.
    Complete,
    /// A job failed for good, or the run could not go on.
    Failed,
    /// Its user removed it.
    Removed,
}

impl WorkflowState {
    /// Whether nothing happens to it any more.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Complete | Self::Failed | Self::Removed)
    }

    /// The name in JSON and on the terminal.
    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Held => "held",
            Self::Running => "running",
            Self::Complete => "complete",
            Self::Failed => "failed",
            Self::Removed => "removed",
        }
    }
}

/// Who asks, after authentication.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requester {
    /// The user.
    pub user: String,
    /// Whether the user may see and steer the workflows of all.
    pub is_operator: bool,
}

/// Parts of a cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// Processor slots.
    pub slots: u64,
    /// Bytes of storage.
    pub bytes: u64,
    /// Bytes per second of the link to home.
    pub home_bytes_per_s: u64,
}

/// A workflow that is handed in.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Submission {
    /// Name of the workflow file, without directories.
    pub name: String,
    /// Text of the workflow.
    pub text: String,
    /// Among the workflows of one user, higher ones start first.
    #[serde(default)]
    pub priority: i32,
}

/// A workflow, as a list shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkflowSummary {
    /// Its number.
    pub id: WorkflowId,
    /// Whose it is; nothing if the reader has no right to know.
    pub user: Option<String>,
    /// Where it is in its life.
    pub state: WorkflowState,
    /// What its owner and operators see; nothing for other users.
    pub details: Option<WorkflowDetails>,
}

/// What the owner of a workflow, and an operator, see of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkflowDetails {
    /// Name of the workflow file.
    pub name: String,
    /// Among the workflows of one user, higher ones start first.
    pub priority: i32,
    /// When it was handed in, in milliseconds since 1970.
    pub submitted_ms: u64,
    /// When it started first.
    pub started_ms: Option<u64>,
    /// When it ended.
    pub ended_ms: Option<u64>,
    /// The most that it can use at once.
    pub wanted: Resources,
    /// The least with which it can end.
    pub needed: Resources,
    /// What it may use now, if it runs.
    pub share: Option<Resources>,
    /// Why it waits, or how it failed.
    pub reason: Option<String>,
    /// The directory of the run: journal, logs and output.
    pub directory: String,
}

/// A queue of workflows, as commands, the API and the page use it. Each call is safe to repeat but
/// [`QueueControl::submit`]. When a call returns, its effect is on stable storage.
///
/// Errors: `RightMissing` for a workflow of somebody else, `NotFound` for an unknown one,
/// `WrongState` where the state does not allow it, `Malformed` for a text that is no workflow, and
/// `Busy` where the queue is full.
pub trait QueueControl: Send + Sync {
    /// Adds a workflow to the queue.
    fn submit(&self, requester: &Requester, submission: Submission) -> Result<WorkflowId>;

    /// The workflows in the order of their numbers; those of others without details.
    fn list(&self, requester: &Requester) -> Result<Vec<WorkflowSummary>>;

    /// Keeps a workflow from starting, or a running one from starting further jobs.
    fn hold(&self, requester: &Requester, id: WorkflowId) -> Result<()>;

    /// Ends a hold.
    fn release(&self, requester: &Requester, id: WorkflowId) -> Result<()>;

    /// Removes a workflow from the queue; one that runs is cancelled.
    fn remove(&self, requester: &Requester, id: WorkflowId) -> Result<()>;

    /// Changes the place of a workflow among those of its user.
    fn set_priority(&self, requester: &Requester, id: WorkflowId, priority: i32) -> Result<()>;
}
