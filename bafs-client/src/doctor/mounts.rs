//! Mounts of this program on the host: whether they answer, and how they are taken away. Only a
//! child that may be left behind ever touches one.

use std::fs;
use std::io;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};

use super::connections;
use crate::clock;
use crate::limits;
use crate::logic::mount_table::{self, MountEntry};
use crate::own_process::{OWN_EXECUTABLE, PROBE_MOUNT, SUBCOMMAND};

/// Exit code of a look at a mount whose server is gone.
const EXIT_DEAD: i32 = 3;

/// How a mount does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountHealth {
    /// It answers.
    Alive,
    /// The process that served it is gone; every call fails.
    Dead,
    /// It does not answer now; calls wait.
    Silent {
        /// How many, if the kernel tells.
        waiting: Option<u64>,
    },
}

/// The mounts of this program on this host, in the kernel's order.
///
/// # Errors
/// When `/proc` cannot be read.
pub fn own_mounts() -> io::Result<Vec<MountEntry>> {
    let table = fs::read("/proc/self/mountinfo")?;
    let mounts = mount_table::parse_mount_table(&table).into_iter();
    Ok(mounts.filter(MountEntry::is_ours).collect())
}

/// Those of them that are mounted on a directory, given by its absolute path.
///
/// # Errors
/// When `/proc` cannot be read.
pub fn own_mounts_on(directory: &Path) -> io::Result<Vec<MountEntry>> {
    // The last component may be a dead mount, which must not be looked at.
    let parent = directory
        .parent()
        .and_then(|parent| fs::canonicalize(parent).ok());
    let directory = match (parent, directory.file_name()) {
        (Some(parent), Some(name)) => parent.join(name),
        _ => directory.to_owned(),
    };
    let all = own_mounts()?.into_iter();
    Ok(all.filter(|mount| mount.mount_point == directory).collect())
}

/// Whether anything is mounted on a directory.
pub(super) fn is_mounted(directory: &Path) -> bool {
    let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
    let mut mounts = mount_table::parse_mount_table(&table).into_iter();
    mounts.any(|mount| mount.mount_point == directory)
}

/// Has a child look at a mount, and does not wait for it for ever.
pub fn check_health(mount: &MountEntry) -> MountHealth {
    let child = Command::new(OWN_EXECUTABLE)
        .args([SUBCOMMAND, PROBE_MOUNT])
        .arg(&mount.mount_point)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let code = child.ok().and_then(wait_for_exit);
    match code {
        Some(0) => MountHealth::Alive,
        Some(EXIT_DEAD) => MountHealth::Dead,
        _ => MountHealth::Silent {
            waiting: connections::waiting_calls(mount.device.1),
        },
    }
}

/// The child's part: never returns from a mount that hangs.
pub(crate) fn probe_mount(directory: &Path) -> io::Result<()> {
    match rustix::fs::statfs(directory) {
        Err(rustix::io::Errno::NOTCONN | rustix::io::Errno::CONNABORTED) => {
            std::process::exit(EXIT_DEAD)
        }
        // Any other answer is an answer.
        _ => Ok(()),
    }
}

fn wait_for_exit(mut child: Child) -> Option<i32> {
    let start = clock::now();
    while start.elapsed() < limits::MOUNT_PROBE_TIMEOUT {
        match child.try_wait() {
            Ok(Some(status)) => return status.code(),
            Ok(None) => thread::sleep(Duration::from_millis(5)),
            Err(_) => return None,
        }
    }
    // It may not die before the mount does; then it is left to its new parent.
    let _ = child.kill();
    None
}

/// Takes a mount away, whoever uses it and whether or not anybody serves it, and has the kernel
/// fail what waits for it. Waits for nothing.
pub fn detach_mount(mount: &MountEntry) {
    let flags = MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW;
    match umount2(&mount.mount_point, flags) {
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
        Err(_) => unmount_by_fusermount(&mount.mount_point),
    }
    // Only root may; then the end of the last descriptor does the same.
    let _ = connections::abort_connection(mount.device.1);
}

/// An ordinary user's way.
fn unmount_by_fusermount(point: &Path) {
    let asked = Command::new("fusermount3")
        .args(["-u", "-z", "-q", "--"])
        .arg(point)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn();
    if let Some(code) = asked.ok().and_then(wait_for_exit)
        && code != 0
    {
        tracing::warn!(code, "fusermount3 cannot unmount {}", point.display());
    }
}

/// Takes dead mounts away from a directory, given by its absolute path.
pub fn detach_dead_mounts(directory: &Path) {
    for mount in own_mounts_on(directory).unwrap_or_default().iter().rev() {
        if check_health(mount) == MountHealth::Dead {
            detach_mount(mount);
        }
    }
}
