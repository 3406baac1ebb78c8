//! Open files and directory streams of a session, by number.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use bafs_proto::ids::{HandleId, InodeNo};
use bafs_proto::limits::AGENT_NUMBER_FIRST;

use crate::descriptor_limits::SynchronousOpen;
use crate::directory_stream::DirectoryStream;
use crate::errno::{self, Outcome};
use crate::file_reference::FileReference;

/// An open file.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) ino: InodeNo,
    /// Closed before the anchor is let go: the anchor's end frees the space.
    pub(crate) fd: OwnedFd,
    /// Whether nothing is written through it.
    pub(crate) is_read_only: bool,
    pub(crate) file_reference: Arc<FileReference>,
    /// `None` if its opening was promised.
    pub(crate) synchronous_open: Option<SynchronousOpen>,
}

/// An open directory.
#[derive(Debug)]
pub(crate) struct OpenDirectory {
    pub(crate) ino: InodeNo,
    pub(crate) stream: Mutex<DirectoryStream>,
    pub(crate) file_reference: Arc<FileReference>,
    pub(crate) _synchronous_open: SynchronousOpen,
}

/// Something open.
#[derive(Debug, Clone)]
pub(crate) enum Handle {
    File(Arc<OpenFile>),
    Directory(Arc<OpenDirectory>),
    /// A directory that was removed while somebody was in it. Nobody can list it.
    Removed,
}

/// Open things by number.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    open: HashMap<u64, Handle>,
    last: u64,
    /// Open files whose opening was promised.
    early_count: u64,
}

impl Handles {
    pub(crate) fn insert(&mut self, handle: Handle) -> HandleId {
        self.last += 1;
        self.open.insert(self.last, handle);
        HandleId(self.last)
    }

    /// Whether an agent may give a handle this number.
    pub(crate) fn is_assignable(&self, wished: HandleId) -> bool {
        wished.0 >= AGENT_NUMBER_FIRST && !self.open.contains_key(&wished.0)
    }

    /// Open files whose opening was promised.
    pub(crate) fn early_count(&self) -> u64 {
        self.early_count
    }

    /// Gives a file that was just opened, and its handle, other numbers; the handle's must be free
    /// and in the agents' range.
    pub(crate) fn renumber(
        &mut self,
        handle: HandleId,
        (wished, ino): (HandleId, InodeNo),
        is_promised: bool,
    ) -> Outcome<()> {
        if !self.is_assignable(wished) {
            return Err(errno::INVAL);
        }
        let Some(Handle::File(file)) = self.open.remove(&handle.0) else {
            return Err(errno::BADF);
        };
        let file = Arc::into_inner(file).ok_or(errno::BUSY)?;
        let in_time = file.synchronous_open.filter(|_| !is_promised);
        self.early_count += u64::from(is_promised);
        let file = Arc::new(OpenFile {
            ino,
            synchronous_open: in_time,
            ..file
        });
        self.open.insert(wished.0, Handle::File(file));
        Ok(())
    }

    pub(crate) fn file(&self, handle: HandleId) -> Outcome<Arc<OpenFile>> {
        match self.open.get(&handle.0) {
            Some(Handle::File(file)) => Ok(file.clone()),
            _ => Err(errno::BADF),
        }
    }

    pub(crate) fn directory(&self, handle: HandleId) -> Outcome<Arc<OpenDirectory>> {
        match self.open.get(&handle.0) {
            Some(Handle::Directory(directory)) => Ok(directory.clone()),
            _ => Err(errno::BADF),
        }
    }

    /// An open directory of this number.
    pub(crate) fn open_directory(&self, ino: InodeNo) -> Option<Arc<OpenDirectory>> {
        self.open.values().find_map(|handle| match handle {
            Handle::Directory(directory) if directory.ino == ino => Some(directory.clone()),
            _ => None,
        })
    }

    pub(crate) fn remove_file(&mut self, handle: HandleId) -> Outcome<Arc<OpenFile>> {
        let file = self.file(handle)?;
        self.open.remove(&handle.0);
        self.early_count -= u64::from(file.synchronous_open.is_none());
        Ok(file)
    }

    /// Forgets an open directory; `None` if there was nothing in it to close.
    pub(crate) fn remove_directory(
        &mut self,
        handle: HandleId,
    ) -> Outcome<Option<Arc<OpenDirectory>>> {
        if let Some(Handle::Removed) = self.open.get(&handle.0) {
            self.open.remove(&handle.0);
            return Ok(None);
        }
        let directory = self.directory(handle)?;
        self.open.remove(&handle.0);
        Ok(Some(directory))
    }
}
