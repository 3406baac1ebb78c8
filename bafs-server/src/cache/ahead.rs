//! Fetches blocks ahead of agents that read in order, within a bound for the whole node. How far
//! is decided in `logic/ahead.rs`.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bafs_proto::ids::BlockIndex;

use super::disk::Run;
use super::fetch::{Fetcher, Generation};
use super::read::prefetch;
use crate::logic::ahead::{Step, kept_of};
use crate::logic::blocks::CopyClass;

/// Most bytes on their way ahead of all readers of a node: they are in memory until they landed.
const AHEAD_BYTES_MAX: u64 = 64 << 20;

/// Notes that an agent reads a run, and starts to fetch what it will read next.
pub(crate) fn follow(fetcher: &Arc<Fetcher>, generation: &Arc<Generation>, run: &Run) {
    let Ok(entry) = generation.manifest.file(run.file) else {
        return;
    };
    let blocks = generation.manifest.blocks_of(entry);
    let step = Step {
        file: run.file,
        first: run.first,
        count: run.count as u64,
        blocks,
        block_bytes: run.block_bytes,
        kept_bytes: kept_bytes(generation),
    };
    let under_way = fetcher.ahead_bytes.load(Ordering::Relaxed);
    let room = AHEAD_BYTES_MAX.saturating_sub(under_way) / u64::from(run.block_bytes);
    let wanted = {
        let readers = generation.readers.lock();
        let mut readers = readers.unwrap_or_else(std::sync::PoisonError::into_inner);
        readers.note(step, room)
    };
    let Some((first, count)) = wanted else {
        return;
    };
    let last = BlockIndex(first + count - 1);
    let ahead = Run {
        first,
        count: count as usize,
        last_bytes: generation.manifest.length_of(entry, last),
        ..*run
    };
    if generation.disk.holds_all(&ahead) {
        return;
    }
    let bytes = ahead.bytes() as u64;
    fetcher.ahead_bytes.fetch_add(bytes, Ordering::Relaxed);
    let (fetcher, generation) = (fetcher.clone(), generation.clone());
    tokio::spawn(async move {
        fetch(&fetcher, &generation, ahead).await;
        fetcher.ahead_bytes.fetch_sub(bytes, Ordering::Relaxed);
    });
}

/// Most bytes ahead of a reader that are still here when it comes to them. What others are the
/// primary of has only the room that this server's own blocks leave: what is driven out before it
/// is read comes twice. Where all nodes together are too small that price is paid, as home is far.
fn kept_bytes(generation: &Generation) -> u64 {
    let all = generation.view_now().map_or(0, |view| view.room_bytes());
    let capacity = generation.capacity_bytes;
    if !(capacity + 1..=all).contains(&generation.source_bytes) {
        return u64::MAX;
    }
    let table = generation.disk.table();
    let own = [CopyClass::Primary, CopyClass::Pinned].map(|class| table.class_bytes(class));
    kept_of(capacity.saturating_sub(own.iter().sum()))
}

async fn fetch(fetcher: &Arc<Fetcher>, generation: &Arc<Generation>, run: Run) {
    for n in 0..run.count {
        if !generation.disk.table().holds(run.key(n)) {
            generation.ahead.insert(run.key(n));
        }
    }
    match prefetch(fetcher, generation, run).await {
        Ok(bytes) => generation.meter.add("cache_ahead_bytes", bytes),
        Err(error) => tracing::debug!(%error, "blocks ahead of a reader did not come"),
    }
}
