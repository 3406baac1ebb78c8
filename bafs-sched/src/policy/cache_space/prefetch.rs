//! Batch volumes that are declared `warm`: made and fetched before their readers can start, while
//! the jobs of now compute, where there is room that nobody needs meanwhile. How caches are divided
//! among nodes is `policy/cache_space/partition.rs`; that readers go before on the link is the
//! nodes' affair.

use bafs_proto::ids::ServerId;
use bafs_workflow::VolumeIndex;

use super::partition::CachePartition;
use super::partitioning::CachePlanning;
use crate::decision::Decision;
use crate::policy::View;
use crate::space::Space;
use crate::state::attempts::AttemptState;
use crate::state::prefetch::LookedAt;

/// What is to be done about the batch volume that comes before its readers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PrefetchReview {
    /// It goes on.
    Continue,
    /// Readers can use it now: others may come before theirs.
    Finished(VolumeIndex),
    /// There is none, or it is nowhere any more.
    Nothing,
}

/// What a search for the next batch volume to fetch found.
#[derive(Debug, Default)]
pub(crate) struct PrefetchSearch {
    /// That it is made; nothing when none is, now.
    pub(crate) prefetch: Option<Decision>,
    /// Caches that nobody reads any more, and that leave it the room which it lacks.
    pub(crate) evicted: Vec<VolumeIndex>,
    /// What there was when room was looked for; nothing when it was not.
    pub(crate) looked_at: Option<LookedAt>,
}

/// What other rules say of nodes.
#[derive(Clone, Copy)]
pub(crate) struct PrefetchLimits<'l> {
    /// How caches are divided.
    pub(crate) planning: CachePlanning<'l>,
    /// Whether all pipelines at home on a node can end there when so much of it is taken.
    pub(crate) can_spare: &'l dyn Fn(ServerId, Space) -> bool,
}

impl View<'_> {
    /// What is to be done about the batch volume that comes before its readers.
    pub(crate) fn review_prefetch(&self) -> PrefetchReview {
        let Some(ahead) = &self.prefetching.ahead else {
            return PrefetchReview::Nothing;
        };
        let volume = ahead.volume;
        let is_near = self.graph.volume(volume).users_near > 0;
        let came_near = is_near && !ahead.was_near && !ahead.asked.is_empty();
        if came_near || self.is_usable(volume) {
            return PrefetchReview::Finished(volume);
        }
        // Where all nodes that had it are lost it comes again.
        match self.volumes.is_live(volume) {
            true => PrefetchReview::Continue,
            false => PrefetchReview::Nothing,
        }
    }

    /// Whether a reader of a volume that came early could start now: all go alike again.
    pub(crate) fn has_usable_prefetch(&self) -> bool {
        let mut behind = self.prefetching.behind.iter();
        behind.any(|volume| self.is_usable(*volume))
    }

    /// The volume that came before its readers, where jobs that can start now may have its room.
    pub(crate) fn prefetch_to_evict(&self) -> Option<VolumeIndex> {
        let volume = self.prefetching.ahead.as_ref()?.volume;
        (self.graph.volume(volume).users_near == 0).then_some(volume)
    }

    /// Looks for the batch volume to fetch now, and for what is to be made of it where.
    pub(crate) fn find_prefetch(&self, limits: PrefetchLimits<'_>) -> PrefetchSearch {
        let mut search = PrefetchSearch::default();
        let Some((volume, server)) = self.next_prefetch() else {
            return search;
        };
        let is_there = self.volumes.is_live(volume);
        let looked_at = self.looked_at_now(volume, server);
        if !is_there && !self.may_have_room(looked_at) {
            return search;
        }
        // What ready jobs that have slots wait for goes before, and what others need must be known.
        let is_lacking = |other: &VolumeIndex| {
            *other != volume && !self.volumes.is_live(*other) && self.is_usable(*other)
        };
        if self.prefetching.caches.iter().any(is_lacking) || self.probes().next().is_some() {
            return search;
        }
        if is_there {
            let parts = CachePartition::new();
            search.prefetch = Some(Decision::Prefetch { volume, parts });
            return search;
        }
        let looked_at = search.looked_at.insert(looked_at);
        let spare = self.spare_without(server, &[]);
        let size = self.size_of(volume).bytes;
        if spare < size {
            let idle = self.idle_batch_volumes();
            let lacking = size.saturating_sub(self.spare_without(server, &idle));
            looked_at.freed_bytes = looked_at.freed_bytes.saturating_add(lacking);
            let is_enough = lacking == 0
                && self
                    .partition_ahead(limits.planning, volume, server, &idle)
                    .is_some();
            // Who would read them again is one that runs again.
            search.evicted = if is_enough { idle } else { Vec::new() };
            return search;
        }
        let parts = self.partition_ahead(limits.planning, volume, server, &[]);
        let is_over = |server: ServerId| {
            let limit = self.fleet.get(server).and_then(|node| node.limit);
            limit.is_some_and(|limit| limit.is_over)
        };
        let is_spare = |parts: &CachePartition| {
            !parts.iter().any(|(server, _)| is_over(*server))
                && parts.iter().all(|part| (limits.can_spare)(part.0, part.1))
        };
        let parts = parts.filter(is_spare);
        search.prefetch = parts.map(|parts| Decision::Prefetch { volume, parts });
        search
    }

    /// The batch volume to fetch next, and a node of the group where it goes.
    fn next_prefetch(&self) -> Option<(VolumeIndex, ServerId)> {
        if self.settings.caches_nothing() || self.protected.is_some() {
            return None;
        }
        if !self.leaving.is_empty() || self.prefetching.declared.is_empty() {
            return None;
        }
        let is_next = |volume: &&VolumeIndex| {
            let node = self.graph.volume(**volume);
            // Who reads what is there already fetches it, too.
            let is_early = match self.volumes.is_live(**volume) {
                true => node.users_near == 0,
                false => !self.is_usable(**volume),
            };
            node.users_left > 0 && is_early && !self.prefetching.over.contains(volume)
        };
        let volume = *self.prefetching.declared.iter().find(is_next)?;
        let mut attempts = self.attempts.values();
        let running = attempts.find(|attempt| attempt.stage == AttemptState::Running)?;
        Some((volume, running.server))
    }

    /// Batch volumes that are kept only for users that may have to run again.
    fn idle_batch_volumes(&self) -> Vec<VolumeIndex> {
        let is_given = |it: &VolumeIndex| {
            let is_idle = self.graph.is_batch(*it) && self.graph.volume(*it).is_idle();
            is_idle && self.volumes.is_live(*it)
        };
        let idle = self.idle_caches.iter().copied();
        idle.filter(is_given).collect()
    }

    /// Whether a reader of a volume may start and would have a slot that is kept for nobody.
    fn is_usable(&self, volume: VolumeIndex) -> bool {
        let is_free = |server| self.fleet.free_slots(server) > self.slots_soon_needed(server);
        self.graph.volume(volume).users_near > 0 && self.fleet.idle().any(is_free)
    }

    fn looked_at_now(&self, volume: VolumeIndex, server: ServerId) -> LookedAt {
        LookedAt {
            volume,
            changes: (self.volumes.changes(), self.graph.begun_changes()),
            group: self.fleet.group_of(server).next().map(|(peer, _)| peer),
            idled: self.prefetching.idled,
            freed_bytes: self.volumes.freed_bytes(),
        }
    }

    /// Whether more room may have come since it was looked for in vain.
    fn may_have_room(&self, now: LookedAt) -> bool {
        let of_others = |it: LookedAt| (it.volume, it.group, it.idled);
        self.prefetching.looked_at.is_none_or(|before| {
            let has_more = now.freed_bytes >= before.freed_bytes;
            now.changes != before.changes && (has_more || of_others(now) != of_others(before))
        })
    }
}
