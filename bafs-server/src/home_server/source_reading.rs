//! Reads ranges of files below an export, or small ones whole, each as it was when it was listed.
//! Remembers the digests of what was read, beyond its restart. Checks no rights.

use std::fmt::Display;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use bafs_proto::hash::Digest;
use bafs_proto::limits::{
    BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, BODY_BYTES_MAX, DIGESTS_MAX, PAGE_ENTRIES_MAX,
};
use bafs_proto::message::{
    ReadDigests, ReadSource, SourceBlocks, SourceData, SourceDigests, SourceIdentity,
};
use bafs_proto::path::{check_relative, join};
use bafs_proto::replica::ReadSources;
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode, Result, codec};
use bytes::Bytes;
use rustix::fs::fstat;

use super::export::ExportEntry;
use crate::clock;
use crate::digest_log::{DigestLog, DigestRecord};
use crate::logic::digest_memory::DigestMemory;
use crate::source::source_identity;

/// Digests that a home server remembers: 64 MiB, for 128 GiB in blocks of 64 KiB. Of other blocks
/// it reads the file again.
const REMEMBERED_MAX: usize = 1 << 21;

/// What a home server keeps of them for its next start, in bytes: as much as it remembers.
const LOG_BYTES_MAX: u64 = (REMEMBERED_MAX * size_of::<Digest>()) as u64;

/// The log in the own directory of a home server.
const LOG_FILE: &str = "digests";

/// A file that changed less than so long ago, in nanoseconds, may change again within the same tick
/// of its file system's clock: 10 ms at most, and 2 s on FAT. Then nothing tells its states apart,
/// and the next start must not.
const SETTLED_NS: i64 = 3_000_000_000;

/// The digests of what was read of files. They hold for a state of a file, also when the file is
/// another one by now.
#[derive(Debug)]
pub(super) struct RememberedDigests {
    memory: Mutex<DigestMemory<Digest>>,
    log: DigestLog,
}

impl RememberedDigests {
    /// Takes up what an earlier server left in a directory (waits for the disk).
    pub(super) fn open(directory: &Path) -> Self {
        let mut memory = DigestMemory::new(REMEMBERED_MAX);
        let log = DigestLog::open(directory.join(LOG_FILE), LOG_BYTES_MAX, |record| {
            memory.insert(record.file, record.first, &record.digests);
        });
        let memory = Mutex::new(memory);
        Self { memory, log }
    }

    /// Remembers what was read, if it begins with a block (waits for the disk).
    pub(super) fn insert(&self, call: &ReadSource, read: &SourceData) -> Result<()> {
        if !call.offset.is_multiple_of(u64::from(call.block_bytes)) {
            return Ok(());
        }
        let file = file_key(&call.path, call.identity, call.block_bytes)?;
        let first = call.offset / u64::from(call.block_bytes);
        let is_known = {
            let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
            let known = memory.known_from(file, first, read.digests.len());
            memory.insert(file, first, &read.digests);
            known == read.digests
        };
        if !is_known && is_settled(call.identity, clock::now()) {
            let digests = read.digests.clone();
            self.log.append(&[DigestRecord {
                file,
                first,
                digests,
            }]);
        }
        Ok(())
    }

    /// What is known of blocks, from the first one on.
    fn find(&self, top: &str, blocks: &SourceBlocks, block_bytes: u32) -> Result<Vec<Digest>> {
        let file = file_key(&join(top, &blocks.path), blocks.identity, block_bytes)?;
        let (first, count) = (blocks.first.0, count_blocks(blocks, block_bytes));
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(memory.known_from(file, first, count as usize))
    }
}

/// Whether a later change of a file gives it another identity.
fn is_settled(identity: SourceIdentity, now: Time) -> bool {
    let changed_ns = identity.mtime_ns.max(identity.ctime_ns);
    let now_ns = i64::try_from(now.0).map_or(i64::MAX, |ms| ms.saturating_mul(1_000_000));
    changed_ns.saturating_add(SETTLED_NS) <= now_ns
}

/// Names a state of a file, in blocks of a size.
fn file_key(path: &str, identity: SourceIdentity, block_bytes: u32) -> Result<Digest> {
    let key = codec::encode(&(path, identity, block_bytes))?;
    Ok(Digest::of(&key))
}

/// Number of the blocks that are in the file.
fn count_blocks(blocks: &SourceBlocks, block_bytes: u32) -> u64 {
    let all = blocks.identity.size.div_ceil(u64::from(block_bytes));
    let left = all.saturating_sub(blocks.first.0);
    left.min(u64::from(blocks.count))
}

/// The digests of blocks: of those that are needed, the file is read if need be.
///
/// # Errors
/// What `find` answers; `SourceChanged` when the file is another one now, and what it was is not
/// remembered; `Malformed`.
pub(super) fn read_digests(
    call: &ReadDigests,
    remembered: &RememberedDigests,
    find: impl Fn(&str) -> Result<ExportEntry>,
) -> Result<SourceDigests> {
    check_digest_call(call)?;
    let path = join(&call.path, &call.needed.path);
    // Who may not read the file learns nothing of it.
    match find(&path) {
        Err(error) if error.code != ErrorCode::NotFound => return Err(error),
        _ => {}
    }
    let count = count_blocks(&call.needed, call.block_bytes);
    let mut needed = remembered.find(&call.path, &call.needed, call.block_bytes)?;
    if (needed.len() as u64) < count {
        let range = ReadSource {
            identity: call.needed.identity,
            offset: call.needed.first.0 * u64::from(call.block_bytes),
            length: call.needed.count * call.block_bytes,
            block_bytes: call.block_bytes,
            path,
        };
        let (data, _) = read(&range, || find(&range.path))?;
        remembered.insert(&range, &data)?;
        needed = data.digests;
    }
    let known = |blocks| remembered.find(&call.path, blocks, call.block_bytes);
    Ok(SourceDigests {
        needed,
        welcome: call.welcome.iter().map(known).collect::<Result<_>>()?,
    })
}

fn check_digest_call(call: &ReadDigests) -> Result<()> {
    let all = [&call.needed].into_iter().chain(&call.welcome);
    let counts = all.clone().map(|blocks| u64::from(blocks.count));
    let is_sized = (BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&call.block_bytes);
    let needed_bytes = u64::from(call.needed.count) * u64::from(call.block_bytes);
    let is_bounded = needed_bytes <= u64::from(BODY_BYTES_MAX)
        && counts.sum::<u64>() <= u64::from(DIGESTS_MAX)
        && call.welcome.len() <= PAGE_ENTRIES_MAX;
    if !is_sized || !is_bounded {
        let text = "one reply does not carry so many digests";
        return Err(Error::new(ErrorCode::Malformed, text));
    }
    // A path that leaves what was listed would need another right.
    all.map(|blocks| &blocks.path)
        .try_for_each(|path| check_relative(path))
}

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
