//! Whom to ask for a block: weighted rendezvous hashing over the peers of a cooperative cache. Asks
//! nobody.

use bafs_proto::ids::ServerId;

use super::fetch::{Fetcher, Generation};
use super::peers::PeerCache;
use crate::clock;
use crate::logic::blocks::BlockKey;
use crate::logic::rendezvous::{Candidate, rank};

/// The servers to ask for a block, best first; this server is among them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Route {
    pub(super) ranked: Vec<ServerId>,
}

impl Route {
    /// Whether the first servers are the same, so that blocks on both may go in one request.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        self.ranked.iter().take(2).eq(other.ranked.iter().take(2))
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

    /// Whom to ask for a block.
    pub(crate) fn route(
        &self,
        generation: &Generation,
        sharers: &[PeerCache],
        key: BlockKey,
    ) -> Route {
        if sharers.is_empty() {
            return Route {
                ranked: vec![self.server],
            };
        }
        let path = generation.manifest.entries()[key.file.0 as usize]
            .path
            .as_bytes();
        let own = Candidate {
            server: self.server,
            weight: generation.capacity_bytes,
        };
        let others = sharers.iter().map(|peer| Candidate {
            server: peer.server,
            weight: peer.capacity_bytes,
        });
        let candidates: Vec<_> = others.chain([own]).collect();
        // By path, not by place in the manifest, which moves when the source changes.
        let block = key.block.0.to_le_bytes();
        let ranked = rank(
            &[generation.cooperative.as_bytes(), path, &block],
            &candidates,
        );
        Route { ranked }
    }

    /// Whether this server is primary on the route.
    pub(crate) fn is_own(&self, route: &Route) -> bool {
        route.ranked.first() == Some(&self.server)
    }
}
