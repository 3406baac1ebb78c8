//! Uploads that ended before their files did: which a full disk refused, what they hold, and
//! which give their room to others. Gives no file its name.

use std::cell::LazyCell;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bafs_proto::ids::ExtractId;
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode, Result};
use rustix::fs::statvfs;

use super::data::open_data;
use super::export::OWN;
use super::puts::{DATA, Phase, Puts, fault, loaded};
use crate::clock;

/// An upload that nobody continued for so long gives its room to others on a full disk, in
/// milliseconds: whoever still wants the file asks again earlier, and sends it anew else.
pub(super) const STALE_MS: u64 = 600_000;

/// What is known of an upload that the disk refused, or that a former server left.
#[derive(Debug, Clone)]
struct Refusal {
    /// Why its last bytes were refused.
    why: Option<Error>,
    at: Time,
    held_bytes: u64,
    /// Whether somebody has continued it since.
    goes_on: bool,
}

/// Uploads that the disk refused since this server began, and those that it found unfinished then.
#[derive(Debug, Default)]
pub(super) struct Refused(Mutex<BTreeMap<ExtractId, Refusal>>);

impl Refused {
    /// Why the disk refused the last bytes of an upload.
    pub(super) fn why(&self, extract: ExtractId) -> Option<Error> {
        self.list().get(&extract)?.why.clone()
    }

    /// Notes that the disk refused bytes of an upload of which so many are there; whether it got
    /// no further since it was refused before.
    pub(super) fn note(&self, extract: ExtractId, error: &Error, held_bytes: u64) -> bool {
        let refusal = Refusal {
            why: Some(error.clone()),
            at: clock::now(),
            held_bytes,
            goes_on: false,
        };
        let before = self.list().insert(extract, refusal);
        before.is_some_and(|before| held_bytes <= before.held_bytes)
    }

    /// Notes what a former server left: nobody continues it yet.
    fn note_left(&self, extract: ExtractId) {
        let refusal = Refusal {
            why: None,
            at: Time(0),
            held_bytes: 0,
            goes_on: false,
        };
        self.list().insert(extract, refusal);
    }

    /// It goes on.
    pub(super) fn resume(&self, extract: ExtractId) {
        if let Some(refusal) = self.list().get_mut(&extract) {
            refusal.why = None;
            refusal.goes_on = true;
        }
    }

    /// It is no more, or done.
    pub(super) fn forget(&self, extract: ExtractId) {
        self.list().remove(&extract);
    }

    /// Those that nobody has continued since.
    fn waiting(&self) -> Vec<ExtractId> {
        let list = self.list();
        let waiting = list.iter().filter(|(_, refusal)| !refusal.goes_on);
        waiting.map(|(extract, _)| *extract).collect()
    }

    /// Whether the disk refused any other one lately.
    fn is_other(&self, extract: ExtractId, now: Time) -> bool {
        let list = self.list();
        let mut others = list.iter().filter(|(other, _)| **other != extract);
        others.any(|(_, refusal)| now.ms_since(refusal.at) <= STALE_MS)
    }

    fn is_stale(&self, extract: ExtractId, now: Time) -> bool {
        let list = self.list();
        let last = list.get(&extract).map(|refusal| refusal.at);
        last.is_none_or(|last| now.ms_since(last) > STALE_MS)
    }

    fn list(&self) -> MutexGuard<'_, BTreeMap<ExtractId, Refusal>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An upload of which bytes came, but not all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfinished {
    /// Its number.
    pub extract: ExtractId,
    /// Where the file shall be.
    pub target: String,
    /// Where its bytes are.
    pub directory: PathBuf,
    /// What came so far.
    pub bytes: u64,
    /// Since when nothing came, in milliseconds.
    pub idle_ms: u64,
}

impl Unfinished {
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
pub fn unfinished(export: &Path) -> io::Result<Vec<Unfinished>> {
    let now = clock::now();
    let mut found = Vec::new();
    for entry in fs::read_dir(export.join(OWN))? {
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
        found.push(Unfinished {
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
        for upload in unfinished(self.export.root_path()).unwrap_or_default() {
            self.refused.note_left(upload.extract);
        }
    }

    /// Removes earlier uploads to the same place that the disk refused or a former server left, and
    /// that nobody continues: who begins anew knows nothing of them.
    pub(super) fn supersede(&self, extract: ExtractId, path: &str) {
        if self.place(extract).exists() {
            return;
        }
        for other in self.refused.waiting() {
            let same = self.load(other).ok().flatten();
            if same.is_some_and(|upload| upload.path == path) {
                self.give_up(other);
            }
        }
    }

    /// Drops what came of an upload that the disk refused, where others want the room: of several
    /// that hold a part each, none would ever be whole. The one that holds most keeps it, unless
    /// it `is_stuck`.
    pub(super) fn give_way(&self, extract: ExtractId, is_stuck: bool) {
        let all = unfinished(self.export.root_path()).unwrap_or_default();
        let held = |upload: &Unfinished| (upload.bytes, upload.extract);
        let Some(mine) = all.iter().find(|upload| upload.extract == extract) else {
            return;
        };
        let is_behind = all.iter().any(|other| held(other) > held(mine));
        let gives_way = is_behind || is_stuck && self.refused.is_other(extract, clock::now());
        if !gives_way {
            return;
        }
        let dropped = self.arrivals.locked(extract, |slot| {
            *slot = None;
            let path = self.place(extract).join(DATA);
            let file = open_data(&path);
            let emptied = file.and_then(|file| file.set_len(0));
            emptied.map_err(|error| fault(&path, error))
        });
        if let Err(error) = dropped {
            tracing::warn!(%extract, %error, "an upload that the disk refused keeps its room");
        }
    }

    /// Removes what nobody continues any more; whether that was anything.
    pub(super) fn make_room(&self, extract: ExtractId) -> bool {
        let now = clock::now();
        let all = unfinished(self.export.root_path()).unwrap_or_default();
        let stale = all.iter().filter(|upload| {
            upload.extract != extract
                && upload.bytes > 0
                && upload.is_stale()
                && self.refused.is_stale(upload.extract, now)
        });
        stale.filter(|upload| self.give_up(upload.extract)).count() > 0
    }

    /// Removes an upload that is not decided; whether it did.
    fn give_up(&self, extract: ExtractId) -> bool {
        let removed = self.arrivals.locked(extract, |slot| {
            let upload = self.load(extract)?;
            if upload.is_none_or(|upload| upload.phase != Phase::Receiving) {
                return Ok(false);
            }
            *slot = None;
            let place = self.place(extract);
            fs::remove_dir_all(&place).map_err(|error| fault(&place, error))?;
            self.refused.forget(extract);
            Ok(true)
        });
        removed.unwrap_or_else(|error: Error| {
            tracing::warn!(%extract, %error, "an upload that nobody continues stays");
            false
        })
    }

    /// The same error; one that tells of a full disk with what is free and what uploads hold.
    pub(crate) fn with_room(&self, error: Error) -> Error {
        match error.code {
            ErrorCode::NoSpaceBytes => error.context(self.describe_room()),
            _ => error,
        }
    }

    /// As [`Self::with_room`], for each.
    pub(super) fn each_with_room<T>(&self, results: Vec<Result<T>>) -> Vec<Result<T>> {
        let room = LazyCell::new(|| self.describe_room());
        let tell = |error: Error| match error.code {
            ErrorCode::NoSpaceBytes => error.context(&*room),
            _ => error,
        };
        let told = results.into_iter().map(|result| result.map_err(tell));
        told.collect()
    }

    fn describe_room(&self) -> String {
        let root = self.export.root_path();
        let free = statvfs(root).map(|found| found.f_bavail * found.f_frsize);
        let free = free.map_or_else(|_| "unknown".to_owned(), |free| format!("{free} bytes"));
        let held = unfinished(root).unwrap_or_default();
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

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::symlink;
    use std::sync::Arc;
    use std::time::{Duration, SystemTime};

    use bafs_proto::message::BeginPut;
    use bafs_proto::time::Deadline;

    use super::super::export::Export;
    use super::*;

    fn open(root: &Path) -> Arc<Puts> {
        let export = Arc::new(Export::open(root).expect("export"));
        Arc::new(Puts::open(export).expect("puts"))
    }

    fn begin(puts: &Puts, number: u128, path: &str) {
        let call = BeginPut {
            extract: ExtractId(number),
            path: path.to_owned(),
            mode: 0o640,
        };
        puts.begin(&call, |_| Ok(())).expect("begin");
    }

    fn write(puts: &Puts, number: u128, offset: u64) -> Result<u64> {
        let written = puts.write(ExtractId(number), offset, b"data", |_| Ok(()));
        written.map(|progress| progress.received_bytes)
    }

    /// Begins an upload whose bytes meet a full disk.
    fn begin_full(puts: &Puts, number: u128, path: &str) {
        let place = puts.place(ExtractId(number));
        fs::create_dir(&place).expect("mkdir");
        symlink("/dev/full", place.join("data")).expect("link");
        begin(puts, number, path);
    }

    fn code(told: Result<u64>) -> ErrorCode {
        told.expect_err("must be refused").code
    }

    #[tokio::test]
    async fn what_waits_behind_refused_bytes_hears_why_and_at_once() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        begin_full(&puts, 1, "f");
        let (later, extract) = (Arc::clone(&puts), ExtractId(1));
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
    fn who_begins_anew_at_a_place_takes_what_the_disk_refused_there_before() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        for (number, path) in [(1, "f"), (2, "g")] {
            begin_full(&puts, number, path);
            assert_eq!(code(write(&puts, number, 0)), ErrorCode::NoSpaceBytes);
        }
        begin(&puts, 3, "f");
        assert_eq!(write(&puts, 3, 0), Ok(4));
        begin(&puts, 4, "f");
        let left = [1, 2, 3, 4].map(|number| puts.place(ExtractId(number)).exists());
        assert_eq!(left, [false, true, true, true], "the others may go on");
    }

    #[test]
    fn of_uploads_that_hold_a_part_each_the_disk_keeps_the_one_that_holds_most() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        let held = |number: u128| {
            let data = puts.place(ExtractId(number)).join(DATA);
            fs::metadata(data).map_or(0, |data| data.len())
        };
        let refuse = |number: u128, held_bytes: u64| {
            let extract = ExtractId(number);
            let error = Error::new(ErrorCode::NoSpaceBytes, "full");
            let is_stuck = puts.refused.note(extract, &error, held_bytes);
            puts.give_way(extract, is_stuck);
        };
        for number in [1, 2] {
            begin(&puts, number, &format!("f{number}"));
            assert_eq!(write(&puts, number, 0), Ok(4));
        }
        assert_eq!(write(&puts, 2, 4), Ok(8));
        refuse(2, 8);
        assert_eq!(held(2), 8, "it holds most");
        refuse(1, 4);
        assert_eq!(held(1), 0);
        // It may be larger than the disk: the other must not wait for it for ever.
        begin(&puts, 2, "f2");
        refuse(2, 8);
        assert_eq!(held(2), 0);
        begin(&puts, 1, "f1");
        assert_eq!(write(&puts, 1, 0), Ok(4), "it begins anew");
        puts.refused.forget(ExtractId(2));
        refuse(1, 4);
        assert_eq!(held(1), 4, "nobody else wants the room");
    }

    #[test]
    fn who_begins_anew_takes_what_a_former_server_left_at_the_place() {
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
        let left = [1, 2, 3, 4].map(|number| puts.place(ExtractId(number)).exists());
        assert_eq!(left, [true, true, false, true], "what goes on stays");
    }

    #[test]
    fn a_full_disk_takes_back_what_nobody_continues() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        for (number, idle_ms) in [(1, STALE_MS + 60_000), (2, 0)] {
            begin(&puts, number, &format!("f{number}"));
            assert_eq!(write(&puts, number, 0), Ok(4));
            let data = puts.place(ExtractId(number)).join("data");
            let data = File::options().write(true).open(data);
            let since = Duration::from_millis(clock::now().0 - idle_ms);
            let time = SystemTime::UNIX_EPOCH + since;
            data.and_then(|data| data.set_modified(time)).expect("time");
        }
        let found = unfinished(root.path()).expect("list");
        let told = found
            .iter()
            .map(|it| (it.target.as_str(), it.bytes, it.is_stale()));
        assert_eq!(
            told.collect::<Vec<_>>(),
            [("f1", 4, true), ("f2", 4, false)]
        );
        begin_full(&puts, 3, "g");
        assert_eq!(code(write(&puts, 3, 0)), ErrorCode::NoSpaceBytes);
        let left = [1, 2, 3].map(|number| puts.place(ExtractId(number)).exists());
        assert_eq!(left, [false, true, true]);
    }
}
