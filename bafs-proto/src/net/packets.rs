//! Packets with open files between processes of one machine (`SOCK_SEQPACKET`, `SCM_RIGHTS`). Does
//! not interpret their content.

use std::io;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener as StdListener, UnixStream as StdStream};
use std::path::Path;

use rustix::fs::{Mode, OFlags, chmodat, open, unlinkat};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    bind, connect, listen, recvmsg, sendmsg, socket_with, socketpair,
};
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};

use crate::fd_passing::{HANDOFF_FILES_MAX, HANDOFF_MESSAGE_BYTES_MAX};

/// Connections that wait to be accepted; a full queue sends the agent the long way.
const BACKLOG: i32 = 64;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// Takes connections at a name in a directory. The library's types are made for streams, but
/// waiting and accepting work the same for packets.
#[derive(Debug)]
pub struct PacketListener(UnixListener);

impl PacketListener {
    /// Listens at `name` in `directory` and replaces the socket of an earlier process; only this
    /// process's user may connect. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// The system's errors.
    pub fn bind(directory: &Path, name: &str) -> io::Result<Self> {
        let directory = open_directory(directory)?;
        match unlinkat(&directory, name, rustix::fs::AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
        bind(&socket, &address(&directory, name)?)?;
        // No client can connect before `listen`, so none sees the socket with wrong permissions.
        let mode = Mode::RUSR | Mode::WUSR;
        chmodat(&directory, name, mode, rustix::fs::AtFlags::empty())?;
        listen(&socket, BACKLOG)?;
        Ok(Self(UnixListener::from_std(StdListener::from(socket))?))
    }

    /// Waits for the next connection.
    ///
    /// # Errors
    /// The system's errors: no descriptors are free, or the peer has closed.
    pub async fn accept(&self) -> io::Result<PacketSocket> {
        Ok(PacketSocket(self.0.accept().await?.0))
    }
}

/// A connection between two processes of one machine. Its methods may run concurrently; a packet
/// is sent and received whole.
#[derive(Debug)]
pub struct PacketSocket(UnixStream);

impl PacketSocket {
    /// Connects to the socket at `path`. Must be called within a tokio runtime; waits for nothing.
    ///
    /// # Errors
    /// The system's errors: `NotFound` on another machine, `PermissionDenied` for another user.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let name = name.to_str().ok_or(io::ErrorKind::InvalidInput)?;
        let directory = open_directory(directory)?;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
        connect(&socket, &address(&directory, name)?)?;
        Self::from_descriptor(socket)
    }

    /// Two ends of one connection, for tests.
    ///
    /// # Errors
    /// The system's errors.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (one, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
        Ok((Self::from_descriptor(one)?, Self::from_descriptor(other)?))
    }

    /// Both ends of a connection, of which a child process gets one as its standard input. That one
    /// waits in its system calls.
    ///
    /// # Errors
    /// The system's errors.
    pub fn pair_for_child() -> io::Result<(Self, OwnedFd)> {
        let (one, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
        rustix::fs::fcntl_setfl(&other, OFlags::empty())?;
        Ok((Self::from_descriptor(one)?, other))
    }

    fn from_descriptor(socket: OwnedFd) -> io::Result<Self> {
        Ok(Self(UnixStream::from_std(StdStream::from(socket))?))
    }

    /// The user at the other end, as this process's name space numbers users.
    ///
    /// # Errors
    /// The system's errors.
    pub fn peer_uid(&self) -> io::Result<u32> {
        Ok(self.0.peer_cred()?.uid())
    }

    /// Sends a packet with open files.
    ///
    /// # Errors
    /// `InvalidInput` if the packet is empty or too large; otherwise the system's errors, such as a
    /// closed peer.
    pub async fn send(&self, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let sizes = 1..=HANDOFF_MESSAGE_BYTES_MAX;
        if !sizes.contains(&bytes.len()) || files.len() > HANDOFF_FILES_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        loop {
            self.0.writable().await?;
            let send = || send_now(self.0.as_fd(), bytes, files);
            match self.0.try_io(Interest::WRITABLE, send) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                sent => return sent,
            }
        }
    }

    /// Waits for a packet and the open files in it; `None` at the end of the connection.
    ///
    /// # Errors
    /// `InvalidData` for a truncated packet; otherwise the system's errors.
    pub async fn receive(&self) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
        loop {
            self.0.readable().await?;
            let receive = || receive_now(self.0.as_fd());
            match self.0.try_io(Interest::READABLE, receive) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                received => return received,
            }
        }
    }
}

fn send_now(socket: BorrowedFd<'_>, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(HANDOFF_FILES_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

fn receive_now(socket: BorrowedFd<'_>) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(HANDOFF_FILES_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = vec![0; HANDOFF_MESSAGE_BYTES_MAX];
    let received = recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            files.extend(more);
        }
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    let cut = ReturnFlags::TRUNC | ReturnFlags::CTRUNC;
    if received.flags.intersects(cut) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    bytes.truncate(received.bytes);
    Ok(Some((bytes, files)))
}

fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(open(path, flags, Mode::empty())?)
}

/// The address of a socket in an open directory: an address has room for 108 bytes only, a path
/// may be longer.
fn address(directory: &OwnedFd, name: &str) -> io::Result<SocketAddrUnix> {
    let path = format!("/proc/self/fd/{}/{name}", directory.as_raw_fd());
    Ok(SocketAddrUnix::new(path)?)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, Write};

    use super::*;

    #[tokio::test]
    async fn files_pass_through_long_socket_paths() {
        let directory = tempfile::tempdir().expect("directory");
        let deep = directory.path().join("d".repeat(200));
        std::fs::create_dir(&deep).expect("directory");
        let listener = PacketListener::bind(&deep, "s").expect("bind");
        // A second life takes the name over.
        drop(listener);
        let listener = PacketListener::bind(&deep, "s").expect("bind again");
        let agent = PacketSocket::connect(&deep.join("s")).expect("connect");
        let node = listener.accept().await.expect("accept");
        let mut file = tempfile::tempfile().expect("file");
        file.write_all(b"content").expect("write");
        node.send(b"here", &[file.as_fd()]).await.expect("send");
        let (bytes, mut files) = agent.receive().await.expect("receive").expect("a packet");
        assert_eq!(bytes, b"here");
        let mut got = File::from(files.pop().expect("a file"));
        got.rewind().expect("rewind");
        let mut text = String::new();
        got.read_to_string(&mut text).expect("read");
        assert_eq!(text, "content");
        assert_eq!(
            node.peer_uid().expect("uid"),
            rustix::process::geteuid().as_raw()
        );
        drop(node);
        assert!(agent.receive().await.expect("end").is_none());
        assert!(PacketSocket::connect(&deep.join("absent")).is_err());
    }

    #[tokio::test]
    async fn oversized_packets_are_refused() {
        let (one, other) = PacketSocket::pair().expect("pair");
        assert!(one.send(&[], &[]).await.is_err());
        assert!(
            one.send(&vec![0; HANDOFF_MESSAGE_BYTES_MAX + 1], &[])
                .await
                .is_err()
        );
        let longest = vec![7; HANDOFF_MESSAGE_BYTES_MAX];
        one.send(&longest, &[]).await.expect("send");
        let (bytes, files) = other.receive().await.expect("receive").expect("packet");
        assert!(bytes == longest && files.is_empty());
        // A packet of another program beyond the bound is truncated and reported.
        rustix::net::send(
            &one.0,
            &vec![0; HANDOFF_MESSAGE_BYTES_MAX + 1],
            SendFlags::empty(),
        )
        .expect("send");
        assert!(other.receive().await.is_err());
    }
}
