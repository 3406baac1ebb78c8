//! Uploads to a bucket that were begun. What is done with one is done by a task of its own, so a
//! caller that gives up leaves it whole, and finds it when it comes again.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bafs_proto::hash::{Digest, Hasher};
use bafs_proto::ids::ExtractId;
use bafs_proto::message::{PutProgress, PutReceipt};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use tokio::sync::OwnedMutexGuard;

use super::super::{CALL_MS, Put, slowest_ms};
use super::{Objects, Writer};

/// Bytes of a part, at least; each costs a request. The store takes 5 MiB or more.
const PART_BYTES_MIN: u64 = 8 << 20;

/// Most parts of an upload; the store takes 10,000.
const PARTS_MAX: u64 = 9_000;

/// Uploads that are begun and not committed, at most: those before are given up.
const UPLOADS_MAX: usize = 256;

/// So long an upload is kept that nobody goes on with, in milliseconds, and until another begins.
const KEPT_MS: u64 = 600_000;

/// A store may take minutes to put the parts of an upload together, so this long it has, in
/// milliseconds (API reference of Amazon S3, `CompleteMultipartUpload`).
const COMPLETE_MS: u64 = 600_000;

/// The uploads of one bucket.
pub(super) struct Uploads {
    objects: Arc<Objects>,
    list: Mutex<BTreeMap<ExtractId, Arc<Upload>>>,
}

/// A file on its way.
struct Upload {
    path: String,
    kept_until: Mutex<Deadline>,
    /// All of it is sent, and the store puts it together.
    is_closing: AtomicBool,
    /// Whoever holds it does something with the upload.
    state: Arc<tokio::sync::Mutex<State>>,
}

enum State {
    Open(Box<Sending>),
    /// It is there; whoever asked for that may not have heard it.
    Done(PutReceipt),
    /// It failed, or was given up.
    Over,
}

struct Sending {
    writer: Writer,
    hasher: Hasher,
    sent: u64,
    part_bytes: u64,
}

impl Uploads {
    pub(super) fn new(objects: Arc<Objects>) -> Self {
        Self {
            objects,
            list: Mutex::default(),
        }
    }

    /// Begins an upload or shows where it is; waits for what is under way.
    pub(super) async fn begin(&self, put: &Put) -> Result<PutProgress> {
        self.give_up_old();
        let known = self.find(put).filter(|known| known.path == put.path);
        let sent = match known {
            // The commit waits for it, and has the time that this needs.
            Some(known) if known.is_closing.load(Ordering::Relaxed) => Some(put.size),
            Some(known) => match &*known.state.lock().await {
                // Of a file that became shorter nothing can be used.
                State::Open(sending) if sending.sent > put.size => None,
                State::Open(sending) => Some(sending.sent),
                // The commit finds out whether it is the same.
                State::Done(_) => Some(put.size),
                State::Over => None,
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

    pub(super) async fn write(&self, put: &Put, offset: u64, data: Bytes) -> Result<PutProgress> {
        let upload = self.find(put).ok_or_else(|| begun_anew(&put.path))?;
        let mut state = upload.state.clone().lock_owned().await;
        let objects = self.objects.clone();
        in_task(async move {
            let path = &upload.path;
            let State::Open(sending) = &mut *state else {
                return Err(begun_anew(path));
            };
            if offset != sending.sent {
                return Err(begun_anew(path));
            }
            let ms = CALL_MS + slowest_ms(sending.part_bytes);
            let written = sending.writer.write(data.clone());
            if let Err(error) = objects.within(ms, path, written).await {
                tokio::spawn(give_up(state));
                return Err(error);
            }
            sending.hasher.update(&data);
            sending.sent += data.len() as u64;
            upload.keep();
            Ok(PutProgress {
                received_bytes: sending.sent,
                receipt: None,
            })
        })
        .await
    }

    pub(super) async fn commit(&self, put: &Put, digest: Digest) -> Result<PutReceipt> {
        let upload = self.find(put).ok_or_else(|| begun_anew(&put.path))?;
        let mut state = upload.state.clone().lock_owned().await;
        let result = match &*state {
            State::Done(receipt) if (receipt.size, receipt.digest) == (put.size, digest) => {
                Ok(receipt.clone())
            }
            State::Open(sending)
                if (sending.sent, sending.hasher.digest()) == (put.size, digest) =>
            {
                let receipt = PutReceipt {
                    extract: put.extract,
                    path: put.path.clone(),
                    size: put.size,
                    digest,
                };
                upload.is_closing.store(true, Ordering::Relaxed);
                let (objects, upload) = (self.objects.clone(), upload.clone());
                in_task(async move {
                    let closed = close(&objects, &mut state, receipt).await;
                    upload.is_closing.store(false, Ordering::Relaxed);
                    upload.keep();
                    if closed.is_err() {
                        tokio::spawn(give_up(state));
                    }
                    closed
                })
                .await
            }
            State::Over => Err(begun_anew(&put.path)),
            State::Done(_) | State::Open(_) => {
                tokio::spawn(give_up(state));
                let text = format!(
                    "what was sent of '{}' is damaged; it is sent again",
                    put.path
                );
                Err(Error::new(ErrorCode::DigestMismatch, text))
            }
        };
        // Somebody heard how it ended.
        self.forget(put, &upload);
        result
    }

    async fn add(&self, put: &Put) -> Result<()> {
        let part_bytes = PART_BYTES_MIN.max(put.size.div_ceil(PARTS_MAX));
        let key = self.objects.key(&put.path)?;
        let writer = self.objects.operator.writer_with(&key);
        let writer = writer.chunk(usize::try_from(part_bytes).unwrap_or(usize::MAX));
        let sending = Sending {
            writer: writer
                .await
                .map_err(|e| self.objects.fault(&put.path, &e))?,
            hasher: Hasher::new(),
            sent: 0,
            part_bytes,
        };
        let upload = Upload {
            path: put.path.clone(),
            kept_until: Mutex::new(Deadline::after_ms(KEPT_MS)),
            is_closing: AtomicBool::new(false),
            state: Arc::new(tokio::sync::Mutex::new(State::Open(Box::new(sending)))),
        };
        let mut list = self.list();
        if list.len() >= UPLOADS_MAX {
            let longest_unused = list
                .iter()
                .filter_map(|(id, upload)| Some((upload.kept_until(), *id, upload.idle()?)))
                .min_by_key(|(until, ..)| *until);
            if let Some((_, id, state)) = longest_unused {
                list.remove(&id);
                tokio::spawn(give_up(state));
            }
        }
        let replaced = list.insert(put.extract, Arc::new(upload));
        if let Some(state) = replaced.and_then(|it| it.idle()) {
            tokio::spawn(give_up(state));
        }
        Ok(())
    }

    fn give_up_old(&self) {
        self.list().retain(|_, upload| {
            if !upload.kept_until().left().is_zero() {
                return true;
            }
            let idle = upload.idle();
            let is_used = idle.is_none();
            if let Some(state) = idle {
                tokio::spawn(give_up(state));
            }
            is_used
        });
    }

    fn find(&self, put: &Put) -> Option<Arc<Upload>> {
        let found = self.list().get(&put.extract).cloned()?;
        found.keep();
        Some(found)
    }

    fn forget(&self, put: &Put, upload: &Arc<Upload>) {
        let mut list = self.list();
        let is_it = |found: &Arc<Upload>| Arc::ptr_eq(found, upload);
        if list.get(&put.extract).is_some_and(is_it) {
            list.remove(&put.extract);
        }
    }

    fn list(&self) -> MutexGuard<'_, BTreeMap<ExtractId, Arc<Upload>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Upload {
    fn keep(&self) {
        *self.kept() = Deadline::after_ms(KEPT_MS);
    }

    fn kept_until(&self) -> Deadline {
        *self.kept()
    }

    fn kept(&self) -> MutexGuard<'_, Deadline> {
        let kept_until = self.kept_until.lock();
        kept_until.unwrap_or_else(PoisonError::into_inner)
    }

    /// Its state, if nobody is doing anything with it.
    fn idle(&self) -> Option<OwnedMutexGuard<State>> {
        self.state.clone().try_lock_owned().ok()
    }
}

/// Has the store put an upload in place.
async fn close(objects: &Objects, state: &mut State, receipt: PutReceipt) -> Result<PutReceipt> {
    let State::Open(sending) = state else {
        return Err(begun_anew(&receipt.path));
    };
    let (path, size) = (&receipt.path, receipt.size);
    let ms = COMPLETE_MS + slowest_ms(2 * sending.part_bytes);
    objects.within(ms, path, sending.writer.close()).await?;
    let key = objects.key(path)?;
    let there = objects.within(CALL_MS, path, objects.operator.stat(&key));
    let there = there.await?.content_length();
    if there != size {
        let text = format!(
            "{} has {there} bytes at '{path}' after {size} were put: somebody else writes there",
            objects.address
        );
        return Err(Error::new(ErrorCode::Conflict, text));
    }
    *state = State::Done(receipt.clone());
    Ok(receipt)
}

/// Has the store remove the parts that it has.
async fn give_up(mut state: OwnedMutexGuard<State>) {
    if let State::Open(mut sending) = std::mem::replace(&mut *state, State::Over) {
        // Whoever comes meanwhile need not wait.
        drop(state);
        let time = Duration::from_millis(CALL_MS);
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

fn begun_anew(path: &str) -> Error {
    let text = format!("the upload of '{path}' was interrupted; it begins anew");
    Error::new(ErrorCode::Conflict, text)
}
