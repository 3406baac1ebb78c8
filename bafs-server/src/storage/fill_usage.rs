//! What a volume takes while it is filled, against its limit. Touches no file.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use bafs_proto::{Error, ErrorCode, Result};

use crate::logic::space::Amount;

/// What a volume takes while it is filled: blocks on disk, as its tree counts them later.
#[derive(Debug)]
pub(super) struct FillUsage {
    limit: Amount,
    bytes: AtomicU64,
    files: AtomicU64,
}

impl FillUsage {
    /// Of an empty volume.
    pub(super) fn new(limit: Amount) -> Self {
        Self {
            limit,
            bytes: AtomicU64::new(0),
            files: AtomicU64::new(0),
        }
    }

    /// One more file.
    pub(super) fn add_file(&self) -> Result<()> {
        self.check_file_room(self.files.fetch_add(1, SeqCst) + 1)
    }

    /// Whether so many files may be in the volume.
    pub(super) fn check_file_room(&self, files: u64) -> Result<()> {
        if files <= self.limit.files {
            return Ok(());
        }
        let text = format!(
            "the source has more files than the volume's limit ({}); increase the limit",
            self.limit.files
        );
        Err(Error::new(ErrorCode::TooLarge, text))
    }

    /// So many bytes more, because of `path`.
    pub(super) fn add_bytes(&self, bytes: u64, path: &str) -> Result<()> {
        let sum = self.bytes.fetch_add(bytes, SeqCst).saturating_add(bytes);
        self.check_byte_room(sum, path)
    }

    /// Puts what a file takes in place of what was taken for it beforehand.
    pub(super) fn replace_estimate(&self, beforehand: u64, bytes: u64, path: &str) -> Result<()> {
        self.add_bytes(bytes.saturating_sub(beforehand), path)?;
        let less = beforehand.saturating_sub(bytes);
        self.bytes.fetch_sub(less, SeqCst);
        Ok(())
    }

    /// Whether so many bytes may be in the volume, to which `path` adds.
    pub(super) fn check_byte_room(&self, bytes: u64, path: &str) -> Result<()> {
        if bytes <= self.limit.bytes {
            return Ok(());
        }
        let text = format!(
            "the source needs more bytes than the volume's limit ({}; '{path}' makes {bytes}; a \
             file takes whole blocks of the disk); increase the limit",
            self.limit.bytes
        );
        Err(Error::new(ErrorCode::TooLarge, text))
    }
}
