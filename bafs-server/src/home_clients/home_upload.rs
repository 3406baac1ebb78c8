//! A file on its way to a home of any kind: what is sent where, how it is called until it is whole,
//! and how long a call about it may take. Sends nothing.

use std::sync::OnceLock;

use bafs_proto::ids::{ExtractionId, ServerId};
use bafs_proto::message::{SourceIdentity, UploadFence};
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};

use super::home_locations::HomeAddress;

/// Time for one call that moves a piece or nothing, in milliseconds: on a home link of 1 MB/s some
/// fifty pieces may go before one of 1 MiB.
pub(crate) const CALL_TIMEOUT_MS: u64 = 60_000;

/// What the slowest link moves, in bytes per millisecond.
const BYTES_PER_MS_MIN: u64 = 100;

/// Names of unfinished uploads at homes that have no other place for them begin so.
const UPLOAD_PREFIX: &str = ".bafs-put-";

/// A file on its way to a home.
pub(crate) struct HomeUpload {
    /// The upload; the same one resumes.
    pub(crate) extract: ExtractionId,
    /// Address of the home.
    pub(crate) home: String,
    /// Which home server that is; `None` for whoever is there.
    pub(crate) home_id: Option<ServerId>,
    /// Where the file shall be.
    pub(crate) path: String,
    /// Permission bits.
    pub(crate) mode: u32,
    /// Size in bytes.
    pub(crate) size: u64,
    /// Capability for the place.
    pub(crate) token: Token,
    /// Place in the order of uploads there, for a home that knows one.
    pub(crate) fence: Option<UploadFence>,
    /// What was at the place when the upload began, at a home that knows no order.
    pub(crate) replaced: ReplacedFile,
}

/// The file at the target of an upload, as it was first seen.
#[derive(Debug, Default)]
pub(crate) struct ReplacedFile(OnceLock<Option<SourceIdentity>>);

impl ReplacedFile {
    /// Notes what is there when an upload begins.
    pub(super) fn note(&self, there: Option<SourceIdentity>) {
        self.0.get_or_init(|| there);
    }

    /// Checks what is there when an upload is to have its name. Between this and the renaming,
    /// another one may still come.
    ///
    /// # Errors
    /// `UploadFenced` when it is another file.
    pub(super) fn check(&self, path: &str, there: Option<SourceIdentity>) -> Result<()> {
        if self.0.get().is_none_or(|before| *before == there) {
            return Ok(());
        }
        let text = format!(
            "'{path}' changed during this upload, which does not replace it: another upload or \
             another client wrote it"
        );
        Err(Error::new(ErrorCode::UploadFenced, text))
    }
}

impl HomeUpload {
    /// The home that it goes to.
    pub(crate) fn home_address(&self) -> HomeAddress<'_> {
        HomeAddress {
            address: &self.home,
            id: self.home_id,
        }
    }
}

/// Time in which the slowest link moves so many bytes, in milliseconds. Not a time in which nothing
/// is heard: homes that are read back have a shorter one for that.
pub(crate) fn transfer_ms_max(bytes: u64) -> u64 {
    bytes / BYTES_PER_MS_MIN
}

/// Where an upload grows, beside its place: a path on the same file system.
pub(super) fn upload_path(put: &HomeUpload) -> String {
    let (above, _) = put.path.rsplit_once('/').unwrap_or_default();
    let name = format!("{UPLOAD_PREFIX}{}", put.extract);
    match above {
        "" => name,
        above => format!("{above}/{name}"),
    }
}

/// Whether a name is that of an unfinished upload, which is never shown.
pub(super) fn is_upload_name(name: &str) -> bool {
    name.starts_with(UPLOAD_PREFIX)
}
