//! Removal of a whole tree, however deep it is and whatever rights its directories have: a job may
//! leave ten thousand levels, which neither a stack nor a path holds.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, Dir, Mode, OFlags, RawMode, chmodat, fchmod, fstat, openat, renameat, unlinkat,
};
use rustix::io::Errno;

/// Directories that are this deep are moved to the top, and are no longer deep there. Each level
/// takes two descriptors.
const LEVELS_MAX: u32 = 32;

const OWNER_MODE: RawMode = 0o700;

/// Removes a directory with all that is in it, or a file. Links are not followed. Who owns the
/// directories in it needs no right to change them. What is made in it meanwhile may stay, and
/// then so does the directory.
///
/// # Errors
/// `NotFound` when it is not there; `DirectoryNotEmpty` when something was made in it meanwhile;
/// what the file system refuses.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    match unlinkat(CWD, path, AtFlags::empty()) {
        Err(Errno::ISDIR | Errno::PERM) => {}
        done => return Ok(done?),
    }
    let top = open_directory(CWD, path)?;
    let mut removal = Removal {
        top: top.as_fd(),
        moved_count: 0,
    };
    loop {
        let before = removal.moved_count;
        removal.empty_directory(top.as_fd(), 0)?;
        // What was moved to the top may have been missed there.
        if removal.moved_count == before {
            break;
        }
    }
    Ok(unlinkat(CWD, path, AtFlags::REMOVEDIR)?)
}

struct Removal<'a> {
    top: BorrowedFd<'a>,
    moved_count: u64,
}

impl Removal<'_> {
    /// Removes what is in a directory so many levels below the top.
    fn empty_directory(&mut self, directory: BorrowedFd<'_>, level: u32) -> io::Result<()> {
        for entry in Dir::read_from(directory)? {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            match unlinkat(directory, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => continue,
                Err(Errno::ISDIR | Errno::PERM) => {}
                Err(error) => return Err(error.into()),
            }
            match self.remove_directory(directory, name, level) {
                // Somebody else removes it as well.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                removed => removed?,
            }
        }
        Ok(())
    }

    /// Removes a directory in one that is so many levels below the top.
    fn remove_directory(
        &mut self,
        parent: BorrowedFd<'_>,
        name: &CStr,
        level: u32,
    ) -> io::Result<()> {
        let directory = open_directory(parent, name)?;
        if level == LEVELS_MAX {
            return self.move_up(parent, name);
        }
        self.empty_directory(directory.as_fd(), level + 1)?;
        Ok(unlinkat(parent, name, AtFlags::REMOVEDIR)?)
    }

    fn move_up(&mut self, parent: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
        loop {
            self.moved_count += 1;
            // An empty directory of that name goes, as it should.
            match renameat(
                parent,
                name,
                self.top,
                format!("moved-{}", self.moved_count),
            ) {
                Err(Errno::EXIST | Errno::NOTEMPTY | Errno::NOTDIR) => {}
                moved => return Ok(moved?),
            }
        }
    }
}

/// Opens a directory, and gives its owner the right to change it.
fn open_directory<P: rustix::path::Arg + Copy>(parent: impl AsFd, path: P) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let parent = parent.as_fd();
    let opened = match openat(parent, path, flags, Mode::empty()) {
        Err(Errno::ACCESS) => {
            chmodat(
                parent,
                path,
                Mode::from_raw_mode(OWNER_MODE),
                AtFlags::empty(),
            )?;
            openat(parent, path, flags, Mode::empty())?
        }
        opened => opened?,
    };
    if fstat(&opened)?.st_mode & OWNER_MODE != OWNER_MODE {
        // Where that is refused, what needs the right tells more.
        let _ = fchmod(&opened, Mode::from_raw_mode(OWNER_MODE));
    }
    Ok(opened)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use rustix::fs::mkdirat;

    use super::*;

    /// So many directories in each other, with a file in each.
    fn create_nested(top: &Path, levels: u32) {
        let mut at = open_directory(CWD, top).expect("open");
        let flags = OFlags::WRONLY | OFlags::CREATE;
        for _ in 0..levels {
            openat(&at, "f", flags, Mode::RUSR).expect("file");
            mkdirat(&at, "d", Mode::RWXU).expect("directory");
            at = open_directory(&at, "d").expect("open");
        }
    }

    #[test]
    fn arbitrarily_deep_trees_are_removed() {
        let parent = tempfile::tempdir().expect("directory");
        let top = parent.path().join("top");
        for levels in [0, 1, LEVELS_MAX, LEVELS_MAX + 1, LEVELS_MAX + 2, 14_000] {
            fs::create_dir(&top).expect("directory");
            // Names that are taken.
            fs::create_dir_all(top.join("moved-1/full")).expect("directory");
            fs::write(top.join("moved-2"), b"x").expect("write");
            create_nested(&top, levels);
            remove_tree(&top).expect("removed");
            assert!(!top.exists(), "{levels} levels");
        }
    }

    #[test]
    fn removal_ignores_permissions_and_follows_no_links() {
        let parent = tempfile::tempdir().expect("directory");
        let (top, other) = (parent.path().join("top"), parent.path().join("other"));
        for directory in ["other", "top", "top/a", "top/a/b"] {
            fs::create_dir(parent.path().join(directory)).expect("directory");
        }
        fs::write(other.join("kept"), b"x").expect("write");
        symlink(&other, top.join("link")).expect("link");
        fs::write(top.join("a/b/f"), b"x").expect("write");
        for (directory, mode) in [("a/b", 0o000), ("a", 0o500)] {
            let mode = Permissions::from_mode(mode);
            fs::set_permissions(top.join(directory), mode).expect("chmod");
        }
        remove_tree(&top).expect("removed");
        assert!(!top.exists());
        assert!(other.join("kept").exists());
        let gone = remove_tree(&top).expect_err("it is not there");
        assert_eq!(gone.kind(), io::ErrorKind::NotFound);
        symlink(&other, &top).expect("link");
        remove_tree(&top).expect("a link");
        assert!(other.join("kept").exists() && fs::symlink_metadata(&top).is_err());
    }
}
