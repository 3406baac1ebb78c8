//! Where the blocks of a generation are placed among its members, now and before. Sends nothing.

use std::sync::Arc;

use bafs_proto::cache::CacheMember;
use bafs_proto::ids::ServerId;

use crate::cache::store::manifest::{Manifest, data_bytes};
use crate::logic::blocks::BlockKey;
use crate::logic::placement::{Extent, Placement, PlacementInput, extent_bytes};
use crate::logic::rendezvous::Candidate;

/// Most earlier placements that are remembered, and most peers that are probed at first. A probe
/// costs a round trip in the local network, and only for blocks that would come from home.
pub(super) const EARLIER_MAX: usize = 6;
const LIKELY_HOLDERS_MAX: usize = 6;

/// Most servers in the lists of former placements.
pub(super) const FORMER_MAX: usize = 8_192;

/// So many servers follow the primary node when it is silent, and may have read in its place.
const STAND_INS: usize = 2;

/// The extents of a source, and how the cache names them.
pub(super) struct ExtentMap {
    pub(super) manifest: Arc<Manifest>,
    pub(super) cooperative: String,
    extent_bytes: u64,
}

impl ExtentMap {
    pub(super) fn new(manifest: Arc<Manifest>, cooperative: String) -> Self {
        let extent_bytes = extent_bytes(manifest.source_bytes(), manifest.block_bytes());
        Self {
            manifest,
            cooperative,
            extent_bytes,
        }
    }

    /// Blocks of an extent.
    pub(super) fn extent_blocks(&self) -> u64 {
        self.extent_bytes / u64::from(self.manifest.block_bytes())
    }

    /// Names an extent by path. Its number in the manifest moves when the source changes.
    fn with_key<T>(&self, extent: Extent, work: impl FnOnce(&[&[u8]]) -> T) -> T {
        let entry = self.manifest.entries().get(extent.file.0 as usize);
        let path = entry.map_or("", |entry| &entry.path);
        let number = extent.number.to_le_bytes();
        work(&[self.cooperative.as_bytes(), path.as_bytes(), &number])
    }

    fn place(&self, candidates: Vec<Candidate>) -> Placement {
        let entries = self.manifest.entries().iter();
        let input = PlacementInput {
            cache: &self.cooperative,
            files: entries.map(|e| (e.path.as_str(), data_bytes(e))).collect(),
            extent_bytes: self.extent_bytes,
        };
        Placement::compute(&input, candidates)
    }
}

/// Where the blocks of a generation are, as this server believes.
pub(crate) struct PlacementView {
    own: ServerId,
    extents: Arc<ExtentMap>,
    members: Vec<CacheMember>,
    placement: Arc<Placement>,
    /// The placement without this server. Blocks are there when it has just come, or when others
    /// do not know it.
    without_own: Arc<Placement>,
    /// Whether blocks were ever placed so. Otherwise the next view forgets it.
    was_without_own: bool,
    /// Earlier placements, the latest first; then those that peers reported.
    earlier: Vec<Arc<Placement>>,
    /// Number of placements that peers had reported.
    reported: usize,
}

impl PlacementView {
    /// Places all extents among this server and the other members (takes up to a second). `last`
    /// is the view until now; `reported` are the members of earlier placements, as peers report.
    pub(super) fn compute(
        extents: Arc<ExtentMap>,
        own: Candidate,
        members: Vec<CacheMember>,
        last: Option<&Self>,
        reported: &[Vec<Candidate>],
    ) -> Self {
        let candidate = |peer: &CacheMember| Candidate {
            server: peer.server,
            weight: peer.capacity_bytes,
        };
        let others: Vec<_> = members.iter().map(candidate).collect();
        let own_server = own.server;
        let mut all = others.clone();
        all.push(own);
        all.sort_by_key(|candidate| candidate.server);
        let former: Vec<_> = last.iter().flat_map(|last| last.placements()).collect();
        // A peer that returns, or has another address, changes no placement.
        let place = |candidates: Vec<Candidate>| {
            let unused = last.map(|last| &last.without_own);
            let mut computed = former.iter().copied().chain(unused);
            let same = computed.find(|placement| placement.is_for(&candidates));
            let same = same.cloned();
            same.unwrap_or_else(|| Arc::new(extents.place(candidates)))
        };
        let (placement, without_own) = (place(all), place(others));
        let now = [&placement, &without_own];
        let is_past = |it: &&Arc<Placement>| now.iter().all(|place| !Arc::ptr_eq(place, it));
        let mut earlier: Vec<_> = former.iter().copied().filter(is_past).cloned().collect();
        let was_without_own = last.is_none()
            || former.iter().any(|it| Arc::ptr_eq(it, &without_own))
            || reported.iter().any(|it| without_own.is_for(it));
        for candidates in reported {
            let is_for = |placement: &Arc<Placement>| placement.is_for(candidates);
            if !earlier.iter().chain(now).any(is_for) {
                earlier.push(Arc::new(extents.place(candidates.clone())));
            }
        }
        earlier.truncate(EARLIER_MAX);
        Self {
            own: own_server,
            extents,
            members,
            placement,
            without_own,
            was_without_own,
            earlier,
            reported: reported.len(),
        }
    }

    /// Whether it is still the view of these members and so many reported placements.
    pub(super) fn is_current(&self, members: &[CacheMember], reported: usize) -> bool {
        self.members == members && self.reported == reported
    }

    /// The extent that a block is part of.
    pub(crate) fn extent(&self, key: BlockKey) -> Extent {
        Extent {
            file: key.file,
            number: key.block.0 / self.extents.extent_blocks(),
        }
    }

    /// The primary node of an extent.
    pub(crate) fn owner(&self, extent: Extent) -> ServerId {
        let owner = self
            .extents
            .with_key(extent, |key| self.placement.owner(extent, key));
        owner.unwrap_or(self.own)
    }

    /// Whether this server is the primary node of an extent.
    pub(crate) fn is_own(&self, extent: Extent) -> bool {
        self.members.is_empty() || self.owner(extent) == self.own
    }

    /// Whether all members together cannot keep the whole source. Room for a part of an extent
    /// stays empty at each.
    pub(crate) fn lacks_room(&self) -> bool {
        let weights = self.placement.candidates().iter().map(|it| it.weight);
        let usable = weights.map(|weight| weight.saturating_sub(self.extents.extent_bytes));
        let source_bytes = self.extents.manifest.source_bytes();
        usable.fold(0, u64::saturating_add) < source_bytes
    }

    /// The servers for an extent, its primary node first; this server is among them.
    pub(crate) fn ranked(&self, extent: Extent) -> Vec<ServerId> {
        self.extents
            .with_key(extent, |key| self.placement.ranked_servers(extent, key))
    }

    /// Another member.
    pub(crate) fn peer(&self, server: ServerId) -> Option<&CacheMember> {
        self.members.iter().find(|peer| peer.server == server)
    }

    /// All placements that were ever in use, as far as it knows, the present one first.
    pub(super) fn placements(&self) -> impl Iterator<Item = &Arc<Placement>> {
        let without_own = self.was_without_own.then_some(&self.without_own);
        let now = [&self.placement].into_iter().chain(without_own);
        now.chain(&self.earlier)
    }

    /// Other members that may have an extent before home is asked: its primary nodes of all
    /// placements, and the stand-ins of the present one.
    pub(crate) fn likely_holders(&self, extent: Extent) -> Vec<CacheMember> {
        let mut servers = vec![self.owner(extent)];
        self.extents.with_key(extent, |key| {
            let former = [&self.without_own].into_iter().chain(&self.earlier);
            servers.extend(former.filter_map(|placement| placement.owner(extent, key)));
            let ranked = self.placement.ranked_servers(extent, key).into_iter();
            servers.extend(ranked.take(1 + STAND_INS));
        });
        let mut peers: Vec<CacheMember> = Vec::new();
        for server in servers {
            if let Some(peer) = self.peer(server).filter(|peer| !peers.contains(peer)) {
                peers.push(peer.clone());
            }
        }
        peers.truncate(LIKELY_HOLDERS_MAX);
        peers
    }
}
