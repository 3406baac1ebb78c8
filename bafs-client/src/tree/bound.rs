//! A scratch volume of this machine whose directory itself is shown to the job: the kernel does the
//! rest, no operation comes here. The server keeps the lease, watches the space, and may want the
//! volume back.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tokio::task::JoinHandle;

use super::RemoteTree;
use crate::door::DoorConnection;
use crate::fate::Fate;

/// A directory that is shown to the job.
#[derive(Debug)]
pub struct BoundTree {
    directory: PathBuf,
    lease: RemoteTree,
    /// Open for as long as something of the job may write.
    lock: Mutex<Option<OwnedFd>>,
    watching: JoinHandle<()>,
}

impl BoundTree {
    /// Watches over a directory that will be bound. Must be called within a tokio runtime.
    pub(super) fn new(
        directory: PathBuf,
        lease: RemoteTree,
        lock: Option<OwnedFd>,
        connection: DoorConnection,
        fate: Fate,
    ) -> Self {
        // The loss has the job killed; what was handed over is given back when it is dead.
        let watching = tokio::spawn(async move {
            fate.lose(connection.over().await);
            std::future::pending::<()>().await;
        });
        Self {
            directory,
            lease,
            lock: Mutex::new(lock),
            watching,
        }
    }

    /// Where the directory is.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Gives the directory back and ends the session, when nobody uses it any more.
    pub(super) async fn close(&self, keep_ms: u64) {
        drop(
            self.lock
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take(),
        );
        self.watching.abort();
        self.lease.close(keep_ms).await;
    }
}

impl Drop for BoundTree {
    fn drop(&mut self) {
        self.watching.abort();
    }
}
