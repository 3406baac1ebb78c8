//! Options of a run, and the handle that cancels it.

use std::path::PathBuf;
use std::sync::Arc;

use bafs_proto::identity::Identity;
use tokio::sync::watch;

use crate::earlier_work::EarlierWork;
use crate::io::homes::FileHome;
use crate::run_limit::RunLimit;
use crate::{Settings, StrategySelector};

/// Options of a run, apart from the workflow.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// Address of the catalog, `host:port`.
    pub catalog: String,
    /// Who runs it; its token must grant what the run does.
    pub identity: Identity,
    /// The journal.
    pub journal: PathBuf,
    /// The directory that takes what jobs print, if that is to be kept.
    pub log_directory: Option<PathBuf>,
    /// How it is run; those in an existing journal win.
    pub settings: Settings,
    /// The home that stands for `file:///…`, if there is one.
    pub file_home: Option<FileHome>,
    /// Chooses strategies, where the settings configure that; the same one after a restart.
    pub strategy_selector: Arc<dyn StrategySelector>,
    /// What earlier runs of the workflow did: the run begins with that, as another one in the
    /// journal. Without it, the run in the journal goes on.
    pub earlier_work: Option<EarlierWork>,
    /// Stops the run.
    pub cancel_handle: CancelHandle,
    /// What it may use of nodes that it shares with other runs.
    pub limit: RunLimit,
}

/// Cancels a run: its jobs are killed, its volumes deleted, and it ends as cancelled.
#[derive(Debug, Clone)]
pub struct CancelHandle(Arc<watch::Sender<bool>>);

impl Default for CancelHandle {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }
}

impl CancelHandle {
    /// Asks the run to stop; asking again is harmless.
    pub fn request_cancel(&self) {
        self.0.send_replace(true);
    }

    /// Whether the run is to stop.
    pub(super) fn is_requested(&self) -> bool {
        *self.0.borrow()
    }

    pub(super) async fn wait_for_request(&self) {
        let mut receiver = self.0.subscribe();
        // The sender lives as long as this handle, so waiting cannot fail.
        let _ = receiver.wait_for(|is_requested| *is_requested).await;
    }
}
