//! The side of servers: takes connections, hands requests to a service.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use quinn::{Endpoint, RecvStream, SendStream, VarInt};

use super::{read_frame, read_head_and_body, read_lengths, server_endpoint, write_frame};
use crate::codec;
use crate::error::{Error, ErrorCode, Result};
use crate::identity::Identity;
use crate::ids::ServerId;
use crate::message::{Hello, ReplyHead};
use crate::net::cancellation::Cancellation;
use crate::net::handshakes::Handshakes;
use crate::net::hello::{FRAME_TIMEOUT_MS, connection_error, own_hello, reply_to_hello};
use crate::net::memory_budget::{BudgetPermit, ConnectionBudget, TOO_MANY_CALLS};
use crate::net::{Frame, Peer, Service, serve_frame};

/// Handshakes in progress before further clients must prove their address.
const UNVALIDATED_HANDSHAKES_MAX: usize = 64;

/// Longest silence within a request that has its place, in milliseconds: it keeps others out.
const STALL_TIMEOUT_MS: u64 = 30_000;

/// Longest wait of a request for memory, in milliseconds. Its buffered data uses the window of its
/// connection, which accepted requests need.
const BUDGET_WAIT_MS: u64 = 1_000;

/// Accepts connections and hands requests to a service.
pub struct QuicListener {
    endpoint: Endpoint,
    identity: Identity,
}

impl std::fmt::Debug for QuicListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("QuicListener")
    }
}

impl QuicListener {
    /// Listens at `address` (`host:port`, port 0 for any). Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `Conflict` when the port is in use, `ServerFault` when the address cannot be listened at.
    pub fn bind(address: &str, identity: Identity) -> Result<Self> {
        let endpoint = server_endpoint(address, &identity)?;
        Ok(Self { endpoint, identity })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// `ServerFault` when the system does not say.
    pub fn local_address(&self) -> Result<SocketAddr> {
        self.endpoint
            .local_addr()
            .map_err(|e| Error::new(ErrorCode::ServerFault, e.to_string()))
    }

    /// Serves until the endpoint is closed by [`QuicListener::close`] or by the runtime's end.
    pub async fn serve(&self, service: Arc<dyn Service>) {
        let mut handshakes = Handshakes::default();
        while let Some(incoming) = self.endpoint.accept().await {
            if handshakes.count() >= UNVALIDATED_HANDSHAKES_MAX && incoming.may_retry() {
                // The client retries, which proves its address.
                let _ = incoming.retry();
                continue;
            }
            let (service, hello) = (service.clone(), own_hello(&self.identity));
            let greeting = async move {
                let connection = incoming.await.map_err(|e| connection_error(&e))?;
                let peer = receive_hello(&connection, &hello, service.server()).await?;
                Ok((connection, peer, service))
            };
            handshakes.start(greeting, |(connection, peer, service)| {
                serve_connection(connection, peer, service)
            });
        }
    }

    /// Ends all connections politely, so that clients need not wait for silence.
    pub async fn close(&self) {
        self.endpoint.close(VarInt::from_u32(0), b"server stops");
        let _ = tokio::time::timeout(Duration::from_millis(200), self.endpoint.wait_idle()).await;
    }
}

async fn serve_connection(
    connection: quinn::Connection,
    peer: Peer,
    service: Arc<dyn Service>,
) -> Error {
    let budget = ConnectionBudget::new();
    loop {
        let (send, receive) = match connection.accept_bi().await {
            Ok(stream) => stream,
            Err(error) => return connection_error(&error),
        };
        let (service, peer, budget) = (service.clone(), peer.clone(), budget.clone());
        tokio::spawn(async move {
            if let Err(error) = serve_stream(send, receive, peer, service, budget).await {
                tracing::debug!(%error, "reply not sent");
            }
        });
    }
}

async fn serve_stream(
    mut send: SendStream,
    mut receive: RecvStream,
    peer: Peer,
    service: Arc<dyn Service>,
    budget: ConnectionBudget,
) -> Result<()> {
    let frame = match with_frame_timeout(read_request(&mut receive, &budget)).await {
        Ok((frame, permit)) => {
            let (waiting, awaited) = Cancellation::new();
            let mut answering = pin!(serve_frame(service, peer, frame, awaited));
            let frame = tokio::select! {
                frame = &mut answering => frame,
                _ = send.stopped() => {
                    drop(waiting);
                    answering.await
                }
            };
            drop(permit);
            frame
        }
        Err(error) => {
            // The window is open for others again.
            drop(receive);
            let head = codec::encode::<ReplyHead>(&Err(error));
            (head.unwrap_or_default().into(), Bytes::new())
        }
    };
    with_frame_timeout(write_frame(&mut send, frame)).await
}

/// A request, with its place among all that this process holds: until there is one, for a moment,
/// it stays in the connection's window.
async fn read_request(
    receive: &mut RecvStream,
    budget: &ConnectionBudget,
) -> Result<(Frame, Option<BudgetPermit>)> {
    let lengths = read_lengths(receive).await?;
    let permit = budget.reserve(lengths.0 + lengths.1);
    let permit = tokio::time::timeout(Duration::from_millis(BUDGET_WAIT_MS), permit)
        .await
        .map_err(|_| Error::new(ErrorCode::Busy, TOO_MANY_CALLS))?;
    Ok((
        read_head_and_body(receive, lengths, STALL_TIMEOUT_MS).await?,
        permit,
    ))
}

/// A frame that is received or sent within [`FRAME_TIMEOUT_MS`].
async fn with_frame_timeout<T>(transfer: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(Duration::from_millis(FRAME_TIMEOUT_MS), transfer)
        .await
        .unwrap_or_else(|_| {
            let text =
                format!("a frame took more than {FRAME_TIMEOUT_MS} ms; the link is too slow");
            Err(Error::new(ErrorCode::DeadlineExceeded, text))
        })
}

async fn receive_hello(
    connection: &quinn::Connection,
    ours: &Hello,
    server: Option<ServerId>,
) -> Result<Peer> {
    let (mut send, mut receive) = connection
        .accept_bi()
        .await
        .map_err(|e| connection_error(&e))?;
    let (head, _) = read_frame(&mut receive).await?;
    let theirs = codec::decode::<Hello>(&head);
    let answer = reply_to_hello(ours, &theirs, server);
    write_frame(&mut send, (codec::encode(&answer)?.into(), Bytes::new())).await?;
    Ok(Peer {
        role: answer.and(theirs)?.role,
        address: connection.remote_address().to_string(),
    })
}
