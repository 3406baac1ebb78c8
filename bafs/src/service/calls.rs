//! What users ask a service over the network, as JSON in the body of one call.

use bafs_queue::logic::records::UserRecord;
use bafs_queue::{Submission, UserQuota, WorkflowId, WorkflowSummary};
use serde::{Deserialize, Serialize};

/// Workflows in one page of a list: a page has less than 4 MiB.
pub(super) const PAGE_WORKFLOWS: usize = 2_000;

/// A request.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum QueueRequest {
    /// Hands in a workflow; answered by [`Submitted`].
    Submit(Submission),
    /// Lists workflows; answered by [`WorkflowPage`].
    List {
        /// Only those after it.
        after: Option<WorkflowId>,
        /// Whether ended ones are wanted, too.
        has_ended: bool,
    },
    /// Changes workflows; answered by [`Changed`].
    Hold(WorkflowId),
    /// See `Hold`.
    Release(WorkflowId),
    /// See `Hold`.
    Remove(WorkflowId),
    /// See `Hold`.
    SetPriority(WorkflowId, i32),
    /// Adds a user; answered by [`UserAdded`].
    AddUser {
        /// The user.
        name: String,
        /// Paths of homes for the user's workflows.
        homes: Vec<String>,
        /// What the user may have at once.
        quota: UserQuota,
    },
    /// Lists users; answered by [`UserList`].
    ListUsers,
    /// Refuses a user; answered by [`Changed`].
    RemoveUser(String),
    /// Asks for a link to the page; answered by [`PageOpened`].
    OpenPage,
}

/// The number of a new workflow.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Submitted {
    pub(super) workflow: WorkflowId,
}

/// Workflows.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct WorkflowPage {
    pub(super) workflows: Vec<WorkflowSummary>,
    /// Where the next page begins, if there is one.
    pub(super) next: Option<WorkflowId>,
}

/// A link that opens the page of the service once, and where its API is for programs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct PageOpened {
    pub(super) page: String,
    pub(super) url: String,
    pub(super) token: String,
}

/// It is done.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Changed {}

/// A new user.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct UserAdded {
    pub(super) generation: u64,
    pub(super) catalog: String,
}

/// Users by name.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct UserList {
    pub(super) users: Vec<(String, UserRecord)>,
}
