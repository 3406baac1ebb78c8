//! Lets the kernel ask by rings (FUSE over io_uring) while a test mounts something. Other mounts
//! are unaffected: only requested mounts get rings.

use std::fs::{self, File};
use std::path::Path;

use anyhow::Result;

use crate::{mount_obstacle, report_skip};

/// Where root lets rings be used.
const URING_PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";

/// Why no mount can get rings here, if so.
pub fn uring_obstacle() -> Option<String> {
    mount_obstacle().or_else(|| {
        if !Path::new(URING_PARAMETER).exists() {
            return Some(format!("the kernel has no {URING_PARAMETER}"));
        }
        let is_root = nix::unistd::geteuid().is_root();
        (!is_root).then(|| format!("only root may set {URING_PARAMETER}"))
    })
}

/// Whether a test can have rings; otherwise it is skipped, with a message.
pub fn can_use_rings(test: &str) -> bool {
    let missing = uring_obstacle();
    if let Some(reason) = &missing {
        report_skip(test, reason);
    }
    missing.is_none()
}

/// Whether new mounts get rings is set until this is dropped; then it is as it was before. A mount
/// keeps its rings.
#[derive(Debug)]
pub struct RingSetting {
    previous_value: String,
    /// Held until the end: one process at a time changes the parameter.
    _lock: File,
}

impl RingSetting {
    /// New mounts get rings.
    ///
    /// # Errors
    /// The parameter cannot be set: see `missing`.
    pub fn enable() -> Result<Self> {
        Self::write_setting("Y")
    }

    /// New mounts get none.
    ///
    /// # Errors
    /// The parameter cannot be set: see `missing`.
    pub fn disable() -> Result<Self> {
        Self::write_setting("N")
    }

    fn write_setting(value: &str) -> Result<Self> {
        let lock = File::open(URING_PARAMETER)?;
        lock.lock()?;
        let before = fs::read_to_string(URING_PARAMETER)?;
        fs::write(URING_PARAMETER, value)?;
        Ok(Self {
            previous_value: before,
            _lock: lock,
        })
    }
}

impl Drop for RingSetting {
    fn drop(&mut self) {
        if let Err(error) = fs::write(URING_PARAMETER, self.previous_value.trim()) {
            eprintln!("{URING_PARAMETER} stays as it is: {error}");
        }
    }
}
