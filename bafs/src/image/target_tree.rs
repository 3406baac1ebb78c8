//! The directory that an image is unpacked into. Paths are those of the image: links in it lead to
//! places in it, whatever they say, and nothing outside is touched.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, copy};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Timespec, Timestamps, fchmod,
    futimens, linkat, mkdirat, openat, openat2, statat, symlinkat, syncfs, unlinkat, utimensat,
};
use rustix::io::Errno;

/// Without these rights the home's user could not read what is unpacked.
const FILE_MODE_MIN: u32 = 0o400;
const DIRECTORY_MODE_MIN: u32 = 0o700;

/// Bits of a mode that are kept: jobs gain no rights by set-user-id programs.
const FILE_MODE_MASK: u32 = 0o777;
const DIRECTORY_MODE_MASK: u32 = 0o1777;

/// Levels of directories in each other: a bound for recursion.
const DEPTH_MAX: usize = 1_000;

/// What was unpacked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct UnpackCounts {
    pub(super) files: u64,
    pub(super) directories: u64,
    /// Bytes of the files.
    pub(super) bytes: u64,
    /// Devices, pipes and sockets, which are left out.
    pub(super) devices: u64,
}

/// A time as tar and squashfs have it: seconds since 1970.
pub(super) type ModifiedTime = Option<i64>;

/// A directory that is being filled.
pub(super) struct TargetTree {
    root: OwnedFd,
    counts: UnpackCounts,
    /// Modes and times of directories, which come last: what is made in them changes both.
    directories: BTreeMap<PathBuf, (u32, ModifiedTime)>,
}

/// Checks a path of an image and splits it; none is the top itself.
///
/// # Errors
/// It is absolute, or has `..` in it.
pub(super) fn split_path(path: &[u8]) -> Result<Vec<&OsStr>> {
    let shown = || String::from_utf8_lossy(path).into_owned();
    if path.starts_with(b"/") {
        bail!("the image has the absolute path {}", shown());
    }
    if path.contains(&0) {
        bail!("the image has a path with a zero byte");
    }
    let parts = path
        .split(|byte| *byte == b'/')
        .filter(|part| !part.is_empty() && *part != b".");
    let parts: Vec<_> = parts.collect();
    if parts.contains(&&b".."[..]) {
        bail!("the image has a path with '..': {}", shown());
    }
    if parts.len() > DEPTH_MAX {
        bail!("the image has a path of more than {DEPTH_MAX} levels");
    }
    Ok(parts.into_iter().map(OsStr::from_bytes).collect())
}

impl TargetTree {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self {
            root: openat(CWD, path, flags, Mode::empty())?,
            counts: UnpackCounts::default(),
            directories: BTreeMap::new(),
        })
    }

    /// Writes all to disk, after the last modes and times.
    pub(super) fn finish(self) -> Result<UnpackCounts> {
        for (path, (mode, modified)) in self.directories.iter().rev() {
            // A later layer may have removed it, or put a link in its place.
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW;
            let Ok(directory) = self.open_in_root(path, flags) else {
                continue;
            };
            fchmod(&directory, Mode::from_raw_mode(*mode))?;
            if let Some(times) = modified.map(timestamps) {
                futimens(&directory, &times)?;
            }
        }
        syncfs(&self.root)?;
        Ok(self.counts)
    }

    pub(super) fn count_device(&mut self) {
        self.counts.devices += 1;
    }

    /// Makes a directory, or changes one that is there.
    pub(super) fn create_directory(
        &mut self,
        path: &[u8],
        mode: u32,
        modified: ModifiedTime,
    ) -> Result<()> {
        let parts = split_path(path)?;
        let mode = mode & DIRECTORY_MODE_MASK | DIRECTORY_MODE_MIN;
        let Some((name, above)) = parts.split_last() else {
            self.directories.insert(PathBuf::new(), (mode, modified));
            return Ok(());
        };
        let parent = self.open_parent(above)?;
        match statat(&parent, *name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) if FileType::from_raw_mode(found.st_mode) == FileType::Directory => {}
            Ok(_) => {
                unlinkat(&parent, *name, AtFlags::empty())?;
                mkdirat(&parent, *name, Mode::RWXU)?;
                self.counts.directories += 1;
            }
            Err(_) => {
                mkdirat(&parent, *name, Mode::RWXU)
                    .with_context(|| describe(path, "make the directory"))?;
                self.counts.directories += 1;
            }
        }
        self.directories
            .insert(parts.iter().collect(), (mode, modified));
        Ok(())
    }

    /// Makes a file with what a reader gives, in place of what was there.
    pub(super) fn create_file(
        &mut self,
        path: &[u8],
        mode: u32,
        modified: ModifiedTime,
        content: &mut dyn Read,
    ) -> Result<()> {
        let (parent, name) = self.make_room(path)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let made = openat(
            &parent,
            name,
            flags | OFlags::CLOEXEC,
            Mode::RUSR | Mode::WUSR,
        )
        .with_context(|| describe(path, "make the file"))?;
        let mut file = File::from(made);
        let bytes = copy(content, &mut file).with_context(|| describe(path, "write the file"))?;
        fchmod(
            &file,
            Mode::from_raw_mode(mode & FILE_MODE_MASK | FILE_MODE_MIN),
        )?;
        if let Some(times) = modified.map(timestamps) {
            futimens(&file, &times)?;
        }
        self.counts.files += 1;
        self.counts.bytes += bytes;
        Ok(())
    }

    /// Makes a symbolic link; it may lead anywhere, as it is followed in the image only.
    pub(super) fn create_link(
        &mut self,
        path: &[u8],
        leads_to: &[u8],
        modified: ModifiedTime,
    ) -> Result<()> {
        let (parent, name) = self.make_room(path)?;
        symlinkat(OsStr::from_bytes(leads_to), &parent, name)
            .with_context(|| describe(path, "make the link"))?;
        if let Some(times) = modified.map(timestamps) {
            utimensat(&parent, name, &times, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        self.counts.files += 1;
        Ok(())
    }

    /// Gives a file of the image another name.
    pub(super) fn create_hard_link(&mut self, path: &[u8], other: &[u8]) -> Result<()> {
        let others = split_path(other)?;
        let Some((other_name, above)) = others.split_last() else {
            bail!("the image has a hard link to its top");
        };
        let from = self.open_parent(above)?;
        let (parent, name) = self.make_room(path)?;
        // What it names is a file here, or a link that is not followed.
        linkat(&from, *other_name, &parent, name, AtFlags::empty()).with_context(|| {
            let other = String::from_utf8_lossy(other).into_owned();
            describe(path, &format!("link to {other}"))
        })?;
        self.counts.files += 1;
        Ok(())
    }

    /// Removes what is at a path, with all below; nothing there is as good.
    pub(super) fn remove(&mut self, path: &[u8]) -> Result<()> {
        let parts = split_path(path)?;
        let Some((name, above)) = parts.split_last() else {
            bail!("the image removes its top");
        };
        let above: PathBuf = above.iter().collect();
        match self.open_in_root(&above, OFlags::RDONLY | OFlags::DIRECTORY) {
            Ok(parent) => remove_entry(&parent, name, 0),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(()),
            Err(error) => Err(error).with_context(|| describe(path, "remove")),
        }
    }

    /// The names in a directory; none where there is no directory.
    pub(super) fn names_in(&self, path: &[u8]) -> Result<Vec<Vec<u8>>> {
        let path: PathBuf = split_path(path)?.iter().collect();
        match self.open_in_root(&path, OFlags::RDONLY | OFlags::DIRECTORY) {
            Ok(directory) => list_names(&directory),
            Err(_) => Ok(Vec::new()),
        }
    }

    /// Makes a directory unless something is there.
    pub(super) fn ensure_directory(&mut self, path: &[u8], mode: u32) -> Result<()> {
        match self.is_there(path, OFlags::PATH | OFlags::NOFOLLOW)? {
            true => Ok(()),
            false => self.create_directory(path, mode, None),
        }
    }

    /// Makes an empty file unless something is there. A link that leads nowhere in the image, as to
    /// a service's file in `/run`, is nothing: a job could see no file of its node there.
    pub(super) fn ensure_file(&mut self, path: &[u8]) -> Result<()> {
        match self.is_there(path, OFlags::PATH)? {
            true => Ok(()),
            false => self.create_file(path, 0o644, None, &mut std::io::empty()),
        }
    }

    fn is_there(&self, path: &[u8], flags: OFlags) -> Result<bool> {
        let path: PathBuf = split_path(path)?.iter().collect();
        Ok(self.open_in_root(&path, flags).is_ok())
    }

    /// Opens the directory above a path, whose last name is free afterwards.
    fn make_room<'n>(&self, path: &'n [u8]) -> Result<(OwnedFd, &'n OsStr)> {
        let parts = split_path(path)?;
        let Some((name, above)) = parts.split_last() else {
            bail!("the image has a file in place of its top");
        };
        let parent = self.open_parent(above)?;
        remove_entry(&parent, name, 0).with_context(|| describe(path, "replace"))?;
        Ok((parent, name))
    }

    /// Opens a directory of the image, and makes what is missing of it.
    fn open_parent(&self, parts: &[&OsStr]) -> Result<OwnedFd> {
        let whole: PathBuf = parts.iter().collect();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        match self.open_in_root(&whole, flags) {
            Ok(found) => return Ok(found),
            Err(Errno::NOENT) => {}
            Err(error) => {
                return Err(error).with_context(|| format!("cannot open {}", whole.display()));
            }
        }
        let (mut at, mut path) = (self.open_in_root(Path::new(""), flags)?, PathBuf::new());
        for part in parts {
            path.push(part);
            at = match self.open_in_root(&path, flags) {
                Err(Errno::NOENT) => {
                    mkdirat(&at, *part, Mode::from_raw_mode(0o755))
                        .with_context(|| format!("cannot make {}", path.display()))?;
                    self.open_in_root(&path, flags)
                }
                found => found,
            }
            .with_context(|| format!("cannot open {}", path.display()))?;
        }
        Ok(at)
    }

    /// Opens a path as the image means it.
    fn open_in_root(&self, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let path = match path.as_os_str().is_empty() {
            true => Path::new("."),
            false => path,
        };
        let within = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
        openat2(
            &self.root,
            path,
            flags | OFlags::CLOEXEC,
            Mode::empty(),
            within,
        )
    }
}

fn timestamps(modified_s: i64) -> Timestamps {
    let time = Timespec {
        tv_sec: modified_s,
        tv_nsec: 0,
    };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}

fn describe(path: &[u8], what: &str) -> String {
    format!("cannot {what}: {}", String::from_utf8_lossy(path))
}

fn list_names(directory: &OwnedFd) -> Result<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(name);
        }
    }
    Ok(names)
}

/// Removes a name with all below it; a link is removed, and not what it leads to.
fn remove_entry(parent: &OwnedFd, name: &OsStr, depth: usize) -> Result<()> {
    let found = match statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(()),
        found => found?,
    };
    if FileType::from_raw_mode(found.st_mode) != FileType::Directory {
        return Ok(unlinkat(parent, name, AtFlags::empty())?);
    }
    if depth > DEPTH_MAX {
        bail!("directories of more than {DEPTH_MAX} levels");
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = openat(parent, name, flags, Mode::empty())?;
    for inner in list_names(&directory)? {
        remove_entry(&directory, OsStr::from_bytes(&inner), depth + 1)?;
    }
    Ok(unlinkat(parent, name, AtFlags::REMOVEDIR)?)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn new_tree() -> (tempfile::TempDir, TargetTree) {
        let directory = tempfile::tempdir().expect("a directory");
        fs::create_dir(directory.path().join("root")).expect("mkdir");
        let tree = TargetTree::open(&directory.path().join("root")).expect("a tree");
        (directory, tree)
    }

    #[test]
    fn escaping_paths_are_refused() {
        for path in ["/etc/passwd", "../x", "a/../../x", "a/.."] {
            assert!(split_path(path.as_bytes()).is_err(), "{path}");
            let (directory, mut tree) = new_tree();
            let mut content = &b"x"[..];
            let made = tree.create_file(path.as_bytes(), 0o644, None, &mut content);
            assert!(made.is_err(), "{path}");
            assert!(!directory.path().join("x").exists());
        }
        assert_eq!(split_path(b"./a//b/.").expect("a path").len(), 2);
    }

    #[test]
    fn links_lead_into_the_image() {
        let (directory, mut tree) = new_tree();
        let outside = directory.path().join("outside");
        fs::create_dir(&outside).expect("mkdir");
        symlink(&outside, directory.path().join("root/absolute")).expect("link");
        symlink("../outside", directory.path().join("root/above")).expect("link");
        for path in [&b"absolute/x"[..], b"above/x"] {
            // Where they lead there is nothing in the image.
            assert!(tree.create_file(path, 0o644, None, &mut &b"x"[..]).is_err());
        }
        tree.create_link(b"bin", b"/usr/bin", None).expect("a link");
        tree.create_directory(b"usr/bin", 0o755, None)
            .expect("a directory");
        tree.create_file(b"bin/tool", 0o4755, Some(7), &mut &b"x"[..])
            .expect("a file");
        assert!(directory.path().join("root/usr/bin/tool").exists());
        assert!(tree.create_hard_link(b"stolen", b"../outside").is_err());
        assert!(fs::read_dir(&outside).expect("it").next().is_none());
        let counts = tree.finish().expect("it is written");
        assert_eq!((counts.files, counts.bytes), (2, 1));
    }
}
