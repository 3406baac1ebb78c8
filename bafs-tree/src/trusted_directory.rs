//! A directory that nobody else may have prepared, or can put another in the place of: it and what
//! it holds are the caller's, and whoever owns a directory above it is trusted. As sshd(8) looks at
//! its files with StrictModes. Opens nothing below it.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat, fchmod, fstat, open, statat};
use rustix::process::geteuid;

/// Most symbolic links on the way to a directory, as the kernel's limit.
const LINKS_MAX: usize = 40;

/// Who may write into a directory beside its owner.
const GROUP: u32 = 0o020;
const OTHERS: u32 = 0o002;
/// Only the owner of an entry may remove or rename it.
const STICKY: u32 = 0o1000;

/// Whom a process trusts with its directories.
#[derive(Debug, Clone, Copy)]
struct TrustedOwners {
    own_uid: u32,
    /// Owner of what belongs to users that this name space does not know, as root outside of it.
    unmapped_uid: Option<u32>,
}

impl TrustedOwners {
    fn of_process() -> Self {
        let me = geteuid().as_raw();
        Self {
            own_uid: me,
            unmapped_uid: overflow_uid(),
        }
    }

    fn is_trusted(self, owner: u32) -> bool {
        owner == 0 || owner == self.own_uid || Some(owner) == self.unmapped_uid
    }

    /// Why a directory with this owner and mode on the way to ours is not good, if it is not.
    fn objection(self, owner: u32, mode: u32) -> Option<String> {
        if !self.is_trusted(owner) {
            return Some(format!("belongs to another user (uid {owner})"));
        }
        if mode & STICKY != 0 {
            return None;
        }
        if mode & OTHERS != 0 {
            return Some("may be written by everybody".to_owned());
        }
        // Of an ordinary user it may be a directory of a project.
        (mode & GROUP != 0 && self.own_uid == 0).then(|| "may be written by its group".to_owned())
    }
}

/// Makes a directory that is the caller's alone, with what is missing above it, or checks that it
/// is one; answers its path without links. Blocks.
///
/// # Errors
/// `PermissionDenied` with who else could have prepared or replaced it; what the system says.
pub fn private_directory(path: &Path) -> io::Result<PathBuf> {
    let trust = TrustedOwners::of_process();
    let place = resolve(path, trust)?;
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = open(&place, flags, Mode::empty())?;
    let found = fstat(&directory)?;
    if found.st_uid != trust.own_uid {
        return Err(permission_denied(format!(
            "it belongs to another user (uid {}), who may have prepared it; choose a directory \
             that is not there yet, or one of yours",
            found.st_uid
        )));
    }
    check_entries(&directory, trust)?;
    restrict_to_owner(&directory, &found)?;
    Ok(place)
}

/// Who could put another file in the place of one in a directory of this owner and mode, if
/// somebody could whom this process does not trust.
#[must_use]
pub fn replacement_objection(owner: u32, mode: u32) -> Option<String> {
    TrustedOwners::of_process().objection(owner, mode)
}

/// What others may have put there is refused; an empty directory is closed to them.
fn restrict_to_owner(directory: &OwnedFd, found: &Stat) -> io::Result<()> {
    let open = found.st_mode & (GROUP | OTHERS) != 0;
    let shared = || {
        permission_denied(format!(
            "other users may write to it (mode {:o}), and it is not empty: look at what is in it, \
             then `chmod 700` it, or choose a directory that is not there yet",
            found.st_mode & 0o7777
        ))
    };
    if open && !entry_names(directory)?.is_empty() {
        return Err(shared());
    }
    fchmod(directory, Mode::RWXU)?;
    if open && !entry_names(directory)?.is_empty() {
        fchmod(directory, Mode::from_raw_mode(found.st_mode))?;
        return Err(shared());
    }
    Ok(())
}

/// Nothing at the top is another's, or leads elsewhere.
fn check_entries(directory: &OwnedFd, trust: TrustedOwners) -> io::Result<()> {
    for name in entry_names(directory)? {
        let shown = || name.to_string_lossy().escape_debug().to_string();
        let found = match statat(
            directory.as_fd(),
            name.as_os_str(),
            AtFlags::SYMLINK_NOFOLLOW,
        ) {
            // Another process that uses it, as one that is ending.
            Err(rustix::io::Errno::NOENT) => continue,
            found => found?,
        };
        let kind = FileType::from_raw_mode(found.st_mode);
        if kind == FileType::Symlink {
            return Err(permission_denied(format!(
                "'{}' in it is a symbolic link, which is not followed: put a directory or file in \
                 its place, or choose another directory",
                shown()
            )));
        }
        if found.st_uid != trust.own_uid && found.st_uid != 0 {
            return Err(permission_denied(format!(
                "'{}' in it belongs to another user (uid {}): choose a directory that is not there \
                 yet",
                shown(),
                found.st_uid
            )));
        }
        let is_open = found.st_mode & OTHERS != 0 && found.st_mode & STICKY == 0;
        if kind == FileType::Directory && is_open && found.st_uid == trust.own_uid {
            return Err(permission_denied(format!(
                "everybody may write to '{}' in it: look at what is there, then `chmod 700` it",
                shown()
            )));
        }
    }
    Ok(())
}

fn entry_names(directory: &OwnedFd) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(OsStr::from_bytes(name).to_owned());
        }
    }
    Ok(names)
}

/// Follows a path as far as every directory and link on it is of somebody who is trusted; makes
/// what is missing.
fn resolve(path: &Path, trust: TrustedOwners) -> io::Result<PathBuf> {
    let whole = std::path::absolute(path)?;
    let mut left: VecDeque<OsString> = path_components(&whole);
    let mut at = PathBuf::from("/");
    let mut links = 0;
    while let Some(name) = left.pop_front() {
        if name == ".." {
            at.pop();
            continue;
        }
        let next = at.join(&name);
        let found = match fs::symlink_metadata(&next) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                create_directory(&next)?;
                fs::symlink_metadata(&next)?
            }
            found => found?,
        };
        if found.is_symlink() {
            if !trust.is_trusted(found.uid()) {
                return Err(permission_denied(format!(
                    "{} on the way to it is a symbolic link of another user (uid {}); choose \
                     another directory",
                    next.display(),
                    found.uid()
                )));
            }
            links += 1;
            if links > LINKS_MAX {
                return Err(rustix::io::Errno::LOOP.into());
            }
            let target = fs::read_link(&next)?;
            if target.is_absolute() {
                at = PathBuf::from("/");
            }
            let mut first = path_components(&target);
            first.append(&mut left);
            left = first;
            continue;
        }
        if !found.is_dir() {
            return Err(rustix::io::Errno::NOTDIR.into());
        }
        let is_last = left.is_empty();
        let objection = trust.objection(found.uid(), found.mode());
        if let Some(objection) = objection.filter(|_| !is_last) {
            return Err(permission_denied(format!(
                "the directory {} above it {objection}, who could put another in its place; choose \
                 a directory below those of root and yours",
                next.display()
            )));
        }
        at = next;
    }
    Ok(at)
}

fn create_directory(path: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

fn path_components(path: &Path) -> VecDeque<OsString> {
    let part = |component: Component<'_>| match component {
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
        Component::ParentDir => Some("..".into()),
        Component::Normal(name) => Some(name.to_owned()),
    };
    path.components().filter_map(part).collect()
}

/// The number by which the kernel shows users of other name spaces, where there are such.
fn overflow_uid() -> Option<u32> {
    let map = fs::read_to_string("/proc/self/uid_map").ok()?;
    let words: Vec<_> = map.split_whitespace().collect();
    if words == ["0", "0", "4294967295"] {
        return None;
    }
    let user = fs::read_to_string("/proc/sys/kernel/overflowuid").ok()?;
    user.trim().parse().ok()
}

fn permission_denied(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn refusal(path: &Path) -> String {
        private_directory(path).expect_err("refused").to_string()
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("chmod");
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("it is there").mode() & 0o7777
    }

    #[test]
    fn missing_directories_are_created_for_the_owner_only() {
        let top = tempfile::tempdir().expect("directory");
        let asked = top.path().join("a/./b/../c");
        let made = private_directory(&asked).expect("made");
        assert_eq!(made, top.path().canonicalize().expect("path").join("a/c"));
        assert_eq!(
            (mode(&made), mode(made.parent().expect("a"))),
            (0o700, 0o700)
        );
        fs::write(made.join("kept"), b"x").expect("write");
        assert_eq!(private_directory(&made).expect("again"), made);
    }

    #[test]
    fn inner_links_are_refused_own_links_are_followed() {
        let top = tempfile::tempdir().expect("directory");
        let store = private_directory(&top.path().join("store")).expect("made");
        symlink(&store, top.path().join("mine")).expect("link");
        let by_link = private_directory(&top.path().join("mine")).expect("own link");
        assert_eq!(by_link, store);
        symlink("/etc", store.join("volumes")).expect("link");
        let said = refusal(&store);
        assert!(
            said.contains("'volumes' in it is a symbolic link"),
            "{said}"
        );
        symlink("a", top.path().join("b")).expect("link");
        symlink("b", top.path().join("a")).expect("link");
        assert!(refusal(&top.path().join("a")).contains("os error 40"));
    }

    #[test]
    fn nonempty_directories_writable_by_others_are_refused() {
        let top = tempfile::tempdir().expect("directory");
        let store = top.path().join("store");
        fs::create_dir(&store).expect("directory");
        set_mode(&store, 0o777);
        private_directory(&store).expect("it is empty");
        assert_eq!(mode(&store), 0o700);
        fs::write(store.join("starts"), b"").expect("write");
        set_mode(&store, 0o775);
        let said = refusal(&store);
        assert!(
            said.contains("mode 775") && said.contains("not empty"),
            "{said}"
        );
        set_mode(&store, 0o700);
        fs::create_dir(store.join("trash")).expect("directory");
        set_mode(&store.join("trash"), 0o777);
        let said = refusal(&store);
        assert!(said.contains("everybody may write to 'trash'"), "{said}");
    }

    #[test]
    fn untrusted_parent_directories_are_refused() {
        let top = tempfile::tempdir().expect("directory");
        let above = top.path().join("shared");
        fs::create_dir(&above).expect("directory");
        set_mode(&above, 0o777);
        let said = refusal(&above.join("store"));
        assert!(
            said.contains("shared above it may be written by everybody"),
            "{said}"
        );
        set_mode(&above, 0o1777);
        private_directory(&above.join("store")).expect("sticky");
        let (root, user) = (0, 1000);
        let of = |me| TrustedOwners {
            own_uid: me,
            unmapped_uid: None,
        };
        assert_eq!(of(user).objection(root, 0o755), None);
        assert_eq!(of(user).objection(user, 0o775), None);
        for (me, owner, mode) in [
            (root, user, 0o755),
            (user, 1001, 0o755),
            (root, root, 0o775),
        ] {
            assert!(
                of(me).objection(owner, mode).is_some(),
                "{me} {owner} {mode:o}"
            );
        }
    }
}
