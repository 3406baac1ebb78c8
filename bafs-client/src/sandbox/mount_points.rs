//! Mount points that the host lacks: made there for as long as jobs use them, so that the directory
//! above stays what it is. Decides nothing about what is mounted.
//!
//! What is made so is known by its mode, and by a mark without which nothing is removed: a user may
//! have a directory of that mode. Each job that mounts there, or below, holds it
//! locked, and the last one removes it: to remove a directory takes a mount on it away in every
//! other name space, and nobody would be told. What a killed agent left, the next job takes over.
//!
//! Made and removed by descriptors, along no link, as others may put something else in the place of
//! a path at any moment. Root makes nothing where others than root could do that.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::thread;
use std::time::Duration;

use bafs_tree::replacement_objection;
use rustix::fs::{
    AtFlags, FileType, FlockOperation, Mode, OFlags, Stat, XattrFlags, fchmod, fgetxattr, flock,
    fremovexattr, fsetxattr, fstat, fstatfs, mkdirat, open, openat, statat, unlinkat,
};
use rustix::io::Errno;

use super::mount_layout::{HostTree, MountPlacement, PathKind, find_obstacle, find_placement};
use super::plan::VolumeBind;
use super::privilege::is_root_of_machine;

/// Modes of what is made: everybody may lock it, and hardly anybody makes a directory of this mode
/// himself.
const DIRECTORY_MODE: u32 = 0o1755;
const FILE_MODE: u32 = 0o1644;

/// Where a mount point cannot be removed safely it stays, with an ordinary mode.
const PERMANENT_DIRECTORY_MODE: u32 = 0o755;
const PERMANENT_FILE_MODE: u32 = 0o644;

/// The bit that both modes have, and what users make has not.
const STICKY: u32 = 0o1000;

/// The extended attribute of what was made here.
const MARK: &str = "user.bafs.mount-point";

/// A directory by which others are reached, whoever may read it.
const PARENT_FLAGS: OFlags = OFlags::PATH
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// A lock is held by who removes for a moment only.
const LOCK_ATTEMPTS: u32 = 200;
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// File systems of one machine, by the numbers of `statfs(2)`: no other machine mounts on what is
/// removed here. In this order: ext2 to ext4, XFS, Btrfs, tmpfs, overlay, ZFS, F2FS, bcachefs.
const LOCAL_FILE_SYSTEMS: [u32; 8] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0x0102_1994,
    0x794c_7630,
    0x2fc1_2fc1,
    0xf2f5_2010,
    0xca45_1a4e,
];

/// The mount points that one job uses; dropped when none of its processes is left.
#[derive(Debug, Default)]
pub(super) struct MountPoints(Vec<LockedMountPoint>);

#[derive(Debug)]
struct LockedMountPoint {
    path: PathBuf,
    /// The directory that it is in.
    parent: OwnedFd,
    kind: PathKind,
    lock: File,
}

/// Whether anything is to be made or locked for these volumes; asks no volume anything.
pub(super) fn is_needed(
    volumes: &[VolumeBind],
    host: &impl HostTree,
    is_ready: impl Fn(&Path) -> bool,
) -> bool {
    volumes.iter().any(|volume| {
        let existing = match host.resolve(&volume.path) {
            Some((existing, _)) => existing,
            None => {
                let place = find_placement(host, &volume.path, PathKind::Directory);
                if place.existing != Path::new("/") && !is_ready(&place.existing) {
                    return true;
                }
                place.existing
            }
        };
        let is_made =
            |path: &Path| is_ours(path, PathKind::Directory) || is_ours(path, PathKind::File);
        existing.ancestors().any(is_made)
    })
}

impl MountPoints {
    /// Makes what the host lacks for these volumes, and locks what others have made. What cannot be
    /// made is left to a stand-in. `is_ready` says of a directory that mount points in it need
    /// nothing of this.
    pub(super) fn make(
        volumes: &[VolumeBind],
        host: &impl HostTree,
        is_ready: impl Fn(&Path) -> bool,
    ) -> Self {
        let mut points = Self::default();
        for volume in volumes {
            // One that is not there is reported by who mounts it.
            let Ok(source) = fs::metadata(&volume.source) else {
                continue;
            };
            let kind = match source.is_dir() {
                true => PathKind::Directory,
                false => PathKind::File,
            };
            // Whoever mounts it says why it cannot be.
            if find_obstacle(host, &find_placement(host, &volume.path, kind)).is_some() {
                continue;
            }
            // What others remove at this moment is looked for again.
            for _ in 0..LOCK_ATTEMPTS {
                match points.prepare_placement(
                    find_placement(host, &volume.path, kind),
                    kind,
                    &is_ready,
                ) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {
                        thread::sleep(LOCK_PAUSE);
                    }
                    Err(error) => {
                        let at = volume.path.display();
                        tracing::warn!(%at, %error, "no mount point is made on the host");
                        break;
                    }
                    Ok(()) => break,
                }
            }
        }
        points
    }

    fn prepare_placement(
        &mut self,
        location: MountPlacement,
        kind: PathKind,
        is_ready: impl Fn(&Path) -> bool,
    ) -> io::Result<()> {
        let target = location.target();
        if location.missing.is_empty() {
            self.lock_path(&target, kind)?;
            // Others may have removed it and made it again since it was looked for.
            return match self.is_locked(&target) || !has_mount_point_mode(&target, kind)? {
                true => Ok(()),
                false => Err(io::ErrorKind::NotFound.into()),
            };
        }
        if location.existing == Path::new("/") || is_ready(&location.existing) {
            return Ok(());
        }
        let first = self.0.len();
        let made = self.create_missing(&location.existing, &target, kind);
        if made.is_err() {
            remove_unused(self.0.drain(first..));
        }
        made
    }

    /// Locks what jobs have made of a path that exists, from the top.
    fn lock_path(&mut self, target: &Path, kind: PathKind) -> io::Result<()> {
        let paths: Vec<_> = target.ancestors().collect();
        for path in paths.into_iter().rev() {
            let kind = if path == target {
                kind
            } else {
                PathKind::Directory
            };
            self.lock_if_ours(path, kind)?;
        }
        Ok(())
    }

    /// Whether what is there now is locked by this job.
    fn is_locked(&self, path: &Path) -> bool {
        let is_it = |used: &LockedMountPoint| used.path == path && is_same_file(path, &used.lock);
        self.0.iter().any(is_it)
    }

    /// Locks a directory on the way to a mount point if jobs have made it.
    fn lock_if_ours(&mut self, path: &Path, kind: PathKind) -> io::Result<()> {
        for _ in 0..LOCK_ATTEMPTS {
            if !has_mount_point_mode(path, kind)? || self.is_locked(path) {
                return Ok(());
            }
            let parent = open_directory(path.parent().unwrap_or(path), Trust::Anybody)?;
            match lock_shared(&parent, path, kind)? {
                Some(used) => {
                    self.0.push(used);
                    return Ok(());
                }
                None => thread::sleep(LOCK_PAUSE),
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Makes all that is missing of `target` below `existing`.
    fn create_missing(&mut self, existing: &Path, target: &Path, kind: PathKind) -> io::Result<()> {
        let trust = Trust::of_process();
        let mut parent = open_directory(existing, trust)?;
        let is_local = is_local(&parent)?;
        self.lock_path(existing, PathKind::Directory)?;
        let missing = target.strip_prefix(existing).map_err(io::Error::other)?;
        let mut path = existing.to_owned();
        let mut names = missing.components().peekable();
        while let Some(name) = names.next() {
            path.push(name);
            let kind = if names.peek().is_some() {
                PathKind::Directory
            } else {
                kind
            };
            self.create_one(&parent, &path, kind, is_local)?;
            if names.peek().is_some() {
                parent = openat(&parent, name.as_os_str(), PARENT_FLAGS, Mode::empty())?;
                trust.check(&parent, &path)?;
            }
        }
        Ok(())
    }

    fn create_one(
        &mut self,
        parent: &OwnedFd,
        path: &Path,
        kind: PathKind,
        is_local: bool,
    ) -> io::Result<()> {
        let name = name_of(path)?;
        for _ in 0..LOCK_ATTEMPTS {
            match create_mount_point(parent, name, kind, is_local) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                Ok(()) | Err(_) => {}
            }
            // Somebody may have removed it since.
            let Ok(found) = statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            let is_right = match kind {
                PathKind::Directory => FileType::Directory,
                PathKind::File => FileType::RegularFile,
            } == FileType::from_raw_mode(found.st_mode);
            if !is_right {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            if found.st_mode & 0o7777 != mode_of(kind) || self.is_locked(path) {
                return Ok(());
            }
            match lock_shared(parent, path, kind)? {
                Some(used) => {
                    self.0.push(used);
                    return Ok(());
                }
                None => thread::sleep(LOCK_PAUSE),
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }
}

impl Drop for MountPoints {
    fn drop(&mut self) {
        remove_unused(self.0.drain(..));
    }
}

/// Removes what nobody else uses, the deepest first.
fn remove_unused(used: impl DoubleEndedIterator<Item = LockedMountPoint>) {
    for point in used.rev() {
        let LockedMountPoint { path, lock, .. } = &point;
        let is_last = flock(lock, FlockOperation::NonBlockingLockExclusive).is_ok();
        if !is_last || !is_marked(lock) || !point.is_in_place() {
            continue;
        }
        match point.remove() {
            // What a job made beside its mount stays, in a directory like any other.
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                let _ = fremovexattr(lock, MARK);
                let _ = fchmod(lock, Mode::from_raw_mode(PERMANENT_DIRECTORY_MODE));
            }
            // Of another user, who removes it with his next job.
            Err(error) => tracing::debug!(path = %path.display(), %error, "a mount point stays"),
            Ok(()) => {}
        }
    }
}

impl LockedMountPoint {
    /// Whether it is still what its directory has by this name.
    fn is_in_place(&self) -> bool {
        let found = name_of(&self.path)
            .and_then(|name| Ok(statat(&self.parent, name, AtFlags::SYMLINK_NOFOLLOW)?));
        found.is_ok_and(|found| is_same(&found, &self.lock))
    }

    fn remove(&self) -> io::Result<()> {
        let flags = match self.kind {
            PathKind::Directory => AtFlags::REMOVEDIR,
            PathKind::File if self.lock.metadata()?.len() > 0 => {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
            PathKind::File => AtFlags::empty(),
        };
        Ok(unlinkat(&self.parent, name_of(&self.path)?, flags)?)
    }
}

/// In whose directories mount points are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trust {
    /// Only where nobody but root can replace them: what root makes can be turned against others.
    RootOnly,
    Anybody,
}

impl Trust {
    fn of_process() -> Self {
        match is_root_of_machine() {
            true => Self::RootOnly,
            false => Self::Anybody,
        }
    }

    fn check(self, directory: &OwnedFd, path: &Path) -> io::Result<()> {
        if self == Self::Anybody {
            return Ok(());
        }
        let found = fstat(directory)?;
        let Some(why) = replacement_objection(found.st_uid, found.st_mode) else {
            return Ok(());
        };
        let text = format!("{} {why}, and this process is root", path.display());
        Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
    }
}

/// Opens a directory whose path has no links.
fn open_directory(path: &Path, trust: Trust) -> io::Result<OwnedFd> {
    let mut directory = open("/", PARENT_FLAGS, Mode::empty())?;
    let mut at = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::RootDir => {}
            Component::Normal(name) => {
                directory = openat(&directory, name, PARENT_FLAGS, Mode::empty())?;
                at.push(name);
            }
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        }
        trust.check(&directory, &at)?;
    }
    Ok(directory)
}

fn create_mount_point(
    parent: &OwnedFd,
    name: &OsStr,
    kind: PathKind,
    is_local: bool,
) -> io::Result<()> {
    let mode = Mode::from_raw_mode(match is_local {
        true => mode_of(kind),
        false => permanent_mode_of(kind),
    });
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = match kind {
        PathKind::File => openat(parent, name, flags | OFlags::CREATE | OFlags::EXCL, mode)?,
        PathKind::Directory => {
            mkdirat(parent, name, mode)?;
            match openat(parent, name, flags | OFlags::DIRECTORY, Mode::empty()) {
                // Another job used it, and removed it already.
                Err(Errno::NOENT) => return Ok(()),
                opened => opened?,
            }
        }
    };
    match is_local {
        true => mark(&made, kind),
        false => Ok(()),
    }
}

/// Makes known that this was made here; where that cannot be, it stays.
fn mark(made: &OwnedFd, kind: PathKind) -> io::Result<()> {
    let (found, wanted) = (fstat(made)?.st_mode & 0o7777, mode_of(kind));
    if found & wanted != found || found & STICKY == 0 {
        // Somebody put another in the place of what was made just now.
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    // The mask of this process may have cut it.
    if found != wanted {
        fchmod(made, Mode::from_raw_mode(wanted))?;
    }
    if let Err(error) = fsetxattr(made, MARK, b"1", XattrFlags::empty()) {
        tracing::debug!(%error, "a mount point stays, as nobody could know it");
        fchmod(made, Mode::from_raw_mode(permanent_mode_of(kind)))?;
    }
    Ok(())
}

fn is_marked(file: &File) -> bool {
    fgetxattr(file, MARK, &mut [0_u8; 8]).is_ok()
}

fn name_of(path: &Path) -> io::Result<&OsStr> {
    path.file_name()
        .ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

/// Whether a job made this to mount on it; nobody did if it is not there.
fn is_ours(path: &Path, kind: PathKind) -> bool {
    has_mount_point_mode(path, kind).unwrap_or(false)
}

/// As [`is_ours`], of a path that must be there: others may remove it between two looks.
fn has_mount_point_mode(path: &Path, kind: PathKind) -> io::Result<bool> {
    Ok(fs::symlink_metadata(path)?.mode() & 0o7777 == mode_of(kind))
}

fn mode_of(kind: PathKind) -> u32 {
    match kind {
        PathKind::Directory => DIRECTORY_MODE,
        PathKind::File => FILE_MODE,
    }
}

fn permanent_mode_of(kind: PathKind) -> u32 {
    match kind {
        PathKind::Directory => PERMANENT_DIRECTORY_MODE,
        PathKind::File => PERMANENT_FILE_MODE,
    }
}

/// Locks a mount point together with other jobs; `None` while somebody removes it.
fn lock_shared(
    parent: &OwnedFd,
    path: &Path,
    kind: PathKind,
) -> io::Result<Option<LockedMountPoint>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let lock = match openat(parent, name_of(path)?, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(None),
        opened => File::from(opened?),
    };
    match flock(&lock, FlockOperation::NonBlockingLockShared) {
        Err(Errno::WOULDBLOCK) => return Ok(None),
        locked => locked?,
    }
    let point = LockedMountPoint {
        path: path.to_owned(),
        parent: parent.as_fd().try_clone_to_owned()?,
        kind,
        lock,
    };
    Ok(point.is_in_place().then_some(point))
}

fn is_same_file(path: &Path, lock: &File) -> bool {
    match (fs::symlink_metadata(path), lock.metadata()) {
        (Ok(there), Ok(held)) => (there.dev(), there.ino()) == (held.dev(), held.ino()),
        _ => false,
    }
}

fn is_same(found: &Stat, lock: &File) -> bool {
    fstat(lock).is_ok_and(|held| (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino))
}

fn is_local(directory: &OwnedFd) -> io::Result<bool> {
    let kind = fstatfs(directory)?.f_type;
    // The numbers have 32 bits, whatever the type is on this machine.
    Ok(LOCAL_FILE_SYSTEMS.contains(&(kind as u32)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::super::mount_layout::MountObstacle;
    use super::super::root::HostRoot;
    use super::*;

    struct PlainHostTree;

    impl HostTree for PlainHostTree {
        fn resolve(&self, path: &Path) -> Option<(PathBuf, PathKind)> {
            let real = fs::canonicalize(path).ok()?;
            let kind = match real.is_dir() {
                true => PathKind::Directory,
                false => PathKind::File,
            };
            Some((real, kind))
        }

        fn obstacle_at(&self, path: &Path) -> Option<MountObstacle> {
            HostRoot.obstacle_at(path)
        }
    }

    fn make(source: &Path, path: &Path) -> MountPoints {
        let volume = VolumeBind {
            name: "v".into(),
            source: source.into(),
            path: path.into(),
            access: super::super::plan::Access::ReadWrite,
        };
        MountPoints::make(&[volume], &PlainHostTree, |_| false)
    }

    #[test]
    fn last_job_removes_the_mount_point() {
        let host = tempfile::tempdir().unwrap();
        let point = host.path().join("a/b");
        let (first, second) = (make(host.path(), &point), make(host.path(), &point));
        drop(first);
        assert!(point.is_dir());
        drop(second);
        assert_eq!(fs::read_dir(host.path()).unwrap().count(), 0);
    }

    #[test]
    fn mount_points_of_users_stay() {
        let host = tempfile::tempdir().unwrap();
        let point = host.path().join("own");
        fs::create_dir(&point).unwrap();
        drop(make(host.path(), &point.join("made")));
        drop(make(host.path(), &point));
        assert!(point.is_dir() && fs::read_dir(&point).unwrap().count() == 0);
    }

    #[test]
    fn users_files_of_that_mode_stay() {
        let host = tempfile::tempdir().unwrap();
        let mode = |path: &Path| path.metadata().unwrap().mode() & 0o7777;
        let own = |name: &str, mode| {
            let path = host.path().join(name);
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            path
        };
        fs::create_dir_all(host.path().join("empty")).unwrap();
        fs::create_dir_all(host.path().join("full/f")).unwrap();
        fs::write(host.path().join("file"), "").unwrap();
        let (empty, full) = (own("empty", DIRECTORY_MODE), own("full", DIRECTORY_MODE));
        let file = own("file", FILE_MODE);
        drop(make(host.path(), &empty));
        drop(make(host.path(), &empty.join("made")));
        drop(make(host.path(), &full));
        drop(make(&file, &file));
        assert!(empty.is_dir() && file.is_file());
        assert_eq!(fs::read_dir(&empty).unwrap().count(), 0);
        assert_eq!((mode(&full), mode(&file)), (DIRECTORY_MODE, FILE_MODE));
    }

    #[test]
    fn root_makes_nothing_in_replaceable_directories() {
        if !is_root_of_machine() {
            return;
        }
        let host = tempfile::tempdir().unwrap();
        let shared = host.path().join("shared");
        fs::create_dir_all(shared.join("own")).unwrap();
        let open = |mode| fs::set_permissions(&shared, fs::Permissions::from_mode(mode)).unwrap();
        for (mode, is_made) in [
            (0o777, false),
            (0o775, false),
            (0o1777, true),
            (0o755, true),
        ] {
            open(mode);
            for point in [shared.join("a/b"), shared.join("own/c")] {
                let made = make(host.path(), &point);
                assert_eq!(point.is_dir(), is_made, "{mode:o} {}", point.display());
                drop(made);
            }
            assert!(!shared.join("a").exists());
        }
        open(0o755);
        std::os::unix::fs::chown(&shared, Some(65_533), None).unwrap();
        drop(make(host.path(), &shared.join("a")));
        assert_eq!(fs::read_dir(&shared).unwrap().count(), 1);
    }

    #[test]
    fn a_swapped_directory_is_never_followed() {
        let host = tempfile::tempdir().unwrap();
        let (real, link) = (host.path().join("real"), host.path().join("link"));
        fs::create_dir(&real).unwrap();
        fs::set_permissions(&real, fs::Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        // The path was looked at before somebody put the link there.
        assert!(open_directory(&link, Trust::Anybody).is_err());
        let parent = open_directory(host.path(), Trust::Anybody).unwrap();
        let mut points = MountPoints::default();
        let made = points.create_one(&parent, &link, PathKind::Directory, true);
        assert!(made.is_err());
        // A directory in the place of the made one keeps its mode.
        let swapped = openat(&parent, "real", OFlags::RDONLY, Mode::empty()).unwrap();
        assert!(mark(&swapped, PathKind::Directory).is_err());
        assert_eq!(real.metadata().unwrap().mode() & 0o7777, 0o700);
    }

    #[test]
    fn the_next_job_removes_a_killed_agents_leftovers() {
        let host = tempfile::tempdir().unwrap();
        let point = host.path().join("a/b");
        let mut killed = make(host.path(), &point);
        // Its descriptors are closed, and nothing else happens.
        killed.0.drain(..).for_each(drop);
        assert!(point.is_dir());
        drop(make(host.path(), &point));
        assert!(!host.path().join("a").exists());
    }

    #[test]
    fn files_beside_a_mount_point_stay() {
        let host = tempfile::tempdir().unwrap();
        let made = make(host.path(), &host.path().join("a/b"));
        fs::write(host.path().join("a/kept"), "x").unwrap();
        drop(made);
        assert!(host.path().join("a/kept").is_file() && !host.path().join("a/b").exists());
        let mode = host.path().join("a").metadata().unwrap().mode();
        assert_eq!(mode & 0o7777, PERMANENT_DIRECTORY_MODE);
    }

    #[test]
    fn mount_points_may_be_files() {
        let host = tempfile::tempdir().unwrap();
        let source = host.path().join("source");
        fs::write(&source, "x").unwrap();
        let made = make(&source, &host.path().join("a/file"));
        assert!(host.path().join("a/file").is_file());
        drop(made);
        assert!(!host.path().join("a").exists());
    }

    #[test]
    fn concurrent_jobs_never_lose_their_mount_point() {
        let host = tempfile::tempdir().unwrap();
        let point = host.path().join("a/b");
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let made = make(host.path(), &point);
                        assert!(point.is_dir(), "removed while a job uses it");
                        drop(made);
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(host.path()).unwrap().count(), 0);
    }
}
