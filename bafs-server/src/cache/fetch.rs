//! Brings blocks from a peer or from home and checks every digest. Decides no replacement.
//!
//! Who waits for whom: a flight from a peer may wait for that peer's flight from home, and a
//! flight of a new primary for the old one's read from home; a read from home waits for nobody.
//! So there are no circles, whatever the servers believe of each other.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex, ServerId};
use bafs_proto::message::{Blocks, CacheRef, ReadBlocks, ReadSource, Reader};
use bafs_proto::net::pool::Pool;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use tokio::sync::Semaphore;
use tokio::time::{Duration, sleep};

use super::blocking;
use super::disk::{Disk, Kept, Run};
use super::flights::{Block, Flights};
use super::manifest::Manifest;
use super::peers::{CacheName, PeerCache, Peers};
use crate::clock;
use crate::counters::Counters;
use crate::logic::blocks::{BlockKey, CopyClass};
use crate::logic::rendezvous::{Candidate, rank};

/// A fetch outlives the readers that wait for it, so that a slow home is not asked twice; after
/// this time it is given up.
pub(super) const FLIGHT_MS_MAX: u64 = 120_000;

/// Most requests to homes under way at once: enough to fill a wide-area link.
const HOME_REQUESTS_MAX: usize = 32;

/// How often home is asked for a block whose bytes arrive damaged.
const HOME_TRIES_MAX: u32 = 2;

/// A peer that is silent for so long is asked whether it lives; a slow home is no reason to leave
/// the primary, a silent primary is.
const PROBE_AFTER_MS: u64 = 1_000;
const PROBE_MS_MAX: u64 = 2_000;

/// In answers to an heir: this block is not to be had here.
pub(super) const ABSENT: Digest = Digest([0; 32]);

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
    pool: Pool,
    token: Token,
    server: ServerId,
    pub(crate) counters: Counters,
    peers: Mutex<Peers>,
    home_requests: Semaphore,
}

/// The servers to ask for a block, best first; this server is among them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Route {
    ranked: Vec<ServerId>,
}

impl Route {
    /// Whether the first servers are the same, so that blocks on both may go in one request.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        self.ranked.iter().take(2).eq(other.ranked.iter().take(2))
    }
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

    /// Brings blocks from the first server before this one on the route that can give them.
    ///
    /// # Errors
    /// `NotFound` when no such server can: home is next.
    pub(crate) async fn fetch_from_peers(
        &self,
        generation: &Arc<Generation>,
        run: &Run,
        route: &Route,
        deadline: Deadline,
    ) -> Result<Vec<Block>> {
        let sharers = self.sharers(generation);
        let mut fell_back = false;
        for server in &route.ranked {
            if *server == self.server {
                break;
            }
            let peer = sharers.iter().find(|peer| peer.server == *server);
            let Some(peer) = peer.filter(|_| !self.peers().is_suspect(*server, clock::now()))
            else {
                fell_back = true;
                continue;
            };
            match self
                .ask(generation, peer, run, Reader::Peer, deadline)
                .await
            {
                Ok(blocks) if blocks.iter().all(Option::is_some) => {
                    self.counters.add("cache_fallbacks", u64::from(fell_back));
                    return Ok(blocks.into_iter().flatten().collect());
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::info!(peer = %peer.address, %error, "a cache peer is passed over");
                }
            }
            fell_back = true;
        }
        self.counters.add("cache_fallbacks", 1);
        Err(Error::new(ErrorCode::NotFound, "no peer gives the blocks"))
    }

    /// Brings what the server that was primary before this one has of a run, when the peers
    /// changed lately: a change of peers must not cost home anything.
    pub(crate) async fn fetch_from_predecessor(
        &self,
        generation: &Arc<Generation>,
        run: &Run,
        route: &Route,
        deadline: Deadline,
    ) -> Vec<Option<Block>> {
        let nothing = vec![None; run.count];
        let sharers = self.sharers(generation);
        let before = route.ranked.get(1).filter(|_| self.is_own(route));
        let Some(peer) = sharers.iter().find(|peer| Some(&peer.server) == before) else {
            return nothing;
        };
        let asks = {
            let (now, mut peers) = (clock::now(), self.peers());
            peers.changed_lately(&generation.name(), &sharers, now)
                && !peers.is_suspect(peer.server, now)
        };
        if !asks {
            return nothing;
        }
        let answer = self
            .ask(generation, peer, run, Reader::Heir, deadline)
            .await;
        answer.unwrap_or_else(|error| {
            tracing::debug!(peer = %peer.address, %error, "the former primary does not answer");
            nothing
        })
    }

    /// Reads a run from home.
    ///
    /// # Errors
    /// What home answers; `ServerFault` when its bytes do not match its digests.
    pub(crate) async fn fetch_from_home(
        &self,
        generation: &Arc<Generation>,
        run: &Run,
        deadline: Deadline,
    ) -> Result<Vec<Block>> {
        let manifest = &generation.manifest;
        let entry = manifest.file(run.file)?;
        let call = ReadSource {
            path: manifest.home_path(entry),
            identity: entry.identity,
            offset: run.at(0),
            length: run.bytes() as u32,
            block_bytes: run.block_bytes,
        };
        let token = generation
            .source_token
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let permit =
            tokio::time::timeout_at(deadline.instant().into(), self.home_requests.acquire());
        let _permit = permit.await.map_err(|_| {
            Error::new(
                ErrorCode::DeadlineExceeded,
                "too many requests to home are under way",
            )
        })?;
        let mut tries = 0;
        loop {
            tries += 1;
            let asked = self.pool.call_with_body(
                manifest.home(),
                &token,
                call.clone(),
                Bytes::new(),
                deadline,
            );
            let (data, body) = asked.await?;
            self.counters.add("cache_home_bytes", body.len() as u64);
            match self
                .check(generation, run, data.digests, body, Origin::Home)
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

    /// Tells other nodes that this server shares a cache now, so that nobody reads from home what
    /// another one reads at the same time. Those that do not answer learn it from the catalog.
    pub(crate) async fn introduce(self: &Arc<Self>, generation: &Arc<Generation>, to: Vec<String>) {
        if generation.cooperative.is_empty() {
            return;
        }
        let mut calls = tokio::task::JoinSet::new();
        for address in to {
            let (fetcher, generation) = (self.clone(), generation.clone());
            calls.spawn(async move {
                let server = fetcher.server;
                let capacity_bytes = generation.capacity_bytes;
                let reader = Reader::Newcomer {
                    server,
                    capacity_bytes,
                };
                let call = generation.ask_for(None, reader);
                let deadline = Deadline::after_ms(PROBE_MS_MAX);
                let told = fetcher
                    .pool
                    .call(&address, &fetcher.token, call, deadline)
                    .await;
                if let Err(error) = told {
                    tracing::debug!(%address, %error, "a node does not share the cache");
                }
            });
        }
        while calls.join_next().await.is_some() {}
    }

    async fn ask(
        &self,
        generation: &Arc<Generation>,
        peer: &PeerCache,
        run: &Run,
        reader: Reader,
        deadline: Deadline,
    ) -> Result<Vec<Option<Block>>> {
        let answer = match self
            .ask_living(generation, peer, run, reader, deadline)
            .await
        {
            Ok((reply, body)) => {
                let bytes = body.len() as u64;
                let origin = Origin::Peer;
                let checked = self
                    .check(generation, run, reply.digests, body, origin)
                    .await;
                if checked.is_ok() {
                    self.counters.add("cache_hit_peer_bytes", bytes);
                }
                checked
            }
            Err(error) => Err(error),
        };
        match &answer {
            Ok(_) => self.peers().trust(peer.server),
            // It answers, but home does not answer it: that is not its fault.
            Err(error) if matches!(error.code, ErrorCode::Busy | ErrorCode::ServerFault) => {}
            Err(_) => self.peers().suspect(peer.server, clock::now()),
        }
        answer
    }

    /// Asks a peer, and gives up early when it does not even answer a question without blocks.
    async fn ask_living(
        &self,
        generation: &Generation,
        peer: &PeerCache,
        run: &Run,
        reader: Reader,
        deadline: Deadline,
    ) -> Result<(Blocks, Bytes)> {
        let call = generation.ask_for(Some(run), reader);
        let asked =
            self.pool
                .call_with_body(&peer.address, &self.token, call, Bytes::new(), deadline);
        tokio::pin!(asked);
        loop {
            tokio::select! {
                answer = &mut asked => return answer,
                () = sleep(Duration::from_millis(PROBE_AFTER_MS)) => {}
            }
            let until = deadline.earlier(Deadline::after_ms(PROBE_MS_MAX));
            let probe = generation.ask_for(None, Reader::Peer);
            tokio::select! {
                answer = &mut asked => return answer,
                alive = self.pool.call(&peer.address, &self.token, probe, until) => { alive?; }
            }
        }
    }

    /// Cuts a body into blocks and compares each with its digest, and with what this server
    /// remembers of it unless it comes from home.
    async fn check(
        &self,
        generation: &Arc<Generation>,
        run: &Run,
        digests: Vec<Digest>,
        body: Bytes,
        origin: Origin,
    ) -> Result<Vec<Option<Block>>> {
        let (generation, run) = (generation.clone(), *run);
        let checked = blocking(move || {
            let wrong = |why: &str| {
                Err(Error::new(
                    ErrorCode::DigestMismatch,
                    format!("blocks from {origin:?}: {why}"),
                ))
            };
            if digests.len() != run.count {
                return wrong("their number is not what was asked for");
            }
            let mut blocks = Vec::with_capacity(run.count);
            let mut start = 0;
            for (n, digest) in digests.into_iter().enumerate() {
                if digest == ABSENT {
                    blocks.push(None);
                    continue;
                }
                let end = start + run.length(n);
                if end > body.len() {
                    return wrong("there are too few bytes");
                }
                let bytes = body.slice(start..end);
                start = end;
                if Digest::of(&bytes) != digest {
                    return wrong("the bytes do not match the digest");
                }
                let known = generation.disk.table().digest_of(run.key(n));
                if origin == Origin::Peer && known.is_some_and(|known| known != digest) {
                    return wrong("the digest is not the one that home once sent");
                }
                blocks.push(Some((bytes, digest)));
            }
            if start != body.len() {
                return wrong("there are too many bytes");
            }
            Ok(blocks)
        })
        .await?;
        checked.map_err(|error| {
            self.counters.add("cache_digest_failures", 1);
            match origin {
                Origin::Peer => error,
                // The caller may ask again: the bytes at home may be good.
                Origin::Home => Error::new(ErrorCode::ServerFault, error.detail),
            }
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    Home,
    Peer,
}

impl Generation {
    /// The call that asks a peer for a run, or for nothing.
    fn ask_for(&self, run: Option<&Run>, reader: Reader) -> ReadBlocks {
        ReadBlocks {
            cache: CacheRef::Cooperative(self.cooperative.clone()),
            manifest: self.manifest.digest(),
            file: run.map_or(FileIndex(0), |run| run.file),
            first: BlockIndex(run.map_or(0, |run| run.first)),
            count: run.map_or(0, |run| run.count as u32),
            reader,
        }
    }
}
