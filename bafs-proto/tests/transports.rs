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

/// A server in a runtime of its own, which can end as a killed process does: without a word.
fn serve_apart(address: &str, identity: Identity) -> (tokio::runtime::Runtime, String) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("runtime");
    let inside = runtime.enter();
    let soon = Deadline::after_ms(10_000);
    let listener = loop {
        // The port is free as soon as the last task of the former life is gone.
        match QuicListener::bind(address, identity.clone()) {
            Err(error) if error.code == ErrorCode::Conflict && soon.left_ms() > 0 => {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            listener => break listener.expect("listener"),
        }
    };
    let address = listener.local_address().expect("address").to_string();
    runtime.spawn(async move { listener.serve(Arc::new(Mirror)).await });
    drop(inside);
    (runtime, address)
}

/// What a call hears that was under way when its server ended, and another began at its address.
async fn heard_after(restarted_as: impl FnOnce(&Authority, &Identity) -> Identity) -> String {
    let authority = Authority::generate().expect("authority");
    let server = identity(&authority, Role::Server);
    let (runtime, address) = serve_apart("127.0.0.1:0", server.clone());
    let dialer = QuicDialer::new(identity(&authority, Role::Agent)).expect("dialer");
    let pool = Pool::new(Arc::new(dialer));
    let late = || Deadline::after_ms(30_000);
    let connection = pool.connection(&address, late()).await.expect("connection");
    let token = Token::none();
    let under_way = connection.call(&token, ReadCounters, late());
    let restart = async {
        let call = connection.call(&token, ListVolumes::default(), late());
        call.await.expect("it serves");
        runtime.shutdown_background();
        let server = restarted_as(&authority, &server);
        serve_apart(&address, server).0
    };
    let (broken, restarted) = tokio::join!(under_way, restart);
    restarted.shutdown_background();
    let error = broken.expect_err("its server is gone");
    assert_eq!(error.code, ErrorCode::Unreachable);
    assert!(connection.is_closed());
    error.detail
}

#[tokio::test]
async fn a_restarted_server_says_that_it_forgot() {
    let heard = heard_after(|_, server| server.clone()).await;
    assert!(heard.contains("reset by peer"), "{heard}");
}

#[tokio::test]
async fn nobody_else_can_say_that_a_server_forgot() {
    let heard = heard_after(|authority, _| identity(authority, Role::Server)).await;
    assert!(heard.contains("timed out"), "{heard}");
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
    let refused = refused.expect_err("refused");
    assert_eq!(refused.code, ErrorCode::PeerRefused, "{refused}");
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
