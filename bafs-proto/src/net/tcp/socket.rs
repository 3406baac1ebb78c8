//! How TCP sockets are set.

use std::io;
use std::net::SocketAddr;

use rustix::net::sockopt::set_tcp_user_timeout;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::net::TcpStream;

use crate::net::hello::IDLE_TIMEOUT_MS;

/// Bytes that the kernel may buffer beyond those on the wire: the next chunk, small or large, waits
/// behind them. The kernel sizes the buffers.
const UNSENT_BYTES_MAX: u32 = 256 << 10;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;

/// Sets a socket up for calls. Best effort: each setting is for speed, or for a case that signs of
/// life cover too.
pub(super) fn configure_socket(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    let _ = socket2::SockRef::from(stream).set_tcp_notsent_lowat(UNSENT_BYTES_MAX);
    let _ = set_tcp_user_timeout(stream, IDLE_TIMEOUT_MS);
}

/// A socket that listens. A port whose last owner has just ended is free.
pub(super) fn listen(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let kind = socket2::Type::STREAM.nonblocking().cloexec();
    let socket = socket2::Socket::new(socket2::Domain::for_address(address), kind, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Lets this process have as many connections as it may: each needs a descriptor.
pub(super) fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(%error, "the limit of open files stays");
    }
}
