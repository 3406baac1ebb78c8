//! What jobs did to volumes, and what the user is told.

use std::collections::BTreeMap;

use bafs_proto::ids::ServerId;
use bafs_proto::job_report::VolumeUse;
use bafs_workflow::{JobIndex, VolumeIndex};
use serde::{Deserialize, Serialize};

use crate::state::recorded::{kept, whole_rows};
use crate::state::tracked::{Keys, Rows, Table};

/// Something that a user should know while a run goes on: a job did what the workflow does not
/// declare, a node was set aside, a size was too small.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
pub(crate) struct ObservedAccess {
    /// Jobs that changed each volume, and the file that each changed first.
    pub(crate) wrote: Table<(VolumeIndex, JobIndex), String>,
    /// Jobs that read each volume, and the file that each read first.
    pub(crate) read: Table<(VolumeIndex, JobIndex), String>,
    pub(crate) warnings: Rows<RunWarning>,
    /// What was warned of, once for each kind, job and volume.
    pub(crate) known: Keys<(u8, JobIndex, VolumeIndex)>,
    pub(crate) omitted: u64,
}

whole_rows!(RunWarning);

kept! {
    /// What was written of what jobs did.
    ObservedAccessChanges of ObservedAccess;
    values { omitted: u64 }
    tables {
        wrote: Table<(VolumeIndex, JobIndex), String>,
        read: Table<(VolumeIndex, JobIndex), String>,
        warnings: Rows<RunWarning>,
        known: Keys<(u8, JobIndex, VolumeIndex)>,
    }
    indexed {}
    parts {}
    rebuilt {}
}

impl ObservedAccess {
    /// Jobs that changed a volume, or read it, by `of`; each with the file that was first.
    pub(crate) fn of_volume(
        of: &BTreeMap<(VolumeIndex, JobIndex), String>,
        volume: VolumeIndex,
    ) -> impl Iterator<Item = (JobIndex, &String)> {
        let jobs = of.range((volume, JobIndex(0))..=(volume, JobIndex(u32::MAX)));
        jobs.map(|((_, job), file)| (*job, file))
    }

    /// Nobody uses a volume any more.
    pub(crate) fn forget(&mut self, volume: VolumeIndex) {
        for of in [&mut self.wrote, &mut self.read] {
            let jobs = Self::of_volume(of, volume).map(|(job, _)| job);
            for job in jobs.collect::<Vec<_>>() {
                of.remove(&(volume, job));
            }
        }
    }
}

pub(crate) fn has_written(used: &VolumeUse) -> bool {
    used.changes > 0 || used.written_bytes > 0
}
