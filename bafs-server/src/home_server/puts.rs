//! Uploads to home: nothing is visible before the commit, and each is put in place exactly once.
//!
//! An upload that comes in pieces is a directory named by its id: the bytes (`data`) and where it
//! stands (`state`). The state goes from receiving to committing to done, each step durable before
//! the next; so whoever finds it after a crash knows what is left to do. Small files come otherwise
//! (`packs.rs`). Checks rights through its caller.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use bafs_proto::hash::Digest;
use bafs_proto::ids::ExtractionId;
use bafs_proto::message::{BeginPut, CommitPut, PutFile, PutProgress, PutReceipt};
use bafs_proto::path::check_result_path;
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use serde::{Deserialize, Serialize};

use super::arrivals::{Arrival, Arrivals};
use super::data::{digest_of, open_data, seal_file};
use super::directory_use::DirectoryUse;
use super::export::{Export, OWN_DIRECTORY};
use super::packs::Limits;
use super::receipts::Receipts;
use super::refused::Refused;
use super::unfinished::is_full;
use crate::clock;
use crate::errors::disk_error;
use crate::incarnation::replace_file;

pub(super) const DATA: &str = "data";
pub(super) const STATE: &str = "state";

/// Where an upload stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Phase {
    /// Bytes come in.
    Receiving,
    /// All is checked and durable; the file may or may not have its name yet.
    Committing { size: u64, digest: Digest },
    /// The file has its name, durably.
    Done { size: u64, digest: Digest },
}

/// The record of an upload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct UploadRecord {
    pub(super) path: String,
    pub(super) mode: u32,
    pub(super) phase: Phase,
}

/// All uploads of an export.
#[derive(Debug)]
pub(crate) struct Puts {
    pub(super) export: Arc<Export>,
    pub(super) directory: PathBuf,
    pub(super) arrivals: Arrivals,
    pub(super) refused: Refused,
    /// Those of small files, unless another process has them.
    pub(super) receipts: Mutex<Option<Arc<Receipts>>>,
    pub(super) limits: Limits,
    /// Keeps others from removing the directory.
    pub(super) occupied: Mutex<Option<DirectoryUse>>,
}

impl Puts {
    /// Opens the uploads of an export, as a former server left them.
    ///
    /// # Errors
    /// `ServerFault` when their directory cannot be made.
    pub(crate) fn open(export: Arc<Export>) -> Result<Self> {
        let puts = Self {
            directory: export.root_path().join(OWN_DIRECTORY),
            export,
            arrivals: Arrivals::default(),
            refused: Refused::default(),
            receipts: Mutex::default(),
            limits: Limits::default(),
            occupied: Mutex::default(),
        };
        let receipts = puts.receipts().map_err(|error| puts.with_room(error))?;
        // Beside another server, what is unfinished is that one's.
        if receipts.is_some() {
            puts.find_left();
        }
        Ok(puts)
    }

    /// Makes the server's own directory if it is not there, and says that it is in use.
    pub(super) fn occupy(&self) -> Result<()> {
        let mut held = self.occupied.lock().unwrap_or_else(PoisonError::into_inner);
        if !held.as_ref().is_some_and(DirectoryUse::is_in_place) {
            let entered = DirectoryUse::open(&self.directory);
            *held = Some(entered.map_err(|error| self.not_entered(error))?);
        }
        Ok(())
    }

    fn not_entered(&self, error: io::Error) -> Error {
        let error = fault(&self.directory, error);
        if error.code != ErrorCode::RightMissing {
            return error;
        }
        let export = self.export.root_path().display();
        error.context(format!(
            "{export}: the home cannot write to its exported directory, where it keeps \
             {OWN_DIRECTORY}; permit it to write there"
        ))
    }

    /// The server's own directory in the export.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Starts an upload, or shows where it is. Here as below, `allow` tells whether the caller may
    /// write at a path: the one that was given, and the one where links in the export lead.
    ///
    /// # Errors
    /// What `allow` answers; `BadPath`; `Conflict` when the id was used for another path.
    pub(crate) fn begin(
        &self,
        call: &BeginPut,
        allow: impl Fn(&str) -> Result<()>,
    ) -> Result<PutProgress> {
        let mut begun = self.begin_once(call, &allow);
        if self.refused.is_waiting(call.extraction) {
            return begun;
        }
        if is_full(&begun) && self.make_room(Some(call.extraction)) {
            begun = self.begin_once(call, &allow);
        }
        if is_full(&begun) {
            self.refused.note_wanted();
        }
        begun
    }

    fn begin_once(
        &self,
        call: &BeginPut,
        allow: &dyn Fn(&str) -> Result<()>,
    ) -> Result<PutProgress> {
        check_target(&call.path)?;
        allow(&call.path)?;
        self.supersede(call.extraction, &call.path);
        self.refused.resume(call.extraction);
        self.arrivals.locked(call.extraction, |arrival| {
            if let Some(upload) = self.load_same(call.extraction, &call.path)? {
                let progress = self.resume(call.extraction, upload, arrival, allow)?;
                // Its bytes would take the link from those whose turn it is.
                let is_empty = progress.receipt.is_none() && progress.received_bytes == 0;
                if is_empty && let Some(why) = self.refused.must_wait(call.extraction, clock::now())
                {
                    *arrival = None;
                    return Err(why);
                }
                return Ok(progress);
            }
            if let Some(receipt) = self.claim(call.extraction, &call.path, allow)? {
                return Ok(PutProgress {
                    received_bytes: receipt.size,
                    receipt: Some(receipt),
                });
            }
            let upload = UploadRecord {
                path: call.path.clone(),
                mode: call.mode & 0o777,
                phase: Phase::Receiving,
            };
            self.store(call.extraction, &upload)?;
            sync_directory(&self.directory)?;
            self.resume(call.extraction, upload, arrival, allow)
        })
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
        allow: &dyn Fn(&str) -> Result<()>,
        is_refused: &mut bool,
    ) -> Result<PutProgress> {
        self.arrivals.locked(extract, |slot| {
            if slot.is_none() {
                let upload = self.load_known(extract)?;
                allow(&upload.path)?;
                let progress = self.resume(extract, upload, slot, allow)?;
                if progress.receipt.is_some() {
                    return Ok(progress);
                }
            }
            let arrival = slot.as_mut().expect("it was just resumed");
            allow(&arrival.path)?;
            let received_bytes = arrival.received_bytes();
            if offset > received_bytes {
                if let Some(refused) = self.refused.why(extract) {
                    return Err(refused);
                }
                let text = format!(
                    "bytes from {offset} would leave a gap; {received_bytes} were received so far"
                );
                return Err(Error::new(ErrorCode::Conflict, text));
            }
            if received_bytes == 0
                && let Some(refused) = self.refused.must_wait(extract, clock::now())
            {
                // What waits behind these bytes hears the same.
                *slot = None;
                return Err(refused);
            }
            if let Err(error) = arrival.add(offset, data) {
                // Nobody knows how much of it was written.
                let target = arrival.path.clone();
                *slot = None;
                let path = self.place(extract).join(DATA);
                let held_bytes = fs::metadata(&path).map_or(received_bytes, |data| data.len());
                let error = fault(&path, error);
                self.refused.note(extract, target, &error, held_bytes);
                *is_refused = true;
                return Err(error);
            }
            self.refused.resume(extract);
            Ok(PutProgress {
                received_bytes: arrival.received_bytes(),
                receipt: None,
            })
        })
    }

    /// Checks an upload and puts it in place.
    ///
    /// # Errors
    /// `WrongState` when bytes are missing; `DigestMismatch` when they are wrong: then all that
    /// was received is dropped, and the upload starts again from 0.
    pub(crate) fn commit(
        &self,
        call: &CommitPut,
        allow: impl Fn(&str) -> Result<()>,
    ) -> Result<PutReceipt> {
        let mut done = self.commit_once(call, &allow);
        if is_full(&done) && self.make_room(Some(call.extraction)) {
            done = self.commit_once(call, &allow);
        }
        if is_full(&done) {
            self.refused.note_wanted();
        }
        done
    }

    fn commit_once(
        &self,
        call: &CommitPut,
        allow: &dyn Fn(&str) -> Result<()>,
    ) -> Result<PutReceipt> {
        self.arrivals.locked(call.extraction, |slot| {
            let mut upload = self.load_known(call.extraction)?;
            allow(&upload.path)?;
            if upload.phase == Phase::Receiving {
                let seen = slot.take().and_then(|arrival| arrival.seen());
                self.check(call, &upload, seen)?;
                upload.phase = Phase::Committing {
                    size: call.size,
                    digest: call.digest,
                };
                self.store(call.extraction, &upload)?;
            }
            self.finish(call, upload, allow)
        })
    }

    /// Puts a small file in place at once whose upload was begun in pieces: that is finished so,
    /// and one that is done stays as it is.
    ///
    /// # Errors
    /// As [`Self::begin`] and [`Self::commit`].
    pub(super) fn put_alone(
        &self,
        call: &PutFile,
        data: &[u8],
        allow: &dyn Fn(&str) -> Result<()>,
    ) -> Result<PutReceipt> {
        let commit = CommitPut {
            extraction: call.extraction,
            size: data.len() as u64,
            digest: call.digest,
        };
        self.arrivals.locked(call.extraction, |slot| {
            if let Some(upload) = self.load_same(call.extraction, &call.path)?
                && upload.phase != Phase::Receiving
            {
                return self.finish(&commit, upload, allow);
            }
            *slot = None;
            if Digest::of(data) != call.digest {
                return Err(damaged(&call.path));
            }
            if let Some(receipt) = self.claim(call.extraction, &call.path, allow)? {
                return same_content(receipt, commit.size, commit.digest);
            }
            let upload = UploadRecord {
                path: call.path.clone(),
                mode: call.mode & 0o777,
                phase: Phase::Committing {
                    size: commit.size,
                    digest: commit.digest,
                },
            };
            let path = self.place(call.extraction).join(DATA);
            let write = || {
                let file = open_data(&path)?;
                file.set_len(0)?;
                file.write_all_at(data, 0)?;
                seal_file(&file, upload.mode)
            };
            write().map_err(|error| fault(&path, error))?;
            self.store(call.extraction, &upload)?;
            sync_directory(&self.directory)?;
            self.finish(&commit, upload, allow)
        })
    }

    /// Where an upload stands, and takes up its arrival if it is not done.
    fn resume(
        &self,
        extract: ExtractionId,
        upload: UploadRecord,
        slot: &mut Option<Arrival>,
        allow: &dyn Fn(&str) -> Result<()>,
    ) -> Result<PutProgress> {
        let path = self.place(extract).join(DATA);
        let Some(receipt) = self.receipt(extract, &upload, allow)? else {
            if slot.is_none() {
                let file = open_data(&path);
                let arrival = file.and_then(|file| Arrival::new(upload.path, file));
                *slot = Some(arrival.map_err(|error| fault(&path, error))?);
            }
            return Ok(PutProgress {
                received_bytes: slot.as_ref().map_or(0, Arrival::received_bytes),
                receipt: None,
            });
        };
        Ok(PutProgress {
            received_bytes: receipt.size,
            receipt: Some(receipt),
        })
    }

    /// The receipt of an upload whose commit is decided, after finishing it if that was
    /// interrupted; `None` while bytes come in.
    fn receipt(
        &self,
        extract: ExtractionId,
        upload: &UploadRecord,
        allow: &dyn Fn(&str) -> Result<()>,
    ) -> Result<Option<PutReceipt>> {
        let (size, digest) = match upload.phase {
            Phase::Receiving => return Ok(None),
            Phase::Committing { size, digest } => {
                self.publish(extract, upload, allow)?;
                let done = UploadRecord {
                    phase: Phase::Done { size, digest },
                    ..upload.clone()
                };
                self.store(extract, &done)?;
                self.refused.end(extract);
                (size, digest)
            }
            Phase::Done { size, digest } => (size, digest),
        };
        Ok(Some(PutReceipt {
            extraction: extract,
            path: upload.path.clone(),
            size,
            digest,
        }))
    }

    /// The receipt of an upload whose commit is decided, which must be for this content.
    fn finish(
        &self,
        call: &CommitPut,
        upload: UploadRecord,
        allow: &dyn Fn(&str) -> Result<()>,
    ) -> Result<PutReceipt> {
        let Some(receipt) = self.receipt(call.extraction, &upload, allow)? else {
            return Err(other_content(call.extraction));
        };
        same_content(receipt, call.size, call.digest)
    }

    /// Checks an upload by what was seen of it as it came, or by reading it again, and makes it
    /// durable if it is right.
    fn check(
        &self,
        call: &CommitPut,
        upload: &UploadRecord,
        seen: Option<(u64, Digest)>,
    ) -> Result<()> {
        let path = self.place(call.extraction).join(DATA);
        let failed = |error: io::Error| fault(&path, error);
        let file = open_data(&path).map_err(failed)?;
        let (size, digest) = match seen {
            Some(seen) => seen,
            None => digest_of(&file, call.size).map_err(failed)?,
        };
        if size < call.size {
            let text = format!(
                "only {size} of {} bytes were received; send the rest",
                call.size
            );
            return Err(Error::new(ErrorCode::WrongState, text));
        }
        if size > call.size || digest != call.digest {
            file.set_len(0).map_err(failed)?;
            return Err(damaged(&upload.path));
        }
        seal_file(&file, upload.mode).map_err(failed)
    }

    fn load_known(&self, extract: ExtractionId) -> Result<UploadRecord> {
        self.load(extract)?.ok_or_else(|| {
            let text = format!("upload {extract} does not exist here; start it first");
            Error::new(ErrorCode::NotFound, text)
        })
    }

    /// Where an upload goes that came in, if that is known at once.
    pub(super) fn arriving_path(&self, extract: ExtractionId) -> Option<String> {
        self.arrivals.path(extract)
    }

    /// Where an upload goes, if it was begun.
    ///
    /// # Errors
    /// `ServerFault` when that cannot be read.
    pub(super) fn path_of(&self, extract: ExtractionId) -> Result<Option<String>> {
        Ok(self.load(extract)?.map(|upload| upload.path))
    }

    /// The upload if it was begun, which must have been for the same path.
    fn load_same(&self, extract: ExtractionId, path: &str) -> Result<Option<UploadRecord>> {
        let known = self.load(extract)?;
        match known.as_ref().filter(|upload| upload.path != path) {
            None => Ok(known),
            Some(upload) => Err(other_path(extract, &upload.path, path)),
        }
    }

    pub(super) fn load(&self, extract: ExtractionId) -> Result<Option<UploadRecord>> {
        loaded(&self.place(extract))
    }

    pub(super) fn store(&self, extract: ExtractionId, upload: &UploadRecord) -> Result<()> {
        let place = self.place(extract);
        let text = serde_json::to_vec(upload).map_err(|error| fault(&place, error))?;
        replace_file(&place.join(STATE), &text).map_err(|error| fault(&place, error))
    }

    pub(super) fn place(&self, extract: ExtractionId) -> PathBuf {
        self.directory.join(extract.to_string())
    }

    pub(super) fn make_place(&self, extract: ExtractionId) -> Result<()> {
        // Never with those above: the exported directory may have gone, and must stay so.
        for path in [self.directory.clone(), self.place(extract)] {
            match fs::create_dir(&path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(fault(&path, error));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// The record of the upload in a directory, if there is one.
pub(super) fn loaded(place: &Path) -> Result<Option<UploadRecord>> {
    let path = place.join(STATE);
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(fault(&path, error)),
    };
    let read = serde_json::from_slice(&text);
    read.map(Some).map_err(|error| fault(&path, error))
}

pub(super) fn check_target(path: &str) -> Result<()> {
    check_result_path(path)?;
    if path.is_empty() || path.split('/').next() == Some(OWN_DIRECTORY) {
        let text = format!("'{path}' cannot be a file");
        return Err(Error::new(ErrorCode::BadPath, text));
    }
    Ok(())
}

/// The directory above a path, and the name in it.
pub(super) fn parted(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

pub(super) fn same_content(receipt: PutReceipt, size: u64, digest: Digest) -> Result<PutReceipt> {
    if (receipt.size, receipt.digest) == (size, digest) {
        Ok(receipt)
    } else {
        Err(other_content(receipt.extraction))
    }
}

fn other_content(extract: ExtractionId) -> Error {
    let text = format!("upload {extract} is done with other content");
    Error::new(ErrorCode::Conflict, text)
}

pub(super) fn other_path(extract: ExtractionId, begun: &str, path: &str) -> Error {
    let text =
        format!("upload {extract} was started for '{begun}', not for '{path}'; use a new id");
    Error::new(ErrorCode::Conflict, text)
}

pub(super) fn damaged(path: &str) -> Error {
    let text = format!("the data received for '{path}' are damaged; send them again");
    Error::new(ErrorCode::DigestMismatch, text)
}

pub(super) fn sync_directory(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|file| file.sync_all())
        .map_err(|error| fault(path, error))
}

/// What the disk does not do. What does not pass by itself is told as such: a full disk, and one
/// that nobody may write.
pub(super) fn fault(path: &Path, error: impl Into<io::Error>) -> Error {
    let error = error.into();
    let doing = format!("the home server fails at {}", path.display());
    match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            Error::new(ErrorCode::RightMissing, format!("{doing}: {error}"))
        }
        _ => disk_error(doing, &error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    use rustix::io::Errno;
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    use super::super::export::system_error;
    use super::super::receipts::RECEIPT_MS_MAX;
    use super::super::sweep::IDLE_MS_MAX;
    use super::*;

    const EXTRACT: ExtractionId = ExtractionId(7);

    fn open(root: &Path) -> Puts {
        Puts::open(Arc::new(Export::open(root).expect("export"))).expect("puts")
    }

    /// Who sends would try it for an hour, and the user would hear nothing.
    #[test]
    fn a_full_disk_is_a_permanent_refusal() {
        let refused = |errno: Errno| fault(Path::new("f"), errno);
        let full = refused(Errno::NOSPC);
        assert_eq!(full.code, ErrorCode::NoSpaceBytes);
        assert_eq!(refused(Errno::ROFS).code, ErrorCode::RightMissing);
        assert!(refused(Errno::IO).is_transient());
        let export = system_error("f", Errno::NOSPC);
        assert_eq!(export.code, ErrorCode::NoSpaceBytes);
    }

    #[test]
    fn export_refusals_say_what_is_needed() {
        let root = tempfile::tempdir().expect("directory");
        let refused = open(root.path()).not_entered(Errno::ACCESS.into());
        assert_eq!(refused.code, ErrorCode::RightMissing);
        for part in ["permit it to write", OWN_DIRECTORY, "Permission denied"] {
            assert!(refused.detail.contains(part), "{refused}");
        }
        let mounted = system_error("other/x", Errno::XDEV);
        assert_eq!(mounted.code, ErrorCode::BadPath);
        assert!(mounted.detail.contains("with its own home"), "{mounted}");
    }

    fn receive(puts: &Puts, path: &str, data: &[u8]) -> CommitPut {
        let begin = BeginPut {
            extraction: EXTRACT,
            path: path.to_owned(),
            mode: 0o640,
        };
        puts.begin(&begin, |_| Ok(())).expect("begin");
        puts.write(EXTRACT, 0, data, |_| Ok(())).expect("write");
        CommitPut {
            extraction: EXTRACT,
            size: data.len() as u64,
            digest: Digest::of(data),
        }
    }

    /// Leaves the upload as a crash would that hit right after the commit was decided.
    fn interrupt(puts: &Puts, commit: &CommitPut) {
        let mut upload = puts.load_known(EXTRACT).expect("load");
        puts.check(commit, &upload, None).expect("check");
        upload.phase = Phase::Committing {
            size: commit.size,
            digest: commit.digest,
        };
        puts.store(EXTRACT, &upload).expect("store");
    }

    #[test]
    fn a_commit_interrupted_before_renaming_finishes_later() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        let commit = receive(&puts, "a/b", b"content");
        interrupt(&puts, &commit);
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
        let puts = open(root.path());
        let commit = receive(&puts, "f", b"first");
        interrupt(&puts, &commit);
        let upload = puts.load_known(EXTRACT).expect("load");
        puts.publish(EXTRACT, &upload, &|_| Ok(())).expect("rename");
        fs::write(root.path().join("f"), b"later").expect("write");
        let begin = BeginPut {
            extraction: EXTRACT,
            path: "f".to_owned(),
            mode: 0o640,
        };
        let receipt = open(root.path())
            .begin(&begin, |_| Ok(()))
            .expect("begin")
            .receipt
            .expect("receipt");
        assert_eq!(receipt.digest, commit.digest);
        assert_eq!(fs::read(root.path().join("f")).expect("read"), b"later");
    }

    #[test]
    fn bytes_lost_before_the_rename_are_requested_again() {
        for earlier in [None, Some(b"an earlier result")] {
            let root = tempfile::tempdir().expect("directory");
            let puts = open(root.path());
            let commit = receive(&puts, "f", b"first");
            interrupt(&puts, &commit);
            fs::remove_file(puts.place(EXTRACT).join(DATA)).expect("remove");
            if let Some(earlier) = earlier {
                fs::write(root.path().join("f"), earlier).expect("write");
            }
            let puts = open(root.path());
            let told = puts.commit(&commit, |_| Ok(())).expect_err("no file came");
            assert!(told.is_transient(), "{told}");
            let commit = receive(&puts, "f", b"first");
            puts.commit(&commit, |_| Ok(())).expect("commit");
            assert_eq!(fs::read(root.path().join("f")).expect("read"), b"first");
        }
    }

    #[test]
    fn received_bytes_are_rehashed_only_after_a_restart() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        let commit = receive(&puts, "f", b"content");
        let seen = |puts: &Puts| {
            puts.arrivals.locked(EXTRACT, |slot| {
                Ok(slot
                    .as_ref()
                    .map(|arrival| (arrival.received_bytes(), arrival.seen())))
            })
        };
        let all = Some((7, Some((7, commit.digest))));
        assert_eq!(seen(&puts), Ok(all));
        puts.write(EXTRACT, 3, b"TENT", |_| Ok(())).expect("write");
        assert_eq!(seen(&puts), Ok(all), "what is hashed is not replaced");
        let again = open(root.path());
        let begin = BeginPut {
            extraction: EXTRACT,
            path: "f".to_owned(),
            mode: 0o640,
        };
        again.begin(&begin, |_| Ok(())).expect("begin");
        assert_eq!(seen(&again), Ok(Some((7, None))));
        again.commit(&commit, |_| Ok(())).expect("commit");
        assert_eq!(fs::read(root.path().join("f")).expect("read"), b"content");
    }

    #[test]
    fn a_commit_resumes_on_a_read_only_file() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        let commit = receive(&puts, "f", b"content");
        let data = puts.place(EXTRACT).join(DATA);
        fs::set_permissions(&data, fs::Permissions::from_mode(0o444)).expect("chmod");
        let puts = open(root.path());
        // As anybody but root.
        let act = move || {
            let mut own = capabilities(None).expect("capabilities");
            let all = CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
            own.effective.remove(all);
            set_capabilities(None, own).expect("give up");
            puts.commit(&commit, |_| Ok(()))
        };
        let done = std::thread::spawn(act).join().expect("join");
        assert_eq!(done.expect("it is whole").size, 7);
        assert_eq!(fs::read(root.path().join("f")).expect("read"), b"content");
    }

    #[test]
    fn a_commit_fails_if_its_directory_vanishes() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        let commit = receive(&puts, "d/f", b"x");
        fs::create_dir(root.path().join("d")).expect("mkdir");
        // As if somebody removed it between the look-up and the renaming.
        let remove = |_: &str| {
            fs::remove_dir(root.path().join("d")).expect("rmdir");
            Ok(())
        };
        interrupt(&puts, &commit);
        let upload = puts.load_known(EXTRACT).expect("load");
        assert!(puts.publish(EXTRACT, &upload, &remove).is_err());
        puts.commit(&commit, |_| Ok(())).expect("later");
        assert_eq!(fs::read(root.path().join("d/f")).expect("read"), b"x");
    }

    #[test]
    fn receipts_are_kept_longer_than_idle_uploads() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        let commit = receive(&puts, "f", b"x");
        let now = clock::now();
        puts.sweep(now.plus_ms(IDLE_MS_MAX - 60_000));
        assert!(puts.load(EXTRACT).expect("load").is_some());
        puts.commit(&commit, |_| Ok(())).expect("commit");
        puts.sweep(now.plus_ms(IDLE_MS_MAX + 60_000));
        assert!(puts.load(EXTRACT).expect("load").is_some());
        puts.sweep(now.plus_ms(RECEIPT_MS_MAX + 60_000));
        assert!(puts.load(EXTRACT).expect("load").is_none());
        let _ = receive(&puts, "g", b"y");
        puts.sweep(now.plus_ms(IDLE_MS_MAX + 60_000));
        assert!(puts.load(EXTRACT).expect("load").is_none());
    }

    #[test]
    fn surplus_receipts_are_removed_except_recent_ones() {
        let root = tempfile::tempdir().expect("directory");
        let puts = open(root.path());
        let now = clock::now();
        let put = |number: u128, minutes_ago: u64| {
            let extract = ExtractionId(number);
            let call = PutFile {
                extraction: extract,
                path: format!("f{number}"),
                mode: 0o640,
                digest: Digest::of(b"x"),
            };
            puts.put_alone(&call, b"x", &|_| Ok(())).expect("put");
            let state = File::open(puts.place(extract).join(STATE)).expect("state");
            let since = Duration::from_millis(now.0) - Duration::from_secs(minutes_ago * 60);
            let changed = std::time::SystemTime::UNIX_EPOCH + since;
            state.set_modified(changed).expect("time");
        };
        let left = || -> Vec<u128> {
            let is_there =
                |number: &u128| puts.load(ExtractionId(*number)).expect("load").is_some();
            (1..=5).filter(is_there).collect()
        };
        put(1, 70);
        put(2, 90);
        put(3, 80);
        put(4, 30);
        put(5, 10);
        puts.sweep_to(now, 5);
        assert_eq!(left(), [1, 2, 3, 4, 5]);
        puts.sweep_to(now, 3);
        assert_eq!(left(), [1, 4, 5]);
        puts.sweep_to(now, 0);
        assert_eq!(left(), [4, 5]);
        // What is put in place stays.
        assert_eq!(fs::read(root.path().join("f2")).expect("read"), b"x");
    }
}
