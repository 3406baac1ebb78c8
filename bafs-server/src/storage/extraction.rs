//! Sends one file of a scratch volume home.
//!
//! `Extraction` runs one attempt after the other until home answers with a receipt, or until the
//! deadline. The home is of any kind ([`crate::home_clients`]).
//!
//! * A file of up to 1 MiB goes with one call. Small files to a home server share calls with
//!   others.
//! * A larger file goes in chunks of 1 MiB. `begin` says how much home already has, so a retry
//!   resumes there. Several chunks travel at once, if the home accepts that. `commit` checks size
//!   and digest, makes the file durable and gives it its name.
//!
//! The digest is computed while the file is read, in its order. A retry hashes no byte again. Bytes
//! that home has from an earlier call are read but not sent. The file must not change meanwhile:
//! its identity is compared before the digest is used.
//!
//! **Exactly once.** The scheduler chooses the id of the extraction, and home remembers it. A
//! repeated upload of a known id gets the same receipt. `extractions.rs` joins callers of the same
//! id, and keeps receipts in the table of the store.
//!
//! **Errors.** They go through the call to the scheduler.
//!
//! | Error | Meaning |
//! |---|---|
//! | `NotFound`, `BadPath` | the file is not in the volume, or is no file: the job is at fault |
//! | `VolumeLost` | the volume is gone |
//! | `WrongState` | the file changed, or home lacks the directory |
//! | `Unsupported` | home can never have a file at that path |
//! | `UploadFenced` | a later upload is there: whoever still wants this one asks anew |
//! | `HomeUnreachable` | nothing was heard of home for 20 s |
//! | `ServerFault` | home or this disk fails, for 20 s without progress |
//!
//! Transient errors are retried after 50 ms to 2 s. An upload that home takes for another state
//! (`Conflict`, `WrongState`, `DigestMismatch`) is retried four times without progress.
//!
//! **Limits.** All extractions together hold 48 MiB of chunks, and 256 run at once. An extraction
//! waits for memory until its deadline. It has no state beyond one call.

use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bafs_proto::hash::{Digest, DigestHasher};
use bafs_proto::limits::IO_BYTES_MAX;
use bafs_proto::message::{ExtractFile, PutReceipt, SourceIdentity};
use bafs_proto::path::check_relative;
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::timeout_at;

use super::confined_directory::ConfinedDirectory;
use crate::home_clients::{
    CALL_TIMEOUT_MS, HomeClients, HomeUpload, ReplacedFile, transfer_ms_max,
};
use crate::source::file_identity;

/// Bytes of one piece of an upload; a smaller file goes as a whole.
const CHUNK_BYTES: u64 = IO_BYTES_MAX as u64;

/// Unit in which memory for pieces is given, in bytes: small files need little of it, so that many
/// may be under way.
pub(super) const MEMORY_UNIT_BYTES: u64 = 64 << 10;

/// Time for a small file that waits for others to leave, in milliseconds.
const QUEUE_TIMEOUT_MS: u64 = 5 * CALL_TIMEOUT_MS;

/// Pause after a failed attempt, in milliseconds; doubles up to the maximum.
const PAUSE_MS_MIN: u64 = 50;
const PAUSE_MS_MAX: u64 = 2_000;

/// A home of which nothing is heard for so long is away, in milliseconds: whoever asked knows
/// better than a node where it may be now, and may have somebody to tell.
const SILENCE_TIMEOUT_MS: u64 = 20_000;

/// Attempts after home refused for a reason that may be an out-dated picture of the upload, while
/// home gets no further.
const RESYNC_MAX: u32 = 4;

/// So long may home fail, in milliseconds, while it gets no further.
const FAILURE_TIMEOUT_MS: u64 = 20_000;

/// One extraction under way.
pub(super) struct Extraction {
    call: ExtractFile,
    homes: Arc<HomeClients>,
    deadline: Deadline,
    /// Time for a call that moves a piece or nothing, in milliseconds.
    call_timeout_ms: u64,
    file: Arc<File>,
    upload: Arc<HomeUpload>,
    chunk_memory: Arc<Semaphore>,
    identity: SourceIdentity,
    prefix_hash: PrefixHash,
    /// Until when home may be silent, if it is.
    silent_until: Option<Deadline>,
    /// Until when home may fail, if it does.
    failing_until: Option<Deadline>,
    resyncs: u32,
    /// The most that home was seen to have.
    received_max: u64,
}

/// A file to be sent, and its permission bits at home.
#[derive(Debug)]
pub(super) struct OpenedFile {
    pub(super) file: File,
    pub(super) mode: u32,
}

/// The bytes of a file that were hashed, from its start on.
#[derive(Default)]
struct PrefixHash {
    hasher: DigestHasher,
    bytes: u64,
}

impl Extraction {
    /// Opens the file in the tree at `root`, to be sent by pieces, of which all uploads together
    /// hold as much in memory as `pieces` has permits, [`MEMORY_UNIT_BYTES`] each. Blocks.
    ///
    /// # Errors
    /// `NotFound` naming volume and path, `BadPath` when it is no file of the volume.
    pub(super) fn open(
        root: &Path,
        call: ExtractFile,
        homes: Arc<HomeClients>,
        pieces: Arc<Semaphore>,
        deadline: Deadline,
    ) -> Result<Self> {
        check_relative(&call.path)?;
        let confined = ConfinedDirectory::open(root);
        let failed = |e: &std::io::Error| {
            let error = match &confined {
                Ok(confined) => open_error(confined, &call.path, e),
                // The volume itself is not there: that says nothing of what jobs wrote.
                Err(gone) if gone.kind() == std::io::ErrorKind::NotFound => {
                    Error::new(ErrorCode::VolumeLost, e.to_string())
                }
                Err(_) => Error::new(open_error_code(e), e.to_string()),
            };
            let (path, volume) = (&call.path, call.volume);
            error.context(format!("cannot extract '{path}' of volume {volume}"))
        };
        let opened = match &confined {
            Ok(confined) => confined.open_file(&call.path),
            Err(error) => Err(std::io::Error::from(error.kind())),
        };
        let file = opened.map_err(|e| failed(&e))?;
        let metadata = file.metadata().map_err(|e| failed(&e))?;
        let mode = metadata.permissions().mode() & 0o777;
        Self::of_file(OpenedFile { file, mode }, call, homes, pieces, deadline)
    }

    /// Takes an open file, which `call` names for messages.
    ///
    /// # Errors
    /// `ServerFault` when its size cannot be read.
    pub(super) fn of_file(
        OpenedFile { file, mode }: OpenedFile,
        call: ExtractFile,
        homes: Arc<HomeClients>,
        pieces: Arc<Semaphore>,
        deadline: Deadline,
    ) -> Result<Self> {
        let identity = file_identity(&file).map_err(|e| read_error(&e))?;
        let file = Arc::new(file);
        let put = Arc::new(HomeUpload {
            extract: call.extraction,
            home: call.home_address.clone(),
            home_id: call.home_id,
            path: call.target_path.clone(),
            mode,
            size: identity.size,
            token: call.home_token.clone(),
            fence: call.fence,
            replaced: ReplacedFile::default(),
        });
        Ok(Self {
            call,
            homes,
            deadline,
            call_timeout_ms: CALL_TIMEOUT_MS,
            file,
            upload: put,
            chunk_memory: pieces,
            identity,
            prefix_hash: PrefixHash::default(),
            silent_until: None,
            failing_until: None,
            resyncs: 0,
            received_max: 0,
        })
    }

    /// Sends the file, with as many attempts as the deadline allows.
    ///
    /// # Errors
    /// What home answered; `WrongState` when the file changes meanwhile; `DigestMismatch`;
    /// `HomeUnreachable` when nothing was heard of home for [`SILENCE_TIMEOUT_MS`].
    pub(super) async fn run(mut self) -> Result<PutReceipt> {
        let mut pause_ms = PAUSE_MS_MIN;
        loop {
            let error = match self.attempt().await {
                Ok(receipt) => return Ok(receipt),
                Err(error) => self.or_unreachable(home_error(error)),
            };
            let late = self.deadline.remaining() <= Duration::from_millis(pause_ms);
            if !self.can_retry(&error) || late || self.has_changed()? {
                return Err(error.context(format!(
                    "extract '{}' of volume {} to '{}'",
                    self.call.path, self.call.volume, self.call.target_path
                )));
            }
            tracing::debug!(extract = %self.call.extraction, %error, "extraction will be repeated");
            tokio::time::sleep(Duration::from_millis(pause_ms)).await;
            pause_ms = (pause_ms * 2).min(PAUSE_MS_MAX);
        }
    }

    /// Whether another attempt may do better.
    fn can_retry(&mut self, error: &Error) -> bool {
        if is_resync_needed(error) {
            self.resyncs += 1;
            return self.resyncs <= RESYNC_MAX;
        }
        match error.code {
            ErrorCode::HomeUnreachable => false,
            // Whoever asked tells somebody, and asks again.
            ErrorCode::ServerFault => {
                let timeout = || Deadline::after_ms(FAILURE_TIMEOUT_MS);
                let until = self.failing_until.get_or_insert_with(timeout);
                !until.remaining().is_zero()
            }
            _ => error.is_transient(),
        }
    }

    /// Home has so many bytes.
    fn note_received(&mut self, bytes: u64) {
        if bytes > self.received_max {
            self.received_max = bytes;
            self.failing_until = None;
            self.resyncs = 0;
        }
    }

    /// The same error, or that home is away, if it has been silent for too long.
    fn or_unreachable(&mut self, error: Error) -> Error {
        let (unreachable, late) = (ErrorCode::Unreachable, ErrorCode::DeadlineExceeded);
        if error.code != unreachable && error.code != late {
            self.silent_until = None;
            return error;
        }
        let timeout = || Deadline::after_ms(SILENCE_TIMEOUT_MS);
        let silent_until = self.silent_until.get_or_insert_with(timeout);
        if !silent_until.remaining().is_zero() {
            return error;
        }
        let text = format!(
            "home {} has not answered for {} s; check that it runs and that this node can reach it \
             ({})",
            self.upload.home,
            SILENCE_TIMEOUT_MS / 1000,
            error.detail
        );
        Error::new(ErrorCode::HomeUnreachable, text)
    }

    async fn attempt(&mut self) -> Result<PutReceipt> {
        let size = self.identity.size;
        if size <= CHUNK_BYTES {
            let is_packed = self.homes.has_packs(self.upload.home_address());
            // Other homes take small files as they take pieces: not too many at once.
            let _room = self
                .reserve_memory(if is_packed { size } else { CHUNK_BYTES })
                .await?;
            let data = self.read_chunk(0, size).await?;
            let digest = self.unchanged_digest()?;
            // The time of a pack begins when it leaves; the memory is not kept for ever.
            let until = match is_packed {
                true => self
                    .deadline
                    .earlier_of(Deadline::after_ms(QUEUE_TIMEOUT_MS)),
                false => self.call_deadline(),
            };
            let put = self.homes.put(&self.upload, data, digest, until);
            return self.check_receipt(put.await?);
        }
        let progress = self.homes.begin(&self.upload, self.call_deadline()).await?;
        self.silent_until = None;
        self.note_received(progress.received_bytes);
        if let Some(receipt) = progress.receipt {
            return self.check_receipt(receipt);
        }
        self.send_from(progress.received_bytes).await?;
        let digest = self.unchanged_digest()?;
        // Some homes read back the whole file, or put it together from its parts.
        let until = self.call_deadline_after(self.call_timeout_ms + transfer_ms_max(size));
        let receipt = self.homes.commit(&self.upload, digest, until).await?;
        if receipt.size != size || receipt.digest != digest {
            let text = "the home's receipt does not match the sent bytes";
            return Err(Error::new(ErrorCode::DigestMismatch, text));
        }
        self.check_receipt(receipt)
    }

    /// Sends what home does not have, several pieces under way at once, while the next is read.
    async fn send_from(&mut self, received: u64) -> Result<()> {
        let size = self.identity.size;
        if received > size {
            let text = format!("home has {received} bytes of a file of {size}");
            return Err(Error::new(ErrorCode::WrongState, text));
        }
        let pieces_max = self.homes.concurrent_chunks_max(self.upload.home_address());
        let mut under_way = JoinSet::new();
        let mut at = received.min(self.prefix_hash.bytes);
        while at < size {
            let room = self.reserve_memory(CHUNK_BYTES).await?;
            let piece = self
                .read_chunk(at, if at < received { received } else { size })
                .await?;
            let (start, length) = (at, piece.len() as u64);
            at += length;
            if at <= received {
                continue;
            }
            if under_way.len() >= pieces_max {
                self.wait_for_chunk(&mut under_way).await?;
            }
            let (homes, put, step) = (
                self.homes.clone(),
                self.upload.clone(),
                self.call_deadline(),
            );
            under_way.spawn(async move {
                let _room = room;
                let told = homes.write(&put, start, piece, step).await?;
                if told.received_bytes < start + length {
                    let text = format!("home has only {} bytes", told.received_bytes);
                    return Err(Error::new(ErrorCode::WrongState, text));
                }
                Ok(())
            });
        }
        while !under_way.is_empty() {
            self.wait_for_chunk(&mut under_way).await?;
        }
        Ok(())
    }

    /// Waits for one of the pieces that are under way. When one is refused as it does not follow on
    /// what home has, another was refused before: that one's error is the cause.
    async fn wait_for_chunk(&mut self, under_way: &mut JoinSet<Result<()>>) -> Result<()> {
        let mut failed = None;
        while let Some(done) = under_way.join_next().await {
            match done.map_err(|e| read_error(&e))? {
                Ok(()) => {
                    self.silent_until = None;
                    if failed.is_none() {
                        return Ok(());
                    }
                }
                Err(error) if is_resync_needed(&error) => failed = failed.or(Some(error)),
                Err(error) => return Err(error),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Waits, until the deadline at most, for memory for so many bytes.
    async fn reserve_memory(&self, bytes: u64) -> Result<OwnedSemaphorePermit> {
        let units = u32::try_from(bytes.div_ceil(MEMORY_UNIT_BYTES).max(1)).unwrap_or(u32::MAX);
        let place = self.chunk_memory.clone().acquire_many_owned(units);
        match timeout_at(self.deadline.instant().into(), place).await {
            Ok(room) => room.map_err(|e| read_error(&e)),
            Err(_) => {
                let text = "other extractions use all memory for chunks; try again later";
                Err(Error::new(ErrorCode::DeadlineExceeded, text))
            }
        }
    }

    /// Reads the next piece from `at`, but not past `stop`, and hashes what was not hashed before.
    async fn read_chunk(&mut self, at: u64, stop: u64) -> Result<Bytes> {
        let length = usize::try_from((stop - at).min(CHUNK_BYTES)).unwrap_or(0);
        let (file, path) = (self.file.clone(), self.call.path.clone());
        // If it fails, nothing counts as hashed.
        let mut hashed = std::mem::take(&mut self.prefix_hash);
        let reading = tokio::task::spawn_blocking(move || {
            let mut piece = vec![0; length];
            file.read_exact_at(&mut piece, at)?;
            let known = usize::try_from(hashed.bytes - at).unwrap_or(usize::MAX);
            if let Some(fresh) = piece.get(known..) {
                hashed.hasher.update(fresh);
                hashed.bytes += fresh.len() as u64;
            }
            Ok((hashed, Bytes::from(piece)))
        });
        let read: std::io::Result<_> = reading.await.map_err(|e| read_error(&e))?;
        let (hashed, piece) =
            read.map_err(|e| Error::new(ErrorCode::ServerFault, format!("read '{path}': {e}")))?;
        self.prefix_hash = hashed;
        Ok(piece)
    }

    /// The digest of the whole file, if it stayed as it was.
    fn unchanged_digest(&self) -> Result<Digest> {
        if self.has_changed()? {
            let text = "the file changed during the extraction; extract it after its writer has \
                        ended";
            return Err(Error::new(ErrorCode::WrongState, text));
        }
        Ok(self.prefix_hash.hasher.digest())
    }

    fn check_receipt(&self, receipt: PutReceipt) -> Result<PutReceipt> {
        if receipt.extraction == self.call.extraction && receipt.path == self.call.target_path {
            return Ok(receipt);
        }
        let text = format!(
            "extract id {} was used for '{}'",
            self.call.extraction, receipt.path
        );
        Err(Error::new(ErrorCode::Conflict, text))
    }

    fn has_changed(&self) -> Result<bool> {
        let now = file_identity(&self.file)
            .map_err(|e| Error::new(ErrorCode::ServerFault, format!("{}: {e}", self.call.path)))?;
        Ok(now != self.identity)
    }

    fn call_deadline(&self) -> Deadline {
        self.call_deadline_after(self.call_timeout_ms)
    }

    /// Until when a call may last that has so much time; the deadline of all may be earlier.
    fn call_deadline_after(&self, ms: u64) -> Deadline {
        self.deadline.earlier_of(Deadline::after_ms(ms))
    }
}

/// Whether home refused for a reason that may be an out-dated picture of the upload.
fn is_resync_needed(error: &Error) -> bool {
    matches!(
        error.code,
        ErrorCode::Conflict | ErrorCode::WrongState | ErrorCode::DigestMismatch
    )
}

/// Home misses something of its own (a directory, a bucket, the upload), or can never have a file
/// at that place. `NotFound` would say that the volume does not have the file, and `BadPath` that
/// it is none that can be sent.
fn home_error(error: Error) -> Error {
    match error.code {
        ErrorCode::NotFound => Error::new(ErrorCode::WrongState, error.detail),
        ErrorCode::BadPath => Error::new(ErrorCode::Unsupported, error.detail),
        _ => error,
    }
}

fn read_error(error: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorCode::ServerFault, format!("extract: {error}"))
}

/// Why a file of a volume cannot be opened. A link that leads nowhere is there, so it is no missing
/// file.
pub(super) fn open_error(root: &ConfinedDirectory, path: &str, error: &std::io::Error) -> Error {
    let link = root.read_link(path).ok();
    let code = match open_error_code(error) {
        ErrorCode::NotFound if link.is_some() => ErrorCode::BadPath,
        code => code,
    };
    Error::new(code, describe_open_error(error, link.as_deref()))
}

fn open_error_code(error: &std::io::Error) -> ErrorCode {
    match error.kind() {
        std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => ErrorCode::NotFound,
        // It may be another time, as where so much is renamed that no path can be followed.
        std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::WouldBlock => {
            ErrorCode::ServerFault
        }
        _ => ErrorCode::BadPath,
    }
}

/// Why a file cannot be opened; `link` is where it leads if it is a symbolic link.
fn describe_open_error(error: &std::io::Error, link: Option<&str>) -> String {
    let leads_out = error.raw_os_error() == Some(rustix::io::Errno::XDEV.raw_os_error());
    let advice = "have the job copy the file into the volume, or link to a file of the same volume \
                  by a relative path";
    match link {
        Some(to) if leads_out => format!(
            "it is a symbolic link to '{to}', which leads out of the volume (a path that begins \
             with '/' does, whatever the job sees there); {advice}"
        ),
        Some(to) => format!("it is a symbolic link to '{to}', and that cannot be read: {error}"),
        None if leads_out => {
            format!("its path goes through a symbolic link that leads out of the volume; {advice}")
        }
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::{ExtractionId, VolumeId};
    use bafs_proto::token::Token;

    use super::*;
    use crate::home_clients::slow_home::{COMMIT_MS, slow_homes};

    #[tokio::test]
    async fn a_commit_may_outlast_the_chunk_timeout() {
        let root = tempfile::tempdir().expect("directory");
        std::fs::write(
            root.path().join("result"),
            vec![7; 2 * CHUNK_BYTES as usize],
        )
        .expect("file");
        let call = ExtractFile {
            volume: VolumeId(1),
            path: "result".to_owned(),
            selections: Vec::new(),
            extraction: ExtractionId(1),
            home_address: "slow:1".to_owned(),
            home_id: None,
            target_path: "result".to_owned(),
            home_token: Token::none(),
            fence: None,
        };
        let (homes, slow) = slow_homes(&call.home_address);
        let (pieces, deadline) = (Arc::new(Semaphore::new(64)), Deadline::after_ms(60_000));
        let mut upload =
            Extraction::open(root.path(), call, homes, pieces, deadline).expect("a file");
        upload.call_timeout_ms = COMMIT_MS / 2;
        let receipt = upload.run().await.expect("receipt");
        assert_eq!(receipt.size, 2 * CHUNK_BYTES);
        assert_eq!(slow.commits(), 1);
    }
}
