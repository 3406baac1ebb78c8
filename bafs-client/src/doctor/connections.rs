//! The kernel's control files of FUSE connections: how many calls wait, and an end to all of them.
//! Found also where nobody has mounted them.

use std::fs::File;
use std::io::{self, Read, Write};

use rustix::fs::{Mode, OFlags, open, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

/// Where the kernel shows its FUSE connections.
pub(super) const CONNECTIONS: &str = "/sys/fs/fuse/connections";

/// Has the kernel fail every call on a connection, those that wait included, for good.
///
/// # Errors
/// The connection is over already, or the caller is not root.
pub(crate) fn abort_connection(connection: u32) -> io::Result<()> {
    open_control_file(connection, "abort", OFlags::WRONLY)?.write_all(b"1")
}

/// Calls that wait for an answer on a connection, if the kernel tells.
pub(super) fn waiting_calls(connection: u32) -> Option<u64> {
    let mut text = String::new();
    let mut file = open_control_file(connection, "waiting", OFlags::RDONLY).ok()?;
    file.read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

fn open_control_file(connection: u32, name: &str, access: OFlags) -> io::Result<File> {
    let path = format!("{connection}/{name}");
    let flags = access | OFlags::CLOEXEC;
    let usual = format!("{CONNECTIONS}/{path}");
    let opened = open(usual, flags, Mode::empty()).or_else(|_| {
        // Containers and small systems do not mount it; here it is mounted on nothing.
        let files = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&files)?;
        let flags_of_mount = FsMountFlags::FSMOUNT_CLOEXEC;
        let root = fsmount(&files, flags_of_mount, MountAttrFlags::empty())?;
        openat(root, path, flags, Mode::empty())
    });
    Ok(opened?.into())
}
