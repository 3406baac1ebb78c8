//! Exactly-once extraction: joins callers that ask for the same, remembers what is proven. The
//! sending itself is in `extract.rs`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bafs_proto::ids::ExtractId;
use bafs_proto::message::{ExtractFile, PutReceipt};
use bafs_proto::path::{check_relative, check_result};
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};
use tokio::sync::{Semaphore, watch};

use super::extract::{ROOM_BYTES, Upload};
use super::table::{Change, ReceiptRecord};
use super::{Storage, blocking};

/// Most extractions at once; home is the bottleneck long before.
const EXTRACTS_MAX: usize = 256;

/// Most bytes of files that all of them hold in memory.
const PIECES_BYTES_MAX: u64 = 48 << 20;

/// Pause before an extraction that ran out of another caller's time is started again.
const PAUSE: Duration = Duration::from_millis(50);

type Answer = watch::Receiver<Option<Result<PutReceipt>>>;

/// Whether a caller started an extraction or found it under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Joined {
    First,
    Later,
}

/// Extractions under way.
#[derive(Debug)]
pub(super) struct Extracts {
    list: Mutex<BTreeMap<ExtractId, (ExtractFile, Answer)>>,
    pieces: Arc<Semaphore>,
}

impl Default for Extracts {
    fn default() -> Self {
        Self {
            list: Mutex::default(),
            pieces: Arc::new(Semaphore::new((PIECES_BYTES_MAX / ROOM_BYTES) as usize)),
        }
    }
}

impl Storage {
    /// Sends a file home, once however often it is asked for, and answers with the receipt.
    ///
    /// # Errors
    /// `NotFound` naming volume and path, `VolumeLost`, `Conflict` when the id was used for another
    /// file, `Busy` when too many are under way, what home answered.
    pub async fn extract(
        self: &Arc<Self>,
        call: ExtractFile,
        deadline: Deadline,
    ) -> Result<PutReceipt> {
        check_relative(&call.path)?;
        check_result(&call.target)?;
        let stopped = || Error::new(ErrorCode::ServerFault, "the extraction was interrupted");
        loop {
            let (mut answer, joined) = self.join(&call, deadline)?;
            let done = answer
                .wait_for(Option::is_some)
                .await
                .map(|done| done.clone());
            let result = done.map_err(|_| stopped())?.ok_or_else(stopped)?;
            let again = |error: &Error| error.is_transient() && joined == Joined::Later;
            if !result.as_ref().is_err_and(again) || deadline.left() <= PAUSE {
                return result;
            }
            // Whoever started it had less time than this caller has.
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// The answer of an extraction under way, started if it is not. It goes on when the caller
    /// gives up, at most until the caller's deadline.
    fn join(self: &Arc<Self>, call: &ExtractFile, deadline: Deadline) -> Result<(Answer, Joined)> {
        let extract = call.extract;
        let mut under_way = self
            .extracts
            .list
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some((other, answer)) = under_way.get(&extract) {
            if !is_same(other, call) {
                return Err(reused(extract, &other.path));
            }
            return Ok((answer.clone(), Joined::Later));
        }
        if under_way.len() >= EXTRACTS_MAX {
            let text = format!("{EXTRACTS_MAX} extractions are under way; try again later");
            return Err(Error::new(ErrorCode::Busy, text));
        }
        let (sender, answer) = watch::channel(None);
        under_way.insert(extract, (call.clone(), answer.clone()));
        let entry = Entry {
            storage: self.clone(),
            extract,
        };
        let (call, volume) = (call.clone(), call.volume);
        tokio::spawn(async move {
            let result = entry.storage.extract_once(call, deadline).await;
            if let Err(error) = &result
                && error.code == ErrorCode::VolumeLost
            {
                // Its directory may have been removed: who asks hears that it is gone from now on.
                let _ = entry.storage.forget_if_gone(volume).await;
            }
            // Who hears of a refusal and asks again must not find this one under way.
            drop(entry);
            sender.send_replace(Some(result));
        });
        Ok((answer, Joined::First))
    }

    async fn extract_once(&self, call: ExtractFile, deadline: Deadline) -> Result<PutReceipt> {
        let extract = call.extract;
        // Before anything else: the volume may be gone after its result is safe.
        if let Some(record) = self.table.receipt(extract).await? {
            if record.answers(&call) {
                return Ok(record.receipt);
            }
            return Err(reused(extract, &record.path));
        }
        let root = self.scratch(call.volume)?;
        let (homes, asked, volume) = (self.homes.clone(), call.clone(), call.volume);
        let pieces = self.extracts.pieces.clone();
        let sending = async move {
            blocking(move || Upload::open(&root, asked, homes, pieces, deadline))
                .await?
                .run()
                .await
        };
        let receipt = self.if_lives(volume, sending).await?;
        let ExtractFile {
            volume,
            path,
            home,
            home_id,
            target,
            ..
        } = call;
        let record = ReceiptRecord {
            volume,
            path,
            home,
            home_id,
            target,
            receipt: receipt.clone(),
        };
        self.table.write(Change::Receipt(extract, record)).await?;
        self.counters.add("extract.files", 1);
        self.counters.add("extract.bytes", receipt.size);
        Ok(receipt)
    }
}

/// Takes an extraction off the list however its task ends.
struct Entry {
    storage: Arc<Storage>,
    extract: ExtractId,
}

impl Drop for Entry {
    fn drop(&mut self) {
        let list = &self.storage.extracts.list;
        list.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.extract);
    }
}

/// Whether two calls ask for the same, with whatever token, and wherever the home is by now.
fn is_same(one: &ExtractFile, other: &ExtractFile) -> bool {
    let asked = |call: &ExtractFile| ExtractFile {
        home: match call.home_id {
            Some(_) => String::new(),
            None => call.home.clone(),
        },
        home_token: Token::none(),
        ..call.clone()
    };
    asked(one) == asked(other)
}

fn reused(extract: ExtractId, path: &str) -> Error {
    let text = format!("extract id {extract} was used for '{path}' already; choose a new id");
    Error::new(ErrorCode::Conflict, text)
}
