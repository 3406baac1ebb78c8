//! Batch volumes that are declared `warm`: made and fetched before their readers may start, while
//! the jobs of now compute, where there is room that nobody needs meanwhile. How caches are divided
//! among nodes is `shares.rs`; that readers go before on the link is the nodes' affair.

use std::collections::BTreeSet;

use bafs_proto::ids::{ServerId, VolumeId};

use super::action::Action;
use super::attempt::Stage;
use super::graph::Graph;
use super::scheduler::Scheduler;
use super::shares::Shares;
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
    /// The one that comes, or is there, and of which no reader is near: one at a time.
    ahead: Option<Ahead>,
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
            over: BTreeSet::new(),
            is_in_the_way: false,
            looked_at: (0, 0),
        }
    }

    /// The readers of a volume came, or it is gone because others needed its room or because it
    /// cannot be made.
    pub(super) fn give_up(&mut self, volume: VolumeIndex) {
        if self.ahead.take_if(|ahead| ahead.volume == volume).is_some() {
            self.over.insert(volume);
        }
    }
}

impl Scheduler {
    /// Goes on with the batch volume that comes before its readers, or begins with the next.
    pub(super) fn warm_ahead(&mut self) {
        if let Some(volume) = self.warming.ahead.as_ref().map(|ahead| ahead.volume) {
            if self.graph.volume(volume).users_near > 0 {
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
        for (server, share) in shares {
            self.create(volume, Some(server), share);
        }
        self.ask_to_warm();
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
        let ahead = self.warming.ahead.as_ref();
        if let Some(volume) = ahead.map(|ahead| ahead.volume)
            && self.graph.volume(volume).users_near == 0
        {
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
            node.users_near == 0 && node.users_left > 0 && !is_over
        };
        let volume = *self.warming.declared.iter().find(is_next)?;
        // What ready jobs wait for goes before, and what others need must be known.
        let is_lacking = |volume: &VolumeIndex| {
            self.graph.volume(*volume).users_near > 0 && !self.volumes.is_live(*volume)
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
        let shares = self.shares_ahead(volume, server)?;
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
