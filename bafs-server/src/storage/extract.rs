//! Sends a file of a volume home: resumes where home is, repeats what failed, proves what arrived.
//! Remembers nothing itself; exactly-once is the caller's table plus home's own memory of the id.

use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bafs_proto::hash::Hasher;
use bafs_proto::limits::IO_BYTES_MAX;
use bafs_proto::message::{ExtractFile, PutReceipt, SourceIdentity};
use bafs_proto::path::check_relative;
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use super::beneath::Beneath;
use super::identity;
use crate::homes::{Homes, Put};

/// Bytes of one piece of an upload.
const PIECE_BYTES: u64 = IO_BYTES_MAX as u64;

/// Time for one call, in milliseconds: a piece takes 16 s on a home link of 1 MB/s that it shares
/// with fifteen others. The call's own deadline may be earlier.
const CALL_MS: u64 = 60_000;

/// Pause after a failed attempt, in milliseconds; doubles up to the maximum.
const PAUSE_MS_MIN: u64 = 50;
const PAUSE_MS_MAX: u64 = 2_000;

/// Attempts after home refused for a reason that may be an out-dated picture of the upload.
const RESYNC_MAX: u32 = 4;

/// One extraction under way.
pub(super) struct Upload {
    call: ExtractFile,
    homes: Arc<Homes>,
    deadline: Deadline,
    file: Arc<File>,
    put: Put,
    identity: SourceIdentity,
    hasher: Hasher,
    hashed_bytes: u64,
}

impl Upload {
    /// Opens the file in the tree at `root`. Blocks.
    ///
    /// # Errors
    /// `NotFound` naming volume and path, `BadPath` when it is no file of the volume.
    pub(super) fn open(
        root: &Path,
        call: ExtractFile,
        homes: Arc<Homes>,
        deadline: Deadline,
    ) -> Result<Self> {
        check_relative(&call.path)?;
        let failed = |e: &std::io::Error| {
            let code = match e.kind() {
                std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => {
                    ErrorCode::NotFound
                }
                std::io::ErrorKind::PermissionDenied => ErrorCode::ServerFault,
                _ => ErrorCode::BadPath,
            };
            let text = format!(
                "cannot extract '{}' of volume {}: {e}",
                call.path, call.volume
            );
            Error::new(code, text)
        };
        let file = Beneath::open(root)
            .and_then(|beneath| beneath.open_file(&call.path))
            .map_err(|e| failed(&e))?;
        let identity = identity(&file).map_err(|e| failed(&e))?;
        let mode = file
            .metadata()
            .map_err(|e| failed(&e))?
            .permissions()
            .mode()
            & 0o777;
        let (file, hasher) = (Arc::new(file), Hasher::new());
        let put = Put {
            extract: call.extract,
            home: call.home.clone(),
            path: call.target.clone(),
            mode,
            size: identity.size,
            token: call.home_token.clone(),
        };
        Ok(Self {
            call,
            homes,
            deadline,
            file,
            put,
            identity,
            hasher,
            hashed_bytes: 0,
        })
    }

    /// Sends the file, with as many attempts as the deadline allows.
    ///
    /// # Errors
    /// What home answered; `WrongState` when the file changes meanwhile; `DigestMismatch`.
    pub(super) async fn run(mut self) -> Result<PutReceipt> {
        let (mut pause_ms, mut resyncs) = (PAUSE_MS_MIN, 0);
        loop {
            let error = match self.attempt().await {
                Ok(receipt) => return Ok(receipt),
                Err(error) => not_found_at_home(error),
            };
            let out_of_step = matches!(
                error.code,
                ErrorCode::Conflict | ErrorCode::WrongState | ErrorCode::DigestMismatch
            );
            resyncs += u32::from(out_of_step);
            let again = error.is_transient() || (out_of_step && resyncs <= RESYNC_MAX);
            let late = self.deadline.left() <= Duration::from_millis(pause_ms);
            if !again || late || self.changed()? {
                return Err(error.context(format!(
                    "extract '{}' of volume {} to '{}'",
                    self.call.path, self.call.volume, self.call.target
                )));
            }
            tracing::debug!(extract = %self.call.extract, %error, "extraction will be repeated");
            tokio::time::sleep(Duration::from_millis(pause_ms)).await;
            pause_ms = (pause_ms * 2).min(PAUSE_MS_MAX);
        }
    }

    async fn attempt(&mut self) -> Result<PutReceipt> {
        let (homes, size) = (self.homes.clone(), self.identity.size);
        let progress = homes.begin(&self.put, self.step()).await?;
        if let Some(receipt) = progress.receipt {
            return self.accept(receipt);
        }
        let mut received = progress.received_bytes;
        if received > size {
            let text = format!("home has {received} bytes of a file of {size}");
            return Err(Error::new(ErrorCode::WrongState, text));
        }
        let mut at = received.min(self.hashed_bytes);
        while at < size {
            let piece = self.read(at, received).await?;
            let end = at + piece.len() as u64;
            if end > received {
                let told = homes.write(&self.put, at, piece, self.step()).await?;
                if told.received_bytes != end {
                    let text = format!("home has {} bytes, not {end}", told.received_bytes);
                    return Err(Error::new(ErrorCode::WrongState, text));
                }
                received = end;
            }
            at = end;
        }
        if self.changed()? {
            let text = "the file was changed while it was extracted; extract when its writer ended";
            return Err(Error::new(ErrorCode::WrongState, text));
        }
        let digest = self.hasher.digest();
        let receipt = homes.commit(&self.put, digest, self.step()).await?;
        if receipt.size != size || receipt.digest != digest {
            let text = "home's receipt is for other bytes than were sent";
            return Err(Error::new(ErrorCode::DigestMismatch, text));
        }
        self.accept(receipt)
    }

    /// Reads the next piece from `at`, up to what home has if that is ahead, and hashes what was
    /// not hashed before.
    async fn read(&mut self, at: u64, received: u64) -> Result<Bytes> {
        let stop = if received > at {
            received
        } else {
            self.identity.size
        };
        let length = usize::try_from((stop - at).min(PIECE_BYTES)).unwrap_or(0);
        let (file, path) = (self.file.clone(), self.call.path.clone());
        let piece = tokio::task::spawn_blocking(move || {
            let mut piece = vec![0; length];
            file.read_exact_at(&mut piece, at).map(|()| piece)
        })
        .await
        .map_err(|e| Error::new(ErrorCode::ServerFault, format!("extract: {e}")))?
        .map_err(|e| Error::new(ErrorCode::ServerFault, format!("read '{path}': {e}")))?;
        let known = usize::try_from(self.hashed_bytes - at).unwrap_or(usize::MAX);
        if let Some(fresh) = piece.get(known..) {
            self.hasher.update(fresh);
            self.hashed_bytes += fresh.len() as u64;
        }
        Ok(piece.into())
    }

    fn accept(&self, receipt: PutReceipt) -> Result<PutReceipt> {
        if receipt.extract == self.call.extract && receipt.path == self.call.target {
            return Ok(receipt);
        }
        let text = format!(
            "extract id {} was used for '{}'",
            self.call.extract, receipt.path
        );
        Err(Error::new(ErrorCode::Conflict, text))
    }

    fn changed(&self) -> Result<bool> {
        let now = identity(&self.file)
            .map_err(|e| Error::new(ErrorCode::ServerFault, format!("{}: {e}", self.call.path)))?;
        Ok(now != self.identity)
    }

    fn step(&self) -> Deadline {
        self.deadline.earlier(Deadline::after_ms(CALL_MS))
    }
}

/// Home misses something of its own: a directory, a bucket, the upload. `NotFound` would say that
/// the volume does not have the file.
fn not_found_at_home(error: Error) -> Error {
    match error.code {
        ErrorCode::NotFound => Error::new(ErrorCode::WrongState, error.detail),
        _ => error,
    }
}
