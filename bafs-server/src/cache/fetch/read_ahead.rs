//! Fetches blocks ahead of agents that read in order, and marks stored blocks there as used.
//! `logic/read_ahead.rs` decides how far.
//!
//! A bound for the whole node holds: all readers together have [`AHEAD_BYTES_MAX`] in flight.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bafs_proto::limits::BODY_BYTES_MAX;
use bafs_proto::message::{FetchPriority, FetchScope};
use bafs_proto::volume::ReplacementPolicy;

use super::fetcher::Fetcher;
use super::read::BlockReader;
use crate::cache::block_run::BlockRun;
use crate::cache::generation::Generation;
use crate::cache::locks::lock;
use crate::cache::membership::placement_view::PlacementView;
use crate::logic::blocks::CopyClass;
use crate::logic::read_ahead::BlockRead;

/// Most bytes in flight ahead of all readers of a node: they are in memory until they are on disk.
const AHEAD_BYTES_MAX: u64 = 64 << 20;

/// At most such a part of the bytes that may stay in a volume is fetched ahead of one reader: other
/// readers need room too, and so do the blocks that it has read.
const ROOM_DIVISOR: u64 = 16;

/// At most such a part of a volume's size is marked as used for one reader, on all nodes together.
const RETAINED_DIVISOR: u64 = 2;

/// Notes that an agent reads a run, and starts to fetch what it will read next.
pub(crate) fn follow(fetcher: &Arc<Fetcher>, generation: &Arc<Generation>, run: &BlockRun) {
    let (Ok(entry), Some(view)) = (
        generation.store.manifest.file(run.file),
        generation.membership.view_now(),
    ) else {
        return;
    };
    let blocks = generation.store.manifest.blocks_of(entry);
    let step = BlockRead {
        file: run.file,
        first: run.first,
        count: run.count as u64,
        blocks,
        block_bytes: run.block_bytes,
        read_ahead_max: room_to_stay(generation, CopyClass::Primary) / u64::from(run.block_bytes),
        retain_max: room_to_retain(generation, &view) / u64::from(run.block_bytes),
    };
    let in_flight = fetcher.read_ahead_bytes.load(Ordering::Relaxed);
    let room = AHEAD_BYTES_MAX.saturating_sub(in_flight) / u64::from(run.block_bytes);
    let wanted = {
        let mut readers = lock(&generation.inflight.sequential_readers);
        readers.note_read(step, room)
    };
    let run_of = |(first, count)| generation.store.run(run.file, first, count);
    if let Some(Ok(retained)) = wanted.retain.map(run_of) {
        retain(fetcher, generation, &view, &retained);
    }
    if let Some(Ok(ahead)) = wanted.fetch.map(run_of) {
        fetch(fetcher, generation, &view, ahead);
    }
}

/// Fetches the absent blocks of a run that will stay until the reader comes.
fn fetch(
    fetcher: &Arc<Fetcher>,
    generation: &Arc<Generation>,
    view: &PlacementView,
    ahead: BlockRun,
) {
    if generation.store.disk.has_all(&ahead) {
        return;
    }
    let places = find_staying(generation, view, &ahead);
    // Another reader may have had some of them fetched ahead already.
    let mut fresh_bytes = 0;
    for n in &places {
        let key = ahead.key(*n);
        if !generation.store.disk.table().contains(key)
            && generation.statistics.prefetched_blocks.insert(key)
        {
            fresh_bytes += ahead.length(*n) as u64;
        }
    }
    let bytes = ahead.bytes() as u64;
    fetcher.read_ahead_bytes.fetch_add(bytes, Ordering::Relaxed);
    let (fetcher, generation) = (fetcher.clone(), generation.clone());
    tokio::spawn(async move {
        let reader = BlockReader::new(
            &fetcher,
            &generation,
            FetchScope::AnyNode,
            FetchPriority::Background,
        );
        match reader.prefetch(ahead, &places).await {
            Ok(_) => generation
                .statistics
                .add("cache_read_ahead_bytes", fresh_bytes),
            Err(error) => tracing::debug!(%error, "blocks ahead of a reader did not come"),
        }
        fetcher.read_ahead_bytes.fetch_sub(bytes, Ordering::Relaxed);
    });
}

/// Marks the blocks of a run that are here or at their primary nodes as used now. Otherwise the
/// blocks that the reader brings meanwhile would drive them out just before it comes.
fn retain(
    fetcher: &Arc<Fetcher>,
    generation: &Arc<Generation>,
    view: &PlacementView,
    ahead: &BlockRun,
) {
    generation.store.disk.touch(ahead);
    let extent = |n: usize| view.extent(ahead.key(n));
    let all: Vec<_> = (0..ahead.count).collect();
    let mut lacking = BTreeSet::new();
    for places in all.chunk_by(|one, next| extent(*one) == extent(*next)) {
        let part = ahead.part(places[0], places.len());
        if !generation.store.disk.has_all(&part) {
            lacking.insert(view.owner(extent(places[0])));
        }
    }
    // One call for each of them and all blocks, as hundreds of calls would come too late. Of the
    // other blocks they have none, or copies.
    let at_once = (BODY_BYTES_MAX / ahead.block_bytes).max(1) as usize;
    for places in all.chunks(at_once) {
        let part = ahead.part(places[0], places.len());
        for peer in lacking.iter().filter_map(|owner| view.peer(*owner)) {
            fetcher.touch_at_peer(generation, peer, &part);
        }
    }
}

/// The places of a run whose blocks will still be here when their reader comes.
fn find_staying(generation: &Generation, view: &PlacementView, run: &BlockRun) -> Vec<usize> {
    let extent = |n: usize| view.extent(run.key(n));
    let all: Vec<_> = (0..run.count).collect();
    let (mut staying, mut promised) = (Vec::with_capacity(run.count), 0);
    for places in all.chunk_by(|one, next| extent(*one) == extent(*next)) {
        let is_own = view.is_own(extent(places[0]));
        let class = generation.store.class_of(run.file, is_own);
        let bytes = run.range(places[0], places.len()).len() as u64;
        if promised + bytes <= room_to_stay(generation, class) {
            promised += bytes;
            staying.extend(places);
        }
    }
    staying
}

/// Bytes of blocks of a class that may come ahead of one reader. More would leave before the reader
/// comes, and come twice.
fn room_to_stay(generation: &Generation, class: CopyClass) -> u64 {
    generation.store.disk.table().retainable_bytes(class) / ROOM_DIVISOR
}

/// Bytes ahead of one reader that are marked as used: far less than fits, as others read elsewhere.
/// With MRU the first blocks stay by themselves, and where all blocks find room none leaves.
fn room_to_retain(generation: &Generation, view: &PlacementView) -> u64 {
    let table = generation.store.disk.table();
    match table.replacement() {
        ReplacementPolicy::Lru if view.lacks_room() => {
            table.retainable_bytes(CopyClass::Primary) / RETAINED_DIVISOR
        }
        _ => 0,
    }
}
