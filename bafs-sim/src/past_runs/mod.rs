//! Past runs as workloads of the simulator: a run of our own from its journal, jobs of another
//! batch system from its accounting. Table of contents; simulates nothing.
//!
//! `docs/explanation/planning.md` lists the imported and the missing data.

mod csv;
mod journal;
mod measured_rates;
mod slurm;
mod table;
mod trace;
mod workload;

use crate::planner::NodeClass;
use crate::simulator::MeasuredLoad;

use bafs_proto::time::Time;
use bafs_workflow::Workflow;
pub use csv::from_csv;
pub use journal::from_journal;
pub use slurm::from_slurm;
pub use trace::from_trace;

/// Jobs that are read from one file at most.
pub const JOBS_MAX: usize = 1_000_000;

/// Bytes of a file of past jobs or of a trace: a thousand for each job.
pub const FILE_BYTES_MAX: usize = 1 << 30;

/// Something that was run, ready to be simulated.
#[derive(Debug, Clone, PartialEq)]
pub struct PastRun {
    /// The jobs and their data; sizes and run times are measured ones.
    pub workflow: Workflow,
    /// The measured load of each job.
    pub measured: MeasuredLoad,
    /// From the first job to the last, in seconds, when that is known.
    pub duration_s: Option<f64>,
    /// Time of the first action, which is the start of simulated time, if known.
    pub began_at: Option<Time>,
    /// Where it ran, when that is known.
    pub site: Option<Site>,
    /// The line of each job in its file; empty where there are no lines.
    pub job_lines: Vec<usize>,
    /// Omissions and assumptions, in sentences.
    pub remarks: Vec<String>,
}

/// The machines that something ran on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// Nodes, equal ones together.
    pub nodes: Vec<NodeClass>,
    /// The scheduler's slack on each node, in thousandths.
    pub slack_permille: u32,
    /// Rate of the link to home in bytes per second, if enough crossed it to measure.
    pub home_bytes_per_s: Option<u64>,
    /// Rate of the nodes' links in bytes per second, if enough crossed them to measure.
    pub local_bytes_per_s: Option<u64>,
}

/// Why something cannot be simulated again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PastError {
    /// A line of a table is wrong.
    #[error("line {line}: {message}")]
    InvalidLine {
        /// The line, from 1 on.
        line: usize,
        /// The error and, if useful, a remedy.
        message: String,
    },
    /// The whole cannot be used.
    #[error("{0}")]
    Unusable(String),
}

impl PastError {
    fn at_line(line: usize, message: impl Into<String>) -> Self {
        Self::InvalidLine {
            line,
            message: message.into(),
        }
    }
}
