//! Which home server a volume or a URL means, and the wait for a home that no listing has yet.

use std::sync::PoisonError;

use bafs_proto::ids::{ExtractionId, VolumeId};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};

use super::homes::HomePath;
use super::listing_tracker::CacheNames;
use super::remote_io;
use super::servers::{CALL_TIMEOUT_MS, RETRY_PAUSE, Servers};
use bafs_workflow::{Url, VolumeIndex, VolumeKind};

impl Servers {
    /// Where a volume is at home when nothing is cached.
    pub(super) async fn resolve_volume_home(
        &self,
        volume: VolumeIndex,
        id: VolumeId,
    ) -> Result<HomePath> {
        match &self.workflow.volume(volume).kind {
            VolumeKind::Cache { source: url, .. } | VolumeKind::Scratch { fill: Some(url) } => {
                remote_io::prepare_source_directory(
                    self,
                    self.resolve_url(url).await?,
                    ExtractionId(id.0),
                )
                .await
            }
            VolumeKind::Scratch { fill: None } => {
                let url = remote_io::find_results_home(&self.workflow).ok_or_else(|| {
                    let text = "remote I/O needs a home, but the workflow names none";
                    Error::new(ErrorCode::Unsupported, text)
                })?;
                let home = self.resolve_url(url).await?;
                let path = format!("{}/{id}", remote_io::run_directory(self.run));
                Ok(HomePath { path, ..home })
            }
        }
    }

    /// The caches of the workflow by the names of their cooperative caches, as far as their homes
    /// are listed.
    pub(crate) fn cache_names(&self) -> CacheNames {
        let mut homes = self.homes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut names = CacheNames::new();
        for (volume, spec) in (0..).map(VolumeIndex).zip(&self.workflow.volumes) {
            if let VolumeKind::Cache { source: url, .. } = &spec.kind
                && let Ok(home) = homes.resolve_url(url)
            {
                let volumes: &mut Vec<_> = names.entry(home.cooperative_name()).or_default();
                volumes.push(volume);
            }
        }
        names
    }

    /// The place of a URL; waits a while for its home to appear in the catalog.
    ///
    /// # Errors
    /// `HomeUnreachable` if the catalog lists none of that name: it may be away, and nobody can
    /// tell that from a wrong name, of which the user was told.
    pub(crate) async fn resolve_url(&self, url: &Url) -> Result<HomePath> {
        let end = Deadline::after_ms(CALL_TIMEOUT_MS.min(self.settings.extract_timeout_ms));
        loop {
            let (found, is_listed, is_missing) = {
                let mut homes = self.homes.lock().unwrap_or_else(PoisonError::into_inner);
                let found = homes.resolve_url(url);
                (found, homes.is_listed(), homes.is_reported_missing(url))
            };
            let is_over = is_missing || end.remaining().is_zero();
            match found {
                Err(error) if error.is_transient() && !is_over => {}
                // A resumed run knew the home before: the workflow is right.
                Err(error) if error.is_transient() && (is_listed || self.is_resumed) => {
                    return Err(Error::new(ErrorCode::HomeUnreachable, error.detail));
                }
                found => return found,
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }
}
