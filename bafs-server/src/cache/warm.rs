//! Warming: a server fetches its own share of a cache volume before anyone asks for it, behind all
//! that somebody waits for. Which blocks stay is decided by the pins.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bafs_proto::cache::{Pinning, WarmCache, WarmingState, WarmingStatus};
use bafs_proto::ids::{BlockIndex, FileIndex};
use bafs_proto::message::SourceKind;
use bafs_proto::{Error, ErrorCode, Result};
use tokio::task::JoinSet;

use super::disk::Run;
use super::fetch::{Fetcher, Generation};
use super::pins::is_below;
use super::read::prefetch;
use super::route::View;
use super::volume::CacheVolume;
use super::{Caches, blocking};
use crate::logic::blocks::CopyClass;

/// Most extents on their way at once.
const EXTENTS_MAX: usize = 4;

/// A home that is away is asked again so often, with growing pauses.
const TRIES_MAX: u32 = 20;
const PAUSE_MS_MIN: u64 = 200;
const PAUSE_MS_MAX: u64 = 30_000;

/// What came is looked for on the disk so often, with the shortest pause between.
const KEPT_TRIES: u32 = 50;

/// The warming of a volume: what is asked for while it goes on is added to it.
#[derive(Debug, Default)]
pub(crate) struct Warmer(Mutex<WarmerState>);

#[derive(Debug, Default)]
struct WarmerState {
    warming: Option<WarmingStatus>,
    /// What is warmed, or was last.
    paths: BTreeSet<String>,
    turn: u64,
}

impl Warmer {
    /// How far the last warming is.
    pub(crate) fn state(&self) -> Option<WarmingStatus> {
        self.lock().warming.clone()
    }

    fn lock(&self) -> MutexGuard<'_, WarmerState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a turn for these paths and those that are under way, unless that changes nothing.
    fn begin(&self, paths: Vec<String>) -> Option<(u64, Vec<String>)> {
        let mut state = self.lock();
        let is_running = |w: &WarmingStatus| w.state == WarmingState::Running;
        let goes_on = state.warming.as_ref().is_some_and(is_running);
        let under_way = state.paths.iter().filter(|_| goes_on);
        let wanted: BTreeSet<_> = paths.into_iter().chain(under_way.cloned()).collect();
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

    /// Notes how a turn goes on, if it still is the present one. Tells whether it is.
    fn note(&self, turn: u64, change: impl FnOnce(&mut WarmingStatus)) -> bool {
        let mut state = self.lock();
        let is_present = state.turn == turn;
        if let Some(warming) = state.warming.as_mut().filter(|_| is_present) {
            change(warming);
        }
        is_present
    }
}

impl Caches {
    /// Warms a volume, in the background; harmless to repeat. Tells how far it is.
    ///
    /// # Errors
    /// `VolumeLost`; `NotFound` when the source has no such path; `WrongState` when a path that is
    /// part of a pinned one shall be unpinned; `ServerFault`.
    pub async fn warm(self: &Arc<Self>, call: WarmCache) -> Result<WarmingStatus> {
        let volume = self.volume(call.volume)?;
        let generation = volume.generation();
        let mut entries = generation.manifest.entries().iter();
        if !call.path.is_empty() && !entries.any(|entry| is_below(&entry.path, &call.path)) {
            let text = format!("the source of the volume has no '{}'", call.path);
            return Err(Error::new(ErrorCode::NotFound, text));
        }
        let (pins, path) = (generation.pins.clone(), call.path.clone());
        match call.pinning {
            Pinning::FetchOnly => {}
            Pinning::Pin => blocking(move || pins.add(&path)).await??,
            Pinning::Unpin => {
                blocking(move || pins.remove(&path)).await??;
                self.maintain().await;
                return Ok(volume.warmer().state().unwrap_or(WarmingStatus {
                    path: call.path,
                    state: WarmingState::Done,
                    total_bytes: 0,
                    present_bytes: 0,
                }));
            }
        }
        go_on(self.fetcher.clone(), volume.clone(), vec![call.path]);
        let state = volume.warmer().state();
        state.ok_or_else(|| Error::new(ErrorCode::ServerFault, "the warming did not begin"))
    }
}

/// Warms what is at and below some paths, together with what is under way.
pub(super) fn go_on(fetcher: Arc<Fetcher>, volume: Arc<CacheVolume>, paths: Vec<String>) {
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
    fetcher.until_settled().await;
    loop {
        let generation = volume.generation();
        let view = fetcher.view(&generation).await?;
        let plan = {
            let (generation, view, paths) = (generation.clone(), view.clone(), paths.to_vec());
            blocking(move || plan(&generation, &view, &paths)).await?
        };
        let wanted_bytes = plan.iter().map(|run| run.bytes() as u64).sum();
        volume.warmer().note(turn, |warming| {
            (warming.total_bytes, warming.present_bytes) = (wanted_bytes, 0);
        });
        let state = fetch(fetcher, volume, &generation, &plan, turn).await?;
        let state = {
            let generation = generation.clone();
            let present_bytes = blocking(move || held_bytes(&generation, &plan)).await?;
            volume
                .warmer()
                .note(turn, |warming| warming.present_bytes = present_bytes);
            match state {
                // What came had to go again, or came after all.
                WarmingState::Done | WarmingState::Full if present_bytes < wanted_bytes => {
                    WarmingState::Full
                }
                WarmingState::Full => WarmingState::Done,
                state => state,
            }
        };
        let same = Arc::ptr_eq(&generation, &volume.generation());
        let over = generation.disk.is_retired() && same;
        let settled = same && Arc::ptr_eq(&view, &fetcher.view(&generation).await?);
        if over || settled || !volume.warmer().note(turn, |_| {}) {
            return Ok(state);
        }
        // The source, or who shares it, changed meanwhile: so did this server's share.
    }
}

/// This server's share of what is at and below the paths, extent by extent.
fn plan(generation: &Generation, view: &View, paths: &[String]) -> Vec<Run> {
    let manifest = &generation.manifest;
    let block_bytes = manifest.block_bytes();
    let extent_blocks = generation.extent_blocks();
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
            let run = Run {
                file,
                first,
                count: count as usize,
                last_bytes: manifest.length_of(entry, BlockIndex(first + count - 1)),
                block_bytes,
            };
            if view.is_own(generation, generation.extent(run.key(0))) {
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
    plan: &[Run],
    turn: u64,
) -> Result<WarmingState> {
    let mut state = WarmingState::Done;
    let mut refused = None;
    let before = given_way(generation);
    let mut under_way: JoinSet<(u64, Result<u64>)> = JoinSet::new();
    let mut plan = plan.iter().copied();
    let mut next = plan.next();
    // Room that extents under way may still take.
    let mut promised: u64 = 0;
    loop {
        while under_way.len() < EXTENTS_MAX
            && state == WarmingState::Done
            && let Some(run) = next
        {
            if generation.disk.is_retired() || !volume.warmer().note(turn, |_| {}) {
                return Ok(state);
            }
            // On a full disk one block would drive out the other.
            let is_disk_full = given_way(generation) > before;
            if !is_disk_full && has_room(generation, &run, promised) {
                let (fetcher, generation) = (fetcher.clone(), generation.clone());
                let bytes = run.bytes() as u64;
                promised += bytes;
                under_way
                    .spawn(async move { (bytes, one_extent(&fetcher, &generation, run).await) });
                next = plan.next();
            } else if under_way.is_empty() {
                state = WarmingState::Full;
            } else {
                break;
            }
        }
        let Some(done) = under_way.join_next().await else {
            return Ok(refused.map_or(state, WarmingState::Failed));
        };
        let broken = |e| Error::new(ErrorCode::ServerFault, format!("warming broke off: {e}"));
        let (bytes, present) = done.map_err(broken)?;
        promised -= bytes;
        let present = match present {
            // One file that home may not read keeps no other away; it is told at the end.
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

/// Number of blocks that went because the disk was full.
fn given_way(generation: &Generation) -> u64 {
    let counts = generation.meter.counts().snapshot();
    let given_way = counts.get("cache_evicted_for_full_disk");
    given_way.copied().unwrap_or(0)
}

/// Bytes of the runs that are here.
fn held_bytes(generation: &Generation, plan: &[Run]) -> u64 {
    let table = generation.disk.table();
    let blocks = plan
        .iter()
        .flat_map(|run| (0..run.count).map(move |n| (run, n)));
    let held = blocks.filter(|(run, n)| table.contains(run.key(*n)));
    held.map(|(run, n)| run.length(n) as u64).sum()
}

/// Whether an extent is here or finds room: what is pinned may drive out what is not, the rest
/// drives out no primary copy. `promised` is what extents under way may still take.
fn has_room(generation: &Generation, run: &Run, promised: u64) -> bool {
    let class = match generation.class_of(run.file, true) {
        CopyClass::Pinned => CopyClass::Pinned,
        CopyClass::Primary | CopyClass::Secondary => CopyClass::Secondary,
    };
    generation.disk.holds_all(run)
        || generation.disk.table().attainable_bytes(class) >= promised + run.bytes() as u64
}

/// Brings one extent and puts it into its class. Returns the bytes of it that are here.
async fn one_extent(fetcher: &Arc<Fetcher>, generation: &Arc<Generation>, run: Run) -> Result<u64> {
    let (mut tries, mut pause_ms) = (1, PAUSE_MS_MIN);
    let all: Vec<_> = (0..run.count).collect();
    let came = loop {
        let error = match prefetch(fetcher, generation, run, &all).await {
            Ok(bytes) => break bytes,
            Err(error) => error,
        };
        let over = tries == TRIES_MAX || generation.disk.is_retired();
        if over || !error.is_transient() {
            return Err(error);
        }
        tracing::warn!(%error, tries, "warming is tried again");
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        (tries, pause_ms) = (tries + 1, (pause_ms * 2).min(PAUSE_MS_MAX));
    };
    generation.meter.add("cache_warmed_bytes", came);
    let before = given_way(generation);
    for _ in 0..KEPT_TRIES {
        let is_disk_full = given_way(generation) > before;
        if is_disk_full || generation.disk.is_retired() || generation.disk.holds_all(&run) {
            break;
        }
        // Somebody else waited for a block, and had it before it was on the disk.
        tokio::time::sleep(Duration::from_millis(PAUSE_MS_MIN)).await;
    }
    let generation = generation.clone();
    blocking(move || {
        let class = generation.class_of(run.file, true);
        let keys: Vec<_> = (0..run.count).map(|n| (run.key(n), class)).collect();
        generation.disk.reclassify(&keys)?;
        Ok(held_bytes(&generation, &[run]))
    })
    .await?
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
