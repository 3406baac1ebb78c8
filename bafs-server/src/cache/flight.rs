//! Brings some blocks of one extent: from peers, from who may have them at hand, from home. Joins
//! no flight and starts none.

use std::collections::BTreeSet;
use std::sync::Arc;

use bafs_proto::hash::Digest;
use bafs_proto::ids::ServerId;
use bafs_proto::time::Deadline;
use bafs_proto::{ErrorCode, Result};

use super::blocking;
use super::disk::Run;
use super::fetch::{Fetcher, Generation};
use super::flights::{Block, Pilot, Urgency};
use super::from_peers::Search;
use super::heirs::Heirloom;
use super::peers::PeerCache;
use super::read::{Errand, Read, read};
use super::route::View;
use crate::logic::blocks::CopyClass;

/// Most servers that are asked for blocks of an extent before home is, this one counted.
const ASKED_MAX: usize = 16;

/// Blocks of one extent on their way.
pub(super) struct ExtentFetch {
    pub(super) fetcher: Arc<Fetcher>,
    pub(super) generation: Arc<Generation>,
    pub(super) view: Arc<View>,
    pub(super) run: Run,
    pub(super) urgency: Urgency,
    pub(super) deadline: Deadline,
}

impl ExtentFetch {
    /// Brings the blocks from their primary or who stands in for it, else from home.
    pub(super) async fn fly_to_peers(&self, pilots: Vec<Pilot>, search: Search) {
        let (fetcher, generation, run) = (&self.fetcher, &self.generation, &self.run);
        let route = (&*self.view, search);
        let fetched =
            fetcher.fetch_from_peers(generation, run, route, &self.urgency, self.deadline);
        match fetched.await {
            Ok(blocks) => self.land(&pilots, run, Ok(blocks)).await,
            Err(error) if error.code != ErrorCode::NotFound => land(&pilots, &Err(error)),
            Err(_) => {
                let errand = Errand::home(self.urgency.clone());
                let (fetcher, generation) = (fetcher.clone(), generation.clone());
                let read = read(fetcher, generation, *run, errand, self.deadline).await;
                land(&pilots, &read.map(|read| split(run, &read)));
            }
        }
    }

    /// Brings the blocks from others who may have them at hand, else from home.
    pub(super) async fn fly_home(&self, pilots: Vec<Pilot>) {
        let (fetcher, generation) = (&self.fetcher, &self.generation);
        let extent = generation.extent(self.run.key(0));
        let mut pilots: Vec<_> = pilots.into_iter().map(Some).collect();
        let mut gone = vec![false; pilots.len()];
        let heirlooms = self.view.heirlooms(generation, extent).into_iter();
        let mut peers: Vec<PeerCache> = heirlooms.cloned().collect();
        let mut asked: BTreeSet<ServerId> = peers.iter().map(|peer| peer.server).collect();
        asked.insert(fetcher.server);
        loop {
            while !peers.is_empty() {
                let mut others = Vec::new();
                for peer in &peers {
                    others.extend(self.inherit(peer, &mut pilots, &mut gone).await);
                }
                others.retain(|other| asked.len() < ASKED_MAX && asked.insert(other.server));
                peers = others;
            }
            let claimants = Pilot::turn_home(pilots.iter().flatten());
            if claimants.is_empty() {
                break;
            }
            peers = fetcher.sharers(generation);
            peers.retain(|peer| claimants.contains(&peer.server));
        }
        for (start, count) in stretches(pilots.len(), |n| pilots[n].is_some()) {
            let part = self.run.part(start, count);
            let fetched = fetcher
                .fetch_from_home(generation, &part, &self.urgency)
                .await;
            // What home was asked for and did not give was not had: it may never come.
            if fetched.is_ok() {
                self.count_wanted(&part, &gone[start..start + count]);
            }
            // The flights of this part are over with it.
            let over = pilots[start..start + count].iter_mut();
            let over: Vec<_> = over.filter_map(Option::take).collect();
            self.land(&over, &part, fetched).await;
        }
    }

    /// Takes what another server has of the blocks that still have a pilot. Answers who else may
    /// have the rest.
    async fn inherit(
        &self,
        peer: &PeerCache,
        pilots: &mut [Option<Pilot>],
        gone: &mut [bool],
    ) -> Vec<PeerCache> {
        let (generation, is_own) = (&self.generation, self.is_own());
        let first = pilots.iter().position(Option::is_some);
        let last = pilots.iter().rposition(Option::is_some);
        let (Some(first), Some(last)) = (first, last) else {
            return Vec::new();
        };
        let part = self.run.part(first, last - first + 1);
        let asked = self
            .fetcher
            .ask_heir(generation, peer, &part, self.deadline);
        let (mut found, others) = asked.await;
        for (n, heirloom) in found.iter().enumerate() {
            gone[first + n] |= matches!(heirloom, Heirloom::Gone);
        }
        let is_here =
            |n: usize| matches!(found[n], Heirloom::Block(_)) && pilots[first + n].is_some();
        for (start, count) in stretches(found.len(), is_here) {
            let taken = found[start..start + count].iter_mut();
            let blocks = taken.filter_map(Heirloom::take_block).collect();
            let taken = pilots[first + start..first + start + count].iter_mut();
            let pilots: Vec<_> = taken.filter_map(Option::take).collect();
            let part = part.part(start, count);
            if is_own {
                for n in 0..count {
                    generation.wanted.insert(part.key(n));
                }
            }
            self.land(&pilots, &part, Ok(blocks)).await;
        }
        others.into_iter().map(PeerCache::from).collect()
    }

    /// Counts blocks that came from home, each once for all primaries that it has had; remembers
    /// those of which another server is the primary.
    fn count_wanted(&self, part: &Run, gone: &[bool]) {
        let (generation, is_own) = (&self.generation, self.is_own());
        let mut bytes = 0;
        for (n, gone) in gone.iter().enumerate() {
            if !is_own {
                generation.strays.insert(part.key(n));
            } else if generation.wanted.insert(part.key(n)) && !gone {
                bytes += part.length(n) as u64;
            }
        }
        generation.meter.add("cache_home_unique_bytes", bytes);
    }

    /// Whether this server was the primary of the blocks when their flight began.
    fn is_own(&self) -> bool {
        let extent = self.generation.extent(self.run.key(0));
        self.view.is_own(&self.generation, extent)
    }

    /// Gives blocks to who waits and to the disk, first to who waits; if nobody does, who asked
    /// for them wants them on disk.
    async fn land(&self, pilots: &[Pilot], run: &Run, fetched: Result<Vec<Block>>) {
        // What comes faster than the disk takes it would fill the memory: then who waits has to
        // wait for the disk, too.
        let unkept = self.fetcher.unkept(run);
        let is_urgent = self.urgency.is_urgent() && unkept.is_some();
        if is_urgent || fetched.is_err() {
            land(pilots, &fetched);
        }
        if let Ok(blocks) = fetched {
            if let Err(error) = self.keep(run, blocks.clone()).await {
                tracing::warn!(%error, "fetched blocks are not kept");
            }
            if !is_urgent {
                land(pilots, &Ok(blocks));
            }
        }
    }

    async fn keep(&self, run: &Run, blocks: Vec<Block>) -> Result<()> {
        let (generation, class) = (&self.generation, self.class());
        self.fetcher.keep(generation, run, blocks, class).await?;
        // When the peers changed meanwhile, whoever sorted the blocks did not see these.
        let class_now = self.class();
        if class_now == class {
            return Ok(());
        }
        let (generation, run) = (generation.clone(), *run);
        let classes = (0..run.count).map(move |n| (run.key(n), class_now));
        blocking(move || generation.disk.reclassify(&classes.collect::<Vec<_>>())).await?
    }

    /// Why the blocks are kept, as the peers are now.
    fn class(&self) -> CopyClass {
        let generation = &self.generation;
        let extent = generation.extent(self.run.key(0));
        let view = generation.view_now().unwrap_or_else(|| self.view.clone());
        generation.class_of(self.run.file, view.is_own(generation, extent))
    }
}

/// Places that follow each other and fulfil a condition: the first of them, and how many.
fn stretches(count: usize, is_in: impl Fn(usize) -> bool) -> Vec<(usize, usize)> {
    let places: Vec<_> = (0..count).filter(|n| is_in(*n)).collect();
    let groups = places.chunk_by(|one, next| one + 1 == *next);
    groups.map(|group| (group[0], group.len())).collect()
}

fn land(pilots: &[Pilot], fetched: &Result<Vec<Block>>) {
    for (n, pilot) in pilots.iter().enumerate() {
        pilot.land(match fetched {
            Ok(blocks) => Ok(blocks[n].clone()),
            Err(error) => Err(error.clone()),
        });
    }
}

fn split(run: &Run, (digests, bytes): &Read) -> Vec<Block> {
    let block = |(n, digest): (usize, &Digest)| (bytes.slice(run.range(n, 1)), *digest);
    digests.iter().enumerate().map(block).collect()
}
