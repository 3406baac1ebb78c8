//! Reads ranges of files below an export, or small ones whole, each as it was when it was listed.
//! Checks no rights.

use std::fmt::Display;
use std::os::unix::fs::FileExt;

use bafs_proto::hash::Digest;
use bafs_proto::limits::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, BODY_BYTES_MAX, PAGE_ENTRIES_MAX};
use bafs_proto::message::{ReadSource, SourceData};
use bafs_proto::path::join;
use bafs_proto::replica::ReadSources;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use rustix::fs::fstat;

use super::export::ExportEntry;
use crate::source::source_identity;

/// A range of a file that `find` finds.
///
/// # Errors
/// What `find` answers; `SourceChanged` when the file is another one now; `Malformed`.
pub(crate) fn read(
    call: &ReadSource,
    find: impl FnOnce() -> Result<ExportEntry>,
) -> Result<(SourceData, Bytes)> {
    let ReadSource {
        path,
        offset,
        length,
        block_bytes,
        ..
    } = call;
    if *length > BODY_BYTES_MAX || !(BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(block_bytes) {
        let text = format!("cannot read {length} bytes in blocks of {block_bytes}");
        return Err(Error::new(ErrorCode::Malformed, text));
    }
    let changed = |why: &dyn Display| {
        let text = format!("'{path}' changed: {why}");
        Error::new(ErrorCode::SourceChanged, text)
    };
    let found = match find() {
        Err(error) if error.code == ErrorCode::NotFound => {
            return Err(changed(
                &"it no longer \
            exists",
            ));
        }
        other => other?,
    };
    if source_identity(&found.stat) != call.identity {
        return Err(changed(&"its size, or a time of its last change, differs"));
    }
    let file = found.open_file()?;
    let left = call
        .identity
        .size
        .saturating_sub(*offset)
        .min(u64::from(*length));
    let mut data = vec![0; usize::try_from(left).unwrap_or(0)];
    let fail = |error: std::io::Error| {
        Error::new(
            ErrorCode::ServerFault,
            format!("cannot read '{path}': {error}"),
        )
    };
    match file.read_exact_at(&mut data, *offset) {
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            return Err(changed(&"it became shorter"));
        }
        other => other.map_err(fail)?,
    }
    let after = fstat(&file).map_err(|error| fail(error.into()))?;
    if source_identity(&after) != call.identity {
        return Err(changed(&"it changed while it was read"));
    }
    let digests = data.chunks(*block_bytes as usize).map(Digest::of).collect();
    Ok((SourceData { digests }, data.into()))
}

/// Small files that `find` finds by their paths, whole, one after the other.
///
/// # Errors
/// As [`read`], for the first of which it is true.
pub(super) fn read_files(
    call: &ReadSources,
    find: impl Fn(&str) -> Result<ExportEntry>,
) -> Result<(SourceData, Bytes)> {
    let sizes = call.files.iter().map(|file| file.identity.size);
    let bytes = sizes.fold(0, u64::saturating_add);
    if bytes > u64::from(BODY_BYTES_MAX) || call.files.len() > PAGE_ENTRIES_MAX {
        let text = format!(
            "{bytes} bytes of {} files are more than one reply carries",
            call.files.len()
        );
        return Err(Error::new(ErrorCode::Malformed, text));
    }
    let (mut digests, mut body) = (Vec::new(), Vec::new());
    for file in &call.files {
        let whole = ReadSource {
            path: join(&call.path, &file.path),
            identity: file.identity,
            offset: 0,
            length: BODY_BYTES_MAX,
            block_bytes: call.block_bytes,
        };
        let (data, bytes) = read(&whole, || find(&whole.path))?;
        digests.extend(data.digests);
        body.extend_from_slice(&bytes);
    }
    Ok((SourceData { digests }, body.into()))
}
