//! Regular work on the caches: classes of blocks, warming of pinned paths, space for other volumes.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bafs_proto::cache::{Pinning, WarmCache, WarmingState, WarmingStatus};
use bafs_proto::{Error, ErrorCode, Result};

use super::caches::Caches;
use super::errors::run_blocking;
use super::store::pins::is_below;
use super::warming;

impl Caches {
    /// Has caches leave so many bytes free on the disk from now on: jobs found it full, and other
    /// volumes were promised the space of the caches.
    pub async fn reserve_free_space(self: &Arc<Self>, bytes: u64) {
        if self.free_bytes_min.fetch_max(bytes, Ordering::Relaxed) < bytes {
            tracing::warn!(bytes, "the disk is full: caches leave so much of it free");
        }
        self.yield_disk().await;
    }

    async fn yield_disk(self: &Arc<Self>) {
        let bytes = self.free_bytes_min.load(Ordering::Relaxed);
        if bytes == 0 {
            return;
        }
        while self.lacks_free_bytes(bytes).await && self.remove_oldest_retained().await {}
        let volumes = self.all_volumes();
        let yielding = move || {
            let generations = volumes.iter().map(|volume| volume.generation());
            generations.for_each(|generation| generation.store.disk.reserve_free_bytes(bytes));
        };
        if let Err(error) = tokio::task::spawn_blocking(yielding).await {
            tracing::warn!(%error, "caches do not leave the disk to others");
        }
    }

    async fn lacks_free_bytes(&self, bytes: u64) -> bool {
        let directory = self.directory.clone();
        let disk = tokio::task::spawn_blocking(move || rustix::fs::statvfs(&directory)).await;
        let free = disk.ok().and_then(|disk| disk.ok());
        free.is_some_and(|disk| disk.f_bavail.saturating_mul(disk.f_frsize) < bytes)
    }

    /// Continues the work that is done bit by bit. To be called every second or so.
    pub async fn maintain(self: &Arc<Self>) {
        self.yield_disk().await;
        for volume in self.all_volumes() {
            let generation = volume.generation();
            let Some(id) = volume.user_ids().first().copied() else {
                continue;
            };
            match self.fetcher.update_classes(&generation).await {
                Ok(true) if !generation.store.pins.paths().is_empty() => {
                    let pins = generation.store.pins.paths();
                    warming::start(self.fetcher.clone(), volume.clone(), pins);
                }
                Ok(_) => {}
                Err(error) => tracing::warn!(%error, "classes of blocks are not up to date"),
            }
            let has_damage = &generation.store.disk.has_damage_under_readers;
            if has_damage.swap(false, Ordering::Relaxed) {
                let changing = self.changing(id);
                tokio::spawn(async move {
                    let _one_at_a_time = changing.lock().await;
                    // Readers of an earlier generation were recalled already.
                    if Arc::ptr_eq(&volume.generation(), &generation) {
                        generation.store.recall_after_damage().await;
                    }
                });
            }
        }
    }

    /// Brings the counters up to date with what agents read without a request.
    pub fn count_local_reads(&self) {
        for volume in self.all_volumes() {
            volume.generation().store.disk.count_agent_reads();
        }
    }

    /// Warms a volume, in the background; harmless to repeat. Returns the state of the warming.
    ///
    /// # Errors
    /// `VolumeLost`; `NotFound` when the source has no such path; `WrongState` for the unpinning of
    /// a path inside a pinned one; `ServerFault`.
    pub async fn warm(self: &Arc<Self>, call: WarmCache) -> Result<WarmingStatus> {
        let volume = self.volume(call.volume)?;
        let generation = volume.generation();
        let mut entries = generation.store.manifest.entries().iter();
        if !call.path.is_empty() && !entries.any(|entry| is_below(&entry.path, &call.path)) {
            let text = format!("the source of the volume has no '{}'", call.path);
            return Err(Error::new(ErrorCode::NotFound, text));
        }
        let (pins, path) = (generation.store.pins.clone(), call.path.clone());
        match call.pinning {
            Pinning::FetchOnly => {}
            Pinning::Pin => run_blocking(move || pins.add(&path)).await??,
            Pinning::Unpin => {
                run_blocking(move || pins.remove(&path)).await??;
                self.maintain().await;
                return Ok(volume.warmer().state().unwrap_or(WarmingStatus {
                    path: call.path,
                    state: WarmingState::Done,
                    total_bytes: 0,
                    present_bytes: 0,
                }));
            }
        }
        warming::start(self.fetcher.clone(), volume.clone(), vec![call.path]);
        let state = volume.warmer().state();
        state.ok_or_else(|| Error::new(ErrorCode::ServerFault, "the warming did not begin"))
    }
}
