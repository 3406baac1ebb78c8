//! The side of servers: takes connections, hands requests to a service.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::net::TcpStream;
use tokio::sync::watch;

use super::pieces::{self, Outbox, Word, halves};
use super::socket;
use crate::codec;
use crate::error::{Error, ErrorCode, Result};
use crate::identity::Identity;
use crate::ids::ServerId;
use crate::message::{Hello, ReplyHead};
use crate::net::awaited::{Awaited, Waiting};
use crate::net::handshakes::Handshakes;
use crate::net::hello::{FRAME_MS, broken, hello_of, welcome};
use crate::net::room::{Room, TOO_MANY};
use crate::net::tls::{Acceptor, Secured};
use crate::net::{Frame, Peer, Service, answer};

/// Pause when the system has no descriptor for the next connection.
const BREATH: Duration = Duration::from_millis(50);

/// Accepts connections and hands requests to a service.
pub struct TcpListener {
    socket: tokio::net::TcpListener,
    acceptor: Arc<Acceptor>,
    hello: Hello,
    stop: watch::Sender<bool>,
}

impl std::fmt::Debug for TcpListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TcpListener")
    }
}

impl TcpListener {
    /// Listens at `address`, port 0 for any. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `Conflict` when the port is in use, `ServerFault` when the address cannot be listened at.
    pub fn bind(address: SocketAddr, identity: &Identity) -> Result<Self> {
        let failed = |e: std::io::Error| {
            let code = match e.kind() {
                std::io::ErrorKind::AddrInUse => ErrorCode::Conflict,
                _ => ErrorCode::ServerFault,
            };
            Error::new(code, format!("cannot listen at {address} (TCP): {e}"))
        };
        socket::raise_descriptors();
        let socket = socket::listen(address).map_err(failed)?;
        Ok(Self {
            socket: tokio::net::TcpListener::from_std(socket).map_err(failed)?,
            acceptor: Arc::new(Acceptor::new(identity)?),
            hello: hello_of(identity),
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

    /// Serves until [`TcpListener::close`] or the runtime's end.
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
                    tokio::time::sleep(BREATH).await;
                    continue;
                }
            };
            let (service, hello) = (service.clone(), self.hello.clone());
            let (acceptor, stop) = (self.acceptor.clone(), self.stop.subscribe());
            let greeting = async move {
                let ours = (&hello, service.server());
                let (stream, peer) = greet(stream, from, &acceptor, ours).await?;
                Ok((stream, peer, service))
            };
            handshakes.begin(greeting, |(stream, peer, service)| {
                serve_connection(stream, peer, service, stop)
            });
        }
    }

    /// Ends all connections, so that clients need not wait for silence.
    pub fn close(&self) {
        self.stop.send_replace(true);
    }
}

async fn greet(
    stream: TcpStream,
    from: SocketAddr,
    acceptor: &Acceptor,
    (ours, server): (&Hello, Option<ServerId>),
) -> Result<(Secured, Peer)> {
    socket::prepare(&stream);
    let mut stream = acceptor.accept(stream).await.map_err(|e| broken(&e))?;
    let head = pieces::read_frame(&mut stream)
        .await
        .map_err(|e| broken(&e))??;
    let theirs = codec::decode::<Hello>(&head);
    let reply = welcome(ours, &theirs, server);
    pieces::write_frame(&mut stream, &codec::encode(&reply)?)
        .await
        .map_err(|e| broken(&e))?;
    let peer = Peer {
        role: reply.and(theirs)?.role,
        address: from.to_string(),
    };
    Ok((stream, peer))
}

/// Calls whose answers are wanted.
type Wanted = Arc<Mutex<HashMap<u32, Waiting>>>;

async fn serve_connection(
    stream: Secured,
    peer: Peer,
    service: Arc<dyn Service>,
    mut stop: watch::Receiver<bool>,
) -> Error {
    let (outbox, mut inbox) = halves(stream, Some(Room::new()));
    let wanted = Wanted::default();
    let serving = async {
        loop {
            match inbox.next().await {
                Ok(Word::Frame(call, frame, place)) => {
                    let (waiting, awaited) = Awaited::new();
                    if lock(&wanted).insert(call, waiting).is_some() {
                        let text = "two calls of one number";
                        return Error::new(ErrorCode::Malformed, text);
                    }
                    let (service, peer) = (service.clone(), peer.clone());
                    let (outbox, wanted) = (outbox.clone(), wanted.clone());
                    // Once begun a call is served to its end, as its caller cannot know how far it
                    // came; only the answer can be unwanted.
                    tokio::spawn(async move {
                        let answering = Answering(Some(outbox.clone()));
                        let frame = answer(service, peer, frame, awaited).await;
                        answering.done();
                        let waiting = lock(&wanted).remove(&call);
                        if waiting.is_some() {
                            reply(&outbox, call, frame).await;
                        }
                        drop(place);
                    });
                }
                Ok(Word::Refused(call)) => {
                    let busy: ReplyHead = Err(Error::new(ErrorCode::Busy, TOO_MANY));
                    let head = codec::encode(&busy).unwrap_or_default();
                    // Nothing more is read until it is sent: refusals take memory too.
                    reply(&outbox, call, (head.into(), Bytes::new())).await;
                }
                Ok(Word::Cancel(call)) => {
                    lock(&wanted).remove(&call);
                }
                Err(error) => return error,
            }
        }
    };
    let error = tokio::select! {
        error = serving => error,
        error = outbox.keep(|| true) => error,
        () = outbox.closed() => Error::new(ErrorCode::DeadlineExceeded, "a reply was not taken"),
        _ = stop.wait_for(|stop| *stop) => Error::new(ErrorCode::Unreachable, "server stops"),
    };
    lock(&wanted).clear();
    outbox.close().await;
    error
}

/// Ends the connection when the service broke off instead of answering: the caller would wait.
struct Answering(Option<Arc<Outbox>>);

impl Answering {
    fn done(mut self) {
        self.0 = None;
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        if let Some(outbox) = &self.0 {
            outbox.ask_to_close();
        }
    }
}

async fn reply(outbox: &Outbox, call: u32, frame: Frame) {
    let limit = Duration::from_millis(FRAME_MS);
    match tokio::time::timeout(limit, outbox.send(call, frame)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "reply not sent"),
        // The peer lives and takes nothing.
        Err(_) => outbox.ask_to_close(),
    }
}

fn lock(wanted: &Wanted) -> std::sync::MutexGuard<'_, HashMap<u32, Waiting>> {
    wanted.lock().unwrap_or_else(PoisonError::into_inner)
}
