//! Mount points that the host lacks: made there for as long as jobs use them, so that the directory
//! above stays what it is. Decides nothing about what is mounted.
//!
//! A directory that is made so is known by its mode. Each job that mounts there, or below, holds it
//! locked, and the last one removes it: to remove a directory takes a mount on it away in every
//! other name space, and nobody would be told. What a killed agent left, the next job takes over.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use nix::fcntl::OFlag;
use rustix::fs::{FlockOperation, flock, statfs};

use super::mount_layout::{HostTree, MountPlacement, PathKind, find_placement};
use super::plan::VolumeBind;

/// Modes of what is made: everybody may lock it, and nobody makes a directory of this mode himself.
const DIRECTORY_MODE: u32 = 0o1755;
const FILE_MODE: u32 = 0o1644;

/// Where a mount point cannot be removed safely it stays, with an ordinary mode.
const PERMANENT_MODE: u32 = 0o755;

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
                        tracing::debug!(%at, %error, "no mount point is made on the host");
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
            match lock_shared(path, kind)? {
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
        let is_local = is_local(existing)?;
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
            self.create_one(&path, kind, is_local)?;
        }
        Ok(())
    }

    fn create_one(&mut self, path: &Path, kind: PathKind, is_local: bool) -> io::Result<()> {
        for _ in 0..LOCK_ATTEMPTS {
            match create_mount_point(path, kind, is_local) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                Ok(()) | Err(_) => {}
            }
            // Somebody may have removed it since.
            let found = fs::symlink_metadata(path);
            let is_right = |found: &fs::Metadata| match kind {
                PathKind::Directory => found.is_dir(),
                PathKind::File => found.is_file(),
            };
            match found {
                Err(_) => continue,
                Ok(found) if !is_right(&found) => return Err(io::ErrorKind::AlreadyExists.into()),
                Ok(found) if found.mode() & 0o7777 != mode_of(kind) => return Ok(()),
                Ok(_) => {}
            }
            if self.is_locked(path) {
                return Ok(());
            }
            match lock_shared(path, kind)? {
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
    for LockedMountPoint { path, kind, lock } in used.rev() {
        let is_last = flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok();
        if !is_last || !is_same_file(&path, &lock) {
            continue;
        }
        let removed = match kind {
            PathKind::Directory => fs::remove_dir(&path),
            PathKind::File if lock.metadata().is_ok_and(|found| found.len() == 0) => {
                fs::remove_file(&path)
            }
            PathKind::File => Err(io::ErrorKind::DirectoryNotEmpty.into()),
        };
        match removed {
            // What a job made beside its mount stays, in a directory like any other.
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                let _ = lock.set_permissions(Permissions::from_mode(PERMANENT_MODE));
            }
            // Of another user, who removes it with his next job.
            Err(error) => tracing::debug!(path = %path.display(), %error, "a mount point stays"),
            Ok(()) => {}
        }
    }
}

fn create_mount_point(path: &Path, kind: PathKind, is_local: bool) -> io::Result<()> {
    match (kind, is_local) {
        (PathKind::Directory, true) => DirBuilder::new().mode(DIRECTORY_MODE).create(path)?,
        (PathKind::Directory, false) => return DirBuilder::new().mode(PERMANENT_MODE).create(path),
        (PathKind::File, _) => drop(File::create_new(path)?),
    }
    let mode = match (kind, is_local) {
        // The mask of this process may have cut it.
        (PathKind::Directory, _) => DIRECTORY_MODE,
        (PathKind::File, true) => FILE_MODE,
        (PathKind::File, false) => return Ok(()),
    };
    match fs::set_permissions(path, Permissions::from_mode(mode)) {
        // Another job used it, and removed it already.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        set => set,
    }
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

/// Locks a mount point together with other jobs; `None` while somebody removes it.
fn lock_shared(path: &Path, kind: PathKind) -> io::Result<Option<LockedMountPoint>> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits())
        .open(path);
    let lock = match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    match flock(&lock, FlockOperation::NonBlockingLockShared) {
        Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
        locked => locked?,
    }
    let path = path.to_owned();
    Ok(is_same_file(&path, &lock).then_some(LockedMountPoint { path, kind, lock }))
}

fn is_same_file(path: &Path, lock: &File) -> bool {
    match (fs::symlink_metadata(path), lock.metadata()) {
        (Ok(there), Ok(held)) => (there.dev(), there.ino()) == (held.dev(), held.ino()),
        _ => false,
    }
}

fn is_local(directory: &Path) -> io::Result<bool> {
    let kind = statfs(directory)?.f_type;
    // The numbers have 32 bits, whatever the type is on this machine.
    Ok(LOCAL_FILE_SYSTEMS.contains(&(kind as u32)))
}

#[cfg(test)]
mod tests {
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
        assert_eq!(mode & 0o7777, PERMANENT_MODE);
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
