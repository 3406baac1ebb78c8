//! The queue of workflows of several users on stable storage, and the accountant that divides a
//! cluster between them. It starts nothing: `bafs scheduler` obeys its decisions.

pub mod control;

pub use control::{
    QueueControl, Requester, Resources, Submission, WorkflowDetails, WorkflowId, WorkflowState,
    WorkflowSummary,
};
