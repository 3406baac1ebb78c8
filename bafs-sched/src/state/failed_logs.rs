//! Logs of failed jobs on their way home.

use std::collections::BTreeMap;

use bafs_proto::ids::{ExtractionId, VolumeId};
use bafs_proto::time::Time;
use bafs_workflow::JobIndex;

/// One log on its way.
#[derive(Debug, Clone, PartialEq)]
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
pub(crate) struct FailedLogs(pub(crate) BTreeMap<ExtractionId, FailedLog>);

impl FailedLogs {
    /// Whether none is on its way.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Those that a server was asked for: position, id and volume.
    pub(crate) fn under_way(&self) -> impl Iterator<Item = (u32, ExtractionId, VolumeId)> {
        let asked = self.0.iter().filter(|(_, log)| !log.is_paused);
        asked.map(|(extract, log)| (log.index, *extract, log.volume))
    }

    /// The volume of one.
    pub(crate) fn volume_of(&self, extract: ExtractionId) -> Option<VolumeId> {
        self.0.get(&extract).map(|log| log.volume)
    }

    /// Whether a volume must stay because of one.
    pub(crate) fn holds(&self, volume: VolumeId) -> bool {
        self.0.values().any(|log| log.volume == volume)
    }

    /// A volume is gone.
    pub(crate) fn drop_volume(&mut self, volume: VolumeId) {
        self.0.retain(|_, log| log.volume != volume);
    }

    /// The run was given up.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Time in which nothing could be tried does not count.
    pub(crate) fn put_off(&mut self, ms: u64) {
        for log in self.0.values_mut() {
            log.since = log.since.plus_ms(ms);
        }
    }
}
