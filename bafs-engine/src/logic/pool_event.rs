//! What a pool controller hears, and what it wants done.

use std::collections::BTreeMap;
use std::fmt;

use crate::{PilotId, PilotState};

/// Number of a pilot in its pool. Its name is made from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PilotNumber(pub u64);

impl fmt::Display for PilotNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a pool is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolSettings {
    /// Most nodes at a time.
    pub nodes_max: usize,
    /// Most pilots that wait in the queue at a time. One says as much of a queue as many, and a
    /// wrong pilot is not submitted often.
    pub backlog_max: usize,
    /// Time limit of each pilot in seconds.
    pub time_limit_s: Option<u64>,
    /// A surplus node without a job ends after so many milliseconds.
    pub idle_ms: u64,
    /// A running pilot whose node is not in the catalog for so many milliseconds is ended.
    pub silence_ms: u64,
    /// Consecutive pilots without a node after which the pool pauses.
    pub failed_starts_max: u32,
    /// Consecutive rejected submissions after which the pool pauses.
    pub failed_submissions_max: u32,
}

impl PoolSettings {
    /// The usual pool of so many nodes. The limits of failures are `HyperQueue`'s, whose users met
    /// both: a queue full of pilots that cannot start, and a script that is rejected for ever.
    pub fn new(nodes_max: usize, time_limit_s: Option<u64>) -> Self {
        Self {
            nodes_max,
            backlog_max: 1,
            time_limit_s,
            idle_ms: 60_000,
            // A node is out of the catalog within seconds; its machine may be slow to start it.
            silence_ms: 120_000,
            failed_starts_max: 3,
            failed_submissions_max: 10,
        }
    }
}

/// What the work needs now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Demand {
    /// Nodes that have something to do.
    pub nodes: usize,
    /// Seconds that the longest waiting job needs; 0 if nobody knows.
    pub longest_job_s: u64,
}

/// What a node does, by the catalog and by the node itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NodeUse {
    /// Jobs that run on it.
    pub jobs: u32,
    /// Volumes that somebody needs and no other node has.
    pub sole_copies: u32,
}

/// A fact.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PoolEvent {
    /// The batch system would accept a pilot, or says why not.
    Checked(Result<(), String>),
    /// The batch system accepted a pilot.
    Submitted {
        /// Which.
        pilot: PilotNumber,
        /// Its id there.
        id: PilotId,
    },
    /// The batch system refused a pilot.
    SubmissionRejected {
        /// Which.
        pilot: PilotNumber,
        /// Its words.
        reason: String,
    },
    /// Nobody knows whether the batch system has a pilot: it does not answer.
    SubmissionUnconfirmed {
        /// Which.
        pilot: PilotNumber,
    },
    /// An unconfirmed pilot surely does not exist any more.
    NameReleased {
        /// Which.
        pilot: PilotNumber,
    },
    /// What the batch system says of all pilots.
    Polled(BTreeMap<PilotId, PilotState>),
    /// The batch system does not answer.
    EngineSilent,
    /// A pilot could not be ended.
    CancelFailed(PilotId),
    /// Nodes of this pool that the catalog lists.
    NodesListed(BTreeMap<PilotNumber, NodeUse>),
    /// The work needs other nodes.
    DemandChanged(Demand),
    /// Somebody corrected the cause of a pause.
    ResumeRequested,
    /// The pool shall end.
    CloseRequested,
}

/// Something to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PoolAction {
    /// Ask the batch system whether it would accept a pilot.
    Check,
    /// Submit a pilot.
    Submit(PilotNumber),
    /// End a pilot.
    Cancel(PilotId),
    /// End a pilot whose id is unknown, if it exists.
    ReleaseName(PilotNumber),
    /// Copy the only copies of this pilot's node to other nodes.
    CopySoleVolumes(PilotNumber),
    /// Say that the pool submits no more, and why.
    ReportPause(PauseReason),
}

/// Why a pool submits no more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PauseReason {
    /// The dry run failed.
    CheckFailed(String),
    /// Pilots ended before their nodes were in the catalog.
    StartsFailed(u32),
    /// The batch system refused pilots; the last words.
    SubmissionsRejected(u32, String),
    /// Pilots are shorter than a waiting job: limit and need in seconds.
    PilotsTooShort(u64, u64),
}

impl fmt::Display for PauseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CheckFailed(said) => write!(f, "the dry run failed: {said}"),
            Self::StartsFailed(count) => write!(
                f,
                "{count} pilots in a row ended before their node was in the catalog; their output \
                 is in the directory of the pool"
            ),
            Self::SubmissionsRejected(count, said) => {
                write!(f, "{count} submissions in a row were rejected: {said}")
            }
            Self::PilotsTooShort(limit_s, need_s) => write!(
                f,
                "a waiting job needs {need_s} s, but pilots end after {limit_s} s; give a longer \
                 --time-limit"
            ),
        }
    }
}

/// How far a pilot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PilotStatus {
    /// Submission is under way.
    Submitting,
    /// It waits in the queue.
    Queued,
    /// It runs; its node is not in the catalog yet.
    Starting,
    /// Its node is in the catalog.
    Alive,
    /// It is being ended.
    Leaving,
}

/// A pilot, to be shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PilotSummary {
    /// Number.
    pub pilot: PilotNumber,
    /// Id, if the batch system gave one.
    pub id: Option<PilotId>,
    /// How far it is.
    pub status: PilotStatus,
}
