//! Asks other servers for blocks. Never asks home.

use bafs_proto::cache::CacheMember;
use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex, ServerId};
use bafs_proto::message::{
    BlockData, BlockRange, CacheRef, Call, FetchPriority, FetchScope, Probe, ProbePurpose, Promote,
    ReadBlocks, Touch,
};
use bafs_proto::time::{Deadline, Time};
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use tokio::time::{Duration, sleep};

use super::fetcher::Fetcher;
use super::origin::Urgency;
use crate::cache::block_run::{Block, BlockRun};
use crate::cache::errors::fetch_in_progress;
use crate::cache::generation::Generation;
use crate::cache::membership::placement_view::PlacementView;
use crate::cache::store::insert::BlockOrigin;
use crate::clock;

/// A touch that comes later than this is of no use, in milliseconds.
const TOUCH_MS_MAX: u64 = 1_000;

/// After so long without an answer a peer is asked whether it lives. A slow home is no reason to
/// skip the primary node, a silent primary node is.
const LIFE_SIGN_AFTER_MS: u64 = 300;
const LIFE_SIGN_MS_MAX: u64 = 1_000;

/// A call to a peer that returns blocks.
pub(super) trait BlockCall: Call<Reply = BlockData> + Clone {
    /// Whether the peer gives all blocks, unless it fails.
    const GIVES_ALL: bool;

    /// Has the peer verify its copies before it sends any.
    fn demand_verification(&mut self);
}

impl BlockCall for ReadBlocks {
    const GIVES_ALL: bool = true;

    fn demand_verification(&mut self) {
        self.must_verify = true;
    }
}

impl BlockCall for Probe {
    const GIVES_ALL: bool = false;

    fn demand_verification(&mut self) {
        self.must_verify = true;
    }
}

/// The answer of a peer.
pub(super) struct PeerReply {
    /// The blocks that it has.
    pub(super) blocks: Vec<Option<Block>>,
    /// Whether it has read a block from home and evicted it.
    pub(super) is_evicted: Vec<bool>,
    /// Others that may have the blocks that it lacks.
    pub(super) other_holders: Vec<CacheMember>,
}

impl Fetcher {
    /// Fetches blocks of one extent from its primary node, or from a stand-in. A scope of
    /// `PrimaryNode` asks no stand-in.
    ///
    /// # Errors
    /// `NotFound` when no other server gives them: home is next. `Busy` when the primary node lives
    /// and home does not answer it, or `DeadlineExceeded`: then home is not next.
    pub(super) async fn fetch_from_peers(
        &self,
        generation: &Generation,
        view: &PlacementView,
        run: &BlockRun,
        scope: FetchScope,
        urgency: &Urgency,
        deadline: Deadline,
    ) -> Result<Vec<Block>> {
        let ranked = view.ranked(view.extent(run.key(0)));
        let reach = match scope {
            FetchScope::AnyNode => ranked.len(),
            FetchScope::PrimaryNode | FetchScope::Home => 1,
        };
        for (place, server) in ranked.into_iter().take(reach).enumerate() {
            if server == self.server {
                break;
            }
            let is_suspect = self.peers().is_suspect(server, clock::monotonic_ms());
            let Some(peer) = view.peer(server).filter(|_| !is_suspect) else {
                continue;
            };
            if deadline.remaining().is_zero() {
                return Err(fetch_in_progress());
            }
            let reply = if place == 0 {
                self.ask_primary(generation, peer, run, urgency, deadline)
                    .await
            } else {
                let scope = FetchScope::PrimaryNode;
                let call = read_call(generation, run, scope, FetchPriority::Urgent);
                self.request_blocks(generation, peer, run, call, deadline)
                    .await
            };
            match reply {
                Ok(reply) if reply.blocks.iter().all(Option::is_some) => {
                    if place > 0 {
                        generation.statistics.add("cache_fallbacks", 1);
                    }
                    return Ok(reply.blocks.into_iter().flatten().collect());
                }
                Ok(_) => {}
                // It waits for home, as every server would that asked home in its place.
                Err(error) if error.code == ErrorCode::Busy => return Err(error),
                Err(error)
                    if error.code == ErrorCode::HomeUnreachable
                        && !self.is_cut_off_from_home(server) =>
                {
                    return Err(error);
                }
                Err(error) => {
                    tracing::info!(peer = %peer.address, %error, "a cache peer is passed over");
                }
            }
            generation.statistics.add_for(server, "fallbacks", 1);
        }
        generation.statistics.add("cache_fallbacks", 1);
        Err(Error::new(ErrorCode::NotFound, "no peer gives the blocks"))
    }

    /// Asks the primary node. When a reader begins to wait for blocks that were asked for in the
    /// background, it promotes them there.
    async fn ask_primary(
        &self,
        generation: &Generation,
        peer: &CacheMember,
        run: &BlockRun,
        urgency: &Urgency,
        deadline: Deadline,
    ) -> Result<PeerReply> {
        let priority = match urgency.is_urgent() {
            true => FetchPriority::Urgent,
            false => FetchPriority::Background,
        };
        let call = read_call(generation, run, FetchScope::Home, priority);
        let reply = self.request_blocks(generation, peer, run, call, deadline);
        if priority == FetchPriority::Urgent {
            return reply.await;
        }
        tokio::pin!(reply);
        tokio::select! {
            reply = &mut reply => return reply,
            () = urgency.wait_until_urgent() => {}
        }
        // The blocks may be on the wire already: a second request would bring them twice.
        let range = generation.range_of(run);
        let promote = self
            .pool
            .call(&peer.address, &self.token, Promote { range }, deadline);
        tokio::select! {
            reply = &mut reply => return reply,
            promoted = promote => if let Err(error) = promoted {
                tracing::debug!(peer = %peer.address, %error, "a primary node promotes no fetch");
            }
        }
        reply.await
    }

    /// Asks a peer what it has of a run of one extent, before home is asked. `None` when it gives
    /// no answer.
    pub(super) async fn probe(
        &self,
        generation: &Generation,
        peer: &CacheMember,
        run: &BlockRun,
        deadline: Deadline,
    ) -> Option<PeerReply> {
        let now = clock::monotonic_ms();
        if self.peers().is_suspect(peer.server, now) {
            return None;
        }
        let probe = Probe {
            range: generation.range_of(run),
            purpose: ProbePurpose::HomeRead(self.own_member(generation)),
            must_verify: false,
        };
        let reply = self.request_blocks(generation, peer, run, probe, deadline);
        let reply = reply.await.inspect_err(|error| {
            tracing::debug!(peer = %peer.address, %error, "a probe has no answer");
        });
        reply.ok()
    }

    /// Tells a primary node that a reader is about to read a run. Waits for nothing.
    pub(super) fn touch_at_peer(
        &self,
        generation: &Generation,
        peer: &CacheMember,
        run: &BlockRun,
    ) {
        let range = generation.range_of(run);
        let (pool, token, address) = (self.pool.clone(), self.token.clone(), peer.address.clone());
        tokio::spawn(async move {
            let deadline = Deadline::after_ms(TOUCH_MS_MAX);
            let touched = pool.call(&address, &token, Touch { range }, deadline);
            if let Err(error) = touched.await {
                tracing::debug!(peer = %address, %error, "a primary node touches no blocks");
            }
        });
    }

    /// Asks a peer for blocks, and notes whether it is to be trusted.
    pub(super) async fn request_blocks(
        &self,
        generation: &Generation,
        peer: &CacheMember,
        run: &BlockRun,
        mut call: impl BlockCall,
        deadline: Deadline,
    ) -> Result<PeerReply> {
        let first = self.request_once(generation, peer, run, call.clone(), deadline);
        let mut reply = first.await;
        // Its disk may be damaged: it then finds that out, and sends good blocks.
        if let Err(error) = &reply
            && error.code == ErrorCode::DigestMismatch
        {
            note_wrong_bytes(generation, peer, error);
            call.demand_verification();
            reply = self
                .request_once(generation, peer, run, call, deadline)
                .await;
        }
        match &reply {
            Ok(_) => self.peers().trust(peer.server),
            // It answers, but home does not answer it, or the source changed.
            Err(error) if is_no_fault_of_peer(error.code) => {
                if error.code == ErrorCode::HomeUnreachable {
                    let now = clock::monotonic_ms();
                    self.peers().note_cut_off_from_home(peer.server, now);
                }
            }
            // The reader's time is over.
            Err(error)
                if error.code == ErrorCode::DeadlineExceeded && deadline.remaining().is_zero() => {}
            Err(error) if error.code == ErrorCode::VolumeLost => {
                let cache = generation.membership.cache_name();
                self.peers().forget(&cache, peer.server);
            }
            Err(error) => {
                if error.code == ErrorCode::DigestMismatch {
                    note_wrong_bytes(generation, peer, error);
                } else {
                    generation.statistics.add_for(peer.server, "failures", 1);
                }
                self.peers().suspect(peer.server, clock::monotonic_ms());
            }
        }
        reply
    }

    async fn request_once(
        &self,
        generation: &Generation,
        peer: &CacheMember,
        run: &BlockRun,
        call: impl BlockCall,
        deadline: Deadline,
    ) -> Result<PeerReply> {
        let statistics = &generation.statistics;
        let began = clock::monotonic_us();
        let reply = self.request_with_digests(generation, peer, run, call, deadline);
        let reply = reply.await;
        let waited = clock::monotonic_us().saturating_sub(began);
        statistics.add_for(peer.server, "wait_us", waited);
        let ((data, body), said) = reply?;
        let bytes = body.len() as u64;
        let is_evicted = |digest: &Digest| *digest == Digest::EVICTED;
        let is_evicted = data.digests.iter().map(is_evicted).collect();
        let store = &generation.store;
        let verified = store.verify(*run, data.digests, body, BlockOrigin::Peer(said));
        let blocks = verified.await?;
        let hits = blocks.iter().flatten().count() as u64;
        statistics.add("cache_hits_peer", hits);
        statistics.add("cache_hit_peer_bytes", bytes);
        statistics.add_for(peer.server, "hits", hits);
        statistics.add_for(peer.server, "bytes", bytes);
        Ok(PeerReply {
            blocks,
            is_evicted,
            other_holders: data.other_holders,
        })
    }

    /// Calls a peer, and asks home what the blocks are: at the same time if the peer gives all of
    /// them, else only if it gives some.
    async fn request_with_digests<C: BlockCall>(
        &self,
        generation: &Generation,
        peer: &CacheMember,
        run: &BlockRun,
        call: C,
        deadline: Deadline,
    ) -> Result<((BlockData, Bytes), Option<Vec<Digest>>)> {
        let reply = self.call_while_alive(generation, peer, call, deadline);
        let said = self.learn_digests(generation, run, deadline);
        if C::GIVES_ALL {
            return tokio::try_join!(reply, said);
        }
        let (data, body) = reply.await?;
        let said = match body.is_empty() {
            true => None,
            false => said.await?,
        };
        Ok(((data, body), said))
    }

    /// Calls a peer, and fails early when it does not even answer a probe without blocks.
    async fn call_while_alive(
        &self,
        generation: &Generation,
        peer: &CacheMember,
        call: impl BlockCall,
        deadline: Deadline,
    ) -> Result<(BlockData, Bytes)> {
        let reply =
            self.pool
                .call_with_body(&peer.address, &self.token, call, Bytes::new(), deadline);
        tokio::pin!(reply);
        loop {
            tokio::select! {
                reply = &mut reply => return reply,
                () = sleep(Duration::from_millis(LIFE_SIGN_AFTER_MS)) => {}
            }
            let until = deadline.earlier_of(Deadline::after_ms(LIFE_SIGN_MS_MAX));
            let probe = life_sign_probe(generation);
            tokio::select! {
                reply = &mut reply => return reply,
                life_sign = self.pool.call(&peer.address, &self.token, probe, until) => {
                    // Home may be slow, and the readers here want to know.
                    if let Some(silence_ms) = life_sign?.home_silence_ms {
                        let at = clock::now().0.saturating_sub(silence_ms);
                        generation.inflight.note_peers_home_answer(Time(at));
                    }
                }
            }
        }
    }

    fn is_cut_off_from_home(&self, server: ServerId) -> bool {
        let now = clock::monotonic_ms();
        self.peers().is_cut_off_from_home(server, now)
    }
}

fn read_call(
    generation: &Generation,
    run: &BlockRun,
    scope: FetchScope,
    priority: FetchPriority,
) -> ReadBlocks {
    ReadBlocks {
        range: generation.range_of(run),
        scope,
        priority,
        must_verify: false,
    }
}

/// A probe without blocks: its answer shows that the peer lives.
fn life_sign_probe(generation: &Generation) -> Probe {
    Probe {
        range: BlockRange {
            cache: CacheRef::Cooperative(generation.membership.cooperative().to_owned()),
            manifest: generation.store.manifest.digest(),
            file: FileIndex(0),
            first: BlockIndex(0),
            count: 0,
        },
        purpose: ProbePurpose::Presence,
        must_verify: false,
    }
}

fn note_wrong_bytes(generation: &Generation, peer: &CacheMember, error: &Error) {
    generation
        .statistics
        .add_for(peer.server, "digest_failures", 1);
    tracing::warn!(peer = %peer.address, server = %peer.server, %error,
        "a cache peer sends wrong bytes; check its memory, disk and version");
}

fn is_no_fault_of_peer(code: ErrorCode) -> bool {
    matches!(
        code,
        ErrorCode::Busy
            | ErrorCode::HomeUnreachable
            | ErrorCode::ServerFault
            | ErrorCode::SourceChanged
            | ErrorCode::NotFound
    )
}
