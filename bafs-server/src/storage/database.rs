//! The durable table of a store: ready volumes, dead ids, receipts. Decides nothing. One thread
//! writes: whatever waits is committed (and synced) together.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use bafs_proto::hash::Digest;
use bafs_proto::ids::{ExtractionId, ServerId, VolumeId};
use bafs_proto::message::{ExtractFile, PutReceipt};
use bafs_proto::time::Time;
use bafs_proto::volume::VolumeSpec;
use bafs_proto::{Error, ErrorCode, Result};
use redb::{
    Database, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition,
    WriteTransaction,
};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

use crate::table_rows::{self, catch_panic};

/// Form of the records, first byte of each.
const RECORD_VERSION: u8 = 3;

/// What to do with a damaged table.
const DAMAGED: &str = "the file is damaged; restore it from a copy, or start with an empty store: \
                       its volumes are then lost, and schedulers create them again";

/// Most receipts kept; beyond it the oldest goes.
const RECEIPTS_MAX: u64 = 200_000;

/// Most changes that wait for the writer, and most that one commit takes.
const CHANGES_MAX: usize = 256;

const VOLUMES: TableDefinition<'_, u128, &[u8]> = TableDefinition::new("volumes");
const TOMBSTONES: TableDefinition<'_, u128, u64> = TableDefinition::new("gone");
const GIVING_WAY: TableDefinition<'_, u128, ()> = TableDefinition::new("giving-way");
const RECEIPTS: TableDefinition<'_, u128, &[u8]> = TableDefinition::new("receipts");
const RECEIPT_ORDER: TableDefinition<'_, u64, u128> = TableDefinition::new("receipt-order");

/// A ready volume as the table keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct VolumeRecord {
    pub(super) spec: VolumeSpec,
    pub(super) manifest: Option<Digest>,
}

/// A finished extraction as the table keeps it: what was asked (without the capability) and the
/// proof.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ReceiptRecord {
    pub(super) volume: VolumeId,
    pub(super) path: String,
    pub(super) home: String,
    pub(super) home_id: Option<ServerId>,
    pub(super) target: String,
    pub(super) receipt: PutReceipt,
}

impl ReceiptRecord {
    /// Whether `call` asks for exactly what this record proves.
    pub(super) fn is_proof_for(&self, call: &ExtractFile) -> bool {
        self.volume == call.volume
            && self.path == call.path
            && self.home_id == call.home_id
            && (self.home_id.is_some() || self.home == call.home_address)
            && self.target == call.target_path
    }
}

/// A change of the table.
#[derive(Debug)]
pub(super) enum TableChange {
    /// The volume is ready, or shows another state of its source.
    PutVolume(VolumeRecord),
    /// The id is dead; an older one may be forgotten for it.
    AddTombstone {
        id: VolumeId,
        when: Time,
        evicted_tombstone: Option<VolumeId>,
    },
    /// The space of the volume goes to whoever wants it, or does not any more.
    SetGivingWay { id: VolumeId, gives_way: bool },
    /// The volume was lost by the store itself: its row goes, its id may be used again.
    RemoveVolume(VolumeId),
    /// The extraction is done.
    AddReceipt(ExtractionId, ReceiptRecord),
}

/// Everything that the table knew of volumes when it was opened.
#[derive(Debug)]
pub(super) struct LoadedVolumes {
    pub(super) volumes: Vec<VolumeRecord>,
    pub(super) tombstones: Vec<(VolumeId, Time)>,
    pub(super) giving_way: Vec<VolumeId>,
}

type QueuedChange = (TableChange, oneshot::Sender<Result<()>>);

/// The database, which is opened again after an I/O error: until then it refuses everything, also
/// when a full disk has space again.
#[derive(Debug)]
struct SharedDatabase {
    path: PathBuf,
    /// `None` while it cannot be opened again.
    database: RwLock<Option<Database>>,
}

impl SharedDatabase {
    fn with_database<T>(&self, work: impl FnOnce(&Database) -> Result<T>) -> Result<T> {
        let database = self.database.read().unwrap_or_else(PoisonError::into_inner);
        let Some(database) = database.as_ref() else {
            let text = format!("the volume table {} is unusable now", self.path.display());
            return Err(Error::new(ErrorCode::ServerFault, text));
        };
        catch_panic(DAMAGED, || work(database))
    }

    /// Tries once more what failed after the last error: there may be room on the disk now.
    fn open_if_closed(&self) {
        let database = self.database.read().unwrap_or_else(PoisonError::into_inner);
        let is_closed = database.is_none();
        drop(database);
        if is_closed {
            self.reopen();
        }
    }

    /// What was committed before is there; what failed may be there or not.
    fn reopen(&self) {
        let mut database = self
            .database
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let opened = catch_panic(DAMAGED, || {
            // The old one holds the lock of the file.
            drop(database.take());
            Database::create(&self.path).map_err(database_error)
        });
        match opened {
            Ok(opened) => *database = Some(opened),
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "volume table not usable");
            }
        }
    }
}

/// The table of one store. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct VolumeDatabase {
    database: Arc<SharedDatabase>,
    writer: mpsc::Sender<QueuedChange>,
}

impl VolumeDatabase {
    /// Opens or makes the table at `path`, with its writing thread. Blocks.
    ///
    /// # Errors
    /// `ServerFault` when the file is not usable or held by another process.
    pub(super) fn open(path: &Path) -> Result<(Self, LoadedVolumes)> {
        let doing = format!("volume table {}", path.display());
        let broken = |error: Error| error.context(&doing);
        let opened = catch_panic(DAMAGED, || {
            let mut database = Database::create(path).map_err(database_error)?;
            if !database.check_integrity().map_err(database_error)? {
                tracing::warn!(path = %path.display(), "the volume table was damaged and mended");
            }
            let loaded = make_and_load(&database)?;
            let shared = SharedDatabase {
                path: path.to_owned(),
                database: RwLock::new(Some(database)),
            };
            Ok((Arc::new(shared), loaded))
        });
        let (database, loaded) = opened.map_err(broken)?;
        let (writer, changes) = mpsc::channel(CHANGES_MAX);
        let written = database.clone();
        std::thread::Builder::new()
            .name("bafs-table".to_owned())
            .spawn(move || write_all(&written, changes))
            .map_err(|e| broken(database_error(redb::Error::Io(e))))?;
        Ok((Self { database, writer }, loaded))
    }

    /// Makes a change; when this returns, it is durable.
    ///
    /// # Errors
    /// `ServerFault`; the change may then be there after a restart or not.
    pub(super) async fn write(&self, change: TableChange) -> Result<()> {
        let stopped = || Error::new(ErrorCode::ServerFault, "the volume table has stopped");
        let (sender, answer) = oneshot::channel();
        self.writer
            .send((change, sender))
            .await
            .map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())?
    }

    /// The receipt of a finished extraction.
    ///
    /// # Errors
    /// `ServerFault` when the table cannot be read.
    pub(super) async fn receipt(&self, id: ExtractionId) -> Result<Option<ReceiptRecord>> {
        let database = self.database.clone();
        tokio::task::spawn_blocking(move || {
            database.with_database(|database| {
                let reading = database.begin_read().map_err(database_error)?;
                let receipts = reading.open_table(RECEIPTS).map_err(database_error)?;
                let found = receipts.get(id.0).map_err(database_error)?;
                found
                    .map(|record| table_rows::decode(RECORD_VERSION, record.value()))
                    .transpose()
            })
        })
        .await
        .map_err(|e| Error::new(ErrorCode::ServerFault, e.to_string()))?
    }
}

/// Commits what waits, together, until nobody can ask any more.
fn write_all(database: &SharedDatabase, mut changes: mpsc::Receiver<QueuedChange>) {
    while let Some(first) = changes.blocking_recv() {
        let mut batch = vec![first];
        while batch.len() < CHANGES_MAX
            && let Ok(next) = changes.try_recv()
        {
            batch.push(next);
        }
        database.open_if_closed();
        let result =
            database.with_database(|it| commit(it, batch.iter().map(|(change, _)| change)));
        if result.is_err() {
            database.reopen();
        }
        for (_, sender) in batch {
            // Who asked may have given up; the change is made all the same.
            let _ = sender.send(result.clone());
        }
    }
}

fn commit<'a>(database: &Database, changes: impl Iterator<Item = &'a TableChange>) -> Result<()> {
    let writing = database.begin_write().map_err(database_error)?;
    for change in changes {
        apply(&writing, change)?;
    }
    writing.commit().map_err(database_error)
}

fn apply(writing: &WriteTransaction, change: &TableChange) -> Result<()> {
    let mut volumes = writing.open_table(VOLUMES).map_err(database_error)?;
    match change {
        TableChange::PutVolume(record) => {
            volumes
                .insert(
                    record.spec.id.0,
                    &*table_rows::encode(RECORD_VERSION, record)?,
                )
                .map_err(database_error)?;
        }
        TableChange::SetGivingWay { id, gives_way } => {
            let mut giving_way = writing.open_table(GIVING_WAY).map_err(database_error)?;
            match gives_way {
                true => giving_way.insert(id.0, ()).map(drop),
                false => giving_way.remove(id.0).map(drop),
            }
            .map_err(database_error)?;
        }
        TableChange::RemoveVolume(id) => {
            volumes.remove(id.0).map_err(database_error)?;
            let mut giving_way = writing.open_table(GIVING_WAY).map_err(database_error)?;
            giving_way.remove(id.0).map_err(database_error)?;
        }
        TableChange::AddTombstone {
            id,
            when,
            evicted_tombstone: forgotten,
        } => {
            volumes.remove(id.0).map_err(database_error)?;
            let mut giving_way = writing.open_table(GIVING_WAY).map_err(database_error)?;
            giving_way.remove(id.0).map_err(database_error)?;
            let mut gone = writing.open_table(TOMBSTONES).map_err(database_error)?;
            gone.insert(id.0, when.0).map_err(database_error)?;
            if let Some(forgotten) = forgotten {
                gone.remove(forgotten.0).map_err(database_error)?;
            }
        }
        TableChange::AddReceipt(id, record) => insert_receipt(writing, *id, record)?,
    }
    Ok(())
}

fn insert_receipt(
    writing: &WriteTransaction,
    id: ExtractionId,
    record: &ReceiptRecord,
) -> Result<()> {
    let mut receipts = writing.open_table(RECEIPTS).map_err(database_error)?;
    let mut order = writing.open_table(RECEIPT_ORDER).map_err(database_error)?;
    let known = receipts
        .insert(id.0, &*table_rows::encode(RECORD_VERSION, record)?)
        .map_err(database_error)?
        .is_some();
    if known {
        return Ok(());
    }
    let last = order
        .last()
        .map_err(database_error)?
        .map_or(0, |(number, _)| number.value());
    order.insert(last + 1, id.0).map_err(database_error)?;
    if receipts.len().map_err(database_error)? > RECEIPTS_MAX {
        let oldest = order
            .pop_first()
            .map_err(database_error)?
            .map(|(_, id)| id.value());
        if let Some(oldest) = oldest {
            receipts.remove(oldest).map_err(database_error)?;
        }
    }
    Ok(())
}

fn make_and_load(database: &Database) -> Result<LoadedVolumes> {
    let writing = database.begin_write().map_err(database_error)?;
    for table in [VOLUMES, RECEIPTS] {
        writing.open_table(table).map_err(database_error)?;
    }
    writing.open_table(TOMBSTONES).map_err(database_error)?;
    writing.open_table(GIVING_WAY).map_err(database_error)?;
    writing.open_table(RECEIPT_ORDER).map_err(database_error)?;
    writing.commit().map_err(database_error)?;

    let reading = database.begin_read().map_err(database_error)?;
    let mut loaded = LoadedVolumes {
        volumes: Vec::new(),
        tombstones: Vec::new(),
        giving_way: Vec::new(),
    };
    for row in reading
        .open_table(VOLUMES)
        .map_err(database_error)?
        .iter()
        .map_err(database_error)?
    {
        loaded.volumes.push(table_rows::decode(
            RECORD_VERSION,
            row.map_err(database_error)?.1.value(),
        )?);
    }
    for row in reading
        .open_table(TOMBSTONES)
        .map_err(database_error)?
        .iter()
        .map_err(database_error)?
    {
        let (id, when) = row.map_err(database_error)?;
        loaded
            .tombstones
            .push((VolumeId(id.value()), Time(when.value())));
    }
    let giving_way = reading.open_table(GIVING_WAY).map_err(database_error)?;
    for row in giving_way.iter().map_err(database_error)? {
        let (id, _) = row.map_err(database_error)?;
        loaded.giving_way.push(VolumeId(id.value()));
    }
    Ok(loaded)
}

/// A full disk too: who asked is to ask again, as of its volume nothing is too large.
fn database_error(error: impl Into<redb::Error>) -> Error {
    Error::new(ErrorCode::ServerFault, error.into().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use bafs_proto::volume::{LimitKind, VolumeKind};

    fn record(id: u128) -> VolumeRecord {
        let spec = VolumeSpec {
            id: VolumeId(id),
            name: "v".to_owned(),
            owner: "o".to_owned(),
            kind: VolumeKind::Scratch { fill: None },
            size_bytes: 1,
            size_files: 1,
            limit: LimitKind::Exact,
            lifetime_ms: 1,
        };
        VolumeRecord {
            spec,
            manifest: Some(Digest::of(b"m")),
        }
    }

    fn receipt(id: u128) -> (ExtractionId, ReceiptRecord) {
        let extract = ExtractionId(id);
        let proof = PutReceipt {
            extraction: extract,
            path: "t".to_owned(),
            size: 3,
            digest: Digest::of(b"abc"),
        };
        let record = ReceiptRecord {
            volume: VolumeId(1),
            path: "p".to_owned(),
            home: "h:1".to_owned(),
            home_id: None,
            target: "t".to_owned(),
            receipt: proof,
        };
        (extract, record)
    }

    #[tokio::test]
    async fn records_survive_reopening_the_table() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("table.redb");
        let (extract, proof) = receipt(5);
        {
            let (table, loaded) = VolumeDatabase::open(&path).expect("open");
            assert!(loaded.volumes.is_empty() && loaded.tombstones.is_empty());
            let writes = (1..=40).map(|id| table.write(TableChange::PutVolume(record(id))));
            for write in writes {
                write.await.expect("write");
            }
            let bury = TableChange::AddTombstone {
                id: VolumeId(2),
                when: Time(7),
                evicted_tombstone: None,
            };
            table.write(bury).await.expect("write");
            table
                .write(TableChange::RemoveVolume(VolumeId(3)))
                .await
                .expect("write");
            table
                .write(TableChange::AddReceipt(extract, proof.clone()))
                .await
                .expect("write");
            table
                .write(TableChange::AddReceipt(extract, proof.clone()))
                .await
                .expect("write");
        }
        let (table, loaded) = open_again(&path).await;
        let ids: Vec<u128> = loaded.volumes.iter().map(|r| r.spec.id.0).collect();
        assert_eq!(ids, std::iter::once(1).chain(4..=40).collect::<Vec<_>>());
        assert_eq!(loaded.volumes[0], record(1));
        assert_eq!(loaded.tombstones, [(VolumeId(2), Time(7))]);
        assert_eq!(table.receipt(extract).await, Ok(Some(proof)));
        assert_eq!(table.receipt(ExtractionId(6)).await, Ok(None));
    }

    /// The writing thread lets go of the file a moment after the last handle is dropped.
    async fn open_again(path: &Path) -> (VolumeDatabase, LoadedVolumes) {
        for _ in 0..100 {
            if let Ok(opened) = VolumeDatabase::open(path) {
                return opened;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        panic!("the table stays locked");
    }

    #[test]
    fn records_of_another_version_are_refused() {
        let mut bytes = table_rows::encode(RECORD_VERSION, &record(1)).expect("encode");
        assert!(table_rows::decode::<VolumeRecord>(RECORD_VERSION, &bytes).is_ok());
        bytes[0] = 9;
        let error =
            table_rows::decode::<VolumeRecord>(RECORD_VERSION, &bytes).expect_err("refused");
        assert_eq!(error.code, ErrorCode::VersionMismatch);
        assert!(table_rows::decode::<VolumeRecord>(RECORD_VERSION, &[]).is_err());
    }
    #[tokio::test]
    async fn a_damaged_table_never_causes_a_panic() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("table.redb");
        {
            let (table, _) = VolumeDatabase::open(&path).expect("open");
            for id in 1..=40 {
                table
                    .write(TableChange::PutVolume(record(id)))
                    .await
                    .expect("write");
            }
        }
        drop(open_again(&path).await);
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        let whole = std::fs::read(&path).expect("read");
        let mut damaged = vec![
            vec![7; 300],
            whole[..whole.len() / 2].to_vec(),
            whole[..10].to_vec(),
        ];
        for at in (0..whole.len()).step_by(4099).chain(0..320) {
            let mut bytes = whole.clone();
            let end = (at + 64).min(bytes.len());
            bytes[at..end].iter_mut().for_each(|byte| *byte ^= 0x5a);
            damaged.push(bytes);
        }
        let mut refused = 0;
        for (number, bytes) in damaged.into_iter().enumerate() {
            let path = directory.path().join(format!("{number}.redb"));
            std::fs::write(&path, bytes).expect("write");
            let opening = path.clone();
            let opened = tokio::task::spawn_blocking(move || VolumeDatabase::open(&opening)).await;
            match opened.unwrap_or_else(|e| panic!("{number}: {e}")) {
                Ok(_) => {}
                Err(error) => {
                    refused += 1;
                    assert!(error.detail.contains("volume table"), "{error}");
                }
            }
            let _ = std::fs::remove_file(path);
        }
        assert!(refused > 0);
    }
}
