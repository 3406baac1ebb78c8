//! How the kernel's connection to a volume ended: by an unmount, after which another may write the
//! volume, or because somebody aborted it.

use std::sync::Arc;

use nix::errno::Errno;
use tokio::sync::watch;

/// How the kernel's connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionEnd {
    /// The volume was unmounted: all that programs did with it had been asked before.
    Unmounted,
    /// Somebody aborted the connection; the mount may still be there.
    Aborted,
}

impl ConnectionEnd {
    /// What the device says instead of a request.
    pub(crate) fn from_errno(errno: Errno) -> Self {
        match errno {
            Errno::ENODEV => Self::Unmounted,
            _ => Self::Aborted,
        }
    }
}

/// Where it is told that the connection has ended, and how.
pub(crate) type ConnectionEndSender = Arc<watch::Sender<Option<ConnectionEnd>>>;
