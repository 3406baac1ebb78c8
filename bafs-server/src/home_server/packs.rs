//! Small files that come home, alone or many with one call: first made durable, beside each other
//! and under temporary names, then decided, all by one write to the log of receipts, then named.
//!
//! So what a crash leaves has no record, and goes, or has one, and gets its name at the next start.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};

use bafs_proto::hash::Digest;
use bafs_proto::ids::ExtractionId;
use bafs_proto::message::{PutFile, PutReceipt};
use bafs_proto::path::to_bytes;
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use futures_util::future::join_all;
use rustix::fs::{AtFlags, CWD, FileType, fsync, renameat, statat};
use rustix::io::Errno;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::export::{ExportEntry, file_type, system_error};
use super::puts::{Puts, check_target, damaged, fault, other_path, parted, same_content};
use super::receipts::{Decision, KnownRecord, Placed, Receipts};
use super::small_file_record::SmallFileRecord;
use crate::clock;

/// Calls whose files are put in place at once; others wait for their turn.
const PACKS_MAX: usize = 16;

/// Files of all of them that are made durable at once, each with a thread and a descriptor. Those
/// that a disk takes together cost about as much as one.
const FILES_MAX: usize = 192;

/// How much is done at once, for all callers of a home together.
#[derive(Debug)]
pub(super) struct Limits {
    packs: Arc<Semaphore>,
    files: Semaphore,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            packs: Arc::new(Semaphore::new(PACKS_MAX)),
            files: Semaphore::new(FILES_MAX),
        }
    }
}

/// Whether a caller may write at a path: the one that it gave, and the one where links in the
/// export lead.
pub(crate) type Allow = Box<dyn Fn(&str) -> Result<()> + Send + Sync>;

/// A small file that came.
pub(crate) struct Small {
    pub(crate) call: PutFile,
    pub(crate) data: Bytes,
    pub(crate) allow: Allow,
}

/// How far a small file came by itself.
enum PackStage {
    /// It was in place before, or is by another way.
    Done(PutReceipt),
    /// It has a temporary name.
    Ready(Staged),
}

struct Staged {
    small: Small,
    record: SmallFileRecord,
    temporary: Temporary,
}

/// A file of ours that goes unless it is kept.
struct Temporary {
    path: PathBuf,
    is_kept: bool,
}

impl Puts {
    /// Puts small files in place at once, each for itself. An upload that was begun in pieces is
    /// finished so, and one that is done stays as it is. It runs to its end even if the caller
    /// gives up.
    ///
    /// # Errors
    /// `Busy` when others are in the way until the deadline. Of each file: what `allow` answers;
    /// `BadPath`; `DigestMismatch`; `Conflict` when the id was used for another path or content.
    pub(crate) async fn put(
        self: &Arc<Self>,
        files: Vec<Small>,
        deadline: Deadline,
    ) -> Result<Vec<Result<PutReceipt>>> {
        let place = self.wait_for_place(deadline).await?;
        let puts = Arc::clone(self);
        let pack = tokio::spawn(async move {
            let _place = place;
            puts.put_pack(files).await
        });
        pack.await.map_err(|error| failed(&error))?
    }

    async fn wait_for_place(&self, deadline: Deadline) -> Result<OwnedSemaphorePermit> {
        let place = self.limits.packs.clone().acquire_owned();
        let until = deadline.with_reply_margin().instant();
        match tokio::time::timeout_at(until.into(), place).await {
            Ok(place) => place.map_err(|error| failed(&error)),
            Err(_) => {
                let text = format!("{PACKS_MAX} calls with files were ahead all the time");
                Err(Error::new(ErrorCode::Busy, text))
            }
        }
    }

    async fn put_pack(self: Arc<Self>, files: Vec<Small>) -> Result<Vec<Result<PutReceipt>>> {
        let receipts = self.clone().blocking(Self::receipts).await?;
        let held = receipts.clone();
        let stage = move |puts: &Self, small| puts.stage(held.as_deref(), small);
        let staged = self.each(files, stage).await;
        // The names beside the contents: the disk takes them together.
        let held = receipts.clone();
        let names = move |_: &Self| held.map_or(Ok(()), |receipts| receipts.sync_names());
        let names = self.clone().blocking(names);
        let contents = self.each(staged, |_, stage: Result<PackStage>| stage?.durable());
        let (names, staged) = tokio::join!(names, contents);
        let staged = staged.into_iter().map(|stage| match (stage, &names) {
            (Ok(PackStage::Ready(_)), Err(error)) => Err(error.clone()),
            (stage, _) => stage,
        });
        let staged = staged.collect();
        let place = move |puts: &Self| Ok(puts.place_all(receipts.as_deref(), staged));
        self.blocking(place).await
    }

    /// Does the same with each, as many at once as may be, in their order.
    async fn each<T: Send + 'static, U: Send + 'static>(
        self: &Arc<Self>,
        all: Vec<T>,
        act: impl Fn(&Self, T) -> Result<U> + Clone + Send + 'static,
    ) -> Vec<Result<U>> {
        let acting = all.into_iter().map(|one| {
            let (puts, act) = (Arc::clone(self), act.clone());
            async move {
                let taken = self.limits.files.acquire().await;
                let _taken = taken.map_err(|error| failed(&error))?;
                puts.blocking(move |puts| act(puts, one)).await
            }
        });
        join_all(acting).await
    }

    /// Runs something that waits for the disk, if the exported directory is in its place.
    async fn blocking<T: Send + 'static>(
        self: Arc<Self>,
        act: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let act = move || self.export.check_in_place().and_then(|()| act(&self));
        let done = tokio::task::spawn_blocking(act).await;
        done.map_err(|error| failed(&error))?
    }

    /// The receipts of small files, opened if they are not and another process does not have them:
    /// then small files come as large ones do. Files that are decided get their names.
    ///
    /// # Errors
    /// `ServerFault` when the disk does not do it.
    pub(super) fn receipts(&self) -> Result<Option<Arc<Receipts>>> {
        let mut held = self.receipts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(receipts) = held.as_ref().filter(|receipts| receipts.is_in_place()) {
            return Ok(Some(receipts.clone()));
        }
        *held = None;
        self.occupy()?;
        let opened = Receipts::open(&self.directory);
        let Some((receipts, pending)) = opened.map_err(|e| fault(&self.directory, e))? else {
            return Ok(None);
        };
        for record in &pending {
            let path = &record.receipt.path;
            // Nobody shows a right now: what links lead away waits for who does.
            let allow = |place: &str| match place == path {
                true => Ok(()),
                false => Err(Error::new(ErrorCode::RightMissing, "a link leads away")),
            };
            if let Err(error) = self.name_one(&receipts, record, &allow) {
                tracing::warn!(%path, %error, "a small file waits to be asked for again");
            }
        }
        let receipts = Arc::new(receipts);
        *held = Some(receipts.clone());
        Ok(Some(receipts))
    }

    /// Makes the place of an upload that comes in pieces, or tells that it came as a small file.
    ///
    /// # Errors
    /// `Conflict` when that was for another path.
    pub(super) fn claim(
        &self,
        extract: ExtractionId,
        path: &str,
        allow: &dyn Fn(&str) -> Result<()>,
    ) -> Result<Option<PutReceipt>> {
        let Some(receipts) = self.receipts()? else {
            return self.make_place(extract).map(|()| None);
        };
        let taken = receipts.unless_known(extract, || self.make_place(extract))?;
        if taken.is_some() {
            return Ok(None);
        }
        let known = receipts.find(extract)?;
        let known = known.ok_or_else(|| gone(path))?;
        self.known(&receipts, known, path, allow).map(Some)
    }

    /// The receipt of a file that is decided, after giving it its name if that was interrupted.
    fn known(
        &self,
        receipts: &Receipts,
        known: KnownRecord,
        path: &str,
        allow: &dyn Fn(&str) -> Result<()>,
    ) -> Result<PutReceipt> {
        let KnownRecord { record, placed } = known;
        let receipt = &record.receipt;
        if receipt.path != path {
            return Err(other_path(receipt.extraction, &receipt.path, path));
        }
        match placed {
            Placed::No => self.name_one(receipts, &record, allow)?,
            Placed::Seems => self.check_is_there(receipts, receipt)?,
            Placed::Yes => {}
        }
        Ok(record.receipt)
    }

    /// Checks that a file is where it seems to have been put before this start: its bytes may have
    /// gone before they had their name. Who took the file away since gets it once more.
    fn check_is_there(&self, receipts: &Receipts, receipt: &PutReceipt) -> Result<()> {
        let (above, name) = parted(&receipt.path);
        let there = self.export.find(above).and_then(|parent| {
            let there = statat(&parent.fd, &*to_bytes(name), AtFlags::SYMLINK_NOFOLLOW);
            there.map_err(|error| system_error(&receipt.path, error))
        });
        match there {
            Err(error) if error.code == ErrorCode::NotFound => {
                receipts.take_back(receipt.extraction)?;
                Err(gone(&receipt.path))
            }
            Err(error) => Err(error),
            Ok(_) => {
                receipts.set_placed(receipt.extraction);
                Ok(())
            }
        }
    }

    /// Writes a file under a temporary name, if it is wanted and may have its own.
    fn stage(&self, receipts: Option<&Receipts>, small: Small) -> Result<PackStage> {
        let Small { call, data, allow } = &small;
        check_target(&call.path)?;
        allow(&call.path)?;
        let size = data.len() as u64;
        let Some(receipts) = receipts else {
            return self.put_alone(call, data, allow).map(PackStage::Done);
        };
        if let Some(known) = receipts.find(call.extraction)? {
            let receipt = self.known(receipts, known, &call.path, allow)?;
            return same_content(receipt, size, call.digest).map(PackStage::Done);
        }
        if fs::symlink_metadata(self.place(call.extraction)).is_ok() {
            return self.put_alone(call, data, allow).map(PackStage::Done);
        }
        if Digest::of(data) != call.digest {
            return Err(damaged(&call.path));
        }
        let (above, name) = parted(&call.path);
        let parent = self.export.make_directory(above, allow)?;
        self.check_destination(&parent, &call.path, allow)?;
        // What is refused later than now stays decided.
        let there = statat(&parent.fd, &*to_bytes(name), AtFlags::SYMLINK_NOFOLLOW);
        if there.is_ok_and(|there| file_type(&there) == FileType::Directory) {
            return Err(system_error(&call.path, Errno::ISDIR));
        }
        let temporary = format!("{:032x}", rand::random::<u128>());
        let record = SmallFileRecord {
            receipt: PutReceipt {
                extraction: call.extraction,
                path: call.path.clone(),
                size,
                digest: call.digest,
            },
            temporary: temporary.clone(),
            time: clock::now(),
        };
        let temporary = Temporary {
            path: receipts.temporary(&temporary),
            is_kept: false,
        };
        let written = temporary.write(data);
        written.map_err(|error| fault(&temporary.path, error))?;
        Ok(PackStage::Ready(Staged {
            small,
            record,
            temporary,
        }))
    }

    /// Decides all files of a pack that are staged, and gives them their names.
    fn place_all(
        &self,
        receipts: Option<&Receipts>,
        staged: Vec<Result<PackStage>>,
    ) -> Vec<Result<PutReceipt>> {
        let (mut results, mut ready) = (BTreeMap::new(), Vec::new());
        for (at, stage) in staged.into_iter().enumerate() {
            match stage {
                Ok(PackStage::Ready(staged)) => ready.push((at, staged)),
                Ok(PackStage::Done(receipt)) => _ = results.insert(at, Ok(receipt)),
                Err(error) => _ = results.insert(at, Err(error)),
            }
        }
        if let Some(receipts) = receipts.filter(|_| !ready.is_empty()) {
            self.decide(receipts, ready, &mut results);
        }
        results.into_values().collect()
    }

    fn decide(
        &self,
        receipts: &Receipts,
        mut ready: Vec<(usize, Staged)>,
        results: &mut BTreeMap<usize, Result<PutReceipt>>,
    ) {
        let records = ready.iter().map(|(_, staged)| staged.record.clone());
        let decided = match receipts.decide(records.collect()) {
            Ok(decided) => decided,
            Err(undecided) => {
                for (at, mut staged) in ready {
                    // A later start may find the record, and must find the file then.
                    staged.temporary.keep(!undecided.is_sure);
                    results.insert(at, Err(undecided.error.clone()));
                }
                return;
            }
        };
        for ((_, staged), decision) in ready.iter_mut().zip(&decided) {
            staged.temporary.keep(*decision == Decision::Made);
        }
        let (mut made, mut others) = (Vec::new(), Vec::new());
        for ((at, staged), decision) in ready.into_iter().zip(decided) {
            match decision {
                Decision::Made => made.push((at, staged)),
                Decision::Known | Decision::Begun => others.push((at, staged.small)),
            }
        }
        self.name_all(receipts, made, results);
        for (at, small) in others {
            let again = self.stage(Some(receipts), small);
            results.insert(
                at,
                again.and_then(|stage| match stage {
                    PackStage::Done(receipt) => Ok(receipt),
                    // What was there is gone again at once: it is for the next attempt.
                    PackStage::Ready(staged) => Err(gone(&staged.record.receipt.path)),
                }),
            );
        }
    }

    /// Gives decided files their names, durably: each directory is made so once.
    fn name_all(
        &self,
        receipts: &Receipts,
        made: Vec<(usize, Staged)>,
        results: &mut BTreeMap<usize, Result<PutReceipt>>,
    ) {
        let mut last: Option<(String, ExportEntry)> = None;
        let mut named: BTreeMap<String, Vec<(usize, PutReceipt)>> = BTreeMap::new();
        for (at, Staged { small, record, .. }) in made {
            let receipt = record.receipt.clone();
            match self.name(receipts, &record, &small.allow, &mut last) {
                Ok(()) => {
                    let above = parted(&receipt.path).0.to_owned();
                    named.entry(above).or_default().push((at, receipt));
                }
                Err(error) => _ = results.insert(at, Err(error)),
            }
        }
        for (above, files) in named {
            let durable = self.sync_parent(&above);
            for (at, receipt) in files {
                results.insert(at, durable.clone().map(|()| receipt));
            }
        }
    }

    /// Gives one decided file its name, durably.
    fn name_one(
        &self,
        receipts: &Receipts,
        record: &SmallFileRecord,
        allow: &dyn Fn(&str) -> Result<()>,
    ) -> Result<()> {
        self.name(receipts, record, allow, &mut None)?;
        self.sync_parent(parted(&record.receipt.path).0)
    }

    /// Gives a decided file its name, once, in the directory of the last one if it is the same.
    fn name(
        &self,
        receipts: &Receipts,
        record: &SmallFileRecord,
        allow: &dyn Fn(&str) -> Result<()>,
        last: &mut Option<(String, ExportEntry)>,
    ) -> Result<()> {
        let PutReceipt {
            extraction: extract,
            path,
            ..
        } = &record.receipt;
        let (above, name) = parted(path);
        let parent = match last.take() {
            Some((known, parent)) if known == above => parent,
            _ => self.export.make_directory(above, allow)?,
        };
        let (_, parent) = last.insert((above.to_owned(), parent));
        self.check_destination(parent, path, allow)?;
        let source = receipts.temporary(&record.temporary);
        let _turn = receipts.placing.lock();
        if receipts.is_placed(*extract) {
            return Ok(());
        }
        match renameat(CWD, &source, &parent.fd, &*to_bytes(name)) {
            Ok(()) => receipts.set_placed(*extract),
            Err(Errno::NOENT) if fs::symlink_metadata(&source).is_err() => {
                receipts.take_back(*extract)?;
                return Err(gone(path));
            }
            Err(error) => return Err(system_error(path, error)),
        }
        Ok(())
    }

    fn sync_parent(&self, above: &str) -> Result<()> {
        let parent = self.export.find(above)?.open_directory()?;
        fsync(parent).map_err(|error| system_error(above, error))
    }
}

impl PackStage {
    /// The same, with the content on disk.
    fn durable(self) -> Result<Self> {
        if let Self::Ready(Staged {
            small, temporary, ..
        }) = &self
        {
            let finished = temporary.finish(small.call.mode & 0o777);
            finished.map_err(|error| fault(&temporary.path, error))?;
        }
        Ok(self)
    }
}

impl Temporary {
    fn keep(&mut self, is_kept: bool) {
        self.is_kept = is_kept;
    }

    fn write(&self, data: &[u8]) -> io::Result<()> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        options.open(&self.path)?.write_all(data)
    }

    /// Gives it its bits, and makes all of it durable. Until then its owner may open it, whatever
    /// they are.
    fn finish(&self, mode: u32) -> io::Result<()> {
        let file = File::open(&self.path)?;
        file.set_permissions(Permissions::from_mode(mode))?;
        file.sync_all()
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.is_kept {
            let _ = fs::remove_file(&self.path);
        }
    }
}

pub(super) fn gone(path: &str) -> Error {
    let text = format!("what home received for '{path}' is gone; send it again");
    Error::new(ErrorCode::ServerFault, text)
}

fn failed(error: &dyn std::fmt::Display) -> Error {
    Error::new(
        ErrorCode::ServerFault,
        format!("the home server failed: {error}"),
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use bafs_proto::message::BeginPut;
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    use super::super::export::{Export, OWN_DIRECTORY};
    use super::*;

    fn open(root: &Path) -> Arc<Puts> {
        let export = Arc::new(Export::open(root).expect("export"));
        Arc::new(Puts::open(export).expect("puts"))
    }

    fn small(number: u128, path: &str, data: &'static [u8]) -> Small {
        Small {
            call: PutFile {
                extraction: ExtractionId(number),
                path: path.to_owned(),
                mode: 0o640,
                digest: Digest::of(data),
            },
            data: Bytes::from_static(data),
            // As for a token that is good for `out`.
            allow: Box::new(|place| match place.starts_with("out") {
                true => Ok(()),
                false => Err(Error::new(ErrorCode::RightMissing, "elsewhere")),
            }),
        }
    }

    fn begin(number: u128, path: &str) -> BeginPut {
        BeginPut {
            extraction: ExtractionId(number),
            path: path.to_owned(),
            mode: 0o640,
        }
    }

    async fn put(puts: &Arc<Puts>, files: Vec<Small>) -> Vec<Result<PutReceipt>> {
        let told = puts.put(files, Deadline::after_ms(20_000)).await;
        told.expect("an answer")
    }

    async fn put_one(puts: &Arc<Puts>, small: Small) -> Result<PutReceipt> {
        put(puts, vec![small]).await.remove(0)
    }

    fn receipts(puts: &Puts) -> Arc<Receipts> {
        puts.receipts().expect("open").expect("nobody has them")
    }

    /// Does the first step, as if the server was killed before it did or undid anything else.
    fn staged(puts: &Puts, small: Small) -> Staged {
        let Ok(PackStage::Ready(mut staged)) = puts.stage(Some(&receipts(puts)), small) else {
            panic!("it was not staged");
        };
        staged.temporary.keep(true);
        staged
    }

    fn decided(puts: &Puts, small: Small) -> SmallFileRecord {
        let record = staged(puts, small).record;
        let decided = receipts(puts).decide(vec![record.clone()]);
        assert_eq!(decided, Ok(vec![Decision::Made]));
        record
    }

    fn temporaries(root: &Path) -> usize {
        let found = fs::read_dir(root.join(OWN_DIRECTORY).join("small")).expect("list");
        found.count()
    }

    fn read(root: &Path, path: &str) -> Option<Vec<u8>> {
        fs::read(root.join(path)).ok()
    }

    fn code<T: std::fmt::Debug>(told: Result<T>) -> ErrorCode {
        told.expect_err("must be refused").code
    }

    #[test]
    fn a_file_unreadable_to_its_owner_becomes_durable() {
        let root = tempfile::tempdir().expect("directory");
        let path = root.path().join("t");
        let temporary = Temporary {
            path: path.clone(),
            is_kept: true,
        };
        // As anybody but root.
        let act = move || {
            let mut own = capabilities(None).expect("capabilities");
            let all = CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
            own.effective.remove(all);
            set_capabilities(None, own).expect("give up");
            temporary.write(b"x").and_then(|()| temporary.finish(0o200))
        };
        let made = std::thread::spawn(act).join().expect("join");
        made.expect("it is on disk");
        let mode = fs::metadata(path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o200);
    }

    #[tokio::test]
    async fn a_restart_removes_temporaries_without_a_record() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        staged(&puts, small(1, "out/f", b"one"));
        assert_eq!(temporaries(root.path()), 1);
        drop(puts);
        let puts = open(root.path());
        assert_eq!(temporaries(root.path()), 0);
        assert_eq!(read(root.path(), "out/f"), None);
        let again = small(1, "out/f", b"two");
        put_one(&puts, again).await.expect("nothing was decided");
        assert_eq!(read(root.path(), "out/f").expect("read"), b"two");
        assert_eq!(temporaries(root.path()), 0);
    }

    #[tokio::test]
    async fn a_restart_places_recorded_files_exactly_once() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        decided(&puts, small(1, "out/f", b"first"));
        let record = decided(&puts, small(2, "out/f", b"second"));
        let named = decided(&puts, small(3, "out/g", b"named"));
        let allow = |_: &str| Ok(());
        for _ in 0..2 {
            let done = puts.name_one(&receipts(&puts), &named, &allow);
            done.expect("it is given once, whoever comes second");
        }
        fs::write(root.path().join("out/g"), b"used since").expect("write");
        drop(puts);
        let puts = open(root.path());
        assert_eq!(read(root.path(), "out/f").expect("read"), b"second");
        assert_eq!(temporaries(root.path()), 0);
        fs::remove_file(root.path().join("out/f")).expect("remove");
        let again = put_one(&puts, small(2, "out/f", b"second")).await;
        assert_eq!(again, Ok(record.receipt));
        assert_eq!(read(root.path(), "out/f"), None, "it was there once");
        let again = put_one(&puts, small(3, "out/g", b"named")).await;
        assert_eq!(again, Ok(named.receipt));
        assert_eq!(read(root.path(), "out/g").expect("read"), b"used since");
    }

    #[tokio::test]
    async fn a_recorded_file_without_bytes_is_requested_again() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        let lost = decided(&puts, small(1, "out/f", b"one"));
        fs::remove_file(receipts(&puts).temporary(&lost.temporary)).expect("remove");
        drop(puts);
        let puts = open(root.path());
        let told = put_one(&puts, small(1, "out/f", b"one")).await;
        assert!(told.expect_err("gone").is_transient());
        let told = put_one(&puts, small(1, "out/f", b"one")).await;
        assert_eq!(told, Ok(lost.receipt));
        assert_eq!(read(root.path(), "out/f").expect("read"), b"one");
    }

    #[tokio::test]
    async fn a_torn_record_is_ignored() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        put_one(&puts, small(1, "out/f", b"one"))
            .await
            .expect("put");
        decided(&puts, small(2, "out/g", b"two"));
        drop(puts);
        let log = root.path().join(OWN_DIRECTORY).join("receipts");
        let text = fs::read(&log).expect("read");
        fs::write(&log, &text[..text.len() - 9]).expect("write");
        let puts = open(root.path());
        assert_eq!(
            (read(root.path(), "out/g"), temporaries(root.path())),
            (None, 0)
        );
        put_one(&puts, small(2, "out/g", b"other"))
            .await
            .expect("put");
        assert_eq!(read(root.path(), "out/g").expect("read"), b"other");
    }

    #[tokio::test]
    async fn a_repeated_put_places_the_recorded_file() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        let record = decided(&puts, small(1, "out/d/f", b"one"));
        // It is for the same place and content, or it is another one.
        let elsewhere = put_one(&puts, small(1, "out/d/g", b"one")).await;
        assert_eq!(code(elsewhere), ErrorCode::Conflict);
        fs::remove_dir(root.path().join("out/d")).expect("rmdir");
        let told = put_one(&puts, small(1, "out/d/f", b"one")).await;
        assert_eq!(told, Ok(record.receipt.clone()));
        assert_eq!(read(root.path(), "out/d/f").expect("read"), b"one");
        let other = put_one(&puts, small(1, "out/d/f", b"two")).await;
        assert_eq!(code(other), ErrorCode::Conflict);
        // As a large file, too.
        let begun = puts.begin(&begin(1, "out/d/f"), |_| Ok(())).expect("begin");
        assert_eq!(begun.receipt, Some(record.receipt));
        // And if its bytes are gone by somebody's hand, they are taken again.
        let lost = decided(&puts, small(2, "out/h", b"one"));
        fs::remove_file(receipts(&puts).temporary(&lost.temporary)).expect("remove");
        let told = put_one(&puts, small(2, "out/h", b"one")).await;
        assert!(told.expect_err("gone").is_transient());
        put_one(&puts, small(2, "out/h", b"one"))
            .await
            .expect("put");
        assert_eq!(read(root.path(), "out/h").expect("read"), b"one");
    }

    #[tokio::test]
    async fn concurrent_copies_of_a_pack_are_stored_once() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        let pack = || -> Vec<_> {
            let files = (1..=20).map(|n| small(n, &format!("out/{}/f{n}", n % 3), b"data"));
            // The last is in it twice.
            files.chain([small(20, "out/2/f20", b"data")]).collect()
        };
        let (one, two) = tokio::join!(put(&puts, pack()), put(&puts, pack()));
        assert!(one.iter().all(Result::is_ok), "{one:?}");
        assert_eq!(one, two);
        assert_eq!(one[19], one[20]);
        assert_eq!(temporaries(root.path()), 0);
        drop(puts);
        let log = fs::read_to_string(root.path().join(OWN_DIRECTORY).join("receipts"));
        assert_eq!(log.expect("read").lines().count(), 20);
    }

    #[tokio::test]
    async fn refused_files_do_not_affect_their_pack() {
        let root = tempfile::tempdir().expect("directory");
        fs::create_dir_all(root.path().join("out/directory")).expect("mkdir");
        fs::create_dir(root.path().join("secret")).expect("mkdir");
        symlink("../secret", root.path().join("out/way")).expect("link");
        symlink("..", root.path().join("out/up")).expect("link");
        let puts = open(root.path());
        let mut wrong = small(5, "out/wrong", b"x");
        wrong.call.digest = Digest::of(b"y");
        let told = put(
            &puts,
            vec![
                small(1, "out/directory", b"x"),
                small(2, "out/way/f", b"x"),
                small(3, "elsewhere", b"x"),
                small(4, &format!("out/up/{OWN_DIRECTORY}"), b"x"),
                wrong,
                small(6, "out/fine", b"x"),
                small(7, "out/way/deep/f", b"x"),
            ],
        );
        let told: Vec<_> = told
            .await
            .into_iter()
            .map(|it| it.map_err(|e| e.code))
            .collect();
        let codes = told.iter().map(|it| it.as_ref().err().copied());
        use ErrorCode::*;
        let refused = [
            WrongState,
            RightMissing,
            RightMissing,
            RightMissing,
            DigestMismatch,
        ];
        let mut expected: Vec<_> = refused.into_iter().map(Some).collect();
        expected.extend([None, Some(RightMissing)]);
        assert_eq!(codes.collect::<Vec<_>>(), expected);
        for number in [1, 2, 3, 4, 5, 7] {
            let known = receipts(&puts).find(ExtractionId(number)).expect("read");
            assert_eq!(known, None, "{number}");
        }
        assert_eq!(temporaries(root.path()), 0);
        assert_eq!(
            fs::read_dir(root.path().join("secret"))
                .expect("list")
                .count(),
            0
        );
    }

    #[tokio::test]
    async fn a_later_link_is_followed_only_with_rights() {
        let root = tempfile::tempdir().expect("directory");
        fs::create_dir(root.path().join("secret")).expect("mkdir");
        let puts = open(root.path());
        decided(&puts, small(1, "out/d/f", b"one"));
        drop(puts);
        fs::remove_dir(root.path().join("out/d")).expect("rmdir");
        symlink("../secret", root.path().join("out/d")).expect("link");
        let puts = open(root.path());
        assert_eq!(read(root.path(), "secret/f"), None);
        let asked = put_one(&puts, small(1, "out/d/f", b"one")).await;
        assert_eq!(code(asked), ErrorCode::RightMissing);
        let mut granted = small(1, "out/d/f", b"one");
        granted.allow = Box::new(|_| Ok(()));
        put_one(&puts, granted).await.expect("put");
        assert_eq!(read(root.path(), "secret/f").expect("read"), b"one");
    }

    #[tokio::test]
    async fn a_full_disk_fails_only_the_current_pack() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        let pack = || vec![small(1, "out/f", b"one"), small(2, "out/g", b"two")];
        receipts(&puts).set_full(true);
        for told in put(&puts, pack()).await {
            assert_eq!(code(told), ErrorCode::NoSpaceBytes);
        }
        assert_eq!(
            (read(root.path(), "out/f"), temporaries(root.path())),
            (None, 0)
        );
        receipts(&puts).set_full(false);
        assert!(put(&puts, pack()).await.iter().all(Result::is_ok));
        // Where nobody knows what the disk has, the bytes stay for the next start.
        receipts(&puts).set_read_only();
        let told = put_one(&puts, small(3, "out/h", b"three")).await;
        assert!(told.is_err());
        assert_eq!(temporaries(root.path()), 1);
    }

    #[tokio::test]
    async fn packs_continue_uploads_begun_by_other_calls() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        let call = small(1, "out/old", b"old").call;
        let receipt = puts.put_alone(&call, b"old", &|_| Ok(()));
        let receipt = receipt.expect("as older versions did it");
        fs::write(root.path().join("out/old"), b"used since").expect("write");
        let told = put_one(&puts, small(1, "out/old", b"old")).await;
        assert_eq!(told, Ok(receipt));
        let other = put_one(&puts, small(1, "out/old", b"new")).await;
        assert_eq!(code(other), ErrorCode::Conflict);
        assert_eq!(read(root.path(), "out/old").expect("read"), b"used since");
        puts.begin(&begin(2, "out/new"), |_| Ok(())).expect("begin");
        puts.write(ExtractionId(2), 0, b"half", |_| Ok(()))
            .expect("write");
        put_one(&puts, small(2, "out/new", b"whole"))
            .await
            .expect("put");
        assert_eq!(read(root.path(), "out/new").expect("read"), b"whole");
        assert_eq!(receipts(&puts).find(ExtractionId(2)), Ok(None));
    }

    #[test]
    fn a_chunked_upload_begun_meanwhile_is_completed() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        let under_way = staged(&puts, small(1, "out/f", b"one"));
        puts.begin(&begin(1, "out/f"), |_| Ok(())).expect("begin");
        let receipts = receipts(&puts);
        let told = puts.place_all(Some(&receipts), vec![Ok(PackStage::Ready(under_way))]);
        assert!(told[0].is_ok(), "{told:?}");
        assert_eq!(receipts.find(ExtractionId(1)), Ok(None));
        let state = puts.begin(&begin(1, "out/f"), |_| Ok(()));
        assert!(
            state.expect("begin").receipt.is_some(),
            "it knows of its end"
        );
        assert_eq!(read(root.path(), "out/f").expect("read"), b"one");
        assert_eq!(temporaries(root.path()), 0);
    }

    #[tokio::test]
    async fn two_homes_share_one_directory_safely() {
        let root = tempfile::tempdir().expect("directory");
        let (one, two) = (open(root.path()), open(root.path()));
        let under_way = staged(&one, small(1, "out/f", b"one"));
        put_one(&two, small(2, "out/g", b"two")).await.expect("put");
        assert_eq!(temporaries(root.path()), 1, "it is the other's");
        let record = under_way.record.clone();
        assert_eq!(
            receipts(&one).decide(vec![record]),
            Ok(vec![Decision::Made])
        );
        put_one(&one, small(1, "out/f", b"one")).await.expect("put");
        drop((one, under_way));
        fs::write(root.path().join("out/f"), b"used since").expect("write");
        put_one(&two, small(1, "out/f", b"one"))
            .await
            .expect("it has them now");
        assert_eq!(read(root.path(), "out/f").expect("read"), b"used since");
    }

    #[tokio::test]
    async fn removing_the_log_loses_receipts_but_no_files() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        put_one(&puts, small(1, "out/f", b"one"))
            .await
            .expect("put");
        fs::remove_dir_all(root.path().join(OWN_DIRECTORY)).expect("remove");
        put_one(&puts, small(2, "out/g", b"two"))
            .await
            .expect("put");
        drop(puts);
        let puts = open(root.path());
        let is_known = |number| {
            receipts(&puts)
                .find(ExtractionId(number))
                .expect("read")
                .is_some()
        };
        assert_eq!((is_known(1), is_known(2)), (false, true));
    }

    #[tokio::test]
    async fn a_put_behind_too_many_gets_busy() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        let all = puts
            .limits
            .packs
            .clone()
            .acquire_many_owned(PACKS_MAX as u32);
        let all = all.await.expect("permits");
        let late = puts.put(vec![small(1, "out/f", b"one")], Deadline::after_ms(0));
        assert_eq!(code(late.await), ErrorCode::Busy);
        let files = puts.limits.files.acquire_many(FILES_MAX as u32 - 1);
        let files = files.await.expect("permits");
        drop(all);
        // One after the other, but all of them.
        let pack = (1..=9).map(|number| small(number, &format!("out/{number}"), b"x"));
        assert!(put(&puts, pack.collect()).await.iter().all(Result::is_ok));
        drop(files);
        assert_eq!(puts.limits.packs.available_permits(), PACKS_MAX);
    }
}
