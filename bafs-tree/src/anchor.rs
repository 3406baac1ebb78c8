//! A file of the tree, wherever its names go; knows no names and no numbers.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, StatxFlags, chmod, fstat, openat, statx};

use crate::account::{Account, FileState, Identity};
use crate::descriptors::Slot;
use crate::errno::{self, Outcome};
use crate::tree::Tree;

/// Holds a file wherever its names go, until it is dropped.
#[derive(Debug)]
pub(crate) struct Anchor {
    slot: Arc<Slot>,
    kind: FileType,
    state: Option<Arc<FileState>>,
    tree: Arc<Tree>,
}

impl Anchor {
    /// Holds the file that `fd` shows.
    pub(crate) fn new(tree: &Arc<Tree>, fd: OwnedFd) -> Outcome<(Self, Stat)> {
        let stat = fstat(&fd).map_err(errno::of)?;
        let mut state = None;
        if let Some(account) = tree.account() {
            let (file, new) = account.anchor(identity(&stat), tree.charge(&stat));
            // The last name may have gone before the file was registered (again).
            if new && fstat(&fd).is_ok_and(|stat| stat.st_nlink == 0) {
                file.set_unlinked();
            }
            state = Some(file);
        }
        Ok((
            Self {
                slot: Slot::new(Arc::new(fd)),
                kind: kind(&stat),
                state,
                tree: tree.clone(),
            },
            stat,
        ))
    }

    /// Holds a file that was just made and whose place in the account is reserved.
    pub(crate) fn new_made(tree: &Arc<Tree>, fd: OwnedFd) -> Outcome<(Self, Stat)> {
        let stat = fstat(&fd).map_err(errno::of)?;
        let state = tree
            .account()
            .map(|account| account.anchor_new(identity(&stat)));
        Ok((
            Self {
                slot: Slot::new(Arc::new(fd)),
                kind: kind(&stat),
                state,
                tree: tree.clone(),
            },
            stat,
        ))
    }

    /// Holds the root of a tree.
    pub(crate) fn root(tree: &Arc<Tree>) -> Self {
        let state = tree
            .account()
            .map(|account| account.anchor(tree.identity(), 0).0);
        Self {
            slot: Slot::new(tree.root().clone()),
            kind: FileType::Directory,
            state,
            tree: tree.clone(),
        }
    }

    /// Finds a name in the directory that `parent` holds; follows no link.
    pub(crate) fn find(parent: &Self, name: &CStr) -> Outcome<(Self, Stat)> {
        Self::new(&parent.tree, open_path(parent.fd()?, name)?)
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
    pub(crate) fn fd(&self) -> Outcome<Arc<OwnedFd>> {
        self.slot.fd(self.tree.mount())
    }

    /// The file is referred to for long: its descriptor need not be open all the time.
    pub(crate) fn refer(&self) {
        if self.tree.mount().is_some() {
            self.slot.may_close();
        }
    }

    /// The file has lost its last name; `fd` still shows it.
    pub(crate) fn keep(&self, fd: &Arc<OwnedFd>) {
        self.slot.keep(fd);
    }

    pub(crate) fn stat(&self) -> Outcome<Stat> {
        fstat(self.fd()?).map_err(errno::of)
    }

    /// When the file was made, in nanoseconds since the Unix epoch; 0 where the file system does
    /// not tell.
    pub(crate) fn born_ns(&self) -> u64 {
        let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
        let Ok(fd) = self.fd() else { return 0 };
        match statx(fd, c"", flags, StatxFlags::BTIME) {
            Ok(told) if told.stx_mask & StatxFlags::BTIME.bits() != 0 => {
                let seconds = u64::try_from(told.stx_btime.tv_sec).unwrap_or(0);
                seconds * 1_000_000_000 + u64::from(told.stx_btime.tv_nsec)
            }
            _ => 0,
        }
    }

    /// The account and the file's place in it, if the tree has a limit.
    pub(crate) fn charged(&self) -> Option<(&Account, &FileState)> {
        Some((self.tree.account()?, self.state.as_deref()?))
    }

    /// A path that leads to the file while this lives, for calls that do not take this kind of
    /// descriptor.
    pub(crate) fn proc_path(&self) -> Outcome<ProcPath> {
        let fd = self.fd()?;
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
        let opened = match own_descriptors() {
            Some(own) => {
                let fd = self.fd()?;
                openat(own, fd.as_raw_fd().to_string(), flags, Mode::empty())
            }
            None => rustix::fs::open(self.proc_path()?.as_str(), flags, Mode::empty()),
        };
        opened.map_err(errno::of)
    }

    /// Does something while the file's owner may read and write it. Whoever dies meanwhile leaves
    /// it so.
    pub(crate) fn while_open_to_owner<T>(&self, act: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
        let _alone = self.tree.lock_modes();
        let mode = Mode::from_raw_mode(self.stat()?.st_mode & 0o7777);
        let path = self.proc_path()?;
        chmod(path.as_str(), mode | Mode::RUSR | Mode::WUSR).map_err(errno::of)?;
        let done = act();
        chmod(path.as_str(), mode).map_err(errno::of)?;
        done
    }

    /// Whether the file surely has no capability of its own: it was made by this tree, which has
    /// given it no attribute since.
    pub(crate) fn lacks_capability(&self) -> bool {
        let state = self.state.as_ref();
        state.is_some_and(|state| state.lacks_capability())
    }

    /// Takes note that the file gets an extended attribute.
    pub(crate) fn set_attributed(&self) {
        if let Some(state) = &self.state {
            state.set_attributed();
        }
    }

    /// Whether a name leads to the file, as far as all of its changes come through this tree.
    pub(crate) fn surely_has_name(&self) -> bool {
        let state = self.state.as_ref();
        state.is_some_and(|state| !state.is_unlinked())
    }

    /// Takes note that no name leads to the file any more.
    pub(crate) fn set_unlinked(&self) {
        if let Some(state) = &self.state {
            state.set_unlinked();
        }
    }

    /// Brings the file's charge up to date, and gives its attributes, as `fd` shows them.
    pub(crate) fn settle(&self, fd: impl AsFd) -> Outcome<Stat> {
        let Some((account, state)) = self.charged() else {
            return fstat(fd).map_err(errno::of);
        };
        let mut charged = state.lock();
        let stat = fstat(fd).map_err(errno::of)?;
        account.settle(&mut charged, self.tree.charge(&stat), 0);
        Ok(stat)
    }
}

impl Drop for Anchor {
    fn drop(&mut self) {
        if let (Some(account), Some(state)) = (self.tree.account(), &self.state) {
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

/// Opens a name as a path only.
pub(crate) fn open_path(parent: impl AsFd, name: &CStr) -> Outcome<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(parent, name, flags, Mode::empty()).map_err(errno::of)
}

/// A path that leads to what a descriptor shows.
pub(crate) fn proc_path(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

/// The directory where this process's descriptors are files: a shorter way than by its path, for
/// what happens at each open. No copy of the process ever gets here, whose numbers would be others.
fn own_descriptors() -> Option<&'static OwnedFd> {
    static OWN: OnceLock<Option<OwnedFd>> = OnceLock::new();
    let open = || {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open("/proc/self/fd", flags, Mode::empty()).ok()
    };
    OWN.get_or_init(open).as_ref()
}

pub(crate) fn identity(stat: &Stat) -> Identity {
    (stat.st_dev, stat.st_ino)
}

pub(crate) fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}
