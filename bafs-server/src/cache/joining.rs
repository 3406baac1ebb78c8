//! How servers that share a cache get to know each other before the catalog says so, and what they
//! tell whoever comes. Asks for no block.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bafs_proto::Result;
use bafs_proto::cache::{CacheMember, JoinCache, JoinCacheReply};
use bafs_proto::message::CacheRef;
use bafs_proto::time::Deadline;

use super::fetch::{Fetcher, Generation};
use super::peers::PeerCache;
use super::{Caches, blocking};
use crate::clock;

/// Time for a server to say whether it shares a cache, in milliseconds.
const JOIN_MS_MAX: u64 = 1_000;

/// Most servers that are told of a newcomer, and that one of them names to it.
const TOLD_MAX: usize = 4_096;
const OTHERS_MAX: usize = 1_024;

/// Most bytes of paths in an answer, which must fit a head: of the other pins nobody is told.
const PINS_BYTES_MAX: usize = 256 << 10;

/// Most servers in the lists of former ones.
pub(super) const FORMER_MAX: usize = 8_192;

impl Caches {
    /// Another server shares a cache from now on; tells it whether this one does.
    ///
    /// # Errors
    /// `VolumeLost` when it does not, `SourceChanged` when it shows another state of the source.
    pub fn join(&self, call: JoinCache) -> Result<JoinCacheReply> {
        let cache = CacheRef::Cooperative(call.cooperative);
        let generation = self.find(&cache, call.manifest)?;
        let joined = self.fetcher.joined(&generation, &call.member);
        self.fetcher.welcome(&generation, call.member);
        Ok(joined)
    }

    /// Tells the other nodes of the group that this one shares a cache, which leaves as much free
    /// as the others here.
    pub(super) async fn introduce(&self, generation: &Arc<Generation>) {
        generation
            .disk
            .set_spare(self.spare.load(Ordering::Relaxed));
        let nodes = self.fetcher.peers().nodes().into_iter();
        let addresses = nodes.map(|(_, address)| address).collect();
        self.fetcher.introduce(generation, addresses).await;
    }
}

impl Fetcher {
    /// Tells other nodes that this server shares a cache now, so that nobody reads from home what
    /// another one reads at the same time, and learns which of them do, and what they pinned. Those
    /// that do not answer learn it from the catalog; those that the catalog does not know yet are
    /// named by the others.
    async fn introduce(self: &Arc<Self>, generation: &Arc<Generation>, to: BTreeSet<String>) {
        if generation.cooperative.is_empty() {
            return;
        }
        let mut told = to.clone();
        told.insert(self.address.clone());
        let mut calls = tokio::task::JoinSet::new();
        let tell = |address| (self.clone(), generation.clone(), address);
        for address in to {
            let (this, generation, address) = tell(address);
            calls.spawn(async move { this.introduce_to(&generation, address).await });
        }
        while let Some(answered) = calls.join_next().await {
            let Ok(Some(joined)) = answered else { continue };
            self.welcome(generation, joined.member);
            generation.learn_former(joined.former_placements);
            adopt(generation, joined.pinned_paths).await;
            for other in joined.other_members {
                if told.len() < TOLD_MAX && told.insert(other.address.clone()) {
                    let (this, generation, address) = tell(other.address);
                    calls.spawn(async move { this.introduce_to(&generation, address).await });
                }
            }
        }
    }

    async fn introduce_to(
        &self,
        generation: &Arc<Generation>,
        address: String,
    ) -> Option<JoinCacheReply> {
        let call = JoinCache {
            cooperative: generation.cooperative.clone(),
            manifest: generation.manifest.digest(),
            member: self.member(generation),
        };
        let deadline = Deadline::after_ms(JOIN_MS_MAX);
        let told = self.pool.call(&address, &self.token, call, deadline).await;
        told.inspect_err(|error| {
            tracing::debug!(%address, %error, "a node does not share the cache");
        })
        .ok()
    }

    /// A server shares a cache, as it says itself.
    pub(crate) fn welcome(&self, generation: &Generation, member: CacheMember) {
        self.peers()
            .introduce(&generation.name(), member, clock::monotonic_ms());
    }

    /// What a newcomer must know of a cache.
    fn joined(&self, generation: &Generation, newcomer: &CacheMember) -> JoinCacheReply {
        let now = clock::monotonic_ms();
        let mut others = self.sharers(generation);
        let peers = self.peers();
        others.retain(|peer| peer.server != newcomer.server && !peers.is_suspect(peer.server, now));
        drop(peers);
        let others = others.into_iter().take(OTHERS_MAX);
        let mut bytes = 0;
        let fits = |path: &String| {
            bytes += path.len();
            bytes <= PINS_BYTES_MAX
        };
        let mut servers = 0;
        let few = |list: &Vec<_>| {
            servers += list.len();
            servers <= FORMER_MAX
        };
        let former = generation.former().into_iter();
        JoinCacheReply {
            member: self.member(generation),
            other_members: others.map(PeerCache::into_member).collect(),
            pinned_paths: generation
                .pins
                .paths()
                .into_iter()
                .take_while(fits)
                .collect(),
            former_placements: former.take_while(few).collect(),
        }
    }
}

/// Pins what others have pinned: their share of it may be this server's now.
async fn adopt(generation: &Arc<Generation>, pins: Vec<String>) {
    let pins: Vec<_> = pins
        .into_iter()
        .filter(|path| !generation.pins.cover(path))
        .collect();
    if pins.is_empty() {
        return;
    }
    let kept = generation.pins.clone();
    let added = blocking(move || pins.iter().try_for_each(|path| kept.add(path)));
    if let Err(error) = added.await.and_then(|added| added) {
        tracing::warn!(%error, "what others pinned is not pinned here");
    }
}
