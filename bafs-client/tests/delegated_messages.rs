//! The one writer of a volume: in how many messages its changes travel, and what a sync waits for.
#![allow(clippy::unwrap_used, reason = "all of this is test")]

use std::sync::atomic::Ordering;
use std::time::Duration;

use bafs_client::tree::Durability;
use bafs_proto::file_op::{FileOp, FileReply, FileResult};
use bafs_proto::ids::{HandleId, InodeNo};
use tokio::sync::oneshot;

use crate::delegation::{begin_operation, create, create_open_file, look_up, write_hello};
use crate::differential::DelegationFixture;
use crate::test_server::Fault;

/// Closes a file as the kernel does, and waits for what that promises.
async fn close(world: &DelegationFixture, ino: InodeNo, handle: HandleId) {
    let (send, receive) = oneshot::channel();
    let done = move |result: FileResult, _: &[u8]| drop(send.send(result));
    world.volume.close_file(ino, Box::new(done));
    receive.await.unwrap().unwrap();
    world.run(FileOp::Release { handle }, &[]).await.0.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_file_with_its_close_is_one_message() {
    const FILES: u64 = 20;
    let world = DelegationFixture::new(Durability::OnClose).await;
    // So that the log knows how files look here.
    create_open_file(&world, "first").await;
    world.flush().await;
    assert!(world.run(look_up("f"), &[]).await.0.is_err());
    let before = world.server.batches_run.load(Ordering::Relaxed);
    for number in 0..FILES {
        let name = format!("f{number}");
        let made = world.run(create(&name), &[]).await.0.unwrap();
        let FileReply::Opened { handle, attr } = made else {
            panic!("{made:?}");
        };
        world.run(write_hello(handle), b"hello").await.0.unwrap();
        close(&world, attr.ino, handle).await;
        let written = std::fs::read(world.directory.path().join(&name)).unwrap();
        assert_eq!(written, b"hello");
    }
    let calls = world.server.batches_run.load(Ordering::Relaxed) - before;
    // One now and then sends what waits for no close.
    assert!(calls <= FILES + 3, "{calls} calls for {FILES} files");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn data_arrives_soon_without_a_close() {
    let world = DelegationFixture::new(Durability::OnClose).await;
    create_open_file(&world, "first").await;
    world.flush().await;
    assert!(world.run(look_up("f"), &[]).await.0.is_err());
    let handle = create_open_file(&world, "f").await;
    world.run(write_hello(handle), b"hello").await.0.unwrap();
    let path = world.directory.path().join("f");
    for _ in 0..400 {
        if std::fs::read(&path).is_ok_and(|data| data == b"hello") {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the server never gets it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sync_waits_for_one_round_trip() {
    const DELAY_MS: u64 = 1_000;
    let world = DelegationFixture::new(Durability::OnSync).await;
    // So that the log knows how files look here.
    create_open_file(&world, "first").await;
    world.flush().await;
    assert!(world.run(look_up("f"), &[]).await.0.is_err());
    let delay = Fault::DelayOperations(DELAY_MS);
    world.server.set_fault(delay);
    let handle = create_open_file(&world, "f").await;
    world.run(write_hello(handle), b"hello").await.0.unwrap();
    let data_only = false;
    let sync = begin_operation(&world, FileOp::Fsync { handle, data_only }, &[]);
    // File, data and sync are on their way together.
    let timeout = Duration::from_millis(DELAY_MS * 17 / 10);
    let synced = tokio::time::timeout(timeout, sync).await;
    assert_eq!(synced.expect("in time").unwrap(), Ok(FileReply::Done));
    let written = std::fs::read(world.directory.path().join("f")).unwrap();
    assert_eq!(written, b"hello");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn syncs_succeed_over_restarts_and_lost_replies() {
    for seed in 1..=20 {
        let world = DelegationFixture::new(Durability::OnSync).await;
        create_open_file(&world, "first").await;
        world.flush().await;
        assert!(world.run(look_up("f"), &[]).await.0.is_err());
        world.server.set_delays(100, seed);
        for number in 0..6 {
            let name = format!("f{number}");
            let handle = create_open_file(&world, &name).await;
            world.run(write_hello(handle), b"hello").await.0.unwrap();
            match (number + seed) % 3 {
                0 => world.server.set_fault(Fault::LoseReplies(2)),
                1 => {
                    let runs = seed % 2 == 0;
                    world.server.set_fault(Fault::Restart { runs });
                }
                _ => {}
            }
            let data_only = number % 2 == 0;
            let sync = FileOp::Fsync { handle, data_only };
            assert_eq!(world.run(sync, &[]).await.0, Ok(FileReply::Done));
            let written = std::fs::read(world.directory.path().join(&name)).unwrap();
            assert_eq!(written, b"hello", "seed {seed}");
            world.run(FileOp::Release { handle }, &[]).await.0.unwrap();
        }
        let loss = world.volume.health().loss();
        assert!(loss.is_none(), "{loss:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sync_of_lost_data_fails() {
    let world = DelegationFixture::new(Durability::OnSync).await;
    let handle = create_open_file(&world, "f").await;
    world.flush().await;
    world.server.set_fault(Fault::DiskFull);
    // Whether it hears of it already is a matter of time.
    let _ = world.run(write_hello(handle), b"hello").await;
    let data_only = false;
    let synced = world.run(FileOp::Fsync { handle, data_only }, &[]).await.0;
    assert!(synced.is_err(), "nothing of it was kept");
}
