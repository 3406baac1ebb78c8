//! How far a workflow is and how it ended, for people. Decides nothing.

use std::fmt;

use bafs_workflow::JobIndex;
use serde::{Deserialize, Serialize};

/// Numbers for a progress display.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Jobs of the workflow.
    pub jobs_total: u64,
    /// Jobs that are done.
    pub jobs_done: u64,
    /// Jobs that run now.
    pub jobs_running: u64,
    /// Jobs that failed for good.
    pub jobs_failed: u64,
    /// Jobs that do not run because one that they depend on failed.
    pub jobs_skipped: u64,
    /// Executions that were started so far, re-runs included.
    pub executions: u64,
    /// Files to send home.
    pub extracts_total: u64,
    /// Files that are durable at home.
    pub extracts_done: u64,
    /// Bytes of these files.
    pub extracted_bytes: u64,
    /// Files that cannot be sent home any more.
    pub extracts_failed: u64,
    /// Volumes that exist now.
    pub volumes: u64,
    /// Nodes that are alive now.
    pub nodes: u64,
    /// Nodes that were lost so far.
    pub nodes_lost: u64,
}

/// How a workflow ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// Every job is done and every file is at home.
    Complete,
    /// Some of it could not be done; the rest is.
    Failed {
        /// The jobs that failed, in the order of their failing.
        jobs: Vec<JobFailure>,
        /// What else went wrong.
        messages: Vec<String>,
    },
    /// The user stopped it.
    Cancelled,
}

/// Why a job failed for good.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobFailure {
    /// Which.
    pub job: JobIndex,
    /// Its name.
    pub name: String,
    /// Name of the node of the last try, empty when there was none.
    pub node: String,
    /// What happened, as a sentence.
    pub reason: String,
    /// End of what it printed.
    pub output_tail: String,
}

impl fmt::Display for JobFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, reason) = (&self.name, &self.reason);
        match self.node.as_str() {
            "" => write!(f, "job {name} failed: {reason}"),
            node => write!(f, "job {name} failed on {node}: {reason}"),
        }
    }
}

/// A signal by its number, and by its name if it is one that ends programs.
pub(crate) fn describe_signal(signal: i32) -> String {
    // As Linux numbers them on all processors that BAFS runs on.
    let name = match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        3 => "SIGQUIT",
        4 => "SIGILL",
        5 => "SIGTRAP",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        13 => "SIGPIPE",
        14 => "SIGALRM",
        15 => "SIGTERM",
        24 => "SIGXCPU",
        25 => "SIGXFSZ",
        31 => "SIGSYS",
        _ => return format!("signal {signal}"),
    };
    format!("signal {signal} ({name})")
}
