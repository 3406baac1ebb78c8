//! The running fetches of one generation. A reader joins a fetch of its own scope or of a smaller
//! one, so fetches never wait for each other in a circle. Sends nothing.
//!
//! **Who waits for whom.** A fetch of scope `AnyNode` may wait for a peer's fetch of scope
//! `PrimaryNode` or `Home`. A fetch of scope `PrimaryNode` may wait for the primary node's fetch of
//! scope `Home`. A fetch of scope `Home` that still probes peers is *undecided*: it waits for
//! servers with smaller ids, or for decided ones. A decided fetch waits for home only. So there are
//! no circles, whatever the servers believe of each other.
//!
//! **Two primary nodes.** Two servers with different lists of peers may both take themselves for
//! the primary node of a block, and both would read it from home. Each probes the other first, and
//! finds its fetch or leaves a claim. If two undecided servers probe each other, the one with the
//! larger id waits. A server with a claim probes the claimant before it asks home.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, RwLock};
use std::time::Duration;

use bafs_proto::ids::ServerId;
use bafs_proto::inflight_fetches::{FetchOwner, FetchWaiter, InflightFetch, InflightFetches, Join};
use bafs_proto::message::{FetchPriority, FetchScope};
use bafs_proto::time::Time;
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};

use super::origin::{OriginLimiter, Urgency};
use crate::cache::block_run::{Block, BlockRun};
use crate::cache::locks::lock;
use crate::logic::block_claims::BlockClaims;
use crate::logic::blocks::BlockKey;
use crate::logic::read_ahead::SequentialReaders;

/// Blocks of a volume that is removed are stored within this time, or lost; and how often that is
/// looked at.
const STORING_MAX: Duration = Duration::from_secs(2);
const STORING_LOOK: Duration = Duration::from_millis(5);

type Fetches = InflightFetches<BlockKey, Block, FetchProgress>;

/// Runs the fetch of one block.
pub(crate) type BlockOwner = FetchOwner<BlockKey, Block, FetchProgress>;

/// Waits for one block.
pub(crate) type BlockWaiter = FetchWaiter<Block>;

/// The running fetches of one generation, and what they need.
pub(crate) struct BlockFetches {
    /// By scope, the smallest first.
    fetches: [Fetches; 3],
    /// Servers that probed for a block in vain: they may have read it from home since.
    claims: Mutex<BlockClaims>,
    /// Capability for the source; a fresher one replaces it.
    pub(crate) source_token: Arc<RwLock<Token>>,
    /// Readers that read in order.
    pub(crate) sequential_readers: Mutex<SequentialReaders>,
    pub(super) limiter: OnceLock<Arc<OriginLimiter>>,
    /// When home last sent something to a peer that was asked for blocks, as a [`Time`].
    peers_home_answer_ms: AtomicU64,
}

/// How far a fetch is.
#[derive(Debug)]
pub(crate) struct FetchProgress {
    urgency: Urgency,
    /// It waits for home and for nobody else.
    is_decided: bool,
    /// Servers that may have the block and were not probed since.
    claimants: BTreeSet<ServerId>,
}

impl FetchProgress {
    fn note_reader(&self, urgency: &Urgency) {
        if urgency.is_urgent() {
            self.urgency.raise();
        }
    }
}

impl BlockFetches {
    /// Without a fetch.
    pub(crate) fn new(source_token: Arc<RwLock<Token>>) -> Self {
        Self {
            fetches: Default::default(),
            claims: Mutex::default(),
            source_token,
            sequential_readers: Mutex::default(),
            limiter: OnceLock::new(),
            peers_home_answer_ms: AtomicU64::new(0),
        }
    }

    /// Waits until what was fetched is stored, for a short time at most.
    pub(crate) async fn wait_until_stored(&self) {
        let end = tokio::time::Instant::now() + STORING_MAX;
        while self.fetches.iter().any(Fetches::has_completed) && tokio::time::Instant::now() < end {
            tokio::time::sleep(STORING_LOOK).await;
        }
    }

    fn of(&self, scope: FetchScope) -> &Fetches {
        match scope {
            FetchScope::Home => &self.fetches[0],
            FetchScope::PrimaryNode => &self.fetches[1],
            FetchScope::AnyNode => &self.fetches[2],
        }
    }

    /// Joins or starts the fetch of a block, unless `is_present` says that it is on disk.
    pub(crate) fn join_or_start(
        &self,
        key: BlockKey,
        scope: FetchScope,
        urgency: &Urgency,
        is_present: impl FnOnce() -> bool,
    ) -> Join<BlockKey, Block, FetchProgress> {
        for smaller in [FetchScope::Home, FetchScope::PrimaryNode] {
            if smaller < scope
                && let Some(waiter) = self.join(key, smaller, urgency)
            {
                return Join::Waiter(waiter);
            }
        }
        // A probe must see the fetch, or the fetch its claim.
        let claims = self.claims();
        let new_progress = || FetchProgress {
            urgency: urgency.clone(),
            is_decided: false,
            claimants: claims.claimants(key).iter().copied().collect(),
        };
        let on_join = |fetch: &mut InflightFetch<_, FetchProgress>| {
            fetch.state.note_reader(urgency);
        };
        self.of(scope)
            .join_or_start(key, is_present, on_join, new_progress)
    }

    fn join(&self, key: BlockKey, scope: FetchScope, urgency: &Urgency) -> Option<BlockWaiter> {
        self.of(scope).join_if(&key, |fetch| {
            fetch.state.note_reader(urgency);
            true
        })
    }

    /// Makes running fetches from home of these blocks urgent.
    pub(crate) fn promote(&self, run: &BlockRun) {
        let urgent = Urgency::of(FetchPriority::Urgent);
        for key in run.keys() {
            drop(self.join(key, FetchScope::Home, &urgent));
        }
    }

    /// Whether any of these blocks is being fetched in a scope.
    pub(crate) fn is_running(&self, run: &BlockRun, scope: FetchScope) -> bool {
        run.keys().any(|key| self.of(scope).is_running(&key))
    }

    /// Joins the fetch from home of a block for a peer that is about to ask home, if that peer may
    /// wait for it. Otherwise it notes the peer's claim.
    pub(crate) fn join_for_probe(
        &self,
        key: BlockKey,
        own: ServerId,
        prober: ServerId,
    ) -> Option<BlockWaiter> {
        let mut claims = self.claims();
        let waiter = self.of(FetchScope::Home).join_if(&key, |fetch| {
            if fetch.state.is_decided || own < prober || fetch.has_completed() {
                fetch.state.urgency.raise();
                return true;
            }
            fetch.state.claimants.insert(prober);
            false
        });
        if waiter.is_none() {
            claims.note_claim(key, prober);
        }
        waiter
    }

    /// Servers that probed in vain for one of these blocks, and may have read it since.
    pub(crate) fn claimants(&self, keys: impl Iterator<Item = BlockKey>) -> BTreeSet<ServerId> {
        let claims = self.claims();
        keys.flat_map(|key| claims.claimants(key))
            .copied()
            .collect()
    }

    /// Decides these fetches, which began together, for home. If servers have claimed one of the
    /// blocks and were not probed since, it decides nothing and returns these servers. It decides
    /// all at once, or a server that waits for one of them could make another one wait for it.
    pub(crate) fn decide_for_home<'a>(
        &self,
        owners: impl Iterator<Item = &'a BlockOwner> + Clone,
    ) -> Vec<ServerId> {
        let _no_probe_meanwhile = self.claims();
        let fetches = self.of(FetchScope::Home);
        let mut claimants = BTreeSet::new();
        for owner in owners.clone() {
            fetches.update(owner.key(), |fetch| {
                claimants.append(&mut fetch.state.claimants);
            });
        }
        for owner in owners.filter(|_| claimants.is_empty()) {
            fetches.update(owner.key(), |fetch| fetch.state.is_decided = true);
        }
        claimants.into_iter().collect()
    }

    /// Notes when home last sent something to a peer.
    pub(crate) fn note_peers_home_answer(&self, at: Time) {
        self.peers_home_answer_ms.fetch_max(at.0, Ordering::Relaxed);
    }

    /// When home last sent something to a peer that was asked for blocks.
    pub(crate) fn peers_home_answer(&self) -> Time {
        Time(self.peers_home_answer_ms.load(Ordering::Relaxed))
    }

    fn claims(&self) -> MutexGuard<'_, BlockClaims> {
        lock(&self.claims)
    }
}

/// The result of a fetch for its waiter.
///
/// # Errors
/// Why the block did not come.
pub(crate) async fn wait_for_block(waiter: &mut BlockWaiter) -> Result<Block> {
    waiter.wait().await.unwrap_or_else(|| {
        let text = "the fetch of a cached block was cancelled; retry";
        Err(Error::new(ErrorCode::ServerFault, text))
    })
}

#[cfg(test)]
mod tests {
    use bafs_proto::hash::Digest;
    use bafs_proto::ids::{BlockIndex, FileIndex};
    use bytes::Bytes;

    use super::*;

    const KEY: BlockKey = key(0);
    const SMALL: ServerId = ServerId(1);
    const LARGE: ServerId = ServerId(2);
    const HOME: FetchScope = FetchScope::Home;

    const fn key(block: u64) -> BlockKey {
        BlockKey {
            file: FileIndex(0),
            block: BlockIndex(block),
        }
    }

    fn new_fetches() -> BlockFetches {
        BlockFetches::new(Arc::new(RwLock::new(Token::none())))
    }

    fn urgent() -> Urgency {
        Urgency::of(FetchPriority::Urgent)
    }

    fn start(fetches: &BlockFetches, key: BlockKey) -> BlockOwner {
        match fetches.join_or_start(key, HOME, &urgent(), || false) {
            Join::Owner(owner) => owner,
            _ => panic!("the block is not being fetched yet"),
        }
    }

    /// Both orders of the probes, and both servers undecided.
    #[test]
    fn only_one_of_two_primaries_reads_from_home() {
        for first in [SMALL, LARGE] {
            let second = if first == SMALL { LARGE } else { SMALL };
            // A server that was probed before its fetch probes back before it asks home.
            let fetches = new_fetches();
            assert!(fetches.join_for_probe(KEY, second, first).is_none());
            let late = start(&fetches, KEY);
            assert_eq!(fetches.decide_for_home([&late].into_iter()), [first]);
            assert_eq!(fetches.decide_for_home([&late].into_iter()), []);
            // Every prober waits for a decided fetch.
            assert!(fetches.join_for_probe(KEY, second, first).is_some());
        }
        // Both are undecided: the larger one waits, the smaller one does not, and is probed.
        let [small, large] = [new_fetches(), new_fetches()];
        let owners = [start(&small, KEY), start(&large, KEY)];
        assert!(small.join_for_probe(KEY, SMALL, LARGE).is_some());
        assert!(large.join_for_probe(KEY, LARGE, SMALL).is_none());
        assert_eq!(large.decide_for_home([&owners[1]].into_iter()), [SMALL]);
        assert_eq!(small.decide_for_home([&owners[0]].into_iter()), []);
    }

    #[test]
    fn probes_do_not_join_a_failed_fetch() {
        let fetches = new_fetches();
        let failed = start(&fetches, KEY);
        let error = Error::new(ErrorCode::SourceChanged, "it is another one");
        failed.complete(Err(error));
        assert!(fetches.join_for_probe(KEY, SMALL, LARGE).is_none());
    }

    #[test]
    fn fetches_started_together_decide_for_home_together() {
        let fetches = new_fetches();
        let [one, two] = [start(&fetches, KEY), start(&fetches, key(1))];
        assert!(fetches.join_for_probe(key(1), LARGE, SMALL).is_none());
        let claimants = fetches.decide_for_home([&one, &two].into_iter());
        assert_eq!(claimants, [SMALL]);
        let undecided = fetches.join_for_probe(KEY, LARGE, SMALL);
        assert!(undecided.is_none(), "its neighbour waits for a server");
    }

    #[tokio::test]
    async fn an_urgent_reader_promotes_a_background_fetch() {
        let fetches = new_fetches();
        let background = Urgency::of(FetchPriority::Background);
        let Join::Owner(owner) = fetches.join_or_start(KEY, HOME, &background, || false) else {
            panic!("the block is not being fetched yet")
        };
        let wider = fetches.join_or_start(KEY, FetchScope::AnyNode, &urgent(), || false);
        let Join::Waiter(second) = wider else {
            panic!("the fetch of the smaller scope runs")
        };
        assert!(background.is_urgent());
        assert_eq!(fetches.decide_for_home([&owner].into_iter()), []);
        let third = fetches.join_for_probe(KEY, LARGE, SMALL);
        let waiters = [owner.waiter(), second, third.expect("it is decided")];
        owner.complete(Ok((Bytes::from_static(b"x"), Digest::of(b"x"))));
        drop(owner);
        for mut waiter in waiters {
            let block = wait_for_block(&mut waiter).await.expect("it came");
            assert_eq!(block.0, "x");
        }
    }

    #[test]
    fn a_small_scope_joins_no_larger_fetch() {
        let fetches = new_fetches();
        let wide = fetches.join_or_start(KEY, FetchScope::AnyNode, &urgent(), || false);
        let narrow = fetches.join_or_start(KEY, FetchScope::PrimaryNode, &urgent(), || false);
        assert!(matches!((wide, narrow), (Join::Owner(_), Join::Owner(_))));
    }

    #[tokio::test]
    async fn a_dropped_fetch_owner_fails_its_waiters() {
        let fetches = new_fetches();
        let owner = start(&fetches, KEY);
        let mut waiter = owner.waiter();
        drop(owner);
        let failed = wait_for_block(&mut waiter).await.map_err(|e| e.code);
        assert_eq!(failed, Err(ErrorCode::ServerFault));
        start(&fetches, KEY);
    }
}
