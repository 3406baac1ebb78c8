//! How unevenly blocks of caches are spread, and what came from home again.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::VolumeId;
use bafs_workflow::VolumeIndex;

use crate::state::recorded::{RowChanges, kept};
use crate::state::tracked::{Keys, Table};

/// Part of a cache beyond its size, in thousandths, before any cache was looked at.
pub(crate) const IMBALANCE_PERMILLE_FIRST: u64 = 100;

/// The least and the most that is learned, in thousandths: a block more on some node is never far,
/// and room for a third more would be missed elsewhere.
pub(crate) const IMBALANCE_PERMILLE_MIN: u64 = 20;

pub(crate) const IMBALANCE_PERMILLE_MAX: u64 = 300;

/// What was seen of caches.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct LoadImbalance {
    /// The answers for each cache since its parts were asked last.
    pub(crate) asked: BTreeMap<VolumeIndex, CacheInspection>,
    /// Of each cache, how much more than its share its fullest part keeps, in thousandths.
    pub(crate) found: Table<VolumeIndex, u64>,
    /// The same, the most uneven cache last.
    pub(crate) by_unevenness: BTreeSet<(u64, VolumeIndex)>,
    /// What they got once more.
    pub(crate) refetched: RefetchedParts,
}

/// What the parts of a cache were asked.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct CacheInspection {
    /// What each part keeps that answered, in bytes.
    pub(crate) kept: BTreeMap<VolumeId, u64>,
    /// Of each group, how many have not answered. A look at all parts for each answer would take
    /// the square of their number.
    pub(crate) left: BTreeMap<String, usize>,
}

kept! {
    /// What was written of what was seen of caches.
    LoadImbalanceChanges of LoadImbalance;
    values {}
    tables {}
    indexed { found: Table<VolumeIndex, u64> }
    parts {
        #[serde(rename = "again")]
        refetched: RefetchedParts,
    }
    // Parts that were asked are asked again when they are read again.
    rebuilt { asked, by_unevenness }
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

impl LoadImbalance {
    /// Puts back how unevenly caches are spread.
    pub(crate) fn restore(&mut self, rows: RowChanges<VolumeIndex, u64>) {
        for (volume, found) in rows.set {
            self.note(volume, found);
        }
    }

    /// Part of the next cache beyond its size, in thousandths: as much as the most uneven needs.
    pub(crate) fn permille(&self) -> u64 {
        let most = self.by_unevenness.last();
        most.map_or(IMBALANCE_PERMILLE_FIRST, |(most, _)| {
            *most.clamp(&IMBALANCE_PERMILLE_MIN, &IMBALANCE_PERMILLE_MAX)
        })
    }

    pub(crate) fn note(&mut self, volume: VolumeIndex, found: u64) {
        if let Some(before) = self.found.insert(volume, found) {
            self.by_unevenness.remove(&(before, volume));
        }
        self.by_unevenness.insert((found, volume));
    }
}

/// What parts of caches got from home once more.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct RefetchedParts {
    /// Of each cache that nobody was told of, the bytes of each part.
    pub(crate) parts: BTreeMap<VolumeIndex, BTreeMap<VolumeId, u64>>,
    pub(crate) told: Keys<VolumeIndex>,
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
