//! All uploads to an exported directory: nothing is visible before the commit, and each file gets
//! its name exactly once.
//!
//! ```text
//!  a large file   begin ─▶ ranges ─▶ commit ─┐
//!                                            ├─▶ check, seal ─▶ Durable ─▶ rename ─▶ Published
//!  small files    one call, all at once ─────┘     (sync)       (table)    (sync)     (table)
//! ```
//!
//! Each step is durable before the next, so whoever finds an upload after a crash knows what is
//! left to do: `upload.rs` has the states. Checks rights through its caller.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bafs_proto::hash::Digest;
use bafs_proto::ids::{ExtractionId, UploadEpoch};
use bafs_proto::message::{BeginPut, CommitPut, PutProgress, PutReceipt, UploadFence};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};

use super::arrivals::{Arrival, Arrivals};
use super::directory_use::{DirectoryUse, make_private_directory};
use super::export::{Export, OWN_DIRECTORY};
use super::pack_limits::PackLimits;
use super::space_queue::{SpaceQueue, is_full};
use super::upload::unknown_upload_error;
use super::upload::{Content, StagedData, UploadEvent, UploadRecord, UploadState};
use super::upload_fences::FencedTarget;
use super::upload_files::{
    AllowPath, LastParent, UploadFiles, check_target_path, digest_of, fault, open_data, seal_file,
    split_parent,
};
use super::upload_table::{Publication, UploadRows, UploadTable};
use crate::clock;

/// All uploads of an export.
#[derive(Debug)]
pub(crate) struct Uploads {
    pub(super) files: UploadFiles,
    pub(super) table: UploadTable,
    pub(super) arrivals: Arrivals,
    pub(super) queue: SpaceQueue,
    pub(super) limits: PackLimits,
    /// Keeps others from removing the directory.
    occupied: Mutex<Option<DirectoryUse>>,
}

/// A decided upload that is to get its name: its row, and what its sender may.
pub(super) type DecidedUpload<'a> = (ExtractionId, UploadRecord, AllowPath<'a>);

impl Uploads {
    /// Opens the uploads of an export, as a former server left them.
    ///
    /// # Errors
    /// `ServerFault` when their directory cannot be made.
    pub(crate) fn open(export: Arc<Export>) -> Result<Self> {
        let files = UploadFiles::new(export);
        let uploads = Self {
            table: UploadTable::new(&files.directory)?,
            files,
            arrivals: Arrivals::default(),
            queue: SpaceQueue::default(),
            limits: PackLimits::default(),
            occupied: Mutex::default(),
        };
        let occupied = uploads.occupy();
        occupied.map_err(|error| uploads.with_room(error))?;
        Ok(uploads)
    }

    /// Makes the server's own directory if it is not there, and says that it is in use. Where no
    /// other server uses it, what a former one left is finished.
    pub(super) fn occupy(&self) -> Result<()> {
        let mut held = lock(&self.occupied);
        if held.as_ref().is_some_and(DirectoryUse::is_in_place) {
            return Ok(());
        }
        let mut recovered = Ok(());
        let data = self.files.data_directory();
        // Never with those above: the exported directory may have gone, and must stay so.
        let recover = || {
            let made = make_private_directory(&data).map_err(|error| fault(&data, error));
            recovered = made.and_then(|()| self.recover());
        };
        let entered = DirectoryUse::open(&self.files.directory, recover);
        let entered = entered.map_err(|error| self.entry_error(error))?;
        recovered?;
        make_private_directory(&data).map_err(|error| fault(&data, error))?;
        *held = Some(entered);
        Ok(())
    }

    fn entry_error(&self, error: io::Error) -> Error {
        let error = fault(&self.files.directory, error);
        if error.code != ErrorCode::RightMissing {
            return error;
        }
        let export = self.files.export.root_path().display();
        error.context(format!(
            "{export}: the home cannot write to its exported directory, where it keeps \
             {OWN_DIRECTORY}; permit it to write there"
        ))
    }

    /// The server's own directory in the export.
    pub(crate) fn directory(&self) -> &Path {
        &self.files.directory
    }

    /// Starts an upload, or shows where it is. Here as below, `allow` tells whether the caller may
    /// write at a path: the one that was given, and the one where links in the export lead.
    ///
    /// # Errors
    /// What `allow` answers; `BadPath`; `Conflict` when the id was used for another path;
    /// `UploadFenced` when a later upload was put there.
    pub(crate) fn begin(
        &self,
        call: &BeginPut,
        allow: impl Fn(&str) -> Result<()>,
    ) -> Result<PutProgress> {
        let begin = || self.begin_once(call, &allow);
        let begun = begin();
        self.drop_fenced(call.extraction, &begun);
        match self.queue.is_waiting(call.extraction) {
            true => begun,
            false => self.retry_with_room(call.extraction, begun, begin),
        }
    }

    fn begin_once(&self, call: &BeginPut, allow: AllowPath<'_>) -> Result<PutProgress> {
        check_target_path(&call.path)?;
        allow(&call.path)?;
        self.occupy()?;
        let extract = call.extraction;
        self.supersede(call)?;
        self.queue.resume(extract);
        self.arrivals.locked(extract, |slot| {
            let begun = UploadEvent::Begun {
                path: call.path.clone(),
                mode: call.mode,
            };
            let (path, fence) = (call.path.clone(), call.fence);
            let record = self.table.run(move |rows| {
                rows.check_fence(extract, &path, fence)?;
                rows.apply(extract, begun)
            })?;
            let progress = self.resume(extract, record, slot, allow)?;
            // Its bytes would take the link from those whose turn it is.
            let is_empty = progress.receipt.is_none() && progress.received_bytes == 0;
            if is_empty && let Some(why) = self.queue.must_wait(extract, clock::now()) {
                *slot = None;
                return Err(why);
            }
            Ok(progress)
        })
    }

    /// Tries once more what a full disk refused, if what nobody continues makes room for it.
    fn retry_with_room<T>(
        &self,
        extract: ExtractionId,
        mut done: Result<T>,
        act: impl Fn() -> Result<T>,
    ) -> Result<T> {
        if is_full(&done) && self.make_room(Some(extract)) {
            done = act();
        }
        if is_full(&done) {
            self.queue.note_wanted();
        }
        done
    }

    /// Waits until it is the turn of bytes at `offset`, which may have overtaken others.
    pub(crate) async fn turn(&self, extract: ExtractionId, offset: u64, deadline: Deadline) {
        self.arrivals.turn(extract, offset, deadline).await;
    }

    /// Takes bytes at `offset`, which must follow on what was received or repeat a part of it. On a
    /// full disk, what nobody continues makes room for them; else this upload may have to make
    /// room for others.
    ///
    /// # Errors
    /// `NotFound` before the upload was begun, `Conflict` when the bytes would leave a gap, unless
    /// they do as the disk refused those before them.
    pub(crate) fn write(
        &self,
        extract: ExtractionId,
        offset: u64,
        data: &[u8],
        allow: impl Fn(&str) -> Result<()>,
    ) -> Result<PutProgress> {
        let mut is_refused = false;
        let mut write = || self.write_once(extract, offset, data, &allow, &mut is_refused);
        let mut written = write();
        if is_full(&written) && self.make_room(Some(extract)) {
            written = write();
        }
        if is_full(&written) && is_refused {
            self.give_way(extract);
        }
        written
    }

    /// As [`Self::write`], once; tells where the disk refuses these bytes, and not others before
    /// them.
    fn write_once(
        &self,
        extract: ExtractionId,
        offset: u64,
        data: &[u8],
        allow: AllowPath<'_>,
        is_refused: &mut bool,
    ) -> Result<PutProgress> {
        self.arrivals.locked(extract, |slot| {
            if slot.is_none() {
                let record = self.load_known(extract)?;
                allow(&record.path)?;
                let progress = self.resume(extract, record, slot, allow)?;
                if progress.receipt.is_some() {
                    return Ok(progress);
                }
            }
            let arrival = slot.as_mut().expect("it was just resumed");
            allow(&arrival.path)?;
            let received_bytes = arrival.received_bytes();
            if offset > received_bytes {
                if let Some(refused) = self.queue.why(extract) {
                    return Err(refused);
                }
                let text = format!(
                    "bytes from {offset} would leave a gap; {received_bytes} were received so far"
                );
                return Err(Error::new(ErrorCode::Conflict, text));
            }
            if received_bytes == 0
                && let Some(refused) = self.queue.must_wait(extract, clock::now())
            {
                // What waits behind these bytes hears the same.
                *slot = None;
                return Err(refused);
            }
            if let Err(error) = arrival.add(offset, data) {
                // Nobody knows how much of it was written.
                let target = arrival.path.clone();
                *slot = None;
                let path = self.files.data_path(&extract.to_string());
                let held_bytes = fs::metadata(&path).map_or(received_bytes, |data| data.len());
                let error = fault(&path, error);
                self.queue.note(extract, target, &error, held_bytes);
                *is_refused = true;
                return Err(error);
            }
            self.queue.resume(extract);
            Ok(PutProgress {
                received_bytes: arrival.received_bytes(),
                receipt: None,
            })
        })
    }

    /// Where an upload stands, and takes up its arrival if it is not decided.
    fn resume(
        &self,
        extract: ExtractionId,
        record: UploadRecord,
        slot: &mut Option<Arrival>,
        allow: AllowPath<'_>,
    ) -> Result<PutProgress> {
        if record.is_receiving() {
            if slot.is_none() {
                let path = self.files.data_path(&extract.to_string());
                let file = open_data(&path);
                let arrival = file.and_then(|file| Arrival::new(record.path, file));
                *slot = Some(arrival.map_err(|error| fault(&path, error))?);
            }
            return Ok(PutProgress {
                received_bytes: slot.as_ref().map_or(0, Arrival::received_bytes),
                receipt: None,
            });
        }
        *slot = None;
        let receipt = self.publish_one(extract, record, allow)?;
        Ok(PutProgress {
            received_bytes: receipt.size,
            receipt: Some(receipt),
        })
    }

    /// Checks an upload and puts it in place.
    ///
    /// # Errors
    /// `WrongState` when bytes are missing; `DigestMismatch` when they are wrong: then all that
    /// was received is dropped, and the upload starts again from 0; `UploadFenced` when a later
    /// upload was put there.
    pub(crate) fn commit(
        &self,
        call: &CommitPut,
        allow: impl Fn(&str) -> Result<()>,
    ) -> Result<PutReceipt> {
        let commit = || self.commit_once(call, &allow);
        let done = self.retry_with_room(call.extraction, commit(), commit);
        self.drop_fenced(call.extraction, &done);
        done
    }

    fn commit_once(&self, call: &CommitPut, allow: AllowPath<'_>) -> Result<PutReceipt> {
        let (extract, size, digest) = (call.extraction, call.size, call.digest);
        self.arrivals.locked(extract, |slot| {
            let mut record = self.load_known(extract)?;
            allow(&record.path)?;
            if record.is_receiving() {
                let seen = slot.take().and_then(|arrival| arrival.seen());
                let content = Content { size, digest };
                record = self.decide(extract, record, content, seen, (call.fence, allow))?;
            }
            record.check_content(extract, Content { size, digest })?;
            self.publish_one(extract, record, allow)
        })
    }

    /// Checks the bytes of an upload by what was seen of it as it came, or by reading it again. If
    /// they are right, they become durable, and so does the decision that the target is this file.
    fn decide(
        &self,
        extract: ExtractionId,
        record: UploadRecord,
        content: Content,
        seen: Option<Content>,
        (fence, allow): (Option<UploadFence>, AllowPath<'_>),
    ) -> Result<UploadRecord> {
        let name = extract.to_string();
        let path = self.files.data_path(&name);
        let failed = |error: io::Error| fault(&path, error);
        let file = open_data(&path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let found = match seen {
            // Otherwise somebody changed or removed it.
            Some(seen) if seen.size == length => seen,
            _ => digest_of(&file, content.size).map_err(failed)?,
        };
        if found.size < content.size {
            let text = format!(
                "only {} of {} bytes were received; send the rest",
                found.size, content.size
            );
            return Err(Error::new(ErrorCode::WrongState, text));
        }
        if found != content {
            file.set_len(0).map_err(failed)?;
            return Err(damaged_error(&record.path));
        }
        let place = self.files.check_target(&record.path, allow)?;
        let identity = seal_file(&file, record.mode).map_err(failed)?;
        self.files.sync_names()?;
        let staged = UploadEvent::Staged {
            path: record.path,
            mode: record.mode,
            content,
            data: StagedData { name, identity },
        };
        let target = FencedTarget { place, fence };
        self.table
            .run(move |rows| rows.stage(extract, staged, &target))
    }

    /// An epoch later than those of all uploads that were decided before.
    ///
    /// # Errors
    /// What the disk does not do.
    pub(crate) fn issue_epoch(&self) -> Result<UploadEpoch> {
        self.occupy()?;
        self.table.run(|rows| rows.issue_epoch())
    }

    /// Removes what came of an upload that must not have its name, and says so.
    pub(super) fn drop_fenced<T>(&self, extract: ExtractionId, done: &Result<T>) {
        if let Err(error) = done
            && error.code == ErrorCode::UploadFenced
        {
            tracing::warn!(%extract, "refused an upload: {}", error.detail);
            self.give_up(extract, || true);
        }
    }

    /// Gives a decided upload its name, durably.
    pub(super) fn publish_one(
        &self,
        extract: ExtractionId,
        record: UploadRecord,
        allow: AllowPath<'_>,
    ) -> Result<PutReceipt> {
        let is_late = matches!(record.state, UploadState::Durable { .. });
        let mut told = self.publish_all(vec![(extract, record, allow)]);
        let told = told.pop().expect("one for each upload")?;
        if is_late {
            self.table.write_publications()?;
            self.queue.end(extract);
        }
        Ok(told)
    }

    /// Gives decided uploads their names, durably: each directory is made so once.
    pub(super) fn publish_all(&self, decided: Vec<DecidedUpload<'_>>) -> Vec<Result<PutReceipt>> {
        let (mut last, mut parents) = (None, BTreeMap::new());
        let mut told = Vec::with_capacity(decided.len());
        for (at, (extract, record, allow)) in decided.iter().enumerate() {
            let receipt = record.receipt(*extract);
            let receipt = receipt.ok_or_else(|| lost_error(&record.path));
            let renamed = self.rename(*extract, record, *allow, &mut last);
            if renamed.is_ok() && matches!(record.state, UploadState::Durable { .. }) {
                let above = split_parent(&record.path).0.to_owned();
                parents.entry(above).or_insert_with(Vec::new).push(at);
            }
            told.push(renamed.and(receipt));
        }
        for (above, names) in parents {
            let durable = self.files.sync_parent(&above);
            for at in names {
                match &durable {
                    Ok(()) => {
                        let mut publications = self.table.publications();
                        let renamed = publications.get_mut(&decided[at].0);
                        // Otherwise another caller was first, and the table says so.
                        if let Some(renamed) = renamed {
                            *renamed = Publication::Durable;
                        }
                    }
                    Err(error) => told[at] = Err(error.clone()),
                }
            }
        }
        told
    }

    /// Gives a decided upload its name, once. One without bytes is to be sent again.
    pub(super) fn rename(
        &self,
        extract: ExtractionId,
        record: &UploadRecord,
        allow: AllowPath<'_>,
        last: &mut LastParent,
    ) -> Result<()> {
        let UploadState::Durable { content, data } = &record.state else {
            return Ok(());
        };
        let parent = self.files.open_parent(&record.path, allow, last)?;
        let mut publications = self.table.publications();
        if publications.contains_key(&extract) {
            return Ok(());
        }
        if self.files.rename(parent, &record.path, *content, data)? {
            publications.insert(extract, Publication::Renamed);
            return Ok(());
        }
        drop(publications);
        let lost = move |rows: &mut UploadRows<'_>| rows.apply(extract, UploadEvent::Lost);
        match self.table.run(lost)?.state {
            // A later one has replaced it.
            UploadState::Published(_) => Ok(()),
            _ => Err(lost_error(&record.path)),
        }
    }

    fn load_known(&self, extract: ExtractionId) -> Result<UploadRecord> {
        self.load(extract)?
            .ok_or_else(|| unknown_upload_error(extract))
    }

    /// Where an upload goes that came in, if that is known at once.
    pub(super) fn arriving_path(&self, extract: ExtractionId) -> Option<String> {
        self.arrivals.path(extract)
    }

    /// The row of an upload.
    ///
    /// # Errors
    /// `ServerFault` when that cannot be read.
    pub(super) fn load(&self, extract: ExtractionId) -> Result<Option<UploadRecord>> {
        self.occupy()?;
        self.table.run(move |rows| rows.get(extract))
    }
}

pub(super) fn lost_error(path: &str) -> Error {
    let text = format!("what home received for '{path}' is gone; send it again");
    Error::new(ErrorCode::ServerFault, text)
}

/// The bytes that came have another digest.
pub(super) fn check_digest(path: &str, data: &[u8], digest: Digest) -> Result<()> {
    match Digest::of(data) == digest {
        true => Ok(()),
        false => Err(damaged_error(path)),
    }
}

fn damaged_error(path: &str) -> Error {
    let text = format!("the data received for '{path}' are damaged; send them again");
    Error::new(ErrorCode::DigestMismatch, text)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No holder leaves what is behind it half-changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use rustix::io::Errno;
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    use super::super::export::system_error;
    use super::super::upload_recovery::IDLE_MS_MAX;
    use super::super::upload_table::RECEIPT_MS_MAX;
    use super::*;

    const EXTRACT: ExtractionId = ExtractionId(7);

    fn open(root: &Path) -> Uploads {
        Uploads::open(Arc::new(Export::open(root).expect("export"))).expect("uploads")
    }

    #[test]
    fn export_refusals_say_what_is_needed() {
        let root = tempfile::tempdir().expect("directory");
        let refused = open(root.path()).entry_error(Errno::ACCESS.into());
        assert_eq!(refused.code, ErrorCode::RightMissing);
        for part in ["permit it to write", OWN_DIRECTORY, "Permission denied"] {
            assert!(refused.detail.contains(part), "{refused}");
        }
        let mounted = system_error("other/x", Errno::XDEV);
        assert_eq!(mounted.code, ErrorCode::BadPath);
        assert!(mounted.detail.contains("with its own home"), "{mounted}");
    }

    fn receive(uploads: &Uploads, path: &str, data: &[u8]) -> CommitPut {
        let begin = BeginPut {
            extraction: EXTRACT,
            path: path.to_owned(),
            mode: 0o640,
            fence: None,
        };
        uploads.begin(&begin, |_| Ok(())).expect("begin");
        uploads.write(EXTRACT, 0, data, |_| Ok(())).expect("write");
        CommitPut {
            extraction: EXTRACT,
            size: data.len() as u64,
            digest: Digest::of(data),
            fence: None,
        }
    }

    /// Leaves the upload as a crash would that hit right after the commit was decided.
    fn interrupt(uploads: &Uploads, commit: &CommitPut) {
        let record = uploads.load_known(EXTRACT).expect("load");
        let (size, digest) = (commit.size, commit.digest);
        let allow = |_: &str| Ok(());
        let decided = uploads.decide(
            EXTRACT,
            record,
            Content { size, digest },
            None,
            (None, &allow),
        );
        decided.expect("decide");
    }

    /// Does the last step before the table hears of it.
    fn rename(uploads: &Uploads, allow: AllowPath<'_>) -> Result<()> {
        let record = uploads.load_known(EXTRACT).expect("load");
        uploads.rename(EXTRACT, &record, allow, &mut None)
    }

    #[test]
    fn a_commit_interrupted_before_renaming_finishes_later() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        let commit = receive(&uploads, "a/b", b"content");
        interrupt(&uploads, &commit);
        assert!(!root.path().join("a/b").exists());
        let receipt = open(root.path())
            .commit(&commit, |_| Ok(()))
            .expect("commit");
        assert_eq!((receipt.path.as_str(), receipt.size), ("a/b", 7));
        assert_eq!(fs::read(root.path().join("a/b")).expect("read"), b"content");
    }

    #[test]
    fn a_finished_rename_is_not_repeated_after_restart() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        let commit = receive(&uploads, "f", b"first");
        interrupt(&uploads, &commit);
        rename(&uploads, &|_| Ok(())).expect("rename");
        fs::write(root.path().join("f"), b"later").expect("write");
        let begin = BeginPut {
            extraction: EXTRACT,
            path: "f".to_owned(),
            mode: 0o640,
            fence: None,
        };
        let receipt = open(root.path())
            .begin(&begin, |_| Ok(()))
            .expect("begin")
            .receipt
            .expect("receipt");
        assert_eq!(receipt.digest, commit.digest);
        assert_eq!(fs::read(root.path().join("f")).expect("read"), b"later");
    }

    /// Whoever read that an upload is decided may be slow to give it its name.
    #[test]
    fn a_decided_upload_replaces_no_later_file() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        let fence = || {
            let epoch = uploads.issue_epoch().expect("an epoch");
            Some(UploadFence { epoch, order: 0 })
        };
        let (old, new) = (fence(), fence());
        let commit = receive(&uploads, "f", b"old");
        let record = uploads.load_known(EXTRACT).expect("load");
        let (size, digest) = (commit.size, commit.digest);
        let allow = |_: &str| Ok(());
        let content = Content { size, digest };
        let decided = uploads.decide(EXTRACT, record, content, None, (old, &allow));
        let decided = decided.expect("decide");
        let later = ExtractionId(8);
        let begin = BeginPut {
            extraction: later,
            path: "f".to_owned(),
            mode: 0o640,
            fence: new,
        };
        uploads.begin(&begin, |_| Ok(())).expect("begin");
        uploads.write(later, 0, b"new", |_| Ok(())).expect("write");
        let commit_later = CommitPut {
            extraction: later,
            size: 3,
            digest: Digest::of(b"new"),
            fence: new,
        };
        uploads
            .commit(&commit_later, |_| Ok(()))
            .expect("it is later");
        let renamed = uploads.rename(EXTRACT, &decided, &allow, &mut None);
        renamed.expect("it counts as replaced");
        let there = || fs::read(root.path().join("f")).expect("read");
        assert_eq!(there(), b"new");
        drop(uploads);
        let uploads = open(root.path());
        let late = CommitPut {
            fence: old,
            ..commit
        };
        let receipt = uploads.commit(&late, |_| Ok(()));
        assert_eq!(receipt.expect("it was decided").digest, digest);
        assert_eq!(there(), b"new");
    }

    #[test]
    fn bytes_lost_before_the_rename_are_requested_again() {
        for earlier in [None, Some(b"an earlier result")] {
            let root = tempfile::tempdir().expect("directory");
            let uploads = open(root.path());
            let commit = receive(&uploads, "f", b"first");
            interrupt(&uploads, &commit);
            fs::remove_file(uploads.files.data_path(&EXTRACT.to_string())).expect("remove");
            if let Some(earlier) = earlier {
                fs::write(root.path().join("f"), earlier).expect("write");
            }
            let uploads = open(root.path());
            let told = uploads
                .commit(&commit, |_| Ok(()))
                .expect_err("no file came");
            assert!(told.is_transient(), "{told}");
            let commit = receive(&uploads, "f", b"first");
            uploads.commit(&commit, |_| Ok(())).expect("commit");
            assert_eq!(fs::read(root.path().join("f")).expect("read"), b"first");
        }
    }

    #[test]
    fn received_bytes_are_rehashed_only_after_a_restart() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        let commit = receive(&uploads, "f", b"content");
        let seen = |uploads: &Uploads| {
            uploads.arrivals.locked(EXTRACT, |slot| {
                Ok(slot
                    .as_ref()
                    .map(|arrival| (arrival.received_bytes(), arrival.seen())))
            })
        };
        let all = Some((
            7,
            Some(Content {
                size: 7,
                digest: commit.digest,
            }),
        ));
        assert_eq!(seen(&uploads), Ok(all));
        uploads
            .write(EXTRACT, 3, b"TENT", |_| Ok(()))
            .expect("write");
        assert_eq!(seen(&uploads), Ok(all), "what is hashed is not replaced");
        let again = open(root.path());
        let begin = BeginPut {
            extraction: EXTRACT,
            path: "f".to_owned(),
            mode: 0o640,
            fence: None,
        };
        again.begin(&begin, |_| Ok(())).expect("begin");
        assert_eq!(seen(&again), Ok(Some((7, None))));
        again.commit(&commit, |_| Ok(())).expect("commit");
        assert_eq!(fs::read(root.path().join("f")).expect("read"), b"content");
    }

    #[test]
    fn a_commit_resumes_on_a_read_only_file() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        let commit = receive(&uploads, "f", b"content");
        let data = uploads.files.data_path(&EXTRACT.to_string());
        fs::set_permissions(&data, fs::Permissions::from_mode(0o444)).expect("chmod");
        let uploads = open(root.path());
        // As anybody but root.
        let act = move || {
            let mut own = capabilities(None).expect("capabilities");
            let all = CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
            own.effective.remove(all);
            set_capabilities(None, own).expect("give up");
            uploads.commit(&commit, |_| Ok(()))
        };
        let done = std::thread::spawn(act).join().expect("join");
        assert_eq!(done.expect("it is whole").size, 7);
        assert_eq!(fs::read(root.path().join("f")).expect("read"), b"content");
    }

    #[test]
    fn a_commit_fails_if_its_directory_vanishes() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        let commit = receive(&uploads, "d/f", b"x");
        fs::create_dir(root.path().join("d")).expect("mkdir");
        // As if somebody removed it between the look-up and the renaming.
        let remove = |_: &str| {
            fs::remove_dir(root.path().join("d")).expect("rmdir");
            Ok(())
        };
        interrupt(&uploads, &commit);
        assert!(rename(&uploads, &remove).is_err());
        uploads.commit(&commit, |_| Ok(())).expect("later");
        assert_eq!(fs::read(root.path().join("d/f")).expect("read"), b"x");
    }

    #[test]
    fn receipts_are_kept_longer_than_idle_uploads() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        let commit = receive(&uploads, "f", b"x");
        let now = clock::now();
        uploads.sweep(now.plus_ms(IDLE_MS_MAX - 60_000));
        assert!(uploads.load(EXTRACT).expect("load").is_some());
        uploads.commit(&commit, |_| Ok(())).expect("commit");
        uploads.sweep(now.plus_ms(IDLE_MS_MAX + 60_000));
        assert!(uploads.load(EXTRACT).expect("load").is_some());
        uploads.sweep(now.plus_ms(RECEIPT_MS_MAX + 60_000));
        assert!(uploads.load(EXTRACT).expect("load").is_none());
        let _ = receive(&uploads, "g", b"y");
        uploads.sweep(now.plus_ms(IDLE_MS_MAX + 60_000));
        assert!(uploads.load(EXTRACT).expect("load").is_none());
    }
    #[test]
    fn expired_uploads_go_with_their_files() {
        let root = tempfile::tempdir().expect("directory");
        let uploads = open(root.path());
        let commit = receive(&uploads, "f", b"content");
        interrupt(&uploads, &commit);
        // As of a server that was killed before it decided anything.
        let orphan = uploads.files.data_path("orphan");
        fs::write(&orphan, b"x").expect("write");
        let count = || {
            fs::read_dir(uploads.files.data_directory())
                .expect("list")
                .count()
        };
        let now = clock::now();
        uploads.sweep(now.plus_ms(IDLE_MS_MAX - 60_000));
        assert_eq!(count(), 2);
        uploads.sweep(now.plus_ms(IDLE_MS_MAX + 60_000));
        assert_eq!((count(), orphan.exists()), (1, false));
        uploads.sweep(now.plus_ms(RECEIPT_MS_MAX + 60_000));
        assert_eq!((count(), uploads.load(EXTRACT)), (0, Ok(None)));
    }
}
