//! Which volumes are kept and which give their space back. What is deleted when nothing goes on is
//! asked by `transition/deadlock.rs`.

use std::collections::BTreeSet;

use bafs_workflow::{JobIndex, VolumeIndex};

use crate::policy::View;
use crate::state::jobs::VolumeNode;

/// Whether a volume is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Retention {
    /// Somebody uses it yet, or its files are not at home.
    Needed,
    /// Nobody uses it unless something is lost: it stays until its space is wanted.
    Idle,
    /// Nobody can use it any more.
    Unneeded,
}

impl View<'_> {
    /// Whether a volume is kept. A cache stays while a user of it may have to run again, unless its
    /// space is wanted.
    pub(crate) fn retention_of(&self, volume: VolumeIndex) -> Retention {
        let node = self.graph.volume(volume);
        match (node.is_needed(), node.is_idle()) {
            (false, _) if self.is_worth_keeping(volume) => Retention::Needed,
            (false, _) => Retention::Unneeded,
            (true, true) => Retention::Idle,
            (true, false) => Retention::Needed,
        }
    }

    /// Caches that nobody will read unless something is lost: to fetch them again is better than
    /// to have ready jobs wait.
    pub(crate) fn idle_caches_to_evict(&self) -> Vec<VolumeIndex> {
        let is_idle = |cache: &VolumeIndex| {
            self.graph.volume(*cache).is_idle() && self.volumes.is_live(*cache)
        };
        self.idle_caches.iter().copied().filter(is_idle).collect()
    }

    /// All caches but those that the first of these jobs reads, when nobody runs: they are fetched
    /// again.
    pub(crate) fn unused_caches(&self, candidates: &[JobIndex]) -> Vec<VolumeIndex> {
        let first = candidates.first().map(|job| self.graph.mounted(*job));
        let read: BTreeSet<VolumeIndex> = first.into_iter().flatten().map(|(v, _)| v).collect();
        self.caches_where(|volume, _| !read.contains(&volume))
    }

    /// All caches, also those that the next job reads: they may lie where it finds no room for the
    /// rest.
    pub(crate) fn all_caches(&self) -> Vec<VolumeIndex> {
        self.caches_where(|_, _| true)
    }

    fn caches_where(
        &self,
        is_meant: impl Fn(VolumeIndex, &VolumeNode) -> bool,
    ) -> Vec<VolumeIndex> {
        let there: BTreeSet<VolumeIndex> = self.volumes.iter().map(|(_, i)| i.volume).collect();
        let is_freed = |volume: &VolumeIndex| {
            let node = self.graph.volume(*volume);
            node.is_cache && is_meant(*volume, node) && self.volumes.is_live(*volume)
        };
        there.into_iter().filter(is_freed).collect()
    }
}
