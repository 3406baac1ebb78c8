//! Asks other servers for blocks, and tells them of this one. Never goes home.

use std::sync::Arc;

use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex};
use bafs_proto::message::{Blocks, CacheRef, ReadBlocks, Reader};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use tokio::time::{Duration, sleep};

use super::arrival::Origin;
use super::disk::Run;
use super::fetch::{Fetcher, Generation};
use super::flights::Block;
use super::peers::PeerCache;
use super::route::Route;
use crate::clock;

/// A peer that is silent for so long is asked whether it lives; a slow home is no reason to leave
/// the primary, a silent primary is.
const PROBE_AFTER_MS: u64 = 1_000;
const PROBE_MS_MAX: u64 = 2_000;

/// In answers to an heir: this block is not to be had here.
pub(super) const ABSENT: Digest = Digest([0; 32]);

impl Fetcher {
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
