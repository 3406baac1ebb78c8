//! Directories of a store and the moves between them; knows nothing of states and reservations.
//!
//! ```text
//! lock          held while a node serves the store
//! server-id     the id of the server, made once
//! lives         how often the store was opened; `lives.lock` is held while that is counted
//! table.redb    the durable table
//! reserve       room for what a start writes when the disk is full
//! making/ID     a volume on its way: its content is in `tree`
//! volumes/ID    a volume in place; `writer` names the agent that writes it, `lock` is held by who
//!               accounts for it
//! trash/        what is being removed
//! cache/        blocks of cache volumes
//! logs/         what agents of jobs said
//! temporary/ID  temporary files of an execution, while it runs; empty ones wait for the next
//! starts        executions that were begun; before them those of `starts.old`
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bafs_proto::ids::{AgentId, ServerId, VolumeId};
use bafs_proto::{Error, ErrorCode, Result};
use bafs_tree::private_directory;
use rustix::fs::{FlockOperation, IFlags, flock, ioctl_getflags, ioctl_setflags, statvfs};

use crate::full_disk::FreeSpace;
use crate::incarnation::Incarnation;
use crate::start_error::{StartError, StartErrorCause};

/// Attempts to empty a directory in which a call that was given up may still make files.
const REMOVE_ATTEMPTS: u32 = 5;

/// Pause between the attempts.
const REMOVE_PAUSE: Duration = Duration::from_millis(50);

/// Most bytes of the reserve, many times what the table and the counter of lives write at a start,
/// and the least that is of use: a start on a full disk leaves less than there was.
const RESERVE_BYTES: usize = 1 << 20;
const RESERVE_BYTES_MIN: usize = 64 << 10;

/// Of the free files of a disk, one in so many is for the store itself: each volume takes four
/// beside its own.
const OWN_FILES_DIVISOR: u64 = 16;

/// The directories of one store. While it lives, no other process can open the store.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    incarnation: Incarnation,
    trash_count: AtomicU64,
    _lock: File,
}

/// Whether something that must be there is not; a disk that does not say so keeps it. Blocks.
pub(crate) fn is_path_missing(path: &Path) -> bool {
    matches!(path.try_exists(), Ok(false))
}

impl Store {
    /// Opens the store at `root`, made if it is not there. Blocks.
    ///
    /// # Errors
    /// `Conflict` when another node serves it, `RightMissing` when another user may have prepared
    /// it,
    /// `ServerFault` when the disk refuses.
    pub fn open(root: &Path) -> Result<Self, StartError> {
        let refuse = |code: ErrorCode, kind: Option<io::ErrorKind>, text: String| StartError {
            cause: StartErrorCause::Store(kind),
            error: Error::new(code, format!("store {}{text}", root.display())),
        };
        let fault = |kind: io::ErrorKind, e: &dyn std::fmt::Display| {
            refuse(ErrorCode::ServerFault, Some(kind), format!(": {e}"))
        };
        // Before anything in it is opened: what users keep in volumes is nobody else's business on
        // this machine, and somebody may have put links where a node of root would write.
        let root = &private_directory(root).map_err(|e| match e.get_ref() {
            Some(_) => refuse(ErrorCode::RightMissing, None, format!(": {e}")),
            None => {
                let text = "name one that this user may make, on a disk of its own";
                fault(e.kind(), &format!("cannot make the directory: {e}; {text}"))
            }
        })?;
        for part in ["volumes", "making", "trash", "cache", "logs", "temporary"] {
            fs::create_dir_all(root.join(part)).map_err(|e| fault(e.kind(), &e))?;
        }
        let mut options = OpenOptions::new();
        let lock = options
            .create(true)
            .truncate(false)
            .write(true)
            .open(root.join("lock"));
        let lock = lock.map_err(|e| fault(e.kind(), &e))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|e| match e {
            rustix::io::Errno::WOULDBLOCK => {
                let text = " is in use by another node; stop it or choose another directory";
                refuse(ErrorCode::Conflict, None, text.to_owned())
            }
            other => fault(io::Error::from(other).kind(), &other),
        })?;
        // First of all, and without writing anything: this may be what a full disk is full of.
        let _ = fs::remove_file(root.join("reserve"));
        // The jobs of an earlier life are dead, or about to be: their agents end with their node.
        for part in ["making", "trash", "temporary"] {
            let place = root.join(part);
            empty_directory(&place).map_err(|e| {
                let place = place.display();
                let look = "`bafs doctor --store DIR --repair` says what is in the way";
                let text = format!("cannot remove what is in {place}: {e}; {look}");
                fault(e.kind(), &text)
            })?;
        }
        // Where that does not exist, volumes are as good.
        let _ = spread_on_disk(&root.join("making"));
        let life = Incarnation::begin(root).map_err(|e| fault(e.kind(), &e))?;
        Ok(Self {
            root: root.to_owned(),
            incarnation: life,
            trash_count: AtomicU64::new(0),
            _lock: lock,
        })
    }

    /// The id of the server, the same in every life of the store.
    pub fn id(&self) -> ServerId {
        self.incarnation.server
    }

    /// The number of this life of the store.
    pub(super) fn incarnation(&self) -> u32 {
        self.incarnation.number
    }

    /// Where it is, without links.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Files that its disk can still take, beside what the store makes for itself; `None` where the
    /// file system makes them as they are needed. Blocks.
    pub(super) fn free_files(&self) -> Option<u64> {
        let disk = statvfs(&self.root).ok()?;
        let free = (disk.f_files > 0).then_some(disk.f_favail);
        free.map(|free| free - free / OWN_FILES_DIVISOR)
    }

    /// What its disk has free, in bytes and in words. Blocks.
    ///
    /// # Errors
    /// The disk does not say it.
    pub(super) fn describe_disk(&self) -> io::Result<(FreeSpace, String)> {
        let free = FreeSpace::measure(&self.root)?;
        let (root, bytes) = (self.root.display(), free.bytes);
        let told = match free.files {
            None => format!("the disk of {root} has {bytes} bytes free"),
            Some(files) if free.lacks_files() => {
                let all = statvfs(&self.root)?.f_files;
                let left = if files == 0 { "no" } else { "few" };
                format!("the disk of {root} has {left} files (inodes) left: {files} of {all}")
            }
            Some(files) => format!("the disk of {root} has {bytes} bytes and {files} files free"),
        };
        Ok((free, told))
    }

    /// Where the cache keeps its blocks.
    pub fn cache_directory(&self) -> PathBuf {
        self.root.join("cache")
    }

    /// Where volumes in place are.
    pub fn volume_directory(&self) -> PathBuf {
        self.root.join("volumes")
    }

    /// Whether somebody removed the store while it is served. Blocks.
    pub fn is_gone(&self) -> bool {
        is_path_missing(&self.volume_directory()) || is_path_missing(&self.root.join("server-id"))
    }

    /// Where the agents' logs are.
    pub fn log_directory(&self) -> PathBuf {
        self.root.join("logs")
    }

    /// Where jobs' temporary files are.
    pub fn temporary_directory(&self) -> PathBuf {
        self.root.join("temporary")
    }

    /// Where the node notes which executions it has begun.
    pub fn started_file(&self) -> PathBuf {
        self.root.join("starts")
    }

    pub(super) fn database_file(&self) -> PathBuf {
        self.root.join("table.redb")
    }

    /// The tree of a volume in place.
    pub(super) fn tree_path(&self, id: VolumeId) -> PathBuf {
        self.root.join("volumes").join(id.to_string()).join("tree")
    }

    /// Says which agent writes a volume, for a later life of the server; `None` when nobody did.
    pub(super) fn last_writer(&self, id: VolumeId) -> Option<AgentId> {
        let text = fs::read_to_string(self.writer_path(id)).ok()?;
        text.trim().parse().ok()
    }

    /// Takes note of the agent that writes a volume from now on. Not durable: nobody goes on with
    /// a session over a restart of the machine. All ids have one length, so one call replaces the
    /// whole text; ext4 would begin to write a renamed file to the disk, which takes each job half
    /// a millisecond.
    pub(super) fn set_writer(&self, id: VolumeId, agent: AgentId) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(false);
        let file = options.open(self.writer_path(id))?;
        file.write_all_at(format!("{agent}\n").as_bytes(), 0)
    }

    /// Lets nobody go on as the writer of a volume.
    pub(super) fn forget_writer(&self, id: VolumeId) -> io::Result<()> {
        match fs::remove_file(self.writer_path(id)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    fn writer_path(&self, id: VolumeId) -> PathBuf {
        self.root
            .join("volumes")
            .join(id.to_string())
            .join("writer")
    }

    /// The tree of a volume on its way.
    pub(super) fn staging_tree_path(&self, id: VolumeId) -> PathBuf {
        self.staging_path(id).join("tree")
    }

    /// Makes the empty tree of a volume on its way, in place of an earlier attempt.
    pub(super) fn create_staging(&self, id: VolumeId) -> io::Result<PathBuf> {
        self.trash(id)?;
        let tree = self.staging_tree_path(id);
        fs::create_dir_all(&tree)?;
        Ok(tree)
    }

    /// Puts a volume that was on its way in place; when this returns, it is durable (the content
    /// must have been made so before).
    pub(super) fn commit(&self, id: VolumeId) -> io::Result<()> {
        let volumes = self.root.join("volumes");
        File::open(self.staging_path(id))?.sync_all()?;
        fs::rename(self.staging_path(id), volumes.join(id.to_string()))?;
        File::open(volumes)?.sync_all()
    }

    /// Moves whatever there is of a volume out of the way, at once.
    pub(super) fn trash(&self, id: VolumeId) -> io::Result<()> {
        for place in [
            self.staging_path(id),
            self.root.join("volumes").join(id.to_string()),
        ] {
            let number = self.trash_count.fetch_add(1, Ordering::Relaxed);
            let target = self.root.join("trash").join(format!("{id}-{number}"));
            match fs::rename(&place, &target) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                result => result?,
            }
        }
        Ok(())
    }

    /// Removes what was trashed of a volume. May take long.
    pub(super) fn empty_trash(&self, id: VolumeId) -> io::Result<()> {
        let prefix = format!("{id}-");
        for entry in fs::read_dir(self.root.join("trash"))? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(&prefix) {
                remove_tree(&entry.path())?;
            }
        }
        Ok(())
    }

    /// Keeps room for the next start, if there is any. Blocks.
    pub(super) fn refill_reserve(&self) {
        let path = self.root.join("reserve");
        let mut bytes = RESERVE_BYTES;
        while bytes >= RESERVE_BYTES_MIN {
            let kept = File::create(&path).and_then(|mut file| {
                file.write_all(&vec![0; bytes])
                    .and_then(|()| file.sync_all())
            });
            if kept.is_ok() {
                return;
            }
            bytes /= 2;
        }
        // So little would only be in the way.
        let _ = fs::remove_file(path);
    }

    /// Removes the volumes of earlier lives of the server that `known` does not know.
    pub(super) fn remove_unknown(&self, known: impl Fn(VolumeId) -> bool) -> io::Result<()> {
        for entry in fs::read_dir(self.root.join("volumes"))? {
            let entry = entry?;
            let id = entry.file_name().to_string_lossy().parse::<VolumeId>();
            if !id.is_ok_and(&known) {
                remove_tree(&entry.path())?;
            }
        }
        Ok(())
    }

    fn staging_path(&self, id: VolumeId) -> PathBuf {
        self.root.join("making").join(id.to_string())
    }
}

/// Has directories that are made in this one begin far from each other on the disk, as far as its
/// file system does that (`chattr(1)`, *T*). Else each new volume begins where others were removed:
/// ext4 without a journal reuses no file's number for minutes and looks at all of them each time.
fn spread_on_disk(directory: &Path) -> io::Result<()> {
    let directory = File::open(directory)?;
    let flags = ioctl_getflags(&directory)?;
    Ok(ioctl_setflags(&directory, flags | IFlags::TOPDIR)?)
}

/// Removes everything in a directory.
fn empty_directory(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        remove_tree(&entry?.path())?;
    }
    Ok(())
}

/// Removes a tree, and after a pause what was made in it meanwhile.
pub(crate) fn remove_tree(path: &Path) -> io::Result<()> {
    let mut attempts = 0;
    loop {
        match bafs_tree::remove_tree(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(_) if attempts < REMOVE_ATTEMPTS => std::thread::sleep(REMOVE_PAUSE),
            removed => return removed,
        }
        attempts += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn stores_admit_one_node_and_keep_their_id() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(directory.path()).expect("open");
        let id = store.id();
        let second = Store::open(directory.path()).expect_err("in use");
        assert_eq!(second.error.code, ErrorCode::Conflict);
        assert!(second.error.detail.contains("another node"), "{second}");
        drop(store);
        assert_eq!(Store::open(directory.path()).expect("open").id(), id);
    }

    #[test]
    fn impossible_stores_name_another_place() {
        let refused = Store::open(Path::new("/proc/x/y")).expect_err("no directory");
        assert_eq!(
            refused.cause,
            StartErrorCause::Store(Some(io::ErrorKind::NotFound))
        );
        assert_eq!(refused.error.code, ErrorCode::ServerFault);
        let refused = refused.error;
        let words = "store /proc/x/y: cannot make the directory: No such file or directory";
        assert!(refused.detail.starts_with(words), "{refused}");
        assert!(refused.detail.contains("; name one that"), "{refused}");
    }

    #[test]
    fn volume_directories_are_spread_over_the_disk() {
        let directory = tempfile::tempdir().expect("directory");
        let able = spread_on_disk(directory.path()).is_ok();
        let store = Store::open(directory.path()).expect("open");
        store.create_staging(VolumeId(7)).expect("begin");
        let flags = |place: PathBuf| ioctl_getflags(File::open(place).expect("open"));
        let is_spread = |place| flags(place).is_ok_and(|flags| flags.contains(IFlags::TOPDIR));
        assert_eq!(is_spread(directory.path().join("making")), able);
        assert!(!is_spread(store.staging_tree_path(VolumeId(7))));
    }

    #[test]
    fn volumes_appear_and_disappear_atomically() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(directory.path()).expect("open");
        let id = VolumeId(7);
        let tree = store.create_staging(id).expect("begin");
        fs::write(tree.join("a"), b"x").expect("write");
        assert!(!store.tree_path(id).exists());
        store.commit(id).expect("commit");
        assert_eq!(fs::read(store.tree_path(id).join("a")).expect("read"), b"x");
        store.trash(id).expect("trash");
        assert!(!store.tree_path(id).exists());
        store.empty_trash(id).expect("empty");
        assert_eq!(
            fs::read_dir(directory.path().join("trash"))
                .expect("trash")
                .count(),
            0
        );
    }

    #[test]
    fn the_sweep_removes_unknown_and_unfinished_volumes() {
        let directory = tempfile::tempdir().expect("directory");
        let store = Store::open(directory.path()).expect("open");
        for id in [VolumeId(1), VolumeId(2)] {
            let tree = store.create_staging(id).expect("begin");
            let locked = tree.join("locked");
            fs::create_dir(&locked).expect("directory");
            fs::write(locked.join("f"), b"x").expect("write");
            fs::set_permissions(&locked, fs::Permissions::from_mode(0o500)).expect("chmod");
            store.commit(id).expect("commit");
        }
        store.create_staging(VolumeId(3)).expect("begin");
        store.remove_unknown(|id| id == VolumeId(1)).expect("sweep");
        assert!(store.tree_path(VolumeId(1)).join("locked/f").exists());
        assert!(!store.tree_path(VolumeId(2)).exists());
        drop(store);
        Store::open(directory.path()).expect("open again");
        assert_eq!(
            fs::read_dir(directory.path().join("making"))
                .expect("making")
                .count(),
            0
        );
    }
}
