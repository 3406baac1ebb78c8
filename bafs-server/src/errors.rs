//! What a disk refuses and what a panic says, in the terms of the wire. Touches no file.

use std::fmt::Display;
use std::io;

use bafs_proto::{Error, ErrorCode, Result};
use tokio::task::{JoinError, JoinSet};

/// The error of a store that does not do what it should. A full disk is a lack of space, which
/// whoever chooses the node must know; anything else may pass.
pub(crate) fn disk_error(doing: impl Display, error: &io::Error) -> Error {
    let code = match is_no_space(error) {
        true => ErrorCode::NoSpaceBytes,
        false => ErrorCode::ServerFault,
    };
    Error::new(code, format!("{doing}: {error}"))
}

/// Whether the disk, or the part of it that this user may have, is full.
pub(crate) fn is_no_space(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

/// Does work whose end others wait for, in a task of its own: a panic is an error then, and not a
/// silence for ever. Dropping the future ends the work.
///
/// # Errors
/// That of the work; `ServerFault` when it panicked.
pub(crate) async fn run_in_task<T: Send + 'static>(
    doing: impl Display,
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let mut alone = JoinSet::new();
    alone.spawn(work);
    match alone.join_next().await {
        Some(Ok(result)) => result,
        Some(Err(error)) => {
            tracing::error!(%error, "{doing} failed because of a bug in this program");
            let text = format!("{doing}: a bug in this program: {error}; please report it");
            Err(Error::new(ErrorCode::ServerFault, text))
        }
        None => unreachable!("one task was spawned"),
    }
}

/// Does blocking work on a thread that may block. Goes on when the caller gives up.
///
/// # Errors
/// That of the work; `ServerFault` when it panicked.
pub(crate) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    join_result(tokio::task::spawn_blocking(work).await)
}

/// The result of a task that has ended.
///
/// # Errors
/// That of the task; `ServerFault` when it panicked.
pub(crate) fn join_result<T>(ended: Result<Result<T>, JoinError>) -> Result<T> {
    ended.unwrap_or_else(|e| Err(Error::new(ErrorCode::ServerFault, format!("store: {e}"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_becomes_an_error_with_its_message() {
        let fine = run_in_task("work", async { Ok(7) }).await;
        assert_eq!(fine, Ok(7));
        let nothing: Vec<u32> = Vec::new();
        let error = run_in_task("work", async move { Ok(nothing[7]) }).await;
        let error = error.expect_err("a panic");
        assert_eq!(error.code, ErrorCode::ServerFault);
        assert!(error.detail.contains("index out of bounds"), "{error}");
    }

    #[test]
    fn enospc_maps_to_no_space_bytes() {
        let full = io::Error::from_raw_os_error(rustix::io::Errno::NOSPC.raw_os_error());
        assert_eq!(disk_error("store", &full).code, ErrorCode::NoSpaceBytes);
        let broken = io::Error::from_raw_os_error(rustix::io::Errno::IO.raw_os_error());
        assert_eq!(disk_error("store", &broken).code, ErrorCode::ServerFault);
    }
}
