//! What a program gives that has runs: the seam between them and all that is served.

use std::sync::Arc;

use bafs_proto::Result;
use bafs_queue::Requester;

use crate::views::{HistoryPage, JobDetails, LogView, MetricsView, RunSummary, RunView};

/// What somebody wants of a run. A job stands for its pipeline; it is its position in the view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunCommand {
    /// Its jobs are stopped, and its volumes deleted.
    CancelRun,
    /// No job of it starts.
    HoldRun,
    /// Its jobs may start again.
    ReleaseRun,
    /// The rest of a pipeline does not run.
    CancelPipeline(u32),
    /// No job of a pipeline starts.
    HoldPipeline(u32),
    /// The jobs of a pipeline may start again.
    ReleasePipeline(u32),
    /// The jobs of a pipeline go before those of pipelines with a lower priority.
    SetPriority(u32, i32),
}

/// Runs that are shown and steered. Calls may read files, and return soon; they are made on threads
/// that may wait. Each is safe to repeat.
///
/// Errors: `NotFound` for a run, job or attempt that is unknown, or that is not the requester's;
/// `WrongState` for a command that the run cannot take; `ServerFault` where files cannot be read.
pub trait RunSource: Send + Sync {
    /// The runs of a user, or of all for an operator.
    fn list_runs(&self, requester: &Requester) -> Result<Vec<RunSummary>>;

    /// A run as it is now.
    fn view_run(&self, requester: &Requester, run: &str) -> Result<Arc<RunView>>;

    /// What the workflow says of a job.
    fn describe_job(&self, requester: &Requester, run: &str, job: u32) -> Result<JobDetails>;

    /// Why each of these jobs does not run now, or never ran; nothing for others.
    fn explain_jobs(
        &self,
        requester: &Requester,
        run: &str,
        jobs: &[u32],
    ) -> Result<Vec<Option<String>>>;

    /// What an attempt of a job printed: the given one, or the last. Asking also has the output of
    /// a running attempt fetched; it is there at one of the next calls.
    fn read_log(
        &self,
        requester: &Requester,
        run: &str,
        job: u32,
        attempt: Option<u32>,
    ) -> Result<LogView>;

    /// What happened in a run, from a line on.
    fn read_history(
        &self,
        requester: &Requester,
        run: &str,
        from: u64,
        limit: usize,
    ) -> Result<HistoryPage>;

    /// Hands a command to a run, which obeys it within two seconds.
    fn send_command(&self, requester: &Requester, run: &str, command: RunCommand) -> Result<()>;

    /// Figures of all that the requester may see.
    fn read_metrics(&self, requester: &Requester) -> Result<MetricsView>;
}
