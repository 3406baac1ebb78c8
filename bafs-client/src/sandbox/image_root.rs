//! The root directory of a job that has a volume for it: the files of an image, which the job only
//! reads, and what every job has beside them. Nothing else of the host is in it.
//!
//! Without privileges nothing can be laid over a directory but another one, so what an image lacks
//! is made in a copy of its directory in memory, as on the host: see [`super::root`].

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2, readlinkat};

use super::mount_layout::{
    self, HostTree, MountObstacle, MountPlacement, PathKind, ShadowedNames, find_placement,
};
use super::mounts;
use super::outcome::{NotStarted, NotStartedReason};
use super::plan::{Access, JobPlan, VolumeBind, check_overlaps};
use super::root::{
    HOST_ROOT, NEW_ROOT, RootNotes, cover_shared_memory, enter_tmpfs_root, find_source,
    install_process_list, leave_tmpfs_root, make_mount_point, path_below, place_volume, refusal,
    refusal_at, refusal_of_io, replace_directory, seal_directory, staging_path,
};
use super::user_names::{add_group, add_user};

/// Where the image is while the root is being built.
const IMAGE_ROOT: &str = "/image";

/// Directories of the host that an image cannot have: the kernel fills them.
const KERNEL_DIRECTORIES: [&str; 2] = ["/dev", "/sys"];

/// How a job finds other machines. An image has those files empty, if at all.
const NETWORK_FILES: [&str; 2] = ["/etc/resolv.conf", "/etc/hosts"];

/// Lists of users and groups: they are read whole, and larger ones are left as they are.
const USER_FILES: [&str; 2] = ["/etc/passwd", "/etc/group"];
const USER_FILE_BYTES_MAX: u64 = 1 << 20;

/// The process list.
const PROCESS_LIST: &str = "/proc";

/// Directories for temporary files.
const TEMPORARY_DIRECTORIES: [&str; 2] = ["/tmp", "/var/tmp"];

/// Builds the root of a job that has one, enters it, and leaves the host's behind. `ids` are user
/// and group of the job.
pub(super) fn enter_image_root(
    plan: &JobPlan,
    image: &VolumeBind,
    ids: (u32, u32),
) -> Result<RootNotes, NotStarted> {
    let (source, kind) = find_source(image)?;
    if kind != PathKind::Directory {
        let text = format!(
            "the root {} is a file: unpack the image with `bafs import image`, and name the \
             directory",
            image.name
        );
        return Err(unusable(text, None));
    }
    let tree = ImageTree::open(&source).map_err(refusal_of_io("open the job's root"))?;
    let mut notes = RootNotes::default();
    let mut parts = place_volumes(plan, &tree)?;
    add_own_parts(plan, ids, &tree, &mut parts, &mut notes)?;
    parts.sort_by_key(|part| part.place.target());
    let shadows = collect_shadows(&parts);
    drop(tree);

    enter_tmpfs_root()?;
    fs::create_dir(IMAGE_ROOT).map_err(refusal_of_io("prepare the job's root"))?;
    mounts::bind_mount(&path_below(HOST_ROOT, &source), Path::new(IMAGE_ROOT))
        .map_err(refusal_at("bind", &source))?;
    let proc = path_below(HOST_ROOT, Path::new(PROCESS_LIST));
    mounts::restrict_mount(Path::new(IMAGE_ROOT), Access::ReadOnly, &proc)
        .map_err(refusal_at("protect", &source))?;
    for (index, part) in parts.iter().enumerate() {
        stage_part(part, &staging_path(index))?;
    }
    if !shadows.contains_key(Path::new("/")) {
        mounts::bind_mount(Path::new(IMAGE_ROOT), Path::new(NEW_ROOT))
            .map_err(refusal_at("bind", Path::new("/")))?;
    }
    for (directory, hidden) in &shadows {
        replace_directory(IMAGE_ROOT, directory, hidden, &mut notes)?;
    }
    for (index, part) in parts.iter().enumerate() {
        install_part(part, &staging_path(index), &mut notes)?;
    }
    let memory = plan.temporary.as_ref();
    if let Some(temporary) = memory.filter(|it| it.has_private_memory()) {
        cover_shared_memory(temporary.memory_bytes)?;
    }
    for directory in shadows.keys() {
        seal_directory(directory)?;
    }
    leave_tmpfs_root()?;
    Ok(notes)
}

/// What is at a place of the job's root beside the image.
#[derive(Debug)]
struct RootPart<'p> {
    place: MountPlacement,
    kind: PathKind,
    content: PartContent<'p>,
}

#[derive(Debug)]
enum PartContent<'p> {
    Volume {
        volume: &'p VolumeBind,
        source: PathBuf,
    },
    /// A file or directory of the host.
    Host(PathBuf),
    /// A file in memory.
    Text(Vec<u8>),
    ProcessList,
}

fn place_volumes<'p>(plan: &'p JobPlan, tree: &ImageTree) -> Result<Vec<RootPart<'p>>, NotStarted> {
    let mut parts = Vec::new();
    for volume in plan.volumes.iter().filter(|volume| !volume.is_root()) {
        let (source, kind) = find_source(volume)?;
        parts.push(RootPart {
            place: place_volume(tree, volume, kind)?,
            kind,
            content: PartContent::Volume { volume, source },
        });
    }
    // Symbolic links of the image can make two different paths one.
    let targets: Vec<_> = parts.iter().map(|part| part.place.target()).collect();
    let volumes = plan.volumes.iter().filter(|volume| !volume.is_root());
    let names = volumes.map(|volume| volume.name.as_str());
    check_overlaps(names.zip(targets.iter().map(PathBuf::as_path)))
        .map_err(|error| unusable(error.to_string(), None))?;
    Ok(parts)
}

/// Adds what is no volume and no file of the image, unless a volume is there.
fn add_own_parts<'p>(
    plan: &'p JobPlan,
    ids: (u32, u32),
    tree: &ImageTree,
    parts: &mut Vec<RootPart<'p>>,
    notes: &mut RootNotes,
) -> Result<(), NotStarted> {
    let mut own: Vec<(PathBuf, PathKind, PartContent<'p>)> = vec![(
        PROCESS_LIST.into(),
        PathKind::Directory,
        PartContent::ProcessList,
    )];
    for path in KERNEL_DIRECTORIES {
        let host = PartContent::Host(path.into());
        own.push((path.into(), PathKind::Directory, host));
    }
    for (path, host) in writable_directories(plan)? {
        own.push((path, PathKind::Directory, PartContent::Host(host)));
    }
    for path in NETWORK_FILES {
        if let (true, Ok(host)) = (tree.has_file(path), fs::canonicalize(path)) {
            own.push((path.into(), PathKind::File, PartContent::Host(host)));
        }
    }
    let [users, groups] = USER_FILES;
    let home = home_directory(plan).unwrap_or_else(|| Path::new("/"));
    for (path, add) in [
        (
            users,
            &(|text: &str| add_user(text, ids, home)) as &dyn Fn(&str) -> Option<String>,
        ),
        (groups, &|text: &str| add_group(text, ids.1)),
    ] {
        if let Some(text) = tree.read_file(path).and_then(|text| add(&text)) {
            let content = PartContent::Text(text.into_bytes());
            own.push((path.into(), PathKind::File, content));
        }
    }
    for (path, kind, content) in own {
        let place = find_placement(tree, &path, kind);
        if let Some((at, obstacle)) = mount_layout::find_obstacle(tree, &place) {
            let text = format!("{} {} in the image", at.display(), obstacle.description());
            notes.add_missing(&path, &io::Error::other(text));
            continue;
        }
        let target = place.target();
        let is_covered = parts.iter().any(|part| {
            let other = part.place.target();
            target.starts_with(&other) && is_volume(part) || other == target
        });
        if !is_covered {
            parts.push(RootPart {
                place,
                kind,
                content,
            });
        }
    }
    Ok(())
}

fn is_volume(part: &RootPart<'_>) -> bool {
    matches!(part.content, PartContent::Volume { .. })
}

/// Directories that the job may write, and what of the host is there: its own, or with none of its
/// own the host's.
fn writable_directories(plan: &JobPlan) -> Result<Vec<(PathBuf, PathBuf)>, NotStarted> {
    let mut found = Vec::new();
    let home = home_directory(plan);
    let Some(temporary) = &plan.temporary else {
        let paths = TEMPORARY_DIRECTORIES.iter().map(Path::new).chain(home);
        for path in paths {
            if let Ok(host) = fs::canonicalize(path) {
                found.push((path.to_owned(), host));
            }
        }
        return Ok(found);
    };
    let made = temporary
        .create_directories()
        .and_then(|()| temporary.own_directories())
        .and_then(|mut own| {
            if let Some(path) = home {
                own.push((path.to_owned(), temporary.create_home()?));
            }
            Ok(own)
        });
    made.map_err(|error| {
        let step = format!("make directories for temporary files ({error})");
        refusal(step, super::privilege::errno_of(&error))
    })
}

/// The job's `HOME`, where the job may write; nothing if that is no place for a directory.
fn home_directory(plan: &JobPlan) -> Option<&Path> {
    let mut variables = plan.environment.iter().rev();
    let (_, home) = variables.find(|(name, _)| name == "HOME")?;
    let path = Path::new(home);
    let is_usable = path.is_absolute()
        && path.parent().is_some()
        && !bafs_proto::path::is_in_kernel_directory(path)
        && !path.components().any(|part| part.as_os_str() == "..");
    is_usable.then_some(path)
}

/// The directories of the image that lack a mount point. Inside of another part there is room.
fn collect_shadows(parts: &[RootPart<'_>]) -> ShadowedNames {
    let mut shadows = ShadowedNames::new();
    for (index, part) in parts.iter().enumerate() {
        let target = part.place.target();
        let mut others = parts.iter().enumerate();
        let is_inside = others.any(|(other, it)| {
            let outer = it.place.target();
            other != index && outer != target && target.starts_with(&outer)
        });
        if let (false, Some(first)) = (is_inside, part.place.missing.first()) {
            let hidden: &mut BTreeSet<_> = shadows.entry(part.place.existing.clone()).or_default();
            hidden.insert(first.clone());
        }
    }
    shadows
}

fn stage_part(part: &RootPart<'_>, staged: &Path) -> Result<(), NotStarted> {
    let prepare = refusal_of_io("prepare a part of the job's root");
    match &part.content {
        PartContent::ProcessList => Ok(()),
        PartContent::Text(text) => fs::write(staged, text).map_err(prepare),
        PartContent::Volume { source, .. } | PartContent::Host(source) => {
            make_mount_point(staged, part.kind).map_err(prepare)?;
            mounts::bind_mount(&path_below(HOST_ROOT, source), staged)
                .map_err(refusal_at("bind", source))
        }
    }
}

fn install_part(
    part: &RootPart<'_>,
    staged: &Path,
    notes: &mut RootNotes,
) -> Result<(), NotStarted> {
    let target = part.place.target();
    if let PartContent::ProcessList = part.content {
        return install_process_list(notes);
    }
    let at = path_below(NEW_ROOT, &target);
    let refused = |error: io::Error| {
        let text = format!(
            "cannot show {} in the root of the job: {error}",
            target.display()
        );
        unusable(text, error.raw_os_error())
    };
    if fs::symlink_metadata(&at).is_err() {
        // In memory, or in a directory of the job's own.
        if let Some(parent) = at.parent() {
            fs::create_dir_all(parent).map_err(refused)?;
        }
        make_mount_point(&at, part.kind).map_err(refused)?;
    }
    let shown = match part.content {
        PartContent::Text(_) => mounts::bind_mount(staged, &at),
        _ => mounts::move_mount(staged, &at),
    };
    shown.map_err(|errno| refused(errno.into()))?;
    if let PartContent::Volume { volume, .. } = part.content {
        let proc = path_below(HOST_ROOT, Path::new(PROCESS_LIST));
        mounts::restrict_mount(&at, volume.access, &proc).map_err(|errno| refused(errno.into()))?;
    }
    Ok(())
}

fn unusable(message: String, errno: Option<i32>) -> NotStarted {
    NotStarted {
        reason: NotStartedReason::PathUnusable,
        errno,
        message,
    }
}

/// The files of an image: its symbolic links lead to places of the image.
#[derive(Debug)]
struct ImageTree {
    root: OwnedFd,
    /// What the kernel calls it.
    path: PathBuf,
}

impl ImageTree {
    fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self {
            root: openat(CWD, path, flags, Mode::empty())?,
            path: path.to_owned(),
        })
    }

    fn open_inside(&self, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let within = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        openat2(
            &self.root,
            path,
            flags | OFlags::CLOEXEC,
            Mode::empty(),
            within,
        )
    }

    fn has_file(&self, path: &str) -> bool {
        let found = self.resolve(Path::new(path));
        found.is_some_and(|(_, kind)| kind == PathKind::File)
    }

    /// A short text; nothing where there is none.
    fn read_file(&self, path: &str) -> Option<String> {
        if !self.has_file(path) {
            return None;
        }
        let file = self.open_inside(Path::new(path), OFlags::RDONLY).ok()?;
        let mut text = String::new();
        let mut bounded = File::from(file).take(USER_FILE_BYTES_MAX + 1);
        bounded.read_to_string(&mut text).ok()?;
        (text.len() as u64 <= USER_FILE_BYTES_MAX).then_some(text)
    }
}

impl HostTree for ImageTree {
    fn resolve(&self, path: &Path) -> Option<(PathBuf, PathKind)> {
        let found = self.open_inside(path, OFlags::PATH).ok()?;
        let kind = match FileType::from_raw_mode(fstat(&found).ok()?.st_mode) {
            FileType::Directory => PathKind::Directory,
            _ => PathKind::File,
        };
        let link = format!("/proc/self/fd/{}", found.as_raw_fd());
        let named = readlinkat(CWD, &link, Vec::new()).ok()?;
        let named = Path::new(OsStr::new(named.to_str().ok()?));
        let below = named.strip_prefix(&self.path).ok()?;
        Some((Path::new("/").join(below), kind))
    }

    fn obstacle_at(&self, path: &Path) -> Option<MountObstacle> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW;
        self.open_inside(path, flags).ok()?;
        match self.open_inside(path, OFlags::PATH) {
            Ok(found) => {
                let kind = FileType::from_raw_mode(fstat(&found).ok()?.st_mode);
                (kind != FileType::Directory).then_some(MountObstacle::File)
            }
            Err(error) => match Errno::from_raw(error.raw_os_error()) {
                Errno::ELOOP => Some(MountObstacle::CircularLink),
                Errno::ENOENT | Errno::ENOTDIR => Some(MountObstacle::DanglingLink),
                // Nobody knows what is there.
                _ => None,
            },
        }
    }
}
