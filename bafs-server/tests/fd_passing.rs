//! The door of a node: tickets, garbage, slow and dead agents, giving back.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bafs_proto::fd_passing::{
    HandoffCall, HandoffHeader, HandoffHello, HandoffHelloReply, HandoffMessage, HandoffReply,
    HandoffRequest, HandoffTicket, TicketSecret, TreeHandoff,
};
use bafs_proto::ids::FileIndex;
use bafs_proto::net::BoxFuture;
use bafs_proto::net::packets::PacketSocket;
use bafs_proto::{Error, ErrorCode, PROTOCOL_VERSION, codec};
use bafs_server::counters::Counters;
use bafs_server::fd_passing::{
    HandlerReply, Handoff, HandoffFactory, HandoffHandler, HandoffServer,
};
use tokio::sync::watch;

const HEADER: HandoffHeader = HandoffHeader::Tree(TreeHandoff {
    bind_path: None,
    size_bytes: 1,
    size_files: 2,
    used_bytes: 3,
    used_files: 4,
});

struct FileHandler {
    file: PathBuf,
    is_freed: Arc<AtomicBool>,
}

impl HandoffHandler for FileHandler {
    fn answer(&mut self, request: HandoffRequest) -> BoxFuture<'static, HandlerReply> {
        let path = self.file.clone();
        Box::pin(async move {
            match request {
                HandoffRequest::PinFile { .. } => {
                    let file = File::open(path).expect("open");
                    Ok((HandoffReply::Pinned, vec![file.into()]))
                }
                _ => Err(Error::new(ErrorCode::Unsupported, "no")),
            }
        })
    }
}

impl Drop for FileHandler {
    fn drop(&mut self) {
        self.is_freed.store(true, Ordering::SeqCst);
    }
}

struct HandoffFixture {
    directory: tempfile::TempDir,
    handoff_server: Arc<HandoffServer>,
    is_freed: Arc<AtomicBool>,
    recall: watch::Sender<Option<Error>>,
}

impl HandoffFixture {
    async fn new() -> Self {
        let directory = tempfile::tempdir().expect("directory");
        let handoff_server = HandoffServer::new(directory.path(), Counters::default());
        std::fs::write(directory.path().join("data"), "data").expect("write");
        tokio::spawn(handoff_server.clone().serve());
        let world = Self {
            directory,
            handoff_server,
            is_freed: Arc::default(),
            recall: watch::Sender::new(None),
        };
        while world
            .handoff_server
            .issue_ticket(world.prepare_handoff())
            .is_err()
        {
            tokio::task::yield_now().await;
        }
        world
    }

    fn prepare_handoff(&self) -> HandoffFactory {
        let file = self.directory.path().join("data");
        let (freed, recall) = (self.is_freed.clone(), self.recall.subscribe());
        Box::new(move || {
            Box::pin(async move {
                let files = vec![File::open(&file).expect("open").into()];
                Ok(Handoff {
                    header: HEADER,
                    files,
                    handler: Box::new(FileHandler {
                        file,
                        is_freed: freed,
                    }),
                    recall,
                })
            })
        })
    }

    async fn wait_until_freed(&self) {
        while !self.is_freed.load(Ordering::SeqCst) {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    }
}

async fn send_hello(
    socket: &str,
    ticket: TicketSecret,
) -> (PacketSocket, HandoffHelloReply, Vec<OwnedFd>) {
    let packets = PacketSocket::connect(Path::new(socket)).expect("connect");
    let hello = HandoffHello {
        version: PROTOCOL_VERSION,
        secret: ticket,
    };
    let bytes = codec::encode(&hello).expect("encode");
    packets.send(&bytes, &[]).await.expect("send");
    let (bytes, files) = packets.receive().await.expect("receive").expect("answer");
    let opening = codec::decode(&bytes).expect("decode");
    (packets, opening, files)
}

fn read_text(file: OwnedFd) -> String {
    let mut text = String::new();
    File::from(file).read_to_string(&mut text).expect("read");
    text
}

async fn send_request(packets: &PacketSocket, number: u64) -> (HandoffMessage, Vec<OwnedFd>) {
    let request = HandoffRequest::PinFile { file: FileIndex(0) };
    let call = HandoffCall { number, request };
    let bytes = codec::encode(&call).expect("encode");
    packets.send(&bytes, &[]).await.expect("send");
    receive_message(packets).await
}

async fn receive_message(packets: &PacketSocket) -> (HandoffMessage, Vec<OwnedFd>) {
    let (bytes, files) = packets.receive().await.expect("receive").expect("a word");
    (codec::decode(&bytes).expect("decode"), files)
}

#[tokio::test]
async fn a_ticket_works_once_and_disconnecting_frees_files() {
    let world = HandoffFixture::new().await;
    let HandoffTicket { socket, secret } = world
        .handoff_server
        .issue_ticket(world.prepare_handoff())
        .expect("ticket");
    let (packets, opening, mut files) = send_hello(&socket, secret).await;
    assert_eq!(opening, Ok(HEADER));
    assert_eq!(read_text(files.remove(0)), "data");
    let (word, mut files) = send_request(&packets, 7).await;
    let answer = Ok(HandoffReply::Pinned);
    assert_eq!(
        word,
        HandoffMessage::Reply {
            number: 7,
            result: answer
        }
    );
    assert_eq!(read_text(files.remove(0)), "data");
    let (_, again, files) = send_hello(&socket, secret).await;
    assert_eq!(
        again.expect_err("used up").code,
        ErrorCode::TokenInvalid,
        "a ticket is good once"
    );
    assert!(files.is_empty());
    assert!(!world.is_freed.load(Ordering::SeqCst));
    drop(packets);
    world.wait_until_freed().await;
}

#[tokio::test]
async fn a_recalled_client_still_gets_answers() {
    let world = HandoffFixture::new().await;
    let HandoffTicket { socket, secret } = world
        .handoff_server
        .issue_ticket(world.prepare_handoff())
        .expect("ticket");
    let (packets, opening, _files) = send_hello(&socket, secret).await;
    opening.expect("opened");
    let why = Error::new(ErrorCode::Fenced, "another writer");
    world.recall.send_replace(Some(why.clone()));
    assert_eq!(
        receive_message(&packets).await.0,
        HandoffMessage::Revoke { reason: why }
    );
    assert!(matches!(
        send_request(&packets, 1).await.0,
        HandoffMessage::Reply { .. }
    ));
}

#[tokio::test]
async fn malformed_packets_and_guessed_tickets_are_refused() {
    let world = HandoffFixture::new().await;
    let HandoffTicket { socket, secret } = world
        .handoff_server
        .issue_ticket(world.prepare_handoff())
        .expect("ticket");
    for garbage in [&[0u8][..], &[0xff; 36], &[7; 60_000]] {
        let packets = PacketSocket::connect(Path::new(&socket)).expect("connect");
        packets.send(garbage, &[]).await.expect("send");
        let (bytes, _) = packets.receive().await.expect("receive").expect("answer");
        codec::decode::<HandoffHelloReply>(&bytes)
            .expect("decode")
            .expect_err("refused");
        assert!(packets.receive().await.expect("end").is_none());
    }
    let (_, guess, _) = send_hello(&socket, TicketSecret([7; 32])).await;
    assert_eq!(guess.expect_err("unknown").code, ErrorCode::TokenInvalid);
    // One that comes and goes, and one that says nothing, hold nobody up.
    drop(PacketSocket::connect(Path::new(&socket)).expect("connect"));
    let _silent = PacketSocket::connect(Path::new(&socket)).expect("connect");
    let (packets, opening, _files) = send_hello(&socket, secret).await;
    opening.expect("opened");
    // Garbage later ends the connection.
    packets.send(&[1, 2, 3], &[]).await.expect("send");
    assert!(packets.receive().await.expect("end").is_none());
    world.wait_until_freed().await;
}

#[tokio::test]
async fn the_number_of_tickets_is_bounded() {
    let world = HandoffFixture::new().await;
    let mut given = 0;
    let refused = loop {
        match world.handoff_server.issue_ticket(world.prepare_handoff()) {
            Ok(_) => given += 1,
            Err(error) => break error,
        }
    };
    assert!((1000..1100).contains(&given), "{given}");
    assert_eq!(refused.code, ErrorCode::Busy);
}

#[tokio::test]
async fn a_closed_handoff_socket_issues_no_tickets() {
    let directory = tempfile::tempdir().expect("directory");
    let handoff_server = HandoffServer::new(&directory.path().join("absent"), Counters::default());
    handoff_server.clone().serve().await;
    let grant: HandoffFactory = Box::new(|| unreachable!("no ticket, no grant"));
    let refused = handoff_server.issue_ticket(grant).expect_err("closed");
    assert_eq!(refused.code, ErrorCode::Unsupported);
}
