//! A time in which no node answers.

use bafs_proto::time::Time;
use serde::{Deserialize, Serialize};

/// A time in which no node answers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct CutOff {
    /// When the core was told; later when a scheduler took up its journal meanwhile.
    pub(crate) since: Time,
    /// For how long nobody had answered then, in milliseconds.
    pub(crate) silent_ms: u64,
}
