//! Fetches blocks ahead of agents that read in order, within a bound for the whole node, and has
//! those stay that are there. How far is decided in `logic/ahead.rs`.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bafs_proto::ids::BlockIndex;
use bafs_proto::limits::BODY_BYTES_MAX;
use bafs_proto::volume::ReplacementPolicy;

use super::disk::Run;
use super::fetch::{Fetcher, Generation};
use super::read::prefetch;
use super::route::View;
use crate::logic::blocks::CopyClass;
use crate::logic::read_ahead::BlockRead;

/// Most bytes on their way ahead of all readers of a node: they are in memory until they landed.
const AHEAD_BYTES_MAX: u64 = 64 << 20;

/// At most such a part of what may stay in a volume is fetched ahead of one reader: others bring
/// blocks meanwhile, and what it has read is still there too.
const SHARE_OF_ROOM: u64 = 16;

/// At most such a part of a volume's size is told to stay, on all nodes together, for one reader.
const SHARE_TO_KEEP: u64 = 2;

/// Notes that an agent reads a run, and starts to fetch what it will read next.
pub(crate) fn follow(fetcher: &Arc<Fetcher>, generation: &Arc<Generation>, run: &Run) {
    let (Ok(entry), Some(view)) = (generation.manifest.file(run.file), generation.view_now())
    else {
        return;
    };
    let blocks = generation.manifest.blocks_of(entry);
    let step = BlockRead {
        file: run.file,
        first: run.first,
        count: run.count as u64,
        blocks,
        block_bytes: run.block_bytes,
        read_ahead_max: room_to_stay(generation, CopyClass::Primary) / u64::from(run.block_bytes),
        retain_max: room_to_keep(generation, &view) / u64::from(run.block_bytes),
    };
    let under_way = fetcher.ahead_bytes.load(Ordering::Relaxed);
    let room = AHEAD_BYTES_MAX.saturating_sub(under_way) / u64::from(run.block_bytes);
    let wanted = {
        let readers = generation.readers.lock();
        let mut readers = readers.unwrap_or_else(std::sync::PoisonError::into_inner);
        readers.note_read(step, room)
    };
    let run_of = |(first, count): (u64, u64)| Run {
        first,
        count: count as usize,
        last_bytes: (generation.manifest).length_of(entry, BlockIndex(first + count - 1)),
        ..*run
    };
    if let Some(kept) = wanted.retain {
        keep(fetcher, generation, &view, &run_of(kept));
    }
    if let Some(ahead) = wanted.fetch {
        fetch(fetcher, generation, &view, run_of(ahead));
    }
}

/// Fetches what is not here of a run and stays until its reader comes.
fn fetch(fetcher: &Arc<Fetcher>, generation: &Arc<Generation>, view: &View, ahead: Run) {
    if generation.disk.holds_all(&ahead) {
        return;
    }
    let places = staying(generation, view, &ahead);
    // Blocks that another reader has had fetched ahead already are not fetched once more.
    let mut fresh_bytes = 0;
    for n in &places {
        let key = ahead.key(*n);
        if !generation.disk.table().contains(key) && generation.ahead.insert(key) {
            fresh_bytes += ahead.length(*n) as u64;
        }
    }
    let bytes = ahead.bytes() as u64;
    fetcher.ahead_bytes.fetch_add(bytes, Ordering::Relaxed);
    let (fetcher, generation) = (fetcher.clone(), generation.clone());
    tokio::spawn(async move {
        match prefetch(&fetcher, &generation, ahead, &places).await {
            Ok(_) => generation.meter.add("cache_read_ahead_bytes", fresh_bytes),
            Err(error) => tracing::debug!(%error, "blocks ahead of a reader did not come"),
        }
        fetcher.ahead_bytes.fetch_sub(bytes, Ordering::Relaxed);
    });
}

/// Has those blocks of a run that are here or at their primaries stay until their reader comes, as
/// if they were used now: or what it brings meanwhile would drive them out just before.
fn keep(fetcher: &Arc<Fetcher>, generation: &Arc<Generation>, view: &View, ahead: &Run) {
    generation.disk.use_all(ahead);
    let extent = |n: usize| generation.extent(ahead.key(n));
    let all: Vec<_> = (0..ahead.count).collect();
    let mut lacking = BTreeSet::new();
    for places in all.chunk_by(|one, next| extent(*one) == extent(*next)) {
        let part = ahead.part(places[0], places.len());
        if !generation.disk.holds_all(&part) {
            lacking.insert(view.owner(generation, extent(places[0])));
        }
    }
    // One call for each, or hundreds would come too late: of the other blocks they have none, or
    // copies.
    let at_once = (BODY_BYTES_MAX / ahead.block_bytes).max(1) as usize;
    for places in all.chunks(at_once) {
        let part = ahead.part(places[0], places.len());
        for peer in lacking.iter().filter_map(|owner| view.peer(*owner)) {
            fetcher.say_soon(generation, peer, &part);
        }
    }
}

/// The places of a run whose blocks will still be here when their reader comes.
fn staying(generation: &Generation, view: &View, run: &Run) -> Vec<usize> {
    let extent = |n: usize| generation.extent(run.key(n));
    let all: Vec<_> = (0..run.count).collect();
    let (mut staying, mut promised) = (Vec::with_capacity(run.count), 0);
    for places in all.chunk_by(|one, next| extent(*one) == extent(*next)) {
        let is_own = view.is_own(generation, extent(places[0]));
        let class = generation.class_of(run.file, is_own);
        let bytes = run.range(places[0], places.len()).len() as u64;
        if promised + bytes <= room_to_stay(generation, class) {
            promised += bytes;
            staying.extend(places);
        }
    }
    staying
}

/// Bytes of blocks of a class that may come ahead of one reader: what does not stay until then
/// would come twice.
fn room_to_stay(generation: &Generation, class: CopyClass) -> u64 {
    generation.disk.table().retainable_bytes(class) / SHARE_OF_ROOM
}

/// Bytes ahead of one reader that are to stay where they are: far less than fits, as others read
/// elsewhere. With MRU what was there first stays by itself, and where all find room nothing goes.
fn room_to_keep(generation: &Generation, view: &View) -> u64 {
    let table = generation.disk.table();
    match table.replacement() {
        ReplacementPolicy::Lru if view.lacks_room(generation) => {
            table.retainable_bytes(CopyClass::Primary) / SHARE_TO_KEEP
        }
        _ => 0,
    }
}
