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

use super::export::OWN;
use super::puts::{Phase, Puts, fault, loaded};
use crate::clock;

/// An upload that nobody continued for so long gives its room to others on a full disk, in
/// milliseconds: whoever still wants the file asks again earlier, and sends it anew else.
pub(super) const STALE_MS: u64 = 600_000;

/// Uploads that the disk refused since this server began.
#[derive(Debug, Default)]
pub(super) struct Refused(Mutex<BTreeMap<ExtractId, (Error, Time)>>);

impl Refused {
    /// Why the disk refused the last bytes of an upload.
    pub(super) fn why(&self, extract: ExtractId) -> Option<Error> {
        self.list().get(&extract).map(|(error, _)| error.clone())
    }

    pub(super) fn note(&self, extract: ExtractId, error: &Error) {
        self.list().insert(extract, (error.clone(), clock::now()));
    }

    /// It goes on, or is no more.
    pub(super) fn forget(&self, extract: ExtractId) {
        self.list().remove(&extract);
    }

    fn ids(&self) -> Vec<ExtractId> {
        self.list().keys().copied().collect()
    }

    fn is_stale(&self, extract: ExtractId, now: Time) -> bool {
        let list = self.list();
        let last = list.get(&extract).map(|(_, last)| *last);
        last.is_none_or(|last| now.ms_since(last) > STALE_MS)
    }

    fn list(&self) -> MutexGuard<'_, BTreeMap<ExtractId, (Error, Time)>> {
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
        let (Some(extract), Ok(data)) = (extract, fs::metadata(directory.join("data"))) else {
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
    /// Removes what the disk refused of earlier uploads to the same place: who begins anew knows
    /// nothing of them, and nobody else would continue them.
    pub(super) fn supersede(&self, extract: ExtractId, path: &str) {
        if self.place(extract).exists() {
            return;
        }
        for other in self.refused.ids() {
            let same = self.load(other).ok().flatten();
            if same.is_some_and(|upload| upload.path == path) {
                self.give_up(other);
            }
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
        format!(
            "no space at home '{}': free at {}: {free}; unfinished uploads there: {} of {bytes} \
             bytes, in {}",
            self.export.name(),
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
