//! Uploads to a bucket that were begun. What is done with one is done by a task of its own, so a
//! caller that gives up leaves it whole, and finds it when it comes again.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bafs_proto::hash::{Digest, DigestHasher};
use bafs_proto::ids::ExtractionId;
use bafs_proto::message::{PutProgress, PutReceipt};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use tokio::sync::OwnedMutexGuard;

use super::super::home_upload::{CALL_TIMEOUT_MS, HomeUpload, transfer_ms_max};
use super::{ObjectStore, Writer};

/// Bytes of a part, at least; each costs a request. The store takes 5 MiB or more.
const PART_BYTES_MIN: u64 = 8 << 20;

/// Most parts of an upload; the store takes 10,000.
const PARTS_MAX: u64 = 9_000;

/// Uploads that are begun and not committed, at most: those before are given up.
const UPLOADS_MAX: usize = 256;

/// So long an upload is kept that nobody goes on with, in milliseconds, and until another begins.
const UPLOAD_IDLE_MS: u64 = 600_000;

/// A store may take minutes to put the parts of an upload together, so this long it has, in
/// milliseconds (API reference of Amazon S3, `CompleteMultipartUpload`).
const COMPLETE_TIMEOUT_MS: u64 = 600_000;

/// The uploads of one bucket.
pub(super) struct BucketUploads {
    objects: Arc<ObjectStore>,
    list: Mutex<BTreeMap<ExtractionId, Arc<BucketUpload>>>,
}

/// A file on its way.
struct BucketUpload {
    path: String,
    expires: Mutex<Deadline>,
    /// All of it is sent, and the store puts it together.
    is_closing: AtomicBool,
    /// Whoever holds it does something with the upload.
    state: Arc<tokio::sync::Mutex<UploadState>>,
}

enum UploadState {
    Open(Box<OpenUpload>),
    /// It is there; whoever asked for that may not have heard it.
    Done(PutReceipt),
    /// It failed, or was given up.
    Ended,
}

struct OpenUpload {
    writer: Writer,
    hasher: DigestHasher,
    sent: u64,
    part_bytes: u64,
}

impl BucketUploads {
    pub(super) fn new(objects: Arc<ObjectStore>) -> Self {
        Self {
            objects,
            list: Mutex::default(),
        }
    }

    /// Begins an upload or shows where it is; waits for what is under way.
    pub(super) async fn begin(&self, put: &HomeUpload) -> Result<PutProgress> {
        self.abort_idle();
        let known = self.find(put).filter(|known| known.path == put.path);
        let sent = match known {
            // The commit waits for it, and has the time that this needs.
            Some(known) if known.is_closing.load(Ordering::Relaxed) => Some(put.size),
            Some(known) => match &*known.state.lock().await {
                // Of a file that became shorter nothing can be used.
                UploadState::Open(sending) if sending.sent > put.size => None,
                UploadState::Open(sending) => Some(sending.sent),
                // The commit finds out whether it is the same.
                UploadState::Done(_) => Some(put.size),
                UploadState::Ended => None,
            },
            None => None,
        };
        let received_bytes = match sent {
            Some(sent) => sent,
            None => {
                self.add(put).await?;
                0
            }
        };
        Ok(PutProgress {
            received_bytes,
            receipt: None,
        })
    }

    pub(super) async fn write(
        &self,
        put: &HomeUpload,
        offset: u64,
        data: Bytes,
    ) -> Result<PutProgress> {
        let upload = self.find(put).ok_or_else(|| restarted_error(&put.path))?;
        let mut state = upload.state.clone().lock_owned().await;
        let objects = self.objects.clone();
        in_task(async move {
            let path = &upload.path;
            let UploadState::Open(sending) = &mut *state else {
                return Err(restarted_error(path));
            };
            if offset != sending.sent {
                return Err(restarted_error(path));
            }
            let ms = CALL_TIMEOUT_MS + transfer_ms_max(sending.part_bytes);
            let written = sending.writer.write(data.clone());
            if let Err(error) = objects.with_timeout(ms, path, written).await {
                tokio::spawn(abort(state));
                return Err(error);
            }
            sending.hasher.update(&data);
            sending.sent += data.len() as u64;
            upload.renew();
            Ok(PutProgress {
                received_bytes: sending.sent,
                receipt: None,
            })
        })
        .await
    }

    pub(super) async fn commit(&self, put: &HomeUpload, digest: Digest) -> Result<PutReceipt> {
        let upload = self.find(put).ok_or_else(|| restarted_error(&put.path))?;
        let mut state = upload.state.clone().lock_owned().await;
        if matches!(&*state, UploadState::Open(_)) {
            let there = self.objects.find_identity(&put.path).await?;
            if let Err(fenced) = put.replaced.check(&put.path, there) {
                tokio::spawn(abort(state));
                self.forget(put, &upload);
                return Err(fenced);
            }
        }
        let result = match &*state {
            UploadState::Done(receipt) if (receipt.size, receipt.digest) == (put.size, digest) => {
                Ok(receipt.clone())
            }
            UploadState::Open(sending)
                if (sending.sent, sending.hasher.digest()) == (put.size, digest) =>
            {
                let receipt = PutReceipt {
                    extraction: put.extract,
                    path: put.path.clone(),
                    size: put.size,
                    digest,
                };
                upload.is_closing.store(true, Ordering::Relaxed);
                let (objects, upload) = (self.objects.clone(), upload.clone());
                in_task(async move {
                    let closed = complete(&objects, &mut state, receipt).await;
                    upload.is_closing.store(false, Ordering::Relaxed);
                    upload.renew();
                    if closed.is_err() {
                        tokio::spawn(abort(state));
                    }
                    closed
                })
                .await
            }
            UploadState::Ended => Err(restarted_error(&put.path)),
            UploadState::Done(_) | UploadState::Open(_) => {
                tokio::spawn(abort(state));
                let text = format!("the upload of '{}' is damaged; sending again", put.path);
                Err(Error::new(ErrorCode::DigestMismatch, text))
            }
        };
        // Somebody heard how it ended.
        self.forget(put, &upload);
        result
    }

    async fn add(&self, put: &HomeUpload) -> Result<()> {
        put.replaced
            .note(self.objects.find_identity(&put.path).await?);
        let part_bytes = PART_BYTES_MIN.max(put.size.div_ceil(PARTS_MAX));
        let key = self.objects.object_key(&put.path)?;
        let writer = self.objects.operator.writer_with(&key);
        let writer = writer.chunk(usize::try_from(part_bytes).unwrap_or(usize::MAX));
        let sending = OpenUpload {
            writer: writer
                .await
                .map_err(|e| self.objects.store_error(&put.path, &e))?,
            hasher: DigestHasher::new(),
            sent: 0,
            part_bytes,
        };
        let upload = BucketUpload {
            path: put.path.clone(),
            expires: Mutex::new(Deadline::after_ms(UPLOAD_IDLE_MS)),
            is_closing: AtomicBool::new(false),
            state: Arc::new(tokio::sync::Mutex::new(UploadState::Open(Box::new(
                sending,
            )))),
        };
        let mut list = self.list();
        if list.len() >= UPLOADS_MAX {
            let longest_unused = list
                .iter()
                .filter_map(|(id, upload)| Some((upload.expires(), *id, upload.try_lock_state()?)))
                .min_by_key(|(until, ..)| *until);
            if let Some((_, id, state)) = longest_unused {
                list.remove(&id);
                tokio::spawn(abort(state));
            }
        }
        let replaced = list.insert(put.extract, Arc::new(upload));
        if let Some(state) = replaced.and_then(|it| it.try_lock_state()) {
            tokio::spawn(abort(state));
        }
        Ok(())
    }

    fn abort_idle(&self) {
        self.list().retain(|_, upload| {
            if !upload.expires().remaining().is_zero() {
                return true;
            }
            let idle = upload.try_lock_state();
            let is_used = idle.is_none();
            if let Some(state) = idle {
                tokio::spawn(abort(state));
            }
            is_used
        });
    }

    fn find(&self, put: &HomeUpload) -> Option<Arc<BucketUpload>> {
        let found = self.list().get(&put.extract).cloned()?;
        found.renew();
        Some(found)
    }

    fn forget(&self, put: &HomeUpload, upload: &Arc<BucketUpload>) {
        let mut list = self.list();
        let is_it = |found: &Arc<BucketUpload>| Arc::ptr_eq(found, upload);
        if list.get(&put.extract).is_some_and(is_it) {
            list.remove(&put.extract);
        }
    }

    fn list(&self) -> MutexGuard<'_, BTreeMap<ExtractionId, Arc<BucketUpload>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BucketUpload {
    fn renew(&self) {
        *self.lock_expires() = Deadline::after_ms(UPLOAD_IDLE_MS);
    }

    fn expires(&self) -> Deadline {
        *self.lock_expires()
    }

    fn lock_expires(&self) -> MutexGuard<'_, Deadline> {
        let kept_until = self.expires.lock();
        kept_until.unwrap_or_else(PoisonError::into_inner)
    }

    /// Its state, if nobody is doing anything with it.
    fn try_lock_state(&self) -> Option<OwnedMutexGuard<UploadState>> {
        self.state.clone().try_lock_owned().ok()
    }
}

/// Has the store put an upload in place.
async fn complete(
    objects: &ObjectStore,
    state: &mut UploadState,
    receipt: PutReceipt,
) -> Result<PutReceipt> {
    let UploadState::Open(sending) = state else {
        return Err(restarted_error(&receipt.path));
    };
    let (path, size) = (&receipt.path, receipt.size);
    let ms = COMPLETE_TIMEOUT_MS + transfer_ms_max(2 * sending.part_bytes);
    objects
        .with_timeout(ms, path, sending.writer.close())
        .await?;
    let key = objects.object_key(path)?;
    let there = objects.with_timeout(CALL_TIMEOUT_MS, path, objects.operator.stat(&key));
    let there = there.await?.content_length();
    if there != size {
        let text = format!(
            "{} has {there} bytes at '{path}' after an upload of {size}: another client writes \
             there",
            objects.address
        );
        return Err(Error::new(ErrorCode::Conflict, text));
    }
    *state = UploadState::Done(receipt.clone());
    Ok(receipt)
}

/// Has the store remove the parts that it has.
async fn abort(mut state: OwnedMutexGuard<UploadState>) {
    if let UploadState::Open(mut sending) = std::mem::replace(&mut *state, UploadState::Ended) {
        // Whoever comes meanwhile need not wait.
        drop(state);
        let time = Duration::from_millis(CALL_TIMEOUT_MS);
        let _ = tokio::time::timeout(time, sending.writer.abort()).await;
    }
}

/// Does something to its end, whether or not the caller waits for that.
async fn in_task<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let stopped = |e| Error::new(ErrorCode::ServerFault, format!("an upload failed: {e}"));
    tokio::spawn(work).await.map_err(stopped)?
}

fn restarted_error(path: &str) -> Error {
    let text = format!("the upload of '{path}' was interrupted; restarting it");
    Error::new(ErrorCode::Conflict, text)
}
