//! Exchanges over TLS over TCP: a few connections for each server, many calls on each.
//!
//! The same certificates, hello and frames as over QUIC; `pieces.rs` says how frames are mixed. The
//! faster channel where packets need no address translation and are hardly lost: it leaves
//! acknowledgements, batches and pacing to the kernel.

mod lane;
mod pieces;
mod server;
mod socket;

pub use server::TcpListener;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::net::TcpStream;

use self::lane::Lane;
use super::hello::{Welcome, broken, check_hello, hello_of, resolve};
use super::tls::{Connector, Secured, is_refusal};
use super::{BoxFuture, Connection, Dial, Exchange, Frame};
use crate::codec;
use crate::error::{Error, ErrorCode, Result};
use crate::identity::Identity;
use crate::ids::ServerId;
use crate::message::Hello;
use crate::time::Deadline;

/// Most connections to one server. More than one let several processors encrypt, and let small
/// calls by where a large answer is under way.
const LANES_MAX: usize = 4;

/// Time for a further connection, and pause after one that failed.
const GROW_PAUSE: Duration = Duration::from_secs(1);

/// Connects to servers.
pub struct TcpDialer {
    connector: Arc<Connector>,
    hello: Hello,
}

impl std::fmt::Debug for TcpDialer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TcpDialer")
    }
}

/// Why there is no connection.
pub(super) struct NotConnected {
    pub(super) error: Error,
    /// The machine answers that nobody listens: a server that starts again soon will.
    pub(super) is_closed: bool,
}

impl TcpDialer {
    /// A dialer that shows `identity`.
    ///
    /// # Errors
    /// `Malformed` when the identity is not usable.
    pub fn new(identity: &Identity) -> Result<Self> {
        Ok(Self {
            connector: Arc::new(Connector::new(identity)?),
            hello: hello_of(identity),
        })
    }

    /// Connects to what `address` stands for, which is told in messages. Packets have the time
    /// `within` to get through, and whoever took the connection has as much to prove who it is.
    pub(super) async fn connect(
        &self,
        address: &str,
        target: SocketAddr,
        within: Duration,
    ) -> std::result::Result<Connection, NotConnected> {
        let no_way = |why: &dyn std::fmt::Display| {
            let text = format!("{address}: no TCP connection: {why}");
            NotConnected {
                error: Error::new(ErrorCode::Unreachable, text),
                is_closed: false,
            }
        };
        let silent = |_| no_way(&"nothing answers");
        let stream = tokio::time::timeout(within, TcpStream::connect(target))
            .await
            .map_err(silent)?
            .map_err(|e| NotConnected {
                is_closed: e.kind() == std::io::ErrorKind::ConnectionRefused,
                ..no_way(&e)
            })?;
        // The kernel may have given the port of a server that is gone to this very socket.
        if matches!((stream.local_addr(), stream.peer_addr()), (Ok(own), Ok(peer)) if own == peer) {
            return Err(no_way(&"nobody listens"));
        }
        let server = Server {
            connector: self.connector.clone(),
            hello: self.hello.clone(),
            target,
            address: address.to_owned(),
        };
        let secured = tokio::time::timeout(within, server.secure(stream)).await;
        let (stream, id) = secured.map_err(silent)?.map_err(|error| NotConnected {
            error,
            is_closed: false,
        })?;
        let lanes = Arc::new(Lanes {
            server,
            id,
            lanes: Mutex::new(vec![Lane::start(stream, true)]),
            growing: AtomicBool::new(false),
        });
        Ok(Connection::new(Arc::new(TcpLink(lanes))))
    }
}

impl Dial for TcpDialer {
    fn dial<'a>(
        &'a self,
        address: &'a str,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<Connection>> {
        Box::pin(async move {
            let connecting = async {
                let target = resolve(address).await?;
                let connected = self.connect(address, target, deadline.left()).await;
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
struct Server {
    connector: Arc<Connector>,
    hello: Hello,
    target: SocketAddr,
    address: String,
}

impl Server {
    async fn secure(&self, stream: TcpStream) -> Result<(Secured, Option<ServerId>)> {
        let refused = |error: &std::io::Error| {
            if !is_refusal(error) {
                return broken(error).context(&self.address);
            }
            let text = format!(
                "{}: {error}; are the identities of one cluster, which `bafs init` made?",
                self.address
            );
            Error::new(ErrorCode::PeerRefused, text)
        };
        socket::prepare(&stream);
        let stream = self
            .connector
            .connect(stream)
            .await
            .map_err(|e| refused(&e))?;
        say_hello(stream, &self.hello, refused).await
    }
}

/// The first exchange of a connection, in which the server says which one it is.
async fn say_hello(
    mut stream: Secured,
    ours: &Hello,
    refused: impl Fn(&std::io::Error) -> Error,
) -> Result<(Secured, Option<ServerId>)> {
    let hello = codec::encode(ours)?;
    // A server looks at our certificate when we believe to be connected already: what it says of
    // that is read even where it does not listen any more.
    let said = pieces::write_frame(&mut stream, &hello).await;
    let heard = match (pieces::read_frame(&mut stream).await, said) {
        (Ok(heard), _) => heard?,
        (Err(error), _) if is_refusal(&error) => return Err(refused(&error)),
        (Err(error), Ok(())) | (Err(_), Err(error)) => return Err(refused(&error)),
    };
    let theirs = codec::decode::<Result<Welcome>>(&heard)??;
    check_hello(ours, &theirs.hello)?;
    Ok((stream, theirs.server))
}

/// The connections to one server.
struct Lanes {
    server: Server,
    /// Which one it said to be.
    id: Option<ServerId>,
    lanes: Mutex<Vec<Arc<Lane>>>,
    /// Whether a further connection is being made.
    growing: AtomicBool,
}

impl Lanes {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Lane>>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection with the fewest calls; where all have some, another one is made meanwhile.
    fn choose(self: &Arc<Self>) -> Option<Arc<Lane>> {
        let (best, more) = {
            let mut lanes = self.lock();
            lanes.retain(|lane| lane.busy().is_some());
            let calls = lanes.iter().filter_map(|l| Some((l.busy()?, l)));
            let (busy, lane) = calls.min_by_key(|(busy, _)| *busy)?;
            (lane.clone(), busy > 0 && lanes.len() < LANES_MAX)
        };
        if more && !self.growing.swap(true, Ordering::Relaxed) {
            tokio::spawn(grow(Arc::downgrade(self)));
        }
        Some(best)
    }
}

async fn grow(lanes: Weak<Lanes>) {
    let Some(lanes) = lanes.upgrade() else {
        return;
    };
    let making = async {
        let stream = TcpStream::connect(lanes.server.target)
            .await
            .map_err(|e| broken(&e))?;
        lanes.server.secure(stream).await
    };
    let made = tokio::time::timeout(GROW_PAUSE, making).await;
    match made {
        Ok(Ok((stream, id))) => {
            let mut all = lanes.lock();
            // A server that forgot the others is not the one that this connection is to.
            if id == lanes.id && all.iter().any(|lane| lane.busy().is_some()) {
                all.push(Lane::start(stream, false));
            }
        }
        failed => {
            let address = &lanes.server.address;
            let error = failed.map(Result::err).unwrap_or_default();
            tracing::debug!(address, ?error, "no further connection");
            tokio::time::sleep(GROW_PAUSE).await;
        }
    }
    lanes.growing.store(false, Ordering::Relaxed);
}

/// What callers hold; its end ends the connections.
struct TcpLink(Arc<Lanes>);

impl Drop for TcpLink {
    fn drop(&mut self) {
        self.0.lock().iter().for_each(|lane| lane.retire());
    }
}

impl Exchange for TcpLink {
    fn exchange(&self, frame: Frame, deadline: Deadline) -> BoxFuture<'_, Result<Frame>> {
        Box::pin(async move {
            let address = &self.0.server.address;
            let lane = self.0.choose().ok_or_else(|| {
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

    fn carrier(&self) -> &'static str {
        "TCP"
    }

    fn server(&self) -> Option<ServerId> {
        self.0.id
    }

    fn is_closed(&self) -> bool {
        self.0.lock().iter().all(|lane| lane.busy().is_none())
    }
}
