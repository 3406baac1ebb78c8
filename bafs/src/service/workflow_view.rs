//! A workflow of a service as its owner and others see it. It changes nothing.

use bafs_queue::logic::records::WorkflowRecord;
use bafs_queue::{QueueState, Requester, WaitReason, WorkflowDetails, WorkflowId, WorkflowState};

/// What its owner sees of a workflow that waits for a reason, if it does.
pub(super) fn build_details(
    record: &WorkflowRecord,
    reason: Option<String>,
    directory: String,
) -> WorkflowDetails {
    let has_share = record.has_run;
    WorkflowDetails {
        name: record.name.clone(),
        priority: record.priority,
        submitted_ms: record.submitted.0,
        started_ms: record.started.map(|at| at.0),
        ended_ms: record.ended.map(|at| at.0),
        wanted: record.wanted,
        needed: record.needed,
        share: has_share.then_some(record.share),
        reason: match record.state {
            WorkflowState::Failed => record.failure.clone(),
            _ => reason,
        },
        directory,
    }
}

/// Why a workflow waits. The number of another one is for those who may see that there is one.
pub(super) fn describe_wait(
    queue: &QueueState,
    requester: &Requester,
    id: WorkflowId,
) -> Option<String> {
    let reason = queue.wait_reason(id)?;
    if let WaitReason::SameResults(earlier) = reason {
        let record = queue.workflows().get(&earlier);
        let is_own = record.is_some_and(|record| record.user == requester.user);
        if !is_own && !requester.is_operator && !requester.sees_others {
            let text = "it starts when a workflow of another user has ended, whose results go to \
                        the same places";
            return Some(text.to_owned());
        }
    }
    Some(reason.to_string())
}
