//! A run as it is shown: plain data. Times are milliseconds since the first fact of the run unless
//! a field says otherwise, sizes are bytes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Where a run is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RunStateView {
    /// A scheduler runs it.
    Running,
    /// A scheduler runs it, and the user holds it: no job starts.
    Held,
    /// All jobs are done, and all results are at home.
    Complete,
    /// Something of it failed for good.
    Failed,
    /// The user cancelled it.
    Cancelled,
    /// It has not ended, and no scheduler runs it.
    Interrupted,
}

impl RunStateView {
    /// Whether a scheduler runs it.
    pub fn is_active(self) -> bool {
        matches!(self, Self::Running | Self::Held)
    }
}

/// A run in a list.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunSummary {
    /// Its id.
    pub id: String,
    /// Name of the workflow.
    pub workflow: String,
    /// Where it is in its life.
    pub state: RunStateView,
    /// Whether commands reach it now.
    pub can_steer: bool,
    /// Whether it can be cancelled as a whole from here.
    pub can_cancel: bool,
    /// When it began, in milliseconds since 1970.
    pub began_ms: u64,
    /// From its first fact to now, or to its last one.
    pub wall_ms: u64,
    /// Grows with each change.
    pub revision: u64,
    /// Numbers.
    pub progress: ProgressView,
}

/// How far a run is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ProgressView {
    /// Jobs of the workflow.
    pub jobs_total: u64,
    /// Jobs that are done.
    pub jobs_done: u64,
    /// Jobs that run now.
    pub jobs_running: u64,
    /// Jobs that failed for good.
    pub jobs_failed: u64,
    /// Jobs that do not run because one that they depend on failed, or was cancelled.
    pub jobs_skipped: u64,
    /// Attempts that were started so far.
    pub attempts: u64,
    /// Results to send home.
    pub results_total: u64,
    /// Results that are durable at home.
    pub results_done: u64,
    /// Results that cannot be sent home any more.
    pub results_failed: u64,
    /// Bytes of the results at home.
    pub result_bytes: u64,
    /// Volumes that exist now.
    pub volumes: u64,
    /// Nodes that are alive now.
    pub nodes: u64,
    /// Nodes that were lost so far.
    pub nodes_lost: u64,
}

/// Where the time of all jobs went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct TimeView {
    /// Jobs ran, and did not wait for data.
    pub computing_ms: u64,
    /// Jobs ran, and waited for data.
    pub io_wait_ms: u64,
    /// Volumes were made, filled or copied, or results were sent home.
    pub copying_ms: u64,
    /// Attempts whose work was lost.
    pub lost_ms: u64,
    /// From the request to a node to the known end, without the program's own time.
    pub overhead_ms: u64,
    /// Jobs waited for other jobs, a processor or space.
    pub queued_ms: u64,
}

/// Where a job is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobStateView {
    /// A job that it depends on is not done.
    Waiting,
    /// It may start.
    Ready,
    /// The user holds it, or it is retried in a while.
    HeldBack,
    /// An attempt is in progress.
    Active,
    /// It succeeded.
    Done,
    /// It failed for good.
    Failed,
    /// It does not run: a job that it depends on failed, or it was cancelled.
    Skipped,
}

/// A job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct JobView {
    /// Its name.
    pub name: String,
    /// Where it is in its life.
    pub state: JobStateView,
    /// Jobs before it on its longest way from a first one.
    pub level: u32,
    /// Name of the first job of its pipeline: the jobs that share scratch volumes.
    pub pipeline: String,
    /// Pipelines with a higher one go first.
    pub priority: i32,
    /// Whether the user holds its pipeline, or the run.
    pub is_held: bool,
    /// Attempts that were started.
    pub attempts: u32,
    /// Node of the last attempt.
    pub node: Option<String>,
    /// When the last attempt was started.
    pub started_ms: Option<u64>,
    /// When the last attempt ended.
    pub ended_ms: Option<u64>,
    /// Positions of the jobs that must be done before it.
    #[serde(skip)]
    pub parents: Vec<u32>,
}

/// What the workflow says of a job.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct JobDetails {
    /// Its program and the arguments.
    pub command: Vec<String>,
    /// Processors that it occupies.
    pub cpus: u32,
    /// Memory that it asks for; 0 for no limit.
    pub memory_bytes: u64,
    /// Volumes that it sees: path and name.
    pub mounts: Vec<(String, String)>,
}

/// The outcome of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ExecutionOutcomeView {
    /// It is in progress.
    Running,
    /// It did its job.
    Done,
    /// It succeeded, and its output was lost.
    RolledBack,
    /// It failed.
    Failed,
    /// Its node was lost, or it was killed.
    Abandoned,
}

/// One attempt of a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ExecutionView {
    /// Position of its job.
    #[serde(skip)]
    pub job: u32,
    /// Its node.
    pub node: String,
    /// When it was started.
    pub started_ms: u64,
    /// When it ended.
    pub ended_ms: Option<u64>,
    /// Its outcome.
    pub outcome: ExecutionOutcomeView,
    /// How it ended, in a few words.
    pub end: String,
    /// Slots that it occupied.
    pub slots: u32,
    /// CPU time.
    pub cpu_ms: u64,
    /// Time for which it waited for data.
    pub waited_ms: u64,
    /// Bytes that it read.
    pub read_bytes: u64,
    /// Bytes that it wrote.
    pub written_bytes: u64,
}

/// The kind of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum VolumeRoleView {
    /// A scratch volume.
    Scratch,
    /// A part of a cache.
    Cache,
    /// A copy of a scratch volume.
    Copy,
}

/// A volume on a node.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VolumeView {
    /// Its name in the workflow.
    pub name: String,
    /// Its kind.
    pub role: VolumeRoleView,
    /// Its node.
    pub node: String,
    /// Bytes reserved for it.
    pub bytes: u64,
    /// Whether it is filled from home.
    pub is_filled: bool,
    /// When the node was asked for it.
    pub requested_ms: u64,
    /// When it existed.
    pub created_ms: Option<u64>,
    /// When it was gone.
    pub deleted_ms: Option<u64>,
    /// Whether it was lost, or never came to exist.
    pub is_lost: bool,
}

/// A result on its way home.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DeliveryView {
    /// Where it goes.
    pub target: String,
    /// When its node was asked.
    pub requested_ms: u64,
    /// When it was at home, or the try failed.
    pub ended_ms: Option<u64>,
    /// Its size, once it is at home.
    pub bytes: Option<u64>,
}

/// A node.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NodeView {
    /// Its name.
    pub name: String,
    /// Whether it is lost now.
    pub is_lost: bool,
    /// Jobs that it runs at once.
    pub slots: u32,
    /// Its jobs of this run now.
    pub jobs: u32,
    /// Its space for volumes.
    pub capacity_bytes: u64,
    /// What volumes of this run reserve there now.
    pub reserved_bytes: u64,
    /// What it has left for new work, in words.
    pub description: Option<String>,
    /// Start and end of each time in which it was there.
    pub presence: Vec<(u64, Option<u64>)>,
}

/// A job that failed for good.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FailureView {
    /// Its name.
    pub job: String,
    /// Node of the last attempt; empty if there was none.
    pub node: String,
    /// What happened, as a sentence.
    pub reason: String,
    /// What to do about it.
    pub advice: String,
    /// The last lines that it printed.
    pub output_tail: String,
}

/// Bytes that servers moved so far, at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct TrafficSample {
    /// When.
    pub at_ms: u64,
    /// Over the link to home.
    pub home_bytes: u64,
    /// Between nodes.
    pub node_bytes: u64,
}

/// A run as it is now.
#[derive(Debug, Clone, PartialEq)]
pub struct RunView {
    /// The run in short.
    pub summary: RunSummary,
    /// Where the time of its jobs went.
    pub time: TimeView,
    /// The scheduler's warnings, and what went wrong beside jobs.
    pub warnings: Vec<String>,
    /// Its jobs, in the order of declaration.
    pub jobs: Vec<JobView>,
    /// Attempts, in the order of their start.
    pub executions: Vec<ExecutionView>,
    /// Volumes, in the order of asking for them.
    pub volumes: Vec<VolumeView>,
    /// Results on their way home.
    pub deliveries: Vec<DeliveryView>,
    /// Nodes that were seen.
    pub nodes: Vec<NodeView>,
    /// Jobs that failed for good.
    pub failures: Vec<FailureView>,
    /// What servers moved, if somebody looked.
    pub traffic: Vec<TrafficSample>,
}

/// What one attempt of a job printed.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct LogView {
    /// The job.
    pub job: String,
    /// Which attempt, from 1 on.
    pub attempt: u32,
    /// Attempts that can be read, from 1 to this.
    pub attempts: u32,
    /// Its node, once it is known.
    pub node: String,
    /// Whether the attempt is in progress: more may come.
    pub is_running: bool,
    /// How it ended; empty while it runs.
    pub end: String,
    /// Standard output; its last part if it is long.
    pub stdout: String,
    /// Standard error; its last part if it is long.
    pub stderr: String,
    /// Whether earlier output is left out.
    pub is_cut: bool,
    /// Why nothing is kept, if so.
    pub missing_reason: Option<String>,
}

/// One thing that happened or was decided.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HistoryLineView {
    /// Its number in the run, from 0 on.
    pub number: u64,
    /// When.
    pub at_ms: u64,
    /// Names of the jobs, volumes and nodes that it is about.
    pub subjects: Vec<String>,
    /// What, in a sentence.
    pub text: String,
}

/// A part of the history of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct HistoryPage {
    /// Lines, the oldest first.
    pub lines: Vec<HistoryLineView>,
    /// Lines so far.
    pub total: u64,
}

/// Figures by name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct MetricsView {
    /// Figures that only grow.
    pub counters: BTreeMap<String, u64>,
    /// Figures of the moment.
    pub gauges: BTreeMap<String, u64>,
}
