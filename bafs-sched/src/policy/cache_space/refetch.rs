//! What crossed the link more than once as a cache is too small for what its jobs read: the user is
//! told, and nothing is decided.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::VolumeId;
use bafs_workflow::VolumeIndex;

use crate::policy::admission::feasibility::{bytes_only, describe_bytes};
use crate::state::observed_access::RunWarning;
use crate::state::scheduler_state::State;

/// So many thousandths of a cache may come once more before anybody is told.
const AGAIN_PERMILLE: u64 = 50;

/// What parts of caches got from home once more.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Again {
    /// Of each cache that nobody was told of, the bytes of each part.
    parts: BTreeMap<VolumeIndex, BTreeMap<VolumeId, u64>>,
    told: BTreeSet<VolumeIndex>,
}

impl Again {
    /// What all parts of a cache got once more, in bytes; nothing where it was told already.
    fn note(&mut self, volume: VolumeIndex, id: VolumeId, bytes: u64) -> u64 {
        if bytes == 0 || self.told.contains(&volume) {
            return 0;
        }
        let parts = self.parts.entry(volume).or_default();
        parts.insert(id, bytes);
        parts.values().copied().fold(0, u64::saturating_add)
    }
}

impl State {
    /// A part of a cache got so many bytes once more since its node started.
    pub(crate) fn note_again(&mut self, id: VolumeId, bytes: u64) {
        let Some(volume) = self.volumes.get(id).map(|instance| instance.volume) else {
            return;
        };
        let again = self.skew.again.note(volume, id, bytes);
        let declared = self.size_of(volume).bytes;
        if again <= declared / 1000 * AGAIN_PERMILLE {
            return;
        }
        self.skew.again.parts.remove(&volume);
        self.skew.again.told.insert(volume);
        let text = format!(
            "{} of volume '{}' crossed the home link again: a cache of {} is too small and evicts \
             blocks that jobs read again; declare a size 10 % above that of its source",
            describe_bytes(bytes_only(again)),
            self.graph.workflow.volume(volume).name,
            describe_bytes(bytes_only(declared)),
        );
        self.tell(RunWarning {
            job: None,
            volume: Some(volume),
            node: None,
            text,
        });
    }
}
