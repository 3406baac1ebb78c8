//! A scratch volume of this machine whose directory itself is shown to the job: the kernel does the
//! rest, no operation comes here but the question what it holds. The server keeps the lease,
//! watches the space, and may want the volume back.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use bafs_proto::ErrorCode;
use bafs_proto::file_op::{FileOp, FileReply, FileResult, TreeStat};
use bafs_tree::held_below;
use tokio::task::JoinHandle;

use super::{Done, RemoteTree};
use crate::door::DoorConnection;
use crate::errno::errno_of;
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

    /// Answers what the directory holds, which is counted for that; nothing else is asked here.
    pub(super) fn run(&self, op: &FileOp, done: Done) {
        if !matches!(op, FileOp::StatFs) {
            return done(Err(errno_of(ErrorCode::Unsupported)), &[]);
        }
        let directory = self.directory.clone();
        // Nobody waits for it but who asked.
        drop(tokio::task::spawn_blocking(move || {
            done(count(&directory), &[]);
        }));
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

/// What a directory holds, as a volume that has no room beyond it: nobody knows here how much it
/// may hold.
fn count(directory: &Path) -> FileResult {
    let (bytes, files) = held_below(directory).map_err(|_| errno_of(ErrorCode::ServerFault))?;
    Ok(FileReply::StatFs(TreeStat {
        size_bytes: bytes,
        free_bytes: 0,
        size_files: files,
        free_files: 0,
        disk_bytes: None,
        disk_files: None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_bound_volume_holds_is_counted() {
        let directory = tempfile::tempdir().expect("directory");
        std::fs::write(directory.path().join("a"), [1; 8192]).expect("write");
        std::fs::create_dir(directory.path().join("d")).expect("directory");
        let Ok(FileReply::StatFs(held)) = count(directory.path()) else {
            panic!("it is there");
        };
        assert_eq!((held.size_files, held.free_files), (2, 0));
        assert!((8192..65_536).contains(&held.size_bytes) && held.free_bytes == 0);
        assert!(count(&directory.path().join("absent")).is_err());
    }
}
