//! Warming: a server fetches the extents of which it is the primary node before anybody reads them.
//! Urgent reads come first. The pins decide which blocks stay.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bafs_proto::cache::{WarmingState, WarmingStatus};
use bafs_proto::ids::FileIndex;
use bafs_proto::message::{FetchPriority, FetchScope, SourceEntry, SourceKind};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use tokio::task::JoinSet;

use super::block_run::BlockRun;
use super::errors::run_blocking;
use super::fetch::fetcher::Fetcher;
use super::fetch::read::BlockReader;
use super::generation::Generation;
use super::membership::placement_view::PlacementView;
use super::store::pins::is_below;
use super::volume::CacheVolume;
use crate::cache::locks::lock;
use crate::logic::blocks::CopyClass;

/// Most extents in flight at once.
const EXTENTS_MAX: usize = 4;

/// Longest time for what home says of the blocks of peers, in milliseconds.
const DIGESTS_MS_MAX: u64 = 600_000;

/// An unreachable home is asked again so often, with growing pauses.
const TRIES_MAX: u32 = 20;
const PAUSE_MS_MIN: u64 = 200;
const PAUSE_MS_MAX: u64 = 30_000;

/// The warming of a volume. A request that comes while it runs is added to it.
#[derive(Debug, Default)]
pub(crate) struct Warmer(Mutex<WarmerState>);

#[derive(Debug, Default)]
struct WarmerState {
    warming: Option<WarmingStatus>,
    /// The paths of the present warming, or of the last.
    paths: BTreeSet<String>,
    turn: u64,
}

impl Warmer {
    /// The state of the last warming.
    pub(crate) fn state(&self) -> Option<WarmingStatus> {
        self.lock().warming.clone()
    }

    fn lock(&self) -> MutexGuard<'_, WarmerState> {
        lock(&self.0)
    }

    /// Begins a turn for these paths and those that are being warmed, unless that changes nothing.
    fn begin(&self, paths: Vec<String>) -> Option<(u64, Vec<String>)> {
        let mut state = self.lock();
        let is_running = |w: &WarmingStatus| w.state == WarmingState::Running;
        let goes_on = state.warming.as_ref().is_some_and(is_running);
        let running = state.paths.iter().filter(|_| goes_on);
        let wanted: BTreeSet<_> = paths.into_iter().chain(running.cloned()).collect();
        let is_part = |path: &String| wanted.iter().any(|top| top != path && is_below(path, top));
        let wanted: BTreeSet<_> = wanted.iter().filter(|p| !is_part(p)).cloned().collect();
        if goes_on && wanted == state.paths {
            return None;
        }
        let paths: Vec<_> = wanted.iter().cloned().collect();
        state.warming = Some(WarmingStatus {
            path: paths.join(", "),
            state: WarmingState::Running,
            total_bytes: 0,
            present_bytes: 0,
        });
        state.paths = wanted;
        state.turn += 1;
        Some((state.turn, paths))
    }

    /// Changes the state of a turn, if it is the present one. Tells whether it is.
    fn note(&self, turn: u64, change: impl FnOnce(&mut WarmingStatus)) -> bool {
        let mut state = self.lock();
        let is_present = state.turn == turn;
        if let Some(warming) = state.warming.as_mut().filter(|_| is_present) {
            change(warming);
        }
        is_present
    }
}

/// Warms the files at and below some paths, together with those of a running warming.
pub(super) fn start(fetcher: Arc<Fetcher>, volume: Arc<CacheVolume>, paths: Vec<String>) {
    let Some((turn, paths)) = volume.warmer().begin(paths) else {
        return;
    };
    tokio::spawn(async move {
        let state = match warm(&fetcher, &volume, &paths, turn).await {
            Ok(state) => state,
            Err(error) => WarmingState::Failed(error),
        };
        volume.warmer().note(turn, |warming| warming.state = state);
    });
}

async fn warm(
    fetcher: &Arc<Fetcher>,
    volume: &Arc<CacheVolume>,
    paths: &[String],
    turn: u64,
) -> Result<WarmingState> {
    fetcher.wait_for_peers().await;
    loop {
        let generation = volume.generation();
        let view = fetcher.view(&generation).await?;
        let plan = {
            let (generation, view, paths) = (generation.clone(), view.clone(), paths.to_vec());
            run_blocking(move || plan(&generation, &view, &paths)).await?
        };
        let wanted_bytes = plan.iter().map(|run| run.bytes() as u64).sum();
        volume.warmer().note(turn, |warming| {
            (warming.total_bytes, warming.present_bytes) = (wanted_bytes, 0);
        });
        let state = fetch(fetcher, volume, &generation, &plan, turn).await?;
        let state = {
            let generation = generation.clone();
            let present_bytes = run_blocking(move || count_bytes_here(&generation, &plan)).await?;
            volume
                .warmer()
                .note(turn, |warming| warming.present_bytes = present_bytes);
            match state {
                // Blocks were evicted, or came after all.
                WarmingState::Done | WarmingState::Full if present_bytes < wanted_bytes => {
                    WarmingState::Full
                }
                WarmingState::Full => WarmingState::Done,
                state => state,
            }
        };
        if let Err(error) = learn_digests(fetcher, &generation, paths).await {
            tracing::warn!(%error, "peers are of no use while home is away: it says no digests");
        }
        let same = Arc::ptr_eq(&generation, &volume.generation());
        let over = generation.store.disk.is_retired() && same;
        let settled = same && Arc::ptr_eq(&view, &fetcher.view(&generation).await?);
        if over || settled || !volume.warmer().note(turn, |_| {}) {
            return Ok(state);
        }
        // The source or its members changed meanwhile, and so did this server's share.
    }
}

/// Learns what home says of what is at and below the paths: peers have most of it.
async fn learn_digests(
    fetcher: &Arc<Fetcher>,
    generation: &Generation,
    paths: &[String],
) -> Result<()> {
    if fetcher.members(generation).is_empty() {
        return Ok(());
    }
    let is_wanted = |entry: &SourceEntry| {
        entry.kind == SourceKind::File && paths.iter().any(|path| is_below(&entry.path, path))
    };
    let entries = (0..)
        .map(FileIndex)
        .zip(generation.store.manifest.entries());
    let files = entries.filter(|(_, entry)| is_wanted(entry));
    let files: Vec<_> = files.map(|(file, _)| file).collect();
    let deadline = Deadline::after_ms(DIGESTS_MS_MAX);
    fetcher.learn_digests_of(generation, &files, deadline).await
}

/// This server's share of what is at and below the paths, extent by extent.
fn plan(generation: &Generation, view: &PlacementView, paths: &[String]) -> Vec<BlockRun> {
    let manifest = &generation.store.manifest;
    let extent_blocks = generation.membership.extent_blocks();
    let mut plan = Vec::new();
    for (file, entry) in (0..).map(FileIndex).zip(manifest.entries()) {
        let wanted =
            entry.kind == SourceKind::File && paths.iter().any(|path| is_below(&entry.path, path));
        if !wanted {
            continue;
        }
        let blocks = manifest.blocks_of(entry);
        for first in (0..blocks).step_by(extent_blocks as usize) {
            let count = extent_blocks.min(blocks - first);
            if let Ok(run) = generation.store.run(file, first, count)
                && view.is_own(view.extent(run.key(0)))
            {
                plan.push(run);
            }
        }
    }
    plan
}

async fn fetch(
    fetcher: &Arc<Fetcher>,
    volume: &Arc<CacheVolume>,
    generation: &Arc<Generation>,
    plan: &[BlockRun],
    turn: u64,
) -> Result<WarmingState> {
    let mut state = WarmingState::Done;
    let mut refused = None;
    let evicted_before = count_full_disk_evictions(generation);
    let mut running: JoinSet<(u64, Result<u64>)> = JoinSet::new();
    let mut plan = plan.iter().copied();
    let mut next = plan.next();
    // Room that running fetches may still take.
    let mut promised: u64 = 0;
    loop {
        while running.len() < EXTENTS_MAX
            && state == WarmingState::Done
            && let Some(run) = next
        {
            if generation.store.disk.is_retired() || !volume.warmer().note(turn, |_| {}) {
                return Ok(state);
            }
            // On a full disk one block would drive out the other.
            let is_disk_full = count_full_disk_evictions(generation) > evicted_before;
            if !is_disk_full && has_room(generation, &run, promised) {
                let (fetcher, generation) = (fetcher.clone(), generation.clone());
                let bytes = run.bytes() as u64;
                promised += bytes;
                running
                    .spawn(async move { (bytes, warm_extent(&fetcher, &generation, run).await) });
                next = plan.next();
            } else if running.is_empty() {
                state = WarmingState::Full;
            } else {
                break;
            }
        }
        let Some(done) = running.join_next().await else {
            return Ok(refused.map_or(state, WarmingState::Failed));
        };
        let broken = |e| Error::new(ErrorCode::ServerFault, format!("warming broke off: {e}"));
        let (bytes, present) = done.map_err(broken)?;
        promised -= bytes;
        let present = match present {
            // A file that home may not read stops no other file; its error comes at the end.
            Err(error) if error.code == ErrorCode::RightMissing => {
                refused.get_or_insert(error);
                continue;
            }
            present => present?,
        };
        if present < bytes {
            state = WarmingState::Full;
        }
        volume
            .warmer()
            .note(turn, |warming| warming.present_bytes += present);
    }
}

/// Number of blocks that were evicted because the disk was full.
fn count_full_disk_evictions(generation: &Generation) -> u64 {
    let counters = generation.statistics.counters().snapshot();
    let evicted = counters.get("cache_evicted_for_full_disk");
    evicted.copied().unwrap_or(0)
}

/// Bytes of the runs that are here.
fn count_bytes_here(generation: &Generation, plan: &[BlockRun]) -> u64 {
    let table = generation.store.disk.table();
    let blocks = plan
        .iter()
        .flat_map(|run| (0..run.count).map(move |n| (run, n)));
    let here = blocks.filter(|(run, n)| table.contains(run.key(*n)));
    here.map(|(run, n)| run.length(n) as u64).sum()
}

/// Whether an extent is here or finds room. Pinned blocks may drive out others; all others drive
/// out no primary block. `promised` is the room that running fetches may still take, in bytes.
fn has_room(generation: &Generation, run: &BlockRun, promised: u64) -> bool {
    let class = match generation.store.class_of(run.file, true) {
        CopyClass::Pinned => CopyClass::Pinned,
        CopyClass::Primary | CopyClass::Secondary => CopyClass::Secondary,
    };
    generation.store.disk.has_all(run)
        || generation.store.disk.table().attainable_bytes(class) >= promised + run.bytes() as u64
}

/// Fetches one extent and puts it into its class. Returns the bytes of it that are here.
async fn warm_extent(
    fetcher: &Arc<Fetcher>,
    generation: &Arc<Generation>,
    run: BlockRun,
) -> Result<u64> {
    let (mut tries, mut pause_ms) = (1, PAUSE_MS_MIN);
    let places: Vec<_> = (0..run.count).collect();
    let background = FetchPriority::Background;
    let reader = BlockReader::new(fetcher, generation, FetchScope::AnyNode, background);
    let fetched_bytes = loop {
        let error = match reader.prefetch(run, &places).await {
            Ok(bytes) => break bytes,
            Err(error) => error,
        };
        let is_last = tries == TRIES_MAX || generation.store.disk.is_retired();
        if is_last || !error.is_transient() {
            return Err(error);
        }
        tracing::warn!(%error, tries, "warming is tried again");
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        (tries, pause_ms) = (tries + 1, (pause_ms * 2).min(PAUSE_MS_MAX));
    };
    generation
        .statistics
        .add("cache_warmed_bytes", fetched_bytes);
    let class = generation.store.class_of(run.file, true);
    let classes = run.keys().map(|key| (key, class)).collect();
    generation.store.reclassify(classes).await?;
    Ok(count_bytes_here(generation, &[run]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warming_includes_paths_requested_while_it_runs() {
        let warmer = Warmer::default();
        let begin = |path: &str| warmer.begin(vec![path.to_owned()]);
        let owned = |paths: &[&str]| paths.iter().map(|p| (*p).to_owned()).collect::<Vec<_>>();
        assert_eq!(begin("a"), Some((1, owned(&["a"]))));
        assert_eq!(begin("a"), None, "it is under way");
        assert_eq!(begin("b/c"), Some((2, owned(&["a", "b/c"]))));
        assert!(!warmer.note(1, |_| {}), "the second turn warms both");
        assert_eq!(begin("b"), Some((3, owned(&["a", "b"]))));
        assert_eq!(begin("b/d"), None);
        assert_eq!(warmer.state().map(|w| w.path).as_deref(), Some("a, b"));
        assert!(warmer.note(3, |warming| warming.state = WarmingState::Done));
        assert_eq!(begin("b"), Some((4, owned(&["b"]))), "what is over is over");
    }
}
