//! Parts of a simulated cluster, and its faults. Values only.

use bafs_proto::ids::ServerId;
use bafs_sched::Space;
use bafs_workflow::JobIndex;

/// A node to simulate.
#[derive(Debug, Clone)]
pub struct NodeSpec {
    /// Its space.
    pub capacity: Space,
    /// Jobs that it runs at once.
    pub slots: u32,
}

/// Faults to inject, each in thousandths of its occasions.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// A node dies in some second.
    pub node_dies: u64,
    /// A node that returns is empty.
    pub node_wiped: u64,
    /// The reply to a call gets lost after the call was served.
    pub reply_lost: u64,
    /// A job exits with code 1; at most as often as it is retried.
    pub job_fails: u64,
    /// A job's environment fails.
    pub environment_fails: u64,
    /// A ready volume vanishes in some second.
    pub volume_vanishes: u64,
    /// The node on which every job exits with code 1, whatever it is.
    pub poison_node: Option<ServerId>,
    /// The job that kills each node that runs it.
    pub poison_job: Option<JobIndex>,
    /// A node is stopped (SIGSTOP) in some second: it does not answer, and its jobs stop.
    pub node_stops: u64,
    /// The link of a node is cut in some second: it does not answer, but its jobs continue.
    pub link_cut: u64,
    /// The disk of a node is full in some second, and nothing can be made there for a while.
    pub disk_full: u64,
    /// The catalog is gone in some second, and lists nothing for a while.
    pub catalog_dies: u64,
    /// The scheduler is killed in some second: pending answers are lost, half of its requests were
    /// not sent yet, and it resumes from its journal.
    pub scheduler_dies: u64,
    /// The scheduler is cut off from all nodes in some second: no packet passes, or only its own.
    /// All other connections work, and the jobs continue.
    pub scheduler_cut: u64,
    /// Some nodes are together cut off from all others and from the scheduler in some second; their
    /// jobs continue.
    pub group_cut: u64,
    /// Faults happen until this time, in milliseconds.
    pub until_ms: u64,
}
