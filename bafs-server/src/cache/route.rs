//! Whom to ask for a block: where it is placed among the servers that share a cache, now and until
//! lately. Asks nobody.

use std::sync::{Arc, PoisonError};

use bafs_proto::Result;
use bafs_proto::ids::ServerId;
use bafs_proto::message::{SourceEntry, SourceKind};
use bafs_proto::time::Time;

use super::blocking;
use super::fetch::{Fetcher, Generation};
use super::peers::PeerCache;
use crate::clock;
use crate::logic::blocks::BlockKey;
use crate::logic::placement::{Extent, Placement, Places};
use crate::logic::rendezvous::Candidate;

/// After a change of the peers, who became primary first asks who was it before, for so long.
const INHERIT_MS: u64 = 600_000;

/// Most former placements that are remembered, and most servers that are asked before home.
const EARLIER_MAX: usize = 3;
const HEIRLOOMS_MAX: usize = 3;

/// Where the blocks of a generation are, as this server believes.
#[derive(Debug)]
pub(crate) struct View {
    own: ServerId,
    sharers: Vec<PeerCache>,
    placement: Arc<Placement>,
    /// Where they would be without this server: where they are when it has just come.
    without_own: Placement,
    /// Where they were until lately, latest first.
    earlier: Vec<Arc<Placement>>,
    since: Time,
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
        let places = Places {
            cache: &self.cooperative,
            files: entries.map(|e| (e.path.as_str(), sized(e))).collect(),
            extent_bytes: self.extent_bytes,
        };
        Placement::of(&places, candidates)
    }

    fn view_now(&self) -> Option<Arc<View>> {
        let view = self.view.read().unwrap_or_else(PoisonError::into_inner);
        view.clone()
    }

    /// Places everything anew (takes up to a second).
    fn look(&self, own: ServerId, sharers: Vec<PeerCache>, now: Time) -> Arc<View> {
        let last = self.view_now();
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
        let mut earlier = Vec::new();
        if let Some(last) = last {
            earlier.push(last.placement.clone());
            if now.ms_since(last.since) < INHERIT_MS {
                earlier.extend(last.earlier.iter().cloned());
            }
            earlier.truncate(EARLIER_MAX);
        }
        let view = Arc::new(View {
            own,
            placement: Arc::new(self.place(all)),
            without_own: self.place(others),
            sharers,
            earlier,
            since: now,
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
        self.peers().of(&generation.name(), clock::now())
    }

    /// Where the blocks of a generation are now.
    ///
    /// # Errors
    /// `ServerFault`.
    pub(crate) async fn view(&self, generation: &Arc<Generation>) -> Result<Arc<View>> {
        let sharers = self.sharers(generation);
        if let Some(view) = generation.view_now().filter(|v| v.sharers == sharers) {
            return Ok(view);
        }
        // Whoever waits here waits for no thread: the others are for reading.
        let _one_at_a_time = generation.looking.lock().await;
        if let Some(view) = generation.view_now().filter(|v| v.sharers == sharers) {
            return Ok(view);
        }
        let (own, generation) = (self.server, generation.clone());
        blocking(move || generation.look(own, sharers, clock::now())).await
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

    /// The servers for an extent, its primary first; this server is among them.
    pub(crate) fn ranked(&self, generation: &Generation, extent: Extent) -> Vec<ServerId> {
        generation.with_key(extent, |key| self.placement.ranked(extent, key))
    }

    /// A server that shares the cache.
    pub(crate) fn peer(&self, server: ServerId) -> Option<&PeerCache> {
        self.sharers.iter().find(|peer| peer.server == server)
    }

    /// Others who may have an extent before home is asked: its primary, if that is not this
    /// server, and who was it before, if that changed lately.
    pub(crate) fn heirlooms(
        &self,
        generation: &Generation,
        extent: Extent,
        now: Time,
    ) -> Vec<&PeerCache> {
        let mut servers = vec![self.owner(generation, extent)];
        if now.ms_since(self.since) < INHERIT_MS {
            generation.with_key(extent, |key| {
                servers.extend(self.without_own.owner(extent, key));
                let earlier = self.earlier.iter();
                servers.extend(earlier.filter_map(|placement| placement.owner(extent, key)));
                servers.extend(self.placement.ranked(extent, key).into_iter().take(3));
            });
        }
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

/// Bytes of an entry that are in blocks.
pub(super) fn sized(entry: &SourceEntry) -> u64 {
    match entry.kind {
        SourceKind::File => entry.identity.size,
        SourceKind::Directory | SourceKind::Symlink(_) => 0,
    }
}
