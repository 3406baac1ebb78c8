//! Directory streams with positions that stay valid while the directory changes.

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use bafs_proto::file_op::ByName;
use rustix::fs::{FileType, RawDir, SeekFrom, fsync, seek};

use crate::errno::{self, Outcome};

/// Bytes of entries that are read from the system at once.
const BUFFER_BYTES: usize = 32 << 10;

/// One name as the host's file system gives it.
#[derive(Debug, Clone)]
pub(crate) struct RawEntry {
    pub(crate) name: ByName,
    pub(crate) ino: u64,
    pub(crate) kind: FileType,
    /// The position behind the entry.
    pub(crate) cookie: u64,
}

/// A place in a directory. Positions are the host's own (`d_off`), which survive changes.
#[derive(Debug)]
pub(crate) struct DirectoryStream {
    fd: OwnedFd,
    /// Where the first entry of `buffered` follows.
    position: u64,
    buffered: VecDeque<RawEntry>,
}

impl DirectoryStream {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self {
            fd,
            position: 0,
            buffered: VecDeque::new(),
        }
    }

    /// Goes to the position `cookie`; 0 starts afresh and sees later changes.
    pub(crate) fn seek_to(&mut self, cookie: u64) -> Outcome<()> {
        if cookie != self.position || cookie == 0 {
            self.buffered.clear();
            seek(&self.fd, SeekFrom::Start(cookie)).map_err(errno::from_host)?;
            self.position = cookie;
        }
        Ok(())
    }

    /// The next entry, still in the stream; `None` at the end.
    pub(crate) fn peek(&mut self) -> Outcome<Option<&RawEntry>> {
        if self.buffered.is_empty() {
            self.fill()?;
        }
        Ok(self.buffered.front())
    }

    /// Goes past the entry that was shown last.
    pub(crate) fn advance(&mut self) {
        if let Some(entry) = self.buffered.pop_front() {
            self.position = entry.cookie;
        }
    }

    /// Brings the directory to the disk.
    pub(crate) fn sync(&self) -> Outcome<()> {
        fsync(&self.fd).map_err(errno::from_host)
    }

    fn fill(&mut self) -> Outcome<()> {
        let mut buffer = [MaybeUninit::<u8>::uninit(); BUFFER_BYTES];
        let mut entries = RawDir::new(&self.fd, &mut buffer);
        while let Some(entry) = entries.next() {
            let entry = entry.map_err(errno::from_host)?;
            self.buffered.push_back(RawEntry {
                name: entry.file_name().to_bytes().to_vec(),
                ino: entry.ino(),
                kind: entry.file_type(),
                cookie: entry.next_entry_cookie(),
            });
            if entries.is_buffer_empty() {
                break;
            }
        }
        Ok(())
    }
}
