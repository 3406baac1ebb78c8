//! Directories of earlier jobs, as the one writer of a volume lists and removes them.
#![allow(clippy::unwrap_used, reason = "all of this is test")]

use std::path::Path;
use std::sync::atomic::Ordering;

use bafs_client::tree::Durability;
use bafs_proto::file_op::{BodyRange, DirectoryEntry, FileOp, FileReply};
use bafs_proto::ids::{HandleId, InodeNo};
use nix::libc;

use crate::differential::DelegationFixture;
use crate::test_server::Fault;

const FILES: usize = 300;

fn directory_name(number: usize) -> String {
    format!("directory-{number}")
}

/// A volume with directories that nobody has looked at.
async fn earlier_directories(count: usize) -> DelegationFixture {
    let make = |root: &Path| {
        for number in 0..count {
            let directory = root.join(directory_name(number));
            std::fs::create_dir(&directory).unwrap();
            for file in 0..FILES {
                std::fs::write(directory.join(file.to_string()), b"hello").unwrap();
            }
        }
    };
    DelegationFixture::with_files(Durability::OnSync, None, make).await
}

fn calls(world: &DelegationFixture) -> u64 {
    world.server.batches_run.load(Ordering::Relaxed)
}

async fn look_up(world: &DelegationFixture, parent: InodeNo, name: &str) -> InodeNo {
    let name = name.into();
    match world.run(FileOp::Lookup { parent, name }, &[]).await.0 {
        Ok(FileReply::Attr(attr)) => attr.ino,
        other => panic!("{other:?}"),
    }
}

async fn open_directory(world: &DelegationFixture, ino: InodeNo) -> HandleId {
    match world.run(FileOp::OpenDirectory { ino }, &[]).await.0 {
        Ok(FileReply::Opened { handle, .. }) => handle,
        other => panic!("{other:?}"),
    }
}

/// A page of about 24 KiB, as the kernel asks for it.
async fn read_page(
    world: &DelegationFixture,
    handle: HandleId,
    cookie: u64,
) -> Vec<DirectoryEntry> {
    let op = FileOp::ReadDirectory {
        handle,
        cookie,
        bytes_max: 24 << 10,
        plus: true,
    };
    match world.run(op, &[]).await.0 {
        Ok(FileReply::Entries(entries)) => entries,
        other => panic!("{other:?}"),
    }
}

/// All names but `.` and `..`.
async fn list(world: &DelegationFixture, ino: InodeNo) -> Vec<Vec<u8>> {
    let handle = open_directory(world, ino).await;
    let (mut names, mut cookie) = (Vec::new(), 0);
    loop {
        let entries = read_page(world, handle, cookie).await;
        let Some(last) = entries.last() else { break };
        cookie = last.cookie;
        let entries = entries.into_iter().filter(|entry| entry.attr.is_some());
        names.extend(entries.map(|entry| entry.name));
    }
    let close = FileOp::ReleaseDirectory { handle };
    world.run(close, &[]).await.0.unwrap();
    names
}

#[tokio::test]
async fn listing_a_cold_directory_takes_one_call() {
    let world = earlier_directories(1).await;
    let before = calls(&world);
    let ino = look_up(&world, InodeNo::ROOT, &directory_name(0)).await;
    for _ in 0..2 {
        assert_eq!(list(&world, ino).await.len(), FILES);
    }
    assert_eq!(calls(&world) - before, 2, "one is for the root");
}

#[tokio::test]
async fn cold_trees_take_few_calls() {
    let world = earlier_directories(32).await;
    let before = calls(&world);
    for number in 0..32 {
        let ino = look_up(&world, InodeNo::ROOT, &directory_name(number)).await;
        assert_eq!(list(&world, ino).await.len(), FILES);
    }
    let calls = calls(&world) - before;
    assert!(calls <= 16, "{calls} calls");
}

#[tokio::test]
async fn listed_trees_are_removed_without_waiting() {
    let world = earlier_directories(3).await;
    let directory = look_up(&world, InodeNo::ROOT, &directory_name(0)).await;
    let names = list(&world, directory).await;
    world.server.set_fault(Fault::Silent);
    for name in names {
        let parent = directory;
        let unlink = FileOp::Unlink { parent, name };
        assert_eq!(world.run(unlink, &[]).await.0, Ok(FileReply::Done));
    }
    assert_eq!(list(&world, directory).await.len(), 0);
    let remove = FileOp::RemoveDirectory {
        parent: InodeNo::ROOT,
        name: directory_name(0).into(),
    };
    assert_eq!(world.run(remove, &[]).await.0, Ok(FileReply::Done));
}

#[tokio::test]
async fn a_listing_leaves_removed_names_out() {
    let world = earlier_directories(3).await;
    let directory = look_up(&world, InodeNo::ROOT, &directory_name(1)).await;
    let handle = open_directory(&world, directory).await;
    let first = read_page(&world, handle, 0).await;
    let (last, parent) = (first.last().unwrap().cookie, directory);
    let shown =
        |entries: &[DirectoryEntry], name: &[u8]| entries.iter().any(|entry| entry.name == name);
    let name = b"99".to_vec();
    assert!(!shown(&first, &name), "all fits a page");
    let unlink = FileOp::Unlink {
        parent,
        name: name.clone(),
    };
    world.run(unlink, &[]).await.0.unwrap();
    let second = read_page(&world, handle, last).await;
    assert!(!shown(&second, &name));
    assert!(shown(&second, b"98"));
    assert_eq!(first.len() + second.len(), FILES + 2 - 1);
    // From the start again, it shows what there is now.
    let create = FileOp::Create {
        parent,
        name: b"0000".to_vec(),
        mode: 0o644,
        flags: libc::O_RDWR,
    };
    world.run(create, &[]).await.0.unwrap();
    assert!(shown(&read_page(&world, handle, 0).await, b"0000"));
}

#[tokio::test]
async fn a_listing_shows_the_size_of_sparse_files() {
    let world = earlier_directories(3).await;
    let directory = look_up(&world, InodeNo::ROOT, &directory_name(2)).await;
    let ino = look_up(&world, directory, "0").await;
    let listing = open_directory(&world, directory).await;
    let flags = libc::O_RDWR;
    let Ok(FileReply::Opened { handle, .. }) = world.run(FileOp::Open { ino, flags }, &[]).await.0
    else {
        panic!("it opens");
    };
    let write = FileOp::Write {
        handle,
        offset: 100_000,
        data: BodyRange {
            start: 0,
            length: 5,
        },
        append: false,
    };
    world.run(write, b"hello").await.0.unwrap();
    // Behind the first two entries, which need no attributes.
    let entries = read_page(&world, listing, 2).await;
    let shown = entries.iter().find(|entry| entry.name == b"0").unwrap();
    assert_eq!(shown.attr.unwrap().size, 100_005);
}
