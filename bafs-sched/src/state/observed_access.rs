//! What jobs did to volumes, and what the user is told.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::ServerId;
use bafs_proto::job_report::VolumeUse;
use bafs_workflow::{JobIndex, VolumeIndex};

/// Something that a user should know while a run goes on: a job did what the workflow does not
/// declare, a node was set aside, a size was too small.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunWarning {
    /// The job that it is about, if it is about one.
    pub job: Option<JobIndex>,
    /// The volume that it is about, if it is about one.
    pub volume: Option<VolumeIndex>,
    /// The node that it is about, if it is about one.
    pub node: Option<ServerId>,
    /// The whole in a sentence, with all names.
    pub text: String,
}

/// What jobs did to scratch volumes that are still of interest.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Deeds {
    /// Jobs that changed each volume, and the file that each changed first.
    pub(crate) wrote: BTreeMap<VolumeIndex, BTreeMap<JobIndex, String>>,
    /// Jobs that read each volume, and the file that each read first.
    pub(crate) read: BTreeMap<VolumeIndex, BTreeMap<JobIndex, String>>,
    pub(crate) warnings: Vec<RunWarning>,
    /// What was warned of, once for each kind, job and volume.
    pub(crate) known: BTreeSet<(u8, JobIndex, VolumeIndex)>,
    pub(crate) omitted: u64,
}

pub(crate) fn has_written(used: &VolumeUse) -> bool {
    used.changes > 0 || used.written_bytes > 0
}
