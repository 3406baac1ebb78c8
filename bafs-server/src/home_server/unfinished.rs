//! Uploads that ended before their files did: what they hold, and how they give their room to
//! others. Gives no file its name; which of them shall is decided elsewhere (`refused.rs`).

use std::cell::LazyCell;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use bafs_proto::ids::ExtractionId;
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode, Result};
use rustix::fs::statvfs;

use super::export::OWN_DIRECTORY;
use super::puts::{DATA, Phase, Puts, fault, loaded};
use crate::clock;

/// An upload that nobody continued for so long gives its room to others on a full disk, in
/// milliseconds: whoever still wants the file asks again earlier, and sends it anew else.
pub(super) const STALE_MS: u64 = 600_000;

/// An upload of which bytes came, but not all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnfinishedUpload {
    /// Its number.
    pub extract: ExtractionId,
    /// Where the file shall be.
    pub target: String,
    /// Where its bytes are.
    pub directory: PathBuf,
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

    /// Removes it.
    ///
    /// # Errors
    /// What the disk does not do.
    pub fn remove(&self) -> io::Result<()> {
        fs::remove_dir_all(&self.directory)
    }
}

/// The uploads to an exported directory of which bytes came, but not all.
///
/// # Errors
/// When the home server's own directory there cannot be read.
pub fn list_unfinished_uploads(export: &Path) -> io::Result<Vec<UnfinishedUpload>> {
    let now = clock::now();
    let mut found = Vec::new();
    for entry in fs::read_dir(export.join(OWN_DIRECTORY))? {
        let entry = entry?;
        let directory = entry.path();
        let extract = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        // What is whole has its name, so there is nothing of it here.
        let (Some(extract), Ok(data)) = (extract, fs::metadata(directory.join(DATA))) else {
            continue;
        };
        let Ok(Some(upload)) = loaded(&directory) else {
            continue;
        };
        let since = data.modified()?.duration_since(std::time::UNIX_EPOCH);
        let since = since.unwrap_or_default().as_millis();
        found.push(UnfinishedUpload {
            extract,
            target: upload.path,
            directory,
            bytes: data.len(),
            idle_ms: now.ms_since(Time(u64::try_from(since).unwrap_or(u64::MAX))),
        });
    }
    found.sort_by_key(|upload| upload.extract);
    Ok(found)
}

impl Puts {
    /// Notes what a former server left unfinished.
    pub(super) fn find_left(&self) {
        for upload in self.unfinished() {
            self.refused.note_left(upload.extract, upload.target);
        }
    }

    fn unfinished(&self) -> Vec<UnfinishedUpload> {
        let found = list_unfinished_uploads(self.export.root_path());
        found.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot list the uploads at {}", self.directory.display());
            Vec::new()
        })
    }

    /// Removes earlier uploads to the same place that the disk refused or a former server left, and
    /// that nobody continues: who begins anew knows nothing of them.
    pub(super) fn supersede(&self, extract: ExtractionId, path: &str) {
        if self.place(extract).exists() {
            return;
        }
        for other in self.refused.waiting(path) {
            self.give_up(other, || self.refused.is_waiting(other));
        }
    }

    /// Drops what came of an upload that the disk refused, where others want the room: of several
    /// that hold a part each, none would ever be whole. The one that holds most keeps it, unless
    /// it gets no further.
    pub(super) fn give_way(&self, extract: ExtractionId) {
        let dropped = self.arrivals.locked(extract, |slot| {
            // Whoever sends may have begun again, and even ended, since the refusal.
            if !self.refused.must_give_way(extract, clock::now()) {
                return Ok(());
            }
            let upload = self.load(extract)?;
            let Some(upload) = upload.filter(|upload| upload.phase == Phase::Receiving) else {
                return Ok(());
            };
            *slot = None;
            let path = self.place(extract).join(DATA);
            let file = File::options().write(true).open(&path);
            let emptied = file.and_then(|file| file.set_len(0));
            emptied.map_err(|error| fault(&path, error))?;
            self.refused.gave_way(extract);
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
                && self.refused.is_stale(upload.extract, upload.idle_ms, now)
        });
        let removed = stale.filter(|upload| {
            let (extract, idle_ms) = (upload.extract, upload.idle_ms);
            self.give_up(extract, || self.refused.is_stale(extract, idle_ms, now))
        });
        removed.count() > 0
    }

    /// Removes an upload that is not decided, if it is still so that it may be; whether it did.
    fn give_up(&self, extract: ExtractionId, may_be: impl FnOnce() -> bool) -> bool {
        let removed = self.arrivals.locked(extract, |slot| {
            if !may_be() {
                return Ok(false);
            }
            let upload = self.load(extract)?;
            if upload.is_none_or(|upload| upload.phase != Phase::Receiving) {
                return Ok(false);
            }
            *slot = None;
            let place = self.place(extract);
            let held = fs::metadata(place.join(DATA)).map_or(0, |data| data.len());
            fs::remove_dir_all(&place).map_err(|error| fault(&place, error))?;
            self.refused.forget(extract);
            tracing::warn!(%extract, "removed {held} bytes of an abandoned upload");
            Ok(true)
        });
        removed.unwrap_or_else(|error: Error| {
            tracing::warn!(%extract, %error, "cannot remove an abandoned upload");
            false
        })
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
            self.refused.note_wanted();
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
        if self.refused.is_time_to_tell(clock::now()) {
            tracing::warn!("{room}: uploads that do not fit wait for space");
        }
        room
    }

    fn describe_room(&self) -> String {
        let root = self.export.root_path();
        let free = statvfs(root).map(|found| (found.f_bavail * found.f_frsize, found.f_favail));
        let told = |(bytes, files)| format!("{bytes} bytes, {files} files");
        let free = free.map_or_else(|_| "unknown".to_owned(), told);
        let held = self.unfinished();
        let bytes: u64 = held.iter().map(|upload| upload.bytes).sum();
        // A home that could not start has no name yet.
        let home = match self.export.name() {
            "" => "no space at home".to_owned(),
            name => format!("no space at home '{name}'"),
        };
        format!(
            "{home}: free at {}: {free}; unfinished uploads there: {} of {bytes} bytes, in {}",
            root.display(),
            held.len(),
            self.directory.display()
        )
    }
}

/// Whether the disk had no room for what was asked.
pub(super) fn is_full<T>(result: &Result<T>) -> bool {
    let error = result.as_ref().err();
    error.is_some_and(|error| error.code == ErrorCode::NoSpaceBytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::sync::Arc;
    use std::time::{Duration, SystemTime};

    use bafs_proto::hash::Digest;
    use bafs_proto::message::{BeginPut, CommitPut, PutReceipt};
    use bafs_proto::time::Deadline;

    use super::super::export::Export;
    use super::super::refused::WANTED_MS;
    use super::*;

    fn open(root: &Path) -> Arc<Puts> {
        let export = Arc::new(Export::open(root).expect("export"));
        Arc::new(Puts::open(export).expect("puts"))
    }

    fn call(number: u128, path: &str) -> BeginPut {
        BeginPut {
            extraction: ExtractionId(number),
            path: path.to_owned(),
            mode: 0o640,
        }
    }

    fn begin(puts: &Puts, number: u128, path: &str) {
        let begun = puts.begin(&call(number, path), |_| Ok(()));
        begun.expect("begin");
    }

    fn write(puts: &Puts, number: u128, offset: u64) -> Result<u64> {
        let written = puts.write(ExtractionId(number), offset, b"data", |_| Ok(()));
        written.map(|progress| progress.received_bytes)
    }

    /// Begins an upload whose bytes meet a full disk.
    fn begin_full(puts: &Puts, number: u128, path: &str) {
        let place = puts.place(ExtractionId(number));
        fs::create_dir(&place).expect("mkdir");
        symlink("/dev/full", place.join("data")).expect("link");
        begin(puts, number, path);
    }

    /// Notes that the disk refused an upload of which so many bytes are there.
    fn refuse(puts: &Puts, number: u128, held_bytes: u64) {
        let error = Error::new(ErrorCode::NoSpaceBytes, "full");
        let target = format!("f{number}");
        puts.refused
            .note(ExtractionId(number), target, &error, held_bytes);
    }

    /// Commits an upload of what [`write`] sends.
    fn commit(puts: &Puts, number: u128) -> Result<PutReceipt> {
        let commit = CommitPut {
            extraction: ExtractionId(number),
            size: 4,
            digest: Digest::of(b"data"),
        };
        puts.commit(&commit, |_| Ok(()))
    }

    /// Does to the bytes of an upload what another server may.
    fn empty(puts: &Puts, number: u128) {
        let data = puts.place(ExtractionId(number)).join(DATA);
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
        let puts = open(root.path());
        begin_full(&puts, 1, "f");
        let (later, extract) = (Arc::clone(&puts), ExtractionId(1));
        let waiting = async move { later.turn(extract, 4, Deadline::after_ms(600_000)).await };
        let waiting = tokio::spawn(waiting);
        // It waits before the bytes ahead of it are refused.
        tokio::task::yield_now().await;
        assert_eq!(code(write(&puts, 1, 0)), ErrorCode::NoSpaceBytes);
        let turn = tokio::time::timeout(Duration::from_secs(20), waiting).await;
        turn.expect("it waits no longer").expect("join");
        // There is room again, but what was refused is missing until who sends begins again.
        fs::remove_file(puts.place(extract).join("data")).expect("remove");
        assert_eq!(code(write(&puts, 1, 4)), ErrorCode::NoSpaceBytes);
        begin(&puts, 1, "f");
        assert_eq!(write(&puts, 1, 0), Ok(4));
        assert_eq!(code(write(&puts, 1, 9)), ErrorCode::Conflict, "no refusal");
    }

    #[test]
    fn new_uploads_replace_refused_data_of_their_path() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        for (number, path) in [(1, "f"), (2, "g")] {
            begin_full(&puts, number, path);
            assert_eq!(code(write(&puts, number, 0)), ErrorCode::NoSpaceBytes);
        }
        begin(&puts, 3, "f");
        assert_eq!(write(&puts, 3, 0), Ok(4));
        begin(&puts, 4, "f");
        let left = [1, 2, 3, 4].map(|number| puts.place(ExtractionId(number)).exists());
        assert_eq!(left, [false, true, true, true], "the others may go on");
    }

    #[test]
    fn a_full_disk_keeps_the_largest_partial_upload() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        let held = |number: u128| {
            let data = puts.place(ExtractionId(number)).join(DATA);
            fs::metadata(data).map_or(0, |data| data.len())
        };
        let end_full = |number: u128, held_bytes: u64| {
            refuse(&puts, number, held_bytes);
            puts.give_way(ExtractionId(number));
        };
        for number in [1, 2] {
            begin(&puts, number, &format!("f{number}"));
            assert_eq!(write(&puts, number, 0), Ok(4));
        }
        assert_eq!(write(&puts, 2, 4), Ok(8));
        end_full(2, 8);
        assert_eq!(held(2), 8, "it holds most");
        end_full(1, 4);
        assert_eq!(held(1), 0);
        let waits = |number| {
            let told = puts.begin(&call(number, &format!("f{number}")), |_| Ok(()));
            assert_eq!(code(told.map(|_| 0)), ErrorCode::NoSpaceBytes, "it waits");
            assert_eq!(code(write(&puts, number, 0)), ErrorCode::NoSpaceBytes);
        };
        waits(1);
        // It may be larger than the disk: the other must not wait for it for ever.
        begin(&puts, 2, "f2");
        end_full(2, 8);
        assert_eq!(held(2), 0);
        waits(2);
        begin(&puts, 1, "f1");
        assert_eq!(write(&puts, 1, 0), Ok(4), "it begins anew");
        commit(&puts, 1).expect("commit");
        begin(&puts, 2, "f2");
        assert_eq!(write(&puts, 2, 0), Ok(4), "nobody else wants the room");
        for _ in 0..2 {
            end_full(2, 4);
            begin(&puts, 2, "f2");
        }
        assert_eq!(held(2), 4, "nor now");
        puts.refused.note_wanted();
        end_full(2, 4);
        assert_eq!(held(2), 0, "a small file does");
        waits(2);
    }

    /// Else an empty file would have its name.
    #[test]
    fn resumed_or_committed_uploads_are_not_dropped() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        for number in [1, 2] {
            begin(&puts, number, &format!("f{number}"));
            assert_eq!(write(&puts, number, 0), Ok(4));
            refuse(&puts, number, number as u64);
        }
        begin(&puts, 1, "f1");
        puts.give_way(ExtractionId(1));
        let data = puts.place(ExtractionId(1)).join(DATA);
        assert_eq!(fs::metadata(&data).expect("it is there").len(), 4);
        commit(&puts, 1).expect("commit");
        refuse(&puts, 1, 1);
        puts.give_way(ExtractionId(1));
        assert!(!data.exists());
        assert_eq!(fs::read(root.path().join("f1")).expect("read"), b"data");
    }

    #[test]
    fn refused_uploads_make_room_after_a_minute() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        begin(&puts, 1, "f1");
        assert_eq!(write(&puts, 1, 0), Ok(4));
        refuse(&puts, 1, 4);
        assert!(!puts.make_room(Some(ExtractionId(2))), "it may come again");
        let long_ago = Time(clock::now().0 - WANTED_MS - 1_000);
        let refuse_then = |at| puts.refused.set_at(ExtractionId(1), at);
        refuse_then(long_ago);
        puts.refused.resume(ExtractionId(1));
        refuse_then(long_ago);
        assert!(!puts.make_room(Some(ExtractionId(2))), "it goes on");
        refuse(&puts, 1, 4);
        refuse_then(long_ago);
        assert!(puts.make_room(Some(ExtractionId(2))));
        assert!(!puts.place(ExtractionId(1)).exists());
    }

    #[test]
    fn a_write_after_dropped_bytes_is_refused() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        begin(&puts, 1, "f1");
        assert_eq!(write(&puts, 1, 0), Ok(4));
        empty(&puts, 1);
        write(&puts, 1, 4).expect_err("there would be a hole");
        let data = puts.place(ExtractionId(1)).join(DATA);
        assert_eq!(fs::metadata(&data).expect("it is there").len(), 0);
        begin(&puts, 1, "f1");
        assert_eq!(write(&puts, 1, 0), Ok(4));
    }

    #[test]
    fn a_commit_refuses_data_of_another_length() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        begin(&puts, 1, "d/f");
        assert_eq!(write(&puts, 1, 0), Ok(4));
        // No directory can be made there, so the commit is decided and not done.
        fs::write(root.path().join("d"), b"").expect("write");
        commit(&puts, 1).expect_err("in the way");
        fs::remove_file(root.path().join("d")).expect("remove");
        empty(&puts, 1);
        commit(&puts, 1).expect_err("its bytes are gone");
        assert!(!root.path().join("d/f").exists());
        begin(&puts, 1, "d/f");
        assert_eq!(write(&puts, 1, 0), Ok(4));
        commit(&puts, 1).expect("commit");
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
        let puts = open(root.path());
        begin(&puts, 1, "f1");
        begin(&puts, 4, "f1");
        let left = [1, 2, 3, 4].map(|number| puts.place(ExtractionId(number)).exists());
        assert_eq!(left, [true, true, false, true], "what goes on stays");
    }

    #[test]
    fn a_full_disk_removes_stale_uploads() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        for (number, idle_ms) in [(1, STALE_MS + 60_000), (2, 0)] {
            begin(&puts, number, &format!("f{number}"));
            assert_eq!(write(&puts, number, 0), Ok(4));
            let data = puts.place(ExtractionId(number)).join("data");
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
        begin_full(&puts, 3, "g");
        assert_eq!(code(write(&puts, 3, 0)), ErrorCode::NoSpaceBytes);
        let left = [1, 2, 3].map(|number| puts.place(ExtractionId(number)).exists());
        assert_eq!(left, [false, true, true]);
    }
}
