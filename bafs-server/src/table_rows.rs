//! Rows of durable tables as bytes, and damaged tables as errors. Names no database.

use std::panic::AssertUnwindSafe;

use bafs_proto::{Error, ErrorCode, Result, codec};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The bytes of a row: the version of its form, then its fields.
///
/// # Errors
/// As the codec.
pub(crate) fn encode<T: Serialize>(version: u8, record: &T) -> Result<Vec<u8>> {
    let mut bytes = vec![version];
    bytes.extend(codec::encode(record)?);
    Ok(bytes)
}

/// A row from its bytes.
///
/// # Errors
/// `VersionMismatch` for another version, and as the codec.
pub(crate) fn decode<T: DeserializeOwned>(version: u8, bytes: &[u8]) -> Result<T> {
    match bytes.split_first() {
        Some((found, record)) if *found == version => codec::decode(record),
        _ => {
            let text = "a record has a version that this program does not know; use the program \
                        that wrote the store, or an empty store";
            Err(Error::new(ErrorCode::VersionMismatch, text))
        }
    }
}

/// Runs work on a database, which panics where it meets a damaged page.
///
/// # Errors
/// That of the work; `ServerFault` with `damaged` after a panic.
pub(crate) fn catch_panic<T>(damaged: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let done = std::panic::catch_unwind(AssertUnwindSafe(work));
    done.unwrap_or_else(|_| Err(Error::new(ErrorCode::ServerFault, damaged)))
}
