//! Who answers the kernel until its connection ends, and how it ended.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use bafs_proto::limits::IO_BYTES_MAX;
use fuser::Session;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::file_system::{ReaderMode, VolumeFileSystem};
use super::ring::Rings;
use super::shared_readers::{self, WRITE_OVERHEAD_BYTES};
use crate::connection_end::{ConnectionEnd, ConnectionEndSender};

/// Has the kernel's requests answered until its connection ends; by a thread of its own, if that is
/// returned.
pub(super) fn serve_until_end(
    session: Session<VolumeFileSystem>,
    bridge: VolumeFileSystem,
    (rings, over): (Option<Rings>, ConnectionEndSender),
) -> io::Result<Option<JoinHandle<()>>> {
    // By the server's own end, so that the connection ends with it.
    let device = Arc::new(session.as_fd().try_clone_to_owned()?);
    let (own, told) = (Arc::downgrade(&device), Arc::clone(&over));
    let check = move || match own.upgrade() {
        Some(device) => closed_connection_end(&device),
        None => Some(told.borrow().unwrap_or(ConnectionEnd::Unmounted)),
    };
    let health = bridge.volume.health();
    health.set_connection_check(Box::new(check));
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

/// How the connection of a device ended; `None` while the kernel still asks by it.
fn closed_connection_end(device: &OwnedFd) -> Option<ConnectionEnd> {
    let mut asked = [PollFd::new(device.as_fd(), PollFlags::POLLIN)];
    let polled = poll(&mut asked, PollTimeout::ZERO);
    let events = asked[0].revents().unwrap_or(PollFlags::empty());
    if polled.is_err() || !events.contains(PollFlags::POLLERR) {
        return None;
    }
    // A closed connection has no request to take; its error says how it ended.
    let mut request = vec![0; IO_BYTES_MAX as usize + WRITE_OVERHEAD_BYTES];
    let read = nix::unistd::read(device, &mut request);
    Some(read.map_or_else(ConnectionEnd::from_errno, |_| ConnectionEnd::Aborted))
}
