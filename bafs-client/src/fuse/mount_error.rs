//! Why a volume could not be mounted, and what its user can do about it. Mounts nothing.

use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use thiserror::Error;

/// Why a volume could not be mounted, with what to do about it.
#[derive(Debug, Error)]
pub enum MountError {
    /// There is no FUSE on this machine.
    #[error(
        "/dev/fuse is missing: load the kernel module (`modprobe fuse`), and in a container \
         start it with `--device /dev/fuse`"
    )]
    NoDevice,
    /// There is FUSE, but not for us.
    #[error("cannot open /dev/fuse ({0}): ask root for `chmod 666 /dev/fuse`, or run as root")]
    DeviceRefused(Errno),
    /// The kernel did not take the mount.
    #[error("cannot mount on {}: {source}; {remedy}", directory.display())]
    Refused {
        /// Where.
        directory: PathBuf,
        /// What the kernel or `fusermount3` answered.
        source: io::Error,
        /// What to do about it.
        remedy: &'static str,
    },
    /// There is no process that would take the mount away should this one die.
    #[error("cannot start the mount watchdog: {0}")]
    Watchdog(io::Error),
    /// The kernel mounted but did not begin to talk.
    #[error("the kernel did not start the FUSE session: {0}")]
    Handshake(io::Error),
    /// Nobody would answer the kernel.
    #[error(
        "cannot start the thread that serves the mount: {0}; raise the limit of processes \
         (`ulimit -u`)"
    )]
    Thread(io::Error),
}

impl MountError {
    /// What the kernel answered, if it is known.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::NoDevice => None,
            Self::DeviceRefused(errno) => Some(*errno as i32),
            Self::Refused { source, .. }
            | Self::Handshake(source)
            | Self::Watchdog(source)
            | Self::Thread(source) => source.raw_os_error(),
        }
    }
}

/// What the kernel or `fusermount3` answered, and what to do about it: `other` where that is not
/// known.
pub(super) fn mount_refusal(
    directory: &Path,
    source: io::Error,
    other: &'static str,
) -> MountError {
    let remedy = match source.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EPERM | Errno::EACCES) => {
            "run as root, or enable user name spaces (`bafs doctor` shows the missing part)"
        }
        Some(Errno::ENODEV) => "the kernel has no FUSE: `modprobe fuse`",
        Some(Errno::ENOENT | Errno::ENOTDIR) => "give an existing directory",
        _ => other,
    };
    MountError::Refused {
        directory: directory.to_owned(),
        source,
        remedy,
    }
}
