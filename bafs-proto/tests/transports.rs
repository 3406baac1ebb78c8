//! The same calls over every transport: QUIC and TCP on loopback, and memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bafs_proto::identity::{Authority, Identity};
use bafs_proto::ids::ServerId;
use bafs_proto::message::{Counters, ListVolumes, ReadCounters, Reply, Request, Role, VolumeList};
use bafs_proto::net::channel::{Channel, Dialer, Listener};
use bafs_proto::net::memory::MemoryNetwork;
use bafs_proto::net::pool::Pool;
use bafs_proto::net::quic::QuicListener;
use bafs_proto::net::tcp::TlsTcpListener;
use bafs_proto::net::{BoxFuture, IncomingRequest, Service};
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const MIRROR_ID: ServerId = ServerId(7);

/// Answers with the body reversed, refuses one call and sleeps on another.
struct MirrorService;

impl Service for MirrorService {
    fn server(&self) -> Option<ServerId> {
        Some(MIRROR_ID)
    }

    fn serve(
        self: Arc<Self>,
        incoming: IncomingRequest,
    ) -> BoxFuture<'static, Result<(Reply, Bytes)>> {
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
                    tokio::time::sleep(Duration::from_secs(60)).await;
                    let counters = Counters {
                        server: MIRROR_ID,
                        values: Default::default(),
                    };
                    Ok((Reply::ReadCounters(counters), Bytes::new()))
                }
                other => Err(Error::new(ErrorCode::Unsupported, other.name())),
            }
        })
    }
}

/// A server that keeps no id.
struct UnidentifiedService;

impl Service for UnidentifiedService {
    fn serve(self: Arc<Self>, _: IncomingRequest) -> BoxFuture<'static, Result<(Reply, Bytes)>> {
        Box::pin(async { Err(Error::new(ErrorCode::Unsupported, "nobody")) })
    }
}

async fn check_calls(pool: &Pool, address: &str) {
    let soon = || Deadline::after_ms(5_000);
    let token = Token::none();
    for meant in [None, Some(MIRROR_ID)] {
        let found = pool.connection_to(meant, address, soon()).await;
        assert_eq!(found.expect("it is there").server(), Some(MIRROR_ID));
    }
    let other = pool.connection_to(Some(ServerId(8)), address, soon()).await;
    let error = other.expect_err("another one is there");
    assert_eq!(error.code, ErrorCode::Unreachable);
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
async fn calls_work_in_memory() {
    let network = MemoryNetwork::new();
    network.listen("mirror", Arc::new(MirrorService));
    let pool = Pool::new(network.dialer("here"));
    check_calls(&pool, "mirror").await;
    let pinning = Pool::new(network.dialer("here")).with_pinned_servers();
    let soon = || Deadline::after_ms(200);
    assert!(pinning.connection("mirror", soon()).await.is_ok());
    network.kill("mirror");
    network.listen("mirror", Arc::new(UnidentifiedService));
    assert!(pool.connection("mirror", soon()).await.is_ok());
    let other = pinning.connection("mirror", soon()).await;
    assert_eq!(other.expect_err("other").code, ErrorCode::Unreachable);
    network.listen("mirror", Arc::new(MirrorService));
    assert!(pinning.connection("mirror", soon()).await.is_ok());
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

fn listen(address: &str, identity: &Identity) -> Result<(Listener, String)> {
    let listener = Listener::bind(address, identity)?;
    let address = listener.local_address()?.to_string();
    Ok((listener, address))
}

fn pool(channel: Channel, identity: &Identity) -> Pool {
    Pool::new(Arc::new(
        Dialer::with_channel(channel, identity).expect("dialer"),
    ))
}

async fn check_channel(channel: Channel) {
    let authority = Authority::generate().expect("authority");
    let server = identity(&authority, Role::Server);
    let (listener, address) = listen("127.0.0.1:0", &server).expect("listener");
    let taken = listen(&address, &server);
    assert_eq!(taken.expect_err("port in use").code, ErrorCode::Conflict);
    tokio::spawn(async move { listener.serve(Arc::new(MirrorService)).await });
    check_calls(&pool(channel, &identity(&authority, Role::Agent)), &address).await;
}

#[tokio::test]
async fn calls_work_over_quic() {
    check_channel(Channel::Quic).await;
}

#[tokio::test]
async fn calls_work_over_tcp() {
    check_channel(Channel::Tcp).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn local_servers_use_tcp_before_quic() {
    let authority = Authority::generate().expect("authority");
    let server = identity(&authority, Role::Server);
    let pool = pool(Channel::Auto, &identity(&authority, Role::Agent));
    let any = ([127, 0, 0, 1], 0).into();
    let tcp = TlsTcpListener::bind(any, &server).expect("listener");
    let address = tcp.local_address().expect("address").to_string();
    tokio::spawn(async move { tcp.serve(Arc::new(MirrorService)).await });
    check_calls(&pool, &address).await;
    let quic = QuicListener::bind("127.0.0.1:0", server).expect("listener");
    let address = quic.local_address().expect("address").to_string();
    tokio::spawn(async move { quic.serve(Arc::new(MirrorService)).await });
    check_calls(&pool, &address).await;
}

async fn check_many_at_once(channel: Channel) {
    let authority = Authority::generate().expect("authority");
    let (listener, address) =
        listen("127.0.0.1:0", &identity(&authority, Role::Server)).expect("listener");
    tokio::spawn(async move { listener.serve(Arc::new(MirrorService)).await });
    let pool = pool(channel, &identity(&authority, Role::Agent));
    let late = || Deadline::after_ms(60_000);
    let mut calls = tokio::task::JoinSet::new();
    for number in 0..600usize {
        let (pool, address) = (pool.clone(), address.clone());
        calls.spawn(async move {
            // Some give up on the way, at any point of it.
            let deadline = if number % 7 == 3 {
                Deadline::after_ms(number as u64 % 20 + 1)
            } else {
                late()
            };
            let length = if number % 5 == 0 { 1_500_000 } else { number };
            let body = vec![number as u8; length];
            let call = ListVolumes::default();
            let token = Token::none();
            let answer = pool
                .call_with_body(&address, &token, call, body.clone().into(), deadline)
                .await;
            match answer {
                Ok((_, answer)) => assert_eq!(answer, body),
                Err(error) => assert!(number % 7 == 3, "{number}: {error}"),
            }
        });
    }
    while let Some(call) = calls.join_next().await {
        call.expect("call");
    }
    check_calls(&pool, &address).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_concurrent_calls_succeed_over_quic() {
    check_many_at_once(Channel::Quic).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_concurrent_calls_succeed_over_tcp() {
    check_many_at_once(Channel::Tcp).await;
}

/// Passes connections on to a server, and counts them.
async fn count_connections(server: String) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("listener");
    let address = listener.local_addr().expect("address").to_string();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::Relaxed);
            let mut server = TcpStream::connect(&server).await.expect("server");
            tokio::spawn(async move {
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    (address, count)
}

#[tokio::test(flavor = "multi_thread")]
async fn only_lasting_calls_get_further_connections() {
    let authority = Authority::generate().expect("authority");
    let (listener, address) =
        listen("127.0.0.1:0", &identity(&authority, Role::Server)).expect("listener");
    tokio::spawn(async move { listener.serve(Arc::new(MirrorService)).await });
    let soon = || Deadline::after_ms(5_000);
    let mut counts = Vec::new();
    // A machine with other work may take longer for a burst.
    for _ in 0..20 {
        let (proxy, count) = count_connections(address.clone()).await;
        let pool = pool(Channel::Tcp, &identity(&authority, Role::Agent));
        pool.connection(&proxy, soon()).await.expect("connection");
        let token = Token::none();
        let call = || pool.call(&proxy, &token, ListVolumes::default(), soon());
        let burst = tokio::join!(call(), call(), call(), call(), call(), call());
        burst.5.expect("call");
        tokio::time::sleep(Duration::from_millis(50)).await;
        counts.push(count.load(Ordering::Relaxed));
        // These are answered after a minute.
        let long = || pool.call(&proxy, &token, ReadCounters, Deadline::after_ms(100));
        let (first, _) = tokio::join!(long(), long());
        assert_eq!(first.expect_err("late").code, ErrorCode::DeadlineExceeded);
        assert!(count.load(Ordering::Relaxed) >= 2);
        if counts.last() == Some(&1) {
            return;
        }
    }
    panic!("connections for short bursts: {counts:?}");
}

/// A server in a runtime of its own, which can end as a killed process does: without a word.
/// More than are secured at once without a proof of where they are.
#[tokio::test(flavor = "multi_thread")]
async fn many_concurrent_quic_clients_are_all_served() {
    let authority = Authority::generate().expect("authority");
    let (listener, address) =
        listen("127.0.0.1:0", &identity(&authority, Role::Server)).expect("listener");
    tokio::spawn(async move { listener.serve(Arc::new(MirrorService)).await });
    let agent = identity(&authority, Role::Agent);
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..150 {
        let (pool, address) = (pool(Channel::Quic, &agent), address.clone());
        calls.spawn(async move {
            let (call, deadline) = (ListVolumes::default(), Deadline::after_ms(60_000));
            pool.call(&address, &Token::none(), call, deadline).await
        });
    }
    while let Some(call) = calls.join_next().await {
        call.expect("call").expect("an answer");
    }
}

fn serve_on_own_runtime(address: &str, identity: Identity) -> (tokio::runtime::Runtime, String) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("runtime");
    let inside = runtime.enter();
    let soon = Deadline::after_ms(10_000);
    let listener = loop {
        // The port is free as soon as the last task of the former life is gone.
        match Listener::bind(address, &identity) {
            Err(error) if error.code == ErrorCode::Conflict && soon.remaining_ms() > 0 => {
                std::thread::sleep(Duration::from_millis(5));
            }
            listener => break listener.expect("listener"),
        }
    };
    let address = listener.local_address().expect("address").to_string();
    runtime.spawn(async move { listener.serve(Arc::new(MirrorService)).await });
    drop(inside);
    (runtime, address)
}

/// What a call hears that was under way when its server ended, and another began at its address.
async fn error_after_restart(
    channel: Channel,
    restarted_as: impl FnOnce(&Authority, &Identity) -> Identity,
) -> String {
    let authority = Authority::generate().expect("authority");
    let server = identity(&authority, Role::Server);
    let (runtime, address) = serve_on_own_runtime("127.0.0.1:0", server.clone());
    let pool = pool(channel, &identity(&authority, Role::Agent));
    let late = || Deadline::after_ms(30_000);
    let connection = pool.connection(&address, late()).await.expect("connection");
    let token = Token::none();
    let under_way = connection.call(&token, ReadCounters, late());
    let restart = async {
        let call = connection.call(&token, ListVolumes::default(), late());
        call.await.expect("it serves");
        runtime.shutdown_background();
        let server = restarted_as(&authority, &server);
        serve_on_own_runtime(&address, server).0
    };
    let (broken, restarted) = tokio::join!(under_way, restart);
    restarted.shutdown_background();
    let error = broken.expect_err("its server is gone");
    assert_eq!(error.code, ErrorCode::Unreachable);
    assert!(connection.is_closed());
    error.detail
}

#[tokio::test]
async fn a_restarted_server_resets_old_quic_connections() {
    let heard = error_after_restart(Channel::Quic, |_, server| server.clone()).await;
    assert!(heard.contains("reset by peer"), "{heard}");
}

#[tokio::test]
async fn a_dead_server_breaks_its_tcp_connections() {
    let heard = error_after_restart(Channel::Tcp, |_, server| server.clone()).await;
    assert!(!heard.contains("timed out"), "{heard}");
}

async fn check_silence(channel: Channel) {
    let authority = Authority::generate().expect("authority");
    let (runtime, address) =
        serve_on_own_runtime("127.0.0.1:0", identity(&authority, Role::Server));
    let pool = pool(channel, &identity(&authority, Role::Agent));
    let late = || Deadline::after_ms(60_000);
    let connection = pool.connection(&address, late()).await.expect("connection");
    let (token, call) = (Token::none(), ListVolumes::default());
    connection
        .call(&token, call, late())
        .await
        .expect("it serves");
    // Frozen, as by SIGSTOP: the kernel still takes what is sent.
    let (thaw, frozen) = std::sync::mpsc::channel::<()>();
    runtime.spawn(async move { frozen.recv() });
    let error = connection.call(&token, ReadCounters, late()).await;
    let error = error.expect_err("nobody answers");
    assert_eq!(error.code, ErrorCode::Unreachable, "{error}");
    assert!(error.detail.contains("timed out"), "{error}");
    assert!(connection.is_closed());
    drop(thaw);
    let call = ListVolumes::default();
    let again = pool.call_with_retries(&address, &token, call, Bytes::new(), late());
    again.await.expect("it serves again");
    runtime.shutdown_background();
}

#[tokio::test]
async fn silent_servers_are_detected_over_quic() {
    check_silence(Channel::Quic).await;
}

#[tokio::test]
async fn silent_servers_are_detected_over_tcp() {
    check_silence(Channel::Tcp).await;
}

#[tokio::test]
async fn malformed_bytes_end_only_their_own_connection() {
    let authority = Authority::generate().expect("authority");
    let (listener, address) =
        listen("127.0.0.1:0", &identity(&authority, Role::Server)).expect("listener");
    tokio::spawn(async move { listener.serve(Arc::new(MirrorService)).await });
    let pool = pool(Channel::Tcp, &identity(&authority, Role::Agent));
    check_calls(&pool, &address).await;
    for garbage in [
        &[0u8; 64][..],
        &[0x16, 3, 1, 0xff, 0xff, 7, 7],
        &[0xff; 70_000],
    ] {
        let mut stream = TcpStream::connect(&address).await.expect("connect");
        // It may be thrown out while it speaks.
        let _ = stream.write_all(garbage).await;
        let _ = stream.shutdown().await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        assert!(answer.len() < 100, "an alert at most");
    }
    check_calls(&pool, &address).await;
}

#[tokio::test]
async fn a_stopping_server_closes_its_connections() {
    for channel in [Channel::Quic, Channel::Tcp] {
        let authority = Authority::generate().expect("authority");
        let (listener, address) =
            listen("127.0.0.1:0", &identity(&authority, Role::Server)).expect("listener");
        let listener = Arc::new(listener);
        let serving = listener.clone();
        tokio::spawn(async move { serving.serve(Arc::new(MirrorService)).await });
        let pool = pool(channel, &identity(&authority, Role::Agent));
        let late = || Deadline::after_ms(60_000);
        let connection = pool.connection(&address, late()).await.expect("connection");
        let token = Token::none();
        let (under_way, ()) = tokio::join!(connection.call(&token, ReadCounters, late()), async {
            let call = connection.call(&token, ListVolumes::default(), late());
            call.await.expect("it serves");
            listener.close().await;
        });
        assert_eq!(under_way.expect_err("stopped").code, ErrorCode::Unreachable);
        assert!(connection.is_closed());
    }
}

#[tokio::test]
async fn a_foreign_server_cannot_reset_connections() {
    let heard = error_after_restart(Channel::Quic, |authority, _| {
        identity(authority, Role::Server)
    })
    .await;
    assert!(heard.contains("timed out"), "{heard}");
}

async fn check_strangers(channel: Channel) {
    let authority = Authority::generate().expect("authority");
    let stranger = Authority::generate().expect("authority");
    let (listener, address) =
        listen("127.0.0.1:0", &identity(&authority, Role::Server)).expect("listener");
    tokio::spawn(async move { listener.serve(Arc::new(MirrorService)).await });
    // Neither whom the server does not know, nor who knows the server only.
    let mut half = identity(&authority, Role::Agent);
    let other = identity(&stranger, Role::Agent);
    (half.certificate_der, half.key_der) = (other.certificate_der.clone(), other.key_der.clone());
    for stranger in [other, half] {
        let pool = pool(channel, &stranger);
        let token = Token::none();
        let soon = Deadline::after_ms(2_000);
        let refused = pool
            .call(&address, &token, ListVolumes::default(), soon)
            .await;
        let refused = refused.expect_err("refused");
        assert_eq!(refused.code, ErrorCode::PeerRefused, "{refused}");
    }
}

#[tokio::test]
async fn foreign_identities_are_refused_over_quic() {
    check_strangers(Channel::Quic).await;
}

#[tokio::test]
async fn foreign_identities_are_refused_over_tcp() {
    check_strangers(Channel::Tcp).await;
}

#[test]
fn identities_round_trip_through_files() {
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
