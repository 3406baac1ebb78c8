//! A run as intervals of time: executions, volumes, files on their way home, nodes; from its
//! journal. Needs no server and changes nothing.

mod observer;

use bafs_proto::ids::{RunId, ServerId};
use bafs_proto::message::JobOutcome;
use bafs_proto::time::Time;
use bafs_workflow::{JobIndex, VolumeIndex};
use serde::Serialize;

use crate::io::journal::History;
use crate::{JobState, Outcome, Progress, Space, StrategySelector};

pub(crate) use observer::Observer;

/// A run as intervals. All times are milliseconds since its first fact.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Timeline {
    /// The run.
    pub run: RunId,
    /// Name of the workflow.
    pub workflow: String,
    /// When the first fact was noted.
    pub began_at: Time,
    /// From the first fact to the last.
    pub wall_ms: u64,
    /// How it ended; `None` while it runs.
    pub outcome: Option<Outcome>,
    /// Numbers at the end.
    pub progress: Progress,
    /// Every job, in the order of declaration.
    pub jobs: Vec<JobStatus>,
    /// Every execution, in the order of their start.
    pub executions: Vec<ExecutionRecord>,
    /// Every volume that a server was asked for, in the order of asking.
    pub volumes: Vec<VolumeRecord>,
    /// Every try to send a file home, in the order of asking.
    pub extract_attempts: Vec<ExtractAttempt>,
    /// Every node that was seen, in the order of their coming.
    pub nodes: Vec<NodeRecord>,
    /// The last decision about a copy of each volume for which there was one.
    pub copy_decisions: Vec<CopyDecisionRecord>,
    /// The scheduler's warnings.
    pub warnings: Vec<String>,
}

/// A job at the end of the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct JobStatus {
    /// Its name.
    pub name: String,
    /// Where it is in its life.
    pub state: JobState,
    /// Jobs before it on its longest way from a first one.
    pub level: u32,
}

/// The outcome of an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ExecutionOutcome {
    /// It is running.
    Running,
    /// It did its job.
    Done,
    /// It succeeded, but its output was lost and is computed again.
    RolledBack,
    /// It ended without having done its job.
    Failed,
    /// It was abandoned: its node was lost, or it was killed.
    Abandoned,
}

impl ExecutionOutcome {
    /// Whether its work was for nothing.
    pub fn is_wasted(self) -> bool {
        matches!(self, Self::RolledBack | Self::Failed | Self::Abandoned)
    }
}

/// One execution.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExecutionRecord {
    /// Of which job.
    pub job: JobIndex,
    /// On which node,
    pub server: ServerId,
    /// by its name: a node whose store was lost returns as another of the same name.
    pub node: String,
    /// When the node was asked to start it.
    pub requested_ms: u64,
    /// When it ended or was abandoned, if it did.
    pub ended_ms: Option<u64>,
    /// Its outcome.
    pub outcome: ExecutionOutcome,
    /// How it ended, in a few words; empty while it runs.
    pub end_description: String,
    /// The last lines that it printed, if it failed.
    pub output_tail: String,
    /// What its node reported of its end, if it did.
    #[serde(skip)]
    pub reported: Option<JobOutcome>,
    /// Wall time that the node reports.
    pub wall_ms: u64,
    /// CPU time that the node reports.
    pub cpu_ms: u64,
    /// Largest resident memory of any of its processes, in bytes; 0 when that is not known.
    pub memory_bytes_max: u64,
    /// Bytes that its volumes held at its end, as far as that is known.
    pub held_bytes: u64,
    /// The sum of its volumes' `waited_ms`.
    pub waited_ms: u64,
    /// Bytes that it read through its agent.
    pub read_bytes: u64,
    /// Bytes that it wrote through its agent.
    pub written_bytes: u64,
    /// Of caches and home mounts, bytes of the distinct pages that it read.
    pub distinct_bytes: u64,
    /// Slots that it occupied.
    pub slots: u32,
    /// Positions of its mounts in [`Timeline::volumes`].
    pub mounts: Vec<usize>,
}

/// The kind of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum VolumeRole {
    /// A scratch volume.
    Scratch,
    /// A part of a cache.
    Cache,
    /// A copy of a scratch volume.
    Copy,
}

/// A volume on a server, from the asking to its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VolumeRecord {
    /// Its name in the workflow.
    pub name: String,
    /// Which volume of the workflow.
    pub volume: VolumeIndex,
    /// Its kind.
    pub role: VolumeRole,
    /// On which node,
    pub server: ServerId,
    /// by its name: a node whose store was lost returns as another of the same name.
    pub node: String,
    /// Bytes reserved for it.
    pub bytes: u64,
    /// Whether it is filled from home.
    pub is_filled: bool,
    /// When its server was asked for it.
    pub requested_ms: u64,
    /// When it existed, or was known to fail.
    pub created_ms: Option<u64>,
    /// When it was gone.
    pub deleted_ms: Option<u64>,
    /// Whether it was lost or never came to exist.
    pub is_lost: bool,
}

/// A try to send a file home.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExtractAttempt {
    /// Position in the workflow's list of extracts.
    pub index: u32,
    /// Where it goes.
    pub target: String,
    /// When its server was asked.
    pub requested_ms: u64,
    /// When it was at home, or the try failed.
    pub ended_ms: Option<u64>,
    /// Its size; `None` unless it is at home.
    pub bytes: Option<u64>,
}

/// A node and the time of its presence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodeRecord {
    /// Which.
    pub server: ServerId,
    /// Its name.
    pub name: String,
    /// Jobs that it runs at once.
    pub slots: u32,
    /// Its group: nodes of one share caches.
    pub group: String,
    /// Its space for volumes.
    pub capacity_bytes: u64,
    /// Free part of that when the node was first seen.
    pub free_space: Space,
    /// Start and end of each use; the last one may be open.
    pub presence: Vec<(u64, Option<u64>)>,
}

/// A decision about a copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CopyDecisionRecord {
    /// Of which volume.
    pub volume: String,
    /// When.
    pub at_ms: u64,
    /// Work that a loss would have cost.
    pub redo_ms: u64,
    /// Probability of a loss while the volume is needed, in millionths.
    pub risk_ppm: u64,
    /// Expected saving of a copy, in microseconds.
    pub benefit_us: u64,
    /// Expected duration of the copy; `None` before the first copy.
    pub copy_ms: Option<u64>,
    /// The part of it for which jobs would wait.
    pub wait_ms: u64,
    /// Work that the copy's space would have kept waiting.
    pub space_ms: u64,
    /// The decision and its outcome.
    pub decision: String,
}

/// Reads a run's intervals from its journal, with the selector of the run.
pub fn build_timeline(history: History, selector: &dyn StrategySelector) -> Timeline {
    let scheduler = history.header.new_scheduler(selector);
    let mut observer = Observer::new(scheduler);
    for step in history.steps {
        observer.step(step);
    }
    observer.finish()
}
