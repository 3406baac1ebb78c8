//! TLS over TCP: at most four connections to a server, with many calls on each.
//!
//! This transport serves networks to which the machine is attached. The kernel does
//! acknowledgements, batching and pacing, so a byte costs about half the processor time that it
//! costs over QUIC. It uses the same certificates, hello and frames as QUIC
//! (`docs/decisions/0019-tcp-on-local-networks.md`).
//!
//! * [`TlsTcpDialer`] makes a TCP connection, sets up TLS and exchanges the hello. The result is a
//!   [`Connection`] with one TCP connection.
//! * `TcpConnections` holds the TCP connections to one server behind a mutex. A call takes the one
//!   with the fewest calls. If all have calls for a while, a background task adds one, up to four.
//!   An additional connection ends when it has had no call for ten seconds. The first one stays.
//! * `TcpConnection` (`connection.rs`) numbers the calls of one connection, and gives each reply to
//!   its caller.
//! * `chunks.rs` cuts frames into chunks of at most 256 KiB and mixes those of several calls. So a
//!   small call never waits for the end of a large one. It also sends keepalives and cancellations.
//! * [`TlsTcpListener`] accepts connections and runs each request in a task. A started request
//!   continues without its caller, until its deadline at most.
//!
//! **Errors.** `Unreachable`: no TCP connection, or it broke. All calls on a broken connection fail
//! with that. `PeerRefused`: one end does not accept the certificate of the other.
//! `VersionMismatch`: the hello shows another version. `DeadlineExceeded`: no reply in time.
//!
//! **Limits.** Calls and request bodies in progress on one connection use at most 32 MiB at the
//! caller and 64 MiB at the server. A call counts as 128 KiB at least. Each connection needs a file
//! descriptor. A connection that the system does not grant is tried again after a second at the
//! earliest.
//!
//! A connection ends when the last [`Connection`] to the server is dropped. A server that was
//! replaced at its address never mixes with its successor, because all connections must show the
//! same server id.

mod chunks;
mod connection;
mod listener;
mod socket;

pub use listener::TlsTcpListener;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::net::TcpStream;

use self::connection::TcpConnection;
use super::hello::{HelloReply, check_hello, connection_error, own_hello, resolve};
use super::tls::{Connector, TlsTcpStream, is_refusal};
use super::{BoxFuture, Connection, Dial, Exchange, Frame};
use crate::codec;
use crate::error::{Error, ErrorCode, Result};
use crate::identity::Identity;
use crate::ids::ServerId;
use crate::message::Hello;
use crate::time::Deadline;

/// Most connections to one server. Several connections let several processors encrypt, and let
/// small calls overtake a large answer.
const CONNECTIONS_MAX: usize = 4;

/// All connections have calls for so long before another one is made. It takes both ends a
/// millisecond of a processor, and the calls by which a job opens six volumes take 5 ms.
const ADD_CONNECTION_AFTER: Duration = Duration::from_millis(10);

/// Time for a further connection, and pause after one that failed.
const ADD_CONNECTION_PAUSE: Duration = Duration::from_secs(1);

/// Connects to servers.
pub struct TlsTcpDialer {
    connector: Arc<Connector>,
    hello: Hello,
}

impl std::fmt::Debug for TlsTcpDialer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsTcpDialer")
    }
}

/// Why there is no connection.
pub(super) struct ConnectFailure {
    pub(super) error: Error,
    /// The machine reports that no process listens: a restarting server soon will.
    pub(super) is_connection_refused: bool,
}

impl TlsTcpDialer {
    /// A dialer that shows `identity`.
    ///
    /// # Errors
    /// `Malformed` when the identity is not usable.
    pub fn new(identity: &Identity) -> Result<Self> {
        Ok(Self {
            connector: Arc::new(Connector::new(identity)?),
            hello: own_hello(identity),
        })
    }

    /// Connects to the resolved `address`, which appears in messages. The TCP connection must be
    /// made `within` this time, and the server has as much time again to prove its identity.
    pub(super) async fn connect(
        &self,
        address: &str,
        target: SocketAddr,
        within: Duration,
    ) -> std::result::Result<Connection, ConnectFailure> {
        let no_way = |why: &dyn std::fmt::Display| {
            let text = format!("{address}: no TCP connection: {why}");
            ConnectFailure {
                error: Error::new(ErrorCode::Unreachable, text),
                is_connection_refused: false,
            }
        };
        let silent = |_| no_way(&"nothing answers");
        let stream = tokio::time::timeout(within, TcpStream::connect(target))
            .await
            .map_err(silent)?
            .map_err(|e| ConnectFailure {
                is_connection_refused: e.kind() == std::io::ErrorKind::ConnectionRefused,
                ..no_way(&e)
            })?;
        // The kernel may have given the port of an ended server to this very socket.
        if matches!((stream.local_addr(), stream.peer_addr()), (Ok(own), Ok(peer)) if own == peer) {
            return Err(no_way(&"nobody listens"));
        }
        let server = ServerEndpoint {
            connector: self.connector.clone(),
            hello: self.hello.clone(),
            target,
            address: address.to_owned(),
        };
        let secured = tokio::time::timeout(within, server.secure_stream(stream)).await;
        let (stream, id) = secured.map_err(silent)?.map_err(|error| ConnectFailure {
            error,
            is_connection_refused: false,
        })?;
        let connections = Arc::new(TcpConnections {
            server,
            server_id: id,
            connections: Mutex::new(vec![TcpConnection::start(stream, true)]),
            is_adding: AtomicBool::new(false),
        });
        Ok(Connection::new(Arc::new(TcpLink(connections))))
    }
}

impl Dial for TlsTcpDialer {
    fn dial<'a>(
        &'a self,
        address: &'a str,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<Connection>> {
        Box::pin(async move {
            let connecting = async {
                let target = resolve(address).await?;
                let connected = self.connect(address, target, deadline.remaining()).await;
                connected.map_err(|why| why.error)
            };
            tokio::time::timeout_at(deadline.instant().into(), connecting)
                .await
                .unwrap_or_else(|_| {
                    let text = format!("{address} does not answer");
                    Err(Error::new(ErrorCode::Unreachable, text))
                })
        })
    }
}

/// A server, and how to connect to it again.
struct ServerEndpoint {
    connector: Arc<Connector>,
    hello: Hello,
    target: SocketAddr,
    address: String,
}

impl ServerEndpoint {
    async fn secure_stream(&self, stream: TcpStream) -> Result<(TlsTcpStream, Option<ServerId>)> {
        let refused = |error: &std::io::Error| {
            if !is_refusal(error) {
                return connection_error(error).context(&self.address);
            }
            let text = format!(
                "{}: {error}; check that both identities are of one cluster (`bafs init`)",
                self.address
            );
            Error::new(ErrorCode::PeerRefused, text)
        };
        socket::configure_socket(&stream);
        let stream = self
            .connector
            .connect(stream)
            .await
            .map_err(|e| refused(&e))?;
        say_hello(stream, &self.hello, refused).await
    }
}

/// The first exchange of a connection, in which the server sends its id.
async fn say_hello(
    mut stream: TlsTcpStream,
    ours: &Hello,
    refused: impl Fn(&std::io::Error) -> Error,
) -> Result<(TlsTcpStream, Option<ServerId>)> {
    let hello = codec::encode(ours)?;
    // The server verifies our certificate only after the client's handshake is complete: its alert
    // is read even if it no longer reads.
    let said = chunks::write_head(&mut stream, &hello).await;
    let heard = match (chunks::read_head(&mut stream).await, said) {
        (Ok(heard), _) => heard?,
        (Err(error), _) if is_refusal(&error) => return Err(refused(&error)),
        (Err(error), Ok(())) | (Err(_), Err(error)) => return Err(refused(&error)),
    };
    let theirs = codec::decode::<Result<HelloReply>>(&heard)??;
    check_hello(ours, &theirs.hello)?;
    Ok((stream, theirs.server))
}

/// The connections to one server.
struct TcpConnections {
    server: ServerEndpoint,
    /// The server's id from its hello.
    server_id: Option<ServerId>,
    connections: Mutex<Vec<Arc<TcpConnection>>>,
    /// Whether a further connection is being made.
    is_adding: AtomicBool,
}

impl TcpConnections {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<TcpConnection>>> {
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn has_idle_connection(&self) -> bool {
        let connections = self.lock();
        let mut calls = connections.iter().filter_map(|it| it.calls_in_flight());
        calls.any(|calls| calls == 0)
    }

    /// The connection with the fewest calls; where all have some, another one is made meanwhile.
    fn least_busy(self: &Arc<Self>) -> Option<Arc<TcpConnection>> {
        let (best, more) = {
            let mut connections = self.lock();
            connections.retain(|connection| connection.calls_in_flight().is_some());
            let calls = connections
                .iter()
                .filter_map(|l| Some((l.calls_in_flight()?, l)));
            let (busy, connection) = calls.min_by_key(|(busy, _)| *busy)?;
            (
                connection.clone(),
                busy > 0 && connections.len() < CONNECTIONS_MAX,
            )
        };
        if more && !self.is_adding.swap(true, Ordering::Relaxed) {
            tokio::spawn(add_connection(Arc::downgrade(self)));
        }
        Some(best)
    }
}

async fn add_connection(connections: Weak<TcpConnections>) {
    tokio::time::sleep(ADD_CONNECTION_AFTER).await;
    let Some(connections) = connections.upgrade() else {
        return;
    };
    if connections.has_idle_connection() {
        connections.is_adding.store(false, Ordering::Relaxed);
        return;
    }
    let making = async {
        let stream = TcpStream::connect(connections.server.target)
            .await
            .map_err(|e| connection_error(&e))?;
        connections.server.secure_stream(stream).await
    };
    let made = tokio::time::timeout(ADD_CONNECTION_PAUSE, making).await;
    match made {
        Ok(Ok((stream, id))) => {
            let mut all = connections.lock();
            // A server that forgot the others is not the one that this connection is to.
            if id == connections.server_id
                && all.iter().any(|lane| lane.calls_in_flight().is_some())
            {
                all.push(TcpConnection::start(stream, false));
            }
        }
        failed => {
            let address = &connections.server.address;
            let error = failed.map(Result::err).unwrap_or_default();
            tracing::debug!(address, ?error, "no further connection");
            tokio::time::sleep(ADD_CONNECTION_PAUSE).await;
        }
    }
    connections.is_adding.store(false, Ordering::Relaxed);
}

/// The callers' handle; dropping the last one ends the connections.
struct TcpLink(Arc<TcpConnections>);

impl Drop for TcpLink {
    fn drop(&mut self) {
        self.0
            .lock()
            .iter()
            .for_each(|connection| connection.request_close());
    }
}

impl Exchange for TcpLink {
    fn exchange(&self, frame: Frame, deadline: Deadline) -> BoxFuture<'_, Result<Frame>> {
        Box::pin(async move {
            let address = &self.0.server.address;
            let lane = self.0.least_busy().ok_or_else(|| {
                let text = format!("{address}: the connection ended");
                Error::new(ErrorCode::Unreachable, text)
            })?;
            tokio::time::timeout_at(deadline.instant().into(), lane.exchange(frame))
                .await
                .unwrap_or_else(|_| {
                    let text = format!("{address} did not answer in time");
                    Err(Error::new(ErrorCode::DeadlineExceeded, text))
                })
                .map_err(|e| e.context(address))
        })
    }

    fn transport_name(&self) -> &'static str {
        "TCP"
    }

    fn server(&self) -> Option<ServerId> {
        self.0.server_id
    }

    fn is_closed(&self) -> bool {
        self.0
            .lock()
            .iter()
            .all(|connection| connection.calls_in_flight().is_none())
    }
}
