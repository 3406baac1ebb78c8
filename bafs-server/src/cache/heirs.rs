//! What servers give each other so that home is spared: blocks whose primary has changed, blocks
//! that two of them are about to read. Never goes home.

use std::sync::Arc;

use bafs_proto::Result;
use bafs_proto::buffer::Buffer;
use bafs_proto::cache::CacheMember;
use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, ServerId};
use bafs_proto::message::ReadKind;
use bafs_proto::time::Deadline;
use bytes::Bytes;

use super::blocking;
use super::disk::Run;
use super::fetch::{Fetcher, Generation};
use super::flights::Block;
use super::peers::PeerCache;
use super::read::{Read, read_local, too_late};
use crate::clock;
use crate::logic::blocks::{BlockKey, CopyClass};

/// Most others that an heir is told of.
const OTHERS_MAX: usize = 8;

/// What another server has of a block.
pub(super) enum Heirloom {
    /// The block.
    Block(Block),
    /// It was its primary and read it from home, and has it no more.
    Gone,
    /// Nothing.
    Absent,
}

impl Heirloom {
    /// The block; nothing is left of it.
    pub(super) fn take_block(&mut self) -> Option<Block> {
        match std::mem::replace(self, Self::Absent) {
            Self::Block(block) => Some(block),
            Self::Gone | Self::Absent => None,
        }
    }
}

impl Fetcher {
    /// Asks another server what it has of a run of one extent, before home is asked, and who else
    /// may have the rest.
    pub(super) async fn ask_heir(
        &self,
        generation: &Arc<Generation>,
        peer: &PeerCache,
        run: &Run,
        deadline: Deadline,
    ) -> (Vec<Heirloom>, Vec<CacheMember>) {
        let absent = (0..run.count).map(|_| Heirloom::Absent);
        let nothing = || (absent.collect(), Vec::new());
        if self.peers().is_suspect(peer.server, clock::monotonic_ms()) {
            return nothing();
        }
        let reader = ReadKind::PeerProbe(self.member(generation));
        match self.ask(generation, peer, run, reader, deadline).await {
            Ok(answer) => {
                let told = answer.blocks.into_iter().zip(answer.gone);
                let heirloom = |told: (Option<Block>, bool)| match told {
                    (Some(block), _) => Heirloom::Block(block),
                    (None, true) => Heirloom::Gone,
                    (None, false) => Heirloom::Absent,
                };
                (told.map(heirloom).collect(), answer.others)
            }
            Err(error) => {
                tracing::debug!(peer = %peer.address, %error, "an heir hears nothing");
                nothing()
            }
        }
    }

    /// Another server asks, and so shares the cache, whatever was believed.
    pub(super) fn meet(&self, generation: &Generation, member: &CacheMember) {
        let is_known = self.sharers(generation).iter().any(|peer| {
            (peer.server, &peer.address, peer.capacity_bytes)
                == (member.server, &member.address, member.capacity_bytes)
        });
        if !is_known {
            self.welcome(generation, member.clone());
        }
    }
}

/// Reads what is here of a run or on its way, for another server that is about to ask home.
///
/// # Errors
/// `DeadlineExceeded`; `ServerFault` when the system does not let this process read now.
pub(super) async fn read_for_heir(
    fetcher: &Arc<Fetcher>,
    generation: &Arc<Generation>,
    run: Run,
    heir: ServerId,
    deadline: Deadline,
) -> Result<Read> {
    // Boarding first: what is neither on its way now nor here afterwards was not on its way.
    let flying: Vec<_> = (0..run.count)
        .map(|n| {
            let flights = &generation.from_home;
            flights.join_for_heir(run.key(n), fetcher.server, heir)
        })
        .collect();
    let local = read_local(generation, run).await?;
    let mut digests = Vec::with_capacity(run.count);
    let mut body = Buffer::with_capacity(run.bytes());
    for (n, passenger) in flying.into_iter().enumerate() {
        if let Some(digest) = local.digests[n] {
            digests.push(digest);
            body.extend_from_slice(&local.bytes[run.range(n, 1)]);
            continue;
        }
        let landed = match passenger {
            Some(mut passenger) => {
                let landed = tokio::time::timeout_at(deadline.instant().into(), passenger.wait());
                landed.await.map_err(|_| too_late())?.ok()
            }
            None => None,
        };
        let absent = match generation.wanted.contains(run.key(n)) {
            true => Digest::EVICTED,
            false => Digest::ABSENT,
        };
        digests.push(landed.as_ref().map_or(absent, |(_, digest)| *digest));
        body.extend_from_slice(landed.as_ref().map_or(&[][..], |(bytes, _)| bytes));
    }
    let given =
        (0..run.count).filter(|n| ![Digest::ABSENT, Digest::EVICTED].contains(&digests[*n]));
    hand_down(fetcher, generation, &run, given.collect(), heir).await?;
    Ok((digests, body.freeze()))
}

/// Whom an heir should ask for the blocks of one extent, from `first` on, that it was not given: it
/// may know less of former times than this server.
///
/// # Errors
/// `ServerFault`.
pub(super) async fn others_for(
    fetcher: &Fetcher,
    generation: &Arc<Generation>,
    (first, digests): (BlockKey, &[Digest]),
    heir: ServerId,
) -> Result<Vec<CacheMember>> {
    let blocks = (first.block.0..).map(|block| BlockKey {
        block: BlockIndex(block),
        ..first
    });
    let lacking = blocks
        .zip(digests)
        .filter(|(_, digest)| [Digest::ABSENT, Digest::EVICTED].contains(digest));
    let lacking: Vec<BlockKey> = lacking.map(|(key, _)| key).collect();
    let Some(key) = lacking.first() else {
        return Ok(Vec::new());
    };
    let view = fetcher.view(generation).await?;
    let mut others = view.heirlooms(generation, generation.extent(*key));
    let claimants = generation.from_home.claimants(lacking.iter().copied());
    let claimants = claimants.iter().filter_map(|server| view.peer(*server));
    others.extend(claimants);
    others.retain(|peer| peer.server != heir);
    let others = others.into_iter().take(OTHERS_MAX).cloned();
    Ok(others.map(PeerCache::into_member).collect())
}

/// Another server has got blocks: if it is their primary, they are copies here from now on.
async fn hand_down(
    fetcher: &Arc<Fetcher>,
    generation: &Arc<Generation>,
    run: &Run,
    places: Vec<usize>,
    to: ServerId,
) -> Result<()> {
    let Some(first) = places.first() else {
        return Ok(());
    };
    let extent = generation.extent(run.key(*first));
    if fetcher.view(generation).await?.owner(generation, extent) != to {
        return Ok(());
    }
    let mut classes = Vec::with_capacity(places.len());
    for n in places {
        let key = run.key(n);
        if generation.extent(key) != extent {
            continue;
        }
        classes.push((key, CopyClass::Secondary));
        // What was read in place of the primary counts as wanted by it, now that it has it.
        if generation.strays.remove(key) {
            generation.wanted.insert(key);
            let bytes = run.length(n) as u64;
            generation.meter.add("cache_home_unique_bytes", bytes);
        }
    }
    let generation = generation.clone();
    blocking(move || generation.disk.reclassify(&classes)).await?
}

/// Which blocks of a run are here.
pub(super) fn look(generation: &Generation, run: &Run) -> Read {
    let table = generation.disk.table();
    let digest = |n| {
        let key = run.key(n);
        let held = table.contains(key).then(|| table.digest_of(key)).flatten();
        held.unwrap_or(Digest::ABSENT)
    };
    ((0..run.count).map(digest).collect(), Bytes::new())
}
