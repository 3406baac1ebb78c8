//! A process of this program that shows the smallest file system of a kind, to measure beside ours.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Result, ensure};
use nix::mount::{MntFlags, umount2};
use tempfile::TempDir;

use crate::mounts_with;

/// The process, until it is dropped.
pub(super) struct Smallest {
    process: Child,
    shown: TempDir,
}

impl Smallest {
    /// Starts the process with a hidden first argument, what it shows and where, and what else it
    /// is to know; waits for its mount. Jobs see it that begin afterwards.
    pub(super) fn start(kind: &str, source: &Path, more: &[&str]) -> Result<Self> {
        let shown = tempfile::tempdir()?;
        let process = Command::new(std::env::current_exe()?)
            .args([OsStr::new(kind), source.as_os_str()])
            .arg(shown.path())
            .args(more)
            .spawn()?;
        let started = Self { process, shown };
        let mut looks = 400;
        while mounts_with(&started.path().to_string_lossy()).is_empty() {
            looks -= 1;
            ensure!(looks > 0, "the smallest file system is not mounted");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(started)
    }

    /// Where it is shown.
    pub(super) fn path(&self) -> &Path {
        self.shown.path()
    }
}

impl Drop for Smallest {
    fn drop(&mut self) {
        let _ = umount2(self.shown.path(), MntFlags::MNT_DETACH);
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
