//! A time in which no node answers.

use bafs_proto::time::Time;

/// A time in which no node answers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct CutOff {
    /// When the core was told; later when a scheduler took up its journal meanwhile.
    pub(crate) since: Time,
    /// For how long nobody had answered then, in milliseconds.
    pub(crate) silent_ms: u64,
}
