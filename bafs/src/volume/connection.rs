//! The cluster as the volume commands reach it, and how long they wait.

use std::time::Duration;

use anyhow::Result;

use crate::args::ClientArgs;
use crate::client::ClusterClient;
use crate::failure::{ClassifiedError, FailureClass};

/// Time for calls that move the bytes of a volume, in milliseconds.
pub(super) const TRANSFER_TIMEOUT_MS: u64 = 24 * 3600 * 1000;

/// After so long it is said what a volume waits for.
pub(super) const PROGRESS_NOTICE_DELAY: Duration = Duration::from_secs(5);

/// A client of the cluster; without an identity the words of the command are wrong.
pub(super) fn connect(args: &ClientArgs) -> Result<ClusterClient> {
    ClusterClient::new(args).map_err(|error| {
        ClassifiedError::with_remedy(
            FailureClass::InvalidUse,
            format!("{error:#}"),
            "name a directory that `bafs init` or `bafs grant` created",
        )
    })
}
