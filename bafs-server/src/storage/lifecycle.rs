//! Makes and ends volumes as the table decides. Work goes on when the caller gives up: a volume
//! is made, or deleted, whole.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use bafs_proto::hash::Digest;
use bafs_proto::ids::VolumeId;
use bafs_proto::message::{CreateVolume, Done, InvalidateVolume};
use bafs_proto::path::{check_name, check_printable, check_relative};
use bafs_proto::time::{Deadline, Time};
use bafs_proto::volume::{
    LimitKind, VolumeKind, VolumeSource, VolumeSpec, VolumeState, VolumeStatus,
};
use bafs_proto::{Error, ErrorCode, Result};

use super::database::{TableChange, VolumeRecord};
use super::fill::Fill;
use super::fill_source::FillSource;
use super::store::is_path_missing;
use super::volume_errors::volume_lost_error;
use super::{Storage, TEXT_BYTES_MAX};
use crate::clock;
use crate::errors::{disk_error, run_blocking, run_in_task};
use crate::logic::space::{Amount, SpaceShortage};
use crate::logic::volumes::{Creation, CreationRefusal, VOLUMES_MAX, VolumeRow};

/// An answer is on its way so long before the deadline, in milliseconds, to arrive in time.
const REPLY_MARGIN_MS: u64 = 200;

/// A deletion that failed is tried again after so long, in milliseconds.
const DELETE_RETRY_MS: u64 = 5_000;

/// Longest lifetime: ten years, in milliseconds.
pub(super) const LIFETIME_MS_MAX: u64 = 10 * 366 * 24 * 3_600_000;

/// Time to list the source of a cache volume, in milliseconds.
const LIST_TIMEOUT_MS: u64 = 600_000;

impl Storage {
    /// Creates a volume and waits until it is ready, or has failed, or the deadline is near; the
    /// status tells which. Harmless to repeat.
    ///
    /// # Errors
    /// `Malformed` and `BadPath` for a specification that makes no sense, `Conflict` when the id
    /// names another volume, `VolumeLost` when it was deleted before, `NoSpaceBytes` and
    /// `NoSpaceFiles` with what is free, `Busy` when there are too many volumes.
    pub async fn create(
        self: &Arc<Self>,
        call: CreateVolume,
        deadline: Deadline,
    ) -> Result<VolumeStatus> {
        check_spec(&call.spec)?;
        let wait = deadline
            .remaining()
            .saturating_sub(Duration::from_millis(REPLY_MARGIN_MS));
        let near = Deadline::after(wait);
        let mut changes = self.changes();
        loop {
            let verdict = self.volumes().create(clock::now(), &call.spec);
            let waits = match verdict {
                Ok(Creation::Start) => {
                    self.notify();
                    tokio::spawn(self.clone().make_volume(call.clone()));
                    true
                }
                Ok(Creation::AlreadyPresent) => {
                    let volumes = self.volumes();
                    volumes
                        .get(call.spec.id)
                        .is_some_and(|r| r.state == VolumeState::Creating)
                }
                Err(CreationRefusal::NoSpace {
                    is_space_coming: soon,
                    ..
                }) => {
                    self.evict_for(&call.spec);
                    soon
                }
                Err(_) => false,
            };
            let in_time = waits
                && tokio::time::timeout_at(near.instant().into(), changes.changed())
                    .await
                    .is_ok();
            if !in_time {
                verdict.map_err(|refusal| refusal_error(&call.spec, refusal))?;
                return self.get_volume(call.spec.id).await;
            }
        }
    }

    /// Deletes a volume; harmless to repeat. When this returns, it is gone for good.
    ///
    /// # Errors
    /// `ServerFault` when that cannot be made durable; repeat it then.
    pub async fn delete(self: &Arc<Self>, id: VolumeId) -> Result<Done> {
        let deleting = tokio::spawn(self.clone().end_volume(id));
        deleting
            .await
            .unwrap_or_else(|e| Err(Error::new(ErrorCode::ServerFault, format!("delete: {e}"))))
    }

    /// Deletes a volume whose directory somebody removed.
    ///
    /// # Errors
    /// As [`Self::delete`].
    pub(super) async fn delete_if_missing(self: &Arc<Self>, id: VolumeId) -> Result<()> {
        let Ok(tree) = self.scratch_tree_path(id) else {
            return Ok(());
        };
        if run_blocking(move || Ok(is_path_missing(&tree))).await? {
            tracing::warn!(volume = %id, "somebody removed the directory of a volume");
            self.delete(id).await?;
        }
        Ok(())
    }

    /// Deletes volumes whose time is up, and ends tree sessions that are silent.
    pub async fn sweep(self: &Arc<Self>) {
        self.note_scratch_bytes();
        let expired = self.volumes().expired_volumes(clock::now());
        for id in expired {
            tracing::info!(volume = %id, "volume expired");
            self.counters.add("volumes_expired", 1);
            if let Err(error) = self.delete(id).await {
                tracing::warn!(volume = %id, %error, "expired volume is not deleted yet");
            }
        }
        for id in self.deletions_to_retry(clock::now()) {
            if let Err(error) = self.delete(id).await {
                tracing::warn!(volume = %id, %error, "volume is not deleted yet");
            }
        }
        self.trees.sweep(clock::now()).await;
    }

    /// Volumes whose deletion failed some time ago; each once.
    fn deletions_to_retry(&self, now: Time) -> Vec<VolumeId> {
        let mut unfinished = self.failed_deletions();
        let is_due = |_: &VolumeId, since: &mut Time| now.ms_since(*since) >= DELETE_RETRY_MS;
        unfinished
            .extract_if(.., is_due)
            .map(|(id, _)| id)
            .collect()
    }

    fn failed_deletions(&self) -> MutexGuard<'_, BTreeMap<VolumeId, Time>> {
        let unfinished = self.failed_deletions.lock();
        unfinished.unwrap_or_else(PoisonError::into_inner)
    }

    /// If the disk was found full, by jobs of this node as told, by those of others or by what a
    /// volume was filled with: has caches leave free what scratch volumes were promised at most so
    /// far; those of these jobs may be gone already.
    pub async fn free_space_for_scratch(&self, is_told_full: bool) {
        if self.trees.full_disk().take() || is_told_full {
            let bytes = self.note_scratch_bytes();
            self.caches.reserve_free_space(bytes).await;
        }
    }

    /// Takes note of the bytes that scratch volumes may hold; answers the most at any time.
    fn note_scratch_bytes(&self) -> u64 {
        let promised = |row: &VolumeRow| match row.spec.kind {
            VolumeKind::Scratch { .. } => row.spec.size_bytes,
            VolumeKind::Cache { .. } => 0,
        };
        let volumes = self.volumes();
        let now = volumes.rows().map(promised).fold(0, u64::saturating_add);
        drop(volumes);
        self.scratch_bytes_peak
            .fetch_max(now, Ordering::Relaxed)
            .max(now)
    }

    /// Has a cache volume show the present state of its source.
    ///
    /// # Errors
    /// `VolumeLost`, `WrongState` for a scratch volume, what the source answers.
    pub async fn invalidate(
        self: &Arc<Self>,
        call: InvalidateVolume,
        deadline: Deadline,
    ) -> Result<VolumeStatus> {
        let id = call.volume;
        self.touch(id)?;
        let is_scratch = |row: &VolumeRow| matches!(row.spec.kind, VolumeKind::Scratch { .. });
        let is_scratch = self.volumes().get(id).map(is_scratch);
        if is_scratch.ok_or_else(|| volume_lost_error(id))? {
            let text = format!("volume {id} is a scratch volume; only a cache is invalidated");
            return Err(Error::new(ErrorCode::WrongState, text));
        }
        let manifest = self
            .caches
            .invalidate(id, call.source_token, deadline)
            .await?;
        let this = self.clone();
        // Not tied to the caller: the cache shows the new state already.
        let kept = tokio::spawn(async move {
            let _turn = this.lock_volume(id).await;
            // As it is by now: its lifetime may have been made longer meanwhile.
            let spec = this.volumes().get(id).map(|row| row.spec.clone());
            let spec = spec.ok_or_else(|| volume_lost_error(id))?;
            this.database
                .write(TableChange::PutVolume(VolumeRecord {
                    spec,
                    manifest: Some(manifest),
                }))
                .await?;
            this.volumes().set_manifest(id, manifest);
            this.notify();
            Ok(())
        });
        kept.await.unwrap_or_else(|e| {
            Err(Error::new(
                ErrorCode::ServerFault,
                format!("invalidate: {e}"),
            ))
        })?;
        self.get_volume(id).await
    }

    async fn make_volume(self: Arc<Self>, call: CreateVolume) {
        let id = call.spec.id;
        let scratch = matches!(call.spec.kind, VolumeKind::Scratch { .. });
        let making = self.clone().try_make_volume(call);
        if let Err(error) = run_in_task(format!("making volume {id}"), making).await {
            // Before what is half made goes.
            let error = self.with_free_space(error).await;
            let _turn = self.lock_volume(id).await;
            self.discard_volume(id, scratch).await;
            let mut volumes = self.volumes();
            if volumes.get(id).is_some() {
                tracing::warn!(volume = %id, %error, "volume not made");
                self.counters.add("volumes_failed", 1);
            }
            volumes.mark_failed(clock::now(), id, error);
        }
        self.notify();
    }

    /// Adds to what a full disk says which disk that is, and what it has free.
    async fn with_free_space(&self, error: Error) -> Error {
        if error.code != ErrorCode::NoSpaceBytes {
            return error;
        }
        let store = self.store.clone();
        let told = run_blocking(move || store.describe_disk().map_err(|e| disk_error("store", &e)));
        match told.await {
            Ok((free, told)) => {
                self.trees.full_disk().note_no_space(Some(free));
                let code = match free.lacks_files() {
                    true => ErrorCode::NoSpaceFiles,
                    false => error.code,
                };
                Error::new(code, format!("{}: {told}", error.detail))
            }
            Err(_) => error,
        }
    }

    async fn try_make_volume(self: Arc<Self>, call: CreateVolume) -> Result<()> {
        let id = call.spec.id;
        let scratch = matches!(call.spec.kind, VolumeKind::Scratch { .. });
        self.begin_volume(id, scratch).await?;
        let manifest = tokio::select! {
            made = self.prepare_content(&call) => made?,
            () = self.wait_until_deleted(id) => return Err(volume_lost_error(id)),
        };
        self.commit_volume(&call.spec, manifest).await
    }

    /// Has cached data that no volume shows leave what others reserved.
    pub(super) async fn limit_retained_data(&self) {
        let free = self.volumes().free();
        self.caches.limit_retained(free).await;
    }

    async fn begin_volume(&self, id: VolumeId, scratch: bool) -> Result<()> {
        self.limit_retained_data().await;
        if !scratch {
            return Ok(());
        }
        let store = self.store.clone();
        run_blocking(move || {
            store
                .create_staging(id)
                .map(drop)
                .map_err(|e| volume_disk_error(id, &e))
        })
        .await
    }

    /// Makes the content, out of sight.
    async fn prepare_content(&self, call: &CreateVolume) -> Result<Option<Digest>> {
        let (spec, token) = (&call.spec, call.source_token.clone());
        match &spec.kind {
            VolumeKind::Scratch { fill: None } => Ok(None),
            VolumeKind::Scratch { fill: Some(source) } => {
                let fill = Fill {
                    source: FillSource {
                        homes: self.homes.clone(),
                        token,
                        source: source.clone(),
                        counters: self.counters.clone(),
                        received_bytes: AtomicU64::new(0),
                    },
                    limit: Amount {
                        bytes: spec.size_bytes,
                        files: spec.size_files,
                    },
                    // Without it everything comes from the source.
                    base_copy: call.base.and_then(|base| self.scratch_tree_path(base).ok()),
                };
                let filled = fill.run(&self.store.staging_tree_path(spec.id)).await?;
                self.volumes()
                    .note_filled(spec.id, filled.received_bytes, filled.warnings);
                Ok(None)
            }
            VolumeKind::Cache { .. } => {
                let deadline = Deadline::after_ms(LIST_TIMEOUT_MS);
                self.caches.create(spec, token, deadline).await.map(Some)
            }
        }
    }

    /// Puts a volume in place: durable first, visible then.
    async fn commit_volume(&self, spec: &VolumeSpec, manifest: Option<Digest>) -> Result<()> {
        let id = spec.id;
        let _turn = self.lock_volume(id).await;
        if self.volumes().get(id).is_none() {
            return Err(volume_lost_error(id));
        }
        if matches!(spec.kind, VolumeKind::Scratch { .. }) {
            let store = self.store.clone();
            run_blocking(move || store.commit(id).map_err(|e| volume_disk_error(id, &e))).await?;
            self.trees.volume_tree(spec).note_new();
        }
        self.database
            .write(TableChange::PutVolume(VolumeRecord {
                spec: spec.clone(),
                manifest,
            }))
            .await?;
        let wanted = self.volumes().mark_ready(clock::now(), id, manifest);
        assert!(wanted, "volume {id} was deleted out of turn");
        self.counters.add("volumes_created", 1);
        Ok(())
    }

    pub(super) async fn end_volume(self: Arc<Self>, id: VolumeId) -> Result<Done> {
        let ended = self.clone().try_end_volume(id).await;
        if ended.is_err() {
            self.failed_deletions().insert(id, clock::now());
        }
        ended
    }

    async fn try_end_volume(self: Arc<Self>, id: VolumeId) -> Result<Done> {
        let turn = self.lock_volume(id).await;
        let when = clock::now();
        let deletion = self.volumes().delete(when, id);
        self.notify();
        self.trees.drop_volume(id).await;
        let cache = deletion
            .row
            .as_ref()
            .is_some_and(|row| matches!(row.spec.kind, VolumeKind::Cache { .. }));
        if cache {
            self.caches.remove(id).await;
        }
        let store = self.store.clone();
        run_blocking(move || store.trash(id).map_err(|e| volume_disk_error(id, &e))).await?;
        let bury = || TableChange::AddTombstone {
            id,
            when,
            evicted_tombstone: deletion.evicted_tombstone,
        };
        let buried = self.database.write(bury()).await;
        let this = self.clone();
        let emptying = tokio::spawn(async move { this.empty_trash(id).await });
        if buried.is_err() {
            // A full disk takes no record before what was deleted has gone. To the next life of the
            // store it is the same: a volume that has no tree is lost.
            let _ = emptying.await;
            self.database.write(bury()).await?;
        }
        drop(turn);
        Ok(Done)
    }

    /// Removes what was trashed of a volume, whose space is free then.
    async fn empty_trash(&self, id: VolumeId) {
        let store = self.store.clone();
        let emptied =
            run_blocking(move || store.empty_trash(id).map_err(|e| volume_disk_error(id, &e)))
                .await;
        match emptied {
            Ok(()) => {
                self.volumes().release_deleted(id);
                self.limit_retained_data().await;
            }
            // The space stays reserved, as it is not free.
            Err(error) => {
                tracing::warn!(volume = %id, %error, "trash not emptied");
                self.failed_deletions().insert(id, clock::now());
            }
        }
        self.notify();
    }

    async fn discard_volume(&self, id: VolumeId, scratch: bool) {
        if !scratch {
            self.caches.remove(id).await;
            return;
        }
        let store = self.store.clone();
        let gone = run_blocking(move || {
            store
                .trash(id)
                .and_then(|()| store.empty_trash(id))
                .map_err(|e| volume_disk_error(id, &e))
        });
        if let Err(error) = gone.await {
            tracing::warn!(volume = %id, %error, "half-made volume not removed");
        }
    }

    async fn wait_until_deleted(&self, id: VolumeId) {
        let mut changes = self.changes();
        while self.volumes().get(id).is_some() {
            if changes.changed().await.is_err() {
                return;
            }
        }
    }
}

fn check_spec(spec: &VolumeSpec) -> Result<()> {
    let bad = |text: String| Err(Error::new(ErrorCode::Malformed, text));
    let (source, cooperative) = match &spec.kind {
        VolumeKind::Scratch { fill } => (fill.as_ref(), ""),
        VolumeKind::Cache {
            source,
            cooperative,
            ..
        } => (Some(source), cooperative.as_str()),
    };
    let address = match source {
        Some(VolumeSource::Home { address, path, .. }) => {
            check_relative(path)?;
            address.as_str()
        }
        Some(VolumeSource::Volume { address, .. }) => address.as_str(),
        None => "",
    };
    check_name(&spec.name)?;
    if !cooperative.is_empty() {
        check_name(cooperative)?;
    }
    for text in [spec.owner.as_str(), address] {
        check_printable(text)?;
        if text.len() > TEXT_BYTES_MAX {
            return bad(format!(
                "a text of volume {} is over {TEXT_BYTES_MAX} bytes",
                spec.id
            ));
        }
    }
    if spec.lifetime_ms == 0 || spec.lifetime_ms > LIFETIME_MS_MAX {
        return bad(format!(
            "the lifetime of volume {} must be 1 ms to ten years",
            spec.id
        ));
    }
    Ok(())
}

fn refusal_error(spec: &VolumeSpec, refusal: CreationRefusal) -> Error {
    let id = spec.id;
    match refusal {
        CreationRefusal::Conflict => {
            let text = format!("volume {id} exists with another specification; choose a new id");
            Error::new(ErrorCode::Conflict, text)
        }
        CreationRefusal::Deleted => {
            let text = format!("volume {id} was deleted or has expired; choose a new id");
            Error::new(ErrorCode::VolumeLost, text)
        }
        CreationRefusal::NoSpace {
            shortage: SpaceShortage::Bytes(free),
            ..
        } => {
            let (bytes, _) = spec.reservation();
            let text = format!(
                "volume {id} needs {bytes} bytes{}, {free} are free",
                limit_margin(spec.limit)
            );
            Error::new(ErrorCode::NoSpaceBytes, text)
        }
        CreationRefusal::NoSpace {
            shortage: SpaceShortage::Files(free),
            ..
        } => {
            let (_, files) = spec.reservation();
            let text = format!(
                "volume {id} needs {files} files{}, {free} are free",
                limit_margin(spec.limit)
            );
            Error::new(ErrorCode::NoSpaceFiles, text)
        }
        CreationRefusal::TooMany => {
            let text = format!(
                "the node has the maximum of {VOLUMES_MAX} volumes; delete some \
                                first"
            );
            Error::new(ErrorCode::Busy, text)
        }
    }
}

/// What a reservation has in it that nobody asked for.
fn limit_margin(limit: LimitKind) -> &'static str {
    match limit {
        LimitKind::Exact => "",
        LimitKind::Watched => " (with the margin of a watched volume)",
    }
}

fn volume_disk_error(id: VolumeId, error: &std::io::Error) -> Error {
    disk_error(format!("store of volume {id}"), error)
}
