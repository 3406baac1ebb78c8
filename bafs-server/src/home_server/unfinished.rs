//! Uploads that ended before their files did: what they hold, and how they give their room to
//! others. Gives no file its name; which of them shall is decided elsewhere (`space_queue.rs`).

use std::cell::LazyCell;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bafs_proto::ids::ExtractionId;
use bafs_proto::message::BeginPut;
use bafs_proto::{Error, ErrorCode, Result};
use rustix::fs::statvfs;

use super::export::Export;
use super::space_queue::{STALE_MS, is_full};
use super::upload::UploadRecord;
use super::upload_files::{UploadFiles, fault};
use super::upload_recovery::changed_at;
use super::upload_table::{UploadTable, has_table};
use super::uploads::Uploads;
use crate::clock;

/// An upload of which bytes came, but not all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnfinishedUpload {
    /// Its number.
    pub extract: ExtractionId,
    /// Where the file shall be.
    pub target: String,
    /// Where its bytes are.
    pub file: PathBuf,
    /// What came so far.
    pub bytes: u64,
    /// Since when nothing came, in milliseconds.
    pub idle_ms: u64,
}

impl UnfinishedUpload {
    /// Whether nobody continued it for so long that it may be removed; it would come anew.
    pub fn is_stale(&self) -> bool {
        self.idle_ms > STALE_MS
    }

    /// Removes its bytes, so that it starts again from 0.
    ///
    /// # Errors
    /// What the disk does not do.
    pub fn remove(&self) -> io::Result<()> {
        fs::remove_file(&self.file)
    }
}

/// The uploads to an exported directory of which bytes came, but not all.
///
/// # Errors
/// When the home server's own directory there cannot be read.
pub fn list_unfinished_uploads(export: &Path) -> Result<Vec<UnfinishedUpload>> {
    let files = UploadFiles::new(Arc::new(Export::open(export)?));
    let directory = &files.directory;
    fs::metadata(directory).map_err(|error| fault(directory, error))?;
    // A home that never took anything has none.
    match has_table(directory) {
        true => list_in_table(&files, &UploadTable::new(directory)?),
        false => Ok(Vec::new()),
    }
}

fn list_in_table(files: &UploadFiles, table: &UploadTable) -> Result<Vec<UnfinishedUpload>> {
    let now = clock::now();
    let mut found = Vec::new();
    for (extract, record) in table.run(|rows| rows.open_uploads())? {
        let file = files.data_path(&extract.to_string());
        // What is decided gets its name, so there is nothing unfinished.
        let (true, Ok(data)) = (record.is_receiving(), fs::metadata(&file)) else {
            continue;
        };
        found.push(UnfinishedUpload {
            extract,
            target: record.path,
            bytes: data.len(),
            idle_ms: now.ms_since(changed_at(&file).unwrap_or_default()),
            file,
        });
    }
    found.sort_by_key(|upload| upload.extract);
    Ok(found)
}

impl Uploads {
    fn unfinished(&self) -> Vec<UnfinishedUpload> {
        list_in_table(&self.files, &self.table).unwrap_or_else(|error| {
            let directory = self.files.directory.display();
            tracing::warn!(%error, "cannot list the uploads at {directory}");
            Vec::new()
        })
    }

    /// Removes earlier uploads to the same place that the disk refused or a former server left, and
    /// that nobody continues: who begins anew knows nothing of them.
    pub(super) fn supersede(&self, call: &BeginPut) -> Result<()> {
        let waiting = self.queue.waiting(&call.path);
        if waiting.is_empty() || self.load(call.extraction)?.is_some() {
            return Ok(());
        }
        let (extract, path, fence) = (call.extraction, call.path.clone(), call.fence);
        self.table
            .run(move |rows| rows.check_fence(extract, &path, fence))?;
        for other in waiting {
            self.give_up(other, || self.queue.is_waiting(other));
        }
        Ok(())
    }

    /// Drops what came of an upload that the disk refused, where others want the room: of several
    /// that hold a part each, none would ever be whole. The one that holds most keeps it, unless
    /// it gets no further.
    pub(super) fn give_way(&self, extract: ExtractionId) {
        let dropped = self.arrivals.locked(extract, |slot| {
            // Whoever sends may have begun again, and even ended, since the refusal.
            if !self.queue.must_give_way(extract, clock::now()) {
                return Ok(());
            }
            let upload = self.load(extract)?;
            let Some(upload) = upload.filter(UploadRecord::is_receiving) else {
                return Ok(());
            };
            *slot = None;
            let path = self.files.data_path(&extract.to_string());
            let file = File::options().write(true).open(&path);
            let emptied = file.and_then(|file| file.set_len(0));
            emptied.map_err(|error| fault(&path, error))?;
            self.queue.gave_way(extract);
            let target = &upload.path;
            tracing::warn!(
                "the disk is full: the upload of '{target}' is dropped to free space, and starts \
                 again later"
            );
            Ok(())
        });
        if let Err(error) = dropped {
            tracing::warn!(%extract, %error, "an upload that the disk refused keeps its room");
        }
    }

    /// Removes what nobody continues any more, but not the one that asks; whether that was
    /// anything.
    pub(super) fn make_room(&self, asks: Option<ExtractionId>) -> bool {
        let now = clock::now();
        let all = self.unfinished();
        let stale = all.iter().filter(|upload| {
            Some(upload.extract) != asks
                && upload.bytes > 0
                && self.queue.is_stale(upload.extract, upload.idle_ms, now)
        });
        let removed = stale.filter(|upload| {
            let (extract, idle_ms) = (upload.extract, upload.idle_ms);
            self.give_up(extract, || self.queue.is_stale(extract, idle_ms, now))
        });
        removed.count() > 0
    }

    /// Removes an upload that is not decided, if it is still so that it may be; whether it did.
    pub(super) fn give_up(&self, extract: ExtractionId, may_be: impl FnOnce() -> bool) -> bool {
        let held = fs::metadata(self.files.data_path(&extract.to_string()));
        let held = held.map_or(0, |data| data.len());
        let removed =
            self.load(extract)
                .and_then(|record| match record.filter(UploadRecord::is_receiving) {
                    Some(record) => self.remove(extract, record, may_be),
                    None => Ok(false),
                });
        match &removed {
            Ok(true) => tracing::warn!(%extract, "removed {held} bytes of an abandoned upload"),
            Ok(false) => {}
            Err(error) => tracing::warn!(%extract, %error, "cannot remove an abandoned upload"),
        }
        removed.unwrap_or(false)
    }

    /// The same error; one that tells of a full disk with what is free and what uploads hold. That
    /// is logged here as well: who has the disk must make room.
    pub(crate) fn with_room(&self, error: Error) -> Error {
        match error.code {
            ErrorCode::NoSpaceBytes => error.context(self.tell_room()),
            _ => error,
        }
    }

    /// As [`Self::with_room`], for each. What nobody continues makes room for who comes again.
    pub(super) fn each_with_room<T>(&self, results: Vec<Result<T>>) -> Vec<Result<T>> {
        if results.iter().any(is_full) {
            self.queue.note_wanted();
            self.make_room(None);
        }
        let room = LazyCell::new(|| self.tell_room());
        let tell = |error: Error| match error.code {
            ErrorCode::NoSpaceBytes => error.context(&*room),
            _ => error,
        };
        let told = results.into_iter().map(|result| result.map_err(tell));
        told.collect()
    }

    /// What is free and what uploads hold; logs it, not too often.
    fn tell_room(&self) -> String {
        let room = self.describe_room();
        if self.queue.is_time_to_tell(clock::now()) {
            tracing::warn!("{room}: uploads that do not fit wait for space");
        }
        room
    }

    fn describe_room(&self) -> String {
        let root = self.files.export.root_path();
        let free = statvfs(root).map(|found| (found.f_bavail * found.f_frsize, found.f_favail));
        let told = |(bytes, files)| format!("{bytes} bytes, {files} files");
        let free = free.map_or_else(|_| "unknown".to_owned(), told);
        let held = self.unfinished();
        let bytes: u64 = held.iter().map(|upload| upload.bytes).sum();
        // A home that could not start has no name yet.
        let home = match self.files.export.name() {
            "" => "no space at home".to_owned(),
            name => format!("no space at home '{name}'"),
        };
        format!(
            "{home}: free at {}: {free}; unfinished uploads there: {} of {bytes} bytes, in {}",
            root.display(),
            held.len(),
            self.files.directory.display()
        )
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::sync::Arc;
    use std::time::{Duration, SystemTime};

    use bafs_proto::hash::Digest;
    use bafs_proto::message::{CommitPut, PutReceipt};
    use bafs_proto::time::{Deadline, Time};

    use super::super::export::Export;
    use super::super::space_queue::WANTED_MS;
    use super::*;

    fn open(root: &Path) -> Arc<Uploads> {
        let export = Arc::new(Export::open(root).expect("export"));
        Arc::new(Uploads::open(export).expect("uploads"))
    }

    fn call(number: u128, path: &str) -> BeginPut {
        BeginPut {
            extraction: ExtractionId(number),
            path: path.to_owned(),
            mode: 0o640,
            fence: None,
        }
    }

    fn data_path(uploads: &Uploads, number: u128) -> PathBuf {
        uploads.files.data_path(&ExtractionId(number).to_string())
    }

    fn begin(uploads: &Uploads, number: u128, path: &str) {
        let begun = uploads.begin(&call(number, path), |_| Ok(()));
        begun.expect("begin");
    }

    fn write(uploads: &Uploads, number: u128, offset: u64) -> Result<u64> {
        let written = uploads.write(ExtractionId(number), offset, b"data", |_| Ok(()));
        written.map(|progress| progress.received_bytes)
    }

    /// Begins an upload whose bytes meet a full disk.
    fn begin_full(uploads: &Uploads, number: u128, path: &str) {
        symlink("/dev/full", data_path(uploads, number)).expect("link");
        begin(uploads, number, path);
    }

    /// Notes that the disk refused an upload of which so many bytes are there.
    fn refuse(uploads: &Uploads, number: u128, held_bytes: u64) {
        let error = Error::new(ErrorCode::NoSpaceBytes, "full");
        let target = format!("f{number}");
        uploads
            .queue
            .note(ExtractionId(number), target, &error, held_bytes);
    }

    /// Commits an upload of what [`write`] sends.
    fn commit(uploads: &Uploads, number: u128) -> Result<PutReceipt> {
        let commit = CommitPut {
            extraction: ExtractionId(number),
            size: 4,
            digest: Digest::of(b"data"),
            fence: None,
        };
        uploads.commit(&commit, |_| Ok(()))
    }

    /// Does to the bytes of an upload what another server may.
    fn empty(uploads: &Uploads, number: u128) {
        let data = data_path(uploads, number);
        fs::set_permissions(&data, fs::Permissions::from_mode(0o600)).expect("mode");
        let file = File::options().write(true).open(&data).expect("open");
        file.set_len(0).expect("truncate");
    }

    fn code(told: Result<u64>) -> ErrorCode {
        told.expect_err("must be refused").code
    }

    #[tokio::test]
    async fn chunks_waiting_behind_a_refused_one_fail_immediately() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        begin_full(&uploads, 1, "f");
        let (later, extract) = (Arc::clone(&uploads), ExtractionId(1));
        let waiting = async move { later.turn(extract, 4, Deadline::after_ms(600_000)).await };
        let waiting = tokio::spawn(waiting);
        // It waits before the bytes ahead of it are refused.
        tokio::task::yield_now().await;
        assert_eq!(code(write(&uploads, 1, 0)), ErrorCode::NoSpaceBytes);
        let turn = tokio::time::timeout(Duration::from_secs(20), waiting).await;
        turn.expect("it waits no longer").expect("join");
        // There is room again, but what was refused is missing until who sends begins again.
        fs::remove_file(data_path(&uploads, 1)).expect("remove");
        assert_eq!(code(write(&uploads, 1, 4)), ErrorCode::NoSpaceBytes);
        begin(&uploads, 1, "f");
        assert_eq!(write(&uploads, 1, 0), Ok(4));
        assert_eq!(
            code(write(&uploads, 1, 9)),
            ErrorCode::Conflict,
            "no refusal"
        );
    }

    #[test]
    fn new_uploads_replace_refused_data_of_their_path() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        for (number, path) in [(1, "f"), (2, "g")] {
            begin_full(&uploads, number, path);
            assert_eq!(code(write(&uploads, number, 0)), ErrorCode::NoSpaceBytes);
        }
        begin(&uploads, 3, "f");
        assert_eq!(write(&uploads, 3, 0), Ok(4));
        begin(&uploads, 4, "f");
        let left = [1, 2, 3, 4].map(|number| data_path(&uploads, number).exists());
        assert_eq!(left, [false, true, true, true], "the others may go on");
    }

    #[test]
    fn a_full_disk_keeps_the_largest_partial_upload() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        let held = |number: u128| {
            let data = data_path(&uploads, number);
            fs::metadata(data).map_or(0, |data| data.len())
        };
        let end_full = |number: u128, held_bytes: u64| {
            refuse(&uploads, number, held_bytes);
            uploads.give_way(ExtractionId(number));
        };
        for number in [1, 2] {
            begin(&uploads, number, &format!("f{number}"));
            assert_eq!(write(&uploads, number, 0), Ok(4));
        }
        assert_eq!(write(&uploads, 2, 4), Ok(8));
        end_full(2, 8);
        assert_eq!(held(2), 8, "it holds most");
        end_full(1, 4);
        assert_eq!(held(1), 0);
        let waits = |number| {
            let told = uploads.begin(&call(number, &format!("f{number}")), |_| Ok(()));
            assert_eq!(code(told.map(|_| 0)), ErrorCode::NoSpaceBytes, "it waits");
            assert_eq!(code(write(&uploads, number, 0)), ErrorCode::NoSpaceBytes);
        };
        waits(1);
        // It may be larger than the disk: the other must not wait for it for ever.
        begin(&uploads, 2, "f2");
        end_full(2, 8);
        assert_eq!(held(2), 0);
        waits(2);
        begin(&uploads, 1, "f1");
        assert_eq!(write(&uploads, 1, 0), Ok(4), "it begins anew");
        commit(&uploads, 1).expect("commit");
        begin(&uploads, 2, "f2");
        assert_eq!(write(&uploads, 2, 0), Ok(4), "nobody else wants the room");
        for _ in 0..2 {
            end_full(2, 4);
            begin(&uploads, 2, "f2");
        }
        assert_eq!(held(2), 4, "nor now");
        uploads.queue.note_wanted();
        end_full(2, 4);
        assert_eq!(held(2), 0, "a small file does");
        waits(2);
    }

    /// Else an empty file would have its name.
    #[test]
    fn resumed_or_committed_uploads_are_not_dropped() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        for number in [1, 2] {
            begin(&uploads, number, &format!("f{number}"));
            assert_eq!(write(&uploads, number, 0), Ok(4));
            refuse(&uploads, number, number as u64);
        }
        begin(&uploads, 1, "f1");
        uploads.give_way(ExtractionId(1));
        let data = data_path(&uploads, 1);
        assert_eq!(fs::metadata(&data).expect("it is there").len(), 4);
        commit(&uploads, 1).expect("commit");
        refuse(&uploads, 1, 1);
        uploads.give_way(ExtractionId(1));
        assert!(!data.exists());
        assert_eq!(fs::read(root.path().join("f1")).expect("read"), b"data");
    }

    #[test]
    fn refused_uploads_make_room_after_a_minute() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        begin(&uploads, 1, "f1");
        assert_eq!(write(&uploads, 1, 0), Ok(4));
        refuse(&uploads, 1, 4);
        assert!(
            !uploads.make_room(Some(ExtractionId(2))),
            "it may come again"
        );
        let long_ago = Time(clock::now().0 - WANTED_MS - 1_000);
        let refuse_then = |at| uploads.queue.set_at(ExtractionId(1), at);
        refuse_then(long_ago);
        uploads.queue.resume(ExtractionId(1));
        refuse_then(long_ago);
        assert!(!uploads.make_room(Some(ExtractionId(2))), "it goes on");
        refuse(&uploads, 1, 4);
        refuse_then(long_ago);
        assert!(uploads.make_room(Some(ExtractionId(2))));
        assert!(!data_path(&uploads, 1).exists());
    }

    #[test]
    fn a_write_after_dropped_bytes_is_refused() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        begin(&uploads, 1, "f1");
        assert_eq!(write(&uploads, 1, 0), Ok(4));
        empty(&uploads, 1);
        write(&uploads, 1, 4).expect_err("there would be a hole");
        let data = data_path(&uploads, 1);
        assert_eq!(fs::metadata(&data).expect("it is there").len(), 0);
        begin(&uploads, 1, "f1");
        assert_eq!(write(&uploads, 1, 0), Ok(4));
    }

    #[test]
    fn a_commit_refuses_data_of_another_length() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        begin(&uploads, 1, "d/f");
        assert_eq!(write(&uploads, 1, 0), Ok(4));
        // No directory can be made there, so the commit is decided and not done.
        fs::write(root.path().join("d"), b"").expect("write");
        commit(&uploads, 1).expect_err("in the way");
        fs::remove_file(root.path().join("d")).expect("remove");
        empty(&uploads, 1);
        commit(&uploads, 1).expect_err("its bytes are gone");
        assert!(!root.path().join("d/f").exists());
        begin(&uploads, 1, "d/f");
        assert_eq!(write(&uploads, 1, 0), Ok(4));
        commit(&uploads, 1).expect("commit");
        assert_eq!(fs::read(root.path().join("d/f")).expect("read"), b"data");
    }

    #[test]
    fn a_new_upload_removes_leftovers_of_its_path() {
        let root = tempfile::tempdir().expect("directory");
        let former = open(root.path());
        for number in [1, 2, 3] {
            begin(&former, number, &format!("f{}", number % 2));
            assert_eq!(write(&former, number, 0), Ok(4));
        }
        drop(former);
        let uploads = open(root.path());
        begin(&uploads, 1, "f1");
        begin(&uploads, 4, "f1");
        let left = [1, 2, 3, 4].map(|number| data_path(&uploads, number).exists());
        assert_eq!(left, [true, true, false, true], "what goes on stays");
    }

    #[test]
    fn a_full_disk_removes_stale_uploads() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        for (number, idle_ms) in [(1, STALE_MS + 60_000), (2, 0)] {
            begin(&uploads, number, &format!("f{number}"));
            assert_eq!(write(&uploads, number, 0), Ok(4));
            let data = data_path(&uploads, number);
            let data = File::options().write(true).open(data);
            let since = Duration::from_millis(clock::now().0 - idle_ms);
            let time = SystemTime::UNIX_EPOCH + since;
            data.and_then(|data| data.set_modified(time)).expect("time");
        }
        let found = list_unfinished_uploads(root.path()).expect("list");
        let told = found
            .iter()
            .map(|it| (it.target.as_str(), it.bytes, it.is_stale()));
        assert_eq!(
            told.collect::<Vec<_>>(),
            [("f1", 4, true), ("f2", 4, false)]
        );
        begin_full(&uploads, 3, "g");
        assert_eq!(code(write(&uploads, 3, 0)), ErrorCode::NoSpaceBytes);
        let left = [1, 2, 3].map(|number| data_path(&uploads, number).exists());
        assert_eq!(left, [false, true, true]);
    }
}
