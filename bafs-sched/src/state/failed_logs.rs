//! Logs of failed jobs on their way home.

use bafs_proto::ids::{ExtractionId, VolumeId};
use bafs_proto::time::Time;
use bafs_workflow::JobIndex;
use serde::{Deserialize, Serialize};

use crate::state::recorded::{kept, whole_rows};
use crate::state::tracked::Table;

/// One log on its way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct FailedLog {
    pub(crate) job: JobIndex,
    /// Position in the workflow's list of extracts.
    pub(crate) index: u32,
    /// The volume that has it, which is out of use.
    pub(crate) volume: VolumeId,
    pub(crate) since: Time,
    pub(crate) faults: u32,
    /// Whether it failed for the moment.
    pub(crate) is_paused: bool,
}

/// All that are on their way.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct FailedLogs {
    pub(crate) logs: Table<ExtractionId, FailedLog>,
}

whole_rows!(FailedLog);

kept! {
    /// What was written of the logs.
    FailedLogChanges of FailedLogs;
    values {}
    tables { logs: Table<ExtractionId, FailedLog> }
    indexed {}
    parts {}
    rebuilt {}
}

impl FailedLogs {
    /// Whether none is on its way.
    pub(crate) fn is_empty(&self) -> bool {
        self.logs.is_empty()
    }

    /// Those that a server was asked for: position, id and volume.
    pub(crate) fn under_way(&self) -> impl Iterator<Item = (u32, ExtractionId, VolumeId)> {
        let asked = self.logs.iter().filter(|(_, log)| !log.is_paused);
        asked.map(|(extract, log)| (log.index, *extract, log.volume))
    }

    /// The volume of one.
    pub(crate) fn volume_of(&self, extract: ExtractionId) -> Option<VolumeId> {
        self.logs.get(&extract).map(|log| log.volume)
    }

    /// Whether a volume must stay because of one.
    pub(crate) fn holds(&self, volume: VolumeId) -> bool {
        self.logs.values().any(|log| log.volume == volume)
    }

    /// A volume is gone.
    pub(crate) fn drop_volume(&mut self, volume: VolumeId) {
        self.logs.retain(|_, log| log.volume != volume);
    }

    /// The run was given up.
    pub(crate) fn clear(&mut self) {
        self.logs.clear();
    }

    /// Time in which nothing could be tried does not count.
    pub(crate) fn put_off(&mut self, ms: u64) {
        for log in self.logs.values_mut() {
            log.since = log.since.plus_ms(ms);
        }
    }
}
