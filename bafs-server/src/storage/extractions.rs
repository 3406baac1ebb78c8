//! Exactly-once extraction: joins callers that ask for the same, remembers what is proven. The
//! sending itself is in `extraction.rs`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bafs_proto::ids::ExtractionId;
use bafs_proto::message::{ExtractFile, PutReceipt};
use bafs_proto::path::{check_relative, check_result_path};
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};
use tokio::sync::{Semaphore, watch};

use super::database::{ReceiptRecord, TableChange};
use super::extraction::{Extraction, MEMORY_UNIT_BYTES};
use super::{Storage, blocking};

/// Most extractions at once; home is the bottleneck long before.
const EXTRACTIONS_MAX: usize = 256;

/// Most bytes of files that all of them hold in memory.
const CHUNK_MEMORY_BYTES_MAX: u64 = 48 << 20;

/// Pause before an extraction that ran out of another caller's time is started again.
const RESTART_PAUSE: Duration = Duration::from_millis(50);

type ExtractionReply = watch::Receiver<Option<Result<PutReceipt>>>;

/// Whether a caller started an extraction or found it under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExtractionJoin {
    Started,
    Joined,
}

/// Extractions under way.
#[derive(Debug)]
pub(super) struct Extractions {
    list: Mutex<BTreeMap<ExtractionId, (ExtractFile, ExtractionReply)>>,
    chunk_memory: Arc<Semaphore>,
}

impl Default for Extractions {
    fn default() -> Self {
        Self {
            list: Mutex::default(),
            chunk_memory: Arc::new(Semaphore::new(
                (CHUNK_MEMORY_BYTES_MAX / MEMORY_UNIT_BYTES) as usize,
            )),
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
        check_result_path(&call.target_path)?;
        let stopped = || Error::new(ErrorCode::ServerFault, "the extraction was interrupted");
        loop {
            let (mut answer, joined) = self.join_extraction(&call, deadline)?;
            let done = answer
                .wait_for(Option::is_some)
                .await
                .map(|done| done.clone());
            let result = done.map_err(|_| stopped())?.ok_or_else(stopped)?;
            let again = |error: &Error| error.is_transient() && joined == ExtractionJoin::Joined;
            if !result.as_ref().is_err_and(again) || deadline.remaining() <= RESTART_PAUSE {
                return result;
            }
            // Whoever started it had less time than this caller has.
            tokio::time::sleep(RESTART_PAUSE).await;
        }
    }

    /// The answer of an extraction under way, started if it is not. It goes on when the caller
    /// gives up, at most until the caller's deadline.
    fn join_extraction(
        self: &Arc<Self>,
        call: &ExtractFile,
        deadline: Deadline,
    ) -> Result<(ExtractionReply, ExtractionJoin)> {
        let extract = call.extraction;
        let mut under_way = self
            .extractions
            .list
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some((other, answer)) = under_way.get(&extract) {
            if !is_same_request(other, call) {
                return Err(id_reused_error(extract, &other.path));
            }
            return Ok((answer.clone(), ExtractionJoin::Joined));
        }
        if under_way.len() >= EXTRACTIONS_MAX {
            let text = format!("{EXTRACTIONS_MAX} extractions are under way; try again later");
            return Err(Error::new(ErrorCode::Busy, text));
        }
        let (sender, answer) = watch::channel(None);
        under_way.insert(extract, (call.clone(), answer.clone()));
        let entry = ExtractionGuard {
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
                let _ = entry.storage.delete_if_missing(volume).await;
            }
            // Who hears of a refusal and asks again must not find this one under way.
            drop(entry);
            sender.send_replace(Some(result));
        });
        Ok((answer, ExtractionJoin::Started))
    }

    async fn extract_once(&self, call: ExtractFile, deadline: Deadline) -> Result<PutReceipt> {
        let extract = call.extraction;
        // Before anything else: the volume may be gone after its result is safe.
        if let Some(record) = self.database.receipt(extract).await? {
            if record.is_proof_for(&call) {
                return Ok(record.receipt);
            }
            return Err(id_reused_error(extract, &record.path));
        }
        let root = self.scratch_tree_path(call.volume)?;
        let (homes, asked, volume) = (self.homes.clone(), call.clone(), call.volume);
        let pieces = self.extractions.chunk_memory.clone();
        let sending = async move {
            blocking(move || Extraction::open(&root, asked, homes, pieces, deadline))
                .await?
                .run()
                .await
        };
        let receipt = self.or_volume_lost(volume, sending).await?;
        let ExtractFile {
            volume,
            path,
            home_address: home,
            home_id,
            target_path: target,
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
        self.database
            .write(TableChange::AddReceipt(extract, record))
            .await?;
        self.counters.add("extract_files", 1);
        self.counters.add("extract_bytes", receipt.size);
        Ok(receipt)
    }
}

/// Takes an extraction off the list however its task ends.
struct ExtractionGuard {
    storage: Arc<Storage>,
    extract: ExtractionId,
}

impl Drop for ExtractionGuard {
    fn drop(&mut self) {
        let list = &self.storage.extractions.list;
        list.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.extract);
    }
}

/// Whether two calls ask for the same, with whatever token, and wherever the home is by now.
fn is_same_request(one: &ExtractFile, other: &ExtractFile) -> bool {
    let asked = |call: &ExtractFile| ExtractFile {
        home_address: match call.home_id {
            Some(_) => String::new(),
            None => call.home_address.clone(),
        },
        home_token: Token::none(),
        ..call.clone()
    };
    asked(one) == asked(other)
}

fn id_reused_error(extract: ExtractionId, path: &str) -> Error {
    let text = format!("extract id {extract} was used for '{path}' already; choose a new id");
    Error::new(ErrorCode::Conflict, text)
}
