//! Operations on attributes, links' targets and extended attributes.

use std::ffi::{CStr, CString};

use bafs_proto::file_op::{AttrChange, FileReply, FileResult, FileTime, SetTime};
use bafs_proto::ids::{HandleId, InodeNo};
use bafs_proto::limits::{NAME_BYTES_MAX, XATTR_BYTES_MAX};
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid,
    XattrFlags, chmod, chownat, fstat, ftruncate, getxattr, getxattr_query, listxattr, readlinkat,
    removexattr, setxattr, utimensat,
};

use crate::account::{Account, SpaceDecision};
use crate::errno::{self, Outcome};
use crate::file_reference::{FileReference, ProcPath};
use crate::host_file::to_attr;
use crate::session::Session;

/// What the kernel asks for at the first write of each file.
const CAPABILITY_XATTR: &[u8] = b"security.capability";

impl Session {
    pub(crate) fn get_attr(&self, ino: InodeNo, handle: Option<HandleId>) -> FileResult {
        if let Some(file) = handle.and_then(|handle| self.open_file(handle).ok())
            && file.ino == ino
        {
            let stat = fstat(&file.fd).map_err(errno::from_host)?;
            return Ok(FileReply::Attr(to_attr(ino, &stat)));
        }
        match self.file_reference(ino) {
            Ok(file_reference) => Ok(FileReply::Attr(to_attr(ino, &file_reference.stat()?))),
            Err(error) => self.last_attr(ino).map(FileReply::Attr).ok_or(error),
        }
    }

    pub(crate) fn set_attr(
        &self,
        ino: InodeNo,
        handle: Option<HandleId>,
        change: &AttrChange,
    ) -> FileResult {
        let file_reference = self.file_reference(ino)?;
        // To the system that number means no change, and is no owner.
        if [change.uid, change.gid].contains(&Some(u32::MAX)) {
            return Err(errno::INVAL);
        }
        if change.uid.is_some() || change.gid.is_some() {
            let (uid, gid) = (change.uid.map(Uid::from_raw), change.gid.map(Gid::from_raw));
            let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
            chownat(file_reference.path_descriptor()?, c"", uid, gid, flags)
                .map_err(errno::from_host)?;
        }
        // After the owner: a change of owner clears bits of the mode.
        if let Some(mode) = change.mode {
            if file_reference.kind() == FileType::Symlink {
                return Err(errno::OPNOTSUPP);
            }
            let path = file_reference.proc_path()?;
            let _alone = self.tree().lock_modes();
            chmod(path.as_str(), Mode::from_raw_mode(mode & 0o7777)).map_err(errno::from_host)?;
        }
        if let Some(size) = change.size {
            self.truncate(&file_reference, handle, size)?;
        }
        // Last, as a change of size sets the time.
        if change.atime.is_some() || change.mtime.is_some() {
            let times = Timestamps {
                last_access: timespec(change.atime)?,
                last_modification: timespec(change.mtime)?,
            };
            let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
            utimensat(file_reference.path_descriptor()?, c"", &times, flags)
                .map_err(errno::from_host)?;
        }
        Ok(FileReply::Attr(to_attr(ino, &file_reference.stat()?)))
    }

    fn truncate(
        &self,
        file_reference: &FileReference,
        handle: Option<HandleId>,
        size: u64,
    ) -> Outcome<()> {
        match file_reference.kind() {
            FileType::RegularFile => {}
            FileType::Directory => return Err(errno::ISDIR),
            _ => return Err(errno::INVAL),
        }
        let open = handle.and_then(|handle| self.open_file(handle).ok());
        let cut = || match &open {
            Some(file) => ftruncate(&file.fd, size).map_err(errno::from_host),
            None => ftruncate(file_reference.open(OFlags::WRONLY)?, size).map_err(errno::from_host),
        };
        let Some((account, state)) = file_reference.account_entry() else {
            return cut();
        };
        let mut charged = state.lock();
        let done = cut();
        if let Ok(stat) = file_reference.stat() {
            account.settle(&mut charged, file_reference.tree().charge_bytes(&stat), 0);
        }
        done
    }

    pub(crate) fn read_link(&self, ino: InodeNo) -> FileResult {
        let file_reference = self.file_reference(ino)?;
        if file_reference.kind() != FileType::Symlink {
            return Err(errno::INVAL);
        }
        let target = readlinkat(file_reference.path_descriptor()?, c"", Vec::new())
            .map_err(errno::from_host)?;
        Ok(FileReply::Bytes(target.into_bytes()))
    }

    pub(crate) fn set_xattr(
        &self,
        ino: InodeNo,
        name: &[u8],
        value: &[u8],
        flags: i32,
    ) -> FileResult {
        let name = attribute_name(name)?;
        let flags = XattrFlags::from_bits(flags.cast_unsigned()).ok_or(errno::INVAL)?;
        if value.len() > XATTR_BYTES_MAX {
            return Err(errno::E2BIG);
        }
        self.file_reference(ino)?.note_xattr();
        let new = Some((&*name, value.len())).filter(|_| !value.is_empty());
        self.change_xattr(ino, new, |path| setxattr(path, &*name, value, flags))
    }

    pub(crate) fn remove_xattr(&self, ino: InodeNo, name: &[u8]) -> FileResult {
        let name = attribute_name(name)?;
        self.change_xattr(ino, None, |path| removexattr(path, &*name))
    }

    fn change_xattr(
        &self,
        ino: InodeNo,
        new: Option<(&CStr, usize)>,
        call: impl FnOnce(&str) -> rustix::io::Result<()>,
    ) -> FileResult {
        let file_reference = self.file_reference(ino)?;
        let path = file_reference.proc_path()?;
        let Some((account, state)) = file_reference.account_entry() else {
            call(path.as_str()).map_err(errno::from_host)?;
            return Ok(FileReply::Done);
        };
        let mut charged = state.lock();
        let reserved = new.map_or(Ok(0), |new| {
            reserve_for(account, &file_reference, &path, new)
        })?;
        let done = call(path.as_str()).map_err(errno::from_host);
        let now = file_reference
            .stat()
            .map_or(*charged, |stat| file_reference.tree().charge_bytes(&stat));
        account.settle(&mut charged, now, reserved);
        done.map(|()| FileReply::Done)
    }

    pub(crate) fn get_xattr(&self, ino: InodeNo, name: &[u8]) -> FileResult {
        let name = attribute_name(name)?;
        let file_reference = self.file_reference(ino)?;
        if name.to_bytes() == CAPABILITY_XATTR && file_reference.lacks_capability() {
            return Err(errno::NODATA);
        }
        let path = file_reference.proc_path()?;
        read_value(|buffer| getxattr(path.as_str(), &*name, buffer))
    }

    pub(crate) fn list_xattr(&self, ino: InodeNo) -> FileResult {
        let path = self.file_reference(ino)?.proc_path()?;
        let mut reply = read_value(|buffer| listxattr(path.as_str(), buffer))?;
        if let FileReply::Bytes(names) = &mut reply {
            *names = names
                .split_inclusive(|byte| *byte == 0)
                .filter(|name| !is_withheld(name))
                .flatten()
                .copied()
                .collect();
        }
        Ok(reply)
    }
}

/// Reserves what a new value of an attribute may take; gives how much that is.
fn reserve_for(
    account: &Account,
    file_reference: &FileReference,
    path: &ProcPath,
    (name, length): (&CStr, usize),
) -> Outcome<u64> {
    // All attributes of a file share one block of ext4 beside the inode.
    let block_bytes = file_reference.tree().block_bytes();
    if account.try_reserve_worst_case(block_bytes) {
        return Ok(block_bytes);
    }
    let present = || getxattr_query(path.as_str(), name);
    if file_reference.tree().is_ext4() && present().is_ok_and(|present| present >= length) {
        return Ok(0);
    }
    account.reserve_exactly(|free, may_settle| match may_settle {
        _ if block_bytes <= free => SpaceDecision::Reserve(block_bytes, block_bytes),
        true => SpaceDecision::Wait,
        false => SpaceDecision::Refuse,
    })
}

/// Reads something whose length is not known before; most are short.
fn read_value(read: impl Fn(&mut [u8]) -> rustix::io::Result<usize>) -> FileResult {
    let mut buffer = vec![0; 256];
    loop {
        match read(&mut buffer) {
            Ok(length) => {
                buffer.truncate(length);
                return Ok(FileReply::Bytes(buffer));
            }
            Err(rustix::io::Errno::RANGE) if buffer.len() < XATTR_BYTES_MAX => {
                buffer.resize(XATTR_BYTES_MAX, 0);
            }
            Err(error) => return Err(errno::from_host(error)),
        }
    }
}

/// Whether an attribute is none of an agent's business. `trusted.` belongs to the host's
/// administrator. Access control lists would be kept but not obeyed: the agent's kernel decides
/// by the permission bits.
fn is_withheld(name: &[u8]) -> bool {
    name.starts_with(b"trusted.") || name.starts_with(b"system.posix_acl_")
}

/// The name of an extended attribute, as the system wants it.
fn attribute_name(name: &[u8]) -> Outcome<CString> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return Err(errno::RANGE);
    }
    if is_withheld(name) {
        return Err(errno::OPNOTSUPP);
    }
    CStr::from_bytes_with_nul(&[name, b"\0"].concat())
        .map(CStr::to_owned)
        .map_err(|_| errno::INVAL)
}

fn timespec(time: Option<SetTime>) -> Outcome<Timespec> {
    let spec = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
    match time {
        None => Ok(spec(0, UTIME_OMIT)),
        Some(SetTime::Now) => Ok(spec(0, UTIME_NOW)),
        Some(SetTime::At(FileTime {
            nanoseconds: 1_000_000_000..,
            ..
        })) => Err(errno::INVAL),
        Some(SetTime::At(time)) => Ok(spec(time.seconds, i64::from(time.nanoseconds))),
    }
}
