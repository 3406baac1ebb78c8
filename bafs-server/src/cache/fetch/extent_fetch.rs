//! Runs the fetch of neighbouring blocks of one extent: from the primary node, from peers that may
//! have them, from home. Joins no other fetch.

use std::collections::BTreeSet;
use std::sync::Arc;

use bafs_proto::cache::CacheMember;
use bafs_proto::ids::ServerId;
use bafs_proto::message::{FetchScope, ReadSource};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};

use super::fetcher::Fetcher;
use super::inflight::BlockOwner;
use super::origin::Urgency;
use super::read::BlockReader;
use crate::cache::block_run::{Block, BlockRun, contiguous_ranges};
use crate::cache::generation::Generation;
use crate::cache::locks::read_lock;
use crate::cache::membership::placement_view::PlacementView;
use crate::cache::store::insert::BlockOrigin;
use crate::logic::blocks::CopyClass;

/// Most servers that are probed for blocks of an extent before home is asked, this one counted.
const PROBED_MAX: usize = 16;

/// How often home is asked for blocks whose bytes arrive damaged.
const HOME_TRIES_MAX: u32 = 2;

/// A fetch of neighbouring blocks of one extent.
pub(super) struct ExtentFetch {
    pub(super) fetcher: Arc<Fetcher>,
    pub(super) generation: Arc<Generation>,
    pub(super) view: Arc<PlacementView>,
    pub(super) run: BlockRun,
    pub(super) urgency: Urgency,
    pub(super) deadline: Deadline,
}

/// The blocks of a fetch that nobody has sent so far.
struct MissingBlocks {
    owners: Vec<Option<BlockOwner>>,
    /// Which of them an earlier primary node has read from home and evicted.
    is_evicted: Vec<bool>,
}

impl MissingBlocks {
    fn owners(&self) -> impl Iterator<Item = &BlockOwner> + Clone {
        self.owners.iter().flatten()
    }

    /// Places of the blocks.
    fn places(&self) -> Vec<usize> {
        let places = 0..self.owners.len();
        places.filter(|n| self.owners[*n].is_some()).collect()
    }

    fn take(&mut self, places: std::ops::Range<usize>) -> Vec<BlockOwner> {
        let owners = self.owners[places].iter_mut();
        owners.filter_map(Option::take).collect()
    }
}

impl ExtentFetch {
    /// Fetches the blocks, and ends with all of their owners.
    pub(super) async fn run(self, scope: FetchScope, owners: Vec<BlockOwner>) {
        match scope {
            FetchScope::Home => self.run_to_home(owners).await,
            FetchScope::PrimaryNode | FetchScope::AnyNode => self.run_to_peers(scope, owners).await,
        }
    }

    /// Fetches the blocks from their primary node or its stand-ins, else from home.
    async fn run_to_peers(&self, scope: FetchScope, owners: Vec<BlockOwner>) {
        let asked = self.fetcher.fetch_from_peers(
            &self.generation,
            &self.view,
            &self.run,
            scope,
            &self.urgency,
            self.deadline,
        );
        match asked.await {
            Ok(blocks) => self.store_and_complete(&owners, &self.run, blocks).await,
            Err(error) if error.code != ErrorCode::NotFound => complete(&owners, &Err(error)),
            Err(_) => {
                let reader = BlockReader {
                    fetcher: self.fetcher.clone(),
                    generation: self.generation.clone(),
                    scope: FetchScope::Home,
                    urgency: self.urgency.clone(),
                };
                let data = reader.read(self.run, self.deadline).await;
                complete(&owners, &data.map(|data| self.run.split(&data)));
            }
        }
    }

    /// Fetches the blocks from peers that may have them, else from home.
    async fn run_to_home(&self, owners: Vec<BlockOwner>) {
        let mut missing = MissingBlocks {
            is_evicted: vec![false; owners.len()],
            owners: owners.into_iter().map(Some).collect(),
        };
        self.probe_peers(&mut missing).await;
        let places = missing.places();
        for range in contiguous_ranges(&places) {
            let part = self.run.part(range.start, range.len());
            let is_evicted = &missing.is_evicted[range.clone()];
            let fetched = self.read_from_home(&part).await;
            // Home sent nothing on an error, and may never do.
            if fetched.is_ok() {
                let statistics = &self.generation.statistics;
                statistics.count_home_blocks(&part, self.is_primary(), is_evicted);
            }
            // The fetches of this part end with it.
            let owners = missing.take(range);
            match fetched {
                Ok(blocks) => self.store_and_complete(&owners, &part, blocks).await,
                Err(error) => complete(&owners, &Err(error)),
            }
        }
    }

    /// Reads a run from home.
    ///
    /// # Errors
    /// What home answers; `ServerFault` when its bytes do not match its digests.
    async fn read_from_home(&self, run: &BlockRun) -> Result<Vec<Block>> {
        let Generation {
            store, statistics, ..
        } = &*self.generation;
        let entry = store.manifest.file(run.file)?;
        let call = ReadSource {
            path: store.manifest.home_path(entry),
            identity: entry.identity,
            offset: run.offset(0),
            length: run.bytes() as u32,
            block_bytes: run.block_bytes,
        };
        let limiter = self.fetcher.limiter(&self.generation);
        let mut tries = 0;
        loop {
            tries += 1;
            let token = read_lock(&self.generation.inflight.source_token).clone();
            let source = (store.manifest.home(), store.manifest.digest());
            let homes = &self.fetcher.homes;
            let read = limiter.read(homes, source, &token, call.clone(), &self.urgency);
            let (data, body) = read.await?;
            statistics.add("cache_home_reads", 1);
            statistics.add("cache_home_bytes", body.len() as u64);
            match store
                .verify(*run, data.digests, body, BlockOrigin::Home)
                .await
            {
                Ok(blocks) if blocks.iter().all(Option::is_some) => {
                    return Ok(blocks.into_iter().flatten().collect());
                }
                Err(error) if tries < HOME_TRIES_MAX => {
                    tracing::warn!(%error, "home is asked once more");
                }
                Err(error) => return Err(error),
                Ok(_) => {
                    let text = "home sent a digest that no bytes have";
                    return Err(Error::new(ErrorCode::ServerFault, text));
                }
            }
        }
    }

    /// Takes blocks from the peers that may have them, and from the peers that those name. After
    /// that the fetch of the missing blocks is decided for home.
    async fn probe_peers(&self, missing: &mut MissingBlocks) {
        let extent = self.view.extent(self.run.key(0));
        let mut peers: Vec<CacheMember> = self.view.likely_holders(extent);
        let mut probed: BTreeSet<ServerId> = peers.iter().map(|peer| peer.server).collect();
        probed.insert(self.fetcher.server);
        loop {
            while !peers.is_empty() {
                let mut others = Vec::new();
                for peer in &peers {
                    others.extend(self.probe_peer(peer, missing).await);
                }
                others.retain(|other| probed.len() < PROBED_MAX && probed.insert(other.server));
                peers = others;
            }
            let claimants = self.generation.inflight.decide_for_home(missing.owners());
            if claimants.is_empty() {
                return;
            }
            peers = self.fetcher.members(&self.generation);
            peers.retain(|peer| claimants.contains(&peer.server));
        }
    }

    /// Takes the missing blocks that a peer has. Returns other peers that may have the rest.
    async fn probe_peer(
        &self,
        peer: &CacheMember,
        missing: &mut MissingBlocks,
    ) -> Vec<CacheMember> {
        let places = missing.places();
        let (Some(&first), Some(&last)) = (places.first(), places.last()) else {
            return Vec::new();
        };
        let part = self.run.part(first, last - first + 1);
        let probe = self
            .fetcher
            .probe(&self.generation, peer, &part, self.deadline);
        let Some(mut reply) = probe.await else {
            return Vec::new();
        };
        for (n, is_evicted) in reply.is_evicted.iter().enumerate() {
            missing.is_evicted[first + n] |= is_evicted;
        }
        let is_sent = |place: &usize| reply.blocks[place - first].is_some();
        let sent: Vec<_> = places.into_iter().filter(is_sent).collect();
        for range in contiguous_ranges(&sent) {
            let blocks = range.clone().filter_map(|n| reply.blocks[n - first].take());
            let blocks = blocks.collect();
            let part = self.run.part(range.start, range.len());
            if self.is_primary() {
                for key in part.keys() {
                    self.generation.statistics.primary_blocks.insert(key);
                }
            }
            let owners = missing.take(range);
            self.store_and_complete(&owners, &part, blocks).await;
        }
        reply.other_holders
    }

    /// Whether this server was the primary node of the blocks when their fetch began.
    fn is_primary(&self) -> bool {
        self.view.is_own(self.view.extent(self.run.key(0)))
    }

    /// Gives blocks to the waiting readers and to the disk: to the readers first, if one waits.
    async fn store_and_complete(&self, owners: &[BlockOwner], run: &BlockRun, blocks: Vec<Block>) {
        // Blocks that come faster than the disk takes them would fill the memory. Then readers wait
        // for the disk, too.
        let unwritten = self.fetcher.reserve_unwritten(run);
        let readers_come_first = self.urgency.is_urgent() && unwritten.is_some();
        let fetched = Ok(blocks.clone());
        if readers_come_first {
            complete(owners, &fetched);
        }
        if let Err(error) = self.store(run, blocks).await {
            tracing::warn!(%error, "fetched blocks are not stored");
        }
        if !readers_come_first {
            complete(owners, &fetched);
        }
    }

    async fn store(&self, run: &BlockRun, blocks: Vec<Block>) -> Result<()> {
        let store = &self.generation.store;
        let class = self.class();
        let bypassed = store.insert(*run, blocks, class).await? as u64;
        if bypassed > 0 && self.generation.statistics.count_bypassed(bypassed) {
            store.log_bypass();
        }
        // A change of the peers meanwhile has reclassified the blocks that were there, not these.
        let class_now = self.class();
        if class_now == class {
            return Ok(());
        }
        let classes = run.keys().map(|key| (key, class_now)).collect();
        store.reclassify(classes).await
    }

    /// The class of the blocks, as the peers are now.
    fn class(&self) -> CopyClass {
        let view = self.generation.membership.view_now();
        let view = view.unwrap_or_else(|| self.view.clone());
        let is_primary = view.is_own(view.extent(self.run.key(0)));
        self.generation.store.class_of(self.run.file, is_primary)
    }
}

fn complete(owners: &[BlockOwner], fetched: &Result<Vec<Block>>) {
    for (n, owner) in owners.iter().enumerate() {
        owner.complete(match fetched {
            Ok(blocks) => Ok(blocks[n].clone()),
            Err(error) => Err(error.clone()),
        });
    }
}
