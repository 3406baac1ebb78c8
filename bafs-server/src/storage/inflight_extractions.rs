//! Extractions under way: callers that ask for the same join one. Sends nothing and remembers
//! nothing.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bafs_proto::ids::ExtractionId;
use bafs_proto::message::{ExtractFile, PutReceipt};
use bafs_proto::net::BoxFuture;
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};
use tokio::sync::{Semaphore, watch};

use super::extraction::MEMORY_UNIT_BYTES;
use super::sent_sets::SentSets;
use super::set_extraction::SET_FILES_OPEN_MAX;

/// Most extractions at once; home is the bottleneck long before.
const EXTRACTIONS_MAX: usize = 256;

/// Most bytes of files that all of them hold in memory.
const CHUNK_MEMORY_BYTES_MAX: u64 = 48 << 20;

pub(super) type ExtractionReply = watch::Receiver<Option<Result<PutReceipt>>>;

/// Whether a caller started an extraction or found it under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExtractionJoin {
    Started,
    Joined,
}

/// Extractions under way.
#[derive(Debug)]
pub(super) struct InflightExtractions {
    list: Mutex<BTreeMap<ExtractionId, (ExtractFile, ExtractionReply)>>,
    /// Memory for chunks, in units of [`MEMORY_UNIT_BYTES`].
    pub(super) chunk_memory: Arc<Semaphore>,
    /// Places for open files of sets.
    pub(super) open_set_files: Arc<Semaphore>,
    /// What of unfinished sets is at home.
    pub(super) sent_sets: SentSets,
}

impl Default for InflightExtractions {
    fn default() -> Self {
        Self {
            list: Mutex::default(),
            chunk_memory: Arc::new(Semaphore::new(
                (CHUNK_MEMORY_BYTES_MAX / MEMORY_UNIT_BYTES) as usize,
            )),
            open_set_files: Arc::new(Semaphore::new(SET_FILES_OPEN_MAX)),
            sent_sets: SentSets::default(),
        }
    }
}

impl InflightExtractions {
    /// The answer of an extraction under way. If there is none, `extract` makes the one that
    /// starts, which goes on when the caller gives up.
    ///
    /// # Errors
    /// `Conflict` when the id is used for another file, `Busy` when too many are under way.
    pub(super) fn join(
        self: &Arc<Self>,
        call: &ExtractFile,
        extract: impl FnOnce() -> BoxFuture<'static, Result<PutReceipt>>,
    ) -> Result<(ExtractionReply, ExtractionJoin)> {
        let id = call.extraction;
        let mut under_way = self.list();
        if let Some((other, answer)) = under_way.get(&id) {
            if !is_same_request(other, call) {
                return Err(id_reused_error(id, &other.path));
            }
            return Ok((answer.clone(), ExtractionJoin::Joined));
        }
        if under_way.len() >= EXTRACTIONS_MAX {
            let text = format!("{EXTRACTIONS_MAX} extractions are under way; try again later");
            return Err(Error::new(ErrorCode::Busy, text));
        }
        let (sender, answer) = watch::channel(None);
        under_way.insert(id, (call.clone(), answer.clone()));
        let entry = InflightEntry {
            inflight: self.clone(),
            id,
        };
        let extraction = extract();
        tokio::spawn(async move {
            let result = extraction.await;
            // Who hears of a refusal and asks again must not find this one under way.
            drop(entry);
            sender.send_replace(Some(result));
        });
        Ok((answer, ExtractionJoin::Started))
    }

    fn list(&self) -> MutexGuard<'_, BTreeMap<ExtractionId, (ExtractFile, ExtractionReply)>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes an extraction off the list however its task ends.
struct InflightEntry {
    inflight: Arc<InflightExtractions>,
    id: ExtractionId,
}

impl Drop for InflightEntry {
    fn drop(&mut self) {
        self.inflight.list().remove(&self.id);
    }
}

/// Whether two calls ask for the same, with whatever token and fence, and wherever the home is by
/// now.
fn is_same_request(one: &ExtractFile, other: &ExtractFile) -> bool {
    let asked = |call: &ExtractFile| ExtractFile {
        home_address: match call.home_id {
            Some(_) => String::new(),
            None => call.home_address.clone(),
        },
        home_token: Token::none(),
        fence: None,
        ..call.clone()
    };
    asked(one) == asked(other)
}

/// An id that names another extraction already.
pub(super) fn id_reused_error(extract: ExtractionId, path: &str) -> Error {
    let text = format!("extract id {extract} was used for '{path}' already; choose a new id");
    Error::new(ErrorCode::Conflict, text)
}
