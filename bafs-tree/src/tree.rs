//! One directory tree: where it is, what it may take, what it takes. Runs no operation.

use std::ffi::CString;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bafs_proto::file_op::TreeStat;
use rustix::fs::{
    FileType, Mode, OFlags, RawDir, Stat, chmod, fstat, fstatfs, fstatvfs, open, openat,
};
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit};

use crate::account::{Account, HostFileId, Limit};
use crate::descriptor_limits::can_open_by_handle;
use crate::host_file::{file_type, host_file_id, open_path, proc_path};

/// The root's own blocks up to so many bytes are not charged: an empty tree uses nothing.
pub const ROOT_FREE_BYTES: u64 = 4096;

const EXT4_MAGIC: i64 = 0xef53;
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// A directory tree with its accounting, shared by all its sessions. Without a limit nothing is
/// counted.
#[derive(Debug)]
pub struct Tree {
    root: Arc<OwnedFd>,
    root_id: HostFileId,
    account: Option<Account>,
    reported_use: Option<Arc<TreeUse>>,
    hidden: Option<Vec<u8>>,
    is_privileged: bool,
    /// A descriptor by which files can be opened again by their handles, where they can.
    mount: Option<OwnedFd>,
    block_bytes: u64,
    is_ext4: bool,
    is_tmpfs: bool,
    /// Held while the mode of a file is set, also for a moment only.
    mode_lock: Mutex<()>,
    /// Each session has one more, so that they are counted.
    session_token: Arc<()>,
}

/// The use of a tree that another process accounts for, as far as that tells it.
#[derive(Debug)]
pub struct TreeUse {
    limit: Limit,
    bytes: AtomicU64,
    files: AtomicU64,
}

impl TreeUse {
    /// The use of a tree with this limit.
    pub fn new(limit: Limit, (bytes, files): (u64, u64)) -> Self {
        Self {
            limit,
            bytes: bytes.into(),
            files: files.into(),
        }
    }

    /// Takes note of bytes and files in use.
    pub fn set(&self, (bytes, files): (u64, u64)) {
        self.bytes.store(bytes, Relaxed);
        self.files.store(files, Relaxed);
    }

    /// Bytes and files in use, as last told.
    pub fn get(&self) -> (u64, u64) {
        (self.bytes.load(Relaxed), self.files.load(Relaxed))
    }
}

impl Tree {
    /// Opens the tree below the directory `root`. With a limit the tree is walked once to count
    /// what it uses, and nothing but this value may change it from then on; without one nothing
    /// is counted.
    ///
    /// # Errors
    /// As the system says when the directory cannot be opened or walked.
    pub fn open(root: &Path, limit: Option<Limit>) -> std::io::Result<Arc<Self>> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Self::open_at(open(root, flags, Mode::empty())?, limit, None)
    }

    /// Opens the tree below the directory that `root` shows. Sessions do not see the name
    /// `hidden` in the root and cannot make or remove it.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_at(
        root: OwnedFd,
        limit: Option<Limit>,
        hidden: Option<&[u8]>,
    ) -> std::io::Result<Arc<Self>> {
        let tree = Self::new(root, limit, hidden)?;
        if let Some(account) = &tree.account {
            tree.count_all(account)?;
        }
        Ok(Arc::new(tree))
    }

    /// Opens a tree that another process may change and accounts for: only for sessions that do
    /// not write. Counts nothing, and shows the use that is told.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_read_only(root: OwnedFd, told: Arc<TreeUse>) -> std::io::Result<Arc<Self>> {
        let mut tree = Self::new(root, None, None)?;
        tree.reported_use = Some(told);
        Ok(Arc::new(tree))
    }

    fn new(root: OwnedFd, limit: Option<Limit>, hidden: Option<&[u8]>) -> std::io::Result<Self> {
        raise_descriptor_limit();
        let stat = fstat(&root)?;
        if file_type(&stat) != FileType::Directory {
            return Err(rustix::io::Errno::NOTDIR.into());
        }
        Ok(Self {
            root_id: host_file_id(&stat),
            account: limit.map(Account::new),
            reported_use: None,
            hidden: hidden.map(<[u8]>::to_vec),
            is_privileged: geteuid().is_root(),
            mount: handle_mount(&root),
            is_ext4: fstatfs(&root).is_ok_and(|stat| stat.f_type == EXT4_MAGIC),
            is_tmpfs: fstatfs(&root).is_ok_and(|stat| stat.f_type == TMPFS_MAGIC),
            block_bytes: fstatvfs(&root)?.f_frsize.max(512),
            root: Arc::new(root),
            mode_lock: Mutex::default(),
            session_token: Arc::default(),
        })
    }

    /// Keeps others from setting the mode of a file.
    pub(crate) fn lock_modes(&self) -> MutexGuard<'_, ()> {
        self.mode_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the file system below is ext4, of which more is known than of others.
    pub(crate) fn is_ext4(&self) -> bool {
        self.is_ext4
    }

    /// Whether the file system below is tmpfs, whose holes are exact.
    pub(crate) fn is_tmpfs(&self) -> bool {
        self.is_tmpfs
    }

    /// What a session holds while it lasts.
    pub(crate) fn session_token(&self) -> Arc<()> {
        self.session_token.clone()
    }

    /// Whether there is only one session: nobody else keeps files without names.
    pub(crate) fn has_one_session(&self) -> bool {
        Arc::strong_count(&self.session_token) <= 2
    }

    /// Limit and use; without a limit those of the host's file system.
    pub fn stat(&self) -> TreeStat {
        let counted = self.account.as_ref().map(|it| (it.limit(), it.used()));
        let told = || self.reported_use.as_ref().map(|it| (it.limit, it.get()));
        let disk = fstatvfs(&self.root).ok();
        let disk = disk.as_ref();
        let disk_bytes = disk.map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize));
        // Some file systems count no files.
        let counts = disk.filter(|disk| disk.f_files > 0);
        let disk_files = counts.map(|disk| disk.f_favail);
        if let Some((limit, (bytes, files))) = counted.or_else(told) {
            return TreeStat {
                size_bytes: limit.bytes,
                free_bytes: limit.bytes.saturating_sub(bytes),
                size_files: limit.files,
                free_files: limit.files.saturating_sub(files),
                disk_free_bytes: disk_bytes,
                disk_free_files: disk_files,
            };
        }
        TreeStat {
            size_bytes: disk.map_or(0, |disk| disk.f_blocks * disk.f_frsize),
            free_bytes: disk_bytes.unwrap_or(0),
            size_files: disk.map_or(0, |disk| disk.f_files),
            free_files: disk.map_or(0, |disk| disk.f_favail),
            disk_free_bytes: disk_bytes,
            disk_free_files: disk_files,
        }
    }

    /// Replaces the limit of a tree that has one. Answers whether the tree holds no more than that;
    /// if it holds more, the old limit stays.
    pub fn set_limit(&self, limit: Limit) -> bool {
        let Some(account) = &self.account else {
            return false;
        };
        let before = account.limit();
        // First, so that nobody takes more between the look and the change.
        account.set_limit(limit);
        let (bytes, files) = account.used();
        let fits = bytes <= limit.bytes && files <= limit.files;
        if !fits {
            account.set_limit(before);
        }
        fits
    }

    /// Bytes and files in use; zeros for a tree without a limit, where nothing is counted.
    pub fn used(&self) -> (u64, u64) {
        let told = || self.reported_use.as_ref().map(|it| it.get());
        let counted = self.account.as_ref().map(Account::used);
        counted.or_else(told).unwrap_or_default()
    }

    /// Whether an open directory is the tree's own.
    ///
    /// # Errors
    /// The directory cannot be looked at.
    pub fn is_same_directory(&self, directory: impl AsFd) -> std::io::Result<bool> {
        Ok(host_file_id(&fstat(directory)?) == self.root_id)
    }

    /// The directory, for whoever opens the tree once more.
    pub fn directory(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    pub(crate) fn account(&self) -> Option<&Account> {
        self.account.as_ref()
    }

    pub(crate) fn root(&self) -> &Arc<OwnedFd> {
        &self.root
    }

    pub(crate) fn root_id(&self) -> HostFileId {
        self.root_id
    }

    pub(crate) fn hidden(&self) -> Option<&[u8]> {
        self.hidden.as_deref()
    }

    /// Whether new files can be given to the caller's user.
    pub(crate) fn is_privileged(&self) -> bool {
        self.is_privileged
    }

    /// A descriptor by which files can be opened again by their handles, where they can.
    pub(crate) fn mount(&self) -> Option<BorrowedFd<'_>> {
        self.mount.as_ref().map(AsFd::as_fd)
    }

    /// Block of the host's file system, in bytes.
    pub(crate) fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// What a file with these attributes is charged, in bytes.
    pub(crate) fn charge_bytes(&self, stat: &Stat) -> u64 {
        let bytes = u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        if host_file_id(stat) == self.root_id {
            bytes.saturating_sub(ROOT_FREE_BYTES)
        } else {
            bytes
        }
    }

    /// Counts everything that is there, also in directories that a job closed to its own user,
    /// which is this server's when it has no privilege: these are opened for the time being.
    fn count_all(&self, account: &Account) -> std::io::Result<()> {
        let mut closed = Vec::new();
        let counted = self.count_below(account, &mut closed);
        for (directory, mode) in closed.into_iter().rev() {
            chmod(proc_path(&directory), Mode::from_raw_mode(mode))?;
        }
        counted
    }

    /// Descends by descriptors, so depth has no limit but theirs. Gives the directories whose mode
    /// it changed, with the mode to restore.
    fn count_below(
        &self,
        account: &Account,
        closed: &mut Vec<(OwnedFd, u32)>,
    ) -> std::io::Result<()> {
        let stat = fstat(&self.root)?;
        account.count_existing(self.root_id, self.charge_bytes(&stat));
        // The root is there without being asked for.
        account.release_file();
        let here = CString::from(c".");
        let mut pending = vec![(self.root.clone(), here)];
        while let Some((parent, name)) = pending.pop() {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let directory = Arc::new(openat(&*parent, &*name, flags, Mode::empty())?);
            drop(parent);
            let mut buffer = [MaybeUninit::<u8>::uninit(); 32 << 10];
            let mut entries = RawDir::new(&*directory, &mut buffer);
            while let Some(entry) = entries.next() {
                let entry = entry?;
                let name = entry.file_name();
                if name == c"." || name == c".." {
                    continue;
                }
                let fd = open_path(&*directory, name)
                    .map_err(|error| std::io::Error::from_raw_os_error(error.0))?;
                let stat = fstat(&fd)?;
                if stat.st_dev != self.root_id.0 {
                    continue;
                }
                account.count_existing(host_file_id(&stat), self.charge_bytes(&stat));
                if file_type(&stat) == FileType::Directory {
                    pending.push((directory.clone(), name.to_owned()));
                    let mode = stat.st_mode & 0o7777;
                    if !self.is_privileged && mode & 0o500 != 0o500 {
                        chmod(proc_path(&fd), Mode::from_raw_mode(mode | 0o500))?;
                        closed.push((fd, mode));
                    }
                }
            }
        }
        Ok(())
    }
}

fn handle_mount(root: &OwnedFd) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mount = openat(root, c".", flags, Mode::empty()).ok()?;
    can_open_by_handle(&mount).then_some(mount)
}

/// Every file that an agent refers to has a descriptor, if they are not too many: allow as many as
/// the system lets us.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let raised = Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            tracing::warn!(%error, "cannot raise the number of open files");
        }
    }
}
