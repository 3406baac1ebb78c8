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

use super::bridge::{Bridge, Serving};
use super::readers;
use super::ring::Rings;

/// How the kernel's connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The volume was unmounted: all that programs did with it had been asked before.
    Unmounted,
    /// Somebody aborted the connection; the mount may still be there.
    Aborted,
}

impl End {
    /// What the device says instead of a request.
    pub(super) fn of(errno: Errno) -> Self {
        match errno {
            Errno::ENODEV => Self::Unmounted,
            _ => Self::Aborted,
        }
    }
}

/// Where it is told that the connection has ended, and how.
pub(super) type Over = Arc<watch::Sender<Option<End>>>;

/// Has the kernel's requests answered until its connection ends; by a thread of its own, if that is
/// returned.
pub(super) fn serve_on(
    session: Session<Bridge>,
    bridge: Bridge,
    (rings, over): (Option<Rings>, Over),
) -> io::Result<Option<JoinHandle<()>>> {
    // By the server's own end, so that the connection ends with it.
    let device = Arc::new(session.as_fd().try_clone_to_owned()?);
    let own = Arc::downgrade(&device);
    let is_over = move || own.upgrade().is_none_or(|device| has_ended(&device));
    bridge.volume.fate().ends_by(Box::new(is_over));
    if bridge.serving() == Serving::Shared {
        return readers::serve((session, device), bridge, over).map(|()| None);
    }
    let serving = thread::Builder::new().name("bafs-volume".to_owned());
    let serving = serving.spawn(move || {
        // ENODEV is success for it.
        let end = match session.run() {
            Ok(()) => End::Unmounted,
            Err(error) => {
                tracing::debug!(%error, "FUSE session ended");
                End::Aborted
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
fn has_ended(device: &OwnedFd) -> bool {
    let mut asked = [PollFd::new(device.as_fd(), PollFlags::POLLIN)];
    let polled = poll(&mut asked, PollTimeout::ZERO);
    let events = asked[0].revents().unwrap_or(PollFlags::empty());
    polled.is_ok() && events.contains(PollFlags::POLLERR)
}
