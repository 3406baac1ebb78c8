//! What a server needs to bring blocks from elsewhere and to keep them. Decides no replacement.
//!
//! `route` says whom to ask, `from_peers` and `from_home` ask, `arrival` checks what comes.
//!
//! Who waits for whom: a flight from a peer may wait for that peer's flight from home, and a
//! flight of a new primary for the old one's read from home; a read from home waits for nobody.
//! So there are no circles, whatever the servers believe of each other.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use bafs_proto::Result;
use bafs_proto::ids::ServerId;
use bafs_proto::net::pool::Pool;
use bafs_proto::token::Token;
use tokio::sync::Semaphore;

use super::blocking;
use super::disk::{Disk, Kept, Run};
use super::flights::{Block, Flights};
use super::manifest::Manifest;
use super::peers::{CacheName, Peers};
use crate::counters::Counters;
use crate::logic::blocks::CopyClass;

/// A fetch outlives the readers that wait for it, so that a slow home is not asked twice; after
/// this time it is given up.
pub(super) const FLIGHT_MS_MAX: u64 = 120_000;

/// Most requests to homes under way at once: enough to fill a wide-area link.
const HOME_REQUESTS_MAX: usize = 32;

/// One state of the source of a cache volume, and what is here of it.
pub(crate) struct Generation {
    /// The source.
    pub(crate) manifest: Manifest,
    /// The blocks that are here.
    pub(crate) disk: Disk,
    /// Name of the cooperative cache; empty when it shares with nobody.
    pub(crate) cooperative: String,
    /// Most bytes it keeps.
    pub(crate) capacity_bytes: u64,
    /// Capability for the source; replaced when a fresher one comes.
    pub(crate) source_token: Arc<RwLock<Token>>,
    /// Blocks on their way for a primary: from home, or from who was primary before.
    pub(crate) from_home: Flights,
    /// Blocks on their way from a primary.
    pub(crate) from_peers: Flights,
}

impl Generation {
    pub(crate) fn name(&self) -> CacheName {
        (self.cooperative.clone(), self.manifest.digest())
    }
}

/// What a server needs to fetch blocks.
pub(crate) struct Fetcher {
    pub(super) pool: Pool,
    pub(super) token: Token,
    pub(super) server: ServerId,
    pub(crate) counters: Counters,
    peers: Mutex<Peers>,
    pub(super) home_requests: Semaphore,
}

impl Fetcher {
    /// A fetcher that shows `token` to its peers.
    pub(crate) fn new(pool: Pool, token: Token, server: ServerId, counters: Counters) -> Self {
        let peers = Mutex::new(Peers::new(server));
        let home_requests = Semaphore::new(HOME_REQUESTS_MAX);
        Self {
            pool,
            token,
            server,
            counters,
            peers,
            home_requests,
        }
    }

    /// Connections to other servers.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// What this server believes of others. Not to be held while waiting.
    pub(crate) fn peers(&self) -> MutexGuard<'_, Peers> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes fetched blocks to disk as far as there is room.
    pub(crate) async fn keep(
        &self,
        generation: &Arc<Generation>,
        run: &Run,
        blocks: Vec<Block>,
        class: CopyClass,
    ) -> Result<()> {
        let (generation, run) = (generation.clone(), *run);
        let counters = self.counters.clone();
        blocking(move || {
            for (n, (bytes, digest)) in blocks.into_iter().enumerate() {
                if generation.disk.keep(run.key(n), &bytes, digest, class) == Kept::PassedThrough {
                    counters.add("cache_pass_through", 1);
                }
            }
        })
        .await
    }
}
