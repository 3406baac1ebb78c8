//! A directory as a home server shows it, for who is on the same machine and needs no server. It
//! changes nothing there, and checks no rights.

use std::io::Read;
use std::path::Path;

use bafs_proto::message::SourceEntry;
use bafs_proto::{Error, ErrorCode, Result};

use super::export::{Export, system_error};
use super::listing::list;
use crate::source::source_entry;

/// A directory that a home server exports, or would.
#[derive(Debug)]
pub struct DirectoryView {
    export: Export,
}

impl DirectoryView {
    /// Opens a directory.
    ///
    /// # Errors
    /// `NotFound` when there is none that can be read.
    pub fn open(root: &Path) -> Result<Self> {
        let export = Export::open(root)?;
        Ok(Self { export })
    }

    /// What is at a path below it, as [`StatSource`](bafs_proto::message::StatSource) answers.
    ///
    /// # Errors
    /// `NotFound`, `BadPath`, `RightMissing`; `WrongState` for what has no content.
    pub fn stat(&self, path: &str) -> Result<SourceEntry> {
        let found = self.export.find(path)?;
        let entry = source_entry("", &found.stat, || Ok(Vec::new()));
        let entry = entry.map_err(|error| system_error(path, error))?;
        entry.ok_or_else(|| {
            let text = format!("'{path}' is neither a file nor a directory");
            Error::new(ErrorCode::WrongState, text)
        })
    }

    /// The bytes of a file, at most so many.
    ///
    /// # Errors
    /// As [`Self::stat`]; `TooLarge` for a longer file.
    pub fn read(&self, path: &str, bytes_max: u64) -> Result<Vec<u8>> {
        let file = self.export.find(path)?.open_file()?;
        let mut bytes = Vec::new();
        let read = file.take(bytes_max + 1).read_to_end(&mut bytes);
        read.map_err(|error| {
            let why = format!("cannot read '{path}': {error}");
            Error::new(ErrorCode::ServerFault, why)
        })?;
        if bytes.len() as u64 > bytes_max {
            let text = format!("'{path}' has more than {bytes_max} bytes");
            return Err(Error::new(ErrorCode::TooLarge, text));
        }
        Ok(bytes)
    }

    /// What is at a path and below it, as [`ListSource`](bafs_proto::message::ListSource) answers
    /// in pages.
    ///
    /// # Errors
    /// As [`Self::stat`].
    pub fn list(&self, path: &str) -> Result<Vec<SourceEntry>> {
        let top = self.export.find(path)?;
        let (mut entries, mut after) = (Vec::new(), None::<String>);
        loop {
            let (page, _) = list(&self.export, &top, after.as_deref())?;
            after = page.entries.last().map(|entry| entry.path.clone());
            entries.extend(page.entries);
            if !page.has_more || after.is_none() {
                return Ok(entries);
            }
        }
    }
}
