//! What of unfinished sets is at home already: a set that is asked for again goes on where it was.
//! Only in memory: after a restart of the node, small files are sent again.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bafs_proto::ids::ExtractionId;
use bafs_proto::message::PutReceipt;

use super::file_set::SetFile;

/// Sets that are remembered: with the most files each takes some 30 MB.
const SETS_MAX: usize = 8;

/// Receipts of the files of one set, by the paths at home.
#[derive(Debug, Default)]
pub(super) struct SentFiles(Mutex<BTreeMap<String, (SetFile, PutReceipt)>>);

impl SentFiles {
    /// The receipt of a file, if it was sent as it is now.
    pub(super) fn receipt(&self, path: &str, file: &SetFile) -> Option<PutReceipt> {
        let files = self.files();
        let (_, receipt) = files.get(path).filter(|(sent, _)| sent == file)?;
        Some(receipt.clone())
    }

    pub(super) fn note(&self, path: String, file: SetFile, receipt: PutReceipt) {
        self.files().insert(path, (file, receipt));
    }

    fn files(&self) -> MutexGuard<'_, BTreeMap<String, (SetFile, PutReceipt)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Unfinished sets.
#[derive(Debug, Default)]
pub(super) struct SentSets(Mutex<BTreeMap<ExtractionId, Arc<SentFiles>>>);

impl SentSets {
    /// What of a set was sent. Of too many sets one is forgotten, and sent again.
    pub(super) fn of(&self, set: ExtractionId) -> Arc<SentFiles> {
        let mut sets = self.sets();
        if sets.len() >= SETS_MAX && !sets.contains_key(&set) {
            sets.pop_first();
        }
        Arc::clone(sets.entry(set).or_default())
    }

    /// The set is at home.
    pub(super) fn forget(&self, set: ExtractionId) {
        self.sets().remove(&set);
    }

    fn sets(&self) -> MutexGuard<'_, BTreeMap<ExtractionId, Arc<SentFiles>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
