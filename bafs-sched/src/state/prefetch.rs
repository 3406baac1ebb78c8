//! Which batch volume comes before its readers.

use std::collections::BTreeSet;

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_workflow::{VolumeIndex, VolumeKind};
use serde::{Deserialize, Serialize};

use crate::state::jobs::Graph;
use crate::state::recorded::kept;
use crate::state::tracked::Keys;

/// Which batch volume comes before its readers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PrefetchState {
    /// Every cache.
    pub(crate) caches: Vec<VolumeIndex>,
    /// Batch volumes that are declared warm, those whose readers come first before others.
    pub(crate) declared: Vec<VolumeIndex>,
    /// The one that comes, or is there, and that no reader can use yet: one at a time.
    pub(crate) ahead: Option<Ahead>,
    /// Those that were made for that, in this order: while what was there before has readers to
    /// start, their own come after these.
    pub(crate) behind: Vec<VolumeIndex>,
    /// Volumes whose readers came, or that made room for others before: if that were done again,
    /// they might cross the link to home again and again.
    pub(crate) over: Keys<VolumeIndex>,
    /// A job that has a free slot found no room where the volume lies.
    pub(crate) is_in_the_way: bool,
    /// How many batch volumes have ever become idle: kept only in case something runs again.
    pub(crate) idled: u64,
    /// What there was when room was looked for in vain.
    pub(crate) looked_at: Option<LookedAt>,
}

/// What there was when room was looked for in vain.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LookedAt {
    pub(crate) volume: VolumeIndex,
    /// Of volumes and of what has begun.
    pub(crate) changes: (u64, u64),
    /// A node of the group that was looked at.
    pub(crate) group: Option<ServerId>,
    /// How many batch volumes have ever become idle.
    pub(crate) idled: u64,
    /// So many bytes must have been freed until there can be room.
    pub(crate) freed_bytes: u64,
}

/// A batch volume that comes before its readers.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Ahead {
    pub(crate) volume: VolumeIndex,
    /// Whether readers of it were ready already when it was chosen, without slots.
    pub(crate) was_near: bool,
    /// Whether it was made for that. Else earlier readers left it.
    pub(crate) is_made: bool,
    /// Its parts that were asked to fetch what they lack: they may be asked again.
    #[serde(skip)]
    pub(crate) asked: BTreeSet<VolumeId>,
}

kept! {
    /// What was written of what comes before its readers.
    PrefetchChanges of PrefetchState;
    values {
        ahead: Option<Ahead>,
        behind: Vec<VolumeIndex>,
        is_in_the_way: bool,
        idled: u64,
    }
    tables { over: Keys<VolumeIndex> }
    indexed {}
    parts {}
    rebuilt { caches, declared, looked_at }
}

/// Which parts were asked makes no difference.
impl PartialEq for Ahead {
    fn eq(&self, other: &Self) -> bool {
        let facts = |ahead: &Self| (ahead.volume, ahead.was_near, ahead.is_made);
        facts(self) == facts(other)
    }
}

impl PrefetchState {
    pub(crate) fn new(graph: &Graph) -> Self {
        let is_warmed = |volume: &VolumeIndex| {
            let kind = &graph.workflow.volume(*volume).kind;
            let is_declared = matches!(kind, VolumeKind::Cache { is_warmed, .. } if *is_warmed);
            is_declared && graph.is_batch(*volume)
        };
        let first = |volume: &VolumeIndex| {
            let users = graph.workflow.volume(*volume).users.iter();
            users.map(|user| graph.rank(*user)).min()
        };
        let mut declared: Vec<VolumeIndex> = graph.volume_indexes().filter(is_warmed).collect();
        declared.sort_by_key(first);
        let is_cache = |volume: &VolumeIndex| graph.volume(*volume).is_cache;
        let caches = graph.volume_indexes().filter(is_cache);
        Self {
            caches: caches.filter(|_| !declared.is_empty()).collect(),
            declared,
            ahead: None,
            behind: Vec::new(),
            over: Keys::default(),
            is_in_the_way: false,
            idled: 0,
            looked_at: None,
        }
    }

    /// A reader of a volume came, or it is gone because others needed its room or because it cannot
    /// be made.
    pub(crate) fn give_up(&mut self, volume: VolumeIndex) {
        if self.ahead.take_if(|ahead| ahead.volume == volume).is_some() {
            self.over.insert(volume);
        }
    }

    /// A volume is nowhere any more: its readers are as all others.
    pub(crate) fn forget(&mut self, volume: VolumeIndex) {
        self.behind.retain(|behind| *behind != volume);
    }

    /// How many batch volumes have readers that go before those of this one, itself counted;
    /// nothing where all go alike.
    pub(crate) fn place_behind(&self, volume: VolumeIndex) -> u64 {
        let place = self.behind.iter().position(|behind| *behind == volume);
        place.map_or(0, |place| place as u64 + 1)
    }

    /// Nodes may have more room than when it was looked for.
    pub(crate) fn look_again(&mut self) {
        self.looked_at = None;
    }
}
