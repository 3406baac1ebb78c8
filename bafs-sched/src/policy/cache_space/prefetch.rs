//! Batch volumes that are declared `warm`: made and fetched before their readers can start, while
//! the jobs of now compute, where there is room that nobody needs meanwhile. How caches are divided
//! among nodes is `policy/cache_space/partition.rs`; that readers go before on the link is the
//! nodes' affair.

use std::collections::BTreeSet;

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_workflow::VolumeIndex;

use crate::action::Action;
use crate::policy::cache_space::partition::{CachePartition, ConcurrentCacheData};
use crate::space::Space;
use crate::state::attempts::AttemptState;
use crate::state::prefetch::{Ahead, LookedAt};
use crate::state::scheduler_state::State;
use crate::state::volumes::InstanceState;

impl State {
    /// Goes on with the batch volume that comes before its readers, or begins with the next.
    pub(crate) fn warm_ahead(&mut self) {
        self.let_readers_go();
        if let Some(ahead) = &self.warming.ahead {
            let volume = ahead.volume;
            let is_near = self.graph.volume(volume).users_near > 0;
            let came_near = is_near && !ahead.was_near && !ahead.asked.is_empty();
            if came_near || self.is_usable(volume) {
                self.warming.give_up(volume);
            } else if self.volumes.is_live(volume) {
                return self.ask_to_warm();
            }
        }
        // Where all nodes that had it are lost it comes again.
        self.warming.ahead = None;
        let Some((volume, shares)) = self.next_to_warm() else {
            return;
        };
        self.warming.ahead = Some(Ahead {
            volume,
            was_near: self.graph.volume(volume).users_near > 0,
            is_made: !shares.is_empty(),
            asked: BTreeSet::new(),
        });
        if !shares.is_empty() {
            self.warming.behind.push(volume);
            self.requeue_users(volume);
        }
        for (server, share) in shares {
            self.create(volume, Some(server), share);
        }
        self.ask_to_warm();
    }

    /// Whether a reader of a volume may start and would have a slot that is kept for nobody.
    fn is_usable(&self, volume: VolumeIndex) -> bool {
        let is_free = |server| self.fleet.free_slots(server) > self.slots_soon_needed(server);
        self.graph.volume(volume).users_near > 0 && self.fleet.idle().any(is_free)
    }

    /// What is to be fetched while a batch volume is read that the group of `server` divides.
    pub(crate) fn beside_next(&self, volume: VolumeIndex, server: ServerId) -> ConcurrentCacheData {
        let is_next = |next: &&VolumeIndex| {
            let node = self.graph.volume(**next);
            **next != volume && node.users_left > 0 && !self.volumes.is_live(**next)
        };
        let Some(&next) = self.warming.declared.iter().find(is_next) else {
            return ConcurrentCacheData::default();
        };
        let is_passing = |other: &VolumeIndex| {
            let is_read =
                |it: VolumeIndex| it == *other || self.graph.batch.is_read_with(it, *other);
            self.volumes.is_live(*other) && ![volume, next].into_iter().any(is_read)
        };
        let passing = self.graph.batch.volumes().filter(is_passing);
        let held = passing.filter_map(|other| self.cached_in_group(other, server));
        ConcurrentCacheData {
            next: self.size_of(next).bytes,
            passing: held.fold(0, u64::saturating_add),
            ..ConcurrentCacheData::default()
        }
    }

    /// All readers of batch volumes go alike again where one of them could start now.
    fn let_readers_go(&mut self) {
        let mut behind = self.warming.behind.iter();
        if behind.any(|volume| self.is_usable(*volume)) {
            for volume in std::mem::take(&mut self.warming.behind) {
                self.requeue_users(volume);
            }
        }
    }

    /// Has all parts fetch what they lack, once all are there; and again when one is gone, as the
    /// others have its share from then on.
    fn ask_to_warm(&mut self) {
        let Some(ahead) = &mut self.warming.ahead else {
            return;
        };
        let parts: BTreeSet<VolumeId> = self.volumes.live(ahead.volume).values().copied().collect();
        let instance = |id: &VolumeId| self.volumes.get(*id).map(|instance| instance.state);
        if parts == ahead.asked
            || !parts
                .iter()
                .all(|id| instance(id) == Some(InstanceState::Ready))
        {
            return;
        }
        ahead.asked = parts;
        let actions = self.asked_to_warm();
        self.out.extend(actions);
    }

    /// What was asked of the parts of the volume that comes before its readers.
    pub(crate) fn asked_to_warm(&self) -> Vec<Action> {
        let ahead = self.warming.ahead.iter();
        let parts = ahead.flat_map(|ahead| &ahead.asked);
        let action = |&id: &VolumeId| {
            let server = self.volumes.get(id)?.server?;
            Some(Action::WarmCache { id, server })
        };
        parts.filter_map(action).collect()
    }

    /// Whether a part of the volume that was made before its readers lies on this node.
    pub(crate) fn is_warmed_on(&self, server: ServerId) -> bool {
        self.warmed_part(server).is_some()
    }

    fn warmed_part(&self, server: ServerId) -> Option<VolumeId> {
        let is_spare =
            |ahead: &&Ahead| ahead.is_made && self.graph.volume(ahead.volume).users_near == 0;
        let made = self.warming.ahead.as_ref().filter(is_spare)?;
        self.volumes.live_at(made.volume, Some(server))
    }

    /// The room on this node of the volume that was made before its readers: nothing that has begun
    /// needs it.
    pub(crate) fn warmed_on(&self, server: ServerId) -> Space {
        let part = self.warmed_part(server);
        let instance = part.and_then(|id| self.volumes.get(id));
        instance.map_or(Space::ZERO, |instance| instance.size)
    }

    /// Gives the room of the volume that was made before its readers to jobs that can start now.
    pub(crate) fn free_warmed(&mut self) {
        let ahead = self.warming.ahead.as_ref();
        if let Some(volume) = ahead.map(|ahead| ahead.volume)
            && self.graph.volume(volume).users_near == 0
        {
            self.retire_all(volume);
        }
    }

    /// The batch volume to fetch now, and what is to be made of it where.
    fn next_to_warm(&mut self) -> Option<(VolumeIndex, CachePartition)> {
        // A strategy says itself what is there at once.
        if self.admission.is_some() || self.settings.caches_nothing() || self.protected.is_some() {
            return None;
        }
        if !self.leaving.is_empty() || self.warming.declared.is_empty() {
            return None;
        }
        let is_next = |volume: &&VolumeIndex| {
            let node = self.graph.volume(**volume);
            // Who reads what is there already fetches it, too.
            let is_early = match self.volumes.is_live(**volume) {
                true => node.users_near == 0,
                false => !self.is_usable(**volume),
            };
            node.users_left > 0 && is_early && !self.warming.over.contains(volume)
        };
        let volume = *self.warming.declared.iter().find(is_next)?;
        let mut attempts = self.attempts.values();
        let server = attempts
            .find(|attempt| attempt.stage == AttemptState::Running)?
            .server;
        let is_there = self.volumes.is_live(volume);
        let looked_at = self.looked_at_now(volume, server);
        if !is_there && !self.may_have_room(looked_at) {
            return None;
        }
        // What ready jobs that have slots wait for goes before, and what others need must be known.
        let is_lacking = |other: &VolumeIndex| {
            *other != volume && !self.volumes.is_live(*other) && self.is_usable(*other)
        };
        if self.warming.caches.iter().any(is_lacking) || self.probes().next().is_some() {
            return None;
        }
        if is_there {
            return Some((volume, CachePartition::new()));
        }
        self.warming.looked_at = Some(looked_at);
        if !self.make_room_ahead(volume, server) {
            return None;
        }
        let shares = self.shares_ahead(volume, server, &[])?;
        let mut parts = shares.iter();
        let is_over = |server: &ServerId| {
            let limit = self.fleet.get(*server).and_then(|node| node.limit);
            limit.is_some_and(|limit| limit.is_over)
        };
        if shares.iter().any(|(server, _)| is_over(server)) {
            return None;
        }
        let is_spare = parts.all(|(server, share)| self.can_spare(*server, *share));
        is_spare.then_some((volume, shares))
    }

    fn looked_at_now(&self, volume: VolumeIndex, server: ServerId) -> LookedAt {
        LookedAt {
            volume,
            changes: (self.volumes.changes(), self.graph.begun_changes()),
            group: self.fleet.group_of(server).next().map(|(peer, _)| peer),
            idled: self.warming.idled,
            freed_bytes: self.volumes.freed_bytes(),
        }
    }

    /// Whether more room may have come since it was looked for in vain.
    fn may_have_room(&self, now: LookedAt) -> bool {
        let of_others = |it: LookedAt| (it.volume, it.group, it.idled);
        self.warming.looked_at.is_none_or(|before| {
            let has_more = now.freed_bytes >= before.freed_bytes;
            now.changes != before.changes && (has_more || of_others(now) != of_others(before))
        })
    }

    /// Answers whether the group of a node may have room for a volume that comes before its
    /// readers. Where that is so only without batch volumes that nobody reads any more, these go.
    fn make_room_ahead(&mut self, volume: VolumeIndex, server: ServerId) -> bool {
        let size = self.size_of(volume).bytes;
        if self.spare_without(server, &[]) >= size {
            return true;
        }
        let is_given = |it: &VolumeIndex| {
            let is_idle = self.graph.is_batch(*it) && self.graph.volume(*it).is_idle();
            is_idle && self.volumes.is_live(*it)
        };
        let idle = self.idle_caches.iter().copied();
        let idle: Vec<VolumeIndex> = idle.filter(is_given).collect();
        let lacking = size.saturating_sub(self.spare_without(server, &idle));
        // Who would read them again is one that runs again.
        if lacking == 0 && self.shares_ahead(volume, server, &idle).is_some() {
            for cache in idle {
                self.retire_all(cache);
            }
        }
        if let Some(looked_at) = &mut self.warming.looked_at {
            looked_at.freed_bytes = looked_at.freed_bytes.saturating_add(lacking);
        }
        false
    }
}
