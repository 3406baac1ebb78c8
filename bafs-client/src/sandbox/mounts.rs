//! The few mount calls of the sandbox, by name. Knows nothing of jobs or volumes.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use nix::Result;
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::plan::Access;
use crate::logic::mount_table::{self, MountEntry};

const NO_SOURCE: Option<&str> = None;

/// What a file with any content takes at the least in a tree in memory.
const PAGE_BYTES: u64 = 4096;

/// Files that a tree in memory may have in any case: some programs of many processes make as many
/// empty ones, and they take about one megabyte.
const TMPFS_FILES_MIN: u64 = 1_000;

/// Lets mounts of the host arrive in this name space, and none of ours reach the host.
pub(super) fn set_slave_propagation() -> Result<()> {
    mount(
        NO_SOURCE,
        "/",
        NO_SOURCE,
        MsFlags::MS_SLAVE | MsFlags::MS_REC,
        NO_SOURCE,
    )
}

/// Shows `source`, with everything mounted below it, at `target` too.
pub(super) fn bind_mount(source: &Path, target: &Path) -> Result<()> {
    // In a user name space a bind must be recursive: what the host covered stays covered.
    mount(
        Some(source),
        target,
        NO_SOURCE,
        MsFlags::MS_BIND | MsFlags::MS_REC,
        NO_SOURCE,
    )
}

/// Moves the mount at `source` to `target`.
pub(super) fn move_mount(source: &Path, target: &Path) -> Result<()> {
    mount(Some(source), target, NO_SOURCE, MsFlags::MS_MOVE, NO_SOURCE)
}

/// Mounts an empty tree in memory.
pub(super) fn mount_tmpfs(target: &Path, mode: u32) -> Result<()> {
    let options = format!("mode={mode:o}");
    mount(
        Some("bafs"),
        target,
        Some("tmpfs"),
        tmpfs_flags(),
        Some(options.as_str()),
    )
}

/// Mounts an empty tree in memory, of at most so many bytes, where anybody may make files. As each
/// file takes memory of the kernel, there are no more than pages.
pub(super) fn mount_bounded_tmpfs(target: &Path, bytes: u64) -> Result<()> {
    let files = (bytes / PAGE_BYTES).max(TMPFS_FILES_MIN);
    let options = format!("mode=1777,size={bytes},nr_inodes={files}");
    mount(
        Some("bafs"),
        target,
        Some("tmpfs"),
        tmpfs_flags(),
        Some(options.as_str()),
    )
}

/// Forbids further changes of a tree that [`mount_tmpfs`] made, though not of mounts below it.
pub(super) fn seal_tmpfs(target: &Path) -> Result<()> {
    remount(target, tmpfs_flags() | MsFlags::MS_RDONLY)
}

fn tmpfs_flags() -> MsFlags {
    MsFlags::MS_NOSUID | MsFlags::MS_NODEV
}

/// Mounts the process list of the current process name space.
pub(super) fn mount_proc(target: &Path) -> Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), target, Some("proc"), flags, NO_SOURCE)
}

/// Takes a mount and everything below it out of the tree at once; users keep what they hold.
pub(super) fn detach_mount(target: &Path) -> Result<()> {
    umount2(target, MntFlags::MNT_DETACH)
}

/// Gives nobody more rights or devices through the mount at `target` and all mounts below it, and
/// forbids writes if that is wanted.
///
/// `proc` is where the process list is mounted at this moment.
pub(super) fn restrict_mount(target: &Path, access: Access, proc: &Path) -> Result<()> {
    MountTable::read(proc)?.restrict_mount(target, access)
}

/// The mounts of this name space at a moment. The kernel takes a tenth of a millisecond to tell
/// them.
pub(super) struct MountTable(Vec<u8>);

impl MountTable {
    /// Reads the table; `proc` is where the process list is mounted.
    pub(super) fn read(proc: &Path) -> Result<Self> {
        let table = fs::read(proc.join("self/mountinfo"));
        let table = table.map_err(|error| super::privilege::errno_of(&error))?;
        Ok(Self(table))
    }

    /// As [`restrict_mount`], of a mount in the table.
    pub(super) fn restrict_mount(&self, target: &Path, access: Access) -> Result<()> {
        let more = match access {
            Access::ReadOnly => MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_RDONLY,
            Access::ReadWrite => MsFlags::MS_NOSUID | MsFlags::MS_NODEV,
        };
        for (at, flags) in mounts_below(&self.0, target) {
            match remount(&at, flags | more) {
                // Something is mounted over it, or over what leads to it: nobody gets there.
                Err(Errno::ENOENT) if at != target => {}
                remounted => remounted?,
            }
        }
        Ok(())
    }
}

fn remount(target: &Path, flags: MsFlags) -> Result<()> {
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | flags;
    mount(NO_SOURCE, target, NO_SOURCE, flags, NO_SOURCE)
}

/// The mounts at and below `target` with the flags that a remount has to repeat: leaving one
/// out means to clear it, which a user name space may not.
fn mounts_below(table: &[u8], target: &Path) -> BTreeMap<PathBuf, MsFlags> {
    let below = |mount: &MountEntry| mount.mount_point.starts_with(target);
    let mounts = mount_table::parse_mount_table(table)
        .into_iter()
        .filter(below);
    mounts
        .map(|mount| (mount.mount_point, flags_of(&mount.options)))
        .collect()
}

fn flags_of(options: &[u8]) -> MsFlags {
    let flag = |option: &[u8]| match option {
        b"nosuid" => MsFlags::MS_NOSUID,
        b"nodev" => MsFlags::MS_NODEV,
        b"noexec" => MsFlags::MS_NOEXEC,
        b"noatime" => MsFlags::MS_NOATIME,
        b"nodiratime" => MsFlags::MS_NODIRATIME,
        b"relatime" => MsFlags::MS_RELATIME,
        _ => MsFlags::empty(),
    };
    options.split(|&byte| byte == b',').map(flag).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_flags_are_read_from_the_table() {
        let table = b"1 0 0:1 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
            2 1 0:2 / /a\\040b rw,nosuid,nodev,noexec,noatime - fuse x rw\n\
            3 2 0:3 / /a\\040b/c ro - tmpfs x rw\n\
            4 1 0:4 / /a\\040bc rw - tmpfs x rw\n";
        let found = mounts_below(table, Path::new("/a b"));
        let all = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC | MsFlags::MS_NOATIME;
        let expected = BTreeMap::from([("/a b".into(), all), ("/a b/c".into(), MsFlags::empty())]);
        assert_eq!(found, expected);
    }
}
