//! The smallest file systems of a kind, to measure beside ours: each is shown by a process of this
//! program, by the same crate, and served as agents serve volumes.

pub(super) mod forwarding;
pub(super) mod immutable;
pub(super) mod passthrough;

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Result, ensure};
use fuser::{Config, FileAttr, FileType, Generation, INodeNo, SessionACL};
use nix::mount::{MntFlags, umount2};
use tempfile::TempDir;

use super::machine;
use crate::mounts_matching;

/// The attribute TTL of agents.
const ATTRIBUTE_TTL: Duration = Duration::from_secs(24 * 3600);
const GENERATION: Generation = Generation(0);

/// Common options: as many threads as serve a volume of an agent here, and access for all users.
fn session_config() -> Config {
    let mut config = Config::default();
    config.acl = SessionACL::All;
    config.n_threads = Some(machine::count_processors().clamp(2, 16));
    config
}

/// Replies that a name does not exist, as a cacheable negative entry with inode 0.
fn negative_attributes() -> FileAttr {
    FileAttr {
        ino: INodeNo(0),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: FileType::RegularFile,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 0,
        flags: 0,
    }
}

/// The process, until it is dropped.
pub(super) struct MinimalFileSystem {
    process: Child,
    mount_point: TempDir,
}

impl MinimalFileSystem {
    /// Starts the process with a hidden first argument, its directory, its mount point and other
    /// arguments; waits for its mount. Jobs see it that begin afterwards.
    pub(super) fn start(kind: &str, source: &Path, more: &[&str]) -> Result<Self> {
        let shown = tempfile::tempdir()?;
        let process = Command::new(std::env::current_exe()?)
            .args([OsStr::new(kind), source.as_os_str()])
            .arg(shown.path())
            .args(more)
            .spawn()?;
        let started = Self {
            process,
            mount_point: shown,
        };
        let mut looks = 400;
        while mounts_matching(&started.path().to_string_lossy()).is_empty() {
            looks -= 1;
            ensure!(looks > 0, "the smallest file system is not mounted");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(started)
    }

    /// Where it is shown.
    pub(super) fn path(&self) -> &Path {
        self.mount_point.path()
    }
}

impl Drop for MinimalFileSystem {
    fn drop(&mut self) {
        let _ = umount2(self.mount_point.path(), MntFlags::MNT_DETACH);
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
