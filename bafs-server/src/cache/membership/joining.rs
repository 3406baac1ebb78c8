//! How members of a cooperative cache announce themselves before the catalog lists them, and what
//! they tell a new member. Asks for no block.

use std::collections::BTreeSet;
use std::sync::Arc;

use bafs_proto::cache::{CacheMember, JoinCache, JoinCacheReply};
use bafs_proto::time::Deadline;

use super::placement_view::FORMER_MAX;
use crate::cache::errors::run_blocking;
use crate::cache::fetch::fetcher::Fetcher;
use crate::cache::generation::Generation;
use crate::clock;

/// Time for a server to say whether it shares a cache, in milliseconds.
const JOIN_MS_MAX: u64 = 1_000;

/// Most servers that get the announcement of a new member, and most that one of them names to it.
const ANNOUNCED_TO_MAX: usize = 4_096;
const OTHER_MEMBERS_MAX: usize = 1_024;

/// Most bytes of paths in a reply, which must fit a head. Further pins are left out.
const PINS_BYTES_MAX: usize = 256 << 10;

impl Fetcher {
    /// Announces to other nodes that this server shares a cache now, so that no two of them read
    /// the same from home. Their replies name further members, their pins and earlier placements.
    /// Nodes that do not answer learn of this server from the catalog.
    pub(crate) async fn announce(
        self: &Arc<Self>,
        generation: &Arc<Generation>,
        to: BTreeSet<String>,
    ) {
        if !generation.membership.is_shared() {
            return;
        }
        let mut announced_to = to.clone();
        announced_to.insert(self.address.clone());
        let mut calls = tokio::task::JoinSet::new();
        let with = |address| (self.clone(), generation.clone(), address);
        for address in to {
            let (this, generation, address) = with(address);
            calls.spawn(async move { this.announce_to(&generation, address).await });
        }
        while let Some(answered) = calls.join_next().await {
            let Ok(Some(joined)) = answered else { continue };
            self.add_peer(generation, joined.member);
            generation
                .membership
                .note_former_placements(joined.former_placements);
            adopt_pins(generation, joined.pinned_paths).await;
            for other in joined.other_members {
                if announced_to.len() < ANNOUNCED_TO_MAX
                    && announced_to.insert(other.address.clone())
                {
                    let (this, generation, address) = with(other.address);
                    calls.spawn(async move { this.announce_to(&generation, address).await });
                }
            }
        }
    }

    async fn announce_to(
        &self,
        generation: &Arc<Generation>,
        address: String,
    ) -> Option<JoinCacheReply> {
        let call = JoinCache {
            cooperative: generation.membership.cooperative().to_owned(),
            manifest: generation.store.manifest.digest(),
            member: self.own_member(generation),
        };
        let deadline = Deadline::after_ms(JOIN_MS_MAX);
        let reply = self.pool.call(&address, &self.token, call, deadline).await;
        reply
            .inspect_err(|error| {
                tracing::debug!(%address, %error, "a node does not share the cache");
            })
            .ok()
    }

    /// Adds a peer that announced itself.
    pub(crate) fn add_peer(&self, generation: &Generation, member: CacheMember) {
        let cache = generation.membership.cache_name();
        self.peers().announce(&cache, member, clock::monotonic_ms());
    }

    /// What a new member must know of a cache.
    pub(crate) fn join_reply(&self, generation: &Generation, new: &CacheMember) -> JoinCacheReply {
        let now = clock::monotonic_ms();
        let mut others = self.members(generation);
        let peers = self.peers();
        others.retain(|peer| peer.server != new.server && !peers.is_suspect(peer.server, now));
        drop(peers);
        let others = others.into_iter().take(OTHER_MEMBERS_MAX);
        let mut bytes = 0;
        let fits = |path: &String| {
            bytes += path.len();
            bytes <= PINS_BYTES_MAX
        };
        let mut servers = 0;
        let is_short = |list: &Vec<_>| {
            servers += list.len();
            servers <= FORMER_MAX
        };
        let former = generation.membership.former_placements().into_iter();
        JoinCacheReply {
            member: self.own_member(generation),
            other_members: others.collect(),
            pinned_paths: generation
                .store
                .pins
                .paths()
                .into_iter()
                .take_while(fits)
                .collect(),
            former_placements: former.take_while(is_short).collect(),
        }
    }
}

/// Pins what others have pinned: this server may be the primary node of some of it now.
async fn adopt_pins(generation: &Arc<Generation>, pins: Vec<String>) {
    let pins: Vec<_> = pins
        .into_iter()
        .filter(|path| !generation.store.pins.covers(path))
        .collect();
    if pins.is_empty() {
        return;
    }
    let own = generation.store.pins.clone();
    let added = run_blocking(move || pins.iter().try_for_each(|path| own.add(path)));
    if let Err(error) = added.await.and_then(|added| added) {
        tracing::warn!(%error, "pins of other nodes are not pinned here");
    }
}
