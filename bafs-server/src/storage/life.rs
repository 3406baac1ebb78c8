//! Makes and ends volumes as the table decides. Work goes on when the caller gives up: a volume
//! is made, or deleted, whole.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use bafs_proto::hash::Digest;
use bafs_proto::ids::VolumeId;
use bafs_proto::message::{CreateVolume, Done, InvalidateVolume};
use bafs_proto::path::{check_name, check_relative, check_text};
use bafs_proto::time::{Deadline, Time};
use bafs_proto::volume::{LimitKind, Source, VolumeKind, VolumeSpec, VolumeState, VolumeStatus};
use bafs_proto::{Error, ErrorCode, Result};

use super::fill::Fill;
use super::origin::Origin;
use super::store::is_gone;
use super::table::{Change, VolumeRecord};
use super::{Storage, blocking, lost};
use crate::clock;
use crate::fault::{apart, of_disk};
use crate::logic::space::{Amount, Short};
use crate::logic::volumes::{Creation, Refusal, Row, VOLUMES_MAX};

/// An answer is on its way so long before the deadline, in milliseconds, to arrive in time.
const MARGIN_MS: u64 = 200;

/// A deletion that failed is tried again after so long, in milliseconds.
const DELETE_PAUSE_MS: u64 = 5_000;

/// Longest owner or address, in bytes.
pub(super) const TEXT_BYTES_MAX: usize = 255;

/// Longest lifetime: ten years, in milliseconds.
const LIFETIME_MS_MAX: u64 = 10 * 366 * 24 * 3_600_000;

/// Time to list the source of a cache volume, in milliseconds.
const LIST_MS: u64 = 600_000;

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
        check(&call.spec)?;
        let wait = deadline
            .left()
            .saturating_sub(Duration::from_millis(MARGIN_MS));
        let near = Deadline::after(wait);
        let mut changes = self.changes();
        loop {
            let verdict = self.volumes().create(clock::now(), &call.spec);
            let waits = match verdict {
                Ok(Creation::Start) => {
                    self.notify();
                    tokio::spawn(self.clone().make(call.clone()));
                    true
                }
                Ok(Creation::Present) => {
                    let volumes = self.volumes();
                    volumes
                        .get(call.spec.id)
                        .is_some_and(|r| r.state == VolumeState::Creating)
                }
                Err(Refusal::Short { soon, .. }) => soon,
                Err(_) => false,
            };
            let in_time = waits
                && tokio::time::timeout_at(near.instant().into(), changes.changed())
                    .await
                    .is_ok();
            if !in_time {
                verdict.map_err(|refusal| refuse(&call.spec, refusal))?;
                return self.show(call.spec.id).await;
            }
        }
    }

    /// Deletes a volume; harmless to repeat. When this returns, it is gone for good.
    ///
    /// # Errors
    /// `ServerFault` when that cannot be made durable; repeat it then.
    pub async fn delete(self: &Arc<Self>, id: VolumeId) -> Result<Done> {
        let deleting = tokio::spawn(self.clone().end(id));
        deleting
            .await
            .unwrap_or_else(|e| Err(Error::new(ErrorCode::ServerFault, format!("delete: {e}"))))
    }

    /// Deletes a volume whose directory somebody removed.
    ///
    /// # Errors
    /// As [`Self::delete`].
    pub(super) async fn forget_if_gone(self: &Arc<Self>, id: VolumeId) -> Result<()> {
        let Ok(tree) = self.scratch(id) else {
            return Ok(());
        };
        if blocking(move || Ok(is_gone(&tree))).await? {
            tracing::warn!(volume = %id, "somebody removed the directory of a volume");
            self.delete(id).await?;
        }
        Ok(())
    }

    /// Deletes volumes whose time is up, and ends tree sessions that are silent.
    pub async fn sweep(self: &Arc<Self>) {
        self.note_scratch();
        let expired = self.volumes().expired(clock::now());
        for id in expired {
            tracing::info!(volume = %id, "volume expired");
            self.counters.add("volumes.expired", 1);
            if let Err(error) = self.delete(id).await {
                tracing::warn!(volume = %id, %error, "expired volume is not deleted yet");
            }
        }
        for id in self.unfinished_deletions(clock::now()) {
            if let Err(error) = self.delete(id).await {
                tracing::warn!(volume = %id, %error, "volume is not deleted yet");
            }
        }
        self.trees.sweep(clock::now()).await;
    }

    /// Volumes whose deletion failed some time ago; each once.
    fn unfinished_deletions(&self, now: Time) -> Vec<VolumeId> {
        let mut unfinished = self.unfinished();
        let is_due = |_: &VolumeId, since: &mut Time| now.ms_since(*since) >= DELETE_PAUSE_MS;
        unfinished
            .extract_if(.., is_due)
            .map(|(id, _)| id)
            .collect()
    }

    fn unfinished(&self) -> MutexGuard<'_, BTreeMap<VolumeId, Time>> {
        let unfinished = self.unfinished.lock();
        unfinished.unwrap_or_else(PoisonError::into_inner)
    }

    /// If the disk was found full, by jobs of this node as told, by those of others or by what a
    /// volume was filled with: has caches leave free what scratch volumes were promised at most so
    /// far; those of these jobs may be gone already.
    pub async fn yield_to_scratch(&self, is_told_full: bool) {
        if self.trees.full_disk().take() || is_told_full {
            let bytes = self.note_scratch();
            self.caches.leave_free(bytes).await;
        }
    }

    /// Takes note of the bytes that scratch volumes may hold; answers the most at any time.
    fn note_scratch(&self) -> u64 {
        let promised = |row: &Row| match row.spec.kind {
            VolumeKind::Scratch { .. } => row.spec.size_bytes,
            VolumeKind::Cache { .. } => 0,
        };
        let volumes = self.volumes();
        let now = volumes.rows().map(promised).fold(0, u64::saturating_add);
        drop(volumes);
        self.scratch_most.fetch_max(now, Ordering::Relaxed).max(now)
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
        let is_scratch = |row: &Row| matches!(row.spec.kind, VolumeKind::Scratch { .. });
        let is_scratch = self.volumes().get(id).map(is_scratch);
        if is_scratch.ok_or_else(|| lost(id))? {
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
            let _turn = this.turn(id).await;
            // As it is by now: its lifetime may have been made longer meanwhile.
            let spec = this.volumes().get(id).map(|row| row.spec.clone());
            let spec = spec.ok_or_else(|| lost(id))?;
            this.table
                .write(Change::Keep(VolumeRecord {
                    spec,
                    manifest: Some(manifest),
                }))
                .await?;
            this.volumes().refreshed(id, manifest);
            this.notify();
            Ok(())
        });
        kept.await.unwrap_or_else(|e| {
            Err(Error::new(
                ErrorCode::ServerFault,
                format!("invalidate: {e}"),
            ))
        })?;
        self.show(id).await
    }

    /// Sees to it that the lifetime of a volume is at least so long, also after a restart.
    ///
    /// # Errors
    /// `ServerFault` when that cannot be made durable; repeat it then.
    pub(super) async fn keep(self: &Arc<Self>, id: VolumeId, lifetime_ms: u64) -> Result<()> {
        let lifetime_ms = lifetime_ms.min(LIFETIME_MS_MAX);
        if self.volumes().to_prolong(id, lifetime_ms).is_none() {
            return Ok(());
        }
        let this = self.clone();
        // Not tied to the caller: what is written down must be known.
        let kept = tokio::spawn(async move {
            let _turn = this.turn(id).await;
            let Some((spec, manifest)) = this.volumes().to_prolong(id, lifetime_ms) else {
                return Ok(());
            };
            let record = VolumeRecord { spec, manifest };
            this.table.write(Change::Keep(record)).await?;
            this.volumes().prolong(clock::now(), id, lifetime_ms);
            Ok(())
        });
        kept.await
            .unwrap_or_else(|e| Err(Error::new(ErrorCode::ServerFault, format!("keep: {e}"))))
    }

    async fn make(self: Arc<Self>, call: CreateVolume) {
        let id = call.spec.id;
        let scratch = matches!(call.spec.kind, VolumeKind::Scratch { .. });
        let making = self.clone().make_whole(call);
        if let Err(error) = apart(format!("making volume {id}"), making).await {
            // Before what is half made goes.
            let error = self.tell_free(error).await;
            let _turn = self.turn(id).await;
            self.discard(id, scratch).await;
            let mut volumes = self.volumes();
            if volumes.get(id).is_some() {
                tracing::warn!(volume = %id, %error, "volume not made");
                self.counters.add("volumes.failed", 1);
            }
            volumes.failed(clock::now(), id, error);
        }
        self.notify();
    }

    /// Adds to what a full disk says which disk that is, and what it has free.
    async fn tell_free(&self, error: Error) -> Error {
        if error.code != ErrorCode::NoSpaceBytes {
            return error;
        }
        let store = self.store.clone();
        let told = blocking(move || store.describe_disk().map_err(|e| of_disk("store", &e)));
        match told.await {
            Ok((free, told)) => {
                self.trees.full_disk().found(Some(free));
                Error::new(error.code, format!("{}: {told}", error.detail))
            }
            Err(_) => error,
        }
    }

    async fn make_whole(self: Arc<Self>, call: CreateVolume) -> Result<()> {
        let id = call.spec.id;
        let scratch = matches!(call.spec.kind, VolumeKind::Scratch { .. });
        self.begin(id, scratch).await?;
        let manifest = tokio::select! {
            made = self.prepare(&call) => made?,
            () = self.until_deleted(id) => return Err(lost(id)),
        };
        self.place(&call.spec, manifest).await
    }

    async fn begin(&self, id: VolumeId, scratch: bool) -> Result<()> {
        if !scratch {
            return Ok(());
        }
        let store = self.store.clone();
        blocking(move || store.begin(id).map(drop).map_err(|e| disk(id, &e))).await
    }

    /// Makes the content, out of sight.
    async fn prepare(&self, call: &CreateVolume) -> Result<Option<Digest>> {
        let (spec, token) = (&call.spec, call.source_token.clone());
        match &spec.kind {
            VolumeKind::Scratch { fill: None } => Ok(None),
            VolumeKind::Scratch { fill: Some(source) } => {
                let fill = Fill {
                    origin: Origin {
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
                    older: call.base.and_then(|base| self.scratch(base).ok()),
                };
                let filled = fill.run(&self.store.tree_in_making(spec.id)).await?;
                self.volumes()
                    .filled(spec.id, filled.received_bytes, filled.warnings);
                Ok(None)
            }
            VolumeKind::Cache { .. } => {
                let deadline = Deadline::after_ms(LIST_MS);
                self.caches.create(spec, token, deadline).await.map(Some)
            }
        }
    }

    /// Puts a volume in place: durable first, visible then.
    async fn place(&self, spec: &VolumeSpec, manifest: Option<Digest>) -> Result<()> {
        let id = spec.id;
        let _turn = self.turn(id).await;
        if self.volumes().get(id).is_none() {
            return Err(lost(id));
        }
        if matches!(spec.kind, VolumeKind::Scratch { .. }) {
            let store = self.store.clone();
            blocking(move || store.commit(id).map_err(|e| disk(id, &e))).await?;
        }
        self.table
            .write(Change::Keep(VolumeRecord {
                spec: spec.clone(),
                manifest,
            }))
            .await?;
        let wanted = self.volumes().ready(clock::now(), id, manifest);
        assert!(wanted, "volume {id} was deleted out of turn");
        self.counters.add("volumes.made", 1);
        Ok(())
    }

    async fn end(self: Arc<Self>, id: VolumeId) -> Result<Done> {
        let ended = self.clone().try_end(id).await;
        if ended.is_err() {
            self.unfinished().insert(id, clock::now());
        }
        ended
    }

    async fn try_end(self: Arc<Self>, id: VolumeId) -> Result<Done> {
        let turn = self.turn(id).await;
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
        blocking(move || store.trash(id).map_err(|e| disk(id, &e))).await?;
        let bury = || Change::Bury {
            id,
            when,
            forgotten: deletion.forgotten,
        };
        let buried = self.table.write(bury()).await;
        let this = self.clone();
        let emptying = tokio::spawn(async move { this.empty_trash(id).await });
        if buried.is_err() {
            // A full disk takes no record before what was deleted has gone. To the next life of the
            // store it is the same: a volume that has no tree is lost.
            let _ = emptying.await;
            self.table.write(bury()).await?;
        }
        drop(turn);
        Ok(Done)
    }

    /// Removes what was trashed of a volume, whose space is free then.
    async fn empty_trash(&self, id: VolumeId) {
        let store = self.store.clone();
        let emptied = blocking(move || store.empty_trash(id).map_err(|e| disk(id, &e))).await;
        match emptied {
            Ok(()) => self.volumes().removed(id),
            // The space stays reserved, as it is not free.
            Err(error) => {
                tracing::warn!(volume = %id, %error, "trash not emptied");
                self.unfinished().insert(id, clock::now());
            }
        }
        self.notify();
    }

    async fn discard(&self, id: VolumeId, scratch: bool) {
        if !scratch {
            self.caches.remove(id).await;
            return;
        }
        let store = self.store.clone();
        let gone = blocking(move || {
            store
                .trash(id)
                .and_then(|()| store.empty_trash(id))
                .map_err(|e| disk(id, &e))
        });
        if let Err(error) = gone.await {
            tracing::warn!(volume = %id, %error, "half-made volume not removed");
        }
    }

    async fn until_deleted(&self, id: VolumeId) {
        let mut changes = self.changes();
        while self.volumes().get(id).is_some() {
            if changes.changed().await.is_err() {
                return;
            }
        }
    }
}

fn check(spec: &VolumeSpec) -> Result<()> {
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
        Some(Source::Home { address, path, .. }) => {
            check_relative(path)?;
            address.as_str()
        }
        Some(Source::Volume { address, .. }) => address.as_str(),
        None => "",
    };
    check_name(&spec.name)?;
    if !cooperative.is_empty() {
        check_name(cooperative)?;
    }
    for text in [spec.owner.as_str(), address] {
        check_text(text)?;
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

fn refuse(spec: &VolumeSpec, refusal: Refusal) -> Error {
    let id = spec.id;
    match refusal {
        Refusal::Conflict => {
            let text = format!("volume {id} exists with another specification; choose a new id");
            Error::new(ErrorCode::Conflict, text)
        }
        Refusal::Gone => {
            let text = format!("volume {id} was deleted or has expired; choose a new id");
            Error::new(ErrorCode::VolumeLost, text)
        }
        Refusal::Short {
            short: Short::Bytes(free),
            ..
        } => {
            let (bytes, _) = spec.reserved();
            let text = format!(
                "volume {id} needs {bytes} bytes{}, {free} are free",
                margin_of(spec.limit)
            );
            Error::new(ErrorCode::NoSpaceBytes, text)
        }
        Refusal::Short {
            short: Short::Files(free),
            ..
        } => {
            let (_, files) = spec.reserved();
            let text = format!(
                "volume {id} needs {files} files{}, {free} are free",
                margin_of(spec.limit)
            );
            Error::new(ErrorCode::NoSpaceFiles, text)
        }
        Refusal::TooMany => {
            let text = format!("there are {VOLUMES_MAX} volumes; delete some first");
            Error::new(ErrorCode::Busy, text)
        }
    }
}

/// What a reservation has in it that nobody asked for.
fn margin_of(limit: LimitKind) -> &'static str {
    match limit {
        LimitKind::Exact => "",
        LimitKind::Watched => " (with the margin of a watched volume)",
    }
}

fn disk(id: VolumeId, error: &std::io::Error) -> Error {
    of_disk(format!("store of volume {id}"), error)
}
