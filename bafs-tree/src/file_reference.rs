//! A file of the tree, wherever its names go; knows no names and no numbers.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, StatxFlags, chmod, fstat, openat, statx};

use crate::account::{Account, FileState};
use crate::descriptor_limits::PathDescriptor;
use crate::errno::{self, Outcome};
use crate::host_file::{file_type, host_file_id, open_path, proc_path};
use crate::tree::Tree;

/// Holds a file wherever its names go, until it is dropped.
#[derive(Debug)]
pub(crate) struct FileReference {
    descriptor: Arc<PathDescriptor>,
    kind: FileType,
    account_state: Option<Arc<FileState>>,
    tree: Arc<Tree>,
}

impl FileReference {
    /// Holds the file that `fd` shows.
    pub(crate) fn new(tree: &Arc<Tree>, fd: OwnedFd) -> Outcome<(Self, Stat)> {
        let stat = fstat(&fd).map_err(errno::from_host)?;
        let mut state = None;
        if let Some(account) = tree.account() {
            let (file, new) = account.register(host_file_id(&stat), tree.charge_bytes(&stat));
            // The last name may have gone before the file was registered (again).
            if new && fstat(&fd).is_ok_and(|stat| stat.st_nlink == 0) {
                file.set_unlinked();
            }
            state = Some(file);
        }
        Ok((
            Self {
                descriptor: PathDescriptor::new(Arc::new(fd)),
                kind: file_type(&stat),
                account_state: state,
                tree: tree.clone(),
            },
            stat,
        ))
    }

    /// Holds a file that was just made and whose place in the account is reserved.
    pub(crate) fn new_created(tree: &Arc<Tree>, fd: OwnedFd) -> Outcome<(Self, Stat)> {
        let stat = fstat(&fd).map_err(errno::from_host)?;
        let state = tree
            .account()
            .map(|account| account.register_new(host_file_id(&stat)));
        Ok((
            Self {
                descriptor: PathDescriptor::new(Arc::new(fd)),
                kind: file_type(&stat),
                account_state: state,
                tree: tree.clone(),
            },
            stat,
        ))
    }

    /// Holds the root of a tree.
    pub(crate) fn root(tree: &Arc<Tree>) -> Self {
        let state = tree
            .account()
            .map(|account| account.register(tree.root_id(), 0).0);
        Self {
            descriptor: PathDescriptor::new(tree.root().clone()),
            kind: FileType::Directory,
            account_state: state,
            tree: tree.clone(),
        }
    }

    /// Finds a name in the directory that `parent` holds; follows no link.
    pub(crate) fn find(parent: &Self, name: &CStr) -> Outcome<(Self, Stat)> {
        Self::new(&parent.tree, open_path(parent.path_descriptor()?, name)?)
    }

    pub(crate) fn tree(&self) -> &Arc<Tree> {
        &self.tree
    }

    pub(crate) fn kind(&self) -> FileType {
        self.kind
    }

    /// A descriptor that opens nothing (`O_PATH`).
    ///
    /// # Errors
    /// `ESTALE` when the file is gone, `ENFILE` when the process has no descriptor left.
    pub(crate) fn path_descriptor(&self) -> Outcome<Arc<OwnedFd>> {
        self.descriptor.open_descriptor(self.tree.mount())
    }

    /// The file is referred to for long: its descriptor need not be open all the time.
    pub(crate) fn allow_closing(&self) {
        if self.tree.mount().is_some() {
            self.descriptor.make_closable();
        }
    }

    /// The file has lost its last name; `fd` still shows it.
    pub(crate) fn pin_descriptor(&self, fd: &Arc<OwnedFd>) {
        self.descriptor.pin(fd);
    }

    pub(crate) fn stat(&self) -> Outcome<Stat> {
        fstat(self.path_descriptor()?).map_err(errno::from_host)
    }

    /// When the file was made, in nanoseconds since the Unix epoch; 0 where the file system does
    /// not tell.
    pub(crate) fn btime_ns(&self) -> u64 {
        let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
        let Ok(fd) = self.path_descriptor() else {
            return 0;
        };
        match statx(fd, c"", flags, StatxFlags::BTIME) {
            Ok(told) if told.stx_mask & StatxFlags::BTIME.bits() != 0 => {
                let seconds = u64::try_from(told.stx_btime.tv_sec).unwrap_or(0);
                seconds * 1_000_000_000 + u64::from(told.stx_btime.tv_nsec)
            }
            _ => 0,
        }
    }

    /// The account and the file's place in it, if the tree has a limit.
    pub(crate) fn account_entry(&self) -> Option<(&Account, &FileState)> {
        Some((self.tree.account()?, self.account_state.as_deref()?))
    }

    /// A path that leads to the file while this lives, for calls that do not take this kind of
    /// descriptor.
    pub(crate) fn proc_path(&self) -> Outcome<ProcPath> {
        let fd = self.path_descriptor()?;
        Ok(ProcPath {
            path: proc_path(&fd),
            _fd: fd,
        })
    }

    /// Opens the file itself for reading or writing. Only regular files and directories: to open
    /// a FIFO or a device could block for ever or act on hardware.
    pub(crate) fn open(&self, flags: OFlags) -> Outcome<OwnedFd> {
        match self.kind {
            FileType::RegularFile | FileType::Directory => {}
            FileType::Symlink => return Err(errno::LOOP),
            _ => return Err(errno::NXIO),
        }
        let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY;
        let opened = match own_descriptor_directory() {
            Some(own) => {
                let fd = self.path_descriptor()?;
                openat(own, fd.as_raw_fd().to_string(), flags, Mode::empty())
            }
            None => rustix::fs::open(self.proc_path()?.as_str(), flags, Mode::empty()),
        };
        opened.map_err(errno::from_host)
    }

    /// Does something while the file's owner may read and write it. Whoever dies meanwhile leaves
    /// it so.
    pub(crate) fn with_owner_access<T>(&self, act: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
        let _alone = self.tree.lock_modes();
        let mode = Mode::from_raw_mode(self.stat()?.st_mode & 0o7777);
        let path = self.proc_path()?;
        chmod(path.as_str(), mode | Mode::RUSR | Mode::WUSR).map_err(errno::from_host)?;
        let done = act();
        chmod(path.as_str(), mode).map_err(errno::from_host)?;
        done
    }

    /// Whether the file surely has no capability of its own: it was made by this tree, which has
    /// given it no attribute since.
    pub(crate) fn lacks_capability(&self) -> bool {
        let state = self.account_state.as_ref();
        state.is_some_and(|state| state.lacks_capability())
    }

    /// Takes note that the file gets an extended attribute.
    pub(crate) fn note_xattr(&self) {
        if let Some(state) = &self.account_state {
            state.note_xattr();
        }
    }

    /// Whether a name leads to the file, as far as all of its changes come through this tree.
    pub(crate) fn is_surely_linked(&self) -> bool {
        let state = self.account_state.as_ref();
        state.is_some_and(|state| !state.is_unlinked())
    }

    /// Takes note that no name leads to the file any more.
    pub(crate) fn set_unlinked(&self) {
        if let Some(state) = &self.account_state {
            state.set_unlinked();
        }
    }

    /// Brings the file's charge up to date, and gives its attributes, as `fd` shows them.
    pub(crate) fn settle(&self, fd: impl AsFd) -> Outcome<Stat> {
        let Some((account, state)) = self.account_entry() else {
            return fstat(fd).map_err(errno::from_host);
        };
        let mut charged = state.lock();
        let stat = fstat(fd).map_err(errno::from_host)?;
        account.settle(&mut charged, self.tree.charge_bytes(&stat), 0);
        Ok(stat)
    }
}

impl Drop for FileReference {
    fn drop(&mut self) {
        if let (Some(account), Some(state)) = (self.tree.account(), &self.account_state) {
            account.release(state);
        }
    }
}

/// A path that leads to an open file.
pub(crate) struct ProcPath {
    path: String,
    _fd: Arc<OwnedFd>,
}

impl ProcPath {
    pub(crate) fn as_str(&self) -> &str {
        &self.path
    }
}

/// The directory where this process's descriptors are files: a shorter way than by its path, for
/// what happens at each open. No copy of the process ever gets here, whose numbers would be others.
fn own_descriptor_directory() -> Option<&'static OwnedFd> {
    static OWN: OnceLock<Option<OwnedFd>> = OnceLock::new();
    let open = || {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open("/proc/self/fd", flags, Mode::empty()).ok()
    };
    OWN.get_or_init(open).as_ref()
}
