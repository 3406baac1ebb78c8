//! The volumes of a node: their life, their content, and the space that they reserve.
//!
//! [`Storage`] answers the calls about volumes. It consists of a pure part that decides and parts
//! that act:
//!
//! ```text
//!  calls ─▶ Storage ─▶ logic::volumes::VolumeTable   decides: reserve, make, ready, expire, delete
//!              │       logic::space                  reserved ≤ capacity, in bytes and files
//!              ├─ lifecycle.rs     acts: makes, renews and deletes volumes
//!              │    fill.rs        fills a scratch volume from home or from another node
//!              │    cache          makes a cache volume (crate::cache)
//!              ├─ resizing.rs      changes the size of a volume
//!              ├─ tree_calls.rs    calls about the trees of scratch volumes
//!              │    scratch_trees.rs   sessions of agents, and their hand-over
//!              ├─ extractions.rs   sends results home
//!              ├─ database.rs      the durable table (redb): volumes, deleted ids, receipts
//!              └─ store.rs         the directories on disk, and atomic moves between them
//! ```
//!
//! * **Making.** A volume is reserved, filled out of sight in `making/`, recorded, and then moved
//!   to `volumes/`. After a crash it is either whole or gone.
//! * **Space.** A reservation is released when the bytes are gone from the disk, not earlier. So
//!   reservations never exceed the capacity.
//! * **Life.** A volume expires some time after the last sign of interest: a renewal or any use.
//!   Its lifetime grows when it holds results, and that is durable.
//! * **Deletion.** The id stays in the table, so a late creation does not bring the volume back.
//!   Creating and deleting may be repeated.
//!
//! **Errors.** The caller gets `NoSpaceBytes` or `NoSpaceFiles` with what is free. `VolumeLost`
//! means that the volume is gone, `Busy` that it is being made, and `WrongState` that it is of
//! another kind. An id that names another volume gives `Conflict`. `ServerFault` means that the
//! disk failed, and the call may be repeated. A volume whose making failed stays in the table with
//! its error.
//!
//! **Concurrency.** The table is behind a mutex, which is never held during I/O. Changes of one
//! volume take turns by one of 64 locks. All disk access runs on blocking threads. Work goes on if
//! its caller gives up.
//!
//! The node checks rights before it calls. `docs/decisions/0006-redb-volume-table.md` has the
//! reasons for the table.

mod base_copy;
mod bind_mounts;
mod confined_directory;
mod database;
mod extraction;
mod extractions;
mod file_set;
mod fill;
mod fill_source;
mod fill_usage;
mod flush;
mod hard_links;
mod inflight_extractions;
mod lifecycle;
mod lifetimes;
mod listing_prefetch;
mod resizing;
mod scratch_trees;
mod sent_sets;
mod set_extraction;
mod store;
mod tree_calls;
mod tree_listing;
mod tree_owner;
mod unlinked_survey;
mod unlocked_directory;
mod unreadable_files;
mod usage_watch;
mod volume_errors;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bafs_proto::ids::VolumeId;
use bafs_proto::node_quota::{NodeQuotaList, SetNodeQuota};
use bafs_proto::path::check_printable;
use bafs_proto::source_warning::SourceWarnings;
use bafs_proto::time::Time;
use bafs_proto::volume::{VolumeKind, VolumeState, VolumeStatus};
use bafs_proto::{Error, ErrorCode, Result};
use futures_util::future::join_all;
use tokio::sync::watch;

pub use store::Store;
pub(crate) use store::{is_path_missing, remove_tree};
pub(crate) use tree_calls::volume_id;

use crate::cache::Caches;
use crate::clock;
use crate::counters::Counters;
use crate::errors::run_blocking;
use crate::home_clients::HomeClients;
use crate::logic::node_quota::RUNS_MAX;
use crate::logic::space::Amount;
use crate::logic::volumes::{VolumeRow, VolumeTable};
use database::{TableChange, VolumeDatabase, VolumeRecord};
use inflight_extractions::InflightExtractions;
use scratch_trees::ScratchTrees;
use volume_errors::volume_lost_error;

/// Changes of volumes take turns by these many keys: one volume never changes twice at once.
const VOLUME_LOCKS: usize = 64;

/// Most volumes of one page: with the longest texts, 7 KiB each, they fit a header, and each costs
/// the check of a right.
const PAGE_VOLUMES_MAX: usize = 128;

/// Who lists volumes waits no longer for the size of one: twice the time after which a count that
/// goes on says so.
const MEASURE_TIME_MAX: Duration = Duration::from_secs(2);

/// Longest owner or address, in bytes.
const TEXT_BYTES_MAX: usize = 255;

/// The volumes of one node, with the space that they reserve.
#[derive(Debug)]
pub struct Storage {
    store: Arc<Store>,
    database: VolumeDatabase,
    volumes: Mutex<VolumeTable>,
    volume_locks: Vec<tokio::sync::Mutex<()>>,
    /// Volumes whose deletion failed, and when it did last.
    failed_deletions: Mutex<BTreeMap<VolumeId, Time>>,
    changed: watch::Sender<u64>,
    extractions: Arc<InflightExtractions>,
    trees: Arc<ScratchTrees>,
    /// The most bytes that scratch volumes were promised at any time.
    scratch_bytes_peak: AtomicU64,
    caches: Arc<Caches>,
    homes: Arc<HomeClients>,
    counters: Counters,
}

impl Storage {
    /// Takes up the volumes of a store. What was half made is removed; what was ready is served.
    ///
    /// # Errors
    /// `ServerFault` when the store cannot be read, `VersionMismatch` when another program wrote
    /// it.
    pub async fn open(
        store: Arc<Store>,
        capacity: Amount,
        homes: Arc<HomeClients>,
        caches: Arc<Caches>,
        counters: Counters,
    ) -> Result<Arc<Self>> {
        let opened = store.clone();
        let (table, loaded) =
            run_blocking(move || VolumeDatabase::open(&opened.database_file())).await?;
        let now = clock::now();
        let free = store.clone();
        let free = run_blocking(move || Ok(free.free_files())).await?;
        let mut volumes =
            VolumeTable::new(offered_capacity(&store, capacity, free, &loaded.volumes));
        for (id, when) in loaded.tombstones {
            volumes.add_tombstone(when, id);
        }
        for VolumeRecord { spec, manifest } in loaded.volumes {
            let there = match spec.kind {
                VolumeKind::Scratch { .. } => store.tree_path(spec.id).is_dir(),
                VolumeKind::Cache { .. } => caches.usage(spec.id).is_some(),
            };
            if there {
                volumes.restore(now, spec, manifest);
            } else {
                tracing::warn!(volume = %spec.id, "the store lost a volume; its row is dropped");
                table.write(TableChange::RemoveVolume(spec.id)).await?;
            }
        }
        for id in loaded.giving_way {
            volumes.set_giving_way(now, id, true);
        }
        for id in caches.volume_ids() {
            if volumes.get(id).is_none() {
                caches.remove(id).await;
            }
        }
        caches.limit_retained(volumes.free()).await;
        let known: std::collections::BTreeSet<_> = volumes.rows().map(|row| row.spec.id).collect();
        let swept = store.clone();
        run_blocking(move || {
            swept
                .remove_unknown(|id| known.contains(&id))
                .map_err(|e| {
                    Error::new(ErrorCode::ServerFault, format!("sweep of the store: {e}"))
                })?;
            swept.refill_reserve();
            Ok(())
        })
        .await?;
        Ok(Arc::new(Self {
            trees: Arc::new(ScratchTrees::new(store.clone(), counters.clone())),
            scratch_bytes_peak: AtomicU64::new(0),
            store,
            database: table,
            volumes: Mutex::new(volumes),
            volume_locks: (0..VOLUME_LOCKS)
                .map(|_| tokio::sync::Mutex::default())
                .collect(),
            failed_deletions: Mutex::default(),
            changed: watch::Sender::new(0),
            extractions: Arc::default(),
            caches,
            homes,
            counters,
        }))
    }

    /// Wakes whenever a volume or the free space changes.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Watches volumes whose limit is not enforced operation by operation, for ever.
    pub async fn watch_usage(self: Arc<Self>) {
        usage_watch::watch_usage(self.trees.clone()).await;
    }

    /// Space for volumes: all of it, and what a new one can have.
    pub fn space(&self) -> (Amount, Amount) {
        let volumes = self.volumes();
        (volumes.space().capacity(), volumes.offered())
    }

    /// A page of the volumes by id, and where the next one begins.
    pub(crate) fn volume_page(
        &self,
        after: Option<VolumeId>,
    ) -> (Vec<VolumeRow>, Option<VolumeId>) {
        let page: Vec<VolumeRow> = {
            let volumes = self.volumes();
            let rows = volumes.rows_after(after);
            rows.take(PAGE_VOLUMES_MAX).cloned().collect()
        };
        let full = page.len() == PAGE_VOLUMES_MAX;
        let next = page.last().filter(|_| full).map(|row| row.spec.id);
        (page, next)
    }

    /// What there is to tell of volumes, measured at once. One that is deleted meanwhile is left
    /// out, and one that cannot be measured, or not soon, is told with the reason: neither hides
    /// another.
    pub(crate) async fn describe_volumes(
        &self,
        rows: impl Iterator<Item = VolumeRow>,
    ) -> Vec<VolumeStatus> {
        let described = join_all(rows.map(|row| self.describe_volume(row))).await;
        described.into_iter().flatten().collect()
    }

    async fn describe_volume(&self, row: VolumeRow) -> Option<VolumeStatus> {
        let id = row.spec.id;
        let measuring = tokio::time::timeout(MEASURE_TIME_MAX, self.measure_status(row.clone()));
        let measured = measuring.await.unwrap_or_else(|_| {
            let text = format!("volume {id} is not measured yet: its writer is about to change");
            Err(Error::new(ErrorCode::InProgress, text))
        });
        match measured {
            // They would not fit a page; who asks for one volume is told.
            Ok(status) => Some(VolumeStatus {
                warnings: SourceWarnings::default(),
                ..status
            }),
            Err(_) if self.volumes().get(id).is_none() => {
                // Who gave up measuring must not leave a tree open.
                self.trees.drop_volume(id).await;
                None
            }
            Err(error) => {
                tracing::warn!(volume = %id, %error, "volume not measured");
                let failure = Some(error);
                Some(volume_status(VolumeRow { failure, ..row }, (0, 0)))
            }
        }
    }

    /// One volume.
    ///
    /// # Errors
    /// `VolumeLost` when it does not exist (any more).
    pub async fn get_volume(&self, id: VolumeId) -> Result<VolumeStatus> {
        let row = self
            .volumes()
            .get(id)
            .cloned()
            .ok_or_else(|| volume_lost_error(id))?;
        self.measure_status(row).await
    }

    /// Gives a run a part of the node, which runs so many jobs at once.
    ///
    /// # Errors
    /// `Malformed` for texts that are too long, `Busy` when too many runs have a part.
    pub fn set_node_quota(&self, call: SetNodeQuota, slots: u32) -> Result<NodeQuotaList> {
        if call.owner.len().max(call.user.len()) > TEXT_BYTES_MAX {
            let text = "the name of an owner or user is too long";
            return Err(Error::new(ErrorCode::Malformed, text));
        }
        check_printable(&call.owner).and_then(|()| check_printable(&call.user))?;
        let quotas = self.volumes().set_quota(clock::now(), call, slots);
        quotas.ok_or_else(|| {
            let text = format!("{RUNS_MAX} runs share this node already; try again later");
            Error::new(ErrorCode::Busy, text)
        })
    }

    /// Someone uses a volume of any kind, which counts as interest.
    ///
    /// # Errors
    /// `VolumeLost`, `Busy` while it is being made, `WrongState` when making it failed.
    pub fn touch(&self, id: VolumeId) -> Result<()> {
        let mut volumes = self.volumes();
        volumes.renew(clock::now(), id);
        let row = volumes.get(id).ok_or_else(|| volume_lost_error(id))?;
        match row.state {
            VolumeState::Ready => Ok(()),
            VolumeState::Creating => Err(Error::new(
                ErrorCode::Busy,
                format!("volume {id} is still being created"),
            )),
            VolumeState::Failed => {
                let why = row.failure.as_ref().map_or("", |fault| &fault.detail);
                let text = format!("volume {id} could not be created: {why}");
                Err(Error::new(ErrorCode::WrongState, text))
            }
        }
    }

    /// The tree of a scratch volume that is in use.
    fn scratch_tree_path(&self, id: VolumeId) -> Result<PathBuf> {
        self.touch(id)?;
        let volumes = self.volumes();
        let row = volumes.get(id).ok_or_else(|| volume_lost_error(id))?;
        match row.spec.kind {
            VolumeKind::Scratch { .. } => Ok(self.store.tree_path(id)),
            VolumeKind::Cache { .. } => {
                let text = format!("volume {id} is a cache volume; this call needs a scratch one");
                Err(Error::new(ErrorCode::WrongState, text))
            }
        }
    }

    /// A failure of work on a volume that was deleted meanwhile means that the volume is lost.
    async fn or_volume_lost<T>(
        &self,
        id: VolumeId,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let result = work.await;
        if result.is_err() && self.volumes().get(id).is_none() {
            return Err(volume_lost_error(id));
        }
        result
    }

    async fn measure_status(&self, mut row: VolumeRow) -> Result<VolumeStatus> {
        let id = row.spec.id;
        let (used_bytes, used_files) = match (row.state, &row.spec.kind) {
            (VolumeState::Ready, VolumeKind::Scratch { .. }) => {
                let used = self.trees.usage(&row.spec);
                let used = self.or_volume_lost(id, used).await;
                // A deletion may have come between; it must not leave a tree open.
                if self.volumes().get(id).is_none() {
                    self.trees.drop_volume(id).await;
                    return Err(volume_lost_error(id));
                }
                used?
            }
            (VolumeState::Ready, VolumeKind::Cache { .. }) => {
                self.caches.usage(id).unwrap_or_default()
            }
            _ => (0, 0),
        };
        if matches!(row.spec.kind, VolumeKind::Cache { .. }) {
            row.warnings = self.caches.warnings(id);
        }
        Ok(volume_status(row, (used_bytes, used_files)))
    }

    fn volumes(&self) -> MutexGuard<'_, VolumeTable> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notify(&self) {
        self.changed.send_modify(|version| *version += 1);
    }

    async fn lock_volume(&self, id: VolumeId) -> tokio::sync::MutexGuard<'_, ()> {
        let key = (id.0 ^ (id.0 >> 64)) % VOLUME_LOCKS as u128;
        self.volume_locks[usize::try_from(key).unwrap_or(0)]
            .lock()
            .await
    }
}

/// What is told of a volume that uses so many bytes and files.
fn volume_status(row: VolumeRow, (used_bytes, used_files): (u64, u64)) -> VolumeStatus {
    let VolumeRow {
        spec,
        state,
        failure: fault,
        received_bytes,
        warnings,
        manifest,
        expires,
    } = row;
    VolumeStatus {
        spec,
        state,
        error: fault,
        used_bytes,
        used_files,
        received_bytes,
        manifest,
        warnings,
        expires,
    }
}

/// What of a capacity the disk can keep: no more files than it has free, and those of volumes that
/// are there.
fn offered_capacity(
    store: &Store,
    capacity: Amount,
    free: Option<u64>,
    volumes: &[VolumeRecord],
) -> Amount {
    let scratch = |record: &&VolumeRecord| matches!(record.spec.kind, VolumeKind::Scratch { .. });
    let kept = volumes.iter().filter(scratch).map(|it| it.spec.size_files);
    let most = free.map(|free| kept.fold(free, u64::saturating_add));
    let Some(files) = most.filter(|most| *most < capacity.files) else {
        return capacity;
    };
    tracing::warn!(
        "--files: the disk of {} has only {files} files (inodes) for volumes, so the node offers \
         these instead of {}; only a new file system can have more",
        store.root().display(),
        capacity.files
    );
    Amount { files, ..capacity }
}
