//! What of a source a home may not read, in a volume that is filled with the rest: it is there
//! under its name, without content and without any right. Fails instead where no right stops jobs.

use std::sync::Arc;

use bafs_proto::message::SourceEntry;
use bafs_proto::source_warning::WarningReason;
use bafs_proto::{Error, ErrorCode, Result};

use super::confined_directory::{self, ConfinedDirectory};
use super::fill::RunningFill;
use super::volume_errors::fill_disk_error;
use crate::errors::run_blocking;

impl RunningFill {
    /// Whether an error says that a home may not read one of its files.
    pub(super) fn is_unreadable(&self, error: &Error) -> bool {
        error.code == ErrorCode::RightMissing && self.source.has_per_file_rights()
    }

    /// Checks that what cannot be read is closed to jobs, too.
    ///
    /// # Errors
    /// `RightMissing` where they would find it empty, as they are root.
    pub(super) fn check_is_closed_to_jobs(&self, path: &str) -> Result<()> {
        if !rustix::process::geteuid().is_root() {
            return Ok(());
        }
        let text = format!(
            "the home may not read '{path}', and jobs of this node, which run as root, would find \
             it empty; permit the home to read it, or use a cache"
        );
        Err(Error::new(ErrorCode::RightMissing, text))
    }

    /// Makes a file that cannot be read.
    pub(super) async fn make_unreadable(
        self: Arc<Self>,
        root: Arc<ConfinedDirectory>,
        path: String,
        entry: Arc<SourceEntry>,
    ) -> Result<()> {
        self.check_is_closed_to_jobs(&path)?;
        self.warnings().add(&path, WarningReason::UnreadableFile);
        run_blocking(move || {
            let make = || {
                let file = root.empty_file(&path)?;
                confined_directory::set_attributes(&file, 0, entry.identity.mtime_ns)?;
                file.sync_all()
            };
            make().map_err(|e| fill_disk_error(&path, &e))
        })
        .await
    }
}
