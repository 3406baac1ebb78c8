//! Exactly-once extraction: remembers what is proven. The sending itself is in `extraction.rs`.

use std::sync::Arc;
use std::time::Duration;

use bafs_proto::ids::UploadEpoch;
use bafs_proto::message::{ExtractFile, IssueUploadEpoch, PutReceipt};
use bafs_proto::net::BoxFuture;
use bafs_proto::path::{check_relative, check_result_path};
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};

use super::Storage;
use super::database::{ReceiptRecord, TableChange};
use super::extraction::Extraction;
use super::inflight_extractions::{ExtractionJoin, id_reused_error};
use super::set_extraction::SetExtraction;
use crate::errors::run_blocking;
use crate::home_clients::HomeAddress;

/// Pause before an extraction that ran out of another caller's time is started again.
const RESTART_PAUSE: Duration = Duration::from_millis(50);

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
        if call.selections.is_empty() {
            check_relative(&call.path)?;
        }
        check_result_path(&call.target_path)?;
        let stopped = || Error::new(ErrorCode::ServerFault, "the extraction was interrupted");
        loop {
            let extraction = || -> BoxFuture<'static, _> {
                Box::pin(self.clone().extract_from_volume(call.clone(), deadline))
            };
            let (mut answer, joined) = self.extractions.join(&call, extraction)?;
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

    /// An epoch for uploads to a home that this node reaches.
    ///
    /// # Errors
    /// What the home answers; `Unsupported` for homes that do not order uploads.
    pub(crate) async fn issue_upload_epoch(
        &self,
        token: &Token,
        call: IssueUploadEpoch,
        deadline: Deadline,
    ) -> Result<UploadEpoch> {
        let Some(address) = &call.home_address else {
            let text = "a node has no exported directory; name the home, or ask a home server";
            return Err(Error::new(ErrorCode::Unsupported, text));
        };
        let id = call.home_id;
        let at = HomeAddress { address, id };
        let issued = self
            .homes
            .issue_upload_epoch(at, token, &call.path, deadline);
        issued.await
    }

    /// Sends a file home, until the deadline at most, and takes note of a volume that is gone.
    async fn extract_from_volume(
        self: Arc<Self>,
        call: ExtractFile,
        deadline: Deadline,
    ) -> Result<PutReceipt> {
        let volume = call.volume;
        let result = self.extract_once(call, deadline).await;
        match &result {
            // Its directory may have been removed: who asks hears that it is gone from now on.
            Err(error) if error.code == ErrorCode::VolumeLost => {
                let _ = self.delete_if_missing(volume).await;
            }
            // Who asked may have given up this node long ago.
            Err(error) if error.code == ErrorCode::UploadFenced => {
                tracing::warn!("a result stays on this node: {}", error.detail);
            }
            _ => {}
        }
        result
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
        let open_files = self.extractions.open_set_files.clone();
        let sent = (!asked.selections.is_empty()).then(|| self.extractions.sent_sets.of(extract));
        let sending = async move {
            if let Some(sent) = sent {
                let set = SetExtraction {
                    root,
                    call: asked,
                    homes,
                    chunk_memory: pieces,
                    open_files,
                    sent,
                    deadline,
                };
                return set.run().await;
            }
            run_blocking(move || Extraction::open(&root, asked, homes, pieces, deadline))
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
        self.extractions.sent_sets.forget(extract);
        self.counters.add("extract_files", 1);
        self.counters.add("extract_bytes", receipt.size);
        Ok(receipt)
    }
}
