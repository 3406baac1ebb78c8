//! Why the queue refuses something, and why workflows wait: values with one wording.

use std::fmt;

use bafs_proto::{Error, ErrorCode};

use crate::control::{Resources, WorkflowId, WorkflowState};

/// Why something is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QueueRefusal {
    /// There is no workflow of this number, or nobody remembers it.
    UnknownWorkflow(WorkflowId),
    /// It belongs to somebody else.
    ForeignWorkflow(WorkflowId),
    /// Its state does not allow it.
    WrongState(WorkflowId, WorkflowState),
    /// It was removed, and its run has not ended yet.
    BeingRemoved(WorkflowId),
    /// There is no such user.
    UnknownUser(String),
    /// So many workflows are in the queue, which is the limit.
    QueueFull(usize),
    /// The workflow needs more than its user may have.
    AboveQuota(Resources),
}

impl fmt::Display for QueueRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownWorkflow(id) => {
                write!(f, "no workflow {id} in the queue; `bafs queue` lists them")
            }
            Self::ForeignWorkflow(id) => write!(
                f,
                "workflow {id} belongs to another user; only its owner and operators steer it"
            ),
            Self::WrongState(id, state) => {
                write!(
                    f,
                    "workflow {id} is {}, so this is not possible",
                    state.name()
                )
            }
            Self::BeingRemoved(id) => write!(
                f,
                "workflow {id} is being removed, so this is not possible; its run has not ended yet"
            ),
            Self::UnknownUser(user) => write!(
                f,
                "the service knows no user '{user}'; ask its operator for `bafs user add {user}`"
            ),
            Self::QueueFull(most) => write!(
                f,
                "the queue has {most} workflows, which is its limit; submit again when some have \
                 ended"
            ),
            Self::AboveQuota(needed) => write!(
                f,
                "the workflow needs at least {} slots and {} bytes, more than your quota; make it \
                 smaller, or ask the operator for a larger quota",
                needed.slots, needed.bytes
            ),
        }
    }
}

impl From<QueueRefusal> for Error {
    fn from(refusal: QueueRefusal) -> Self {
        let code = match refusal {
            QueueRefusal::UnknownWorkflow(_) => ErrorCode::NotFound,
            QueueRefusal::ForeignWorkflow(_) | QueueRefusal::UnknownUser(_) => {
                ErrorCode::RightMissing
            }
            QueueRefusal::WrongState(..) | QueueRefusal::BeingRemoved(_) => ErrorCode::WrongState,
            QueueRefusal::QueueFull(_) => ErrorCode::Busy,
            QueueRefusal::AboveQuota(_) => ErrorCode::NoSpaceBytes,
        };
        Self::new(code, refusal.to_string())
    }
}

/// Why a workflow does not start, or does not end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitReason {
    /// Its user holds it.
    Held,
    /// The catalog lists no nodes.
    NoNodes,
    /// It needs more than the whole cluster has.
    AboveCapacity,
    /// An earlier workflow, which has not ended, sends results to the same places.
    SameResults(WorkflowId),
    /// Its user has as much as the quota allows.
    QuotaReached,
    /// As many workflows run as may.
    RunsReached,
    /// What it needs is not free beside the runs that are under way.
    NoRoom,
    /// Others go first.
    BehindOthers,
    /// It was removed, and its run has not ended yet.
    BeingRemoved,
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::SameResults(id) => {
                return write!(
                    f,
                    "it starts when workflow {id} has ended, whose results go to the same places"
                );
            }
            Self::Held => "held; `bafs release` lets it go on",
            Self::NoNodes => "the catalog lists no nodes",
            Self::AboveCapacity => "it needs more slots or space than the whole cluster has",
            Self::QuotaReached => "its user has as much as the quota allows",
            Self::RunsReached => "as many workflows run as the service allows",
            Self::NoRoom => "it starts next, when enough slots and space are free",
            Self::BehindOthers => "others go first",
            Self::BeingRemoved => "it is being removed; its run has not ended yet",
        };
        f.write_str(text)
    }
}
