//! The one writer of a volume, answered before its server has run what it asked: the same answers
//! and the same tree as a directory gives, over restarts of the server too.
#![allow(clippy::unwrap_used, reason = "all of this is test")]

mod beside;
mod serving;

use bafs_client::tree::Promise;
use bafs_proto::ErrorCode;
use bafs_proto::file_op::{BodyRange, Caller, Errno, FileOp, FileReply, FileResult};
use bafs_proto::ids::HandleId;
use bafs_proto::ids::InodeNo;
use beside::{Both, Dice, World};
use nix::libc;
use serving::Fault;
use tokio::sync::oneshot;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_answered_early_is_what_a_directory_answers() {
    for seed in 0..30 {
        let (mut both, mut dice) = (Both::new().await, Dice(seed));
        for _ in 0..300 {
            both.step(&mut dice, false).await;
        }
        both.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_answered_early_outlives_restarts_of_the_server() {
    for seed in 100..140 {
        let (mut both, mut dice) = (Both::new().await, Dice(seed));
        for _ in 0..200 {
            if dice.below(12) == 0 {
                let runs = dice.below(2) == 0;
                both.world.server.set(Fault::Restart { runs });
            }
            both.step(&mut dice, true).await;
        }
        both.end().await;
    }
}

/// Cases that are tried, by so many threads: each waits now and then.
const CASES: u64 = 2_000;
const THREADS: u64 = 8;

/// Tells which case failed.
struct Told(u64);

impl Drop for Told {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("it was case {}", self.0);
        }
    }
}

async fn meet_anything(seed: u64) {
    let (mut both, mut dice) = (Both::new().await, Dice(seed));
    both.world.server.be_late(dice.below(60), seed);
    let restarts = dice.below(4) > 0;
    let turns = dice.below(40);
    for _ in 0..20 + dice.below(60) {
        // So that what is on its way gets here, or halfway.
        for _ in 0..dice.below(turns + 1) {
            tokio::task::yield_now().await;
        }
        match dice.below(60) {
            0..12 => both.ask_meanwhile(&mut dice),
            12..15 if restarts => {
                let runs = dice.below(2) == 0;
                both.world.server.set(Fault::Restart { runs });
            }
            15 => both.world.server.set(Fault::LostReplies(1)),
            _ => {}
        }
        both.step(&mut dice, restarts).await;
    }
    both.end().await;
}

#[test]
fn what_is_answered_early_is_right_whatever_happens_meanwhile() {
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                let mut building = tokio::runtime::Builder::new_current_thread();
                let runtime = building.enable_all().build().unwrap();
                for seed in (thread..CASES).step_by(THREADS as usize) {
                    let _told = Told(seed);
                    runtime.block_on(meet_anything(1_000 + seed));
                }
            });
        }
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_close_that_is_promised_waits_for_the_server_and_others_do_not() {
    for promise in [Promise::Synced, Promise::Closed] {
        let world = World::new(promise).await;
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
            assert_eq!(world.volume.close_waits(), promise == Promise::Closed);
            world.server.set(Fault::Silent);
            world.run(hello(handle), b"hello").await.0.unwrap();
            let (send, mut receive) = oneshot::channel();
            let done = move |result, _: &[u8]| drop(send.send(result));
            if promise == Promise::Synced {
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
        world.server.set(Fault::None);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_close_fails_if_what_was_answered_first_did() {
    let world = World::new(Promise::Closed).await;
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
        world.server.set(Fault::Full);
        world.server.be_late(200, 1);
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
        let code = world.volume.fate().loss().map(|loss| loss.code);
        assert_eq!(code, Some(ErrorCode::NoSpaceBytes));
    }
}

/// Writes five bytes at the beginning of a file.
fn hello(handle: HandleId) -> FileOp {
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
async fn write_then_name(world: &World, number: usize) {
    let (hidden, shown) = (format!("{number}.part"), format!("{number}"));
    let made = world.run(create(&hidden), &[]).await.0.unwrap();
    let FileReply::Opened { handle, .. } = made else {
        panic!("{made:?}");
    };
    world.run(hello(handle), b"hello").await.0.unwrap();
    world.run(FileOp::Release { handle }, &[]).await.0.unwrap();
    let renamed = world.run(rename(&hidden, &shown), &[]).await.0;
    assert_eq!(renamed, Ok(FileReply::Done), "the server was asked");
    let gone = FileOp::Lookup {
        parent: InodeNo::ROOT,
        name: hidden.into(),
    };
    assert_eq!(world.run(gone, &[]).await.0, Err(Errno(libc::ENOENT)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_is_written_under_another_name_first_needs_no_answer() {
    for fault in [Fault::Silent, Fault::None] {
        let world = World::new(Promise::Synced).await;
        // So that the log knows how files look here, and which names there are.
        for name in ["first", "second"] {
            world.run(create(name), &[]).await.0.unwrap();
            world.flush().await;
        }
        let absent = FileOp::Lookup {
            parent: InodeNo::ROOT,
            name: b"absent".to_vec(),
        };
        assert!(world.run(absent, &[]).await.0.is_err());
        world.server.set(fault);
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

fn rename(name: &str, new_name: &str) -> FileOp {
    FileOp::Rename {
        parent: InodeNo::ROOT,
        name: name.into(),
        new_parent: InodeNo::ROOT,
        new_name: new_name.into(),
        flags: 0,
    }
}

fn create(name: &str) -> FileOp {
    FileOp::Create {
        parent: InodeNo::ROOT,
        name: name.into(),
        mode: 0o644,
        flags: libc::O_RDWR,
    }
}
