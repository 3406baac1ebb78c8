//! The side of servers: takes connections, hands requests to a service.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::net::TcpStream;
use tokio::sync::watch;

use super::chunks::{self, FrameEvent, FrameSender, split_stream};
use super::socket;
use crate::codec;
use crate::error::{Error, ErrorCode, Result};
use crate::identity::Identity;
use crate::ids::ServerId;
use crate::message::{Hello, ReplyHead};
use crate::net::cancellation::{CancelGuard, Cancellation};
use crate::net::handshakes::Handshakes;
use crate::net::hello::{FRAME_TIMEOUT_MS, connection_error, own_hello, reply_to_hello};
use crate::net::memory_budget::{ConnectionBudget, TOO_MANY_CALLS};
use crate::net::tls::{Acceptor, TlsTcpStream};
use crate::net::{Frame, Peer, Service, listen_error_code, serve_frame};

/// Pause when the system has no descriptor for the next connection.
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Accepts connections and hands requests to a service.
pub struct TlsTcpListener {
    socket: tokio::net::TcpListener,
    acceptor: Arc<Acceptor>,
    hello: Hello,
    stop: watch::Sender<bool>,
}

impl std::fmt::Debug for TlsTcpListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsTcpListener")
    }
}

impl TlsTcpListener {
    /// Listens at `address`, port 0 for any. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `Conflict` when the port is in use, `NotFound` when this machine has no such address,
    /// `RightMissing` when the user may not use it, `ServerFault` for anything else.
    pub fn bind(address: SocketAddr, identity: &Identity) -> Result<Self> {
        let failed = |e: std::io::Error| {
            let code = listen_error_code(e.kind());
            Error::new(code, format!("cannot listen at {address} (TCP): {e}"))
        };
        socket::raise_descriptor_limit();
        let socket = socket::listen(address).map_err(failed)?;
        Ok(Self {
            socket: tokio::net::TcpListener::from_std(socket).map_err(failed)?,
            acceptor: Arc::new(Acceptor::new(identity)?),
            hello: own_hello(identity),
            stop: watch::Sender::new(false),
        })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// `ServerFault` when the system does not say.
    pub fn local_address(&self) -> Result<SocketAddr> {
        self.socket
            .local_addr()
            .map_err(|e| Error::new(ErrorCode::ServerFault, e.to_string()))
    }

    /// Serves until [`TlsTcpListener::close`] or the runtime's end.
    pub async fn serve(&self, service: Arc<dyn Service>) {
        let mut handshakes = Handshakes::default();
        let mut stopped = self.stop.subscribe();
        loop {
            let accepted = tokio::select! {
                accepted = self.socket.accept() => accepted,
                _ = stopped.wait_for(|stop| *stop) => return,
            };
            let (stream, from) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "a connection was not accepted");
                    tokio::time::sleep(ACCEPT_RETRY_PAUSE).await;
                    continue;
                }
            };
            let (service, hello) = (service.clone(), self.hello.clone());
            let (acceptor, stop) = (self.acceptor.clone(), self.stop.subscribe());
            let greeting = async move {
                let ours = (&hello, service.server());
                let (stream, peer) = receive_hello(stream, from, &acceptor, ours).await?;
                Ok((stream, peer, service))
            };
            handshakes.start(greeting, |(stream, peer, service)| {
                serve_connection(stream, peer, service, stop)
            });
        }
    }

    /// Ends all connections, so that clients need not wait for silence.
    pub fn close(&self) {
        self.stop.send_replace(true);
    }
}

async fn receive_hello(
    stream: TcpStream,
    from: SocketAddr,
    acceptor: &Acceptor,
    (ours, server): (&Hello, Option<ServerId>),
) -> Result<(TlsTcpStream, Peer)> {
    socket::configure_socket(&stream);
    let mut stream = acceptor
        .accept(stream)
        .await
        .map_err(|e| connection_error(&e))?;
    let head = chunks::read_head(&mut stream)
        .await
        .map_err(|e| connection_error(&e))??;
    let theirs = codec::decode::<Hello>(&head);
    let reply = reply_to_hello(ours, &theirs, server);
    chunks::write_head(&mut stream, &codec::encode(&reply)?)
        .await
        .map_err(|e| connection_error(&e))?;
    let peer = Peer {
        role: reply.and(theirs)?.role,
        address: from.to_string(),
    };
    Ok((stream, peer))
}

/// Calls whose answers are wanted.
type PendingReplies = Arc<Mutex<HashMap<u32, CancelGuard>>>;

async fn serve_connection(
    stream: TlsTcpStream,
    peer: Peer,
    service: Arc<dyn Service>,
    mut stop: watch::Receiver<bool>,
) -> Error {
    let (sender, mut receiver) = split_stream(stream, Some(ConnectionBudget::new()));
    let wanted = PendingReplies::default();
    let serving = async {
        loop {
            match receiver.next_event().await {
                Ok(FrameEvent::Frame(call, frame, place)) => {
                    let (waiting, awaited) = Cancellation::new();
                    if lock(&wanted).insert(call, waiting).is_some() {
                        let text = "two calls of one number";
                        return Error::new(ErrorCode::Malformed, text);
                    }
                    let (service, peer) = (service.clone(), peer.clone());
                    let (sender, wanted) = (sender.clone(), wanted.clone());
                    // A started call is served to its end, because its caller cannot know its
                    // progress; only the answer can be dropped.
                    tokio::spawn(async move {
                        let answering = CloseOnDrop(Some(sender.clone()));
                        let frame = serve_frame(service, peer, frame, awaited).await;
                        answering.disarm();
                        let waiting = lock(&wanted).remove(&call);
                        if waiting.is_some() {
                            send_reply(&sender, call, frame).await;
                        }
                        drop(place);
                    });
                }
                Ok(FrameEvent::Refused(call)) => {
                    let busy: ReplyHead = Err(Error::new(ErrorCode::Busy, TOO_MANY_CALLS));
                    let head = codec::encode(&busy).unwrap_or_default();
                    // Reads nothing more until it is sent, because rejections take memory too.
                    send_reply(&sender, call, (head.into(), Bytes::new())).await;
                }
                Ok(FrameEvent::Cancel(call)) => {
                    lock(&wanted).remove(&call);
                }
                Err(error) => return error,
            }
        }
    };
    let error = tokio::select! {
        error = serving => error,
        error = sender.run_keepalive(|| true) => error,
        () = sender.wait_closed() => {
            Error::new(ErrorCode::DeadlineExceeded, "a reply was not taken")
        }
        _ = stop.wait_for(|stop| *stop) => Error::new(ErrorCode::Unreachable, "server stops"),
    };
    lock(&wanted).clear();
    sender.close().await;
    error
}

/// Ends the connection when the service broke off instead of answering: the caller would wait.
struct CloseOnDrop(Option<Arc<FrameSender>>);

impl CloseOnDrop {
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        if let Some(sender) = &self.0 {
            sender.request_close();
        }
    }
}

async fn send_reply(sender: &FrameSender, call: u32, frame: Frame) {
    let limit = Duration::from_millis(FRAME_TIMEOUT_MS);
    match tokio::time::timeout(limit, sender.send(call, frame)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "reply not sent"),
        // The peer lives and takes nothing.
        Err(_) => sender.request_close(),
    }
}

fn lock(wanted: &PendingReplies) -> std::sync::MutexGuard<'_, HashMap<u32, CancelGuard>> {
    wanted.lock().unwrap_or_else(PoisonError::into_inner)
}
