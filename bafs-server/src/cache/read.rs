//! Reads runs of blocks: local copy, else what the kind of reader permits. Knows no volume.

use std::sync::Arc;

use bafs_proto::hash::Digest;
use bafs_proto::message::ReadKind;
use bafs_proto::net::BoxFuture;
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use super::blocking;
use super::disk::{Local, Run};
use super::fetch::{FLIGHT_MS_MAX, Fetcher, Generation};
use super::flight::ExtentFetch;
use super::flights::{Block, Boarding, Passenger, Pilot, Urgency};
use super::from_peers::Search;
use crate::clock;
use crate::logic::placement::Extent;

/// Most bytes of one request to home or to a peer.
const GROUP_BYTES_MAX: usize = 1 << 20;

/// What a read yields: the digests and the bytes of a run.
pub(crate) type Read = (Vec<Digest>, Bytes);

/// For whom blocks are fetched.
#[derive(Debug, Clone)]
pub(crate) struct Errand {
    reach: Reach,
    urgency: Urgency,
}

/// How far a fetch may go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// To the primary, to others, home.
    Anywhere,
    /// To the primary, else home.
    Primary,
    /// Home, after those who may have the blocks at hand.
    Home,
}

impl Errand {
    /// The errand of a reader that waits, or reads ahead for others.
    pub(crate) fn of(reader: &ReadKind) -> Self {
        let reach = match reader {
            ReadKind::Agent => Reach::Anywhere,
            ReadKind::Relay => Reach::Primary,
            ReadKind::Peer
            | ReadKind::PeerProbe(_)
            | ReadKind::ReadAhead
            | ReadKind::Expedite
            | ReadKind::CheckPresence
            | ReadKind::Touch => Reach::Home,
        };
        Self {
            reach,
            urgency: Urgency::new(*reader != ReadKind::ReadAhead),
        }
    }

    /// To home, after those who may have the blocks at hand.
    pub(super) fn home(urgency: Urgency) -> Self {
        let reach = Reach::Home;
        Self { reach, urgency }
    }

    /// Work for which nobody waits yet.
    pub(crate) fn in_background() -> Self {
        Self {
            reach: Reach::Anywhere,
            urgency: Urgency::new(false),
        }
    }
}

/// Reads a run for anyone but an heir.
///
/// # Errors
/// `DeadlineExceeded` while the blocks are still on their way (they will be here when the caller
/// asks again), else why they could not be fetched.
pub(crate) fn read(
    fetcher: Arc<Fetcher>,
    generation: Arc<Generation>,
    run: Run,
    errand: Errand,
    deadline: Deadline,
) -> BoxFuture<'static, Result<Read>> {
    Box::pin(async move {
        let local = read_local(&generation, run).await?;
        let for_agent = errand.reach == Reach::Anywhere;
        if for_agent {
            count_hits(&generation, &run, |n| local.digests[n].is_some());
        }
        let began = clock::monotonic_us();
        let complete = local.digests.iter().all(Option::is_some);
        let read = complete_run(&fetcher, &generation, run, (errand, local), deadline).await?;
        if !complete && for_agent {
            note_wait(&generation, began);
        }
        Ok(read)
    })
}

/// Reads a run of which some blocks, given by their places, are at hand, wherever else they are.
///
/// # Errors
/// As of [`read`].
pub(super) async fn read_beside(
    fetcher: &Arc<Fetcher>,
    generation: &Arc<Generation>,
    run: Run,
    (errand, at_hand): (Errand, Vec<(usize, Block)>),
    deadline: Deadline,
) -> Result<Read> {
    let mut local = read_local(generation, run).await?;
    for (n, (bytes, digest)) in at_hand {
        local.bytes[run.range(n, 1)].copy_from_slice(&bytes);
        local.digests[n] = Some(digest);
    }
    complete_run(fetcher, generation, run, (errand, local), deadline).await
}

async fn complete_run(
    fetcher: &Arc<Fetcher>,
    generation: &Arc<Generation>,
    run: Run,
    (errand, mut local): (Errand, Local),
    deadline: Deadline,
) -> Result<Read> {
    while local.digests.contains(&None) {
        if deadline.remaining().is_zero() {
            return Err(too_late());
        }
        let absent: Vec<_> = (0..run.count)
            .filter(|n| local.digests[*n].is_none())
            .collect();
        let landed = fly(fetcher, generation, &run, (&errand, &absent), deadline).await?;
        let some_are_here = landed.len() < absent.len();
        for (n, _, (bytes, digest)) in landed {
            local.bytes[run.range(n, 1)].copy_from_slice(&bytes);
            local.digests[n] = Some(digest);
        }
        if some_are_here {
            fill(generation, &run, &mut local).await?;
        }
    }
    Ok(local.whole())
}

/// Fetches what is not here of the blocks at these places of a run, before anyone asks for it.
/// Returns the bytes fetched.
///
/// # Errors
/// Why some could not be fetched.
pub(crate) async fn prefetch(
    fetcher: &Arc<Fetcher>,
    generation: &Arc<Generation>,
    run: Run,
    places: &[usize],
) -> Result<u64> {
    let errand = Errand::in_background();
    let boarded = board(fetcher, generation, &run, places, &errand).await?;
    let mut bytes = 0;
    for (n, mut passenger) in boarded {
        passenger.wait().await?;
        bytes += run.length(n) as u64;
    }
    Ok(bytes)
}

/// Has those blocks of a run that are on their way come as soon as they can.
pub(crate) fn hurry(generation: &Generation, run: &Run) {
    let urgency = Urgency::new(true);
    for n in 0..run.count {
        drop(generation.from_home.join(run.key(n), &urgency));
    }
}

pub(super) async fn read_local(generation: &Arc<Generation>, run: Run) -> Result<Local> {
    if !generation.disk.holds_some(&run) {
        return Ok(Local::nothing(&run));
    }
    let generation = generation.clone();
    blocking(move || generation.disk.read(&run)).await?
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

/// An agent has waited for blocks.
pub(super) fn note_wait(generation: &Generation, began: u64) {
    let waited = clock::monotonic_us().saturating_sub(began);
    generation.meter.add("cache_wait_us", waited);
}

/// As [`board`], and waits until all have landed.
///
/// # Errors
/// `DeadlineExceeded` while they are still on their way, else why one could not be fetched.
pub(super) async fn fly(
    fetcher: &Arc<Fetcher>,
    generation: &Arc<Generation>,
    run: &Run,
    (errand, places): (&Errand, &[usize]),
    deadline: Deadline,
) -> Result<Vec<(usize, Passenger, Block)>> {
    let until = deadline.instant().into();
    let boarding = board(fetcher, generation, run, places, errand);
    let boarded = tokio::time::timeout_at(until, boarding);
    let boarded = boarded.await.map_err(|_| too_late())??;
    let mut landed = Vec::with_capacity(boarded.len());
    for (n, mut passenger) in boarded {
        let block = tokio::time::timeout_at(until, passenger.wait());
        let block = block.await.map_err(|_| too_late())??;
        landed.push((n, passenger, block));
    }
    Ok(landed)
}

/// Joins or starts the flights of the blocks at these places of a run. A block without a passenger
/// landed on disk meanwhile.
async fn board(
    fetcher: &Arc<Fetcher>,
    generation: &Arc<Generation>,
    run: &Run,
    places: &[usize],
    errand: &Errand,
) -> Result<Vec<(usize, Passenger)>> {
    if !generation.cooperative.is_empty() {
        fetcher.until_settled().await;
    }
    let view = fetcher.view(generation).await?;
    let mut passengers = Vec::new();
    let mut groups: Vec<Group> = Vec::new();
    let mut last: Option<(Extent, bool)> = None;
    for &n in places {
        let key = run.key(n);
        let extent = generation.extent(key);
        let is_own = match last {
            Some((known, is_own)) if known == extent => is_own,
            _ => view.is_own(generation, extent),
        };
        last = Some((extent, is_own));
        let reach = if is_own { Reach::Home } else { errand.reach };
        match take_seat(generation, run, n, reach, errand) {
            Boarding::Here => {}
            Boarding::Joined(passenger) => {
                generation.meter.add("cache_joined_fetches", 1);
                passengers.push((n, passenger));
            }
            Boarding::Started(passenger, pilot) => {
                passengers.push((n, passenger));
                match groups
                    .last_mut()
                    .filter(|group| group.takes(n, run, extent, reach))
                {
                    Some(group) => group.pilots.push(pilot),
                    None => groups.push(Group {
                        first: n,
                        reach,
                        extent,
                        pilots: vec![pilot],
                    }),
                }
            }
        }
    }
    for group in groups {
        let part = run.part(group.first, group.pilots.len());
        let flight = ExtentFetch {
            fetcher: fetcher.clone(),
            generation: generation.clone(),
            view: view.clone(),
            run: part,
            urgency: errand.urgency.clone(),
            deadline: Deadline::after_ms(FLIGHT_MS_MAX),
        };
        // A task of its own: it goes on when the reader that started it is cancelled.
        tokio::spawn(async move {
            match group.reach {
                Reach::Home => flight.fly_home(group.pilots).await,
                Reach::Primary => flight.fly_to_peers(group.pilots, Search::PrimaryOnly).await,
                Reach::Anywhere => flight.fly_to_peers(group.pilots, Search::Wide).await,
            }
        });
    }
    Ok(passengers)
}

/// Joins a block's flight of the right kind, or starts it.
fn take_seat(
    generation: &Generation,
    run: &Run,
    n: usize,
    reach: Reach,
    errand: &Errand,
) -> Boarding {
    let key = run.key(n);
    let urgency = &errand.urgency;
    let is_here = || generation.disk.table().contains(key);
    if reach == Reach::Home {
        return generation.from_home.board(key, urgency, is_here);
    }
    if let Some(passenger) = generation.from_home.join(key, urgency) {
        return Boarding::Joined(passenger);
    }
    if reach == Reach::Primary {
        return generation.detours.board(key, urgency, is_here);
    }
    match generation.detours.join(key, urgency) {
        Some(passenger) => Boarding::Joined(passenger),
        None => generation.from_peers.board(key, urgency, is_here),
    }
}

/// Blocks of one extent that follow each other and are to be had in one request.
struct Group {
    first: usize,
    reach: Reach,
    extent: Extent,
    pilots: Vec<Pilot>,
}

impl Group {
    fn takes(&self, n: usize, run: &Run, extent: Extent, reach: Reach) -> bool {
        let count = self.pilots.len() + 1;
        let same = self.reach == reach && self.extent == extent;
        self.first + count == n + 1 && run.range(self.first, count).len() <= GROUP_BYTES_MAX && same
    }
}

/// Counts what an agent found here, and what of it was fetched ahead of it.
pub(super) fn count_hits(generation: &Generation, run: &Run, is_here: impl Fn(usize) -> bool) {
    let (mut blocks, mut bytes, mut ahead_bytes) = (0, 0, 0);
    for n in 0..run.count {
        let length = run.length(n) as u64;
        if generation.ahead.remove(run.key(n)) {
            ahead_bytes += length;
        }
        if is_here(n) {
            (blocks, bytes) = (blocks + 1, bytes + length);
        }
    }
    generation.meter.add("cache_hits_local", blocks);
    generation.meter.add("cache_hit_local_bytes", bytes);
    if ahead_bytes > 0 {
        generation
            .meter
            .add("cache_read_ahead_used_bytes", ahead_bytes);
    }
}

pub(super) fn too_late() -> Error {
    let text = "the fetch of the blocks from home or a peer is still in progress; retry";
    Error::new(ErrorCode::DeadlineExceeded, text)
}
