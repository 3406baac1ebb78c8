//! The node's door, as an agent on the same machine uses it: fetches what is handed over and
//! speaks with the node while it keeps it. What it does with it, the trees decide.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bafs_proto::door::{
    DoorCall, DoorReply, DoorRequest, DoorWord, HandOver, HandOverOf, HandOverTicket, HandedOver,
    Knock, Opening, Ticket,
};
use bafs_proto::net::packets::Packets;
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, PROTOCOL_VERSION, Result, codec};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use crate::limits::{DOOR_CALL_MS, DOOR_OPEN_MS};
use crate::tree::Server;

/// What a node handed over.
#[derive(Debug)]
pub struct Parcel {
    /// What it is.
    pub header: HandedOver,
    /// The open files that came with it.
    pub files: Vec<OwnedFd>,
    /// The way to speak with the node while it is kept.
    pub connection: DoorConnection,
}

/// Why nothing was handed over. Whoever asked uses the network then.
#[derive(Debug)]
pub enum NotOpened {
    /// The node is on another machine, or does not want to; nothing has changed.
    Refused(Error),
    /// Something went wrong on the way; the node may have handed it over all the same.
    Broken(Error),
}

impl From<NotOpened> for Error {
    fn from(why: NotOpened) -> Self {
        match why {
            NotOpened::Refused(error) | NotOpened::Broken(error) => error,
        }
    }
}

/// Has a node hand something over. Must be called within a tokio runtime.
///
/// # Errors
/// [`NotOpened`].
pub async fn fetch(server: &Server, what: HandOverOf) -> Result<Parcel, NotOpened> {
    let (call, deadline) = (HandOver { what }, Deadline::after_ms(DOOR_OPEN_MS));
    let Server { pool, address, .. } = server;
    let asked = pool.call_patiently(address, &server.token, call, deadline);
    let HandOverTicket { socket, ticket } = asked.await.map_err(NotOpened::Refused)?;
    let packets =
        Packets::connect(Path::new(&socket)).map_err(|error| NotOpened::Refused(broken(&error)))?;
    let limit = Duration::from_millis(DOOR_OPEN_MS);
    let opened = tokio::time::timeout(limit, knock(&packets, ticket)).await;
    let (opening, files) = opened
        .unwrap_or_else(|_| Err(silent()))
        .map_err(NotOpened::Broken)?;
    Ok(Parcel {
        header: opening.map_err(NotOpened::Refused)?,
        files,
        connection: DoorConnection::new(packets),
    })
}

async fn knock(packets: &Packets, ticket: Ticket) -> Result<(Opening, Vec<OwnedFd>)> {
    let knock = Knock {
        version: PROTOCOL_VERSION,
        ticket,
    };
    let bytes = codec::encode(&knock)?;
    packets.send(&bytes, &[]).await.map_err(|e| broken(&e))?;
    let packet = packets.receive().await.map_err(|e| broken(&e))?;
    let (bytes, files) = packet.ok_or_else(ended)?;
    Ok((codec::decode(&bytes)?, files))
}

/// The way to speak with the node about something that it handed over. Dropping it gives that
/// back.
#[derive(Debug)]
pub struct DoorConnection {
    shared: Arc<Shared>,
    listening: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    packets: Packets,
    calls: Mutex<Calls>,
    over: watch::Sender<Option<Error>>,
}

/// What the node answers, with the open files beside it.
type Answer = Result<(DoorReply, Vec<OwnedFd>)>;

#[derive(Debug, Default)]
struct Calls {
    last: u64,
    waiting: BTreeMap<u64, oneshot::Sender<Answer>>,
    ended: bool,
}

impl DoorConnection {
    fn new(packets: Packets) -> Self {
        let shared = Arc::new(Shared {
            packets,
            calls: Mutex::default(),
            over: watch::Sender::new(None),
        });
        let listening = tokio::spawn(Arc::clone(&shared).listen());
        Self { shared, listening }
    }

    /// Asks the node something.
    ///
    /// # Errors
    /// What it answers; `Unreachable` when it is gone, `DeadlineExceeded` when it is silent.
    pub async fn call(&self, request: DoorRequest) -> Result<(DoorReply, Vec<OwnedFd>)> {
        let limit = Duration::from_millis(DOOR_CALL_MS);
        let asked = tokio::time::timeout(limit, self.shared.call(request)).await;
        asked.unwrap_or_else(|_| Err(silent()))
    }

    /// Waits until what was handed over may no longer be used: the node wants it back, or is gone.
    /// Tells why.
    pub async fn over(&self) -> Error {
        let mut over = self.shared.over.subscribe();
        let why = over.wait_for(Option::is_some).await;
        why.ok().and_then(|why| why.clone()).unwrap_or_else(ended)
    }
}

impl Drop for DoorConnection {
    fn drop(&mut self) {
        // With the task the last user of the socket goes.
        self.listening.abort();
    }
}

impl Shared {
    async fn call(&self, request: DoorRequest) -> Result<(DoorReply, Vec<OwnedFd>)> {
        let (answered, answer) = oneshot::channel();
        let number = {
            let mut calls = self.calls();
            if calls.ended {
                return Err(ended());
            }
            calls.last += 1;
            let number = calls.last;
            calls.waiting.insert(number, answered);
            number
        };
        let _forgotten = Forget(self, number);
        let bytes = codec::encode(&DoorCall { number, request })?;
        let sent = self.packets.send(&bytes, &[]).await;
        sent.map_err(|error| broken(&error))?;
        answer.await.unwrap_or_else(|_| Err(ended()))
    }

    async fn listen(self: Arc<Self>) {
        let why = loop {
            match self.packets.receive().await {
                Ok(Some((bytes, files))) => match codec::decode(&bytes) {
                    Ok(DoorWord::Answer { number, answer }) => {
                        if let Some(waiting) = self.calls().waiting.remove(&number) {
                            // Whoever asked may have given up.
                            let _ = waiting.send(answer.map(|reply| (reply, files)));
                        }
                    }
                    Ok(DoorWord::Stop { why }) => {
                        self.over
                            .send_if_modified(|over| over.replace(why).is_none());
                    }
                    Err(error) => break error,
                },
                Ok(None) => break ended(),
                Err(error) => break broken(&error),
            }
        };
        let mut calls = self.calls();
        calls.ended = true;
        calls.waiting.clear();
        drop(calls);
        self.over.send_if_modified(|over| {
            let first = over.is_none();
            over.get_or_insert(why);
            first
        });
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Forgets a call that nobody waits for any more.
struct Forget<'a>(&'a Shared, u64);

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.0.calls().waiting.remove(&self.1);
    }
}

fn broken(error: &std::io::Error) -> Error {
    Error::new(ErrorCode::Unreachable, format!("the node's door: {error}"))
}

fn ended() -> Error {
    let text = "the storage server on this machine ended";
    Error::new(ErrorCode::Unreachable, text)
}

fn silent() -> Error {
    let text = "the storage server on this machine does not answer at its door";
    Error::new(ErrorCode::DeadlineExceeded, text)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    async fn request(node: &Packets) -> DoorCall {
        let (bytes, _) = node.receive().await.unwrap().unwrap();
        codec::decode(&bytes).unwrap()
    }

    async fn say(node: &Packets, word: &DoorWord, files: &[OwnedFd]) {
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let bytes = codec::encode(word).unwrap();
        node.send(&bytes, &files).await.unwrap();
    }

    #[tokio::test]
    async fn answers_find_their_calls_and_the_end_finds_everybody() {
        let (node, packets) = Packets::pair().unwrap();
        let connection = DoorConnection::new(packets);
        let used = |bytes| DoorRequest::Used { bytes, files: 0 };
        let answering = async {
            let (mut first, mut second) = (request(&node).await, request(&node).await);
            if first.request == used(2) {
                std::mem::swap(&mut first, &mut second);
            }
            let file = OwnedFd::from(tempfile::tempfile().unwrap());
            let (number, answer) = (second.number, Ok(DoorReply::Pinned));
            say(&node, &DoorWord::Answer { number, answer }, &[file]).await;
            let (number, answer) = (first.number, Ok(DoorReply::Done));
            say(&node, &DoorWord::Answer { number, answer }, &[]).await;
        };
        let (first, second, ()) = tokio::join!(
            connection.call(used(1)),
            connection.call(used(2)),
            answering
        );
        assert!(matches!(first.unwrap(), (DoorReply::Done, files) if files.is_empty()));
        assert!(matches!(second.unwrap(), (DoorReply::Pinned, files) if files.len() == 1));
        let why = Error::new(ErrorCode::Fenced, "another writer");
        say(&node, &DoorWord::Stop { why: why.clone() }, &[]).await;
        assert_eq!(connection.over().await, why);
        let (third, ()) = tokio::join!(connection.call(used(3)), async {
            request(&node).await;
            drop(node);
        });
        assert_eq!(third.unwrap_err().code, ErrorCode::Unreachable);
        let late = connection.call(used(4)).await.unwrap_err();
        assert_eq!(late.code, ErrorCode::Unreachable);
        assert_eq!(connection.over().await, why, "the first reason counts");
    }

    #[tokio::test]
    async fn dropping_the_connection_is_seen_by_the_node() {
        let (node, packets) = Packets::pair().unwrap();
        let connection = DoorConnection::new(packets);
        node.send(&[1, 2, 3], &[]).await.unwrap();
        assert_eq!(connection.over().await.code, ErrorCode::Malformed);
        drop(connection);
        assert!(node.receive().await.unwrap().is_none());
    }
}
