//! Finds the home server of a URL, and waits for one that the catalog does not list yet.

use std::sync::PoisonError;

use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_workflow::Url;

use super::homes::HomePath;
use super::servers::{CALL_TIMEOUT_MS, RETRY_PAUSE, Servers};

/// A home may take so long to appear in the catalog before its name counts as wrong, in
/// milliseconds: adverts come every second and vanish after four.
const HOME_LISTING_TIMEOUT_MS: u64 = 6_000;

impl Servers {
    /// The place of a URL; waits a while for its home to appear in the catalog.
    pub(crate) async fn resolve_url(&self, url: &Url) -> Result<HomePath> {
        let end = Deadline::after_ms(CALL_TIMEOUT_MS);
        let mut timeout: Option<Deadline> = None;
        loop {
            let (found, is_listed) = {
                let mut homes = self.homes.lock().unwrap_or_else(PoisonError::into_inner);
                (homes.resolve_url(url), homes.is_listed())
            };
            let error = match found {
                Err(error) if error.is_transient() && !end.remaining().is_zero() => error,
                // Not the fault of who asks: it is away, as when a node says so.
                Err(error) if error.is_transient() && self.is_resumed => {
                    return Err(Error::new(ErrorCode::HomeUnreachable, error.detail));
                }
                found => return found,
            };
            // Its jobs ran, so the names in the workflow were right once: their homes come back.
            if is_listed && !self.is_resumed {
                let until =
                    *timeout.get_or_insert_with(|| Deadline::after_ms(HOME_LISTING_TIMEOUT_MS));
                if until.remaining().is_zero() {
                    // A home that never appears is a mistake in the workflow.
                    return Err(Error::new(ErrorCode::NotFound, error.detail));
                }
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }
}
