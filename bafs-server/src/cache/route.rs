//! Whom to ask for a block: where it is placed among the servers that share a cache, now and
//! before. Asks nobody.

use std::sync::{Arc, MutexGuard, PoisonError};

use bafs_proto::Result;
use bafs_proto::ids::ServerId;

use super::blocking;
use super::fetch::{Fetcher, Generation};
use super::joining::FORMER_MAX;
use super::manifest::sized;
use super::peers::PeerCache;
use crate::clock;
use crate::logic::blocks::BlockKey;
use crate::logic::placement::{Extent, Placement, PlacementInput};
use crate::logic::rendezvous::Candidate;

/// Most former placements that are remembered, and most servers that are asked before home: a
/// question costs a round in the local network, and only blocks that would come from home cost any.
const EARLIER_MAX: usize = 6;
const HEIRLOOMS_MAX: usize = 6;

/// So many servers follow the primary when it is silent, and may have read in its place.
const STAND_INS: usize = 2;

/// Where the blocks of a generation are, as this server believes.
#[derive(Debug)]
pub(crate) struct View {
    own: ServerId,
    sharers: Vec<PeerCache>,
    placement: Arc<Placement>,
    /// Where they would be without this server: where they are when it has just come, or others
    /// do not know it.
    without_own: Arc<Placement>,
    /// Whether blocks were placed so, as far as this server knows. Otherwise it is
    /// not remembered: nothing was ever there.
    without_own_was: bool,
    /// Other places where they were before, latest first; then those that others told of.
    earlier: Vec<Arc<Placement>>,
    /// How many others told of when it was made.
    told: usize,
}

impl Generation {
    /// The extent that a block is part of.
    pub(crate) fn extent(&self, key: BlockKey) -> Extent {
        Extent {
            file: key.file,
            number: key.block.0 / self.extent_blocks(),
        }
    }

    /// Blocks of an extent.
    pub(crate) fn extent_blocks(&self) -> u64 {
        self.extent_bytes / u64::from(self.manifest.block_bytes())
    }

    /// Names an extent by path, not by place in the manifest, which moves when the source changes.
    fn with_key<T>(&self, extent: Extent, work: impl FnOnce(&[&[u8]]) -> T) -> T {
        let entry = self.manifest.entries().get(extent.file.0 as usize);
        let path = entry.map_or("", |entry| &entry.path);
        let number = extent.number.to_le_bytes();
        work(&[self.cooperative.as_bytes(), path.as_bytes(), &number])
    }

    fn place(&self, candidates: Vec<Candidate>) -> Placement {
        let entries = self.manifest.entries().iter();
        let places = PlacementInput {
            cache: &self.cooperative,
            files: entries.map(|e| (e.path.as_str(), sized(e))).collect(),
            extent_bytes: self.extent_bytes,
        };
        Placement::compute(&places, candidates)
    }

    fn told_former(&self) -> MutexGuard<'_, Vec<Vec<Candidate>>> {
        let told = self.told_former.lock();
        told.unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes note of servers among which blocks were placed before, as another one tells.
    pub(super) fn learn_former(&self, former: Vec<Vec<(ServerId, u64)>>) {
        let mut told = self.told_former();
        let former = former.into_iter().take(EARLIER_MAX);
        let fits = |servers: &Vec<_>| servers.len() <= FORMER_MAX;
        for servers in former.filter(fits).filter(|servers| !servers.is_empty()) {
            let candidate = |(server, weight)| Candidate { server, weight };
            let candidates: Vec<_> = servers.into_iter().map(candidate).collect();
            if told.len() < EARLIER_MAX && !told.contains(&candidates) {
                told.push(candidates);
            }
        }
    }

    /// The servers among which blocks were placed, as far as this one knows, latest first.
    pub(super) fn former(&self) -> Vec<Vec<(ServerId, u64)>> {
        let view = self.view_now();
        let placements = view.iter().flat_map(|view| view.in_use());
        let mut all: Vec<Vec<Candidate>> = placements.map(|p| p.candidates().to_vec()).collect();
        for candidates in self.told_former().iter() {
            if !all.contains(candidates) {
                all.push(candidates.clone());
            }
        }
        let pair = |candidate: &Candidate| (candidate.server, candidate.weight);
        let lists = all.iter().map(|list| list.iter().map(pair).collect());
        lists.collect()
    }

    pub(super) fn view_now(&self) -> Option<Arc<View>> {
        let view = self.view.read().unwrap_or_else(PoisonError::into_inner);
        view.clone()
    }

    /// Places everything anew (takes up to a second).
    fn look(&self, own: ServerId, sharers: Vec<PeerCache>) -> Arc<View> {
        let others: Vec<_> = sharers
            .iter()
            .map(|peer| Candidate {
                server: peer.server,
                weight: peer.capacity_bytes,
            })
            .collect();
        let mut all = others.clone();
        all.push(Candidate {
            server: own,
            weight: self.capacity_bytes,
        });
        all.sort_by_key(|candidate| candidate.server);
        let told = self.told_former().clone();
        let last = self.view_now();
        let former: Vec<_> = last.iter().flat_map(|last| last.in_use()).collect();
        // A peer that comes back, or has another address, changes no place.
        let place = |candidates: Vec<Candidate>| {
            let unused = last.as_ref().map(|last| &last.without_own);
            let mut known = former.iter().copied().chain(unused);
            let same = known.find(|known| known.is_for(&candidates));
            let same = same.cloned();
            same.unwrap_or_else(|| Arc::new(self.place(candidates)))
        };
        let (placement, without_own) = (place(all), place(others));
        let now = [&placement, &without_own];
        let is_past = |known: &&Arc<Placement>| now.iter().all(|place| !Arc::ptr_eq(place, known));
        let mut earlier: Vec<_> = former.iter().copied().filter(is_past).cloned().collect();
        let without_own_was = last.is_none()
            || former.iter().any(|known| Arc::ptr_eq(known, &without_own))
            || told.iter().any(|told| without_own.is_for(told));
        for candidates in &told {
            let known = earlier.iter().chain(now);
            if !known.into_iter().any(|known| known.is_for(candidates)) {
                earlier.push(Arc::new(self.place(candidates.clone())));
            }
        }
        earlier.truncate(EARLIER_MAX);
        let view = Arc::new(View {
            own,
            sharers,
            earlier,
            placement,
            without_own,
            told: told.len(),
            without_own_was,
        });
        *self.view.write().unwrap_or_else(PoisonError::into_inner) = Some(view.clone());
        view
    }
}

impl Fetcher {
    /// The servers that share the cache now.
    pub(crate) fn sharers(&self, generation: &Generation) -> Vec<PeerCache> {
        if generation.cooperative.is_empty() {
            return Vec::new();
        }
        self.peers().of(&generation.name(), clock::monotonic_ms())
    }

    /// Where the blocks of a generation are now.
    ///
    /// # Errors
    /// `ServerFault`.
    pub(crate) async fn view(&self, generation: &Arc<Generation>) -> Result<Arc<View>> {
        let sharers = self.sharers(generation);
        let is_right = |view: &Arc<View>| {
            view.sharers == sharers && view.told == generation.told_former().len()
        };
        if let Some(view) = generation.view_now().filter(is_right) {
            return Ok(view);
        }
        // Whoever waits here waits for no thread: the others are for reading.
        let _one_at_a_time = generation.looking.lock().await;
        if let Some(view) = generation.view_now().filter(is_right) {
            return Ok(view);
        }
        let (own, generation) = (self.server, generation.clone());
        blocking(move || generation.look(own, sharers)).await
    }
}

impl View {
    /// The primary of an extent.
    pub(crate) fn owner(&self, generation: &Generation, extent: Extent) -> ServerId {
        let owner = generation.with_key(extent, |key| self.placement.owner(extent, key));
        owner.unwrap_or(self.own)
    }

    /// Whether this server is the primary of an extent.
    pub(crate) fn is_own(&self, generation: &Generation, extent: Extent) -> bool {
        self.sharers.is_empty() || self.owner(generation, extent) == self.own
    }

    /// Whether all who share the cache cannot keep its whole source together: room for a part of an
    /// extent stays empty at each.
    pub(crate) fn lacks_room(&self, generation: &Generation) -> bool {
        let weights = self.placement.candidates().iter().map(|it| it.weight);
        let kept = weights.map(|weight| weight.saturating_sub(generation.extent_bytes));
        kept.fold(0, u64::saturating_add) < generation.source_bytes
    }

    /// The servers for an extent, its primary first; this server is among them.
    pub(crate) fn ranked(&self, generation: &Generation, extent: Extent) -> Vec<ServerId> {
        generation.with_key(extent, |key| self.placement.ranked_servers(extent, key))
    }

    /// A server that shares the cache.
    pub(crate) fn peer(&self, server: ServerId) -> Option<&PeerCache> {
        self.sharers.iter().find(|peer| peer.server == server)
    }

    /// All placements that were ever in use, as far as it knows, the present one first.
    fn in_use(&self) -> impl Iterator<Item = &Arc<Placement>> {
        let without_own = self.without_own_was.then_some(&self.without_own);
        let now = [&self.placement].into_iter().chain(without_own);
        now.chain(&self.earlier)
    }

    /// Others who may have an extent before home is asked: its primary, if that is not this
    /// server, who was it before, however long ago, and who stands in for it.
    pub(crate) fn heirlooms(&self, generation: &Generation, extent: Extent) -> Vec<&PeerCache> {
        let mut servers = vec![self.owner(generation, extent)];
        generation.with_key(extent, |key| {
            let former = [&self.without_own].into_iter().chain(&self.earlier);
            servers.extend(former.filter_map(|placement| placement.owner(extent, key)));
            let ranked = self.placement.ranked_servers(extent, key).into_iter();
            servers.extend(ranked.take(1 + STAND_INS));
        });
        let mut peers: Vec<&PeerCache> = Vec::new();
        for server in servers {
            if let Some(peer) = self.peer(server).filter(|peer| !peers.contains(peer)) {
                peers.push(peer);
            }
        }
        peers.truncate(HEIRLOOMS_MAX);
        peers
    }
}
