//! Facts that the core is told, in the past tense. They are what the journal keeps.

use bafs_proto::Error;
use bafs_proto::ids::{ExecutionId, ExtractionId, ServerId, VolumeId};
use bafs_proto::message::JobReport;
use bafs_proto::source::SourceIdentity;
use bafs_proto::source_warning::SourceWarnings;
use bafs_proto::time::Time;
use bafs_workflow::{JobIndex, VolumeIndex};
use serde::{Deserialize, Serialize};

use crate::earlier_work::EarlierWork;
use crate::space::Space;

/// One fact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// What the catalog's list of nodes says that was not known. Of ten thousand nodes one comes or
    /// goes at a time: the others are not told again.
    NodesListed {
        /// Nodes that are new, changed, back, or get another chance; each once.
        nodes: Vec<NodeInfo>,
        /// Nodes that were listed before and are not any more; each once.
        unlisted: Vec<ServerId>,
    },
    /// A home was listed under a name that the workflow has: for this run the name means that
    /// server from now on. What was taken from one directory must not go home to another.
    HomeListed {
        /// The name, in small letters.
        name: String,
        /// Which server.
        server: ServerId,
        /// Where it listens, `host:port`.
        address: String,
    },
    /// Nodes keep so much of themselves for this run.
    QuotasChanged {
        /// Each node once.
        quotas: Vec<RunQuota>,
    },
    /// A server answered no call for longer than `node_timeout_ms`, whatever the catalog says.
    ServerSilent {
        /// Which.
        server: ServerId,
    },
    /// No node answered for longer than `node_timeout_ms`: the scheduler is cut off, until some
    /// node answers, or each of them is silent for so long that it is given up.
    CutOff {
        /// For how long no node answers, in milliseconds.
        silent_ms: u64,
        /// Whether the catalog answers.
        has_catalog: bool,
    },
    /// A node answers a scheduler that was cut off.
    Reconnected,
    /// A volume is ready.
    VolumeCreated {
        /// Which.
        volume: VolumeId,
    },
    /// A copy of a volume is complete.
    VolumeCopied {
        /// The copy.
        volume: VolumeId,
        /// What of it crossed the network.
        received_bytes: u64,
    },
    /// A volume could not be created, though it was tried until the deadline.
    VolumeCreateFailed {
        /// Which.
        volume: VolumeId,
        /// Why.
        error: Error,
    },
    /// A node accepted an execution.
    JobStarted {
        /// Which.
        execution: ExecutionId,
    },
    /// A node did not accept an execution, or its answer was lost.
    JobStartFailed {
        /// Which.
        execution: ExecutionId,
        /// Why.
        error: Error,
    },
    /// An execution ended.
    JobEnded {
        /// Which.
        execution: ExecutionId,
        /// How.
        report: JobReport,
    },
    /// The node of an execution answers, but does not know the execution: it restarted.
    JobUnknown {
        /// Which.
        execution: ExecutionId,
    },
    /// A server was asked for volumes and does not have these any more.
    VolumesProbed {
        /// Which server.
        server: ServerId,
        /// Volumes that are gone.
        lost: Vec<VolumeId>,
    },
    /// A node that was given up is back, and was asked for volumes that it had.
    VolumesFound {
        /// Which node.
        server: ServerId,
        /// Those that it has.
        found: Vec<VolumeId>,
    },
    /// A part of a cache was looked at.
    CacheInspected {
        /// Which.
        volume: VolumeId,
        /// What it keeps for others, or would keep if it had the room, in bytes.
        primary_bytes: u64,
        /// What home sent it once more as it had no room to keep it, in bytes.
        refetched_bytes: u64,
    },
    /// A run begins, and this is what earlier runs of its workflow did.
    EarlierWorkFound(Box<EarlierWork>),
    /// A file is durable at home, as `FileExtracted` says next, and is this there.
    ResultIdentified {
        /// Which, by its place in the workflow's list.
        index: u32,
        /// What it is.
        identity: SourceIdentity,
    },
    /// A file is durable at home.
    FileExtracted {
        /// Which extraction.
        extract: ExtractionId,
        /// Size of the file.
        bytes: u64,
    },
    /// A file could not be sent home.
    ExtractFailed {
        /// Which extraction.
        extract: ExtractionId,
        /// Why.
        error: Error,
    },
    /// A volume is gone, as was asked.
    VolumeDeleted {
        /// Which.
        volume: VolumeId,
    },
    /// A volume could not be deleted, though it was tried until the deadline.
    VolumeDeleteFailed {
        /// Which.
        volume: VolumeId,
    },
    /// The user wants the workflow to stop.
    CancelRequested,
    /// The user wishes something of a pipeline while the run goes on.
    CommandReceived {
        /// How many wishes were read so far, this one included.
        count: u64,
        /// What; nothing when it was not understood.
        command: Option<UserCommand>,
    },
    /// Time passed, and a timer may be due.
    Tick,
    /// A scheduler takes up the journal of an earlier one, whose last facts may be missing in it.
    SchedulerResumed {
        /// A random number: ids that it gives from now on begin with it, so that none means
        /// another thing than to servers that remember what the journal does not.
        id_prefix: u32,
    },
    /// A volume that was just made does not have all as its source has it.
    SourceWarningsReceived {
        /// Which.
        volume: VolumeId,
        /// What, and why.
        warnings: SourceWarnings,
    },
}

impl Event {
    /// These nodes are listed, and nobody is missed.
    #[must_use]
    pub fn nodes_listed(nodes: Vec<NodeInfo>) -> Self {
        let missed = Vec::new();
        Self::NodesListed {
            nodes,
            unlisted: missed,
        }
    }
}

/// What a user wishes of a pipeline, named by any of its jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum UserCommand {
    /// Its jobs go before those of pipelines with a lower priority; all begin with 0.
    SetPriority {
        /// Any job of it.
        job: JobIndex,
        /// The priority.
        priority: i32,
    },
    /// What is not done of it is not done any more.
    Cancel {
        /// Any job of it.
        job: JobIndex,
    },
    /// No job of it starts until it is released; those that run go on.
    Hold {
        /// Any job of it; nothing for all pipelines.
        job: Option<JobIndex>,
    },
    /// Its jobs may start again.
    Release {
        /// Any job of it; nothing for all pipelines, those that were held one by one too.
        job: Option<JobIndex>,
    },
}

/// What matters to the core about a live node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// The node.
    pub id: ServerId,
    /// Its name, for people.
    pub name: String,
    /// Where it listens, `host:port`.
    pub address: String,
    /// Nodes of one group share cooperative caches.
    pub group: String,
    /// Its space for volumes.
    pub capacity: Space,
    /// Space that others have reserved there.
    pub foreign_space: Space,
    /// Jobs that it can run at once.
    pub slots: u32,
    /// When it leaves.
    #[serde(default)]
    pub departure: NodeDeparture,
    /// Its memory, in bytes; 0 if it does not say.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub memory_bytes: u64,
    /// What a job has there for temporary files, in bytes; 0 if it does not say.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub temporary_bytes: u64,
    /// Caches of this workflow of which it has data that no volume shows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cached: Vec<VolumeIndex>,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// When a node leaves, by its own account.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeDeparture {
    /// When its time for jobs is over; once it drains, when it ends. `None` if it knows no end.
    pub at: Option<Time>,
    /// Whether it takes no new work.
    pub is_draining: bool,
}

impl NodeInfo {
    /// A node of the only group, which nobody else uses, named for its number: how tests and
    /// simulated servers describe theirs.
    #[must_use]
    pub fn single_group(id: ServerId, capacity: Space, slots: u32) -> Self {
        Self {
            id,
            name: format!("n{}", id.0),
            address: format!("n{}:1", id.0),
            group: "g".to_owned(),
            capacity,
            foreign_space: Space::ZERO,
            slots,
            departure: NodeDeparture::default(),
            memory_bytes: 0,
            temporary_bytes: 0,
            cached: Vec::new(),
        }
    }
}

/// What a node keeps for this run, used or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunQuota {
    /// The node.
    pub server: ServerId,
    /// Of its space.
    pub space: Space,
    /// Jobs at once.
    pub slots: u32,
    /// Whether other runs have or want a part of it.
    pub is_shared: bool,
    /// Whether that is more space than the run's part, for what it has begun: it begins nothing
    /// more there.
    pub is_above_fair_share: bool,
}
