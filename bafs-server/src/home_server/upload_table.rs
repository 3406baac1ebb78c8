//! The durable table of all uploads to an exported directory (redb). Decides nothing: `upload.rs`
//! does.
//!
//! Several processes may serve one directory, and redb gives the table to one at a time. So a
//! process keeps the table only while it works: the thread of the table closes it when it has
//! nothing to do, or when another process waits. Processes queue up at a lock (`uploads.queue`),
//! so each gets its turn.
//!
//! Whatever waits is one transaction. A job runs in it, and hears of its result when that is
//! durable. That uploads are published is written with the next changes, or soon after.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use bafs_proto::ids::{ExtractionId, UploadEpoch};
use bafs_proto::message::UploadFence;
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode, Result};
use redb::{Database, ReadableTable, ReadableTableMetadata, Table, TableDefinition};
use rustix::fs::{FlockOperation, flock};

use super::upload::{UploadEvent, UploadRecord, UploadStamp, UploadState};
use super::upload_fences::{EpochBlock, FenceRows, FencedTarget, table_error};
use super::upload_files::{DATA, fault, sync_directory};
use crate::clock;
use crate::table_rows::{catch_panic, decode, encode};

/// Form of the rows, first byte of each.
const ROW_VERSION: u8 = 1;

/// Uploads that do not have the names of their targets yet, and those that do.
const OPEN: TableDefinition<'_, u128, &[u8]> = TableDefinition::new("open");
const RECEIPTS: TableDefinition<'_, u128, &[u8]> = TableDefinition::new("receipts");

const TABLE: &str = "uploads.redb";
const QUEUE: &str = "uploads.queue";

/// Most jobs of one transaction.
const JOBS_MAX: usize = 256;

/// Memory for pages of the table, in bytes.
const CACHE_BYTES: usize = 16 << 20;

/// How often an idle table looks whether another process waits, and after how many looks it is
/// closed all the same.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
const IDLE_LOOKS_MAX: u32 = 10;

/// How often a process looks whether it is its turn, and the pause between: 20 s in all.
const TURN_LOOKS_MAX: u32 = 10_000;
const TURN_PAUSE: Duration = Duration::from_millis(2);

/// A receipt is kept for so long, for schedulers that return late.
pub(super) const RECEIPT_MS_MAX: u64 = 30 * 24 * 3600 * 1000;

/// Receipts stay for so long, however many there are, but for [`HELD_MAX`].
pub(super) const RECEIPT_MS_MIN: u64 = 3600 * 1000;

/// Most receipts that are older than a scheduler waits to ask again; the oldest go. A result whose
/// receipt is gone is sent again by a scheduler that returns, and is then the same.
pub(super) const RECEIPTS_MAX: usize = 100_000;

/// Most receipts in all, of about 200 bytes each. When there are more, half of them go.
pub(super) const HELD_MAX: usize = 2_000_000;

/// What to do with a damaged table.
const DAMAGED: &str = "the table of uploads is damaged; stop the home, move uploads.redb away and \
                       start it again: files at home are whole, and unfinished uploads come anew";

type Row<'a> = Table<'a, u128, &'static [u8]>;

/// What a job tells its caller, once it is known whether its result is durable.
type Reply = Box<dyn FnOnce(Result<()>) + Send>;

/// Work in a transaction; with an error if there is none.
type Job = Box<dyn FnOnce(Result<&mut UploadRows<'_>>) -> Reply + Send>;

/// The rows within one transaction.
pub(super) struct UploadRows<'a> {
    open: Row<'a>,
    receipts: Row<'a>,
    fences: FenceRows<'a>,
    is_changed: bool,
    last_stamp: Option<UploadStamp>,
    /// Where the bytes of uploads are.
    data: PathBuf,
}

/// How far an upload is published by this process. The table does not say so yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Publication {
    /// The file has the name of its target, perhaps not durably.
    Renamed,
    Durable,
}

/// Publications that the table is to hear of.
type Publications = BTreeMap<ExtractionId, Publication>;

/// The table of an exported directory.
#[derive(Debug)]
pub(super) struct UploadTable {
    publications: Arc<Mutex<Publications>>,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    #[cfg(test)]
    pub(super) fault: Arc<Mutex<TableFault>>,
}

/// What a test does to the disk of a table.
#[cfg(test)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum TableFault {
    #[default]
    None,
    /// No change is written, as there is no room.
    Full,
    /// A change is written, but its writer is told that it was not, and can read nothing then.
    Unknown,
    Unreadable,
}

impl UploadTable {
    /// The table in a home's own directory, which the first job opens.
    ///
    /// # Errors
    /// `ServerFault` when there are too many threads.
    pub(super) fn new(directory: &Path) -> Result<Self> {
        let (sender, jobs) = mpsc::channel();
        let mut file = TableFile::new(directory);
        let publications = file.publications.clone();
        #[cfg(test)]
        let table_fault = file.fault.clone();
        let thread = std::thread::Builder::new().name("bafs-uploads".to_owned());
        let thread = thread.spawn(move || file.serve(&jobs));
        Ok(Self {
            publications,
            jobs: Some(sender),
            thread: Some(thread.map_err(|error| fault(directory, error))?),
            #[cfg(test)]
            fault: table_fault,
        })
    }

    /// Runs a job within a transaction. When this returns, its changes are durable. Blocks.
    ///
    /// # Errors
    /// That of the job; what the disk does not do; `Busy` when other processes have the table all
    /// the time. Changes may then be there or not.
    pub(super) fn run<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut UploadRows<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (answer, told) = mpsc::sync_channel(1);
        let job: Job = Box::new(move |rows| {
            let result = rows.and_then(act);
            Box::new(move |durable| {
                // Nobody else reads it, so there is room.
                let _ = answer.send(durable.and(result));
            })
        });
        let stopped = || Error::new(ErrorCode::ServerFault, DAMAGED);
        let jobs = self.jobs.as_ref().expect("it is taken at the end only");
        jobs.send(job).map_err(|_| stopped())?;
        told.recv().map_err(|_| stopped())?
    }

    /// Publications that the table does not say yet. Locked while a file is renamed.
    pub(super) fn publications(&self) -> MutexGuard<'_, Publications> {
        lock(&self.publications)
    }

    /// Writes publications now.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub(super) fn write_publications(&self) -> Result<()> {
        self.run(|rows| {
            rows.is_changed = true;
            Ok(())
        })
    }
}

impl Drop for UploadTable {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // Only then another process gets the table.
            let _ = thread.join();
        }
    }
}

impl UploadRows<'_> {
    fn is_changed(&self) -> bool {
        self.is_changed || self.fences.is_changed
    }

    /// The row of an upload.
    ///
    /// # Errors
    /// What the disk does not do, or a damaged row.
    pub(super) fn get(&self, extract: ExtractionId) -> Result<Option<UploadRecord>> {
        for rows in [&self.open, &self.receipts] {
            if let Some(row) = rows.get(extract.0).map_err(table_error)? {
                return decode(ROW_VERSION, row.value()).map(Some);
            }
        }
        Ok(None)
    }

    /// Writes the row of an upload after an event, and returns it.
    ///
    /// # Errors
    /// As [`UploadRecord::after`] and [`Self::get`].
    pub(super) fn apply(
        &mut self,
        extract: ExtractionId,
        event: UploadEvent,
    ) -> Result<UploadRecord> {
        let known = self.get(extract)?;
        let stamp = UploadStamp::next(clock::now(), self.last_stamp);
        let record = UploadRecord::after(known.clone(), extract, event, stamp)?;
        if known.as_ref() == Some(&record) {
            return Ok(record);
        }
        (self.last_stamp, self.is_changed) = (Some(stamp), true);
        let row = encode(ROW_VERSION, &record)?;
        if matches!(record.state, UploadState::Published(_)) {
            self.open.remove(extract.0).map_err(table_error)?;
            self.receipts
                .insert(extract.0, &*row)
                .map_err(table_error)?;
            if self.receipts.len().map_err(table_error)? > HELD_MAX as u64 {
                self.sweep_receipts(clock::now(), RECEIPTS_MAX, HELD_MAX / 2)?;
            }
        } else {
            self.open.insert(extract.0, &*row).map_err(table_error)?;
        }
        Ok(record)
    }

    /// As [`Self::apply`] of an upload that is staged, if none to its target is later. An earlier
    /// one that is decided counts as replaced, whether or not it has its name yet.
    ///
    /// # Errors
    /// `UploadFenced`, and as [`Self::apply`].
    pub(super) fn stage(
        &mut self,
        extract: ExtractionId,
        event: UploadEvent,
        target: &FencedTarget,
    ) -> Result<UploadRecord> {
        let known = self.get(extract)?;
        if known.is_some_and(|known| !known.is_receiving()) {
            return self.apply(extract, event);
        }
        let now = clock::now();
        let fence = self.fences.fence_or_last(target.fence, now)?;
        self.fences.check(&target.place, fence)?;
        match self.fences.latest(&target.place)? {
            Some(earlier) if earlier != extract => self.discard(earlier)?,
            _ => {}
        }
        let record = self.apply(extract, event)?;
        self.fences.insert(&target.place, fence, extract, now)?;
        Ok(record)
    }

    /// Removes the bytes of a decided upload, so that nobody who has read its row can give them
    /// their name. Bytes that are gone have it, and what comes replaces them.
    fn discard(&mut self, extract: ExtractionId) -> Result<()> {
        let Some(UploadRecord {
            state: UploadState::Durable { data, .. },
            ..
        }) = self.get(extract)?
        else {
            return Ok(());
        };
        let path = self.data.join(data.name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(fault(&path, error)),
            _ => self.apply(extract, UploadEvent::Published).map(drop),
        }
    }

    /// An epoch later than all before.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub(super) fn issue_epoch(&mut self) -> Result<UploadEpoch> {
        self.fences.issue(clock::now())
    }

    /// Checks an upload that is to begin or go on, as far as its path tells.
    ///
    /// # Errors
    /// `UploadFenced`, and as [`Self::get`].
    pub(super) fn check_fence(
        &self,
        extract: ExtractionId,
        path: &str,
        fence: Option<UploadFence>,
    ) -> Result<()> {
        let known = self.get(extract)?;
        match fence {
            Some(fence) if known.is_none_or(|known| known.is_receiving()) => {
                self.fences.check(path, fence)
            }
            _ => Ok(()),
        }
    }

    /// Forgets fences that only refuse what their age refuses as well.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub(super) fn sweep_fences(&mut self, now: Time) -> Result<()> {
        self.fences.sweep(now)
    }

    /// Forgets an upload that is not published.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub(super) fn remove(&mut self, extract: ExtractionId) -> Result<()> {
        self.is_changed |= self.open.remove(extract.0).map_err(table_error)?.is_some();
        Ok(())
    }

    /// Uploads that are not published, in the order of their last events.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub(super) fn open_uploads(&self) -> Result<Vec<(ExtractionId, UploadRecord)>> {
        let mut found = read_all(&self.open)?;
        found.sort_unstable_by_key(|(_, record)| record.stamp);
        Ok(found)
    }

    /// Forgets receipts that nobody needs any more: old ones, those of age beyond so many, and all
    /// beyond so many.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub(super) fn sweep_receipts(
        &mut self,
        now: Time,
        receipts_max: usize,
        held_max: usize,
    ) -> Result<()> {
        let mut found = read_all(&self.receipts)?;
        found.sort_unstable_by_key(|(_, record)| std::cmp::Reverse(record.stamp));
        for (rank, (extract, record)) in found.into_iter().enumerate() {
            let age_ms = now.ms_since(record.stamp.time());
            let is_young = age_ms <= RECEIPT_MS_MIN;
            let is_kept = is_young || (age_ms <= RECEIPT_MS_MAX && rank < receipts_max);
            if !is_kept || rank >= held_max {
                self.receipts.remove(extract.0).map_err(table_error)?;
                self.is_changed = true;
            }
        }
        Ok(())
    }
}

fn read_all(rows: &Row<'_>) -> Result<Vec<(ExtractionId, UploadRecord)>> {
    let mut found = Vec::new();
    for row in rows.iter().map_err(table_error)? {
        let (extract, record) = row.map_err(table_error)?;
        found.push((
            ExtractionId(extract.value()),
            decode(ROW_VERSION, record.value())?,
        ));
    }
    Ok(found)
}

/// The file of a table, open while there is work.
struct TableFile {
    directory: PathBuf,
    database: Option<Database>,
    /// Device and number of the file that is open.
    identity: (u64, u64),
    last_stamp: Option<UploadStamp>,
    /// Epochs of this process; the next one to open the table has later ones.
    epochs: EpochBlock,
    publications: Arc<Mutex<Publications>>,
    #[cfg(test)]
    fault: Arc<Mutex<TableFault>>,
}

impl TableFile {
    fn new(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
            database: None,
            identity: (0, 0),
            last_stamp: None,
            epochs: EpochBlock::default(),
            publications: Arc::default(),
            #[cfg(test)]
            fault: Arc::default(),
        }
    }

    /// Runs jobs until nobody can ask any more.
    fn serve(&mut self, jobs: &Receiver<Job>) {
        let mut looks = 0;
        loop {
            let next = match self.database {
                Some(_) => jobs.recv_timeout(LOOK_INTERVAL),
                None => jobs.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match next {
                Ok(first) => {
                    looks = 0;
                    let more = jobs.try_iter().take(JOBS_MAX - 1);
                    self.run(std::iter::once(first).chain(more).collect());
                }
                Err(RecvTimeoutError::Timeout) => {
                    looks += 1;
                    self.flush();
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if looks >= IDLE_LOOKS_MAX || self.is_wanted() {
                self.flush();
                self.close();
            }
        }
        self.flush();
        self.close();
    }

    /// Writes publications that wait for a pause.
    fn flush(&mut self) {
        if self.database.is_some() && !self.durable_publications().is_empty() {
            self.run(Vec::new());
        }
    }

    /// Runs jobs in one transaction, and tells each whether its changes are durable.
    fn run(&mut self, jobs: Vec<Job>) {
        let (mut jobs, mut replies) = (jobs.into_iter(), Vec::new());
        let ended = catch_panic(DAMAGED, || {
            self.open()?;
            let ended = self.transact(&mut jobs, &mut replies);
            ended.map_err(|error| self.fault(error))
        });
        if let Err(error) = &ended {
            // Where one write failed, redb refuses all others until it is opened again.
            self.close();
            replies.extend(jobs.map(|job| job(Err(error.clone()))));
        }
        replies.into_iter().for_each(|reply| reply(ended.clone()));
    }

    fn transact(
        &mut self,
        jobs: &mut impl Iterator<Item = Job>,
        replies: &mut Vec<Reply>,
    ) -> Result<(), redb::Error> {
        let database = self.database.as_ref().expect("it was just opened");
        let writing = database.begin_write()?;
        let mut rows = UploadRows {
            open: writing.open_table(OPEN)?,
            receipts: writing.open_table(RECEIPTS)?,
            fences: FenceRows::open(&writing, self.epochs)?,
            is_changed: false,
            last_stamp: self.last_stamp,
            data: self.directory.join(DATA),
        };
        replies.extend(jobs.map(|job| job(Ok(&mut rows))));
        // Beside changes they cost nothing more; else they wait for a pause.
        let published = match rows.is_changed() || replies.is_empty() {
            true => self.durable_publications(),
            false => Vec::new(),
        };
        for extract in &published {
            // A sweep may have forgotten it.
            let _ = rows.apply(*extract, UploadEvent::Published);
        }
        let is_changed = rows.is_changed();
        (self.last_stamp, self.epochs) = (rows.last_stamp, rows.fences.block);
        drop(rows);
        #[cfg(test)]
        self.check_fault(is_changed, false)?;
        match is_changed {
            true => writing.commit()?,
            false => writing.abort()?,
        }
        #[cfg(test)]
        self.check_fault(is_changed, true)?;
        let mut publications = lock(&self.publications);
        published
            .iter()
            .for_each(|extract| _ = publications.remove(extract));
        Ok(())
    }

    fn durable_publications(&self) -> Vec<ExtractionId> {
        let publications = lock(&self.publications);
        let durable = publications
            .iter()
            .filter(|(_, it)| **it == Publication::Durable);
        durable.map(|(extract, _)| *extract).collect()
    }

    /// Opens the table, if it is not open in its place, when it is this process's turn.
    fn open(&mut self) -> Result<()> {
        if self.database.is_some() && identity(&self.path()).ok() == Some(self.identity) {
            return Ok(());
        }
        self.close();
        let mut looks = 0;
        let queue = self.lock_queue(&mut looks)?;
        loop {
            let opened = catch_panic(DAMAGED, || {
                let mut builder = Database::builder();
                Ok(builder.set_cache_size(CACHE_BYTES).create(self.path()))
            });
            match opened? {
                Ok(database) => {
                    let path = self.path();
                    self.identity = identity(&path).map_err(|error| fault(&path, error))?;
                    sync_directory(&self.directory)?;
                    self.database = Some(database);
                    break;
                }
                Err(redb::DatabaseError::DatabaseAlreadyOpen) => self.wait_for_turn(&mut looks)?,
                Err(error) => return Err(self.fault(error)),
            }
        }
        drop(queue);
        Ok(())
    }

    fn close(&mut self) {
        self.epochs = EpochBlock::default();
        if let Some(database) = self.database.take() {
            let closed = catch_panic(DAMAGED, || {
                drop(database);
                Ok(())
            });
            if let Err(error) = closed {
                tracing::warn!(%error, "the table of uploads is not closed well");
            }
        }
    }

    /// Waits behind other processes that want the table.
    fn lock_queue(&self, looks: &mut u32) -> Result<File> {
        let path = self.directory.join(QUEUE);
        let queue = open_queue(&path).map_err(|error| fault(&path, error))?;
        loop {
            match flock(&queue, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(queue),
                Err(rustix::io::Errno::WOULDBLOCK) => self.wait_for_turn(looks)?,
                Err(error) => {
                    let text = format!(
                        "cannot lock {}: {error}; mount its file system with locks (Lustre: \
                         `-o flock`)",
                        path.display()
                    );
                    return Err(Error::new(ErrorCode::ServerFault, text));
                }
            }
        }
    }

    fn wait_for_turn(&self, looks: &mut u32) -> Result<()> {
        *looks += 1;
        if *looks < TURN_LOOKS_MAX {
            std::thread::sleep(TURN_PAUSE);
            return Ok(());
        }
        let text = format!(
            "another process keeps {}; `fuser` says which one",
            self.path().display()
        );
        Err(Error::new(ErrorCode::Busy, text))
    }

    /// Whether another process waits for the table.
    fn is_wanted(&self) -> bool {
        let lock = |queue: File| flock(&queue, FlockOperation::NonBlockingLockShared);
        self.database.is_some()
            && open_queue(&self.directory.join(QUEUE))
                .is_ok_and(|queue| lock(queue) == Err(rustix::io::Errno::WOULDBLOCK))
    }

    fn path(&self) -> PathBuf {
        self.directory.join(TABLE)
    }

    fn fault(&self, error: impl Into<redb::Error>) -> Error {
        match error.into() {
            redb::Error::Io(error) => fault(&self.path(), error),
            error => table_error(error).context(self.path().display()),
        }
    }

    /// What a test has the disk do to a change that is, or is to be, written.
    #[cfg(test)]
    fn check_fault(&self, is_changed: bool, is_written: bool) -> Result<(), redb::Error> {
        let mut found = self.fault.lock().expect("lock");
        let kind = match *found {
            TableFault::Full if is_changed && !is_written => io::ErrorKind::StorageFull,
            TableFault::Unknown if is_changed && is_written => {
                *found = TableFault::Unreadable;
                io::ErrorKind::Other
            }
            TableFault::Unreadable => io::ErrorKind::Other,
            _ => return Ok(()),
        };
        Err(redb::Error::Io(kind.into()))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No holder leaves what is behind it half-changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether an exported directory has a table.
pub(super) fn has_table(directory: &Path) -> bool {
    directory.join(TABLE).exists()
}

fn open_queue(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.write(true).create(true).truncate(false);
    options.mode(0o600).open(path)
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::metadata(path).map(|found| (found.dev(), found.ino()))
}

#[cfg(test)]
impl UploadRows<'_> {
    /// Writes the row of a published upload of that time.
    pub(super) fn insert_receipt(&mut self, extract: ExtractionId, at: Time) {
        let digest = bafs_proto::hash::Digest::of(b"x");
        let content = super::upload::Content { size: 1, digest };
        let record = UploadRecord {
            path: format!("f{}", extract.0),
            mode: 0o640,
            stamp: UploadStamp::next(at, None),
            state: UploadState::Published(content),
        };
        let row = encode(ROW_VERSION, &record).expect("encode");
        self.receipts.insert(extract.0, &*row).expect("insert");
        self.is_changed = true;
    }

    /// The receipts, by their numbers.
    pub(super) fn receipt_numbers(&self) -> Vec<u128> {
        let found = read_all(&self.receipts).expect("read");
        found.into_iter().map(|(extract, _)| extract.0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE_MS: u64 = 60_000;

    fn begin(table: &UploadTable, number: u128) -> Result<UploadRecord> {
        let event = UploadEvent::Begun {
            path: format!("a \"dir\"\n/file {number}"),
            mode: 0o640,
        };
        table.run(move |rows| rows.apply(ExtractionId(number), event))
    }

    fn open_numbers(table: &UploadTable) -> Vec<u128> {
        let found = table.run(|rows| rows.open_uploads()).expect("read");
        found.into_iter().map(|(extract, _)| extract.0).collect()
    }

    #[test]
    fn rows_survive_their_process() {
        let root = tempfile::tempdir().expect("directory");
        let table = UploadTable::new(root.path()).expect("table");
        let rows = [3, 1, 2].map(|number| begin(&table, number).expect("begin"));
        drop(table);
        let table = UploadTable::new(root.path()).expect("table");
        assert_eq!(
            open_numbers(&table),
            [3, 1, 2],
            "in the order of their events"
        );
        let found = table.run(|rows| rows.get(ExtractionId(1)));
        assert_eq!(found, Ok(Some(rows[1].clone())));
        assert_eq!(begin(&table, 1), Ok(rows[1].clone()), "nothing is new");
    }

    #[test]
    fn two_tables_of_one_directory_take_turns() {
        let root = tempfile::tempdir().expect("directory");
        let begin_some = |first: u128| {
            let table = UploadTable::new(root.path()).expect("table");
            (first..first + 40).for_each(|number| _ = begin(&table, number).expect("begin"));
        };
        std::thread::scope(|scope| {
            for first in [100, 200, 300] {
                scope.spawn(move || begin_some(first));
            }
        });
        let table = UploadTable::new(root.path()).expect("table");
        assert_eq!(open_numbers(&table).len(), 120);
    }

    #[test]
    fn concurrent_changes_share_transactions() {
        let root = tempfile::tempdir().expect("directory");
        let table = UploadTable::new(root.path()).expect("table");
        std::thread::scope(|scope| {
            for number in 0..40 {
                let table = &table;
                scope.spawn(move || begin(table, number % 20).expect("begin"));
            }
        });
        assert_eq!(open_numbers(&table).len(), 20);
    }

    #[test]
    fn a_full_disk_leaves_no_row() {
        let root = tempfile::tempdir().expect("directory");
        let table = UploadTable::new(root.path()).expect("table");
        begin(&table, 1).expect("begin");
        *table.fault.lock().expect("lock") = TableFault::Full;
        let refused = begin(&table, 2).expect_err("full");
        assert_eq!(refused.code, ErrorCode::NoSpaceBytes);
        assert_eq!(open_numbers(&table), [1], "it is read all the same");
        *table.fault.lock().expect("lock") = TableFault::None;
        begin(&table, 2).expect("there is room");
        assert_eq!(open_numbers(&table), [1, 2]);
    }

    #[test]
    fn a_full_disk_issues_no_epoch() {
        let root = tempfile::tempdir().expect("directory");
        let table = UploadTable::new(root.path()).expect("table");
        let issue = || table.run(|rows| rows.issue_epoch());
        *table.fault.lock().expect("lock") = TableFault::Full;
        let refused = issue().expect_err("full");
        assert_eq!(refused.code, ErrorCode::NoSpaceBytes);
        *table.fault.lock().expect("lock") = TableFault::None;
        let first = issue().expect("an epoch");
        // From here on, those of the process cost no write.
        *table.fault.lock().expect("lock") = TableFault::Full;
        assert!(issue().expect("an epoch") > first);
    }

    #[test]
    fn a_damaged_table_is_reported() {
        let root = tempfile::tempdir().expect("directory");
        fs::write(root.path().join(TABLE), vec![7; 300]).expect("write");
        let table = UploadTable::new(root.path()).expect("table");
        let refused = begin(&table, 1).expect_err("damaged");
        assert_eq!(refused.code, ErrorCode::ServerFault);
        assert!(refused.detail.contains(TABLE), "{refused}");
    }

    #[test]
    fn old_and_surplus_receipts_expire() {
        let root = tempfile::tempdir().expect("directory");
        let table = UploadTable::new(root.path()).expect("table");
        let now = Time(2 * RECEIPT_MS_MAX);
        let made = table.run(move |rows| {
            for (number, minutes) in [(1, 70), (2, 90), (3, 80), (4, 30), (5, 10)] {
                rows.insert_receipt(ExtractionId(number), Time(now.0 - minutes * MINUTE_MS));
            }
            Ok(())
        });
        made.expect("insert");
        let left_after = |now: Time, receipts_max, held_max| {
            table.run(move |rows| {
                rows.sweep_receipts(now, receipts_max, held_max)?;
                Ok(rows.receipt_numbers())
            })
        };
        assert_eq!(left_after(now, 5, 5), Ok(vec![1, 2, 3, 4, 5]));
        assert_eq!(left_after(now, 3, 5), Ok(vec![1, 4, 5]));
        assert_eq!(left_after(now, 0, 5), Ok(vec![4, 5]), "the young ones stay");
        assert_eq!(
            left_after(now, 0, 1),
            Ok(vec![5]),
            "but not beyond all bounds"
        );
        assert_eq!(
            left_after(now.plus_ms(RECEIPT_MS_MAX), 5, 5),
            Ok(Vec::new())
        );
    }
}
