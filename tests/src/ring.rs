//! Lets the kernel ask by rings (FUSE over io_uring) while a test mounts something. Mounts of
//! others stay as they are: only who asks for rings gets them.

use std::fs::{self, File};
use std::path::Path;

use anyhow::Result;

use crate::{cannot_mount, skip};

/// Where root lets rings be used.
const ENABLED: &str = "/sys/module/fuse/parameters/enable_uring";

/// Why no mount can get rings here, if so.
pub fn missing() -> Option<String> {
    cannot_mount().or_else(|| {
        if !Path::new(ENABLED).exists() {
            return Some(format!("the kernel has no {ENABLED}"));
        }
        let is_root = nix::unistd::geteuid().is_root();
        (!is_root).then(|| format!("only root may set {ENABLED}"))
    })
}

/// Whether a test can have rings; otherwise it is skipped, and said to be.
pub fn can_have(test: &str) -> bool {
    let missing = missing();
    if let Some(reason) = &missing {
        skip(test, reason);
    }
    missing.is_none()
}

/// Whether new mounts get rings is set until this is dropped; then it is as it was before. A mount
/// keeps what it has.
#[derive(Debug)]
pub struct Rings {
    before: String,
    /// Held until the end: one process at a time changes the parameter.
    _lock: File,
}

impl Rings {
    /// New mounts get rings.
    ///
    /// # Errors
    /// The parameter cannot be set: see [`missing`].
    pub fn allow() -> Result<Self> {
        Self::set("Y")
    }

    /// New mounts get none.
    ///
    /// # Errors
    /// The parameter cannot be set: see [`missing`].
    pub fn forbid() -> Result<Self> {
        Self::set("N")
    }

    fn set(value: &str) -> Result<Self> {
        let lock = File::open(ENABLED)?;
        lock.lock()?;
        let before = fs::read_to_string(ENABLED)?;
        fs::write(ENABLED, value)?;
        Ok(Self {
            before,
            _lock: lock,
        })
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        if let Err(error) = fs::write(ENABLED, self.before.trim()) {
            eprintln!("{ENABLED} stays as it is: {error}");
        }
    }
}
