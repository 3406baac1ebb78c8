//! Whether the disk of this server was found full: by jobs that run here, which report it, by those
//! of other nodes in the operations that this server runs for them, or by a volume being filled.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::statvfs;

/// A disk with less free is full, in bytes.
const FULL_BYTES: u64 = 16 << 20;

/// A disk with fewer files (inodes) free is full: others of the node, which make some all the time,
/// leave nothing of that to a job.
const FULL_FILES: u64 = 64;

/// What a disk has free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FreeSpace {
    pub(crate) bytes: u64,
    /// `None` where the file system counts no files.
    pub(crate) files: Option<u64>,
}

impl FreeSpace {
    /// Looks at the disk of a directory. Blocks.
    pub(crate) fn measure(directory: &Path) -> io::Result<Self> {
        let disk = statvfs(directory)?;
        Ok(Self {
            bytes: disk.f_bavail.saturating_mul(disk.f_frsize),
            files: (disk.f_files > 0).then_some(disk.f_favail),
        })
    }

    /// What somebody else saw, if it knew.
    pub(crate) fn reported(bytes: Option<u64>, files: Option<u64>) -> Option<Self> {
        bytes.map(|bytes| Self { bytes, files })
    }

    pub(crate) fn lacks_files(self) -> bool {
        self.files.is_some_and(|files| files < FULL_FILES)
    }

    /// Whether the disk is full, for bytes or for files.
    pub(crate) fn is_full(self) -> bool {
        self.bytes < FULL_BYTES || self.lacks_files()
    }
}

/// Whether somebody found the disk full.
#[derive(Debug, Default)]
pub(crate) struct DiskFullFlag(AtomicBool);

impl DiskFullFlag {
    /// Somebody found no space where the disk has so much free, `None` if that is unknown.
    pub(crate) fn note_no_space(&self, free: Option<FreeSpace>) {
        if free.is_some_and(FreeSpace::is_full) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// Whether anybody found it full since this was asked the last time.
    pub(crate) fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_without_inodes_is_full() {
        let flag = DiskFullFlag::default();
        for (bytes, files, is_full) in [
            (1 << 40, Some(0), true),
            (1 << 40, Some(1_000_000), false),
            (1 << 40, None, false),
            (0, Some(1_000_000), true),
        ] {
            flag.note_no_space(Some(FreeSpace { bytes, files }));
            assert_eq!(flag.take(), is_full, "{bytes} bytes, {files:?} files");
        }
        flag.note_no_space(None);
        assert!(!flag.take());
    }
}
