//! The exported directory: opens what is below it, and nothing else. Checks no rights.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use bafs_proto::path::{check_relative, from_bytes, join, to_bytes};
use bafs_proto::{Error, ErrorCode, Result};
use rustix::fs::{
    FileType, Mode, OFlags, ResolveFlags, Stat, fstat, fstatvfs, fsync, mkdirat, openat2,
    readlinkat, stat,
};
use rustix::io::Errno;

/// Name in the root that belongs to the server: uploads under way, receipts, its id.
pub const OWN_DIRECTORY: &str = ".bafs-put";

/// An exported directory.
#[derive(Debug)]
pub(crate) struct Export {
    root: OwnedFd,
    root_path: PathBuf,
    identity: (u64, u64),
    /// What the file system says that it is; some say nothing.
    file_system: u64,
    name: OnceLock<String>,
}

/// Something below the export, held but not opened.
#[derive(Debug)]
pub(crate) struct ExportEntry {
    pub(crate) fd: OwnedFd,
    pub(crate) stat: Stat,
    /// Where it really is, after symbolic links.
    pub(crate) path: String,
}

impl Export {
    pub(crate) fn open(root: &Path) -> Result<Self> {
        let fail = |error: Errno| {
            let text = format!(
                "cannot export {}: {error}; give a directory that exists and is readable",
                root.display()
            );
            Error::new(ErrorCode::NotFound, text)
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(root, flags, Mode::empty()).map_err(fail)?;
        let stat = fstat(&fd).map_err(fail)?;
        let root_path = real_path(&fd).map_err(fail)?;
        Ok(Self {
            identity: (stat.st_dev, stat.st_ino),
            file_system: fstatvfs(&fd).map_err(fail)?.f_fsid,
            root: fd,
            root_path,
            name: OnceLock::new(),
        })
    }

    /// Names the home that exports it, once.
    pub(crate) fn set_name(&self, name: &str) {
        self.name.get_or_init(|| name.to_owned());
    }

    /// The name of the home that exports it, if it has one.
    pub(crate) fn name(&self) -> &str {
        self.name.get().map_or("", String::as_str)
    }

    pub(crate) fn root_path(&self) -> &Path {
        &self.root_path
    }

    /// Checks that the directory is still where it was opened: what is done by path would reach
    /// another one otherwise, and what links lead to would have another name.
    ///
    /// # Errors
    /// `ServerFault`, until the same directory is back.
    pub(crate) fn check_in_place(&self) -> Result<()> {
        let named = stat(&self.root_path);
        // Another directory may be mounted over it: then only the name leads elsewhere.
        let is_there = named.is_ok_and(|named| self.is_root(&named))
            && real_path(&self.root).is_ok_and(|path| path == self.root_path);
        if is_there {
            return Ok(());
        }
        let text = format!(
            "the exported directory {} is gone; put it back, or restart this home with another \
             directory",
            self.root_path.display()
        );
        Err(Error::new(ErrorCode::ServerFault, text))
    }

    /// The same directory at the same place, if it is there again as another device: of a file
    /// system that was mounted anew, with the same number in the same file system, as far as that
    /// has an identity. What it was mounted over is another one.
    pub(crate) fn reopen(&self) -> Option<Self> {
        let anew = Self::open(&self.root_path).ok()?;
        let is_same = (anew.identity.1, anew.file_system) == (self.identity.1, self.file_system);
        is_same.then_some(anew)
    }

    pub(crate) fn is_root(&self, stat: &Stat) -> bool {
        (stat.st_dev, stat.st_ino) == self.identity
    }

    /// Finds a path, through symbolic links as long as they stay inside.
    ///
    /// # Errors
    /// `BadPath`, `NotFound`, `RightMissing` when the server itself may not go there.
    pub(crate) fn find(&self, path: &str) -> Result<ExportEntry> {
        check_relative(path)?;
        if is_own_path(path) {
            return Err(not_found_error(path));
        }
        let bytes = to_bytes(path);
        let opened = match self.open_inside(&bytes, ResolveFlags::empty()) {
            Err(Errno::XDEV) => self.open_by_absolute_links(&bytes),
            opened => opened,
        };
        let fd = opened.map_err(|error| system_error(path, error))?;
        let stat = fstat(&fd).map_err(|error| system_error(path, error))?;
        let real = real_path(&fd).map_err(|error| system_error(path, error))?;
        let inside = real.strip_prefix(&self.root_path);
        let inside = inside.map_err(|_| not_found_error(path))?;
        let real = from_bytes(inside.as_os_str().as_bytes());
        if is_own_path(&real) {
            return Err(not_found_error(path));
        }
        Ok(ExportEntry {
            fd,
            stat,
            path: real,
        })
    }

    /// Opens what is at a path, never through a link that leads out.
    fn open_inside(&self, path: &[u8], more: ResolveFlags) -> rustix::io::Result<OwnedFd> {
        let at: &[u8] = if path.is_empty() { b"." } else { path };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | more;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        loop {
            match openat2(&self.root, at, flags, Mode::empty(), resolve) {
                // Something was renamed while the path was followed.
                Err(Errno::AGAIN) => {}
                other => return other,
            }
        }
    }

    /// Opens what is at a path behind links that begin with a slash, which the kernel takes for
    /// leading out, if they do not.
    fn open_by_absolute_links(&self, path: &[u8]) -> rustix::io::Result<OwnedFd> {
        let whole = self.root_path.join(OsStr::from_bytes(path));
        let real = whole.canonicalize().map_err(|_| Errno::XDEV)?;
        let inside = real.strip_prefix(&self.root_path);
        let inside = inside.map_err(|_| Errno::XDEV)?.as_os_str();
        self.open_inside(inside.as_bytes(), ResolveFlags::NO_SYMLINKS)
    }

    /// As [`Export::find`]; where symbolic links lead elsewhere than `path` says, `allow` must
    /// permit it, or a job could link its way out of its token.
    ///
    /// # Errors
    /// As [`Export::find`], and what `allow` says.
    pub(crate) fn find_allowed(
        &self,
        path: &str,
        allow: impl Fn(&str) -> Result<()>,
    ) -> Result<ExportEntry> {
        let found = self.find(path)?;
        if found.path != path {
            allow(&found.path).map_err(|error| self.redirected_error(path, &found.path, error))?;
        }
        Ok(found)
    }

    /// Finds a directory and makes it, with those above it, where it is missing. Where links lead
    /// elsewhere than `path` says, `allow` must permit it.
    ///
    /// # Errors
    /// As [`Self::find`]; what `allow` answers; `WrongState` when something on the way is no
    /// directory.
    pub(crate) fn make_directory(
        &self,
        path: &str,
        allow: &dyn Fn(&str) -> Result<()>,
    ) -> Result<ExportEntry> {
        // Mostly it is there.
        match self.find(path) {
            Ok(found) if file_type(&found.stat) == FileType::Directory => return Ok(found),
            _ => {}
        }
        check_relative(path)?;
        let mut found = self.find("")?;
        let ends = path
            .match_indices('/')
            .map(|(at, _)| at)
            .chain([path.len()]);
        for end in ends.filter(|end| *end > 0) {
            let upper = &path[..end];
            found = match self.find(upper) {
                Err(error) if error.code == ErrorCode::NotFound && !is_own_path(upper) => {
                    let name = upper.rsplit('/').next().unwrap_or(upper);
                    // Whoever may write at `path` may have the directories above it; but a link
                    // may lead to a place that was never granted.
                    let place = found.child_path(name);
                    if place != upper {
                        allow(&place)
                            .map_err(|error| self.redirected_error(upper, &place, error))?;
                    }
                    match mkdirat(&found.fd, &*to_bytes(name), Mode::from_raw_mode(0o777)) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(error) => return Err(system_error(upper, error)),
                    }
                    reopen(&found, OFlags::DIRECTORY)
                        .and_then(fsync)
                        .map_err(|error| system_error(upper, error))?;
                    self.find(upper)?
                }
                other => other?,
            };
            if file_type(&found.stat) != FileType::Directory {
                let text = format!("'{upper}' is not a directory");
                return Err(Error::new(ErrorCode::WrongState, text));
            }
        }
        Ok(found)
    }

    /// Why a token that grants `path` is refused at `place`, where links in the export lead from
    /// there.
    pub(crate) fn redirected_error(&self, path: &str, place: &str, error: Error) -> Error {
        if error.code != ErrorCode::RightMissing || place == path {
            return error;
        }
        let instead = match self.name() {
            "" => format!("'{place}'"),
            name => format!("bafs://{name}/{place}"),
        };
        let text = format!(
            "'{path}' is a symbolic link to '{place}', for which the token grants no right; name \
             {instead} instead"
        );
        Error::new(error.code, text)
    }

    /// Whether `name` in the directory `found` is the server's own.
    pub(crate) fn is_own_name(&self, found: &Stat, name: &str) -> bool {
        name == OWN_DIRECTORY && self.is_root(found)
    }
}

impl ExportEntry {
    /// Where `name` in this directory really is.
    pub(crate) fn child_path(&self, name: &str) -> String {
        join(&self.path, name)
    }

    /// Opens a regular file for reading.
    ///
    /// # Errors
    /// `WrongState` for anything else, which could block or has no content.
    pub(crate) fn open_file(&self) -> Result<File> {
        if file_type(&self.stat) != FileType::RegularFile {
            let text = format!("'{}' is not a regular file", self.path);
            return Err(Error::new(ErrorCode::WrongState, text));
        }
        let opened =
            reopen(self, OFlags::empty()).map_err(|error| system_error(&self.path, error))?;
        Ok(File::from(opened))
    }

    /// Opens a directory for listing.
    pub(crate) fn open_directory(&self) -> Result<OwnedFd> {
        reopen(self, OFlags::DIRECTORY).map_err(|error| system_error(&self.path, error))
    }
}

fn reopen(found: &ExportEntry, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", found.fd.as_raw_fd());
    rustix::fs::open(
        path,
        flags | OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )
}

fn real_path(fd: &OwnedFd) -> rustix::io::Result<PathBuf> {
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let target = readlinkat(rustix::fs::CWD, link, Vec::new())?;
    Ok(PathBuf::from(OsString::from_vec(target.into_bytes())))
}

fn is_own_path(path: &str) -> bool {
    path.split('/').next() == Some(OWN_DIRECTORY)
}

pub(crate) fn file_type(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

fn not_found_error(path: &str) -> Error {
    Error::new(ErrorCode::NotFound, format!("home has no '{path}'"))
}

/// What a failed system call means to the caller.
pub(crate) fn system_error(path: &str, error: Errno) -> Error {
    let code = match error {
        Errno::NOENT | Errno::NOTDIR => return not_found_error(path),
        Errno::XDEV => {
            let text = format!(
                "'{path}' is outside the exported directory: on another file system, or behind a \
                 symbolic link; export that directory with its own home"
            );
            return Error::new(ErrorCode::BadPath, text);
        }
        Errno::LOOP | Errno::NAMETOOLONG => ErrorCode::BadPath,
        Errno::ACCESS | Errno::PERM | Errno::ROFS => ErrorCode::RightMissing,
        Errno::ISDIR | Errno::NOTEMPTY | Errno::EXIST => ErrorCode::WrongState,
        Errno::NOSPC | Errno::DQUOT => ErrorCode::NoSpaceBytes,
        _ => ErrorCode::ServerFault,
    };
    Error::new(
        code,
        format!("the home server cannot reach '{path}': {error}"),
    )
}
