//! The exported directory: opens what is below it, and nothing else. Checks no rights.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use bafs_proto::path::{check_relative, from_bytes, join, to_bytes};
use bafs_proto::{Error, ErrorCode, Result};
use rustix::fs::{
    Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, fstatvfs, fsync, mkdirat, openat2,
    readlinkat, stat,
};
use rustix::io::Errno;

/// Name in the root that belongs to the server: uploads under way, receipts, its id.
pub const OWN_DIRECTORY: &str = ".bafs-put";

/// Names of a directory that are compared for a "did you mean", as in workflows: seconds spent on a
/// hint are not worth it.
const NEAREST_CANDIDATES_MAX: usize = 20_000;

/// An exported directory.
#[derive(Debug)]
pub(crate) struct Export {
    root: OwnedFd,
    root_path: PathBuf,
    identity: (u64, u64),
    /// What the file system says that it is; some say nothing.
    file_system: u64,
    name: OnceLock<String>,
    /// Whether the log says that it is not in its place.
    is_told_gone: AtomicBool,
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
            is_told_gone: AtomicBool::new(false),
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
    /// another one otherwise, and what links lead to would have another name. The log says when
    /// that changes.
    ///
    /// # Errors
    /// `ServerFault`, until the same directory is back.
    pub(crate) fn check_in_place(&self) -> Result<()> {
        let named = stat(&self.root_path);
        // Another directory may be mounted over it: then only the name leads elsewhere.
        let is_there = named.as_ref().is_ok_and(|named| self.is_root(named))
            && real_path(&self.root).is_ok_and(|path| path == self.root_path);
        let root = self.root_path.display();
        if is_there {
            if self.is_told_gone.swap(false, Ordering::Relaxed) {
                tracing::info!("the exported directory {root} is back");
            }
            return Ok(());
        }
        let other = match named {
            Ok(_) => " (what is at its path now is another one)",
            Err(_) => "",
        };
        let text = format!(
            "the exported directory {root} is gone; put it back, or restart this home with another \
             directory{other}"
        );
        if !self.is_told_gone.swap(true, Ordering::Relaxed) {
            tracing::warn!("{text}");
        }
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
        let found = self.find(path).map_err(|error| match error.code {
            ErrorCode::NotFound => self.missing_error(path),
            _ => error,
        })?;
        if found.path != path {
            allow(&found.path).map_err(|error| self.redirected_error(path, &found.path, error))?;
        }
        Ok(found)
    }

    /// Why there is nothing at a path: what is exported, and the name that was probably meant. It
    /// tells one name at most that the token may not grant, a slip or three away from one that it
    /// does.
    fn missing_error(&self, path: &str) -> Error {
        let home = match self.name() {
            "" => self.root_path.display().to_string(),
            name => format!("home '{name}', which exports {},", self.root_path.display()),
        };
        let hint = match self.find_nearest(path) {
            Some(near) => format!("; did you mean '{near}'?"),
            None => String::new(),
        };
        Error::new(ErrorCode::NotFound, format!("{home} has no '{path}'{hint}"))
    }

    /// The path that was probably meant by one with nothing at it: its first missing name is
    /// another in the same directory.
    fn find_nearest(&self, path: &str) -> Option<String> {
        let names: Vec<&str> = path.split('/').collect();
        let is_missing = |count: &usize| self.find(&names[..*count].join("/")).is_err();
        let count = (1..=names.len()).find(is_missing)?;
        let above = names[..count - 1].join("/");
        let directory = self.find(&above).ok()?;
        // What links lead to is not what the path named.
        if directory.path != above {
            return None;
        }
        let entries = Dir::new(directory.open_directory().ok()?).ok()?;
        let entries = entries.take(NEAREST_CANDIDATES_MAX).flatten();
        let entries = entries.map(|entry| from_bytes(entry.file_name().to_bytes()));
        let shown = entries.filter(|name| !self.is_own_name(&directory.stat, name));
        let near = find_nearest_name(names[count - 1], shown)?;
        let rest = names[count..].join("/");
        Some(join(&join(&above, &near), &rest))
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

/// The name with the fewest slips of the pen from `wanted`, as many as workflows permit: none in a
/// letter, one in a short name, up to three in a long one. Of equals the first by alphabet.
fn find_nearest_name(wanted: &str, names: impl Iterator<Item = String>) -> Option<String> {
    let length = wanted.chars().count();
    let slips_max = match length {
        0 | 1 => 0,
        _ => (length / 3).clamp(1, 3),
    };
    let wanted = wanted.to_lowercase();
    names
        .filter(|name| name != "." && name != ".." && name.chars().count().abs_diff(length) <= 3)
        .map(|name| (strsim::osa_distance(&wanted, &name.to_lowercase()), name))
        .filter(|(slips, _)| *slips <= slips_max)
        .min()
        .map(|(_, name)| name)
}

/// The user of this process, as an administrator looks for it.
fn own_user() -> String {
    let uid = nix::unistd::geteuid();
    match nix::unistd::User::from_uid(uid) {
        Ok(Some(user)) => format!("{} (uid {uid})", user.name),
        // Its number is all that this machine knows of it.
        Ok(None) | Err(_) => format!("with the uid {uid}"),
    }
}

/// Says as whom this server is refused, and where.
fn permission_error(path: &str, error: Errno) -> Error {
    let above = match path.rsplit_once('/') {
        Some((above, _)) => format!("the directory '{above}' above it"),
        None => "the exported directory".to_owned(),
    };
    let text = format!(
        "the home server's user {} lacks the right for '{path}' or {above}: {error}; give it with \
         chmod at home, or name another path",
        own_user()
    );
    Error::new(ErrorCode::RightMissing, text)
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
        Errno::ACCESS | Errno::PERM => return permission_error(path, error),
        Errno::ISDIR => {
            let text = format!(
                "'{path}' is a directory at home: extract to a name in it, as '{path}/NAME', or \
                 remove it"
            );
            return Error::new(ErrorCode::WrongState, text);
        }
        Errno::LOOP | Errno::NAMETOOLONG => ErrorCode::BadPath,
        Errno::ROFS => ErrorCode::RightMissing,
        Errno::NOTEMPTY | Errno::EXIST => ErrorCode::WrongState,
        Errno::NOSPC | Errno::DQUOT => ErrorCode::NoSpaceBytes,
        _ => ErrorCode::ServerFault,
    };
    Error::new(
        code,
        format!("the home server cannot reach '{path}': {error}"),
    )
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn export(name: &str) -> (tempfile::TempDir, Export) {
        let root = tempfile::tempdir().expect("directory");
        fs::create_dir_all(root.path().join("in/reads")).expect("directories");
        fs::create_dir(root.path().join(OWN_DIRECTORY)).expect("directory");
        std::os::unix::fs::symlink("in", root.path().join("link")).expect("link");
        let export = Export::open(root.path()).expect("export");
        if !name.is_empty() {
            export.set_name(name);
        }
        (root, export)
    }

    #[test]
    fn missing_sources_suggest_similar_names() {
        for name in ["home", ""] {
            let (_root, export) = export(name);
            let place = export.root_path().display();
            let home = match name {
                "" => place.to_string(),
                name => format!("home '{name}', which exports {place},"),
            };
            for (path, hint) in [
                ("inn", "; did you mean 'in'?"),
                ("IN/reads", "; did you mean 'in/reads'?"),
                ("in/raeds", "; did you mean 'in/reads'?"),
                ("out", ""),
                ("i", ""),
                ("link/raeds", ""),
                (".bafs-pat", ""),
                (OWN_DIRECTORY, ""),
            ] {
                let refused = export.find_allowed(path, |_| Ok(())).expect_err(path);
                assert_eq!(refused.code, ErrorCode::NotFound, "{path}");
                assert_eq!(refused.detail, format!("{home} has no '{path}'{hint}"));
            }
        }
    }

    #[test]
    fn refused_targets_say_what_to_do() {
        let directory = system_error("out/o2", Errno::ISDIR);
        assert_eq!(directory.code, ErrorCode::WrongState);
        let words = "'out/o2' is a directory at home: extract to a name in it, as 'out/o2/NAME', \
                     or remove it";
        assert_eq!(directory.detail, words);
        for (path, place) in [
            ("ro/o", "'ro/o' or the directory 'ro' above it"),
            ("o", "'o' or the exported directory"),
        ] {
            let refused = system_error(path, Errno::ACCESS);
            assert_eq!(refused.code, ErrorCode::RightMissing);
            let uid = nix::unistd::geteuid();
            for part in [place, &format!("uid {uid}"), "; give it with chmod at home"] {
                assert!(refused.detail.contains(part), "{refused}");
            }
        }
    }
}
