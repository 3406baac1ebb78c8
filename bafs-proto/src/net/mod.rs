//! Calls over connections, independent of the transport.
//!
//! A call is one exchange of frames. A [`Frame`] is an encoded head (at most 1 MiB) and a raw body
//! (at most 4 MiB). The request frame goes out, and one reply frame comes back.
//!
//! ```text
//!  Pool ──▶ Connection::call ──▶ dyn Exchange ═══ frames ═══ listener ──▶ dyn Service
//!    retries   encodes, checks     QUIC, TCP                    decodes, enforces the deadline
//! ```
//!
//! * [`Dial`] makes connections to an address, and [`Exchange`] carries frames on one of them.
//!   [`quic`] and [`tcp`] implement both between processes, [`memory`] within a process for tests.
//!   [`channel`] chooses between QUIC and TCP.
//! * Callers hold a [`Connection`]. A clone is cheap, and many calls run on it at once.
//! * A server implements [`Service`]. Each request runs in a task of its own.
//! * [`pool`] keeps one connection for each server, and repeats calls if its caller asks for that.
//! * [`packets`] is apart: it carries open files between processes of one machine.
//!
//! **Deadlines.** A request carries the time that its caller still waits, at most 24 hours. The
//! server ends the call after that time with `DeadlineExceeded`. A caller that stops waiting drops
//! its future. The service sees that in [`IncomingRequest::cancellation`]. The call continues until
//! its deadline at most.
//!
//! **Errors.** `Unreachable`: no connection, or it broke during the call, so the call may have run.
//! `DeadlineExceeded`: no answer in time. `Malformed`: a message does not decode or is too long.
//! `PeerRefused`: the certificate is not of this cluster. All other errors are the server's own. A
//! transport never repeats a call.
//!
//! **Liveness.** Each end sends at least one sign of life in a second. A peer that is silent for
//! five seconds counts as lost, and the next call makes a new connection. Both ends show a
//! certificate of the cluster (TLS 1.3, RFC 8446) and exchange a [`crate::message::Hello`] first.
//!
//! **Memory.** A server holds at most 64 MiB of requests for each connection and 512 MiB in all
//! ([`set_request_memory_max`]). A request beyond that is answered with `Busy`.

mod cancellation;
pub mod channel;
mod handshakes;
mod hello;
pub mod memory;
mod memory_budget;
pub mod packets;
pub mod pool;
pub mod quic;
mod routes;
pub mod tcp;
mod tls;

pub use cancellation::{CancelGuard, Cancellation};
pub use memory_budget::set_request_memory_max;
pub use tls::{ForeignTlsConnector, ForeignTlsStream, install_crypto_provider};

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;

use crate::codec;
use crate::error::{Error, ErrorCode, Result};
use crate::ids::ServerId;
use crate::limits::{BODY_BYTES_MAX, DEADLINE_MS_MAX};
use crate::message::{Call, Reply, ReplyHead, Request, RequestHead, Role};
use crate::time::Deadline;
use crate::token::Token;

/// A future that can be stored.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Header and body of a message in encoded form.
pub type Frame = (Bytes, Bytes);

/// The peer of a connection, as a service sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The role that the peer claims; its certificate proves only that it belongs to the cluster.
    pub role: Role,
    /// Where it is, for messages.
    pub address: String,
}

/// A request as a [`Service`] receives it: decoded, but with unchecked rights.
#[derive(Debug)]
pub struct IncomingRequest {
    /// The caller.
    pub peer: Peer,
    /// Capability that came with it.
    pub token: Token,
    /// The request.
    pub request: Request,
    /// Raw data of the request.
    pub body: Bytes,
    /// When the caller stops waiting.
    pub deadline: Deadline,
    /// Whether it waits still.
    pub cancellation: Cancellation,
}

/// A server: answers requests, each in a task of its own.
pub trait Service: Send + Sync + 'static {
    /// The server's id, the same in all its incarnations; sent to each client. `None` where calls
    /// say themselves which server they mean, as those to nodes do.
    fn server(&self) -> Option<ServerId> {
        None
    }

    /// Answers one request, with raw data if the call returns some.
    fn serve(
        self: Arc<Self>,
        incoming: IncomingRequest,
    ) -> BoxFuture<'static, Result<(Reply, Bytes)>>;
}

/// A connection of some transport: carries one frame to the server and one back, for many calls at
/// once. It never repeats an exchange.
pub trait Exchange: Send + Sync {
    /// Sends a frame and waits for the frame that answers it, at most until the deadline.
    fn exchange(&self, frame: Frame, deadline: Deadline) -> BoxFuture<'_, Result<Frame>>;

    /// Whether it is known to be unusable.
    fn is_closed(&self) -> bool;

    /// Name of the transport, for messages.
    fn transport_name(&self) -> &'static str;

    /// Id of the answering server, from its hello.
    fn server(&self) -> Option<ServerId>;
}

/// Makes connections by some transport.
pub trait Dial: Send + Sync {
    /// Connects to `address` (`host:port`).
    fn dial<'a>(
        &'a self,
        address: &'a str,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<Connection>>;
}

/// A connection to one server. Cheap to clone; calls on it run concurrently.
#[derive(Clone)]
pub struct Connection(Arc<dyn Exchange>);

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Connection")
    }
}

impl Connection {
    /// A connection over the given carrier.
    pub fn new(carrier: Arc<dyn Exchange>) -> Self {
        Self(carrier)
    }

    /// Whether it is known to be broken.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    /// Name of the transport, for messages.
    pub fn transport_name(&self) -> &'static str {
        self.0.transport_name()
    }

    /// Id of the server at the other end, from its hello. It is a trusted member of this cluster.
    pub fn server(&self) -> Option<ServerId> {
        self.0.server()
    }

    /// Makes a call without raw data in either direction.
    ///
    /// # Errors
    /// The server's error, or `Unreachable` and `DeadlineExceeded` from the connection.
    pub async fn call<C: Call>(
        &self,
        token: &Token,
        call: C,
        deadline: Deadline,
    ) -> Result<C::Reply> {
        Ok(self
            .call_with_body(token, call, Bytes::new(), deadline)
            .await?
            .0)
    }

    /// Makes a call with raw data, and returns the raw data of the reply.
    ///
    /// # Errors
    /// The server's error, or `Unreachable` and `DeadlineExceeded` from the connection.
    pub async fn call_with_body<C: Call>(
        &self,
        token: &Token,
        call: C,
        body: Bytes,
        deadline: Deadline,
    ) -> Result<(C::Reply, Bytes)> {
        let request: Request = call.into();
        let name = request.name();
        if body.len() > BODY_BYTES_MAX as usize {
            return Err(Error::new(
                ErrorCode::Malformed,
                format!("{name}: body too long"),
            ));
        }
        let time_left_ms = deadline.remaining_ms();
        if time_left_ms == 0 {
            return Err(Error::new(
                ErrorCode::DeadlineExceeded,
                format!("{name} was not sent: its deadline had passed"),
            ));
        }
        let head = codec::encode(&RequestHead {
            time_left_ms,
            token: token.clone(),
            request,
        })?;
        let (head, body) = self
            .0
            .exchange((head.into(), body), deadline)
            .await
            .map_err(|e| e.context(name))?;
        let reply = codec::decode::<ReplyHead>(&head)??;
        Ok((C::reply(reply)?, body))
    }
}

/// Decodes a request frame, has it served within its deadline, and encodes the answer.
pub(crate) async fn serve_frame(
    service: Arc<dyn Service>,
    peer: Peer,
    frame: Frame,
    awaited: Cancellation,
) -> Frame {
    let (result, body) = match serve_decoded(service, peer, frame, awaited).await {
        Ok((reply, body)) => (Ok(reply), body),
        Err(error) => (Err(error), Bytes::new()),
    };
    match codec::encode(&result) {
        Ok(head) => (head.into(), body),
        Err(error) => {
            let head = codec::encode::<ReplyHead>(&Err(error)).unwrap_or_default();
            (head.into(), Bytes::new())
        }
    }
}

async fn serve_decoded(
    service: Arc<dyn Service>,
    peer: Peer,
    (head, body): Frame,
    awaited: Cancellation,
) -> Result<(Reply, Bytes)> {
    let head: RequestHead = codec::decode(&head)?;
    let deadline = Deadline::after_ms(u64::from(head.time_left_ms.min(DEADLINE_MS_MAX)));
    let name = head.request.name();
    let incoming = IncomingRequest {
        peer,
        token: head.token,
        request: head.request,
        body,
        deadline,
        cancellation: awaited,
    };
    let served = tokio::time::timeout_at(deadline.instant().into(), service.serve(incoming));
    let (reply, body) = served.await.unwrap_or_else(|_| {
        Err(Error::new(
            ErrorCode::DeadlineExceeded,
            format!("{name} took too long"),
        ))
    })?;
    if body.len() > BODY_BYTES_MAX as usize {
        return Err(Error::new(
            ErrorCode::Malformed,
            format!("{name}: reply body too long"),
        ));
    }
    Ok((reply, body))
}

/// The code of an error of a socket that cannot listen.
fn listen_error_code(kind: std::io::ErrorKind) -> ErrorCode {
    use std::io::ErrorKind;
    match kind {
        ErrorKind::AddrInUse => ErrorCode::Conflict,
        ErrorKind::AddrNotAvailable => ErrorCode::NotFound,
        ErrorKind::PermissionDenied => ErrorCode::RightMissing,
        _ => ErrorCode::ServerFault,
    }
}
