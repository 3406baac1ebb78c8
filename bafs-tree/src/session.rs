//! The view that one agent has of a tree, and the operations that it runs there.
//!
//! A [`Session`] has two tables. The inode table maps numbers to files, and counts how often the
//! kernel knows each. The handle table maps numbers to open files and directories. Both belong to
//! the session, and dropping it closes everything.
//!
//! [`Session::run`] (`operations.rs`) takes a [`FileOp`](bafs_proto::file_op::FileOp), the caller
//! (user, group, process), and the data of a write. It appends what a read returns to `out`, and
//! returns a [`FileResult`].
//!
//! **Numbers.** The session numbers files by the inode numbers of the host and handles from 1. An
//! agent that replies early must name a file before it exists. So it sends numbers of its own with
//! the operation, and [`Session::run_numbered`] makes the file under these.
//!
//! **Errors.** A failed operation returns the errno of the host. Others are `ESTALE` for an unknown
//! number, `EROFS` for a change in a read-only session, and `ENOSPC` at the limit. `EMFILE` means
//! that the job has used its share of descriptors, `ENFILE` that the process has none left. A
//! session retries once after `ENOSPC`, if it can drop deleted files that only it refers to.
//!
//! **Concurrency.** `run` takes `&self`, and many threads call it. Each table has its own mutex.
//! The order of two operations on one file is the order of their system calls.
//!
//! **Recovery.** A session that goes on after a restart of its server is made by
//! [`Session::resumed`]. It may open files whose mode forbids that by now, because the earlier
//! session had them open.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bafs_proto::file_op::{Attr, FileReply, FileResult, TreeStat};
use bafs_proto::ids::{HandleId, InodeNo};
use rustix::fs::{FileType, OFlags, Stat, fstat, fsync};

use crate::account::HostFileId;
use crate::descriptor_limits::{
    JobDescriptorUse, ReservedDescriptors, ReservedDescriptorsGuard, SynchronousOpen,
};
use crate::directory_stream::DirectoryStream;
use crate::errno::{self, Outcome};
use crate::file_reference::FileReference;
use crate::handles::{Handle, Handles, OpenDirectory, OpenFile};
use crate::host_file::{host_file_id, to_attr};
use crate::inodes::Inodes;
use crate::tree::Tree;

/// An agent's inode references and open handles. Dropping it closes everything.
#[derive(Debug)]
pub struct Session {
    // Before `tree`: their files are released into its account.
    handles: Mutex<Handles>,
    inodes: Mutex<Inodes>,
    tree: Arc<Tree>,
    pub(crate) writable: bool,
    pub(crate) is_resumed: bool,
    reports_btimes: bool,
    pub(crate) reserved_descriptors: ReservedDescriptorsGuard,
    pub(crate) descriptor_use: JobDescriptorUse,
    _session_token: Arc<()>,
}

impl Session {
    /// Starts a session of an agent.
    pub fn new(tree: Arc<Tree>, writable: bool) -> Self {
        let inodes = Mutex::new(Inodes::new(FileReference::root(&tree), tree.root_id()));
        Self {
            _session_token: tree.session_token(),
            handles: Mutex::default(),
            inodes,
            tree,
            writable,
            is_resumed: false,
            reports_btimes: true,
            reserved_descriptors: ReservedDescriptorsGuard::default(),
            descriptor_use: JobDescriptorUse::own_job(),
        }
    }

    /// Keeps so many descriptors of the process for files that are opened by given numbers
    /// ([`Self::run_numbered`]): what any session opens otherwise leaves them, but for those that
    /// resume, which must have what they had. They are given back with the session, or earlier by
    /// what this returns.
    pub fn reserve_descriptors(&mut self, count: u32) -> ReservedDescriptors {
        self.reserved_descriptors = ReservedDescriptorsGuard::new(count);
        self.reserved_descriptors.shared()
    }

    /// A session whose open files count for the job that has this share.
    #[must_use]
    pub fn with_descriptor_use(self, share: JobDescriptorUse) -> Self {
        Self {
            descriptor_use: share,
            ..self
        }
    }

    /// A session for an agent that need not know when files were made: all changes come from it, so
    /// it never meets another file under a number that it knows.
    #[must_use]
    pub fn without_btimes(self) -> Self {
        Self {
            reports_btimes: false,
            ..self
        }
    }

    /// A session that goes on with an earlier one: what that had open may have been shut to this
    /// server's own user meanwhile, or from the beginning, and opens nevertheless.
    #[must_use]
    pub fn resumed(self) -> Self {
        Self {
            is_resumed: true,
            ..self
        }
    }

    /// Bytes and files that the file system below has free, as far as it says so.
    pub fn disk_free(&self) -> (Option<u64>, Option<u64>) {
        let stat = self.tree.stat();
        (stat.disk_free_bytes, stat.disk_free_files)
    }

    /// What files without names hold counts as free: it is, for whoever needs it, unless another
    /// session refers to them too. A writer promises space by this number, so it is not too high.
    pub(crate) fn stat_tree(&self) -> TreeStat {
        let stat = self.tree.stat();
        if self.tree.account().is_none() || !self.tree.has_one_session() {
            return stat;
        }
        let (bytes, files) = self.inodes().reclaimable_use();
        TreeStat {
            free_bytes: (stat.free_bytes + bytes).min(stat.size_bytes),
            free_files: (stat.free_files + files).min(stat.size_files),
            ..stat
        }
    }

    pub(crate) fn open(&self, (ino, flags): (InodeNo, i32), opener: u32) -> FileResult {
        let file_reference = self.file_reference(ino)?;
        if file_reference.kind() == FileType::Directory {
            return Err(errno::ISDIR);
        }
        let wanted = OFlags::from_bits_retain(flags.cast_unsigned());
        let kept = OFlags::TRUNC | OFlags::NOATIME | OFlags::SYNC | OFlags::DSYNC;
        let writes = wanted.intersects(OFlags::WRONLY | OFlags::RDWR);
        // A cache that collects writes reads what surrounds them, also where the program only
        // writes.
        let access = if writes { OFlags::RDWR } else { OFlags::RDONLY };
        let open = || match file_reference.open(access | (wanted & kept)) {
            Err(errno::ACCESS) if writes => file_reference.open(OFlags::WRONLY | (wanted & kept)),
            // Whoever asks may have the right, and this process not.
            Err(errno::PERM) => {
                file_reference.open(access | (wanted & kept.difference(OFlags::NOATIME)))
            }
            other => other,
        };
        let open = || match open() {
            Err(errno::ACCESS) if self.is_resumed => file_reference.with_owner_access(open),
            other => other,
        };
        let fd = match file_reference.account_entry() {
            Some((account, state)) if wanted.contains(OFlags::TRUNC) => {
                let mut charged = state.lock();
                let fd = open()?;
                let now = fstat(&fd).map_or(*charged, |stat| self.tree.charge_bytes(&stat));
                account.settle(&mut charged, now, 0);
                fd
            }
            _ => open()?,
        };
        let stat = fstat(&fd).map_err(errno::from_host)?;
        self.register_open_file((to_attr(ino, &stat), opener), fd, !writes)
    }

    /// A file that the agent refers to and that has at least so many bytes, open for somebody else
    /// to read, with its size; `None` when there is no such file.
    pub fn open_large(&self, ino: InodeNo, bytes_min: u64) -> Option<(OwnedFd, u64)> {
        let file_reference = self.file_reference(ino).ok()?;
        let size = u64::try_from(file_reference.stat().ok()?.st_size).ok()?;
        if file_reference.kind() != FileType::RegularFile || size < bytes_min {
            return None;
        }
        Some((file_reference.open(OFlags::RDONLY).ok()?, size))
    }

    /// Keeps an open file.
    pub(crate) fn register_open_file(
        &self,
        (attr, opener): (Attr, u32),
        fd: OwnedFd,
        reads_only: bool,
    ) -> FileResult {
        let file_reference = {
            let mut inodes = self.inodes();
            let file_reference = inodes.get(attr.ino)?;
            inodes.note_handle_opened(attr.ino);
            file_reference
        };
        let file = Arc::new(OpenFile {
            ino: attr.ino,
            fd,
            is_read_only: reads_only,
            file_reference,
            synchronous_open: Some(SynchronousOpen::new(&self.descriptor_use, opener)),
        });
        let handle = self.handles().insert(Handle::File(file));
        Ok(FileReply::Opened { handle, attr })
    }

    pub(crate) fn release(&self, handle: HandleId) -> FileResult {
        let file = self.handles().remove_file(handle)?;
        if file.is_read_only && file.file_reference.is_surely_linked() {
            // It has changed nothing, and there is nothing to keep.
            self.inodes().note_handle_closed(file.ino);
            return Ok(FileReply::Done);
        }
        let stat = file.file_reference.settle(&file.fd);
        self.note_closed(file.ino, &file.file_reference, stat);
        Ok(FileReply::Done)
    }

    /// Takes note that a handle is gone.
    fn note_closed(&self, ino: InodeNo, file_reference: &FileReference, stat: Outcome<Stat>) {
        self.inodes().note_handle_closed(ino);
        if let Ok(stat) = stat
            && stat.st_nlink == 0
            && let Ok(fd) = file_reference.path_descriptor()
        {
            self.mark_unlinked(&stat, &fd);
        }
    }

    pub(crate) fn open_directory(&self, ino: InodeNo, opener: u32) -> FileResult {
        let file_reference = match (self.file_reference(ino), self.last_attr(ino)) {
            (Err(_), Some(attr)) => {
                // A program's working directory, say: it opens as everywhere, and is empty.
                let handle = self.handles().insert(Handle::Removed);
                return Ok(FileReply::Opened { handle, attr });
            }
            (file_reference, _) => file_reference?,
        };
        if file_reference.kind() != FileType::Directory {
            return Err(errno::NOTDIR);
        }
        let open = || file_reference.open(OFlags::RDONLY | OFlags::DIRECTORY);
        let fd = match open() {
            Err(errno::ACCESS) if self.is_resumed => file_reference.with_owner_access(open)?,
            other => other?,
        };
        let stat = fstat(&fd).map_err(errno::from_host)?;
        self.inodes().note_handle_opened(ino);
        let stream = Mutex::new(DirectoryStream::new(fd));
        let directory = Arc::new(OpenDirectory {
            ino,
            stream,
            file_reference,
            _synchronous_open: SynchronousOpen::new(&self.descriptor_use, opener),
        });
        let handle = self.handles().insert(Handle::Directory(directory));
        Ok(FileReply::Opened {
            handle,
            attr: to_attr(ino, &stat),
        })
    }

    pub(crate) fn release_directory(&self, handle: HandleId) -> FileResult {
        let directory = self.handles().remove_directory(handle)?;
        if let Some(directory) = directory {
            let stat = directory.file_reference.stat();
            self.note_closed(directory.ino, &directory.file_reference, stat);
        }
        Ok(FileReply::Done)
    }

    pub(crate) fn sync_directory(&self, ino: InodeNo) -> FileResult {
        match self
            .file_reference(ino)?
            .open(OFlags::RDONLY | OFlags::DIRECTORY)
        {
            Ok(fd) => fsync(fd).map_err(errno::from_host)?,
            // It was shut to us after it was opened.
            Err(errno::ACCESS) => {
                let directory = self.handles().open_directory(ino).ok_or(errno::ACCESS)?;
                lock(&directory.stream).sync()?;
            }
            Err(error) => return Err(error),
        }
        Ok(FileReply::Done)
    }

    pub(crate) fn reports_btimes(&self) -> bool {
        self.reports_btimes
    }

    pub(crate) fn tree(&self) -> &Arc<Tree> {
        &self.tree
    }

    pub(crate) fn file_reference(&self, ino: InodeNo) -> Outcome<Arc<FileReference>> {
        self.inodes().get(ino)
    }

    pub(crate) fn open_file(&self, handle: HandleId) -> Outcome<Arc<OpenFile>> {
        self.handles().file(handle)
    }

    /// The file of the host with this identity, if the agent refers to it.
    pub(crate) fn find_referred(&self, identity: HostFileId) -> Option<Arc<FileReference>> {
        self.inodes().find_by_host_file_id(identity)
    }

    /// Counts a reference to what `file_reference` holds.
    pub(crate) fn refer(&self, file_reference: FileReference, stat: &Stat) -> InodeNo {
        let (ino, unneeded) = self
            .inodes()
            .add_reference(host_file_id(stat), file_reference);
        drop(unneeded);
        ino
    }

    pub(crate) fn forget(&self, ino: InodeNo, count: u64) {
        let released = self.inodes().forget(ino, count);
        drop(released);
    }

    /// A file has no names any more, as `found` shows: it stays for whoever still knows its number,
    /// as long as its space is not needed.
    pub(crate) fn mark_unlinked(&self, stat: &Stat, found: &Arc<OwnedFd>) {
        let last = to_attr(InodeNo(0), stat);
        let released = self.inodes().mark_unlinked(host_file_id(stat), last, found);
        drop(released);
    }

    /// Frees the space of files without names that nobody has open; whether there were any.
    pub(crate) fn release_unlinked(&self) -> bool {
        let released = self.inodes().release_unlinked();
        !released.is_empty()
    }

    pub(crate) fn last_attr(&self, ino: InodeNo) -> Option<Attr> {
        self.inodes().last_attr(ino)
    }

    pub(crate) fn inodes(&self) -> MutexGuard<'_, Inodes> {
        lock(&self.inodes)
    }

    pub(crate) fn handles(&self) -> MutexGuard<'_, Handles> {
        lock(&self.handles)
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
