//! What is known of finished jobs. Values only.

use bafs_proto::hash::Digest;
use bafs_proto::ids::{ExecutionId, ServerId, VolumeId};
use bafs_proto::job_report::ObservedInputs;
use bafs_proto::source::SourceIdentity;
use bafs_workflow::{JobIndex, Url, VolumeIndex};
use serde::{Deserialize, Serialize};

use crate::event::NodeInfo;
use crate::space::Space;

/// What made the outputs of a finished job what they are, and where its results went.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    /// The name of the job.
    pub job: String,
    /// The execution that succeeded.
    pub execution: ExecutionId,
    /// Digest of its description.
    pub description: Digest,
    /// Its program as the machine of the scheduler has it; nothing when that has none.
    #[serde(default)]
    pub program: Option<ProgramIdentity>,
    /// Other files that its description names, as the machine of the scheduler had them.
    #[serde(default)]
    pub files: NamedFiles,
    /// Declared sizes of the scratch volumes that it wrote, in the order of its mounts; nothing in
    /// records that are older than this field.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sizes: Vec<Space>,
    /// What it saw of home.
    #[serde(default)]
    pub sources: Vec<SourceRecord>,
    /// Jobs that it came after, each with the execution whose output it read.
    #[serde(default)]
    pub producers: Vec<(String, ExecutionId)>,
    /// Files that were sent home from volumes that it wrote.
    #[serde(default)]
    pub results: Vec<ResultRecord>,
}

/// Files on a machine that a job names, by their paths.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NamedFiles(pub Vec<ProgramIdentity>);

/// A program on a machine, or another file that a job names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramIdentity {
    /// Where it is.
    pub path: String,
    /// Its size in bytes.
    pub size: u64,
    /// When it was modified, in nanoseconds since the Unix epoch.
    pub mtime_ns: i64,
    /// When it, or what the system notes of it, was changed, in the same unit: unlike the other
    /// time, nobody sets it. 0 in records that are older than this field.
    #[serde(default)]
    pub ctime_ns: i64,
}

impl ProgramIdentity {
    /// Whether it is the same file with the same content.
    pub fn is_same(&self, other: &Self) -> bool {
        let is_told = self.ctime_ns != 0 && other.ctime_ns != 0;
        (&self.path, self.size, self.mtime_ns) == (&other.path, other.size, other.mtime_ns)
            && (!is_told || self.ctime_ns == other.ctime_ns)
    }
}

/// What a job saw of the source of one of its volumes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceRecord {
    /// The source.
    pub source: Url,
    /// What of it.
    pub seen: SeenSource,
}

/// What of a source a job saw.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SeenSource {
    /// This and nothing else. It is larger than the others, and most jobs have one of these.
    Exactly(Box<ObservedInputs>),
    /// Perhaps all of it, which had this digest.
    Whole(Digest),
    /// Nobody knows.
    Unknown,
}

/// A file that was sent home.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResultRecord {
    /// Where it went.
    pub target: Url,
    /// What it was there.
    pub identity: SourceIdentity,
}

/// A scratch volume that outlived its run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptVolume {
    /// Which.
    pub id: VolumeId,
    /// Its name in the workflow.
    pub name: String,
    /// Where it is.
    pub server: ServerId,
    /// How much it reserves.
    pub size: Space,
    /// Jobs whose output it has, each with its execution.
    pub writers: Vec<(String, ExecutionId)>,
}

/// A kept volume that a run goes on with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdoptedVolume {
    /// Which.
    pub id: VolumeId,
    /// What it is in the workflow.
    pub volume: VolumeIndex,
    /// Where it is.
    pub server: ServerId,
    /// How much it reserves.
    pub size: Space,
}

/// What a run goes on with, all found out before its first job starts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EarlierWork {
    /// Records of all jobs of earlier runs, also of those that run again.
    #[serde(default)]
    pub records: Vec<JobRecord>,
    /// Jobs that need not run.
    #[serde(default)]
    pub up_to_date: Vec<JobIndex>,
    /// Digests of the sources of volumes.
    #[serde(default)]
    pub sources: Vec<(VolumeIndex, Digest)>,
    /// Programs of jobs.
    #[serde(default)]
    pub programs: Vec<(JobIndex, ProgramIdentity)>,
    /// Other files of this machine that jobs name.
    #[serde(default)]
    pub files: Vec<(JobIndex, NamedFiles)>,
    /// The nodes of kept volumes.
    #[serde(default)]
    pub nodes: Vec<NodeInfo>,
    /// Kept volumes that are used again.
    #[serde(default)]
    pub adopted: Vec<AdoptedVolume>,
    /// Kept volumes of which nobody has a use.
    #[serde(default)]
    pub dropped: Vec<(VolumeId, ServerId)>,
    /// Whether the nodes end with the run, so that no later scheduler can resume it.
    #[serde(default)]
    pub is_temporary: bool,
}
