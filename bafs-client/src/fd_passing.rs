//! The node's door, as an agent on the same machine uses it: fetches what is handed over and
//! speaks with the node while it keeps it. What it does with it, the trees decide.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bafs_proto::fd_passing::{
    GetHandoffTicket, HandoffCall, HandoffHeader, HandoffHello, HandoffHelloReply, HandoffMessage,
    HandoffReply, HandoffRequest, HandoffTarget, HandoffTicket, TicketSecret,
};
use bafs_proto::net::packets::PacketSocket;
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, PROTOCOL_VERSION, Result, codec};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use crate::limits::{HANDOFF_CALL_TIMEOUT_MS, HANDOFF_TIMEOUT_MS};
use crate::tree::Server;

/// What a node handed over.
#[derive(Debug)]
pub struct ReceivedHandoff {
    /// What it is.
    pub header: HandoffHeader,
    /// The open files that came with it.
    pub files: Vec<OwnedFd>,
    /// The way to speak with the node while it is kept.
    pub connection: HandoffConnection,
}

/// Why nothing was handed over. Whoever asked uses the network then.
#[derive(Debug)]
pub enum HandoffError {
    /// The node is on another machine, or does not want to; nothing has changed.
    Refused(Error),
    /// Something went wrong on the way; the node may have handed it over all the same.
    Interrupted(Error),
}

impl From<HandoffError> for Error {
    fn from(why: HandoffError) -> Self {
        match why {
            HandoffError::Refused(error) | HandoffError::Interrupted(error) => error,
        }
    }
}

/// Has a node hand something over. Must be called within a tokio runtime.
///
/// # Errors
/// [`HandoffError`].
pub async fn fetch_handoff(
    server: &Server,
    what: HandoffTarget,
) -> Result<ReceivedHandoff, HandoffError> {
    let (call, deadline) = (
        GetHandoffTicket { target: what },
        Deadline::after_ms(HANDOFF_TIMEOUT_MS),
    );
    let Server { pool, address, .. } = server;
    let asked = pool.call_with_keepalives(address, &server.token, call, deadline);
    let HandoffTicket {
        socket,
        secret: ticket,
    } = asked.await.map_err(HandoffError::Refused)?;
    let packets = PacketSocket::connect(Path::new(&socket))
        .map_err(|error| HandoffError::Refused(connection_error(&error)))?;
    let limit = Duration::from_millis(HANDOFF_TIMEOUT_MS);
    let opened = tokio::time::timeout(limit, present_ticket(&packets, ticket)).await;
    let (opening, files) = opened
        .unwrap_or_else(|_| Err(timeout_error()))
        .map_err(HandoffError::Interrupted)?;
    Ok(ReceivedHandoff {
        header: opening.map_err(HandoffError::Refused)?,
        files,
        connection: HandoffConnection::new(packets),
    })
}

async fn present_ticket(
    packets: &PacketSocket,
    ticket: TicketSecret,
) -> Result<(HandoffHelloReply, Vec<OwnedFd>)> {
    let hello = HandoffHello {
        version: PROTOCOL_VERSION,
        secret: ticket,
    };
    let bytes = codec::encode(&hello)?;
    packets
        .send(&bytes, &[])
        .await
        .map_err(|e| connection_error(&e))?;
    let packet = packets.receive().await.map_err(|e| connection_error(&e))?;
    let (bytes, files) = packet.ok_or_else(ended_error)?;
    Ok((codec::decode(&bytes)?, files))
}

/// The way to speak with the node about something that it handed over. Dropping it gives that
/// back.
#[derive(Debug)]
pub struct HandoffConnection {
    shared: Arc<HandoffConnectionState>,
    listener_task: JoinHandle<()>,
}

#[derive(Debug)]
struct HandoffConnectionState {
    packets: PacketSocket,
    pending_calls: Mutex<PendingCalls>,
    revoked: watch::Sender<Option<Error>>,
}

/// What the node answers, with the open files beside it.
type HandoffResult = Result<(HandoffReply, Vec<OwnedFd>)>;

#[derive(Debug, Default)]
struct PendingCalls {
    last_number: u64,
    reply_senders: BTreeMap<u64, oneshot::Sender<HandoffResult>>,
    is_ended: bool,
}

impl HandoffConnection {
    fn new(packets: PacketSocket) -> Self {
        let shared = Arc::new(HandoffConnectionState {
            packets,
            pending_calls: Mutex::default(),
            revoked: watch::Sender::new(None),
        });
        let listening = tokio::spawn(Arc::clone(&shared).listen());
        Self {
            shared,
            listener_task: listening,
        }
    }

    /// Asks the node something.
    ///
    /// # Errors
    /// What it answers; `Unreachable` when it is gone, `DeadlineExceeded` when it is silent.
    pub async fn call(&self, request: HandoffRequest) -> Result<(HandoffReply, Vec<OwnedFd>)> {
        let limit = Duration::from_millis(HANDOFF_CALL_TIMEOUT_MS);
        let asked = tokio::time::timeout(limit, self.shared.call(request)).await;
        asked.unwrap_or_else(|_| Err(timeout_error()))
    }

    /// Waits until what was handed over may no longer be used: the node wants it back, or is gone.
    /// Tells why.
    pub async fn wait_until_revoked(&self) -> Error {
        let mut over = self.shared.revoked.subscribe();
        let why = over.wait_for(Option::is_some).await;
        why.ok()
            .and_then(|why| why.clone())
            .unwrap_or_else(ended_error)
    }
}

impl Drop for HandoffConnection {
    fn drop(&mut self) {
        // With the task the last user of the socket goes.
        self.listener_task.abort();
    }
}

impl HandoffConnectionState {
    async fn call(&self, request: HandoffRequest) -> Result<(HandoffReply, Vec<OwnedFd>)> {
        let (answered, answer) = oneshot::channel();
        let number = {
            let mut calls = self.pending_calls();
            if calls.is_ended {
                return Err(ended_error());
            }
            calls.last_number += 1;
            let number = calls.last_number;
            calls.reply_senders.insert(number, answered);
            number
        };
        let _forgotten = PendingCallGuard(self, number);
        let bytes = codec::encode(&HandoffCall { number, request })?;
        let sent = self.packets.send(&bytes, &[]).await;
        sent.map_err(|error| connection_error(&error))?;
        answer.await.unwrap_or_else(|_| Err(ended_error()))
    }

    async fn listen(self: Arc<Self>) {
        let why = loop {
            match self.packets.receive().await {
                Ok(Some((bytes, files))) => match codec::decode(&bytes) {
                    Ok(HandoffMessage::Reply {
                        number,
                        result: answer,
                    }) => {
                        if let Some(waiting) = self.pending_calls().reply_senders.remove(&number) {
                            // Whoever asked may have given up.
                            let _ = waiting.send(answer.map(|reply| (reply, files)));
                        }
                    }
                    Ok(HandoffMessage::Revoke { reason: why }) => {
                        self.revoked
                            .send_if_modified(|over| over.replace(why).is_none());
                    }
                    Err(error) => break error,
                },
                Ok(None) => break ended_error(),
                Err(error) => break connection_error(&error),
            }
        };
        let mut calls = self.pending_calls();
        calls.is_ended = true;
        calls.reply_senders.clear();
        drop(calls);
        self.revoked.send_if_modified(|over| {
            let first = over.is_none();
            over.get_or_insert(why);
            first
        });
    }

    fn pending_calls(&self) -> MutexGuard<'_, PendingCalls> {
        self.pending_calls
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Forgets a call that nobody waits for any more.
struct PendingCallGuard<'a>(&'a HandoffConnectionState, u64);

impl Drop for PendingCallGuard<'_> {
    fn drop(&mut self) {
        self.0.pending_calls().reply_senders.remove(&self.1);
    }
}

fn connection_error(error: &std::io::Error) -> Error {
    Error::new(
        ErrorCode::Unreachable,
        format!("the node's descriptor passing: {error}"),
    )
}

fn ended_error() -> Error {
    let text = "the storage server on this machine ended";
    Error::new(ErrorCode::Unreachable, text)
}

fn timeout_error() -> Error {
    let text = "the storage server on this machine does not pass descriptors in time";
    Error::new(ErrorCode::DeadlineExceeded, text)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    async fn receive_call(node: &PacketSocket) -> HandoffCall {
        let (bytes, _) = node.receive().await.unwrap().unwrap();
        codec::decode(&bytes).unwrap()
    }

    async fn send_message(node: &PacketSocket, word: &HandoffMessage, files: &[OwnedFd]) {
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let bytes = codec::encode(word).unwrap();
        node.send(&bytes, &files).await.unwrap();
    }

    #[tokio::test]
    async fn answers_reach_their_calls_and_disconnects_reach_all() {
        let (node, packets) = PacketSocket::pair().unwrap();
        let connection = HandoffConnection::new(packets);
        let used = |bytes| HandoffRequest::ReportUse { bytes, files: 0 };
        let answering = async {
            let (mut first, mut second) = (receive_call(&node).await, receive_call(&node).await);
            if first.request == used(2) {
                std::mem::swap(&mut first, &mut second);
            }
            let file = OwnedFd::from(tempfile::tempfile().unwrap());
            let (number, answer) = (second.number, Ok(HandoffReply::Pinned));
            send_message(
                &node,
                &HandoffMessage::Reply {
                    number,
                    result: answer,
                },
                &[file],
            )
            .await;
            let (number, answer) = (first.number, Ok(HandoffReply::Done));
            send_message(
                &node,
                &HandoffMessage::Reply {
                    number,
                    result: answer,
                },
                &[],
            )
            .await;
        };
        let (first, second, ()) = tokio::join!(
            connection.call(used(1)),
            connection.call(used(2)),
            answering
        );
        assert!(matches!(first.unwrap(), (HandoffReply::Done, files) if files.is_empty()));
        assert!(matches!(second.unwrap(), (HandoffReply::Pinned, files) if files.len() == 1));
        let why = Error::new(ErrorCode::Fenced, "another writer");
        send_message(
            &node,
            &HandoffMessage::Revoke {
                reason: why.clone(),
            },
            &[],
        )
        .await;
        assert_eq!(connection.wait_until_revoked().await, why);
        let (third, ()) = tokio::join!(connection.call(used(3)), async {
            receive_call(&node).await;
            drop(node);
        });
        assert_eq!(third.unwrap_err().code, ErrorCode::Unreachable);
        let late = connection.call(used(4)).await.unwrap_err();
        assert_eq!(late.code, ErrorCode::Unreachable);
        assert_eq!(
            connection.wait_until_revoked().await,
            why,
            "the first reason counts"
        );
    }

    #[tokio::test]
    async fn the_node_sees_a_dropped_connection() {
        let (node, packets) = PacketSocket::pair().unwrap();
        let connection = HandoffConnection::new(packets);
        node.send(&[1, 2, 3], &[]).await.unwrap();
        assert_eq!(
            connection.wait_until_revoked().await.code,
            ErrorCode::Malformed
        );
        drop(connection);
        assert!(node.receive().await.unwrap().is_none());
    }
}
