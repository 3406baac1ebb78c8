//! Files that go home: the nodes send them, here they are asked to.

use bafs_proto::file_set::MANIFEST_NAME;
use bafs_proto::ids::ExtractionId;
use bafs_proto::message::{ExtractFile, StatSource};
use bafs_proto::time::{Deadline, KeepaliveDeadline, Time};
use bafs_proto::token::Right;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_workflow::Scheme;

use super::calls::is_unanswered;
use super::remote_io;
use super::servers::{CALL_TIMEOUT_MS, RETRY_PAUSE, ServerAddress, Servers};
use crate::driver::monotonic_now;
use crate::{Event, MountedVolume};

/// One file may take so long to be sent home before the call is repeated, in milliseconds.
const EXTRACT_TIMEOUT_MS: u64 = 3_600_000;

impl Servers {
    /// Sends a file home, which the workflow's list of extracts has at this position.
    pub(crate) async fn extract_file(
        &self,
        now: Time,
        (extract, index): (ExtractionId, u32),
        source: MountedVolume,
        place: Option<ServerAddress>,
    ) -> Event {
        let spec = &self.workflow.extracts[index as usize];
        let sent = async {
            // `NotFound` would say that the job did not write the file.
            let home = self
                .resolve_url(&spec.target)
                .await
                .map_err(as_environment_error)?;
            let Some(place) = place else {
                let from = self.resolve_volume_home(source.volume, source.id).await?;
                if from.address != home.address {
                    let text = "remote I/O can extract only to the home of the scratch volumes";
                    return Err(Error::new(ErrorCode::Unsupported, text));
                }
                if spec.is_set() {
                    let text = "remote I/O extracts single files only";
                    return Err(Error::new(ErrorCode::Unsupported, text));
                }
                let source = format!("{}/{}", from.path, spec.path);
                return remote_io::link_file(self, &home.address, &source, &home.path, extract)
                    .await;
            };
            let fence = self.upload_fence(&home, &place, extract).await;
            let fence = fence.map_err(as_environment_error)?;
            let call = ExtractFile {
                volume: source.id,
                path: spec.path.clone(),
                selections: spec.selections.clone(),
                extraction: extract,
                home_token: self.narrow_home_token(
                    now,
                    &home.path,
                    &[Right::Read, Right::Write],
                )?,
                home_address: home.address.clone(),
                home_id: home.id,
                target_path: home.path.clone(),
                fence,
            };
            let sent = self.call_extract(&place.address, call).await;
            if sent
                .as_ref()
                .is_err_and(|error| error.code == ErrorCode::UploadFenced)
            {
                self.upload_epochs.refuse(&home, fence);
            }
            sent
        };
        match sent.await {
            Ok(bytes) => Event::FileExtracted { extract, bytes },
            Err(error) => Event::ExtractFailed { extract, error },
        }
    }

    /// What a file is that was just sent home, or the manifest of a set, if its home says so: the
    /// next run compares it.
    pub(crate) async fn identify_result(&self, index: u32) -> Option<Event> {
        let spec = &self.workflow.extracts[index as usize];
        let target = &spec.target;
        if !matches!(target.scheme, Scheme::Bafs | Scheme::File) {
            return None;
        }
        let home = self.resolve_url(target).await.ok()?;
        let path = match spec.is_set() {
            true => format!("{}/{MANIFEST_NAME}", home.path),
            false => home.path.clone(),
        };
        let call = StatSource { path };
        let asked = self.call_until(&home.address, call, CALL_TIMEOUT_MS).await;
        let asked =
            asked.inspect_err(|error| tracing::debug!(%error, "a result is not identified"));
        let mut identity = asked.ok()?.identity;
        if self.settings.has_private_data_at_home() {
            // It is a link to a file of the run, whose removal changes this time.
            identity.ctime_ns = 0;
        }
        Some(Event::ResultIdentified { index, identity })
    }

    /// Has a node send a file home; its size. What lasts is told: the node waits for a home that is
    /// away by itself, and who waits for the file should know of all that is in its way.
    async fn call_extract(&self, address: &str, call: ExtractFile) -> Result<u64> {
        let mut trying = Deadline::after_ms(CALL_TIMEOUT_MS);
        loop {
            let ms = KeepaliveDeadline::total_ms_max(EXTRACT_TIMEOUT_MS);
            let token = self.make_call_token(address, call.clone().into(), ms)?;
            let deadline = Deadline::after_ms(EXTRACT_TIMEOUT_MS);
            let began = Deadline::after_ms(CALL_TIMEOUT_MS);
            let since = monotonic_now();
            let asked = self
                .pool
                .call_with_keepalives(address, &token, call.clone(), deadline);
            let answer = asked.await;
            self.note_call_result(address, since, &answer);
            let error = match answer {
                Ok(receipt) => return Ok(receipt.size),
                Err(error) => error,
            };
            if is_unanswered(&error) && self.connectivity().is_cut_off() {
                self.wait_out_cut_off(since).await;
                trying = Deadline::after_ms(CALL_TIMEOUT_MS);
                continue;
            }
            // A call that lasted was at it.
            if began.remaining().is_zero() {
                trying = Deadline::after_ms(CALL_TIMEOUT_MS);
            }
            let is_away = error.code == ErrorCode::HomeUnreachable;
            if is_away || !error.is_transient() || trying.remaining().is_zero() {
                return Err(error);
            }
            tracing::debug!(address, %error, "the file will be asked for again");
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }
}

/// A home that is not found is no file that is not found, and a place that none can have is no
/// fault of the file.
fn as_environment_error(error: Error) -> Error {
    match error.code {
        ErrorCode::BadPath => Error::new(ErrorCode::Unsupported, error.detail),
        ErrorCode::NotFound => Error::new(ErrorCode::Unreachable, error.detail),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_home_is_not_taken_for_missing_output() {
        let told = |code| as_environment_error(Error::new(code, "why")).code;
        assert_eq!(told(ErrorCode::NotFound), ErrorCode::Unreachable);
        assert_eq!(told(ErrorCode::BadPath), ErrorCode::Unsupported);
        assert_eq!(told(ErrorCode::Unreachable), ErrorCode::Unreachable);
    }
}
