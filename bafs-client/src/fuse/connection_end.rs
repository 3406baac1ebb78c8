//! Who answers the kernel until its connection ends, and how it ended: by an unmount, after which
//! another may write the volume, or because somebody aborted it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use fuser::Session;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::sync::watch;

use super::file_system::{ReaderMode, VolumeFileSystem};
use super::ring::Rings;
use super::shared_readers;

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
    pub(super) fn from_errno(errno: Errno) -> Self {
        match errno {
            Errno::ENODEV => Self::Unmounted,
            _ => Self::Aborted,
        }
    }
}

/// Where it is told that the connection has ended, and how.
pub(super) type ConnectionEndSender = Arc<watch::Sender<Option<ConnectionEnd>>>;

/// Has the kernel's requests answered until its connection ends; by a thread of its own, if that is
/// returned.
pub(super) fn serve_until_end(
    session: Session<VolumeFileSystem>,
    bridge: VolumeFileSystem,
    (rings, over): (Option<Rings>, ConnectionEndSender),
) -> io::Result<Option<JoinHandle<()>>> {
    // By the server's own end, so that the connection ends with it.
    let device = Arc::new(session.as_fd().try_clone_to_owned()?);
    let own = Arc::downgrade(&device);
    let is_over = move || {
        own.upgrade()
            .is_none_or(|device| is_connection_closed(&device))
    };
    bridge.volume.health().set_unmount_check(Box::new(is_over));
    if bridge.reader_mode() == ReaderMode::SharedThreads {
        return shared_readers::serve((session, device), bridge, over).map(|()| None);
    }
    let serving = thread::Builder::new().name("bafs-volume".to_owned());
    let serving = serving.spawn(move || {
        // ENODEV is success for it.
        let end = match session.run() {
            Ok(()) => ConnectionEnd::Unmounted,
            Err(error) => {
                tracing::debug!(%error, "FUSE session ended");
                ConnectionEnd::Aborted
            }
        };
        if let Some(rings) = rings {
            rings.stop();
        }
        drop(device);
        over.send_replace(Some(end));
    });
    serving.map(Some)
}

/// Whether the kernel asks nothing by a device any more.
fn is_connection_closed(device: &OwnedFd) -> bool {
    let mut asked = [PollFd::new(device.as_fd(), PollFlags::POLLIN)];
    let polled = poll(&mut asked, PollTimeout::ZERO);
    let events = asked[0].revents().unwrap_or(PollFlags::empty());
    polled.is_ok() && events.contains(PollFlags::POLLERR)
}
