//! What came from home again, as caches were too small.

use std::collections::BTreeMap;

use bafs_proto::ids::VolumeId;
use bafs_workflow::VolumeIndex;

use crate::state::recorded::kept;
use crate::state::tracked::Keys;

/// What was seen of caches.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct CacheStatistics {
    /// What they got once more.
    pub(crate) refetched: RefetchedParts,
}

kept! {
    /// What was written of what was seen of caches.
    CacheStatisticsChanges of CacheStatistics;
    values {}
    tables {}
    indexed {}
    parts {
        #[serde(rename = "again")]
        refetched: RefetchedParts,
    }
    rebuilt {}
}

/// What parts of caches got from home once more.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct RefetchedParts {
    /// Of each cache that nobody was told of, the bytes of each part.
    pub(crate) parts: BTreeMap<VolumeIndex, BTreeMap<VolumeId, u64>>,
    pub(crate) told: Keys<VolumeIndex>,
}

kept! {
    /// What was written of what came from home again.
    RefetchedPartChanges of RefetchedParts;
    values {}
    tables { told: Keys<VolumeIndex> }
    indexed {}
    parts {}
    // Parts count all that they ever got again.
    rebuilt { parts }
}

impl RefetchedParts {
    /// What all parts of a cache got once more, in bytes; nothing where it was told already.
    pub(crate) fn note(&mut self, volume: VolumeIndex, id: VolumeId, bytes: u64) -> u64 {
        if bytes == 0 || self.told.contains(&volume) {
            return 0;
        }
        let parts = self.parts.entry(volume).or_default();
        parts.insert(id, bytes);
        parts.values().copied().fold(0, u64::saturating_add)
    }
}
