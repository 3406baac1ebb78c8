//! What the kernel asks, as operations: one function per operation that needs no handle.
//! Decides nothing, answers nobody.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use bafs_proto::file_op::FileOp;
use bafs_proto::ids::InodeNo;
use fuser::{INodeNo, OpenFlags, RenameFlags};

use super::convert::{self, to_name};

pub(super) fn lookup(parent: INodeNo, at: &OsStr) -> FileOp {
    FileOp::Lookup {
        parent: InodeNo(parent.0),
        name: to_name(at),
    }
}

pub(super) fn unlink(parent: INodeNo, at: &OsStr) -> FileOp {
    FileOp::Unlink {
        parent: InodeNo(parent.0),
        name: to_name(at),
    }
}

pub(super) fn remove_directory(parent: INodeNo, at: &OsStr) -> FileOp {
    FileOp::RemoveDirectory {
        parent: InodeNo(parent.0),
        name: to_name(at),
    }
}

pub(super) fn make_directory(parent: INodeNo, at: &OsStr, mode: u32) -> FileOp {
    FileOp::MakeDirectory {
        parent: InodeNo(parent.0),
        name: to_name(at),
        mode,
    }
}

pub(super) fn make_node(parent: INodeNo, at: &OsStr, mode: u32, rdev: u32) -> FileOp {
    FileOp::MakeNode {
        parent: InodeNo(parent.0),
        name: to_name(at),
        mode,
        rdev,
    }
}

pub(super) fn make_symlink(parent: INodeNo, at: &OsStr, target: &Path) -> FileOp {
    FileOp::MakeSymlink {
        parent: InodeNo(parent.0),
        name: to_name(at),
        target: target.as_os_str().as_bytes().to_vec(),
    }
}

pub(super) fn make_link(ino: INodeNo, parent: INodeNo, at: &OsStr) -> FileOp {
    FileOp::MakeLink {
        ino: InodeNo(ino.0),
        parent: InodeNo(parent.0),
        name: to_name(at),
    }
}

pub(super) fn rename(
    (parent, at): (INodeNo, &OsStr),
    (new_parent, new_at): (INodeNo, &OsStr),
    flags: RenameFlags,
) -> FileOp {
    FileOp::Rename {
        parent: InodeNo(parent.0),
        name: to_name(at),
        new_parent: InodeNo(new_parent.0),
        new_name: to_name(new_at),
        flags: flags.bits(),
    }
}

pub(super) fn set_xattr(ino: INodeNo, at: &OsStr, value: &[u8], flags: i32) -> FileOp {
    FileOp::SetXattr {
        ino: InodeNo(ino.0),
        name: to_name(at),
        value: value.to_vec(),
        flags,
    }
}

pub(super) fn get_xattr(ino: INodeNo, at: &OsStr) -> FileOp {
    FileOp::GetXattr {
        ino: InodeNo(ino.0),
        name: to_name(at),
    }
}

pub(super) fn remove_xattr(ino: INodeNo, at: &OsStr) -> FileOp {
    FileOp::RemoveXattr {
        ino: InodeNo(ino.0),
        name: to_name(at),
    }
}

pub(super) fn list_xattr(ino: INodeNo) -> FileOp {
    FileOp::ListXattr {
        ino: InodeNo(ino.0),
    }
}

pub(super) fn read_link(ino: INodeNo) -> FileOp {
    FileOp::ReadLink {
        ino: InodeNo(ino.0),
    }
}

pub(super) fn open_file(ino: INodeNo, flags: OpenFlags) -> FileOp {
    FileOp::Open {
        ino: InodeNo(ino.0),
        flags: convert::open_flags(flags.0),
    }
}

pub(super) fn open_directory(ino: INodeNo) -> FileOp {
    FileOp::OpenDirectory {
        ino: InodeNo(ino.0),
    }
}

pub(super) fn sync_directory(ino: INodeNo) -> FileOp {
    FileOp::FsyncDirectory {
        ino: InodeNo(ino.0),
    }
}
