//! Digests of blocks on disk, for the next start. What is lost of them is only made again, so
//! nothing is synced. Hashes no block.
//!
//! Two files take turns: when one has half of what is allowed, it takes the place of the other, and
//! a new one begins. A record is its length (4 bytes, little endian), the first half of its digest
//! (16 bytes), the name of the file (32 bytes), the number of the first block (8 bytes), and the
//! digests. Behind a damaged record nothing is read.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use bafs_proto::hash::Digest;
use rustix::fs::OFlags;

const CHECKSUM_BYTES: usize = 16;
const HEAD_BYTES: usize = 4 + CHECKSUM_BYTES;
const DIGEST_BYTES: usize = size_of::<Digest>();

/// The name of the file and the number of the first block.
const PLACE_BYTES: usize = DIGEST_BYTES + 8;

/// Neighbouring blocks of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DigestRecord {
    /// What the owner of the log calls the file.
    pub(crate) file: Digest,
    /// Number of the first block.
    pub(crate) first: u64,
    /// Digests from there on.
    pub(crate) digests: Vec<Digest>,
}

impl DigestRecord {
    fn encode(&self) -> Vec<u8> {
        let mut payload = Vec::with_capacity(PLACE_BYTES + self.digests.len() * DIGEST_BYTES);
        payload.extend(self.file.0);
        payload.extend(self.first.to_le_bytes());
        self.digests
            .iter()
            .for_each(|digest| payload.extend(digest.0));
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(&Digest::of(&payload).0[..CHECKSUM_BYTES]);
        bytes.extend(payload);
        bytes
    }

    /// The first record, if it is whole, and what is behind it.
    fn decode(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (head, rest) = bytes.split_at_checked(HEAD_BYTES)?;
        let (length, checksum) = head.split_first_chunk::<4>()?;
        let (payload, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        if Digest::of(payload).0[..CHECKSUM_BYTES] != *checksum {
            return None;
        }
        let (file, payload) = payload.split_first_chunk::<DIGEST_BYTES>()?;
        let (first, digests) = payload.split_first_chunk::<8>()?;
        let (digests, _) = digests.as_chunks::<DIGEST_BYTES>();
        let record = Self {
            file: Digest(*file),
            first: u64::from_le_bytes(*first),
            digests: digests.iter().copied().map(Digest).collect(),
        };
        Some((record, rest))
    }
}

/// The log of one owner.
#[derive(Debug)]
pub(crate) struct DigestLog {
    path: PathBuf,
    bytes_max: u64,
    /// Open from the first write on.
    file: Mutex<Option<File>>,
}

impl DigestLog {
    /// Opens the log at `path`, of so many bytes at most, and tells what it has, the oldest first
    /// (waits for the disk). One that cannot be read has nothing.
    pub(crate) fn open(path: PathBuf, bytes_max: u64, mut take: impl FnMut(DigestRecord)) -> Self {
        for part in [older_path(&path), path.clone()] {
            if let Err(error) = read_records(&part, bytes_max, &mut take) {
                tracing::warn!(path = %part.display(), %error, "digests of blocks are made again");
            }
        }
        Self {
            path,
            bytes_max,
            file: Mutex::default(),
        }
    }

    /// Adds records (waits for the disk). What cannot be written is made again after a restart.
    pub(crate) fn append(&self, records: &[DigestRecord]) {
        let bytes: Vec<u8> = records.iter().flat_map(DigestRecord::encode).collect();
        if bytes.is_empty() {
            return;
        }
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = self.write(&mut file, &bytes) {
            *file = None;
            tracing::debug!(path = %self.path.display(), %error, "digests are not kept");
        }
    }

    fn write(&self, file: &mut Option<File>, bytes: &[u8]) -> io::Result<()> {
        let open = match file.take() {
            Some(open) if open.metadata()?.len() < self.bytes_max / 2 => open,
            Some(_) => {
                fs::rename(&self.path, older_path(&self.path))?;
                open_log(OpenOptions::new().append(true).create(true), &self.path)?
            }
            None => open_log(OpenOptions::new().append(true).create(true), &self.path)?,
        };
        // In one call: several processes may append.
        file.insert(open).write_all(bytes)
    }
}

fn older_path(path: &Path) -> PathBuf {
    let mut older = OsString::from(path);
    older.push(".old");
    older.into()
}

fn open_log(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    options.custom_flags(flags.bits().cast_signed());
    options.mode(0o600).open(path)
}

/// Reads the records of a file, and cuts off what is damaged: others follow it.
fn read_records(
    path: &Path,
    bytes_max: u64,
    take: &mut impl FnMut(DigestRecord),
) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let file = match open_log(options.read(true).write(true), path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut io::Read::take(&file, bytes_max), &mut bytes)?;
    let mut rest = bytes.as_slice();
    while let Some((record, behind)) = DigestRecord::decode(rest) {
        take(record);
        rest = behind;
    }
    if !rest.is_empty() {
        file.set_len((bytes.len() - rest.len()) as u64)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(file: u8, first: u64, count: u8) -> DigestRecord {
        DigestRecord {
            file: Digest([file; 32]),
            first,
            digests: (0..count).map(|n| Digest::of(&[file, n])).collect(),
        }
    }

    fn read(path: &Path, bytes_max: u64) -> Vec<DigestRecord> {
        let mut found = Vec::new();
        DigestLog::open(path.to_owned(), bytes_max, |record| found.push(record));
        found
    }

    #[test]
    fn log_cut_anywhere_keeps_whole_records() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("digests");
        let records = [record(1, 0, 3), record(2, 64, 1), record(1, 3, 5)];
        let log = DigestLog::open(path.clone(), 1 << 20, |_| panic!("it is new"));
        log.append(&records[..1]);
        log.append(&records[1..]);
        let whole = fs::read(&path).expect("a log");
        let length = |record: &DigestRecord| record.encode().len();
        for cut in 0..=whole.len() {
            fs::write(&path, &whole[..cut]).expect("a copy");
            let mut kept = 0;
            let mut end = 0;
            while kept < records.len() && end + length(&records[kept]) <= cut {
                end += length(&records[kept]);
                kept += 1;
            }
            assert_eq!(read(&path, 1 << 20), records[..kept], "cut at {cut}");
            assert_eq!(fs::metadata(&path).expect("it").len(), end as u64);
        }
        let mut damaged = whole.clone();
        damaged[length(&records[0]) + HEAD_BYTES + 5] ^= 1;
        fs::write(&path, &damaged).expect("a copy");
        assert_eq!(read(&path, 1 << 20), records[..1]);
        log.append(&records[2..]);
        assert_eq!(
            read(&path, 1 << 20),
            [records[0].clone(), records[2].clone()]
        );
    }

    #[test]
    fn log_forgets_the_oldest_records() {
        const MAX: u64 = 20_000;
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("digests");
        let log = DigestLog::open(path.clone(), MAX, |_| panic!("it is new"));
        for first in 0..1_000 {
            log.append(&[record(1, first, 8)]);
        }
        let files = fs::read_dir(directory.path()).expect("a list");
        let bytes: u64 = files
            .map(|it| it.expect("it").metadata().expect("its size").len())
            .sum();
        assert!(bytes <= MAX + 1_000, "{bytes}");
        let found = read(&path, MAX);
        assert_eq!(found.last(), Some(&record(1, 999, 8)));
        assert!(found.len() > 25, "{}", found.len());
    }
}
