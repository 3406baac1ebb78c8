//! Asks other servers for blocks. Never goes home.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bafs_proto::cache::CacheMember;
use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex, ServerId};
use bafs_proto::message::{BlockData, CacheRef, ReadBlocks, ReadKind};
use bafs_proto::time::{Deadline, Time};
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use tokio::time::{Duration, sleep};

use super::arrival::BlockOrigin;
use super::disk::Run;
use super::fetch::{Fetcher, Generation};
use super::flights::{Block, Flights, Urgency};
use super::peers::PeerCache;
use super::read::too_late;
use super::route::View;
use crate::clock;

/// A hint that comes later than this is of no use, in milliseconds.
const SOON_MS_MAX: u64 = 1_000;

/// A peer that is silent for so long is asked whether it lives; a slow home is no reason to leave
/// the primary, a silent primary is.
const PROBE_AFTER_MS: u64 = 300;
const PROBE_MS_MAX: u64 = 1_000;

/// Home that has sent nothing for so long while somebody waited for it, in milliseconds, is away.
const HOME_SILENT_MS: u64 = 5_000;

/// Who did not wait for so long cannot say that home is silent.
const WAITED_MIN_US: u64 = 1_000_000;

/// How far to go for blocks that the primary does not give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Search {
    /// To others, who may reach it.
    Wide,
    /// No further.
    PrimaryOnly,
}

/// What a server answered.
pub(super) struct PeerReply {
    /// The blocks that it has.
    pub(super) blocks: Vec<Option<Block>>,
    /// Whether it has read a block from home, and has it no more.
    pub(super) gone: Vec<bool>,
    /// Others who may have the blocks that it has not.
    pub(super) others: Vec<CacheMember>,
}

impl Fetcher {
    /// Brings blocks of one extent from its primary, or from who stands in for it.
    ///
    /// # Errors
    /// `NotFound` when no other server can give them: home is next. `Busy` when their primary lives
    /// and home does not answer it, `DeadlineExceeded`: then it is not.
    pub(super) async fn fetch_from_peers(
        &self,
        generation: &Arc<Generation>,
        run: &Run,
        (view, search): (&View, Search),
        urgency: &Urgency,
        deadline: Deadline,
    ) -> Result<Vec<Block>> {
        let ranked = view.ranked(generation, generation.extent(run.key(0)));
        let reach = match search {
            Search::Wide => ranked.len(),
            Search::PrimaryOnly => 1,
        };
        for (place, server) in ranked.into_iter().take(reach).enumerate() {
            if server == self.server {
                break;
            }
            let peer = view.peer(server);
            let Some(peer) =
                peer.filter(|_| !self.peers().is_suspect(server, clock::monotonic_ms()))
            else {
                continue;
            };
            if deadline.remaining().is_zero() {
                return Err(too_late());
            }
            let answer = if place == 0 {
                self.ask_primary(generation, peer, run, urgency, deadline)
                    .await
            } else {
                self.ask(generation, peer, run, ReadKind::Relay, deadline)
                    .await
            };
            match answer {
                Ok(answer) if answer.blocks.iter().all(Option::is_some) => {
                    if place > 0 {
                        generation.meter.add("cache_fallbacks", 1);
                    }
                    return Ok(answer.blocks.into_iter().flatten().collect());
                }
                Ok(_) => {}
                // It waits for home, as everybody would who asked home in its place.
                Err(error) if error.code == ErrorCode::Busy => return Err(error),
                Err(error)
                    if error.code == ErrorCode::HomeUnreachable && !self.is_homeless(server) =>
                {
                    return Err(error);
                }
                Err(error) => {
                    tracing::info!(peer = %peer.address, %error, "a cache peer is passed over");
                }
            }
            generation.meter.add_for(server, "fallbacks", 1);
        }
        generation.meter.add("cache_fallbacks", 1);
        Err(Error::new(ErrorCode::NotFound, "no peer gives the blocks"))
    }

    /// Asks the primary; when somebody begins to wait for what is fetched ahead, tells it so.
    async fn ask_primary(
        &self,
        generation: &Arc<Generation>,
        peer: &PeerCache,
        run: &Run,
        urgency: &Urgency,
        deadline: Deadline,
    ) -> Result<PeerReply> {
        if urgency.is_urgent() {
            let asked = self.ask(generation, peer, run, ReadKind::Peer, deadline);
            return asked.await;
        }
        let ahead = self.ask(generation, peer, run, ReadKind::ReadAhead, deadline);
        tokio::pin!(ahead);
        tokio::select! {
            answer = &mut ahead => return answer,
            () = urgency.raised() => {}
        }
        // The blocks may be on the wire already: to ask for them again would bring them twice.
        let hurry = generation.ask_for(Some(run), ReadKind::Expedite);
        let hurry = self.pool.call(&peer.address, &self.token, hurry, deadline);
        tokio::select! {
            answer = &mut ahead => return answer,
            told = hurry => if let Err(error) = told {
                tracing::debug!(peer = %peer.address, %error, "a primary does not hurry");
            }
        }
        ahead.await
    }

    /// Tells a primary that somebody is about to read a run.
    pub(super) fn say_soon(&self, generation: &Generation, peer: &PeerCache, run: &Run) {
        let call = generation.ask_for(Some(run), ReadKind::Touch);
        let (pool, token, address) = (self.pool.clone(), self.token.clone(), peer.address.clone());
        tokio::spawn(async move {
            let deadline = Deadline::after_ms(SOON_MS_MAX);
            if let Err(error) = pool.call(&address, &token, call, deadline).await {
                tracing::debug!(peer = %address, %error, "a primary is not told what is read soon");
            }
        });
    }

    pub(super) async fn ask(
        &self,
        generation: &Arc<Generation>,
        peer: &PeerCache,
        run: &Run,
        reader: ReadKind,
        deadline: Deadline,
    ) -> Result<PeerReply> {
        let call = generation.ask_for(Some(run), reader);
        let asked = self.ask_once(generation, peer, run, call.clone(), deadline);
        let answer = match asked.await {
            // Its disk may be damaged: it looks, and brings good blocks.
            Err(error) if error.code == ErrorCode::DigestMismatch => {
                note_wrong_bytes(generation, peer, &error);
                let doubting = ReadBlocks {
                    must_verify: true,
                    ..call
                };
                self.ask_once(generation, peer, run, doubting, deadline)
                    .await
            }
            answer => answer,
        };
        match &answer {
            Ok(_) => self.peers().trust(peer.server),
            // It answers, but home does not answer it, or the source changed: not its fault.
            Err(error) if is_faultless(error.code) => {
                if error.code == ErrorCode::HomeUnreachable {
                    self.peers()
                        .note_homeless(peer.server, clock::monotonic_ms());
                }
            }
            // Nor that nobody waits any more.
            Err(error)
                if error.code == ErrorCode::DeadlineExceeded && deadline.remaining().is_zero() => {}
            Err(error) if error.code == ErrorCode::VolumeLost => {
                self.peers().forget(&generation.name(), peer.server);
            }
            Err(error) => {
                if error.code == ErrorCode::DigestMismatch {
                    note_wrong_bytes(generation, peer, error);
                } else {
                    generation.meter.add_for(peer.server, "failures", 1);
                }
                self.peers().suspect(peer.server, clock::monotonic_ms());
            }
        }
        answer
    }

    async fn ask_once(
        &self,
        generation: &Arc<Generation>,
        peer: &PeerCache,
        run: &Run,
        call: ReadBlocks,
        deadline: Deadline,
    ) -> Result<PeerReply> {
        let began = clock::monotonic_us();
        let asked = self.ask_living(generation, peer, call, deadline).await;
        let waited = clock::monotonic_us().saturating_sub(began);
        generation.meter.add_for(peer.server, "wait_us", waited);
        let (reply, body) = asked?;
        let bytes = body.len() as u64;
        let is_gone = |digest: &Digest| *digest == Digest::EVICTED;
        let gone = reply.digests.iter().map(is_gone).collect();
        let checked = generation.check(run, reply.digests, body, BlockOrigin::Peer);
        let blocks = checked.await?;
        let hits = blocks.iter().flatten().count() as u64;
        generation.meter.add("cache_hits_peer", hits);
        generation.meter.add("cache_hit_peer_bytes", bytes);
        generation.meter.add_for(peer.server, "hits", hits);
        generation.meter.add_for(peer.server, "bytes", bytes);
        Ok(PeerReply {
            blocks,
            gone,
            others: reply.other_holders,
        })
    }

    fn is_homeless(&self, server: ServerId) -> bool {
        self.peers().is_homeless(server, clock::monotonic_ms())
    }

    /// Asks a peer, and gives up early when it does not even answer a question without blocks.
    async fn ask_living(
        &self,
        generation: &Generation,
        peer: &PeerCache,
        call: ReadBlocks,
        deadline: Deadline,
    ) -> Result<(BlockData, Bytes)> {
        let asked =
            self.pool
                .call_with_body(&peer.address, &self.token, call, Bytes::new(), deadline);
        tokio::pin!(asked);
        loop {
            tokio::select! {
                answer = &mut asked => return answer,
                () = sleep(Duration::from_millis(PROBE_AFTER_MS)) => {}
            }
            let until = deadline.earlier_of(Deadline::after_ms(PROBE_MS_MAX));
            let probe = generation.ask_for(None, ReadKind::Peer);
            tokio::select! {
                answer = &mut asked => return answer,
                alive = self.pool.call(&peer.address, &self.token, probe, until) => {
                    // It may be home that is slow, and whoever waits here wants to know.
                    generation.note_home_of_peers(alive?.home_silence_ms, clock::now());
                }
            }
        }
    }
}

fn note_wrong_bytes(generation: &Generation, peer: &PeerCache, error: &Error) {
    let meter = &generation.meter;
    meter.add_for(peer.server, "digest_failures", 1);
    tracing::warn!(peer = %peer.address, server = %peer.server, %error,
        "a cache peer sends wrong bytes; check its memory, disk and version");
}

fn is_faultless(code: ErrorCode) -> bool {
    matches!(
        code,
        ErrorCode::Busy
            | ErrorCode::HomeUnreachable
            | ErrorCode::ServerFault
            | ErrorCode::SourceChanged
            | ErrorCode::NotFound
    )
}

/// What an agent is told that asked at `began` (ticks) when its blocks could not be had: whose
/// fault it is, if it is home's; that they come, if home has only much to do.
pub(super) fn told_to_agents(
    fetcher: &Fetcher,
    generation: &Generation,
    run: &Run,
    began: u64,
    error: Error,
) -> Error {
    let now = clock::now();
    let waited_us = clock::monotonic_us().saturating_sub(began);
    let is_late = matches!(error.code, ErrorCode::DeadlineExceeded | ErrorCode::Busy);
    if !is_late || waited_us < WAITED_MIN_US {
        return error;
    }
    // A peer says `Busy` of a home that has much to do, and that sent it something lately.
    if error.code == ErrorCode::Busy {
        return Error::new(ErrorCode::InProgress, error.detail);
    }
    let last = fetcher.home_answered(generation);
    let silent_ms = now.ms_since(last);
    let is_flying = |flights: &Flights| (0..run.count).any(|n| flights.is_flying(run.key(n)));
    let waits_for_peers = is_flying(&generation.from_peers) || is_flying(&generation.detours);
    let waits_for_home = is_flying(&generation.from_home);
    let lately_ms = HOME_SILENT_MS.max(waited_us / 1_000);
    let of_peers_ms = now.ms_since(generation.home_of_peers());
    let comes = silent_ms < lately_ms && (waits_for_home || waits_for_peers)
        || of_peers_ms < lately_ms && waits_for_peers;
    if comes {
        return Error::new(ErrorCode::InProgress, error.detail);
    }
    if silent_ms < lately_ms || !waits_for_home {
        return error;
    }
    let home = generation.manifest.home().address;
    let text = match last {
        Time(0) => {
            format!(
                "home {home} has sent no data yet; check that it runs and that this node can \
                     reach it"
            )
        }
        _ => format!(
            "home {home} has sent no data for {} s; check that it runs and that this node can \
             reach it",
            silent_ms / 1000
        ),
    };
    Error::new(ErrorCode::HomeUnreachable, text)
}

/// How long home has been silent here, for another server, which may wait for what this one waits
/// for. Not what others told: it would go round and never grow old.
pub(super) fn home_ago_ms(
    fetcher: &Fetcher,
    generation: &Generation,
    reader: &ReadKind,
) -> Option<u64> {
    let last = fetcher.home_answered(generation);
    let tells = *reader != ReadKind::Agent && last != Time(0);
    tells.then(|| clock::now().ms_since(last))
}

/// What another server is told when its blocks could not be had: that this one is not silent, and
/// whether home may answer later. A link with too much to do is no home that is away: others who
/// asked there would only add to it.
pub(super) fn told_to_peers(fetcher: &Fetcher, generation: &Generation, error: Error) -> Error {
    let silent_ms = clock::now().ms_since(fetcher.home_answered(generation));
    let code = match error.code {
        ErrorCode::Unreachable => ErrorCode::HomeUnreachable,
        ErrorCode::DeadlineExceeded if silent_ms >= HOME_SILENT_MS => ErrorCode::HomeUnreachable,
        ErrorCode::SourceChanged
        | ErrorCode::VolumeLost
        | ErrorCode::NotFound
        | ErrorCode::HomeUnreachable
        | ErrorCode::Malformed => return error,
        ErrorCode::DeadlineExceeded | ErrorCode::Busy => ErrorCode::Busy,
        _ => ErrorCode::ServerFault,
    };
    Error::new(code, error.detail)
}

impl Generation {
    /// Takes note of when home last sent something to another server.
    fn note_home_of_peers(&self, ago_ms: Option<u64>, now: Time) {
        if let Some(ago_ms) = ago_ms {
            let at = now.0.saturating_sub(ago_ms);
            self.home_of_peers_ms.fetch_max(at, Ordering::Relaxed);
        }
    }

    fn home_of_peers(&self) -> Time {
        Time(self.home_of_peers_ms.load(Ordering::Relaxed))
    }

    /// The call that asks a peer for a run, or for nothing.
    pub(super) fn ask_for(&self, run: Option<&Run>, reader: ReadKind) -> ReadBlocks {
        ReadBlocks {
            cache: CacheRef::Cooperative(self.cooperative.clone()),
            manifest: self.manifest.digest(),
            file: run.map_or(FileIndex(0), |run| run.file),
            first: BlockIndex(run.map_or(0, |run| run.first)),
            count: run.map_or(0, |run| run.count as u32),
            kind: reader,
            must_verify: false,
        }
    }
}
