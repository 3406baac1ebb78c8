//! Passes open files to agents on this machine, so that they do without calls.
//!
//! Most jobs run on the node that holds their volumes. There an agent works on open files of the
//! node, which costs no message.
//!
//! ```text
//!  agent ── GetHandoffTicket (a call with a token) ──▶ node checks rights, issue_ticket
//!  agent ── HandoffHello: the ticket ────────────────▶ Unix socket in the store
//!  agent ◀─ HandoffHeader and open files (SCM_RIGHTS)
//!  agent ◀▶ HandoffCall and HandoffMessage, until one end closes
//! ```
//!
//! * [`HandoffServer`] has the socket and the tickets. A ticket has 32 random bytes, is valid once
//!   and for ten seconds, and stands for a [`HandoffFactory`].
//! * The factory makes the [`Handoff`] when the agent shows the ticket: header, open files, and a
//!   [`HandoffHandler`], which answers requests from then on. `storage` and `cache` provide these.
//! * The connection is a sign of life. Each end sees at once when the other dies. Then the handler
//!   is dropped.
//! * A node that wants something back sets `Handoff::recall`. The agent gets the reason.
//!
//! **Errors.** An agent that is refused uses the network: `TokenInvalid` for a wrong ticket or
//! another user, `VersionMismatch` for another protocol version, `Busy` beyond 1,024 waiting
//! tickets, and `Unsupported` without a socket. Agent and node must run as the same user, because
//! the node could not read another user's files.
//!
//! **Concurrency.** Each connection has a task. Up to 64 requests of one agent run at once, and
//! those that have begun are finished even if the agent is gone. A message of an agent may take
//! five seconds. There are at most 2,048 connections.
//!
//! The packets are `SOCK_SEQPACKET` with `SCM_RIGHTS` (unix(7)), in [`bafs_proto::net::packets`].
//! The choice is recorded in `docs/decisions/0010-descriptor-passing-on-one-machine.md`.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bafs_proto::fd_passing::{
    HANDOFF_SOCKET_NAME, HANDOFF_TICKET_LIFETIME_MS, HandoffCall, HandoffHeader, HandoffHello,
    HandoffMessage, HandoffReply, HandoffRequest, HandoffTicket, TicketSecret,
};
use bafs_proto::net::BoxFuture;
use bafs_proto::net::packets::{PacketListener, PacketSocket};
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode, PROTOCOL_VERSION, Result, codec};
use serde::Serialize;
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinError, JoinSet};

use crate::clock;
use crate::counters::Counters;

/// Most tickets that wait for their holders.
const UNUSED_TICKETS_MAX: usize = 1024;

/// Most connections at once; each holds a few descriptors.
const CONNECTIONS_MAX: usize = 2048;

/// Time for one message of an agent that is in the middle of something, in milliseconds.
const MESSAGE_TIMEOUT_MS: u64 = 5_000;

/// Most requests of one agent that are answered at once.
const CONCURRENT_REQUESTS_MAX: usize = 64;

/// Pause after a connection could not be accepted: descriptors are short.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Makes the [`Handoff`] when an agent shows the ticket.
pub type HandoffFactory = Box<dyn FnOnce() -> BoxFuture<'static, Result<Handoff>> + Send>;

/// Open files for an agent, and the handler that serves it afterwards.
pub struct Handoff {
    /// What the agent is told.
    pub header: HandoffHeader,
    /// The open files that go with it; closed here when they are sent.
    pub files: Vec<OwnedFd>,
    /// Answers the agent from then on; dropped when the connection is over.
    pub handler: Box<dyn HandoffHandler>,
    /// Says why when it must be given back.
    pub recall: watch::Receiver<Option<Error>>,
}

/// What an agent is told, with the open files beside it.
pub type HandlerReply = Result<(HandoffReply, Vec<OwnedFd>)>;

/// Serves an agent after a hand-over, until it is dropped.
pub trait HandoffHandler: Send {
    /// Answers one request. Several may be under way at once; what was begun is done, even when the
    /// agent is gone.
    fn answer(&mut self, request: HandoffRequest) -> BoxFuture<'static, HandlerReply>;
}

/// The tickets of one node, and the Unix socket where agents show them.
pub struct HandoffServer {
    directory: PathBuf,
    /// The socket's path, once there is one.
    socket: Mutex<Option<String>>,
    tickets: Mutex<BTreeMap<TicketSecret, (Time, HandoffFactory)>>,
    connections: Arc<Semaphore>,
    counters: Counters,
}

impl std::fmt::Debug for HandoffServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Door({})", self.directory.display())
    }
}

impl HandoffServer {
    /// A door in the node's directory, closed until [`Self::serve`]. Counts `handoff_tickets`,
    /// `handoff_connections` and `handoff_refusals`.
    pub fn new(directory: &Path, counters: Counters) -> Arc<Self> {
        Arc::new(Self {
            directory: directory.to_owned(),
            socket: Mutex::default(),
            tickets: Mutex::default(),
            connections: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
            counters,
        })
    }

    /// Serves agents, for ever. A machine that refuses the socket is no harm: agents then use the
    /// network, and the log says why.
    pub async fn serve(self: Arc<Self>) {
        let listener = match self.listen() {
            Ok(listener) => listener,
            Err(error) => {
                let directory = self.directory.display();
                tracing::warn!(%directory, %error, "no descriptor passing; local agents use the \
                    network");
                return;
            }
        };
        loop {
            let packets = match listener.accept().await {
                Ok(packets) => packets,
                Err(error) => {
                    tracing::debug!(%error, "cannot accept agents for descriptor passing");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Ok(place) = self.connections.clone().try_acquire_owned() else {
                self.counters.add("handoff_refusals", 1);
                continue;
            };
            let handoff_server = self.clone();
            tokio::spawn(async move {
                let _place = place;
                handoff_server.serve_connection(&packets).await;
            });
        }
    }

    /// Gives out a ticket for what `grant` makes.
    ///
    /// # Errors
    /// `Unsupported` when the door is closed, `Busy` when too many tickets wait.
    pub fn issue_ticket(&self, grant: HandoffFactory) -> Result<HandoffTicket> {
        let socket = lock(&self.socket).clone().ok_or_else(closed_error)?;
        let now = clock::now();
        let mut tickets = lock(&self.tickets);
        tickets.retain(|_, (made, _)| now.ms_since(*made) <= HANDOFF_TICKET_LIFETIME_MS);
        if tickets.len() >= UNUSED_TICKETS_MAX {
            let text = format!("{UNUSED_TICKETS_MAX} tickets are unused; use the network");
            return Err(Error::new(ErrorCode::Busy, text));
        }
        let ticket = TicketSecret(rand::random());
        tickets.insert(ticket, (now, grant));
        self.counters.add("handoff_tickets", 1);
        Ok(HandoffTicket {
            socket,
            secret: ticket,
        })
    }

    fn listen(&self) -> std::io::Result<PacketListener> {
        let path = self.directory.canonicalize()?.join(HANDOFF_SOCKET_NAME);
        let path = path
            .into_os_string()
            .into_string()
            .map_err(|_| std::io::ErrorKind::InvalidFilename)?;
        let listener = PacketListener::bind(&self.directory, HANDOFF_SOCKET_NAME)?;
        *lock(&self.socket) = Some(path);
        Ok(listener)
    }

    /// One connection from its first word to its end.
    async fn serve_connection(&self, packets: &PacketSocket) {
        let opened = match with_message_timeout(self.accept_hello(packets)).await {
            Ok(handoff) => send_handoff(packets, handoff).await,
            Err(error) => {
                let answer = Err::<HandoffHeader, _>(error.clone());
                // Whoever does not even listen gets no answer.
                let _ = with_message_timeout(send_message(packets, &answer, &[])).await;
                Err(error)
            }
        };
        match opened {
            Ok((mut keeper, recall)) => {
                self.counters.add("handoff_connections", 1);
                if let Err(error) = serve_requests(packets, keeper.as_mut(), recall).await {
                    tracing::debug!(%error, "a descriptor-passing connection failed");
                }
            }
            Err(error) => {
                self.counters.add("handoff_refusals", 1);
                tracing::debug!(%error, "an agent was rejected for descriptor passing");
            }
        }
    }

    async fn accept_hello(&self, packets: &PacketSocket) -> Result<Handoff> {
        let refuse = |text: &str| Error::new(ErrorCode::TokenInvalid, text);
        let uid = packets.peer_uid().map_err(connection_error)?;
        // Files that another user makes would not be ours to read, to copy, to delete.
        if uid != rustix::process::geteuid().as_raw() {
            return Err(refuse("only agents of the node's own user may connect"));
        }
        let packet = packets.receive().await.map_err(connection_error)?;
        let (bytes, _files) = packet.ok_or_else(|| refuse("the agent sent no hello"))?;
        let HandoffHello {
            version,
            secret: ticket,
        } = codec::decode(&bytes)?;
        if version != PROTOCOL_VERSION {
            let text = format!("the agent speaks version {version}, the node {PROTOCOL_VERSION}");
            return Err(Error::new(ErrorCode::VersionMismatch, text));
        }
        let (made, grant) = lock(&self.tickets)
            .remove(&ticket)
            .ok_or_else(|| refuse("the ticket is unknown or used"))?;
        if clock::now().ms_since(made) > HANDOFF_TICKET_LIFETIME_MS {
            return Err(refuse("the ticket has expired"));
        }
        grant().await
    }
}

type SentHandoff = (Box<dyn HandoffHandler>, watch::Receiver<Option<Error>>);

async fn send_handoff(packets: &PacketSocket, handoff: Handoff) -> Result<SentHandoff> {
    let Handoff {
        header,
        files,
        handler: keeper,
        recall,
    } = handoff;
    with_message_timeout(send_message(packets, &Ok::<_, Error>(header), &files)).await?;
    Ok((keeper, recall))
}

/// Answers an agent until one of the two ends it.
async fn serve_requests(
    packets: &PacketSocket,
    keeper: &mut dyn HandoffHandler,
    mut recall: watch::Receiver<Option<Error>>,
) -> Result<()> {
    let mut may_recall = true;
    let mut answers = RequestTasks(JoinSet::new());
    loop {
        tokio::select! {
            why = wait_for_recall(&mut recall), if may_recall => {
                may_recall = false;
                if let Some(why) = why {
                    let revoke = HandoffMessage::Revoke { reason: why };
                    with_message_timeout(send_message(packets, &revoke, &[])).await?;
                }
            }
            Some(answered) = answers.0.join_next() => {
                let (number, answer) = answered.map_err(task_error)?;
                let (answer, files) = match answer {
                    Ok((reply, files)) => (Ok(reply), files),
                    Err(error) => (Err(error), Vec::new()),
                };
                let reply = HandoffMessage::Reply { number, result: answer };
                with_message_timeout(send_message(packets, &reply, &files)).await?;
            }
            packet = packets.receive(), if answers.0.len() < CONCURRENT_REQUESTS_MAX => {
                let Some((bytes, _files)) = packet.map_err(connection_error)? else {
                    return Ok(());
                };
                let HandoffCall { number, request } = codec::decode(&bytes)?;
                let answer = keeper.answer(request);
                answers.0.spawn(async move { (number, answer.await) });
            }
        }
    }
}

/// Requests of one agent that are being answered.
struct RequestTasks(JoinSet<(u64, HandlerReply)>);

impl Drop for RequestTasks {
    fn drop(&mut self) {
        self.0.detach_all();
    }
}

fn task_error(error: JoinError) -> Error {
    let text = format!("the reply to an agent failed: {error}");
    Error::new(ErrorCode::ServerFault, text)
}

/// Why it must be given back; `None` when nobody will ever say so.
async fn wait_for_recall(recall: &mut watch::Receiver<Option<Error>>) -> Option<Error> {
    recall.wait_for(Option::is_some).await.ok()?.clone()
}

async fn send_message(
    packets: &PacketSocket,
    word: &impl Serialize,
    files: &[OwnedFd],
) -> Result<()> {
    let bytes = codec::encode(word)?;
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    packets.send(&bytes, &files).await.map_err(connection_error)
}

async fn with_message_timeout<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let limit = Duration::from_millis(MESSAGE_TIMEOUT_MS);
    tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
        let text = "the agent is too slow";
        Err(Error::new(ErrorCode::DeadlineExceeded, text))
    })
}

fn connection_error(error: std::io::Error) -> Error {
    Error::new(
        ErrorCode::Unreachable,
        format!("descriptor passing: {error}"),
    )
}

fn closed_error() -> Error {
    let text = "this node passes no descriptors; use the network";
    Error::new(ErrorCode::Unsupported, text)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
