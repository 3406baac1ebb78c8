//! Trees behind a server, over memory and with faults: exactly once, at a deadline, or lost.
#![allow(
    clippy::unwrap_used,
    reason = "all of this is test, but clippy looks for `#[test]`"
)]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::test_server::{BLOCK_BYTES, FakeServer, Fault, VOLUME};
use bafs_client::logic::manifest_tree::Owner;
use bafs_client::sandbox::Access;
use bafs_client::tree::{CacheTree, LocalTree, RemoteTree, Tree};
use bafs_client::usage::VolumeUsage;
use bafs_client::volume::{Ownership, Volume, VolumeMode};
use bafs_client::volume_health::{VolumeHealth, VolumeLoss};
use bafs_proto::ErrorCode;
use bafs_proto::file_op::{BodyRange, Caller, Errno, FileOp, FileReply, FileResult};
use bafs_proto::ids::{AgentId, HandleId, InodeNo};
use bafs_proto::message::TreeRef;
use nix::libc;
use tokio::sync::{mpsc, oneshot};

struct RemoteTreeFixture {
    server: Arc<FakeServer>,
    volume: Arc<Volume>,
    losses: mpsc::UnboundedReceiver<VolumeLoss>,
    directory: tempfile::TempDir,
}

impl RemoteTreeFixture {
    async fn scratch(op_deadline_ms: u64, lease_ms: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let server = FakeServer::new(directory.path());
        server.lease_ms.store(lease_ms, Ordering::Relaxed);
        let (sender, losses) = mpsc::unbounded_channel();
        let volume_status = VolumeHealth::new("work", sender);
        let called = server.server(op_deadline_ms);
        let tree = TreeRef::Volume(VOLUME);
        let tree = RemoteTree::open(called, tree, AgentId::random(), true, volume_status.clone())
            .await
            .unwrap();
        let volume = Arc::new(Volume::new(
            "work",
            Tree::Remote(tree),
            VolumeMode::scratch(Access::ReadWrite),
            Ownership::AsStored,
            volume_status,
            VolumeUsage::new(),
        ));
        Self {
            server,
            volume,
            losses,
            directory,
        }
    }

    async fn cache(op_deadline_ms: u64, files: &[(&str, Vec<u8>)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        for (name, data) in files {
            std::fs::write(directory.path().join(name), data).unwrap();
        }
        let server = FakeServer::new(directory.path());
        let (sender, losses) = mpsc::unbounded_channel();
        let volume_status = VolumeHealth::new("db", sender);
        let called = server.server(op_deadline_ms);
        let tree = CacheTree::open(called, VOLUME, Owner::default(), volume_status.clone())
            .await
            .unwrap();
        let volume = Arc::new(Volume::new(
            "db",
            Tree::Cache(tree),
            VolumeMode::cache(),
            Ownership::AsStored,
            volume_status,
            VolumeUsage::with_pages(),
        ));
        Self {
            server,
            volume,
            losses,
            directory,
        }
    }

    async fn run(&self, op: FileOp, data: &[u8]) -> (FileResult, Vec<u8>) {
        let (send, receive) = oneshot::channel();
        let done = move |result, data: &[u8]| drop(send.send((result, data.to_vec())));
        self.volume.run(Caller::default(), op, data, Box::new(done));
        receive.await.unwrap()
    }

    async fn create(&self, name: &str) -> HandleId {
        let name = name.as_bytes().to_vec();
        let flags = libc::O_RDWR | libc::O_EXCL;
        let op = FileOp::Create {
            parent: InodeNo::ROOT,
            name,
            mode: 0o100_644,
            flags,
        };
        match self.run(op, &[]).await.0 {
            Ok(FileReply::Opened { handle, .. }) => handle,
            other => panic!("{other:?}"),
        }
    }

    async fn append(&self, handle: HandleId, data: &[u8]) -> FileResult {
        let range = BodyRange {
            start: 0,
            length: data.len() as u32,
        };
        self.run(
            FileOp::Write {
                handle,
                offset: 0,
                data: range,
                append: true,
            },
            data,
        )
        .await
        .0
    }

    async fn lookup(&self, name: &str) -> InodeNo {
        let op = FileOp::Lookup {
            parent: InodeNo::ROOT,
            name: name.as_bytes().to_vec(),
        };
        match self.run(op, &[]).await.0 {
            Ok(FileReply::Attr(attr)) => attr.ino,
            other => panic!("{other:?}"),
        }
    }

    async fn read(&self, ino: InodeNo, offset: u64, length: u32) -> (FileResult, Vec<u8>) {
        let (send, receive) = oneshot::channel();
        let done = move |result, data: &[u8]| drop(send.send((result, data.to_vec())));
        let (caller, handle) = (Caller::default(), HandleId(ino.0));
        self.volume
            .read(caller, ino, handle, offset, length, Box::new(done));
        receive.await.unwrap()
    }
}

const EIO: FileResult = Err(Errno(libc::EIO));

#[tokio::test]
async fn a_lost_reply_runs_nothing_twice() {
    let world = RemoteTreeFixture::scratch(5_000, 600_000).await;
    let handle = world.create("log").await;
    for round in 0..5u32 {
        world.server.set_fault(Fault::LoseReplies(round));
        let written = world.append(handle, b"line\n").await;
        assert_eq!(written, Ok(FileReply::Written { length: 5 }));
    }
    let log = std::fs::read_to_string(world.directory.path().join("log")).unwrap();
    assert_eq!(log, "line\n".repeat(5));
    assert!(world.volume.health().loss().is_none());
    assert_eq!(world.volume.usage().written_bytes, 25);
    world.volume.close(0).await;
    assert_eq!(world.server.closed_sessions.load(Ordering::Relaxed), 1);
}

#[test]
fn an_oversized_write_is_no_data_loss() {
    let fault = Some(ErrorCode::ServerFault);
    let (write_back, mapped) = (
        VolumeMode::write_back(),
        VolumeMode::scratch(Access::ReadWrite),
    );
    let codes = [
        (write_back, libc::EFBIG, None),
        // Mapped memory reaches no further than its file: the node is not allowed to write so much.
        (mapped, libc::EFBIG, fault),
        (write_back, libc::ENOSPC, Some(ErrorCode::NoSpaceBytes)),
        (write_back, libc::EIO, fault),
    ];
    for (mode, errno, code) in codes {
        let (sender, mut losses) = mpsc::unbounded_channel();
        let volume = Arc::new(Volume::new(
            "v",
            Tree::Local(LocalTree::new(|_, _, _, _| Ok(FileReply::Done))),
            mode,
            Ownership::AsStored,
            VolumeHealth::new("v", sender),
            VolumeUsage::new(),
        ));
        let failed = Err(Errno(errno));
        let told = failed.clone();
        let done = move |result, _: &[u8]| assert_eq!(result, told);
        volume.track_background_write(1, Box::new(done))(failed, &[]);
        let deplored = losses.try_recv().ok().map(|loss| loss.error.code);
        assert_eq!(deplored, code, "{errno}");
    }
}

#[tokio::test]
async fn a_missed_deadline_ends_the_volume() {
    let mut world = RemoteTreeFixture::scratch(400, 600_000).await;
    let handle = world.create("log").await;
    world.server.set_fault(Fault::Silent);
    let late = world.append(handle, b"x");
    let other = world.run(FileOp::StatFs, &[]);
    let (late, other) =
        tokio::time::timeout(Duration::from_secs(3), async { tokio::join!(late, other) })
            .await
            .expect("nothing hangs");
    assert_eq!((late, other.0), (EIO, EIO));
    let loss = world.losses.recv().await.unwrap();
    assert_eq!(loss.error.code, ErrorCode::DeadlineExceeded);
    assert_eq!(loss.volume, "work");
    // The server is well again, but nobody may take a half-lost volume for a whole one.
    world.server.set_fault(Fault::None);
    let ops = world.server.ops_run.load(Ordering::Relaxed);
    assert_eq!(world.append(handle, b"y").await, EIO);
    assert_eq!(world.server.ops_run.load(Ordering::Relaxed), ops);
    assert!(world.volume.usage().call_ms_max >= 300);
}

#[tokio::test]
async fn queued_calls_may_exceed_the_deadline() {
    let world = RemoteTreeFixture::scratch(1_000, 90).await;
    let handle = world.create("log").await;
    world.server.set_fault(Fault::DelayOperations(3_000));
    let write = |_| world.append(handle, b"x");
    for written in join_all((0..4).map(write)).await {
        assert_eq!(written, Ok(FileReply::Written { length: 1 }));
    }
    assert!(world.volume.health().loss().is_none());
    // Nothing was sent twice: what waits is on its way.
    assert_eq!(world.server.ops_run.load(Ordering::Relaxed), 5);
}

#[tokio::test]
async fn data_losses_are_reported_without_any_operation() {
    for code in [
        ErrorCode::VolumeLost,
        ErrorCode::Fenced,
        ErrorCode::SessionUnknown,
    ] {
        let mut world = RemoteTreeFixture::scratch(2_000, 90).await;
        world.server.set_fault(Fault::Refuse(code));
        let loss = tokio::time::timeout(Duration::from_secs(2), world.losses.recv()).await;
        assert_eq!(loss.expect("heard in time").unwrap().error.code, code);
    }
}

#[tokio::test]
async fn a_release_after_close_is_no_data_loss() {
    let mut world = RemoteTreeFixture::scratch(10_000, 60_000).await;
    let handle = world.create("f").await;
    world.volume.close(0).await;
    let (released, _) = world.run(FileOp::Release { handle }, &[]).await;
    assert!(released.is_err(), "the session is over");
    assert!(world.losses.try_recv().is_err(), "nothing was lost");
}

#[tokio::test]
async fn a_lack_of_space_is_no_data_loss() {
    let world = RemoteTreeFixture::scratch(2_000, 600_000).await;
    let handle = world.create("log").await;
    world
        .server
        .set_fault(Fault::Refuse(ErrorCode::NoSpaceBytes));
    assert_eq!(world.append(handle, b"x").await, Err(Errno(libc::ENOSPC)));
    world.server.set_fault(Fault::None);
    assert_eq!(
        world.append(handle, b"x").await,
        Ok(FileReply::Written { length: 1 })
    );
    assert!(world.volume.health().loss().is_none());
}

fn patterned_data(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i / 7 % 253) as u8).collect()
}

async fn patterned_cache() -> (RemoteTreeFixture, Vec<u8>) {
    let data = patterned_data(10 * BLOCK_BYTES as usize + 77);
    let files = [
        ("a", data.clone()),
        ("b", b"small".to_vec()),
        ("c", Vec::new()),
        ("d", vec![1]),
    ];
    (RemoteTreeFixture::cache(5_000, &files).await, data)
}

#[tokio::test]
async fn cache_reads_fetch_each_block_once() {
    let (world, data) = patterned_cache().await;
    let a = world.lookup("a").await;
    // Many small reads of the same blocks, all at once.
    let reads = (0..40u64).map(|i| world.read(a, i * 4096, 4096));
    for (i, (result, read)) in join_all(reads).await.into_iter().enumerate() {
        let expected = &data[i * 4096..(i + 1) * 4096];
        assert_eq!(result, Ok(FileReply::Read { length: 4096 }));
        assert_eq!(read, expected);
    }
    assert_eq!(world.server.blocks_sent.load(Ordering::Relaxed), 10);
}

#[tokio::test]
async fn cache_reads_stop_at_the_end() {
    let (world, data) = patterned_cache().await;
    let a = world.lookup("a").await;
    let tail = 10 * u64::from(BLOCK_BYTES) - 3;
    assert_eq!(world.read(a, tail, 1 << 20).await.1, &data[tail as usize..]);
    for offset in [data.len() as u64, u64::MAX] {
        let (result, _) = world.read(a, offset, 10).await;
        assert_eq!(result, Ok(FileReply::Read { length: 0 }));
    }
    assert_eq!(world.read(world.lookup("b").await, 1, 3).await.1, b"mal");
    assert_eq!(world.read(world.lookup("c").await, 0, 3).await.1, b"");
}

#[tokio::test]
async fn usage_names_only_read_files() {
    let (world, data) = patterned_cache().await;
    for (name, offset, length) in [("a", 0, data.len() as u32), ("b", 1, 3), ("c", 0, 3)] {
        let file = world.lookup(name).await;
        world.read(file, offset, length).await.0.expect("read");
    }
    let usage = world.volume.usage();
    let touched: Vec<_> = usage
        .pages
        .iter()
        .map(|p| (p.path.as_str(), p.page_runs.clone()))
        .collect();
    assert_eq!(touched, [("a", vec![(0, 41)]), ("b", vec![(0, 1)])]);
}

#[tokio::test]
async fn cache_volumes_reject_unlinking() {
    let (world, _) = patterned_cache().await;
    let unlink = FileOp::Unlink {
        parent: InodeNo::ROOT,
        name: b"a".to_vec(),
    };
    assert_eq!(world.run(unlink, &[]).await.0, Err(Errno(libc::EROFS)));
}

async fn join_all<T>(all: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut pending: Vec<_> = all.map(Box::pin).collect();
    let mut done: Vec<Option<T>> = pending.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (future, slot) in pending.iter_mut().zip(&mut done) {
            if slot.is_none()
                && let std::task::Poll::Ready(value) = future.as_mut().poll(context)
            {
                *slot = Some(value);
            }
        }
        if done.iter().all(Option::is_some) {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
    done.into_iter().flatten().collect()
}

#[tokio::test]
async fn damaged_blocks_are_refetched_and_never_shown() {
    let data = patterned_data(3 * BLOCK_BYTES as usize);
    let mut world = RemoteTreeFixture::cache(5_000, &[("a", data.clone())]).await;
    let a = world.lookup("a").await;
    world.server.set_fault(Fault::DamageBlocks(2));
    assert_eq!(world.read(a, 0, 10).await.1, &data[..10]);
    world.server.set_fault(Fault::DamageBlocks(1_000));
    let (result, shown) = world.read(a, u64::from(BLOCK_BYTES), 10).await;
    assert_eq!((result, shown), (EIO, Vec::new()));
    assert_eq!(
        world.losses.recv().await.unwrap().error.code,
        ErrorCode::DigestMismatch
    );
}

#[tokio::test]
async fn a_changed_source_is_reported_as_data_loss() {
    let mut world = RemoteTreeFixture::cache(5_000, &[("a", patterned_data(99))]).await;
    let a = world.lookup("a").await;
    world
        .server
        .set_fault(Fault::Refuse(ErrorCode::SourceChanged));
    assert_eq!(world.read(a, 0, 10).await.0, EIO);
    assert_eq!(
        world.losses.recv().await.unwrap().error.code,
        ErrorCode::SourceChanged
    );
}
