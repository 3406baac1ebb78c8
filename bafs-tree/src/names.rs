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

use crate::anchor::{Anchor, identity, open_path};
use crate::attributes::attr;
use crate::errno::{self, Outcome};
use crate::room::Change;
use crate::session::Session;

/// A shorter link target is kept in the inode of ext4.
const INLINE_TARGET_BYTES: usize = 60;

const SETGID: u32 = 0o2000;

/// What is to be made.
pub(crate) struct Making<'a> {
    pub(crate) caller: Caller,
    pub(crate) parent: InodeNo,
    pub(crate) name: &'a [u8],
    /// Permission bits, the umask applied; `None` for a symbolic link, which has none.
    pub(crate) mode: Option<u32>,
}

/// A file that loses a name, with a descriptor that shows it afterwards, too.
struct Victim {
    anchor: Arc<Anchor>,
    fd: Arc<OwnedFd>,
}

impl Session {
    pub(crate) fn lookup(&self, parent: InodeNo, name: &[u8]) -> FileResult {
        let name = errno::component(name)?;
        let parent = self.visible(parent, &name, errno::NOENT)?;
        let (anchor, stat) = Anchor::find(&parent, &name)?;
        Ok(FileReply::Attr(self.admit(anchor, &stat)))
    }

    pub(crate) fn make_node(&self, making: &Making<'_>, mode: u32, rdev: u32) -> FileResult {
        let kind = match FileType::from_raw_mode(mode) {
            FileType::Unknown => FileType::RegularFile,
            kind => kind,
        };
        match kind {
            FileType::RegularFile | FileType::Fifo | FileType::Socket => {}
            FileType::CharacterDevice | FileType::BlockDevice if self.tree().privileged() => {}
            FileType::CharacterDevice | FileType::BlockDevice => return Err(errno::PERM),
            _ => return Err(errno::INVAL),
        }
        let bits = Mode::from_raw_mode(mode & 0o7777);
        self.make(making, 0, |parent, name| {
            mknodat(parent, name, kind, bits, u64::from(rdev))
        })
    }

    pub(crate) fn make_directory(&self, making: &Making<'_>) -> FileResult {
        let bits = Mode::from_raw_mode(making.mode.unwrap_or(0) & 0o1777);
        self.make(making, 1, |parent, name| mkdirat(parent, name, bits))
    }

    pub(crate) fn make_symlink(&self, making: &Making<'_>, target: &[u8]) -> FileResult {
        let blocks = u64::from(target.len() >= INLINE_TARGET_BYTES);
        self.make(making, blocks, |parent, name| {
            symlinkat(target, parent, name)
        })
    }

    pub(crate) fn make_link(&self, ino: InodeNo, parent: InodeNo, name: &[u8]) -> FileResult {
        let name = errno::component(name)?;
        let anchor = self.anchor(ino)?;
        let parent = self.visible(parent, &name, errno::ACCESS)?;
        let mut change = Change::begin(&[&*parent]);
        let room = change.reserve(&parent, name.to_bytes(), 0);
        room.map_err(|error| unless_taken(&parent, &name, error))?;
        // `AT_EMPTY_PATH` needs a privilege; the way through /proc does not.
        let flags = AtFlags::SYMLINK_FOLLOW;
        linkat(
            rustix::fs::CWD,
            anchor.proc_path()?.as_str(),
            parent.fd()?,
            &*name,
            flags,
        )
        .map_err(errno::of)?;
        let found = Anchor::find(&parent, &name);
        drop(change);
        let (anchor, stat) = found?;
        Ok(FileReply::Attr(self.admit(anchor, &stat)))
    }

    pub(crate) fn create(&self, making: &Making<'_>, flags: i32) -> FileResult {
        let name = errno::component(making.name)?;
        let parent = self.visible(making.parent, &name, errno::ACCESS)?;
        let wanted = OFlags::from_bits_retain(flags.cast_unsigned());
        let kept = wanted & (OFlags::SYNC | OFlags::DSYNC);
        let opening = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | kept;
        let bits = Mode::from_raw_mode(making.mode.unwrap_or(0) & 0o7777);
        let mut opened = None;
        let made = self.make_in(making, 0, &parent, &name, |parent, name| {
            opened = Some(openat(parent, name, opening | OFlags::NOFOLLOW, bits)?);
            Ok(())
        });
        match made {
            Ok((anchor, stat)) => {
                let fd = opened.ok_or(errno::STALE)?;
                let attr = self.admit(anchor, &stat);
                self.opened((attr, making.caller.pid), fd, false)
            }
            Err(errno::EXIST) if flags & OFlags::EXCL.bits().cast_signed() == 0 => {
                let (anchor, stat) = Anchor::find(&parent, &name)?;
                let attr = self.admit(anchor, &stat);
                self.open((attr.ino, flags), making.caller.pid)
                    .inspect_err(|_| self.forget(attr.ino, 1))
            }
            Err(error) => Err(error),
        }
    }

    pub(crate) fn unlink(&self, parent: InodeNo, name: &[u8], flags: AtFlags) -> FileResult {
        let name = errno::component(name)?;
        let parent = self.visible(parent, &name, errno::NOENT)?;
        let change = Change::begin(&[&*parent]);
        let victim = self.victim(&parent, &name)?;
        unlinkat(parent.fd()?, &*name, flags).map_err(errno::of)?;
        drop(change);
        self.unname_victim(&victim);
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
        let (name, new_name) = (errno::component(name)?, errno::component(new_name)?);
        let parent = self.visible(parent, &name, errno::NOENT)?;
        let new_parent = self.visible(new_parent, &new_name, errno::ACCESS)?;
        let mut change = Change::begin(&[&*parent, &*new_parent]);
        let room = change.reserve(&new_parent, new_name.to_bytes(), 0);
        let (from, to) = (parent.fd()?, new_parent.fd()?);
        let call = |flags| renameat_with(&from, &*name, &to, &*new_name, flags).map_err(errno::of);
        if flags.is_empty() && room.is_ok() {
            // Mostly nothing is replaced, and then nothing has to be looked for.
            match call(RenameFlags::NOREPLACE) {
                Ok(()) => return Ok(FileReply::Done),
                // `EINVAL`: among others, the host's file system does not know the flag.
                Err(errno::EXIST | errno::INVAL) => {}
                Err(error) => return Err(error),
            }
        }
        statat(&from, &*name, AtFlags::SYMLINK_NOFOLLOW).map_err(errno::of)?;
        let victim = self.victim(&new_parent, &new_name).ok();
        if victim.is_none() {
            room?;
        }
        call(flags)?;
        drop(change);
        if let Some(victim) = victim {
            self.unname_victim(&victim);
        }
        Ok(FileReply::Done)
    }

    /// Makes something that surely takes `blocks` itself, and refers to it.
    fn make(
        &self,
        making: &Making<'_>,
        blocks: u64,
        call: impl FnOnce(BorrowedFd<'_>, &CStr) -> rustix::io::Result<()>,
    ) -> FileResult {
        let name = errno::component(making.name)?;
        let parent = self.visible(making.parent, &name, errno::ACCESS)?;
        let (anchor, stat) = self.make_in(making, blocks, &parent, &name, call)?;
        Ok(FileReply::Attr(self.admit(anchor, &stat)))
    }

    /// Makes something within the limit, and gives it to the caller.
    fn make_in(
        &self,
        making: &Making<'_>,
        blocks: u64,
        parent: &Anchor,
        name: &CStr,
        call: impl FnOnce(BorrowedFd<'_>, &CStr) -> rustix::io::Result<()>,
    ) -> Outcome<(Anchor, Stat)> {
        if [making.caller.uid, making.caller.gid].contains(&u32::MAX) {
            // No number of a user or group: what is made would have no owner.
            return Err(errno::INVAL);
        }
        let mut change = Change::begin(&[parent]);
        let room = change.reserve(parent, name.to_bytes(), blocks);
        room.map_err(|error| unless_taken(parent, name, error))?;
        let account = self.tree().account();
        if account.is_some_and(|account| !account.reserve_file()) {
            return Err(unless_taken(parent, name, errno::NOSPC));
        }
        let made = parent.fd().and_then(|parent| {
            call(parent.as_fd(), name).map_err(errno::of)?;
            let found = open_path(parent.as_fd(), name);
            let made = found.and_then(|found| Anchor::new_made(self.tree(), found));
            made.inspect_err(|_| unmake(parent.as_fd(), name))
        });
        let (anchor, stat) = match made {
            Ok(made) => made,
            Err(error) => {
                if let Some(account) = account {
                    account.give_back_file();
                }
                return Err(error);
            }
        };
        change.charge_new(&anchor, self.tree().charge(&stat));
        let parent = change.settle(parent)?;
        let stat = give_to_caller(making, &parent, &anchor, stat)?;
        Ok((anchor, stat))
    }

    /// The directory `parent`, if it may show `name`.
    fn visible(&self, parent: InodeNo, name: &CStr, otherwise: Errno) -> Outcome<Arc<Anchor>> {
        if parent == InodeNo::ROOT && self.tree().hidden() == Some(name.to_bytes()) {
            return Err(otherwise);
        }
        let anchor = self.anchor(parent)?;
        if anchor.kind() == FileType::Directory {
            Ok(anchor)
        } else {
            Err(errno::NOTDIR)
        }
    }

    /// The file of a name that is to go. One that the session refers to is not opened once more.
    fn victim(&self, parent: &Anchor, name: &CStr) -> Outcome<Victim> {
        let stat = statat(parent.fd()?, name, AtFlags::SYMLINK_NOFOLLOW).map_err(errno::of)?;
        let known = self.referred(identity(&stat));
        if let Some(anchor) = known
            && let Ok(fd) = anchor.fd()
        {
            return Ok(Victim { anchor, fd });
        }
        let anchor = Arc::new(Anchor::find(parent, name)?.0);
        let fd = anchor.fd()?;
        Ok(Victim { anchor, fd })
    }

    /// Takes note if a file has lost its last name.
    fn unname_victim(&self, victim: &Victim) {
        if let Ok(stat) = fstat(&victim.fd)
            && stat.st_nlink == 0
        {
            victim.anchor.set_unlinked();
            self.unname(&stat, &victim.fd);
        }
    }

    /// Counts a reference to what `anchor` holds, and describes it.
    pub(crate) fn admit(&self, anchor: Anchor, stat: &Stat) -> Attr {
        let born_ns = if self.tells_births() {
            anchor.born_ns()
        } else {
            0
        };
        Attr {
            born_ns,
            ..attr(self.refer(anchor, stat), stat)
        }
    }
}

/// Why a name is not made for which there is no space: one that is taken says so all the same.
fn unless_taken(parent: &Anchor, name: &CStr, error: Errno) -> Errno {
    let found = parent.fd().and_then(|parent| open_path(parent, name));
    if found.is_ok() { errno::EXIST } else { error }
}

/// Removes what was made and cannot be told of, for want of descriptors: what fails leaves nothing.
fn unmake(parent: BorrowedFd<'_>, name: &CStr) {
    let removed = unlinkat(parent, name, AtFlags::empty());
    let removed = removed.or_else(|_| unlinkat(parent, name, AtFlags::REMOVEDIR));
    if let Err(error) = removed {
        tracing::warn!(%error, "a half-made file stays");
    }
}

/// Sets owner, group and mode of a new file as the host's file system would for the caller.
fn give_to_caller(making: &Making<'_>, parent: &Stat, made: &Anchor, stat: Stat) -> Outcome<Stat> {
    let inherits = parent.st_mode & SETGID != 0;
    let mut changed = false;
    if made.tree().privileged() {
        let caller = making.caller;
        let gid = if inherits { parent.st_gid } else { caller.gid };
        if (stat.st_uid, stat.st_gid) != (caller.uid, gid) {
            let (uid, gid) = (Some(Uid::from_raw(caller.uid)), Some(Gid::from_raw(gid)));
            let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
            // In a user name space an owner may be out of reach: then it stays as it is.
            changed = chownat(made.fd()?, c"", uid, gid, flags).is_ok();
        }
    }
    if let Some(mode) = making.mode {
        let directory = made.kind() == FileType::Directory;
        let inherited = if directory && inherits { SETGID } else { 0 };
        let wanted = (mode & 0o7777) | inherited;
        if changed || stat.st_mode & 0o7777 != wanted {
            let mode = Mode::from_raw_mode(wanted);
            rustix::fs::chmod(made.proc_path()?.as_str(), mode).map_err(errno::of)?;
            changed = true;
        }
    }
    if changed { made.stat() } else { Ok(stat) }
}
