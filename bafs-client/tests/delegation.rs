//! The one writer of a volume, answered before its server has run what it asked: the same answers
//! and the same tree as a directory gives, over restarts of the server too.
#![allow(clippy::unwrap_used, reason = "all of this is test")]

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::Ordering;

use crate::differential::{DelegationFixture, DifferentialTest, SeededRng};
use crate::test_server::Fault;
use bafs_client::tree::Durability;
use bafs_proto::ErrorCode;
use bafs_proto::file_op::{BodyRange, Caller, Errno, FileOp, FileReply, FileResult};
use bafs_proto::ids::HandleId;
use bafs_proto::ids::InodeNo;
use bafs_tree::Limit;
use nix::libc;
use tokio::sync::oneshot;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn early_answers_match_a_plain_directory() {
    for seed in 0..30 {
        let (mut both, mut rng) = (DifferentialTest::new().await, SeededRng(seed));
        for _ in 0..300 {
            both.random_step(&mut rng, false).await;
        }
        both.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn early_answers_survive_server_restarts() {
    for seed in 100..140 {
        let (mut both, mut rng) = (DifferentialTest::new().await, SeededRng(seed));
        for _ in 0..200 {
            if rng.below(12) == 0 {
                let runs = rng.below(2) == 0;
                both.fixture.server.set_fault(Fault::Restart { runs });
            }
            both.random_step(&mut rng, true).await;
        }
        both.finish().await;
    }
}

/// Cases that are tried, by so many threads: each waits now and then.
const CASE_COUNT: u64 = 2_000;
const THREAD_COUNT: u64 = 8;

/// Tells which case failed.
struct FailureSeed(u64);

impl Drop for FailureSeed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("it was case {}", self.0);
        }
    }
}

async fn run_random_case(seed: u64) {
    let (mut both, mut rng) = (DifferentialTest::new().await, SeededRng(seed));
    both.fixture.server.set_delays(rng.below(60), seed);
    let restarts = rng.below(4) > 0;
    let turns = rng.below(40);
    for _ in 0..20 + rng.below(60) {
        // So that what is on its way gets here, or halfway.
        for _ in 0..rng.below(turns + 1) {
            tokio::task::yield_now().await;
        }
        match rng.below(60) {
            0..12 => both.begin_query(&mut rng),
            12..15 if restarts => {
                let runs = rng.below(2) == 0;
                both.fixture.server.set_fault(Fault::Restart { runs });
            }
            15 => both.fixture.server.set_fault(Fault::LoseReplies(1)),
            _ => {}
        }
        both.random_step(&mut rng, restarts).await;
    }
    both.finish().await;
}

#[test]
fn early_answers_stay_correct_under_any_fault() {
    std::thread::scope(|scope| {
        for thread in 0..THREAD_COUNT {
            scope.spawn(move || {
                let mut building = tokio::runtime::Builder::new_current_thread();
                let runtime = building.enable_all().build().unwrap();
                for seed in (thread..CASE_COUNT).step_by(THREAD_COUNT as usize) {
                    let _told = FailureSeed(seed);
                    runtime.block_on(run_random_case(1_000 + seed));
                }
            });
        }
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_a_promised_close_waits_for_the_server() {
    for promise in [Durability::OnSync, Durability::OnClose] {
        let world = DelegationFixture::new(promise).await;
        // So that the log knows how files look here.
        for name in ["first", "f"] {
            let made = world.run(create(name), &[]).await.0.unwrap();
            let FileReply::Opened { handle, attr } = made else {
                panic!("{made:?}");
            };
            if name == "first" {
                world.flush().await;
                continue;
            }
            assert_eq!(
                world.volume.has_blocking_close(),
                promise == Durability::OnClose
            );
            world.server.set_fault(Fault::Silent);
            world.run(write_hello(handle), b"hello").await.0.unwrap();
            let (send, mut receive) = oneshot::channel();
            let done = move |result, _: &[u8]| drop(send.send(result));
            if promise == Durability::OnSync {
                continue;
            }
            world.volume.close_file(attr.ino, Box::new(done));
            assert!(receive.try_recv().is_err(), "the server has not run it");
            let unlink = FileOp::Unlink {
                parent: InodeNo::ROOT,
                name: b"first".to_vec(),
            };
            let (send, mut removed) = oneshot::channel();
            let done = move |result: FileResult, _: &[u8]| drop(send.send(result));
            let volume = &world.volume;
            volume.run(Caller::default(), unlink, &[], Box::new(done));
            assert!(removed.try_recv().is_err(), "the server has not run it");
        }
        world.server.set_fault(Fault::None);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_close_fails_after_a_failed_early_write() {
    let world = DelegationFixture::new(Durability::OnClose).await;
    for round in 0..2 {
        let made = world
            .run(create(&format!("f{round}")), &[])
            .await
            .0
            .unwrap();
        let FileReply::Opened { handle, attr } = made else {
            panic!("{made:?}");
        };
        world.flush().await;
        if round == 0 {
            continue;
        }
        world.server.set_fault(Fault::DiskFull);
        world.server.set_delays(200, 1);
        let data = BodyRange {
            start: 0,
            length: 5,
        };
        let write = FileOp::Write {
            handle,
            offset: 0,
            data,
            append: false,
        };
        // Whether it hears of it already is a matter of time.
        let _ = world.run(write, b"hello").await;
        let (send, receive) = oneshot::channel();
        let done = move |result: FileResult, _: &[u8]| drop(send.send(result));
        world.volume.close_file(attr.ino, Box::new(done));
        assert!(receive.await.unwrap().is_err(), "nothing of it was kept");
        let code = world.volume.health().loss().map(|loss| loss.code);
        assert_eq!(code, Some(ErrorCode::NoSpaceBytes));
        let held = world.volume.current_stat().await.expect("it was told last");
        assert!(
            held.disk_free_bytes.is_some(),
            "or nobody knew that it was full"
        );
    }
}

/// A new file that is open.
pub(crate) async fn create_open_file(world: &DelegationFixture, name: &str) -> HandleId {
    match world.run(create(name), &[]).await.0.unwrap() {
        FileReply::Opened { handle, .. } => handle,
        other => panic!("{other:?}"),
    }
}

/// Begins an operation; its answer comes later.
pub(crate) fn begin_operation(
    world: &DelegationFixture,
    op: FileOp,
    data: &[u8],
) -> oneshot::Receiver<FileResult> {
    let (send, receive) = oneshot::channel();
    let done = move |result: FileResult, _: &[u8]| drop(send.send(result));
    let (volume, caller) = (&world.volume, Caller::default());
    volume.run(caller, op, data, Box::new(done));
    receive
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_never_take_space_promised_to_others() {
    const MIB: u64 = 1 << 20;
    for seed in 1..=8 {
        let limit = Limit {
            bytes: 48 * MIB,
            files: 100,
        };
        let world = DelegationFixture::with_limit(Durability::OnSync, Some(limit)).await;
        let (written, reserved) = (
            create_open_file(&world, "a").await,
            create_open_file(&world, "b").await,
        );
        world.flush().await;
        world.server.set_delays(200, seed);
        let data = vec![1; MIB as usize];
        let mut answers = Vec::new();
        for number in 0..30 {
            if number == 5 {
                let allocate = FileOp::Allocate {
                    handle: reserved,
                    mode: 0,
                    offset: 0,
                    length: 30 * MIB,
                };
                answers.push((30, begin_operation(&world, allocate, &[])));
            }
            let write = FileOp::Write {
                handle: written,
                offset: number * MIB,
                data: BodyRange {
                    start: 0,
                    length: MIB as u32,
                },
                append: false,
            };
            answers.push((1, begin_operation(&world, write, &data)));
        }
        let (mut taken, mut refused) = (0, 0);
        for (amount, answer) in answers {
            match answer.await.unwrap() {
                Ok(_) => taken += amount,
                Err(errno) => {
                    assert_eq!(errno, Errno(libc::ENOSPC));
                    refused += amount;
                }
            }
        }
        world.flush().await;
        let loss = world.volume.health().loss();
        assert!(loss.is_none(), "what was acknowledged is gone: {loss:?}");
        assert!(taken <= 48 && refused > 0, "{taken} and {refused} MiB");
    }
}

#[tokio::test]
async fn an_early_open_gets_its_kept_descriptor() {
    let world = DelegationFixture::new(Durability::OnSync).await;
    let handle = create_open_file(&world, "a").await;
    world.run(write_hello(handle), b"hello").await.0.unwrap();
    world.run(FileOp::Release { handle }, &[]).await.0.unwrap();
    world.flush().await;
    let Ok(FileReply::Attr(attr)) = world.run(look_up("a"), &[]).await.0 else {
        panic!("it is there");
    };
    let (ino, flags) = (attr.ino, libc::O_RDONLY);
    let asked = world.server.ops_run.load(Ordering::Relaxed);
    let opened = world.run(FileOp::Open { ino, flags }, &[]).await.0.unwrap();
    let FileReply::Opened { handle, .. } = opened else {
        panic!("{opened:?}");
    };
    assert_eq!(world.server.ops_run.load(Ordering::Relaxed), asked, "early");
    // Others use the rest of its descriptors.
    world.server.set_fault(Fault::OutOfDescriptors);
    // From its start, a small file is read without a descriptor.
    let read = FileOp::Read {
        handle,
        offset: 1,
        length: 5,
    };
    assert_eq!(world.run(read, &[]).await.1, b"ello");
    let loss = world.volume.health().loss();
    assert!(loss.is_none(), "{loss:?}");
}

#[tokio::test]
async fn a_half_created_file_is_recreated_after_restart() {
    let world = DelegationFixture::new(Durability::OnSync).await;
    for name in ["x", "b"] {
        let handle = create_open_file(&world, name).await;
        world.run(write_hello(handle), b"hello").await.0.unwrap();
        world.run(FileOp::Release { handle }, &[]).await.0.unwrap();
        world.flush().await;
    }
    // So that it is known which names there are.
    assert!(world.run(look_up("a"), &[]).await.0.is_err());
    let unlink = |name: &str| FileOp::Unlink {
        parent: InodeNo::ROOT,
        name: name.into(),
    };
    // The server stops when it has made the file and not given it its mode yet.
    world.server.set_fault(Fault::Restart { runs: false });
    let answers =
        [unlink("x"), create("a"), unlink("b")].map(|op| begin_operation(&world, op, &[]));
    let path = |name: &str| world.directory.path().join(name);
    std::fs::remove_file(path("x")).unwrap();
    std::fs::write(path("a"), "").unwrap();
    std::fs::set_permissions(path("a"), Permissions::from_mode(0o600)).unwrap();
    for answer in answers {
        assert!(answer.await.unwrap().is_ok());
    }
    world.flush().await;
    let mode = std::fs::metadata(path("a")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o644);
    assert!(!path("x").exists() && !path("b").exists());
}

/// As a `stat` of its second name beside a program that writes to a file of an earlier job.
#[tokio::test]
async fn a_second_name_shows_pending_writes() {
    for seed in 1..=20 {
        let world = DelegationFixture::new(Durability::OnSync).await;
        let path = |name| world.directory.path().join(name);
        std::fs::write(path("a"), b"old").unwrap();
        std::fs::hard_link(path("a"), path("b")).unwrap();
        let Ok(FileReply::Attr(attr)) = world.run(look_up("a"), &[]).await.0 else {
            panic!("it is there");
        };
        let (ino, flags) = (attr.ino, libc::O_RDWR);
        let opened = world.run(FileOp::Open { ino, flags }, &[]).await.0;
        let Ok(FileReply::Opened { handle, .. }) = opened else {
            panic!("{opened:?}");
        };
        world.server.set_delays(40, seed);
        world.run(write_hello(handle), b"hello").await.0.unwrap();
        let Ok(FileReply::Attr(attr)) = world.run(look_up("b"), &[]).await.0 else {
            panic!("it is there");
        };
        assert_eq!((attr.ino, attr.size), (ino, 5), "seed {seed}");
        // Nor does it spoil what the writer knows of it.
        let op = FileOp::GetAttr { ino, handle: None };
        let told = world.run(op, &[]).await.0;
        assert!(matches!(told, Ok(FileReply::Attr(attr)) if attr.size == 5));
    }
}

/// Writes five bytes at the beginning of a file.
pub(crate) fn write_hello(handle: HandleId) -> FileOp {
    FileOp::Write {
        handle,
        offset: 0,
        data: BodyRange {
            start: 0,
            length: 5,
        },
        append: false,
    }
}

/// Writes a file under a name that is not its own yet, as rsync and editors do.
async fn write_then_name(world: &DelegationFixture, number: usize) {
    let (hidden, shown) = (format!("{number}.part"), format!("{number}"));
    let made = world.run(create(&hidden), &[]).await.0.unwrap();
    let FileReply::Opened { handle, .. } = made else {
        panic!("{made:?}");
    };
    world.run(write_hello(handle), b"hello").await.0.unwrap();
    world.run(FileOp::Release { handle }, &[]).await.0.unwrap();
    let renamed = world.run(rename(&hidden, &shown), &[]).await.0;
    assert_eq!(renamed, Ok(FileReply::Done), "the server was asked");
    let gone = world.run(look_up(&hidden), &[]).await.0;
    assert_eq!(gone, Err(Errno(libc::ENOENT)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writing_then_renaming_needs_no_server_answer() {
    for fault in [Fault::Silent, Fault::None] {
        let world = DelegationFixture::new(Durability::OnSync).await;
        // So that the log knows how files look here, and which names there are.
        for name in ["first", "second"] {
            world.run(create(name), &[]).await.0.unwrap();
            world.flush().await;
        }
        assert!(world.run(look_up("absent"), &[]).await.0.is_err());
        world.server.set_fault(fault);
        for number in 0..3 {
            write_then_name(&world, number).await;
        }
        if fault == Fault::Silent {
            // What is there is not replaced without the server, which says what that frees.
            let (send, mut replaced) = oneshot::channel();
            let done = move |result: FileResult, _: &[u8]| drop(send.send(result));
            let (op, caller) = (rename("first", "second"), Caller::default());
            world.volume.run(caller, op, &[], Box::new(done));
            assert!(replaced.try_recv().is_err());
            continue;
        }
        world.flush().await;
        let mut names: Vec<_> = std::fs::read_dir(world.directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["0", "1", "2", "first", "second"]);
        for number in 0..3 {
            let path = world.directory.path().join(number.to_string());
            assert_eq!(std::fs::read(path).unwrap(), b"hello");
        }
    }
}

pub(crate) fn look_up(name: &str) -> FileOp {
    FileOp::Lookup {
        parent: InodeNo::ROOT,
        name: name.into(),
    }
}

fn rename(name: &str, new_name: &str) -> FileOp {
    FileOp::Rename {
        parent: InodeNo::ROOT,
        name: name.into(),
        new_parent: InodeNo::ROOT,
        new_name: new_name.into(),
        flags: 0,
    }
}

pub(crate) fn create(name: &str) -> FileOp {
    FileOp::Create {
        parent: InodeNo::ROOT,
        name: name.into(),
        mode: 0o644,
        flags: libc::O_RDWR,
    }
}
