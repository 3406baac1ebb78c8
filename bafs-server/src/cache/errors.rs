//! Errors that several parts of the cache give, and work that waits for the disk.

use std::path::Path;

use bafs_proto::ids::VolumeId;
use bafs_proto::{Error, ErrorCode, Result};

/// The error of a disk that fails an operation.
pub(crate) fn disk_fault(action: &str, path: &Path, error: std::io::Error) -> Error {
    crate::errors::disk_error(format!("cannot {action} ({})", path.display()), &error)
}

/// Whether an error says that the disk has no space.
pub(crate) fn is_disk_full(error: &Error) -> bool {
    error.code == ErrorCode::NoSpaceBytes
}

pub(crate) fn volume_lost(id: VolumeId) -> Error {
    let text = format!("cache volume {id} does not exist on this server");
    Error::new(ErrorCode::VolumeLost, text)
}

pub(crate) fn source_changed() -> Error {
    let text = "the source changed: the cache volume has another generation than the reader; start \
                the job again";
    Error::new(ErrorCode::SourceChanged, text)
}

/// The deadline of a reader ended before its blocks came.
pub(crate) fn fetch_in_progress() -> Error {
    let text = "the fetch of the blocks from home or a peer is still in progress; retry";
    Error::new(ErrorCode::DeadlineExceeded, text)
}

/// Runs work that waits for the disk on a thread that may wait.
pub(crate) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(|error| {
        Error::new(
            ErrorCode::ServerFault,
            format!("an operation on a cache volume failed: {error}"),
        )
    })
}
