//! The queue of workflows of several users on stable storage, and the accountant that divides a
//! cluster between them. It starts nothing: `bafs scheduler` obeys its decisions.
//!
//! ```text
//!  fact ──▶ QueueState::step ──▶ decisions ──▶ QueueJournal::append (synced) ──▶ the service acts
//! ```

pub mod control;
pub mod event;
pub mod journal;
pub mod logic;
pub mod recorded_queue;

pub use control::{
    QueueControl, Requester, Resources, Submission, WorkflowDetails, WorkflowId, WorkflowState,
    WorkflowSummary,
};
pub use event::{QueueDecision, QueueEvent, QueueSettings, RunOutcome, RunUsage, UserQuota};
pub use logic::queue_state::QueueState;
pub use logic::{QueueRefusal, WaitReason};
pub use recorded_queue::RecordedQueue;
