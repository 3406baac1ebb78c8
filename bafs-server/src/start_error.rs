//! Why a server did not start. What helps says the program, which knows its options.

use std::io;

use bafs_proto::{Error, ErrorCode};

/// An error of a server that did not start.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct StartError {
    /// What failed.
    pub cause: StartErrorCause,
    /// The error.
    #[source]
    pub error: Error,
}

/// What failed when a server started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartErrorCause {
    /// To listen at its address. The error's code says why: `Conflict` when the port is in use,
    /// `NotFound` when this machine has no such address, `RightMissing` when the user may not.
    Listen,
    /// To open its store, with what the system answered, if the system refused it.
    Store(Option<io::ErrorKind>),
    /// Anything else.
    Other,
}

impl StartError {
    /// The error of a server that cannot listen.
    pub(crate) fn from_listening(error: Error) -> Self {
        let cause = match error.code {
            // Its settings are wrong, not the address.
            ErrorCode::Malformed => StartErrorCause::Other,
            _ => StartErrorCause::Listen,
        };
        Self { cause, error }
    }
}

impl From<Error> for StartError {
    fn from(error: Error) -> Self {
        let cause = StartErrorCause::Other;
        Self { cause, error }
    }
}
