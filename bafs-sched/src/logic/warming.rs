//! Batch volumes that are declared `warm`: made and fetched before their readers can start, while
//! the jobs of now compute, where there is room that nobody needs meanwhile. How caches are divided
//! among nodes is `shares.rs`; that readers go before on the link is the nodes' affair.

use std::collections::BTreeSet;

use bafs_proto::ids::{ServerId, VolumeId};

use super::action::Action;
use super::attempt::Stage;
use super::graph::Graph;
use super::scheduler::Scheduler;
use super::shares::{Beside, Shares};
use super::space::Space;
use super::volumes::State;
use crate::workflow::{VolumeIndex, VolumeKind};

/// Which batch volume comes before its readers.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Warming {
    /// Every cache.
    caches: Vec<VolumeIndex>,
    /// Batch volumes that are declared warm, those whose readers come first before others.
    declared: Vec<VolumeIndex>,
    /// The one that comes, or is there, and that no reader can use yet: one at a time.
    ahead: Option<Ahead>,
    /// The last that was made for that: while what was there before has readers to start, its own
    /// come after these.
    behind: Option<VolumeIndex>,
    /// Volumes whose readers came, or that made room for others before: if that were done again,
    /// they might cross the link to home again and again.
    over: BTreeSet<VolumeIndex>,
    /// A job that has a free slot found no room where the volume lies.
    pub(super) is_in_the_way: bool,
    /// What there was when room was looked for in vain.
    looked_at: (u64, u64),
}

/// A batch volume that comes before its readers.
#[derive(Debug, Clone, PartialEq)]
struct Ahead {
    volume: VolumeIndex,
    /// Whether it was made for that. Else earlier readers left it.
    is_made: bool,
    /// Its parts that were asked to fetch what they lack.
    asked: BTreeSet<VolumeId>,
}

impl Warming {
    pub(super) fn new(graph: &Graph) -> Self {
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
            behind: None,
            over: BTreeSet::new(),
            is_in_the_way: false,
            looked_at: (0, 0),
        }
    }

    /// A reader of a volume came, or it is gone because others needed its room or because it cannot
    /// be made.
    pub(super) fn give_up(&mut self, volume: VolumeIndex) {
        if self.ahead.take_if(|ahead| ahead.volume == volume).is_some() {
            self.over.insert(volume);
        }
    }
}

impl Scheduler {
    /// Goes on with the batch volume that comes before its readers, or begins with the next.
    pub(super) fn warm_ahead(&mut self) {
        let behind = self.warming.behind;
        if behind.is_some_and(|volume| self.is_usable(volume)) {
            self.set_behind(None);
        }
        if let Some(volume) = self.warming.ahead.as_ref().map(|ahead| ahead.volume) {
            if self.is_usable(volume) {
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
            is_made: !shares.is_empty(),
            asked: BTreeSet::new(),
        });
        if !shares.is_empty() {
            self.set_behind(Some(volume));
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
    pub(super) fn beside_next(&self, volume: VolumeIndex, server: ServerId) -> Beside {
        let is_next = |next: &&VolumeIndex| {
            let node = self.graph.volume(**next);
            **next != volume && node.users_left > 0 && !self.volumes.is_live(**next)
        };
        let Some(&next) = self.warming.declared.iter().find(is_next) else {
            return Beside::default();
        };
        let is_passing = |other: &&VolumeIndex| {
            let mut both = [volume, next].into_iter();
            !both.any(|it| it == **other || self.graph.batch.is_read_with(it, **other))
        };
        let passing = self.warming.caches.iter().filter(is_passing);
        let held = passing.filter_map(|other| self.cached_in_group(*other, server));
        Beside {
            next: self.size_of(next).bytes,
            passing: held.fold(0, u64::saturating_add),
            ..Beside::default()
        }
    }

    /// Whether the readers of a batch volume come after those of what was there before.
    pub(super) fn is_behind(&self, volume: VolumeIndex) -> bool {
        self.warming.behind == Some(volume)
    }

    /// Readers of this batch volume, or of none, come after all others from now on.
    fn set_behind(&mut self, volume: Option<VolumeIndex>) {
        let before = std::mem::replace(&mut self.warming.behind, volume);
        for changed in before.into_iter().chain(volume) {
            self.requeue_users(changed);
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
        if parts == ahead.asked || !parts.iter().all(|id| instance(id) == Some(State::Ready)) {
            return;
        }
        ahead.asked = parts;
        let actions = self.asked_to_warm();
        self.out.extend(actions);
    }

    /// What was asked of the parts of the volume that comes before its readers.
    pub(super) fn asked_to_warm(&self) -> Vec<Action> {
        let ahead = self.warming.ahead.iter();
        let parts = ahead.flat_map(|ahead| &ahead.asked);
        let action = |&id: &VolumeId| {
            let server = self.volumes.get(id)?.server?;
            Some(Action::WarmVolume { id, server })
        };
        parts.filter_map(action).collect()
    }

    /// Whether a part of the volume that was made before its readers lies on this node.
    pub(super) fn is_warmed_on(&self, server: ServerId) -> bool {
        self.warmed_part(server).is_some()
    }

    fn warmed_part(&self, server: ServerId) -> Option<VolumeId> {
        let made = self.warming.ahead.as_ref().filter(|ahead| ahead.is_made)?;
        self.volumes.live_at(made.volume, Some(server))
    }

    /// The room on this node of the volume that was made before its readers: nothing that has begun
    /// needs it.
    pub(super) fn warmed_on(&self, server: ServerId) -> Space {
        let part = self.warmed_part(server);
        let instance = part.and_then(|id| self.volumes.get(id));
        instance.map_or(Space::ZERO, |instance| instance.size)
    }

    /// Gives the room of the volume that was made before its readers to jobs that can start now.
    pub(super) fn free_warmed(&mut self) {
        if let Some(volume) = self.warming.ahead.as_ref().map(|ahead| ahead.volume) {
            self.retire_all(volume);
        }
    }

    /// The batch volume to fetch now, and what is to be made of it where.
    fn next_to_warm(&mut self) -> Option<(VolumeIndex, Shares)> {
        // A strategy says itself what is there at once.
        if self.admission.is_some() || self.settings.caches_nothing() || self.protected.is_some() {
            return None;
        }
        if !self.leaving.is_empty() {
            return None;
        }
        let is_next = |volume: &&VolumeIndex| {
            let node = self.graph.volume(**volume);
            let is_over = self.warming.over.contains(volume);
            // Who reads what is there already fetches it, too.
            let is_early = match self.volumes.is_live(**volume) {
                true => node.users_near == 0,
                false => !self.is_usable(**volume),
            };
            node.users_left > 0 && !is_over && is_early
        };
        let volume = *self.warming.declared.iter().find(is_next)?;
        // What ready jobs wait for goes before, and what others need must be known.
        let is_lacking = |other: &VolumeIndex| {
            let is_near = self.graph.volume(*other).users_near > 0;
            *other != volume && is_near && !self.volumes.is_live(*other)
        };
        if self.warming.caches.iter().any(is_lacking) || self.probes().next().is_some() {
            return None;
        }
        let mut attempts = self.attempts.values();
        let server = attempts
            .find(|attempt| attempt.stage == Stage::Running)?
            .server;
        if self.volumes.is_live(volume) {
            return Some((volume, Shares::new()));
        }
        let looked_at = (self.volumes.changes(), self.graph.begun_changes());
        if std::mem::replace(&mut self.warming.looked_at, looked_at) == looked_at {
            return None;
        }
        let Some(shares) = self.shares_ahead(volume, server, &[]) else {
            // Who may read them again is then one that runs again.
            let idle = self.idle_caches.iter().copied();
            let idle: Vec<VolumeIndex> =
                idle.filter(|it| self.graph.volume(*it).is_idle()).collect();
            if self.shares_ahead(volume, server, &idle).is_some() {
                self.free_idle_caches();
            }
            return None;
        };
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
}
