//! What a home server refuses, and what refused callers cost.

use std::sync::Arc;

use crate::test_home::{BLOCK, HomeFixture, begin, error_code, grant, read};
use bafs_proto::ErrorCode;
use bafs_proto::hash::Digest;
use bafs_proto::ids::ExtractionId;
use bafs_proto::message::{CommitPut, ListSource, PutRange, ReadSource, StatSource};
use bafs_proto::token::Right;
use bafs_server::home_server::HomeServer;

#[tokio::test]
async fn a_rate_limit_refuses_reads_beyond_their_deadline() {
    let world = HomeFixture::with_limit(Some(1000));
    world.file("f", &[1; 100_000]);
    let identity = world.identity("f").await;
    let late = world.call(read("f", identity, 0, 100_000)).await;
    assert_eq!(error_code(late), ErrorCode::DeadlineExceeded);
    assert!(world.call(read("f", identity, 0, 100)).await.is_ok());
    assert_eq!(world.counter("home_read_bytes").await, 100);
}

#[tokio::test]
async fn malformed_calls_are_refused() {
    let world = HomeFixture::new();
    world.file("f", b"x");
    let identity = world.identity("f").await;
    for (length, block_bytes) in [(u32::MAX, BLOCK), (1, 0), (1, u32::MAX)] {
        let call = ReadSource {
            path: "f".to_owned(),
            identity,
            offset: 0,
            length,
            block_bytes,
        };
        assert_eq!(error_code(world.call(call).await), ErrorCode::Malformed);
    }
    let far = world
        .call(read("f", identity, u64::MAX, 10))
        .await
        .expect("beyond the end");
    assert!(far.digests.is_empty());
    let directory = StatSource {
        path: "f/x".to_owned(),
    };
    assert_eq!(error_code(world.call(directory).await), ErrorCode::NotFound);
    let unsupported = bafs_proto::message::ListVolumes::default();
    assert_eq!(
        error_code(world.call(unsupported).await),
        ErrorCode::Unsupported
    );
    let after = ListSource {
        path: String::new(),
        after: Some("../..".to_owned()),
    };
    assert_eq!(error_code(world.call(after).await), ErrorCode::BadPath);
    let _: Arc<HomeServer> =
        HomeServer::open(world.root.path(), world.signer.verifier(), None).expect("home");
    assert!(HomeServer::open("/nonexistent".as_ref(), world.signer.verifier(), None).is_err());
}

/// As a node does it.
#[tokio::test(flavor = "multi_thread")]
async fn refused_upload_calls_slow_their_connection() {
    let world = HomeFixture::new();
    let refused = grant(&world.signer, "elsewhere", &[Right::Write]);
    let count = 75;
    for id in 0..count {
        world
            .call(begin(id, &format!("out/{id}")))
            .await
            .expect("begun");
    }
    // What a former server took is known from the disk only.
    for is_restarted in [false, true] {
        if is_restarted {
            world.start(None);
        }
        let since = tokio::time::Instant::now();
        // 64 are free; the ten pauses behind the next are 10, 20, ... 100 ms.
        for id in 0..count {
            let extraction = ExtractionId(id);
            let asked = match is_restarted {
                false => world
                    .send(
                        &refused,
                        PutRange {
                            extraction,
                            offset: 0,
                        },
                        b"x",
                    )
                    .await
                    .err(),
                true => {
                    let commit = CommitPut {
                        extraction,
                        size: 1,
                        digest: Digest::of(b"x"),
                        fence: None,
                    };
                    world.send(&refused, commit, b"").await.err()
                }
            };
            assert_eq!(asked.expect("no right").code, ErrorCode::RightMissing);
        }
        let took_ms = since.elapsed().as_millis();
        assert!(took_ms >= 550, "{took_ms} ms");
    }
}
