//! Builds the job's root directory and makes it this process's root. The host's file systems
//! are only bound, never written to; identities and processes are other files' business.

use std::collections::BTreeSet;
use std::env::set_current_dir;
use std::ffi::OsString;
use std::fmt::Display;
use std::fs::{self, FileType, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use bafs_proto::path::{KERNEL_DIRECTORY_OBJECTION, is_in_kernel_directory};
use nix::errno::Errno;
use nix::unistd::pivot_root;

use super::limits::{NOTES_MAX, SHADOWED_ENTRIES_MAX};
use super::mount_layout::{self, HostTree, MountObstacle, MountPlacement, PathKind, ShadowedNames};
use super::mounts;
use super::outcome::{NotStarted, NotStartedReason};
use super::plan::{VolumeBind, check_overlaps};
use super::privilege::errno_of;
use super::temporary_directories::{
    MaskedHostTree, PrivateDirectory, SHARED_MEMORY, TemporaryDirectories,
};

/// While the root is being built, a tree in memory is `/` and holds these three.
pub(super) const HOST_ROOT: &str = "/host";
const STAGING_ROOT: &str = "/stage";
pub(super) const NEW_ROOT: &str = "/new";

/// Where the job has files of the host that its description names: links in its own directories for
/// temporary files lead there, as a mount in their place could be neither replaced nor removed.
const NAMED_FILES: &str = "/.bafs-named";

/// Directories that can carry the tree in memory until it is `/`; one exists everywhere.
const TMPFS_CARRIERS: [&str; 2] = ["/tmp", "/proc"];

/// Builds a root where each volume is at its path and all else is as on the host, enters it,
/// and leaves the host's root behind.
///
/// `base` carries the agent's own mount points; the job sees what lies under it instead.
/// Returns the host entries that could not be shown, with reasons, and what a user must know.
pub(super) fn enter_root(
    volumes: &[VolumeBind],
    base: &Path,
    temporary: Option<&TemporaryDirectories>,
) -> Result<RootNotes, NotStarted> {
    let mut privates = private_directories(temporary)?;
    let sources = volumes
        .iter()
        .map(find_source)
        .collect::<Result<Vec<_>, _>>()?;
    let shown = MaskedHostTree(&HostRoot, &privates);
    let places = volumes
        .iter()
        .zip(&sources)
        .map(|(volume, (_, kind))| place_volume(&shown, volume, *kind))
        .collect::<Result<Vec<_>, _>>()?;
    // Symbolic links of the host can make two different paths one.
    let targets: Vec<_> = places.iter().map(MountPlacement::target).collect();
    check_overlaps(
        volumes
            .iter()
            .map(|v| v.name.as_str())
            .zip(targets.iter().map(|t| &**t)),
    )
    .map_err(|error| NotStarted {
        reason: NotStartedReason::PathUnusable,
        errno: None,
        message: error.to_string(),
    })?;

    enter_tmpfs_root()?;
    for (index, (source, kind)) in sources.iter().enumerate() {
        let staged = staging_path(index);
        make_mount_point(&staged, *kind).map_err(refusal_of_io("prepare a volume"))?;
        mounts::bind_mount(&path_below(HOST_ROOT, source), &staged)
            .map_err(refusal_at("bind", source))?;
    }
    mounts::detach_mount(&path_below(HOST_ROOT, base)).map_err(refusal_at("uncover", base))?;

    let mut notes = RootNotes::default();
    let mut shadows = mount_layout::collect_shadowed_names(&places);
    for private in &mut privates {
        // There a job may make what it wants, mount points as well.
        if let Some(hidden) = shadows.remove(&private.target) {
            private.entries.retain(|name| !hidden.contains(name));
        }
    }
    let is_inside = |path: &Path| privates.iter().any(|it| path.starts_with(&it.target));
    for (directory, hidden) in shadows.iter().filter(|(path, _)| !is_inside(path)) {
        replace_directory(HOST_ROOT, directory, hidden, &mut notes)?;
    }
    for private in &privates {
        cover_directory(private, &targets, &mut notes)?;
    }
    for (directory, hidden) in shadows.iter().filter(|(path, _)| is_inside(path)) {
        replace_directory(HOST_ROOT, directory, hidden, &mut notes)?;
    }
    if let Some(temporary) = temporary.filter(|it| it.has_private_memory()) {
        cover_shared_memory(temporary.memory_bytes)?;
    }
    for (index, (volume, place)) in volumes.iter().zip(&places).enumerate() {
        install_volume(volume, place, sources[index].1, &staging_path(index))?;
    }
    restrict_volumes(volumes, &targets)?;
    notes.warn_of_hidden(volumes, &targets, &privates);
    install_process_list(&mut notes)?;
    for directory in shadows.keys() {
        seal_directory(directory)?;
    }
    leave_tmpfs_root()?;
    shadows.remove(base);
    notes.warn_of_replaced(&shadows);
    Ok(notes)
}

/// Finds the place of a volume, and refuses one that no directory can have.
pub(super) fn place_volume(
    host: &impl HostTree,
    volume: &VolumeBind,
    kind: PathKind,
) -> Result<MountPlacement, NotStarted> {
    let place = mount_layout::find_placement(host, &volume.path, kind);
    let objection = match mount_layout::find_obstacle(host, &place) {
        Some((path, obstacle)) => format!(
            "{} {}: volumes are mounted on directories",
            path.display(),
            obstacle.description()
        ),
        // Symbolic links of the host may lead there.
        None if is_in_kernel_directory(&place.target()) => format!(
            "the mount path '{}' {KERNEL_DIRECTORY_OBJECTION}",
            place.target().display()
        ),
        None => return Ok(place),
    };
    Err(NotStarted {
        reason: NotStartedReason::PathUnusable,
        errno: None,
        message: format!("{objection}; give volume {} another path", volume.name),
    })
}

/// The host directories that the job does not see, from before the root is left.
fn private_directories(
    temporary: Option<&TemporaryDirectories>,
) -> Result<Vec<PrivateDirectory>, NotStarted> {
    let found = temporary.map(|temporary| {
        temporary.create_directories()?;
        temporary.private_directories(&HostRoot)
    });
    let found = found.transpose().map_err(|error| {
        let directory = temporary.map(|temporary| temporary.directory.display());
        let step = format!(
            "make directories for temporary files in {} ({error})",
            directory.map_or_else(String::new, |path| path.to_string())
        );
        refusal(step, errno_of(&error))
    });
    found.map(Option::unwrap_or_default)
}

/// Shows the job its own directory in place of a host's, with those entries of the host's that its
/// description names. `mount_points` are places of volumes.
fn cover_directory(
    private: &PrivateDirectory,
    mount_points: &[PathBuf],
    notes: &mut RootNotes,
) -> Result<(), NotStarted> {
    let (host, target) = (
        path_below(HOST_ROOT, &private.target),
        path_below(NEW_ROOT, &private.target),
    );
    mounts::bind_mount(&path_below(HOST_ROOT, &private.source), &target)
        .map_err(refusal_at("cover", &private.target))?;
    for name in &private.entries {
        let from = host.join(name);
        let shown = fs::symlink_metadata(&from).and_then(|found| {
            let (kind, to) = (found.file_type(), target.join(name));
            let is_covered = mount_points.contains(&private.target.join(name));
            match kind.is_dir() || kind.is_symlink() || is_covered {
                true => bind_entry(&from, &to, kind),
                false => link_to_named_file(&from, &private.target.join(name), kind),
            }
        });
        if let Err(error) = shown {
            notes.add_missing(&private.target.join(name), &error);
        }
    }
    Ok(())
}

/// Shows a file of the host at `path` of a private directory by a link to where it is bound.
fn link_to_named_file(from: &Path, path: &Path, kind: FileType) -> io::Result<()> {
    let bound = path_below(NAMED_FILES, path);
    let target = path_below(NEW_ROOT, &bound);
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent)?;
    }
    bind_entry(from, &target, kind)?;
    symlink(bound, path_below(NEW_ROOT, path))
}

/// Gives the job shared memory of its own, where the host has any.
pub(super) fn cover_shared_memory(bytes: u64) -> Result<(), NotStarted> {
    let target = path_below(NEW_ROOT, Path::new(SHARED_MEMORY));
    if !target.is_dir() {
        return Ok(());
    }
    mounts::mount_bounded_tmpfs(&target, bytes)
        .map_err(refusal_at("cover", Path::new(SHARED_MEMORY)))
}

/// The host as this process sees it before it steps away.
pub(super) struct HostRoot;

impl HostTree for HostRoot {
    fn resolve(&self, path: &Path) -> Option<(PathBuf, PathKind)> {
        let real = fs::canonicalize(path).ok()?;
        let kind = kind_of(fs::symlink_metadata(&real).ok()?.file_type());
        Some((real, kind))
    }

    fn obstacle_at(&self, path: &Path) -> Option<MountObstacle> {
        fs::symlink_metadata(path).ok()?;
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => None,
            Ok(_) => Some(MountObstacle::File),
            Err(error) => match errno_of(&error) {
                Errno::ELOOP => Some(MountObstacle::CircularLink),
                Errno::ENOENT | Errno::ENOTDIR => Some(MountObstacle::DanglingLink),
                // Nobody knows what is there.
                _ => None,
            },
        }
    }
}

fn kind_of(file: FileType) -> PathKind {
    if file.is_dir() {
        PathKind::Directory
    } else {
        PathKind::File
    }
}

pub(super) fn find_source(volume: &VolumeBind) -> Result<(PathBuf, PathKind), NotStarted> {
    let find = || {
        let real = fs::canonicalize(&volume.source)?;
        let kind = kind_of(fs::symlink_metadata(&real)?.file_type());
        Ok((real, kind))
    };
    find().map_err(|error: io::Error| NotStarted {
        reason: NotStartedReason::VolumeUnusable,
        errno: error.raw_os_error(),
        message: format!(
            "volume {} at {}: {error}",
            volume.name,
            volume.source.display()
        ),
    })
}

/// Makes a tree in memory the root; the host's root is below it afterwards.
pub(super) fn enter_tmpfs_root() -> Result<(), NotStarted> {
    let carrier = TMPFS_CARRIERS
        .into_iter()
        .map(Path::new)
        .find(|path| path.is_dir());
    let carrier = carrier.ok_or_else(|| refusal("find /tmp or /proc", Errno::ENOENT))?;
    mounts::mount_tmpfs(carrier, 0o700)
        .map_err(|errno| refusal("mount a tree in memory", errno))?;
    for name in [HOST_ROOT, STAGING_ROOT, NEW_ROOT] {
        fs::create_dir(path_below(carrier, name)).map_err(refusal_of_io("prepare the new root"))?;
    }
    pivot_root(carrier, &path_below(carrier, HOST_ROOT))
        .map_err(refusal_at("pivot_root to", carrier))?;
    set_current_dir("/").map_err(refusal_of_io("enter the new root"))?;
    mounts::mount_tmpfs(Path::new(NEW_ROOT), 0o755)
        .map_err(|errno| refusal("mount the new root", errno))
}

pub(super) fn leave_tmpfs_root() -> Result<(), NotStarted> {
    set_current_dir(NEW_ROOT).map_err(refusal_of_io("enter the new root"))?;
    // With both paths the same, the old root ends up on top of the new one: no directory is
    // needed to put it, and the next call takes it off.
    pivot_root(".", ".").map_err(|errno| refusal("pivot_root to the new root", errno))?;
    mounts::detach_mount(Path::new("."))
        .map_err(|errno| refusal("leave the host's root", errno))?;
    set_current_dir("/").map_err(refusal_of_io("enter the new root"))
}

/// Replaces a directory of the tree at `root` by one in memory with the same entries, except
/// `hidden`.
pub(super) fn replace_directory(
    root: &str,
    directory: &Path,
    hidden: &BTreeSet<OsString>,
    notes: &mut RootNotes,
) -> Result<(), NotStarted> {
    let (from, to) = (path_below(root, directory), path_below(NEW_ROOT, directory));
    let make_room = |error: io::Error| NotStarted {
        reason: NotStartedReason::PathUnusable,
        errno: error.raw_os_error(),
        message: format!(
            "cannot create mount point {hidden:?} in {}: {error}; create the directories there, or \
             use an existing path or one below a listable directory",
            directory.display()
        ),
    };
    let metadata = fs::metadata(&from).map_err(make_room)?;
    let entries = fs::read_dir(&from).map_err(make_room)?;
    if directory != Path::new("/") {
        mounts::mount_tmpfs(&to, 0o755).map_err(refusal_at("cover", directory))?;
    }
    for (count, entry) in entries.enumerate() {
        if count >= SHADOWED_ENTRIES_MAX {
            let crowd = format!("it has more than {SHADOWED_ENTRIES_MAX} entries");
            return Err(make_room(io::Error::other(crowd)));
        }
        let entry = entry.map_err(make_room)?;
        let name = entry.file_name();
        let is_proc = directory == Path::new("/") && name == "proc";
        if is_proc || hidden.contains(&name) {
            continue;
        }
        let shown = entry
            .file_type()
            .and_then(|file| bind_entry(&entry.path(), &to.join(&name), file));
        if let Err(error) = shown {
            notes.add_missing(&directory.join(&name), &error);
        }
    }
    // In a user name space most owners have no number, and then ours is as good as any.
    let _ = chown(&to, Some(metadata.uid()), Some(metadata.gid()));
    fs::set_permissions(&to, Permissions::from_mode(metadata.mode() & 0o7777)).map_err(make_room)
}

fn bind_entry(from: &Path, to: &Path, file: FileType) -> io::Result<()> {
    if file.is_symlink() {
        return symlink(fs::read_link(from)?, to);
    }
    make_mount_point(to, kind_of(file))?;
    mounts::bind_mount(from, to).map_err(|errno| {
        // An empty file in place of the real one would lie to the job.
        let _ = if file.is_dir() {
            fs::remove_dir(to)
        } else {
            fs::remove_file(to)
        };
        io::Error::from(errno)
    })
}

pub(super) fn make_mount_point(at: &Path, kind: PathKind) -> io::Result<()> {
    match kind {
        PathKind::Directory => fs::create_dir(at),
        PathKind::File => fs::File::create_new(at).map(drop),
    }
}

fn install_volume(
    volume: &VolumeBind,
    place: &MountPlacement,
    kind: PathKind,
    staged: &Path,
) -> Result<(), NotStarted> {
    let target = path_below(NEW_ROOT, place.target());
    let unusable = |error: io::Error| unusable_volume(volume, &error);
    if !place.missing.is_empty() {
        // All of this happens in memory: the first missing name lies in a stand-in.
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).map_err(unusable)?;
        }
        make_mount_point(&target, kind).map_err(unusable)?;
    }
    mounts::move_mount(staged, &target).map_err(|errno| unusable(errno.into()))
}

/// Gives the job no more rights through volumes than it may have; `targets` are their places.
fn restrict_volumes(volumes: &[VolumeBind], targets: &[PathBuf]) -> Result<(), NotStarted> {
    if volumes.is_empty() {
        return Ok(());
    }
    let table = mounts::MountTable::read(&path_below(HOST_ROOT, Path::new("/proc")));
    let table = table.map_err(|errno| refusal("read the table of mounts", errno))?;
    for (volume, target) in volumes.iter().zip(targets) {
        let restricted = table.restrict_mount(&path_below(NEW_ROOT, target), volume.access);
        restricted.map_err(|errno| unusable_volume(volume, &errno.into()))?;
    }
    Ok(())
}

fn unusable_volume(volume: &VolumeBind, error: &io::Error) -> NotStarted {
    NotStarted {
        reason: NotStartedReason::PathUnusable,
        errno: error.raw_os_error(),
        message: format!(
            "cannot show volume {} at {}: {error}",
            volume.name,
            volume.path.display()
        ),
    }
}

pub(super) fn install_process_list(notes: &mut RootNotes) -> Result<(), NotStarted> {
    let proc = path_below(NEW_ROOT, Path::new("/proc"));
    if !proc.is_dir() {
        fs::create_dir(&proc).map_err(refusal_of_io("prepare /proc"))?;
    }
    if let Err(errno) = mounts::mount_proc(&proc) {
        // Containers hide parts of /proc, and then the kernel grants no fresh one. Through the
        // host's the job sees its own /proc/self all the same, only under other numbers.
        notes.add_missing(Path::new("/proc"), &errno.into());
        let host = path_below(HOST_ROOT, Path::new("/proc"));
        mounts::bind_mount(&host, &proc).map_err(|errno| refusal("show /proc", errno))?;
    }
    Ok(())
}

/// Makes a stand-in read-only: a file that the job creates there would silently be lost at its
/// end. Directories for temporary files are the exception, as losing those is their use.
pub(super) fn seal_directory(directory: &Path) -> Result<(), NotStarted> {
    let at = path_below(NEW_ROOT, directory);
    let mode = fs::metadata(&at)
        .map_err(refusal_of_io("inspect the new root"))?
        .mode();
    let temporary = mode & 0o1002 == 0o1002;
    if temporary {
        return Ok(());
    }
    mounts::seal_tmpfs(&at).map_err(refusal_at("seal", directory))
}

/// What the job's view of the host lacks; the lists are for people and therefore short.
#[derive(Debug, Default)]
pub(super) struct RootNotes {
    /// Host entries that could not be shown.
    pub(super) missing: Vec<String>,
    /// What a user must know to understand a failure of the job.
    pub(super) warnings: Vec<String>,
}

impl RootNotes {
    pub(super) fn add_missing(&mut self, path: &Path, error: &io::Error) {
        // What vanished while we looked was nobody's loss.
        if error.kind() != io::ErrorKind::NotFound && self.missing.len() < NOTES_MAX {
            self.missing.push(format!("{}: {error}", path.display()));
        }
    }

    /// Tells of the job's own directories that volumes above them hide.
    fn warn_of_hidden(
        &mut self,
        volumes: &[VolumeBind],
        targets: &[PathBuf],
        privates: &[PrivateDirectory],
    ) {
        for private in privates {
            let hides = |target: &Path| {
                target != private.target
                    && private.target.starts_with(target)
                    && !path_below(NEW_ROOT, &private.target).is_dir()
            };
            let hidden_by = volumes
                .iter()
                .zip(targets)
                .find(|(_, target)| hides(target));
            if let Some((volume, _)) = hidden_by {
                self.warnings.push(format!(
                    "this job has no {}: the volume {} at {} hides it; mount the volume at another \
                     path, or create the directory in the volume",
                    private.target.display(),
                    volume.name,
                    volume.path.display()
                ));
            }
        }
    }

    /// Tells of directories that are not what they are on the host; `/` never is.
    fn warn_of_replaced(&mut self, shadows: &ShadowedNames) {
        let shadows = shadows.iter().filter(|(path, _)| *path != Path::new("/"));
        for (directory, hidden) in shadows.take(NOTES_MAX) {
            for name in hidden.iter().take(1) {
                let (directory, point) = (directory.display(), directory.join(name));
                self.warnings.push(format!(
                    "this job cannot write {directory}: it lacks the mount point {}, and this user \
                     cannot create it, or others may write there; create it on the node \
                     (mkdir -p), or mount below /tmp or at a new name in /",
                    point.display()
                ));
            }
        }
    }
}

pub(super) fn staging_path(index: usize) -> PathBuf {
    Path::new(STAGING_ROOT).join(index.to_string())
}

/// An absolute path as it is called when its root lies at `root`.
pub(super) fn path_below(root: impl AsRef<Path>, path: impl AsRef<Path>) -> PathBuf {
    let path = path.as_ref();
    root.as_ref().join(path.strip_prefix("/").unwrap_or(path))
}

pub(super) fn refusal(step: impl Display, errno: Errno) -> NotStarted {
    NotStarted {
        reason: NotStartedReason::NameSpaceRefused,
        errno: Some(errno as i32),
        message: format!("cannot {step} for the job's private name space: {errno}"),
    }
}

pub(super) fn refusal_at(step: &'static str, path: &Path) -> impl FnOnce(Errno) -> NotStarted {
    move |errno| refusal(format_args!("{step} {}", path.display()), errno)
}

pub(super) fn refusal_of_io(step: &'static str) -> impl FnOnce(io::Error) -> NotStarted {
    move |error| refusal(step, errno_of(&error))
}
