//! The checked workflow: what the planner, the scheduler and the journal work with. Values only;
//! that they are consistent is the promise of `check.rs`.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use bafs_proto::file_set::FileSelection;
use bafs_proto::path::ROOT_PATH;
use bafs_proto::volume::LimitKind;
use serde::{Deserialize, Serialize};

use super::path::is_inside;
use super::url::Url;

/// The position of a job in [`Workflow::jobs`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobIndex(pub u32);

/// The position of a volume in [`Workflow::volumes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct VolumeIndex(pub u32);

impl JobIndex {
    /// The position as an index into a slice of jobs.
    pub fn as_usize(self) -> usize {
        self.0 as usize
    }
}

impl VolumeIndex {
    /// The position as an index into a slice of volumes.
    pub fn as_usize(self) -> usize {
        self.0 as usize
    }
}

/// A whole workflow. Every index in it is valid, the jobs' order has no cycle, and each scratch
/// volume is written before it is read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workflow {
    /// The name of the workflow file without directory and ending.
    pub name: String,
    /// The jobs in the order of their declaration.
    pub jobs: Vec<Job>,
    /// The volumes in the order of their declaration.
    pub volumes: Vec<Volume>,
    /// The files that are committed to a home, in the order of their declaration.
    pub extracts: Vec<Extract>,
}

/// A job: one program with its volumes, and the jobs before it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// The name, unique among jobs.
    pub name: String,
    /// What is run.
    pub command: ProgramSpec,
    /// Processors that the job occupies, at least one.
    pub cpus: u32,
    /// Memory that the job asks for, in bytes; 0 when the workflow does not say.
    pub memory_bytes: u64,
    /// What else the job may use of its node.
    #[serde(default, skip_serializing_if = "JobLimits::is_empty")]
    pub limits: JobLimits,
    /// The user's estimate of the run time, when there is one.
    pub runtime_s: Option<u64>,
    /// How often the job is run again after it failed by its own fault.
    pub retries: u32,
    /// Jobs of pipelines with a higher one go first; that of a pipeline is its jobs' highest.
    #[serde(default)]
    pub priority: i32,
    /// The volumes that the job sees, ordered by path; no path lies inside another but that of a
    /// root directory.
    pub mounts: Vec<Mount>,
    /// The jobs that must be done before this one starts, ascending, each once.
    pub parents: Vec<JobIndex>,
    /// The jobs that wait for this one, ascending, each once.
    pub children: Vec<JobIndex>,
}

/// What a job may use of its node, beside what it asks for at first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobLimits {
    /// Memory for further tries, in bytes, ascending: each for a try that used up the one before.
    #[serde(default)]
    pub more_memory_bytes: Vec<u64>,
    /// The size of its private `/tmp` and `/var/tmp` together, if the workflow says.
    #[serde(default)]
    pub temporary_bytes: Option<u64>,
    /// How long a try may run, in seconds, if the workflow says.
    #[serde(default)]
    pub runtime_s: Option<u64>,
}

impl JobLimits {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Job {
    /// The innermost mount that a path lies in. What each job has of its own lies in none.
    pub fn mount_at(&self, path: &str) -> Option<&Mount> {
        let mut own = SHARED_DIRECTORIES.iter();
        let is_own = own.any(|directory| is_inside(path, directory));
        let is_there = |mount: &&Mount| {
            let is_covered = !mount.path.is_empty() && is_inside(path, &mount.path);
            is_covered && !(is_own && mount.is_root())
        };
        let mounts = self.mounts.iter().filter(is_there);
        mounts.max_by_key(|mount| mount.path.len())
    }

    /// The volume that is the whole root directory of the job, if it has one.
    pub fn root(&self) -> Option<&Mount> {
        self.mounts.iter().find(|mount| mount.is_root())
    }

    /// Memory of a try, in bytes, after so many that used up theirs; 0 when the workflow does not
    /// say.
    pub fn memory_of_try(&self, tries: u32) -> u64 {
        let more = &self.limits.more_memory_bytes;
        match (tries as usize).min(more.len()) {
            0 => self.memory_bytes,
            tries => more[tries - 1],
        }
    }
}

/// A program with its surroundings, all paths as the job sees them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramSpec {
    /// A path, or a bare name that is looked up in the job's `PATH`.
    pub executable: String,
    /// The arguments, without the program's own name; nothing in them is expanded any more.
    pub arguments: Vec<String>,
    /// Variables and their values in the order of their declaration, each variable once.
    pub environment: Vec<(String, String)>,
    /// The absolute working directory.
    pub directory: String,
    /// The absolute path of the file that takes standard output, when the user wants one.
    pub stdout: Option<String>,
    /// The absolute path of the file that takes standard error, when the user wants one.
    pub stderr: Option<String>,
    /// The absolute paths of files that must be there before the program starts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub required_files: Vec<String>,
    /// The absolute paths of files below writable mounts that a successful job leaves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub produced_files: Vec<String>,
    /// Which of [`SHARED_DIRECTORIES`] are the host's, ascending; the others are the job's own.
    #[serde(default)]
    pub shared_directories: Vec<String>,
}

/// Directories that each job has for itself, unless it shares the host's.
pub const SHARED_DIRECTORIES: [&str; 3] = ["/dev/shm", "/tmp", "/var/tmp"];

/// A volume at a path of a job's private name space.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Which volume.
    pub volume: VolumeIndex,
    /// The absolute, normalised path; `/` for the volume that is the job's whole root directory.
    pub path: String,
    /// Whether the job may write; never true for a cache volume.
    pub writable: bool,
    /// Whether the kernel may collect what the job writes, and send it later.
    #[serde(default)]
    pub write_back: bool,
}

impl Mount {
    /// Whether the volume is the whole root directory of the job.
    pub fn is_root(&self) -> bool {
        self.path == ROOT_PATH
    }
}

/// A volume that the workflow declares: a name, a kind and a size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    /// The name, unique among volumes.
    pub name: String,
    /// What the volume is for.
    pub kind: VolumeKind,
    /// The bytes to reserve, with the margin that its limit asks for; 0 when the size is not known
    /// and must be measured.
    pub size_bytes: u64,
    /// The files to reserve, at least one.
    pub size_files: u64,
    /// How the limit of a scratch volume is kept.
    #[serde(default)]
    pub limit: LimitKind,
    /// The jobs that mount it, ascending, each once; empty when none does.
    pub users: Vec<JobIndex>,
}

/// What a volume is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum VolumeKind {
    /// A read-write tree that lives as long as its users.
    Scratch {
        /// The home path that the tree is a copy of at first; empty at first when there is none.
        fill: Option<Url>,
    },
    /// A read-only view of a home path.
    Cache {
        /// The path that is viewed.
        source: Url,
        /// Which block leaves first when space is short.
        policy: CachePolicy,
        /// Whether its readers need nearly all of it, so that it may come before they start.
        #[serde(default)]
        is_warmed: bool,
    },
}

/// Which block a cache volume gives up first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CachePolicy {
    /// The one whose last use is the longest ago.
    Lru,
    /// The one used last: better when a scan is longer than the cache.
    Mru,
}

/// A result: a file of a scratch volume, or a set of files, that goes home when the last writer of
/// the volume is done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extract {
    /// The scratch volume that holds the file; some job mounts it writable.
    pub volume: VolumeIndex,
    /// The file's normalised path inside the volume, without a leading `/`; the words of a set.
    pub path: String,
    /// The parts of a set; none for one file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub selections: Vec<FileSelection>,
    /// Where it goes, a directory for a set; no two extracts have the same target.
    pub target: Url,
}

impl Extract {
    /// Whether it is a set of files, whose target is a directory.
    pub fn is_set(&self) -> bool {
        !self.selections.is_empty()
    }

    /// What messages call it: `file` or `files`.
    pub fn noun(&self) -> &'static str {
        if self.is_set() { "files" } else { "file" }
    }
}

/// For each volume of a workflow its first user and the second one.
pub type FirstUsers = Vec<[Option<JobIndex>; 2]>;

impl Workflow {
    /// The job at `index`.
    pub fn job(&self, index: JobIndex) -> &Job {
        &self.jobs[index.as_usize()]
    }

    /// The volume at `index`.
    pub fn volume(&self, index: VolumeIndex) -> &Volume {
        &self.volumes[index.as_usize()]
    }

    /// All places at homes: sources of volumes first, then where extracts go.
    pub fn urls(&self) -> impl Iterator<Item = &Url> {
        let sources = self.volumes.iter().filter_map(|volume| match &volume.kind {
            VolumeKind::Cache { source, .. } => Some(source),
            VolumeKind::Scratch { fill } => fill.as_ref(),
        });
        sources.chain(self.extracts.iter().map(|extract| &extract.target))
    }

    /// For each volume those of its users that run first and second, as far as the order of jobs
    /// says so: one may be declared after the jobs that wait for it.
    pub fn first_users(&self) -> FirstUsers {
        let mut found: FirstUsers = vec![[None; 2]; self.volumes.len()];
        for job in self.topological_order() {
            for mount in &self.job(job).mounts {
                let [first, second] = &mut found[mount.volume.as_usize()];
                match first {
                    None => *first = Some(job),
                    Some(other) if *other != job && second.is_none() => *second = Some(job),
                    Some(_) => {}
                }
            }
        }
        found
    }

    /// Every job once, parents before children; among jobs that are free to run, the one that was
    /// declared first comes first.
    pub fn topological_order(&self) -> Vec<JobIndex> {
        let order = topological_sort(&self.jobs);
        assert_eq!(
            order.len(),
            self.jobs.len(),
            "a checked workflow has no cycle"
        );
        order
    }
}

/// Kahn's algorithm over a heap. Jobs on a cycle, and those behind one, are missing in the result.
pub fn topological_sort(jobs: &[Job]) -> Vec<JobIndex> {
    let mut pending_parents: Vec<usize> = jobs.iter().map(|job| job.parents.len()).collect();
    let mut ready: BinaryHeap<Reverse<u32>> = (0..jobs.len() as u32)
        .filter(|&job| pending_parents[job as usize] == 0)
        .map(Reverse)
        .collect();
    let mut order = Vec::with_capacity(jobs.len());
    while let Some(Reverse(job)) = ready.pop() {
        order.push(JobIndex(job));
        for &child in &jobs[job as usize].children {
            pending_parents[child.as_usize()] -= 1;
            if pending_parents[child.as_usize()] == 0 {
                ready.push(Reverse(child.0));
            }
        }
    }
    order
}
