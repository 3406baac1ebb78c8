//! Operations on names: look up, make, link, rename, remove.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use bafs_proto::file_op::{Attr, Caller, Errno, FileReply, FileResult};
use bafs_proto::ids::InodeNo;
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, RenameFlags, Stat, Uid, chownat, fstat, linkat, mkdirat,
    mknodat, openat, renameat_with, statat, symlinkat, unlinkat,
};

use crate::directory_change::DirectoryChange;
use crate::errno::{self, Outcome};
use crate::file_reference::FileReference;
use crate::host_file::{host_file_id, open_path, to_attr};
use crate::session::Session;

/// A shorter link target is kept in the inode of ext4.
const INLINE_TARGET_BYTES: usize = 60;

const SETGID: u32 = 0o2000;

/// What is to be made.
pub(crate) struct NewEntry<'a> {
    pub(crate) caller: Caller,
    pub(crate) parent: InodeNo,
    pub(crate) name: &'a [u8],
    /// Permission bits, the umask applied; `None` for a symbolic link, which has none.
    pub(crate) mode: Option<u32>,
}

/// A file that loses a name, with a descriptor that shows it afterwards, too.
struct RemovedFile {
    anchor: Arc<FileReference>,
    fd: Arc<OwnedFd>,
}

impl Session {
    pub(crate) fn lookup(&self, parent: InodeNo, name: &[u8]) -> FileResult {
        let name = errno::checked_name(name)?;
        let parent = self.directory_for_name(parent, &name, errno::NOENT)?;
        let (file_reference, stat) = FileReference::find(&parent, &name)?;
        Ok(FileReply::Attr(self.refer_with_attr(file_reference, &stat)))
    }

    pub(crate) fn make_node(&self, entry: &NewEntry<'_>, mode: u32, rdev: u32) -> FileResult {
        let kind = match FileType::from_raw_mode(mode) {
            FileType::Unknown => FileType::RegularFile,
            kind => kind,
        };
        match kind {
            FileType::RegularFile | FileType::Fifo | FileType::Socket => {}
            FileType::CharacterDevice | FileType::BlockDevice if self.tree().is_privileged() => {}
            FileType::CharacterDevice | FileType::BlockDevice => return Err(errno::PERM),
            _ => return Err(errno::INVAL),
        }
        let bits = Mode::from_raw_mode(mode & 0o7777);
        self.make(entry, 0, |parent, name| {
            mknodat(parent, name, kind, bits, u64::from(rdev))
        })
    }

    pub(crate) fn make_directory(&self, entry: &NewEntry<'_>) -> FileResult {
        let bits = Mode::from_raw_mode(entry.mode.unwrap_or(0) & 0o1777);
        self.make(entry, 1, |parent, name| mkdirat(parent, name, bits))
    }

    pub(crate) fn make_symlink(&self, entry: &NewEntry<'_>, target: &[u8]) -> FileResult {
        let blocks = u64::from(target.len() >= INLINE_TARGET_BYTES);
        self.make(entry, blocks, |parent, name| {
            symlinkat(target, parent, name)
        })
    }

    pub(crate) fn make_link(&self, ino: InodeNo, parent: InodeNo, name: &[u8]) -> FileResult {
        let name = errno::checked_name(name)?;
        let file_reference = self.file_reference(ino)?;
        let parent = self.directory_for_name(parent, &name, errno::ACCESS)?;
        let mut change = DirectoryChange::begin(&[&*parent]);
        let room = change.reserve(&parent, name.to_bytes(), 0);
        room.map_err(|error| exists_or(&parent, &name, error))?;
        // `AT_EMPTY_PATH` needs a privilege; the way through /proc does not.
        let flags = AtFlags::SYMLINK_FOLLOW;
        linkat(
            rustix::fs::CWD,
            file_reference.proc_path()?.as_str(),
            parent.path_descriptor()?,
            &*name,
            flags,
        )
        .map_err(errno::from_host)?;
        let found = FileReference::find(&parent, &name);
        drop(change);
        let (file_reference, stat) = found?;
        Ok(FileReply::Attr(self.refer_with_attr(file_reference, &stat)))
    }

    pub(crate) fn create(&self, entry: &NewEntry<'_>, flags: i32) -> FileResult {
        let name = errno::checked_name(entry.name)?;
        let parent = self.directory_for_name(entry.parent, &name, errno::ACCESS)?;
        let wanted = OFlags::from_bits_retain(flags.cast_unsigned());
        let kept = wanted & (OFlags::SYNC | OFlags::DSYNC);
        let opening = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | kept;
        let bits = Mode::from_raw_mode(entry.mode.unwrap_or(0) & 0o7777);
        let mut opened = None;
        let made = self.make_in(entry, 0, &parent, &name, |parent, name| {
            opened = Some(openat(parent, name, opening | OFlags::NOFOLLOW, bits)?);
            Ok(())
        });
        match made {
            Ok((file_reference, stat)) => {
                let fd = opened.ok_or(errno::STALE)?;
                let attr = self.refer_with_attr(file_reference, &stat);
                self.register_open_file((attr, entry.caller.pid), fd, false)
            }
            Err(errno::EXIST) if flags & OFlags::EXCL.bits().cast_signed() == 0 => {
                let (file_reference, stat) = FileReference::find(&parent, &name)?;
                let attr = self.refer_with_attr(file_reference, &stat);
                self.open((attr.ino, flags), entry.caller.pid)
                    .inspect_err(|_| self.forget(attr.ino, 1))
            }
            Err(error) => Err(error),
        }
    }

    pub(crate) fn unlink(&self, parent: InodeNo, name: &[u8], flags: AtFlags) -> FileResult {
        let name = errno::checked_name(name)?;
        let parent = self.directory_for_name(parent, &name, errno::NOENT)?;
        let change = DirectoryChange::begin(&[&*parent]);
        let removed = self.file_to_remove(&parent, &name)?;
        unlinkat(parent.path_descriptor()?, &*name, flags).map_err(errno::from_host)?;
        drop(change);
        self.note_if_unlinked(&removed);
        Ok(FileReply::Done)
    }

    pub(crate) fn rename(
        &self,
        (parent, name): (InodeNo, &[u8]),
        (new_parent, new_name): (InodeNo, &[u8]),
        flags: u32,
    ) -> FileResult {
        let flags = RenameFlags::from_bits(flags).ok_or(errno::INVAL)?;
        if flags.contains(RenameFlags::WHITEOUT) {
            return Err(errno::INVAL);
        }
        let (name, new_name) = (errno::checked_name(name)?, errno::checked_name(new_name)?);
        let parent = self.directory_for_name(parent, &name, errno::NOENT)?;
        let new_parent = self.directory_for_name(new_parent, &new_name, errno::ACCESS)?;
        let mut change = DirectoryChange::begin(&[&*parent, &*new_parent]);
        let room = change.reserve(&new_parent, new_name.to_bytes(), 0);
        let (from, to) = (parent.path_descriptor()?, new_parent.path_descriptor()?);
        let call =
            |flags| renameat_with(&from, &*name, &to, &*new_name, flags).map_err(errno::from_host);
        if flags.is_empty() && room.is_ok() {
            // Mostly nothing is replaced, and then nothing has to be looked for.
            match call(RenameFlags::NOREPLACE) {
                Ok(()) => return Ok(FileReply::Done),
                // `EINVAL`: among others, the host's file system does not know the flag.
                Err(errno::EXIST | errno::INVAL) => {}
                Err(error) => return Err(error),
            }
        }
        statat(&from, &*name, AtFlags::SYMLINK_NOFOLLOW).map_err(errno::from_host)?;
        let removed = self.file_to_remove(&new_parent, &new_name).ok();
        if removed.is_none() {
            room?;
        }
        call(flags)?;
        drop(change);
        if let Some(removed) = removed {
            self.note_if_unlinked(&removed);
        }
        Ok(FileReply::Done)
    }

    /// Makes something that surely takes `blocks` itself, and refers to it.
    fn make(
        &self,
        entry: &NewEntry<'_>,
        blocks: u64,
        call: impl FnOnce(BorrowedFd<'_>, &CStr) -> rustix::io::Result<()>,
    ) -> FileResult {
        let name = errno::checked_name(entry.name)?;
        let parent = self.directory_for_name(entry.parent, &name, errno::ACCESS)?;
        let (file_reference, stat) = self.make_in(entry, blocks, &parent, &name, call)?;
        Ok(FileReply::Attr(self.refer_with_attr(file_reference, &stat)))
    }

    /// Makes something within the limit, and gives it to the caller.
    fn make_in(
        &self,
        entry: &NewEntry<'_>,
        blocks: u64,
        parent: &FileReference,
        name: &CStr,
        call: impl FnOnce(BorrowedFd<'_>, &CStr) -> rustix::io::Result<()>,
    ) -> Outcome<(FileReference, Stat)> {
        if [entry.caller.uid, entry.caller.gid].contains(&u32::MAX) {
            // No number of a user or group: what is made would have no owner.
            return Err(errno::INVAL);
        }
        let mut change = DirectoryChange::begin(&[parent]);
        let room = change.reserve(parent, name.to_bytes(), blocks);
        room.map_err(|error| exists_or(parent, name, error))?;
        let account = self.tree().account();
        if account.is_some_and(|account| !account.reserve_file()) {
            return Err(exists_or(parent, name, errno::NOSPC));
        }
        let made = parent.path_descriptor().and_then(|parent| {
            call(parent.as_fd(), name).map_err(errno::from_host)?;
            let found = open_path(parent.as_fd(), name);
            let made = found.and_then(|found| FileReference::new_created(self.tree(), found));
            made.inspect_err(|_| remove_created(parent.as_fd(), name))
        });
        let (file_reference, stat) = match made {
            Ok(made) => made,
            Err(error) => {
                if let Some(account) = account {
                    account.release_file();
                }
                return Err(error);
            }
        };
        change.charge_new(&file_reference, self.tree().charge_bytes(&stat));
        let parent = change.settle(parent)?;
        let stat = set_owner_and_mode(entry, &parent, &file_reference, stat)?;
        Ok((file_reference, stat))
    }

    /// The directory `parent`, if it may show `name`.
    fn directory_for_name(
        &self,
        parent: InodeNo,
        name: &CStr,
        otherwise: Errno,
    ) -> Outcome<Arc<FileReference>> {
        if parent == InodeNo::ROOT && self.tree().hidden() == Some(name.to_bytes()) {
            return Err(otherwise);
        }
        let file_reference = self.file_reference(parent)?;
        if file_reference.kind() == FileType::Directory {
            Ok(file_reference)
        } else {
            Err(errno::NOTDIR)
        }
    }

    /// The file of a name that is to go. One that the session refers to is not opened once more.
    fn file_to_remove(&self, parent: &FileReference, name: &CStr) -> Outcome<RemovedFile> {
        let stat = statat(parent.path_descriptor()?, name, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(errno::from_host)?;
        let known = self.find_referred(host_file_id(&stat));
        if let Some(file_reference) = known
            && let Ok(fd) = file_reference.path_descriptor()
        {
            return Ok(RemovedFile {
                anchor: file_reference,
                fd,
            });
        }
        let anchor = Arc::new(FileReference::find(parent, name)?.0);
        let fd = anchor.path_descriptor()?;
        Ok(RemovedFile { anchor, fd })
    }

    /// Takes note if a file has lost its last name.
    fn note_if_unlinked(&self, removed: &RemovedFile) {
        if let Ok(stat) = fstat(&removed.fd)
            && stat.st_nlink == 0
        {
            removed.anchor.set_unlinked();
            self.mark_unlinked(&stat, &removed.fd);
        }
    }

    /// Counts a reference to what `anchor` holds, and describes it.
    pub(crate) fn refer_with_attr(&self, file_reference: FileReference, stat: &Stat) -> Attr {
        let born_ns = if self.reports_btimes() {
            file_reference.btime_ns()
        } else {
            0
        };
        Attr {
            btime_ns: born_ns,
            ..to_attr(self.refer(file_reference, stat), stat)
        }
    }
}

/// Why a name is not made for which there is no space: one that is taken says so all the same.
fn exists_or(parent: &FileReference, name: &CStr, error: Errno) -> Errno {
    let found = parent
        .path_descriptor()
        .and_then(|parent| open_path(parent, name));
    if found.is_ok() { errno::EXIST } else { error }
}

/// Removes what was made and cannot be told of, for want of descriptors: what fails leaves nothing.
fn remove_created(parent: BorrowedFd<'_>, name: &CStr) {
    let removed = unlinkat(parent, name, AtFlags::empty());
    let removed = removed.or_else(|_| unlinkat(parent, name, AtFlags::REMOVEDIR));
    if let Err(error) = removed {
        tracing::warn!(%error, "a half-made file stays");
    }
}

/// Sets owner, group and mode of a new file as the host's file system would for the caller.
fn set_owner_and_mode(
    entry: &NewEntry<'_>,
    parent: &Stat,
    made: &FileReference,
    stat: Stat,
) -> Outcome<Stat> {
    let inherits = parent.st_mode & SETGID != 0;
    let mut changed = false;
    if made.tree().is_privileged() {
        let caller = entry.caller;
        let gid = if inherits { parent.st_gid } else { caller.gid };
        if (stat.st_uid, stat.st_gid) != (caller.uid, gid) {
            let (uid, gid) = (Some(Uid::from_raw(caller.uid)), Some(Gid::from_raw(gid)));
            let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
            // In a user name space an owner may be out of reach: then it stays as it is.
            changed = chownat(made.path_descriptor()?, c"", uid, gid, flags).is_ok();
        }
    }
    if let Some(mode) = entry.mode {
        let directory = made.kind() == FileType::Directory;
        let inherited = if directory && inherits { SETGID } else { 0 };
        let wanted = (mode & 0o7777) | inherited;
        if changed || stat.st_mode & 0o7777 != wanted {
            let mode = Mode::from_raw_mode(wanted);
            rustix::fs::chmod(made.proc_path()?.as_str(), mode).map_err(errno::from_host)?;
            changed = true;
        }
    }
    if changed { made.stat() } else { Ok(stat) }
}
