//! Receipts of small files that came home: all in one log, with an index of it in memory. Gives no
//! file its name, and knows no rights.
//!
//! A line of the log is a record with its own checksum. A record is in the index when it is
//! durable, so what the index says is decided. Lines that are not whole count as not written.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bafs_proto::ids::ExtractionId;
use bafs_proto::time::Time;
use bafs_proto::{Error, Result};
use rustix::fs::{FlockOperation, flock};

use super::directory_use::make_private_directory;
use super::puts::{fault, sync_directory};
use super::small_file_record::SmallFileRecord;
use crate::clock;

/// A receipt is kept for so long, for schedulers that return late.
pub(super) const RECEIPT_MS_MAX: u64 = 30 * 24 * 3600 * 1000;

/// Most receipts that are older than a scheduler waits to ask again; the oldest go. A result whose
/// receipt is gone is sent again by a scheduler that returns, and is then the same.
pub(super) const RECEIPTS_MAX: usize = 100_000;

/// Receipts stay for so long, however many there are, but for [`HELD_MAX`].
pub(super) const RECEIPT_MS_MIN: u64 = 3600 * 1000;

/// Most receipts of small files in all: each takes about 70 bytes of memory. When there are more,
/// half of them go.
const HELD_MAX: usize = 2_000_000;

/// A line with the longest path, each byte of which may take six.
const LINE_BYTES_MAX: u64 = 32 << 10;

/// What the line of a record begins with that was taken back; no digit of a checksum.
const TAKEN_BACK: u8 = b'-';

const LOG: &str = "receipts";
const LOCK: &str = "receipts.lock";
const SMALL: &str = "small";

/// A record, and whether the file was given its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KnownRecord {
    pub(super) record: SmallFileRecord,
    pub(super) placed: Placed,
}

/// Whether a file was given its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Placed {
    No,
    /// Its temporary name was gone when the log was opened: so it was, or its bytes are lost.
    Seems,
    Yes,
}

/// What became of a record that was to be decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decision {
    /// It is in the log, durably.
    Made,
    /// Another one for the same upload was there before.
    Known,
    /// The upload was begun piece by piece, and goes on so.
    Begun,
}

/// Nothing was decided, as the disk does not do it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Undecided {
    pub(super) error: Error,
    /// Whether no later start can find the records all the same.
    pub(super) is_sure: bool,
}

type DecisionReply = Arc<OnceLock<Result<Vec<Decision>, Undecided>>>;

/// The receipts of an export, of which one process at a time has the log.
#[derive(Debug)]
pub(super) struct Receipts {
    directory: PathBuf,
    index: Mutex<Index>,
    waiting: Mutex<Vec<(Vec<SmallFileRecord>, DecisionReply)>>,
    log: Mutex<ReceiptLog>,
    /// Held while a file is given its name, so that it happens once.
    pub(super) placing: Mutex<()>,
}

#[derive(Debug)]
struct Index {
    file: Arc<File>,
    entries: BTreeMap<ExtractionId, LogEntry>,
}

/// Where the record of an upload is in the log.
#[derive(Debug, Clone, Copy)]
struct LogEntry {
    offset: u64,
    length: u32,
    placed: Placed,
    time: Time,
}

/// The end of the log.
#[derive(Debug)]
struct ReceiptLog {
    file: Arc<File>,
    bytes: u64,
    /// Records in it, those too that are forgotten.
    records: usize,
    /// There may be something behind the end.
    is_torn: bool,
    /// With so many records it is tried again to forget some, after that did not succeed.
    swept_from: usize,
    /// How bytes are written; tests have a full disk here.
    write: fn(&File, &[u8], u64) -> io::Result<()>,
    /// Keeps other processes away.
    _lock: File,
}

impl Receipts {
    /// Opens the log in a home's own directory as a former server left it, with the records whose
    /// files have no name yet, in order. Temporary files of which there is no record are removed.
    /// `None` while another process has it, or where the file system knows no locks.
    ///
    /// # Errors
    /// What the system says.
    pub(super) fn open(directory: &Path) -> io::Result<Option<(Self, Vec<SmallFileRecord>)>> {
        // Never with those above: the exported directory may have gone, and must stay so.
        for path in [directory.to_owned(), directory.join(SMALL)] {
            make_private_directory(&path)?;
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let lock = options.mode(0o600).open(directory.join(LOCK))?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Ok(None);
        }
        let file = Arc::new(options.open(directory.join(LOG))?);
        let mut orphans = BTreeSet::new();
        for found in fs::read_dir(directory.join(SMALL))? {
            orphans.extend(found?.file_name().into_string());
        }
        let found = LogContent::read(&file, &orphans)?;
        // Before anything is removed or placed: what is here is what every later start finds.
        file.set_len(found.bytes)?;
        file.sync_data()?;
        File::open(directory)?.sync_all()?;
        let pending: Vec<_> = found.pending.into_values().collect();
        for record in &pending {
            orphans.remove(&record.temporary);
        }
        for stray in orphans {
            let _ = fs::remove_file(directory.join(SMALL).join(stray));
        }
        let log = ReceiptLog {
            file: file.clone(),
            bytes: found.bytes,
            records: found.records,
            is_torn: false,
            swept_from: 0,
            write: |file, bytes, at| file.write_all_at(bytes, at),
            _lock: lock,
        };
        let entries = found.entries;
        let receipts = Self {
            directory: directory.to_owned(),
            index: Mutex::new(Index { file, entries }),
            waiting: Mutex::default(),
            log: Mutex::new(log),
            placing: Mutex::default(),
        };
        Ok(Some((receipts, pending)))
    }

    /// Whether the log is still where it was opened.
    pub(super) fn is_in_place(&self) -> bool {
        let held = self.index().file.metadata();
        let named = fs::metadata(self.directory.join(LOG));
        let same = |held: &fs::Metadata, named: &fs::Metadata| {
            (held.dev(), held.ino()) == (named.dev(), named.ino())
        };
        held.is_ok_and(|held| named.is_ok_and(|named| same(&held, &named)))
    }

    /// Where the bytes of a file are until they have their name.
    pub(super) fn temporary(&self, name: &str) -> PathBuf {
        self.directory.join(SMALL).join(name)
    }

    /// Makes temporary names durable that there are by now.
    ///
    /// # Errors
    /// What the disk does not do.
    pub(super) fn sync_names(&self) -> Result<()> {
        sync_directory(&self.directory.join(SMALL))
    }

    /// What is decided about an upload.
    ///
    /// # Errors
    /// `ServerFault` when its record cannot be read any more.
    pub(super) fn find(&self, extract: ExtractionId) -> Result<Option<KnownRecord>> {
        let index = self.index();
        let Some(entry) = index.entries.get(&extract).copied() else {
            return Ok(None);
        };
        let file = index.file.clone();
        drop(index);
        let record = read(&file, &entry).map_err(|error| self.fault(error))?;
        Ok(Some(KnownRecord {
            record,
            placed: entry.placed,
        }))
    }

    /// Whether it is known that a file was given its name.
    pub(super) fn is_placed(&self, extract: ExtractionId) -> bool {
        let index = self.index();
        let entry = index.entries.get(&extract);
        entry.is_some_and(|entry| entry.placed != Placed::No)
    }

    /// Notes that a file was given its name.
    pub(super) fn set_placed(&self, extract: ExtractionId) {
        if let Some(entry) = self.index().entries.get_mut(&extract) {
            entry.placed = Placed::Yes;
        }
    }

    /// Takes back what was decided: the bytes went, and are needed once more. Durably, as a later
    /// start takes a file without bytes for one that has its name.
    ///
    /// # Errors
    /// What the disk does not do; then it stays decided.
    pub(super) fn take_back(&self, extract: ExtractionId) -> Result<()> {
        let log = self.log();
        let Some(entry) = self.index().entries.get(&extract).copied() else {
            return Ok(());
        };
        // A line that is not whole counts as not written.
        let spoilt = log.file.write_all_at(&[TAKEN_BACK], entry.offset);
        let spoilt = spoilt.and_then(|()| log.file.sync_data());
        spoilt.map_err(|error| self.fault(error))?;
        self.index().entries.remove(&extract);
        Ok(())
    }

    /// Does something that must not happen when there is a record of an upload, and must have
    /// happened before there can be one; `None` when there is.
    ///
    /// # Errors
    /// That of what is done.
    pub(super) fn unless_known<T>(
        &self,
        extract: ExtractionId,
        act: impl FnOnce() -> Result<T>,
    ) -> Result<Option<T>> {
        let _log = self.log();
        if self.index().entries.contains_key(&extract) {
            return Ok(None);
        }
        act().map(Some)
    }

    /// Decides records whose files are durable, with their temporary names: when this returns, so
    /// are the records. Those that come while others are made durable go together.
    ///
    /// # Errors
    /// [`Undecided`], for all of them.
    pub(super) fn decide(&self, records: Vec<SmallFileRecord>) -> Result<Vec<Decision>, Undecided> {
        let answer = DecisionReply::default();
        lock(&self.waiting).push((records, answer.clone()));
        let mut log = self.log();
        if answer.get().is_none() {
            let together = std::mem::take(&mut *lock(&self.waiting));
            self.decide_all(&mut log, together);
        }
        drop(log);
        answer.get().cloned().unwrap_or_else(|| {
            let error = self.fault(io::Error::other("deciding was interrupted"));
            Err(Undecided {
                error,
                is_sure: false,
            })
        })
    }

    fn decide_all(
        &self,
        log: &mut ReceiptLog,
        together: Vec<(Vec<SmallFileRecord>, DecisionReply)>,
    ) {
        let (mut text, mut fresh) = (String::new(), BTreeMap::new());
        let mut decide = |record: &SmallFileRecord| {
            let extract = record.receipt.extraction;
            if fresh.contains_key(&extract) || self.index().entries.contains_key(&extract) {
                return Decision::Known;
            }
            if fs::symlink_metadata(self.directory.join(extract.to_string())).is_ok() {
                return Decision::Begun;
            }
            let line = record.line();
            let entry = LogEntry {
                offset: log.bytes + text.len() as u64,
                length: u32::try_from(line.len()).unwrap_or(u32::MAX),
                placed: Placed::No,
                time: record.time,
            };
            text += &line;
            fresh.insert(extract, entry);
            Decision::Made
        };
        let mut decisions = Vec::new();
        for (records, _) in &together {
            decisions.push(records.iter().map(&mut decide).collect::<Vec<_>>());
        }
        let appended = match fresh.is_empty() {
            true => Ok(()),
            false => self.append(log, text.as_bytes(), fresh.len()),
        };
        if appended.is_ok() {
            self.index().entries.extend(fresh);
        }
        for ((_, answer), decided) in together.into_iter().zip(decisions) {
            // Nobody else answers: this one took the question.
            let _ = answer.set(appended.clone().map(|()| decided));
        }
        if self.index().entries.len() > HELD_MAX && log.records >= log.swept_from {
            self.sweep_log(log, clock::now(), RECEIPTS_MAX, HELD_MAX / 2);
        }
    }

    fn append(&self, log: &mut ReceiptLog, text: &[u8], records: usize) -> Result<(), Undecided> {
        log.mend().map_err(|error| Undecided {
            error: self.fault(error),
            is_sure: true,
        })?;
        let written = (log.write)(&log.file, text, log.bytes);
        if let Err(error) = written.and_then(|()| log.file.sync_data()) {
            log.is_torn = true;
            return Err(Undecided {
                error: self.fault(error),
                is_sure: log.mend().is_ok(),
            });
        }
        log.bytes += text.len() as u64;
        log.records += records;
        Ok(())
    }

    /// Forgets receipts that nobody needs any more, when they are a large part of the log.
    pub(super) fn sweep(&self, now: Time, receipts_max: usize) {
        self.sweep_log(&mut self.log(), now, receipts_max, HELD_MAX);
    }

    fn sweep_log(&self, log: &mut ReceiptLog, now: Time, receipts_max: usize, held_max: usize) {
        let mut entries: Vec<_> = {
            let index = self.index();
            let entries = index.entries.iter();
            entries.map(|(extract, entry)| (*extract, *entry)).collect()
        };
        // The youngest first: what was decided later is further behind.
        entries.sort_unstable_by_key(|(_, entry)| std::cmp::Reverse(entry.offset));
        let mut rank = 0;
        let (mut kept, gone): (Vec<_>, Vec<_>) = entries.into_iter().partition(|(_, entry)| {
            rank += 1;
            let age_ms = now.ms_since(entry.time);
            let is_young = age_ms <= RECEIPT_MS_MIN;
            let is_kept = is_young || (age_ms <= RECEIPT_MS_MAX && rank <= receipts_max);
            is_kept && rank <= held_max
        });
        let dead = log.records.saturating_sub(kept.len());
        if dead == 0 || dead * 4 < log.records {
            return;
        }
        kept.reverse();
        if let Err(error) = self.rewrite(log, &kept, &gone) {
            tracing::warn!(%error, "old receipts of small files stay");
            log.swept_from = log.records + HELD_MAX / 16;
        }
    }

    /// Writes the log anew, with what is kept.
    fn rewrite(
        &self,
        log: &mut ReceiptLog,
        kept: &[(ExtractionId, LogEntry)],
        gone: &[(ExtractionId, LogEntry)],
    ) -> io::Result<()> {
        let fresh = self.directory.join(LOG).with_extension("new");
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).mode(0o600);
        let file = options.truncate(true).open(&fresh)?;
        let written = copied(&log.file, kept, &file);
        let written = written.and_then(|copied| {
            file.sync_all()?;
            fs::rename(&fresh, self.directory.join(LOG))?;
            Ok(copied)
        });
        let (offset, offsets) = written.inspect_err(|_| {
            // The disk may be full.
            let _ = fs::remove_file(&fresh);
        })?;
        let file = Arc::new(file);
        let mut index = self.index();
        index.file = file.clone();
        index
            .entries
            .retain(|extract, entry| match offsets.get(extract) {
                Some(offset) => {
                    entry.offset = *offset;
                    true
                }
                None => false,
            });
        drop(index);
        let old = std::mem::replace(&mut log.file, file);
        (log.bytes, log.records, log.is_torn) = (offset, offsets.len(), false);
        log.swept_from = 0;
        File::open(&self.directory)?.sync_all()?;
        // Only now: with the record, a file that is missing would count as placed.
        for (_, entry) in gone.iter().filter(|(_, entry)| entry.placed == Placed::No) {
            if let Ok(record) = read(&old, entry) {
                let _ = fs::remove_file(self.temporary(&record.temporary));
            }
        }
        Ok(())
    }

    fn fault(&self, error: io::Error) -> Error {
        fault(&self.directory.join(LOG), error)
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        lock(&self.index)
    }

    fn log(&self) -> MutexGuard<'_, ReceiptLog> {
        lock(&self.log)
    }
}

impl ReceiptLog {
    /// Takes away, durably, what a failure may have left behind the end.
    fn mend(&mut self) -> io::Result<()> {
        if self.is_torn {
            self.file.set_len(self.bytes)?;
            self.file.sync_data()?;
            self.is_torn = false;
        }
        Ok(())
    }
}

/// What is in a log.
#[derive(Default)]
struct LogContent {
    entries: BTreeMap<ExtractionId, LogEntry>,
    /// Records whose files have no name yet, by their place.
    pending: BTreeMap<u64, SmallFileRecord>,
    records: usize,
    /// Up to the end of the last record.
    bytes: u64,
    /// In lines that are not whole, and were not taken back.
    damaged_bytes: usize,
}

impl LogContent {
    fn read(file: &File, temporaries: &BTreeSet<String>) -> io::Result<Self> {
        let (mut found, mut line, mut at) = (Self::default(), Vec::new(), 0);
        let mut reader = BufReader::new(file);
        loop {
            line.clear();
            let mut limited = reader.by_ref().take(LINE_BYTES_MAX);
            let length = limited.read_until(b'\n', &mut line)?;
            if length == 0 {
                break;
            }
            match SmallFileRecord::parse(&line) {
                Some(record) => found.add(at, length, record, temporaries),
                None if line[0] == TAKEN_BACK => {}
                None => found.damaged_bytes += length,
            }
            at += length as u64;
        }
        if found.damaged_bytes > 0 {
            let bytes = found.damaged_bytes;
            tracing::warn!(bytes, "what is no whole receipt is passed over");
        }
        Ok(found)
    }

    fn add(
        &mut self,
        offset: u64,
        length: usize,
        record: SmallFileRecord,
        temporaries: &BTreeSet<String>,
    ) {
        let placed = match temporaries.contains(&record.temporary) {
            true => Placed::No,
            false => Placed::Seems,
        };
        let entry = LogEntry {
            offset,
            length: u32::try_from(length).unwrap_or(u32::MAX),
            placed,
            time: record.time,
        };
        if let Some(before) = self.entries.insert(record.receipt.extraction, entry) {
            self.pending.remove(&before.offset);
        }
        if placed == Placed::No {
            self.pending.insert(offset, record);
        }
        self.records += 1;
        self.bytes = offset + length as u64;
    }
}

/// Copies records to another log, but for those that the disk has damaged. Answers how long that is
/// and where each record is.
fn copied(
    from: &File,
    kept: &[(ExtractionId, LogEntry)],
    to: &File,
) -> io::Result<(u64, BTreeMap<ExtractionId, u64>)> {
    let (mut writer, mut offset, mut offsets) = (BufWriter::new(to), 0, BTreeMap::new());
    for (extract, entry) in kept {
        let line = match read(from, entry) {
            Ok(record) => record.line(),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                tracing::warn!(%extract, %error, "it is forgotten: the file may come once more");
                continue;
            }
            Err(error) => return Err(error),
        };
        writer.write_all(line.as_bytes())?;
        offsets.insert(*extract, offset);
        offset += line.len() as u64;
    }
    writer.flush()?;
    drop(writer);
    Ok((offset, offsets))
}

fn read(file: &File, entry: &LogEntry) -> io::Result<SmallFileRecord> {
    let mut line = vec![0; entry.length as usize];
    file.read_exact_at(&mut line, entry.offset)?;
    SmallFileRecord::parse(&line).ok_or_else(|| {
        let text = "a receipt is damaged";
        io::Error::new(io::ErrorKind::InvalidData, text)
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No holder leaves what is behind it half-changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
impl Receipts {
    /// What is left of a line when the disk is full: every write stops after so many bytes.
    pub(super) const FULL_AFTER: usize = 40;

    /// Fills the disk, or makes room again.
    pub(super) fn set_full(&self, is_full: bool) {
        self.log().write = match is_full {
            true => |file, bytes, at| {
                file.write_all_at(&bytes[..Self::FULL_AFTER], at)?;
                Err(rustix::io::Errno::NOSPC.into())
            },
            false => |file, bytes, at| file.write_all_at(bytes, at),
        };
    }

    /// Takes away that anything can be written or cut.
    pub(super) fn set_read_only(&self) {
        let file = File::open(self.directory.join(LOG)).expect("log");
        self.log().file = Arc::new(file);
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::ErrorCode;
    use bafs_proto::hash::Digest;
    use bafs_proto::message::PutReceipt;

    use super::*;

    const MINUTE_MS: u64 = 60_000;

    fn record(number: u128, time: Time) -> SmallFileRecord {
        SmallFileRecord {
            receipt: PutReceipt {
                extraction: ExtractionId(number),
                path: format!("a \"dir\"\n/file {number}"),
                size: number as u64,
                digest: Digest::of(&number.to_le_bytes()),
            },
            temporary: format!("t{number}"),
            time,
        }
    }

    fn open(directory: &Path) -> (Receipts, Vec<SmallFileRecord>) {
        let opened = Receipts::open(directory).expect("open");
        opened.expect("nobody has it")
    }

    fn made(receipts: &Receipts, number: u128) {
        let decided = receipts.decide(vec![record(number, Time(number as u64))]);
        assert_eq!(decided, Ok(vec![Decision::Made]));
    }

    fn numbers(receipts: &Receipts) -> Vec<u128> {
        let entries = &receipts.index().entries;
        entries.keys().map(|extract| extract.0).collect()
    }

    #[test]
    fn revoked_receipts_do_not_count_as_damage() {
        let root = tempfile::tempdir().expect("directory");
        let (receipts, _) = open(root.path());
        (1..=2).for_each(|number| made(&receipts, number));
        receipts.take_back(ExtractionId(1)).expect("take back");
        let log = File::open(root.path().join(LOG)).expect("log");
        let found = LogContent::read(&log, &BTreeSet::new()).expect("read");
        assert_eq!((found.damaged_bytes, found.records), (0, 1));
    }

    #[test]
    fn damaged_lines_are_skipped_and_others_count() {
        let root = tempfile::tempdir().expect("directory");
        let (receipts, _) = open(root.path());
        (1..=3).for_each(|number| made(&receipts, number));
        let known = receipts
            .find(ExtractionId(2))
            .expect("read")
            .expect("known");
        assert_eq!(known.record, record(2, Time(2)));
        drop(receipts);
        // Of the last line the end did not come to the disk.
        let log = root.path().join(LOG);
        let text = fs::read(&log).expect("read");
        fs::write(&log, &text[..text.len() - 5]).expect("write");
        let (receipts, _) = open(root.path());
        assert_eq!(numbers(&receipts), [1, 2]);
        let left = fs::read_to_string(&log).expect("read");
        assert_eq!((left.lines().count(), left.ends_with('\n')), (2, true));
        made(&receipts, 4);
        drop(receipts);
        let (receipts, _) = open(root.path());
        assert_eq!(numbers(&receipts), [1, 2, 4], "what follows is whole");
        drop(receipts);
        // The disk lost a byte of the first.
        let mut text = fs::read(&log).expect("read");
        text[30] ^= 1;
        fs::write(&log, &text).expect("write");
        let (receipts, _) = open(root.path());
        assert_eq!(numbers(&receipts), [2, 4]);
        let known = receipts
            .find(ExtractionId(4))
            .expect("read")
            .expect("known");
        assert_eq!(known.record, record(4, Time(4)));
    }

    #[test]
    fn a_full_disk_leaves_no_partial_record() {
        let root = tempfile::tempdir().expect("directory");
        let (receipts, _) = open(root.path());
        made(&receipts, 1);
        let log = root.path().join(LOG);
        let before = fs::read(&log).expect("read");
        receipts.set_full(true);
        let refused = receipts.decide(vec![record(2, Time(2))]);
        let refused = refused.expect_err("the disk is full");
        assert_eq!(refused.error.code, ErrorCode::NoSpaceBytes);
        assert!(refused.is_sure);
        assert_eq!(fs::read(&log).expect("read"), before);
        receipts.set_full(false);
        made(&receipts, 2);
        drop(receipts);
        let (receipts, _) = open(root.path());
        assert_eq!(numbers(&receipts), [1, 2]);
        // A disk that takes nothing back either may show the record to a later start.
        receipts.set_read_only();
        let refused = receipts.decide(vec![record(3, Time(3))]);
        assert!(!refused.expect_err("nothing is written").is_sure);
    }

    #[test]
    fn old_receipts_expire_and_others_keep_their_order() {
        let root = tempfile::tempdir().expect("directory");
        let (receipts, _) = open(root.path());
        let now = Time(2 * RECEIPT_MS_MAX);
        for (number, minutes) in [(5, 90), (1, 80), (4, 70), (2, 30), (3, 10)] {
            let time = Time(now.0 - minutes * MINUTE_MS);
            fs::write(receipts.temporary(&format!("t{number}")), b"x").expect("write");
            let decided = receipts.decide(vec![record(number, time)]);
            assert_eq!(decided, Ok(vec![Decision::Made]));
        }
        receipts.set_placed(ExtractionId(4));
        receipts.sweep(now, 5);
        assert_eq!(numbers(&receipts), [1, 2, 3, 4, 5]);
        receipts.sweep(now, 3);
        assert_eq!(numbers(&receipts), [2, 3, 4]);
        // What never got its name goes with its record, and only that.
        let is_there = |number: &u128| receipts.temporary(&format!("t{number}")).exists();
        let left: Vec<_> = (1..=5).filter(is_there).collect();
        assert_eq!(left, [2, 3, 4]);
        let known = receipts
            .find(ExtractionId(4))
            .expect("read")
            .expect("known");
        assert_eq!(known.record.receipt, record(4, now).receipt);
        assert_ne!(known.placed, Placed::No);
        receipts.sweep(now, 0);
        assert_eq!(numbers(&receipts), [2, 3]);
        made(&receipts, 7);
        drop(receipts);
        let (receipts, pending) = open(root.path());
        assert_eq!(numbers(&receipts), [2, 3, 7]);
        let pending: Vec<_> = pending.iter().map(|it| it.receipt.extraction.0).collect();
        assert_eq!(pending, [2, 3], "in the order of the log");
        receipts.sweep(now.plus_ms(RECEIPT_MS_MAX), RECEIPTS_MAX);
        assert_eq!(numbers(&receipts), [0; 0]);
        assert_eq!(fs::read(root.path().join(LOG)).expect("read"), b"");
    }

    #[test]
    fn a_revoked_receipt_can_be_recorded_again() {
        let root = tempfile::tempdir().expect("directory");
        let (receipts, _) = open(root.path());
        (1..=2).for_each(|number| made(&receipts, number));
        receipts.take_back(ExtractionId(1)).expect("take back");
        assert_eq!(numbers(&receipts), [2]);
        drop(receipts);
        let (receipts, _) = open(root.path());
        assert_eq!(numbers(&receipts), [2], "also after a start");
        made(&receipts, 1);
        drop(receipts);
        let (receipts, _) = open(root.path());
        assert_eq!(numbers(&receipts), [1, 2]);
        receipts.set_read_only();
        receipts
            .take_back(ExtractionId(1))
            .expect_err("the disk does not");
        assert_eq!(numbers(&receipts), [1, 2], "so it stays decided");
    }

    #[test]
    fn the_sweep_drops_damaged_receipts() {
        let root = tempfile::tempdir().expect("directory");
        let (receipts, _) = open(root.path());
        (1..=4).for_each(|number| made(&receipts, number));
        let log = root.path().join(LOG);
        let line = receipts.index().entries[&ExtractionId(3)];
        receipts
            .log()
            .file
            .write_all_at(b"?", line.offset + 30)
            .expect("damage");
        receipts.sweep(Time(RECEIPT_MS_MIN + 100), 2);
        assert_eq!(
            numbers(&receipts),
            [4],
            "two are kept, of which one is damaged"
        );
        let left = fs::read_to_string(&log).expect("read");
        assert_eq!(left.lines().count(), 1);
        assert!(!log.with_extension("new").exists());
    }

    #[test]
    fn concurrent_writers_record_each_receipt_once() {
        let root = tempfile::tempdir().expect("directory");
        let (receipts, _) = open(root.path());
        let decided: Vec<_> = std::thread::scope(|scope| {
            let decide = |first| {
                let records = vec![record(first, Time(1)), record(7, Time(1))];
                scope.spawn(|| receipts.decide(records).expect("decide"))
            };
            let all: Vec<_> = (100..120).map(decide).collect();
            all.into_iter().map(|it| it.join().expect("join")).collect()
        });
        assert!(decided.iter().all(|one| one[0] == Decision::Made));
        let made = decided.iter().filter(|one| one[1] == Decision::Made);
        assert_eq!(made.count(), 1);
        drop(receipts);
        let (receipts, _) = open(root.path());
        assert_eq!(receipts.log().records, 21);
    }
}
