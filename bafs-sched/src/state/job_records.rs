//! What is known of finished jobs, of this run and of earlier ones, for the next run.

use bafs_proto::hash::Digest;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::earlier_work::{JobRecord, NamedFiles, ProgramIdentity};
use crate::state::recorded::{kept, whole_rows};
use crate::state::tracked::Table;

/// Records by the names of jobs, and what the next ones are made of.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct JobRecords {
    pub(crate) of_job: Table<String, JobRecord>,
    /// Digests of the sources of volumes when the run began.
    pub(crate) sources: Table<VolumeIndex, Digest>,
    /// Programs when the run began.
    pub(crate) programs: Table<JobIndex, ProgramIdentity>,
    /// Other files that jobs name, when the run began.
    pub(crate) files: Table<JobIndex, NamedFiles>,
    /// Whether the nodes end with the run.
    pub(crate) is_temporary: bool,
}

whole_rows!(JobRecord, Digest, ProgramIdentity, NamedFiles);

kept! {
    /// What was written of the records.
    RecordChanges of JobRecords;
    values { is_temporary: bool }
    tables {
        of_job: Table<String, JobRecord>,
        sources: Table<VolumeIndex, Digest>,
        programs: Table<JobIndex, ProgramIdentity>,
        files: Table<JobIndex, NamedFiles>,
    }
    indexed {}
    parts {}
    rebuilt {}
}
