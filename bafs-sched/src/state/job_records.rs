//! What is known of finished jobs, of this run and of earlier ones, for the next run.

use bafs_proto::hash::Digest;
use bafs_proto::ids::ExecutionId;
use bafs_proto::job_report::ObservedInputs;
use bafs_proto::source::SourceIdentity;
use bafs_workflow::{JobIndex, VolumeIndex};
use serde::{Deserialize, Serialize};

use crate::earlier_work::{JobRecord, NamedFiles, ProgramIdentity};
use crate::state::recorded::{kept, whole_rows};
use crate::state::tracked::Table;

/// What is noted of a job that is done. The rest of its [`JobRecord`] follows from the workflow and
/// from what was found when the run began: a whole record takes some 700 bytes of memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct FinishedJob {
    /// The execution that succeeded.
    pub(crate) execution: ExecutionId,
    /// Jobs that it came after, each with the execution whose output it read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) producers: Vec<(JobIndex, ExecutionId)>,
    /// What it read of cache volumes, as far as that was counted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) inputs: Vec<(VolumeIndex, ObservedInputs)>,
    /// Files that were sent home from volumes that it wrote, by their extracts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) results: Vec<(u32, SourceIdentity)>,
}

/// Records of jobs, and what the next ones are made of.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct JobRecords {
    /// Of earlier runs, by the names of jobs; of this run where an earlier version noted them.
    pub(crate) of_job: Table<String, JobRecord>,
    /// Of this run.
    pub(crate) finished: Table<JobIndex, FinishedJob>,
    /// Digests of the sources of volumes when the run began.
    pub(crate) sources: Table<VolumeIndex, Digest>,
    /// Programs when the run began.
    pub(crate) programs: Table<JobIndex, ProgramIdentity>,
    /// Other files that jobs name, when the run began.
    pub(crate) files: Table<JobIndex, NamedFiles>,
    /// Whether the nodes end with the run.
    pub(crate) is_temporary: bool,
}

whole_rows!(JobRecord, FinishedJob, Digest, ProgramIdentity, NamedFiles);

kept! {
    /// What was written of the records.
    RecordChanges of JobRecords;
    values { is_temporary: bool }
    tables {
        of_job: Table<String, JobRecord>,
        finished: Table<JobIndex, FinishedJob>,
        sources: Table<VolumeIndex, Digest>,
        programs: Table<JobIndex, ProgramIdentity>,
        files: Table<JobIndex, NamedFiles>,
    }
    indexed {}
    parts {}
    rebuilt {}
}

impl JobRecords {
    /// The execution of a job that succeeded last, in this run or an earlier one.
    pub(crate) fn execution(&self, job: JobIndex, name: &str) -> Option<ExecutionId> {
        let finished = self.finished.get(&job).map(|noted| noted.execution);
        finished.or_else(|| Some(self.of_job.get(name)?.execution))
    }

    /// A job of this run is done: what earlier runs noted of it counts no more.
    pub(crate) fn note(&mut self, job: JobIndex, name: &str, finished: FinishedJob) {
        self.forget_earlier(name);
        self.finished.insert(job, finished);
    }

    /// What a job wrote is gone, or was wrong.
    pub(crate) fn forget(&mut self, job: JobIndex, name: &str) {
        self.forget_earlier(name);
        self.finished.remove(&job);
    }

    fn forget_earlier(&mut self, name: &str) {
        if self.of_job.contains_key(name) {
            self.of_job.remove(&name.to_owned());
        }
    }
}
