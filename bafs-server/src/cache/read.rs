//! Reads runs of blocks: local copy, else what the kind of reader permits. Knows no volume.

use std::sync::Arc;

use bafs_proto::hash::Digest;
use bafs_proto::message::Reader;
use bafs_proto::net::BoxFuture;
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use super::blocking;
use super::disk::{Local, Run};
use super::fetch::{FLIGHT_MS_MAX, Fetcher, Generation};
use super::flights::{Block, Boarding, Passenger, Pilot};
use super::from_peers::ABSENT;
use super::route::Route;
use crate::logic::blocks::CopyClass;

/// Most bytes of one request to home or to a peer.
const GROUP_BYTES_MAX: usize = 1 << 20;

/// What a read yields: the digests and the bytes of a run.
pub(crate) type Read = (Vec<Digest>, Bytes);

/// Reads a run for an agent ([`Reader::Agent`]) or a peer ([`Reader::Peer`]).
///
/// # Errors
/// `DeadlineExceeded` while the blocks are still on their way (they will be here when the caller
/// asks again), else why they could not be fetched.
pub(crate) fn read(
    fetcher: Arc<Fetcher>,
    generation: Arc<Generation>,
    run: Run,
    reader: Reader,
    deadline: Deadline,
) -> BoxFuture<'static, Result<Read>> {
    Box::pin(async move {
        let mut local = read_local(&generation, run).await?;
        if reader == Reader::Agent {
            fetcher
                .counters
                .add("cache_hit_local_bytes", present_bytes(&run, &local));
        }
        while local.digests.contains(&None) {
            if deadline.left().is_zero() {
                return Err(too_late());
            }
            let boarded = board(&fetcher, &generation, &run, &local, reader);
            let some_are_here = boarded.len() < absent(&local);
            for (n, passenger) in boarded {
                let landed = tokio::time::timeout_at(deadline.instant().into(), passenger.wait());
                let (bytes, digest) = landed.await.map_err(|_| too_late())??;
                local.bytes[run.range(n, 1)].copy_from_slice(&bytes);
                local.digests[n] = Some(digest);
            }
            if some_are_here {
                fill(&generation, &run, &mut local).await?;
            }
        }
        Ok((
            local.digests.into_iter().flatten().collect(),
            Bytes::from(local.bytes),
        ))
    })
}

/// Reads what is here of a run or on its way from home, for [`Reader::Heir`].
///
/// # Errors
/// `DeadlineExceeded`.
pub(crate) async fn read_for_heir(
    generation: Arc<Generation>,
    run: Run,
    deadline: Deadline,
) -> Result<Read> {
    // Boarding first: what is neither on its way now nor here afterwards was not on its way.
    let flying: Vec<_> = (0..run.count)
        .map(|n| generation.from_home.join_from_home(run.key(n)))
        .collect();
    let local = read_local(&generation, run).await?;
    let mut digests = Vec::with_capacity(run.count);
    let mut body = Vec::with_capacity(run.bytes());
    for (n, passenger) in flying.into_iter().enumerate() {
        if let Some(digest) = local.digests[n] {
            digests.push(digest);
            body.extend_from_slice(&local.bytes[run.range(n, 1)]);
            continue;
        }
        let landed = match passenger {
            Some(passenger) => {
                let landed = tokio::time::timeout_at(deadline.instant().into(), passenger.wait());
                landed.await.map_err(|_| too_late())?.ok()
            }
            None => None,
        };
        digests.push(landed.as_ref().map_or(ABSENT, |(_, digest)| *digest));
        body.extend_from_slice(landed.as_ref().map_or(&[][..], |(bytes, _)| bytes));
    }
    Ok((digests, Bytes::from(body)))
}

async fn read_local(generation: &Arc<Generation>, run: Run) -> Result<Local> {
    let generation = generation.clone();
    blocking(move || generation.disk.read(&run)).await
}

/// Reads what landed on disk since the last look.
async fn fill(generation: &Arc<Generation>, run: &Run, local: &mut Local) -> Result<()> {
    let fresh = read_local(generation, *run).await?;
    for (n, digest) in fresh.digests.into_iter().enumerate() {
        if local.digests[n].is_none() && digest.is_some() {
            local.bytes[run.range(n, 1)].copy_from_slice(&fresh.bytes[run.range(n, 1)]);
            local.digests[n] = digest;
        }
    }
    Ok(())
}

/// Joins or starts the flights of all blocks that are not here. A block without a passenger
/// landed on disk meanwhile.
fn board(
    fetcher: &Arc<Fetcher>,
    generation: &Arc<Generation>,
    run: &Run,
    local: &Local,
    reader: Reader,
) -> Vec<(usize, Passenger)> {
    let sharers = fetcher.sharers(generation);
    let mut passengers = Vec::new();
    let mut groups: Vec<Group> = Vec::new();
    for n in (0..run.count).filter(|n| local.digests[*n].is_none()) {
        let key = run.key(n);
        let is_here = || generation.disk.table().holds(key);
        let route = fetcher.route(generation, &sharers, key);
        let for_home = reader != Reader::Agent || fetcher.is_own(&route);
        let boarding = if for_home {
            generation.from_home.board(key, is_here)
        } else if let Some(passenger) = generation.from_home.join(key) {
            Boarding::Joined(passenger)
        } else {
            generation.from_peers.board(key, is_here)
        };
        match boarding {
            Boarding::Here => {}
            Boarding::Joined(passenger) => {
                fetcher.counters.add("cache_joined_flights", 1);
                passengers.push((n, passenger));
            }
            Boarding::Started(passenger, pilot) => {
                passengers.push((n, passenger));
                match groups
                    .last_mut()
                    .filter(|group| group.takes(n, run, &route, for_home))
                {
                    Some(group) => group.pilots.push(pilot),
                    None => {
                        groups.push(Group {
                            first: n,
                            for_home,
                            route,
                            pilots: vec![pilot],
                        });
                    }
                }
            }
        }
    }
    for group in groups {
        let part = run.part(group.first, group.pilots.len());
        // A task of its own: it goes on when the reader that started it is cancelled.
        tokio::spawn(fly(fetcher.clone(), generation.clone(), part, group));
    }
    passengers
}

/// Blocks that follow each other and are to be had in one request.
struct Group {
    first: usize,
    for_home: bool,
    route: Route,
    pilots: Vec<Pilot>,
}

impl Group {
    fn takes(&self, n: usize, run: &Run, route: &Route, for_home: bool) -> bool {
        let count = self.pilots.len() + 1;
        let same = self.for_home == for_home && self.route.is_like(route);
        self.first + count == n + 1 && run.range(self.first, count).len() <= GROUP_BYTES_MAX && same
    }
}

async fn fly(fetcher: Arc<Fetcher>, generation: Arc<Generation>, run: Run, group: Group) {
    let deadline = Deadline::after_ms(FLIGHT_MS_MAX);
    let Group {
        for_home,
        route,
        pilots,
        ..
    } = group;
    if for_home {
        fly_home(&fetcher, &generation, &run, &route, &pilots, deadline).await;
        return;
    }
    match fetcher
        .fetch_from_peers(&generation, &run, &route, deadline)
        .await
    {
        Ok(blocks) => {
            land(&pilots, &Ok(blocks.clone()));
            keep(&fetcher, &generation, &run, blocks, CopyClass::Secondary).await;
        }
        Err(_) => {
            let (generation, fetcher) = (generation.clone(), fetcher.clone());
            let read = read(fetcher, generation, run, Reader::Peer, deadline).await;
            land(&pilots, &read.map(|read| split(&run, &read)));
        }
    }
}

async fn fly_home(
    fetcher: &Arc<Fetcher>,
    generation: &Arc<Generation>,
    run: &Run,
    route: &Route,
    pilots: &[Pilot],
    deadline: Deadline,
) {
    let inherited = fetcher
        .fetch_from_predecessor(generation, run, route, deadline)
        .await;
    pilots.iter().for_each(Pilot::turn_home);
    let class = if fetcher.is_own(route) {
        CopyClass::Primary
    } else {
        CopyClass::Secondary
    };
    let mut start = 0;
    while start < run.count {
        let at_hand = inherited[start].is_some();
        let count = inherited[start..]
            .iter()
            .take_while(|block| block.is_some() == at_hand)
            .count();
        let part = run.part(start, count);
        let fetched = if at_hand {
            Ok(inherited[start..start + count]
                .iter()
                .flatten()
                .cloned()
                .collect())
        } else {
            fetcher.fetch_from_home(generation, &part, deadline).await
        };
        land(&pilots[start..start + count], &fetched);
        if let Ok(blocks) = fetched {
            keep(fetcher, generation, &part, blocks, class).await;
        }
        start += count;
    }
}

async fn keep(
    fetcher: &Arc<Fetcher>,
    generation: &Arc<Generation>,
    run: &Run,
    blocks: Vec<Block>,
    class: CopyClass,
) {
    if let Err(error) = fetcher.keep(generation, run, blocks, class).await {
        tracing::warn!(%error, "fetched blocks are not kept");
    }
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

fn absent(local: &Local) -> usize {
    local
        .digests
        .iter()
        .filter(|digest| digest.is_none())
        .count()
}

fn present_bytes(run: &Run, local: &Local) -> u64 {
    let present = local
        .digests
        .iter()
        .enumerate()
        .filter(|(_, digest)| digest.is_some());
    present.map(|(n, _)| run.length(n) as u64).sum()
}

fn too_late() -> Error {
    let text = "the blocks are still on their way; they come sooner when they are asked for again";
    Error::new(ErrorCode::DeadlineExceeded, text)
}
