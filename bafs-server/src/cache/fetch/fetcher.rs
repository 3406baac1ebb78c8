//! What all caches of a node share to fetch blocks: connections, beliefs about peers, limiters and
//! memory budgets. Reads no block.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use bafs_proto::Result;
use bafs_proto::cache::CacheMember;
use bafs_proto::ids::ServerId;
use bafs_proto::net::pool::Pool;
use bafs_proto::time::{Deadline, Time};
use bafs_proto::token::Token;
use tokio::sync::{Semaphore, SemaphorePermit, watch};

use super::origin::OriginLimiter;
use crate::cache::block_run::BlockRun;
use crate::cache::generation::Generation;
use crate::cache::locks::lock;
use crate::cache::membership::peers::Peers;
use crate::cache::membership::placement_view::PlacementView;
use crate::clock;
use crate::home_clients::HomeClients;

/// A node that starts with cooperative caches learns its peers before it asks home for a block, but
/// waits no longer than this.
const PEER_DISCOVERY_MS_MAX: u64 = 3_000;

/// Blocks that readers get before the disk does, in units of [`UNWRITTEN_UNIT`] bytes: 64 MiB.
const UNWRITTEN_MAX: usize = 1024;
const UNWRITTEN_UNIT: usize = 64 << 10;

/// What all caches of a node share to fetch blocks.
pub(crate) struct Fetcher {
    pub(crate) homes: Arc<HomeClients>,
    pub(crate) pool: Pool,
    pub(crate) token: Token,
    pub(crate) server: ServerId,
    pub(crate) address: String,
    peers: Mutex<Peers>,
    /// By address of the home: a slow home delays no other.
    limiters: Mutex<BTreeMap<String, Weak<OriginLimiter>>>,
    /// Bytes that are being fetched ahead of readers now.
    pub(super) read_ahead_bytes: AtomicU64,
    unwritten: Semaphore,
    /// Whether blocks of peers are taken as they come.
    trusts_peers: AtomicBool,
    knows_peers: watch::Sender<bool>,
    discovery_deadline: Deadline,
}

impl Fetcher {
    /// A fetcher that shows `token` to its peers, which reach it at `address`.
    pub(crate) fn new(
        homes: Arc<HomeClients>,
        token: Token,
        server: ServerId,
        address: String,
    ) -> Self {
        Self {
            pool: homes.pool().clone(),
            homes,
            token,
            server,
            address,
            peers: Mutex::new(Peers::new(server)),
            limiters: Mutex::default(),
            read_ahead_bytes: AtomicU64::new(0),
            unwritten: Semaphore::new(UNWRITTEN_MAX),
            trusts_peers: AtomicBool::new(false),
            knows_peers: watch::Sender::new(true),
            discovery_deadline: Deadline::after_ms(PEER_DISCOVERY_MS_MAX),
        }
    }

    /// Says whether the node knows its peers. While it does not, nobody asks home, for a while.
    pub(crate) fn set_knows_peers(&self, knows_peers: bool) {
        self.knows_peers.send_replace(knows_peers);
    }

    /// From now on, blocks of peers are taken as they come, without a question to home.
    pub(crate) fn trust_peers(&self) {
        self.trusts_peers.store(true, Ordering::Relaxed);
    }

    /// Whether blocks of peers are taken as they come.
    pub(super) fn trusts_peers(&self) -> bool {
        self.trusts_peers.load(Ordering::Relaxed)
    }

    /// Whether the node knows its peers.
    pub(crate) fn knows_peers(&self) -> bool {
        *self.knows_peers.borrow()
    }

    /// Waits until the node knows its peers, but not for long.
    pub(crate) async fn wait_for_peers(&self) {
        let mut knows_peers = self.knows_peers.subscribe();
        let discovery = knows_peers.wait_for(|knows_peers| *knows_peers);
        let until = self.discovery_deadline.instant().into();
        let _ = tokio::time::timeout_at(until, discovery).await;
    }

    /// The limiter of the home of a generation.
    pub(crate) fn limiter<'a>(&self, generation: &'a Generation) -> &'a Arc<OriginLimiter> {
        generation.inflight.limiter.get_or_init(|| {
            let home = generation.store.manifest.home().address;
            let mut limiters = lock(&self.limiters);
            if let Some(limiter) = limiters.get(home).and_then(Weak::upgrade) {
                return limiter;
            }
            // Homes without a cache are forgotten.
            limiters.retain(|_, limiter| limiter.strong_count() > 0);
            let limiter = Arc::new(OriginLimiter::new());
            limiters.insert(home.to_owned(), Arc::downgrade(&limiter));
            limiter
        })
    }

    /// When the home of a generation last sent something to this node, for whatever volume: all of
    /// them wait for one limiter.
    pub(crate) fn last_home_answer(&self, generation: &Generation) -> Time {
        self.limiter(generation).last_answer()
    }

    /// What this server believes of others. Not to be held while waiting.
    pub(crate) fn peers(&self) -> MutexGuard<'_, Peers> {
        lock(&self.peers)
    }

    /// The other servers that share the cache now.
    pub(crate) fn members(&self, generation: &Generation) -> Vec<CacheMember> {
        match generation.membership.is_shared() {
            true => {
                let now = clock::monotonic_ms();
                self.peers().of(&generation.membership.cache_name(), now)
            }
            false => Vec::new(),
        }
    }

    /// This server as a member of the cache.
    pub(crate) fn own_member(&self, generation: &Generation) -> CacheMember {
        CacheMember {
            server: self.server,
            address: self.address.clone(),
            capacity_bytes: generation.store.capacity_bytes(),
        }
    }

    /// Where the blocks of a generation are now.
    ///
    /// # Errors
    /// `ServerFault`.
    pub(crate) async fn view(&self, generation: &Generation) -> Result<Arc<PlacementView>> {
        let members = self.members(generation);
        let own_bytes = generation.store.capacity_bytes();
        generation
            .membership
            .view(self.server, own_bytes, members)
            .await
    }

    /// Space for blocks that readers get before the disk does, if there is some.
    pub(super) fn reserve_unwritten(&self, run: &BlockRun) -> Option<SemaphorePermit<'_>> {
        let units = u32::try_from(run.bytes().div_ceil(UNWRITTEN_UNIT)).ok()?;
        self.unwritten.try_acquire_many(units).ok()
    }
}
