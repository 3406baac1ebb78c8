//! Numbers in memory that one process makes and others see; knows not what they mean.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};

use crate::kernel::SharedMapping;

/// Most numbers in one array: 256 MiB.
pub const SHARED_WORDS_MAX: usize = 64 << 20;

const WORD_BYTES: usize = size_of::<AtomicU32>();

/// What a process may do with an array of numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SharedAccess {
    /// Look.
    Read,
    /// Look and change.
    Write,
}

/// An array of numbers that several processes see. Each number is read and written whole; there is
/// no order between numbers but the one that is asked for.
#[derive(Debug)]
pub struct SharedWords {
    mapping: SharedMapping,
    access: SharedAccess,
}

impl SharedWords {
    /// Makes an array of `len` zeros that this process may change, and the open file by which other
    /// processes get at it with the access `others`. Nobody can make it shorter or longer; with
    /// [`SharedAccess::Read`] nobody else can change it, whatever they do with the file.
    ///
    /// # Errors
    /// `InvalidInput` for an empty array or one that is too long; as the system says.
    pub fn create(len: usize, others: SharedAccess) -> io::Result<(Self, OwnedFd)> {
        let bytes = checked_bytes(len)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("bafs-words", flags)?;
        ftruncate(&file, bytes as u64)?;
        let words = Self {
            mapping: SharedMapping::new(file.as_fd(), len, SharedAccess::Write)?,
            access: SharedAccess::Write,
        };
        let mut seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        if others == SharedAccess::Read {
            seals |= SealFlags::FUTURE_WRITE;
        }
        fcntl_add_seals(&file, seals)?;
        Ok((words, file))
    }

    /// Maps an array of `len` numbers that another process made.
    ///
    /// # Errors
    /// `InvalidData` for a file that is no such array, could become shorter, or has another
    /// length; `PermissionDenied` for a wish to write what is only to be read.
    pub fn map(file: BorrowedFd<'_>, len: usize, access: SharedAccess) -> io::Result<Self> {
        let bytes = checked_bytes(len)?;
        let invalid = |_| io::Error::from(io::ErrorKind::InvalidData);
        // A file that could become shorter would end the process that looks at its end.
        let seals = fcntl_get_seals(file).map_err(invalid)?;
        let size = u64::try_from(fstat(file)?.st_size).unwrap_or(0);
        if !seals.contains(SealFlags::SHRINK) || size != bytes as u64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mapping = SharedMapping::new(file, len, access)?;
        Ok(Self { mapping, access })
    }

    /// How many numbers there are.
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Whether there are none: never.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number at `index`; `None` beyond the end.
    pub fn load(&self, index: usize, order: Ordering) -> Option<u32> {
        self.mapping.load(index, order)
    }

    /// The numbers, to be changed; `None` if this process may only look.
    pub fn words(&self) -> Option<&[AtomicU32]> {
        match self.access {
            SharedAccess::Write => Some(self.mapping.words()),
            SharedAccess::Read => None,
        }
    }
}

fn checked_bytes(len: usize) -> io::Result<usize> {
    if (1..=SHARED_WORDS_MAX).contains(&len) {
        Ok(len * WORD_BYTES)
    } else {
        Err(io::ErrorKind::InvalidInput.into())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::{Acquire, Release};

    use super::*;

    #[test]
    fn a_reader_sees_but_cannot_change_words() {
        let (made, file) = SharedWords::create(5000, SharedAccess::Read).expect("create");
        let seen = SharedWords::map(file.as_fd(), 5000, SharedAccess::Read).expect("map");
        made.words().expect("writable")[4999].store(7, Release);
        assert_eq!(seen.load(4999, Acquire), Some(7));
        assert_eq!(seen.load(0, Acquire), Some(0));
        assert_eq!(seen.load(5000, Acquire), None);
        assert!(seen.words().is_none());
        assert!(SharedWords::map(file.as_fd(), 5000, SharedAccess::Write).is_err());
        assert!(ftruncate(&file, 0).is_err());
        assert!(rustix::io::pwrite(&file, b"x", 0).is_err());
    }

    #[test]
    fn both_sides_may_write_if_created_so() {
        let (made, file) = SharedWords::create(2, SharedAccess::Write).expect("create");
        let seen = SharedWords::map(file.as_fd(), 2, SharedAccess::Write).expect("map");
        seen.words().expect("writable")[1].store(9, Release);
        assert_eq!(made.load(1, Acquire), Some(9));
        assert_eq!((made.len(), seen.is_empty()), (2, false));
        // The memory outlives the file.
        drop((file, made));
        assert_eq!(seen.load(1, Acquire), Some(9));
    }

    #[test]
    fn foreign_files_and_wrong_lengths_are_refused() {
        let (_made, file) = SharedWords::create(2, SharedAccess::Read).expect("create");
        assert!(SharedWords::map(file.as_fd(), 3, SharedAccess::Read).is_err());
        assert!(SharedWords::map(file.as_fd(), 1, SharedAccess::Read).is_err());
        assert!(SharedWords::create(0, SharedAccess::Read).is_err());
        assert!(SharedWords::create(SHARED_WORDS_MAX + 1, SharedAccess::Read).is_err());
        let plain = tempfile::tempfile().expect("file");
        plain.set_len(8).expect("length");
        assert!(SharedWords::map(plain.as_fd(), 2, SharedAccess::Read).is_err());
        let unsealed = memfd_create("x", MemfdFlags::ALLOW_SEALING).expect("memfd");
        ftruncate(&unsealed, 8).expect("length");
        assert!(SharedWords::map(unsealed.as_fd(), 2, SharedAccess::Read).is_err());
    }
}
