//! The same calls over both transports: QUIC on loopback and memory.

use std::sync::Arc;

use bafs_proto::identity::{Authority, Identity};
use bafs_proto::message::{Counters, ListVolumes, ReadCounters, Reply, Request, Role, VolumeList};
use bafs_proto::net::mem::Network;
use bafs_proto::net::pool::Pool;
use bafs_proto::net::quic::{QuicDialer, QuicListener};
use bafs_proto::net::{BoxFuture, Incoming, Service};
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

/// Answers with the body reversed, refuses one call and sleeps on another.
struct Mirror;

impl Service for Mirror {
    fn serve(self: Arc<Self>, incoming: Incoming) -> BoxFuture<'static, Result<(Reply, Bytes)>> {
        Box::pin(async move {
            match incoming.request {
                Request::ListVolumes(_) => {
                    let reversed: Vec<u8> = incoming.body.iter().rev().copied().collect();
                    let reply = Reply::ListVolumes(VolumeList {
                        volumes: Vec::new(),
                        next: None,
                    });
                    Ok((reply, reversed.into()))
                }
                Request::ReadCounters(_) => {
                    tokio::time::sleep(std::time::Duration::from_secs(60)).await;
                    let counters = Counters {
                        server: bafs_proto::ids::ServerId(0),
                        values: Default::default(),
                    };
                    Ok((Reply::ReadCounters(counters), Bytes::new()))
                }
                other => Err(Error::new(ErrorCode::Unsupported, other.name())),
            }
        })
    }
}

async fn check_calls(pool: &Pool, address: &str) {
    let soon = || Deadline::after_ms(5_000);
    let token = Token::none();
    for length in [0usize, 1, 70_000, 4 << 20] {
        let body: Vec<u8> = (0..length).map(|i| (i % 251) as u8).collect();
        let expected: Vec<u8> = body.iter().rev().copied().collect();
        let (_, answer) = pool
            .call_with_body(address, &token, ListVolumes::default(), body.into(), soon())
            .await
            .expect("call");
        assert_eq!(answer, expected);
    }
    let too_long = Bytes::from(vec![0; (4 << 20) + 1]);
    let result = pool
        .call_with_body(address, &token, ListVolumes::default(), too_long, soon())
        .await;
    assert_eq!(result.expect_err("too long").code, ErrorCode::Malformed);
    let refused = pool
        .call(
            address,
            &token,
            bafs_proto::message::QueryServers::default(),
            soon(),
        )
        .await
        .expect_err("refused");
    assert_eq!(refused.code, ErrorCode::Unsupported);
    let late = pool
        .call(address, &token, ReadCounters, Deadline::after_ms(300))
        .await;
    assert_eq!(late.expect_err("late").code, ErrorCode::DeadlineExceeded);
}

fn identity(authority: &Authority, role: Role) -> Identity {
    authority.issue(role, Token::none()).expect("identity")
}

#[tokio::test]
async fn calls_cross_memory() {
    let network = Network::new();
    network.listen("mirror", Arc::new(Mirror));
    let pool = Pool::new(network.dialer("here"));
    check_calls(&pool, "mirror").await;
    let gone = pool
        .call(
            "nobody",
            &Token::none(),
            ListVolumes::default(),
            Deadline::after_ms(200),
        )
        .await;
    assert_eq!(gone.expect_err("gone").code, ErrorCode::Unreachable);
}

#[tokio::test]
async fn calls_cross_quic() {
    let authority = Authority::generate().expect("authority");
    let listener =
        QuicListener::bind("127.0.0.1:0", identity(&authority, Role::Server)).expect("listener");
    let address = listener.local_address().expect("address").to_string();
    let taken = QuicListener::bind(&address, identity(&authority, Role::Server));
    assert_eq!(taken.expect_err("port in use").code, ErrorCode::Conflict);
    let server = tokio::spawn(async move { listener.serve(Arc::new(Mirror)).await });
    let dialer = QuicDialer::new(identity(&authority, Role::Agent)).expect("dialer");
    check_calls(&Pool::new(Arc::new(dialer)), &address).await;
    server.abort();
}

#[tokio::test]
async fn strangers_are_refused() {
    let authority = Authority::generate().expect("authority");
    let stranger = Authority::generate().expect("authority");
    let listener =
        QuicListener::bind("127.0.0.1:0", identity(&authority, Role::Server)).expect("listener");
    let address = listener.local_address().expect("address").to_string();
    tokio::spawn(async move { listener.serve(Arc::new(Mirror)).await });
    let dialer = QuicDialer::new(identity(&stranger, Role::Agent)).expect("dialer");
    let pool = Pool::new(Arc::new(dialer));
    let refused = pool
        .call(
            &address,
            &Token::none(),
            ListVolumes::default(),
            Deadline::after_ms(2_000),
        )
        .await;
    assert_eq!(refused.expect_err("refused").code, ErrorCode::Unreachable);
}

#[test]
fn identities_survive_their_files() {
    let directory = std::env::temp_dir().join(format!("bafs-identity-{}", std::process::id()));
    let authority = Authority::generate().expect("authority");
    authority.save(&directory.join("authority")).expect("save");
    let authority = Authority::load(&directory.join("authority")).expect("load");
    let issued = identity(&authority, Role::Server);
    issued.save(&directory.join("server")).expect("save");
    let loaded = Identity::load(&directory.join("server"), Role::Server).expect("load");
    assert_eq!(loaded.certificate_der, issued.certificate_der);
    assert_eq!(loaded.key_der, issued.key_der);
    assert_eq!(loaded.cluster, issued.cluster);
    std::fs::remove_dir_all(directory).expect("remove");
}
