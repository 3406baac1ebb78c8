//! Small files of earlier jobs, as the one writer of a volume reads them: how many calls that
//! takes,
//! and that nobody reads what has changed.
#![allow(clippy::unwrap_used, reason = "all of this is test")]

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::Ordering;

use bafs_client::tree::Durability;
use bafs_proto::file_op::{BodyRange, FileOp, FileReply};
use bafs_proto::ids::{HandleId, InodeNo};
use nix::libc;

use crate::differential::DelegationFixture;
use crate::test_server::Fault;

const FILES: usize = 64;

/// What is in a file before anybody writes to it.
fn content(number: usize) -> Vec<u8> {
    vec![number as u8; 1_000 + number]
}

fn name(number: usize) -> String {
    format!("file-{number}")
}

fn make_files(root: &Path) {
    for number in 0..FILES {
        std::fs::write(root.join(name(number)), content(number)).unwrap();
    }
}

/// A volume with files that nobody has looked at.
async fn earlier_files() -> DelegationFixture {
    DelegationFixture::with_files(Durability::OnSync, None, make_files).await
}

async fn open(world: &DelegationFixture, number: usize, flags: i32) -> HandleId {
    let lookup = FileOp::Lookup {
        parent: InodeNo::ROOT,
        name: name(number).into(),
    };
    let Ok(FileReply::Attr(attr)) = world.run(lookup, &[]).await.0 else {
        panic!("it is there");
    };
    let ino = attr.ino;
    match world.run(FileOp::Open { ino, flags }, &[]).await.0 {
        Ok(FileReply::Opened { handle, .. }) => handle,
        other => panic!("{other:?}"),
    }
}

async fn read_whole(world: &DelegationFixture, number: usize) -> Vec<u8> {
    let handle = open(world, number, libc::O_RDONLY).await;
    let read = FileOp::Read {
        handle,
        offset: 0,
        length: 4_096,
    };
    let (result, data) = world.run(read, &[]).await;
    assert!(matches!(result, Ok(FileReply::Read { length }) if length as usize == data.len()));
    world.run(FileOp::Release { handle }, &[]).await.0.unwrap();
    data
}

fn calls(world: &DelegationFixture) -> u64 {
    world.server.batches_run.load(Ordering::Relaxed)
}

#[tokio::test]
async fn cold_small_files_take_few_calls() {
    let world = earlier_files().await;
    let before = calls(&world);
    assert_eq!(read_whole(&world, 0).await, content(0));
    // The directory is listed, and the file is read.
    assert_eq!(calls(&world) - before, 2);
    let before = calls(&world);
    for number in 1..FILES {
        assert_eq!(read_whole(&world, number).await, content(number));
    }
    let calls = calls(&world) - before;
    assert!(calls <= 16, "{calls} calls for {FILES} files");
    let loss = world.volume.health().loss();
    assert!(loss.is_none(), "{loss:?}");
}

#[tokio::test]
async fn cold_lookups_of_a_directory_take_one_call() {
    let world = earlier_files().await;
    let before = calls(&world);
    for number in 0..2 * FILES {
        let lookup = FileOp::Lookup {
            parent: InodeNo::ROOT,
            name: name(number).into(),
        };
        let found = world.run(lookup, &[]).await.0;
        assert_eq!(found.is_ok(), number < FILES, "{found:?}");
    }
    assert_eq!(calls(&world) - before, 1);
}

#[tokio::test]
async fn writers_never_read_outdated_small_files() {
    for seed in 1..=20 {
        let world = earlier_files().await;
        world.server.set_delays(30, seed);
        let mut written = BTreeSet::new();
        for number in 0..FILES {
            // Some are written after they were read ahead, some meanwhile.
            let other = (number + seed as usize % 5 + 1) % FILES;
            let handle = open(&world, other, libc::O_RDWR).await;
            let data = BodyRange {
                start: 0,
                length: 3,
            };
            let write = FileOp::Write {
                handle,
                offset: 0,
                data,
                append: false,
            };
            world.run(write, b"new").await.0.unwrap();
            world.run(FileOp::Release { handle }, &[]).await.0.unwrap();
            written.insert(other);
            for number in [other, number] {
                let mut expected = content(number);
                if written.contains(&number) {
                    expected[..3].copy_from_slice(b"new");
                }
                assert_eq!(read_whole(&world, number).await, expected, "seed {seed}");
            }
        }
    }
}

#[tokio::test]
async fn small_files_stay_readable_over_a_restart() {
    let world = earlier_files().await;
    for number in 0..FILES {
        if number % 7 == 3 {
            let runs = number % 2 == 0;
            world.server.set_fault(Fault::Restart { runs });
        }
        assert_eq!(read_whole(&world, number).await, content(number));
    }
    let loss = world.volume.health().loss();
    assert!(loss.is_none(), "{loss:?}");
}

#[tokio::test]
async fn readers_need_two_calls_for_a_cold_file() {
    let world = DelegationFixture::read_only(make_files).await;
    for number in 0..3 {
        let before = calls(&world);
        assert_eq!(read_whole(&world, number).await, content(number));
        // Its name is looked up, and the file is read.
        assert_eq!(calls(&world) - before, 2);
    }
}

#[tokio::test]
async fn readers_see_later_writes_of_others() {
    let world = DelegationFixture::read_only(make_files).await;
    let path = world.directory.path().join(name(1));
    for length in [content(1).len(), 10, 3_000] {
        let handle = open(&world, 1, libc::O_RDONLY).await;
        let written = vec![length as u8; length];
        std::fs::write(&path, &written).unwrap();
        let read = FileOp::Read {
            handle,
            offset: 0,
            length: 4_096,
        };
        assert_eq!(world.run(read, &[]).await.1, written);
        world.run(FileOp::Release { handle }, &[]).await.0.unwrap();
    }
    let loss = world.volume.health().loss();
    assert!(loss.is_none(), "{loss:?}");
}

#[tokio::test]
async fn readers_continue_after_a_restart() {
    let world = DelegationFixture::read_only(make_files).await;
    for number in 0..FILES {
        let runs = number % 2 == 0;
        let handle = open(&world, number, libc::O_RDONLY).await;
        if number % 5 == 3 {
            world.server.set_fault(Fault::Restart { runs });
        }
        let parts = [
            (0, 4_096, content(number)),
            (1_000, 9, content(number)[1_000..].to_vec()),
        ];
        for (offset, length, expected) in parts {
            let read = FileOp::Read {
                handle,
                offset,
                length,
            };
            let found = world.run(read, &[]).await.1;
            assert_eq!(found, expected[..expected.len().min(length as usize)]);
        }
        world.run(FileOp::Release { handle }, &[]).await.0.unwrap();
    }
}
