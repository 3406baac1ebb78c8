//! Files below a directory, reached without ever leaving it: a job owns what is in its volume and
//! may put symbolic links there, or swap a directory for a link at any moment. Knows no volumes.

use std::borrow::Cow;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use bafs_proto::message::{SourceEntry, SourceKind};
use bafs_proto::path::{from_bytes, to_bytes};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps};
use rustix::io::Errno;

use super::unlocked_directory::UnlockedDirectory;
use crate::source::source_entry;

/// How often a path is followed while things are renamed on the way.
const OPEN_TRIES: usize = 1000;

/// A directory whose inside is reached through it only.
#[derive(Debug)]
pub(super) struct ConfinedDirectory(OwnedFd);

/// What is at a path.
#[derive(Debug)]
pub(super) struct EntryInfo {
    pub(super) entry: SourceEntry,
    /// Its number if it is a file that has other names too.
    pub(super) file_number: Option<u64>,
}

/// Opens what is inside. The kernel cannot tell whether a `..` stays there while anything is
/// renamed or mounted on the machine, and says so.
fn open_confined(
    root: &OwnedFd,
    path: &str,
    flags: OFlags,
    resolve: ResolveFlags,
) -> rustix::io::Result<OwnedFd> {
    let path = to_bytes(if path.is_empty() { "." } else { path });
    let open = || rustix::fs::openat2(root, &*path, flags, Mode::empty(), resolve);
    let mut tries = std::iter::repeat_with(open).take(OPEN_TRIES);
    let opened = tries.find(|opened| !matches!(opened, Err(Errno::AGAIN)));
    opened.unwrap_or(Err(Errno::AGAIN))
}

impl ConfinedDirectory {
    /// Takes `directory` as the root.
    pub(super) fn open(directory: &Path) -> io::Result<Self> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let open = |how| rustix::fs::open(directory, flags | how, Mode::empty());
        Ok(Self(match open(OFlags::RDONLY) {
            // A job has closed it; what is asked of it opens it for as long.
            Err(Errno::ACCESS) => open(OFlags::PATH)?,
            opened => opened?,
        }))
    }

    /// Opens a regular file for reading, through symbolic links as long as they stay inside.
    ///
    /// # Errors
    /// `InvalidInput` for anything but a regular file; what the system says otherwise.
    pub(super) fn open_file(&self, path: &str) -> io::Result<File> {
        // Without NONBLOCK a FIFO that the job made would block us for ever.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let open = |flags| open_confined(&self.0, path, flags, resolve);
        let held = OFlags::PATH | OFlags::CLOEXEC;
        let file = match open(flags) {
            Err(Errno::ACCESS) => match open(held) {
                // A directory on the way is closed.
                Err(Errno::ACCESS) => {
                    let (parent, name) = self.parent(path)?;
                    let itself = held | OFlags::NOFOLLOW;
                    let opened = rustix::fs::openat(&parent, &*name, itself, Mode::empty())?;
                    open_unreadable(opened, flags)?
                }
                opened => open_unreadable(opened?, flags)?,
            },
            opened => File::from(opened?),
        };
        if !file.metadata()?.is_file() {
            return Err(not_a_file_error());
        }
        Ok(file)
    }

    /// Where a symbolic link leads.
    ///
    /// # Errors
    /// It is none, or its directory is not inside.
    pub(super) fn read_link(&self, path: &str) -> io::Result<String> {
        let (parent, name) = self.parent(path)?;
        let target = rustix::fs::readlinkat(parent, &*name, Vec::new())?;
        Ok(from_bytes(target.as_bytes()))
    }

    /// Makes a new regular file for writing. Its directory must exist.
    pub(super) fn create_file(&self, path: &str) -> io::Result<File> {
        let (parent, name) = self.parent(path)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        Ok(File::from(rustix::fs::openat(parent, &*name, flags, mode)?))
    }

    /// Makes a regular file, or empties the one that is there. Its directory must exist.
    pub(super) fn empty_file(&self, path: &str) -> io::Result<File> {
        let (parent, name) = self.parent(path)?;
        let how = OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW;
        let flags = OFlags::RDWR | OFlags::CLOEXEC | how;
        let mode = Mode::RUSR | Mode::WUSR;
        Ok(File::from(rustix::fs::openat(parent, &*name, flags, mode)?))
    }

    /// Makes a directory. Its parent must exist. Gives the bytes that it takes on disk.
    pub(super) fn create_directory(&self, path: &str) -> io::Result<u64> {
        let (parent, name) = self.parent(path)?;
        rustix::fs::mkdirat(&parent, &*name, Mode::RWXU)?;
        let made = rustix::fs::statat(parent, &*name, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(disk_bytes(&made))
    }

    /// Makes a symbolic link, whatever it points at, with its modification time. Gives the bytes
    /// that it takes on disk.
    pub(super) fn create_symlink(
        &self,
        path: &str,
        target: &[u8],
        mtime_ns: i64,
    ) -> io::Result<u64> {
        let (parent, name) = self.parent(path)?;
        rustix::fs::symlinkat(target, &parent, &*name)?;
        let (times, itself) = (timestamps(mtime_ns), AtFlags::SYMLINK_NOFOLLOW);
        rustix::fs::utimensat(&parent, &*name, &times, itself)?;
        Ok(disk_bytes(&rustix::fs::statat(&parent, &*name, itself)?))
    }

    /// Sets permission bits and modification time of a directory, the root for the empty path.
    /// Gives the bytes that it takes on disk, and `syncs` it.
    pub(super) fn finish_directory(
        &self,
        path: &str,
        (mode, mtime_ns): (u32, i64),
        syncs: bool,
    ) -> io::Result<u64> {
        let directory = self.open_directory(path)?;
        set_attributes(&directory, mode, mtime_ns)?;
        if syncs {
            rustix::fs::fsync(&directory)?;
        }
        Ok(disk_bytes(&rustix::fs::fstat(&directory)?))
    }

    /// Opens a directory inside, not through symbolic links.
    pub(super) fn open_directory(&self, path: &str) -> io::Result<UnlockedDirectory> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let opened = open_confined(&self.0, path, flags, resolve).and_then(|opened| {
            // Whoever may list a directory may perhaps not go into it.
            rustix::fs::openat(&opened, c".", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
            Ok(opened)
        });
        match opened {
            Err(Errno::ACCESS) => UnlockedDirectory::open_unlocked(&self.0, &to_bytes(path)),
            opened => Ok(UnlockedDirectory::from(opened?)),
        }
    }

    /// Gives the regular file at `path` a further name. The directory of that must exist.
    pub(super) fn hard_link(&self, path: &str, new: &str) -> io::Result<()> {
        let ((parent, name), (new_parent, new_name)) = (self.parent(path)?, self.parent(new)?);
        let flags = AtFlags::empty(); // a symbolic link is not followed
        Ok(rustix::fs::linkat(
            parent, &*name, new_parent, &*new_name, flags,
        )?)
    }

    /// What is at `path`, itself and not what it points at; `None` for a socket, FIFO or device,
    /// which have no content to copy.
    pub(super) fn find_entry(&self, path: &str) -> io::Result<Option<EntryInfo>> {
        if path.is_empty() {
            let stat = rustix::fs::fstat(&self.0)?;
            let entry = source_entry(path, &stat, || Err(Errno::INVAL))?;
            return Ok(entry.map(|entry| EntryInfo {
                entry,
                file_number: None,
            }));
        }
        let (parent, name) = self.parent(path)?;
        let stat = rustix::fs::statat(&parent, &*name, AtFlags::SYMLINK_NOFOLLOW)?;
        let target = || Ok(rustix::fs::readlinkat(&parent, &*name, Vec::new())?.into_bytes());
        let entry = source_entry(path, &stat, target)?;
        Ok(entry.map(|entry| {
            let has_others = entry.kind == SourceKind::File && stat.st_nlink > 1;
            let file = has_others.then_some(stat.st_ino);
            EntryInfo {
                entry,
                file_number: file,
            }
        }))
    }

    /// Names in a directory, as texts, sorted.
    pub(super) fn sorted_names(&self, path: &str) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for found in Dir::read_from(self.open_directory(path)?.as_fd())? {
            let name = from_bytes(found?.file_name().to_bytes());
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn parent<'a>(&self, path: &'a str) -> io::Result<(UnlockedDirectory, Cow<'a, [u8]>)> {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        Ok((self.open_directory(parent)?, to_bytes(name)))
    }
}

/// Opens a regular file that its owner, who runs this, may not read: with other bits for a moment.
fn open_unreadable(held: OwnedFd, flags: OFlags) -> io::Result<File> {
    let stat = rustix::fs::fstat(&held)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(not_a_file_error());
    }
    // A path that leads to what is held, and nowhere else.
    let path = format!("/proc/self/fd/{}", held.as_raw_fd());
    let mode = Mode::from_raw_mode(stat.st_mode & 0o7777);
    // Whose it is not, may not.
    let refused = |_| io::Error::from(Errno::ACCESS);
    rustix::fs::chmod(&path, mode | Mode::RUSR).map_err(refused)?;
    let opened = rustix::fs::open(&path, flags, Mode::empty());
    rustix::fs::chmod(&path, mode)?;
    Ok(File::from(opened?))
}

fn not_a_file_error() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")
}

/// Sets permission bits and modification time of an open file or directory. The bits that change
/// the identity of who runs a file are not carried over: they belong to the machine of origin.
pub(super) fn set_attributes(file: impl AsFd, mode: u32, mtime_ns: i64) -> io::Result<()> {
    rustix::fs::fchmod(&file, Mode::from_raw_mode(mode & 0o1777))?;
    Ok(rustix::fs::futimens(&file, &timestamps(mtime_ns))?)
}

fn disk_bytes(stat: &Stat) -> u64 {
    u64::try_from(stat.st_blocks).unwrap_or(0) * 512
}

fn timestamps(mtime_ns: i64) -> Timestamps {
    let time = Timespec {
        tv_sec: mtime_ns.div_euclid(1_000_000_000),
        tv_nsec: mtime_ns.rem_euclid(1_000_000_000),
    };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::PermissionsExt;

    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    use super::*;

    /// Does something on this thread as anybody but root.
    fn as_unprivileged<T>(act: impl FnOnce() -> T) -> T {
        let mut own = capabilities(None).expect("capabilities");
        let all = CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
        own.effective.remove(all);
        set_capabilities(None, own).expect("give up");
        act()
    }

    #[test]
    fn unreadable_files_are_opened_without_changing_modes() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("f");
        std::fs::write(&path, "x").expect("write");
        let closed = std::fs::Permissions::from_mode(0o200);
        std::fs::set_permissions(&path, closed).expect("chmod");
        let root = ConfinedDirectory::open(directory.path()).expect("root");
        let act = move || {
            let mut text = String::new();
            let read = root
                .open_file("f")
                .and_then(|mut f| f.read_to_string(&mut text));
            read.map(|_| text)
        };
        let read = std::thread::spawn(|| as_unprivileged(act))
            .join()
            .expect("join");
        assert_eq!(read.expect("it is ours"), "x");
        let mode = std::fs::metadata(path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o200);
    }

    #[test]
    fn closed_directories_are_read_without_changing_modes() {
        let root = tempfile::tempdir().expect("directory");
        let at = |path: &str| root.path().join(path);
        std::fs::create_dir_all(at("a/b")).expect("directories");
        std::fs::write(at("a/b/f"), "x").expect("write");
        let close = |path: &str, bits| {
            let bits = std::fs::Permissions::from_mode(bits);
            std::fs::set_permissions(at(path), bits).expect("chmod");
        };
        close("a/b/f", 0);
        close("a/b", 0o600);
        close("a", 0);
        close("", 0);
        let path = root.path().to_owned();
        let act = move || {
            let root = ConfinedDirectory::open(&path).expect("root");
            let names = ["", "a", "a/b"].map(|path| root.sorted_names(path).expect("names"));
            let seen = root.find_entry("a/b/f").expect("look").expect("a file");
            let mut text = String::new();
            let mut file = root.open_file("a/b/f").expect("open");
            file.read_to_string(&mut text).expect("read");
            (names, seen.entry.mode, text)
        };
        let (names, mode, text) = std::thread::spawn(|| as_unprivileged(act))
            .join()
            .expect("join");
        assert_eq!(names, [["a"], ["b"], ["f"]]);
        assert_eq!((mode, text.as_str()), (0, "x"));
        let bits = |path: &str| {
            std::fs::metadata(at(path))
                .expect("there")
                .permissions()
                .mode()
        };
        let bits = ["", "a", "a/b", "a/b/f"].map(|path| bits(path) & 0o777);
        assert_eq!(bits, [0, 0, 0o600, 0]);
        close("", 0o700);
        close("a", 0o700);
        close("a/b", 0o700);
    }

    #[test]
    fn non_utf8_names_are_preserved() {
        let directory = tempfile::tempdir().expect("directory");
        let root = ConfinedDirectory::open(directory.path()).expect("root");
        let name = from_bytes(b"\xe9");
        root.create_directory(&name).expect("mkdir");
        root.create_file(&format!("{name}/f\u{e9}")).expect("file");
        assert_eq!(root.sorted_names("").expect("names"), [name.as_str()]);
        assert_eq!(root.sorted_names(&name).expect("names"), ["f\u{e9}"]);
        let path = std::ffi::OsStr::from_bytes(b"\xe9/f\xc3\xa9");
        assert!(directory.path().join(path).exists());
    }
}
