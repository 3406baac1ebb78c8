//! A server that forgets its sessions while a job works: the job goes on with the same files, or
//! its volume is lost; it never gets a wrong answer.
#![allow(clippy::unwrap_used, reason = "all of this is test")]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::test_server::{FakeServer, Fault, VOLUME};
use bafs_client::sandbox::Access;
use bafs_client::tree::{RemoteTree, Tree};
use bafs_client::usage::VolumeUsage;
use bafs_client::volume::{Ownership, Volume, VolumeMode};
use bafs_client::volume_health::{VolumeHealth, VolumeLoss};
use bafs_proto::ErrorCode;
use bafs_proto::file_op::{BodyRange, Caller, Errno, FileOp, FileReply, FileResult};
use bafs_proto::ids::{AgentId, HandleId, InodeNo};
use bafs_proto::message::TreeRef;
use nix::libc;
use tokio::sync::{mpsc, oneshot};

struct RestartFixture {
    server: Arc<FakeServer>,
    volume: Arc<Volume>,
    losses: mpsc::UnboundedReceiver<VolumeLoss>,
    directory: tempfile::TempDir,
}

impl RestartFixture {
    async fn new() -> Self {
        Self::with_tree(TreeRef::Volume(VOLUME), true).await
    }

    async fn with_tree(tree: TreeRef, writable: bool) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let server = FakeServer::new(directory.path());
        let (sender, losses) = mpsc::unbounded_channel();
        let volume_status = VolumeHealth::new("work", sender);
        let tree = RemoteTree::open(
            server.server(3_000),
            tree,
            AgentId::random(),
            writable,
            volume_status.clone(),
        )
        .await
        .unwrap();
        let access = match writable {
            true => Access::ReadWrite,
            false => Access::ReadOnly,
        };
        let (mode, ownership) = (VolumeMode::scratch(access), Ownership::AsStored);
        let tree = Tree::Remote(tree);
        let volume = Volume::new(
            "work",
            tree,
            mode,
            ownership,
            volume_status,
            VolumeUsage::new(),
        );
        Self {
            server,
            volume: Arc::new(volume),
            losses,
            directory,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn read_text(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    async fn run_with(&self, op: FileOp, data: &[u8]) -> (FileResult, Vec<u8>) {
        let (send, receive) = oneshot::channel();
        let done = move |result, data: &[u8]| drop(send.send((result, data.to_vec())));
        self.volume.run(Caller::default(), op, data, Box::new(done));
        receive.await.unwrap()
    }

    async fn run(&self, op: FileOp) -> FileResult {
        self.run_with(op, &[]).await.0
    }

    async fn lookup(&self, parent: InodeNo, at: &str) -> Result<InodeNo, Errno> {
        let name = to_bytes(at);
        match self.run(FileOp::Lookup { parent, name }).await? {
            FileReply::Attr(attr) => Ok(attr.ino),
            other => panic!("{other:?}"),
        }
    }

    async fn create(&self, at: &str) -> (InodeNo, HandleId) {
        match self.run(create(at)).await {
            Ok(FileReply::Opened { handle, attr }) => (attr.ino, handle),
            other => panic!("{other:?}"),
        }
    }

    async fn directory(&self, parent: InodeNo, at: &str) -> InodeNo {
        let (name, mode) = (to_bytes(at), 0o755);
        match self.run(FileOp::MakeDirectory { parent, name, mode }).await {
            Ok(FileReply::Attr(attr)) => attr.ino,
            other => panic!("{other:?}"),
        }
    }

    async fn write(&self, handle: HandleId, offset: u64, text: &str, append: bool) -> FileResult {
        let data = BodyRange {
            start: 0,
            length: text.len() as u32,
        };
        let op = FileOp::Write {
            handle,
            offset,
            data,
            append,
        };
        self.run_with(op, text.as_bytes()).await.0
    }

    async fn read(&self, handle: HandleId) -> String {
        let (offset, length) = (0, 100);
        let op = FileOp::Read {
            handle,
            offset,
            length,
        };
        let (result, data) = self.run_with(op, &[]).await;
        assert!(result.is_ok(), "{result:?}");
        String::from_utf8(data).unwrap()
    }

    async fn loss(&mut self) -> VolumeLoss {
        let lost = tokio::time::timeout(Duration::from_secs(5), self.losses.recv());
        lost.await.expect("the loss is told").unwrap()
    }
}

fn to_bytes(text: &str) -> Vec<u8> {
    text.as_bytes().to_vec()
}

fn create(at: &str) -> FileOp {
    FileOp::Create {
        parent: InodeNo::ROOT,
        name: to_bytes(at),
        mode: 0o100_640,
        flags: libc::O_RDWR,
    }
}

fn rename(one: &str, other: &str, flags: u32) -> FileOp {
    FileOp::Rename {
        parent: InodeNo::ROOT,
        name: to_bytes(one),
        new_parent: InodeNo::ROOT,
        new_name: to_bytes(other),
        flags,
    }
}

fn written_reply(length: u64) -> FileResult {
    Ok(FileReply::Written { length })
}

#[tokio::test]
async fn files_handles_and_directories_outlive_the_server() {
    let world = RestartFixture::new().await;
    let outer = world.directory(InodeNo::ROOT, "outer").await;
    let inner = world.directory(outer, "inner").await;
    let (file, handle) = world.create("log").await;
    assert_eq!(world.write(handle, 0, "one ", true).await, written_reply(4));
    assert_eq!(
        world.run(rename("log", "kept", 0)).await,
        Ok(FileReply::Done)
    );
    let listing = match world.run(FileOp::OpenDirectory { ino: outer }).await {
        Ok(FileReply::Opened { handle, .. }) => handle,
        other => panic!("{other:?}"),
    };
    for round in 0..3 {
        world.server.restart();
        let offset = 4 + 5 * round;
        assert_eq!(
            world.write(handle, offset, "more ", true).await,
            written_reply(5)
        );
        let deep = world
            .run(FileOp::GetAttr {
                ino: inner,
                handle: None,
            })
            .await;
        assert!(matches!(deep, Ok(FileReply::Attr(attr)) if attr.ino == inner));
        assert_eq!(world.lookup(InodeNo::ROOT, "kept").await, Ok(file));
        let op = FileOp::ReadDirectory {
            handle: listing,
            cookie: 0,
            bytes_max: 4096,
            plus: true,
        };
        match world.run(op).await {
            Ok(FileReply::Entries(entries)) => {
                let found = entries.iter().find(|entry| entry.name == b"inner").unwrap();
                assert_eq!(found.ino, inner);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(world.read_text("kept"), "one more more more ");
    world.server.restart();
    assert_eq!(
        world.run(FileOp::Release { handle }).await,
        Ok(FileReply::Done)
    );
    assert!(world.volume.health().loss().is_none());
}

#[tokio::test]
async fn interrupted_operations_run_exactly_once() {
    for runs in [false, true] {
        let world = RestartFixture::new().await;
        let restart = || world.server.set_fault(Fault::Restart { runs });
        let (file, handle) = world.create("a").await;
        for round in 0..4u64 {
            restart();
            let wrote = world.write(handle, round * 5, "line\n", true).await;
            assert_eq!(wrote, written_reply(5));
        }
        assert_eq!(world.read_text("a"), "line\n".repeat(4), "runs: {runs}");
        restart();
        assert_eq!(world.run(rename("a", "b", 0)).await, Ok(FileReply::Done));
        assert!(!world.path("a").exists() && world.path("b").exists());
        world.create("c").await;
        let exchange = libc::RENAME_EXCHANGE;
        restart();
        assert_eq!(
            world.run(rename("b", "c", exchange)).await,
            Ok(FileReply::Done)
        );
        assert_eq!(world.read_text("c"), "line\n".repeat(4));
        restart();
        let op = FileOp::MakeLink {
            ino: file,
            parent: InodeNo::ROOT,
            name: to_bytes("link"),
        };
        let linked = world.run(op).await;
        assert!(
            matches!(linked, Ok(FileReply::Attr(attr)) if attr.nlink == 2 && attr.ino == file),
            "{linked:?}"
        );
        restart();
        let unlink = FileOp::Unlink {
            parent: InodeNo::ROOT,
            name: to_bytes("c"),
        };
        assert_eq!(world.run(unlink).await, Ok(FileReply::Done));
        assert!(!world.path("c").exists());
        assert_eq!(
            world.read(handle).await,
            "line\n".repeat(4),
            "by its other name"
        );
        assert!(world.volume.health().loss().is_none());
    }
}

#[tokio::test]
async fn interrupted_creations_are_completed_exactly_once() {
    use std::os::unix::fs::MetadataExt;
    for runs in [false, true] {
        let world = RestartFixture::new().await;
        let restart = || world.server.set_fault(Fault::Restart { runs });
        restart();
        let (_, handle) = world.create("file").await;
        assert_eq!(world.write(handle, 0, "x", false).await, written_reply(1));
        let found = std::fs::metadata(world.path("file")).unwrap();
        assert_eq!((found.mode() & 0o777, found.nlink()), (0o640, 1));
        restart();
        let directory = world.directory(InodeNo::ROOT, "directory").await;
        restart();
        let op = FileOp::MakeSymlink {
            parent: directory,
            name: to_bytes("to"),
            target: to_bytes("nowhere"),
        };
        assert!(world.run(op).await.is_ok());
        restart();
        let op = FileOp::RemoveDirectory {
            parent: InodeNo::ROOT,
            name: to_bytes("directory"),
        };
        assert_eq!(world.run(op).await, Err(Errno(libc::ENOTEMPTY)));
        assert!(world.volume.health().loss().is_none());
    }
}

#[tokio::test]
async fn a_replaced_file_is_never_shown_after_restart() {
    let mut world = RestartFixture::new().await;
    let (_, handle) = world.create("a").await;
    assert_eq!(
        world.write(handle, 0, "mine", false).await,
        written_reply(4)
    );
    world.server.restart();
    // As a restored copy would be; on many file systems it even gets the same number.
    std::fs::remove_file(world.path("a")).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    std::fs::write(world.path("a"), "theirs").unwrap();
    let op = FileOp::Read {
        handle,
        offset: 0,
        length: 9,
    };
    assert_eq!(world.run(op).await, Err(Errno(libc::EIO)));
    let loss = world.loss().await;
    assert!(loss.error.detail.contains("'a'"), "{}", loss.error);
}

#[tokio::test]
async fn an_unlinked_open_file_is_lost_after_restart() {
    let mut world = RestartFixture::new().await;
    let (_, kept) = world.create("kept").await;
    let (_, handle) = world.create("a").await;
    let unlink = FileOp::Unlink {
        parent: InodeNo::ROOT,
        name: to_bytes("a"),
    };
    assert_eq!(world.run(unlink).await, Ok(FileReply::Done));
    world.server.restart();
    assert_eq!(
        world.write(kept, 0, "x", false).await,
        written_reply(1),
        "others go on"
    );
    let op = FileOp::Read {
        handle,
        offset: 0,
        length: 1,
    };
    assert_eq!(world.run(op).await, Err(Errno(libc::EIO)));
    assert!(
        world
            .loss()
            .await
            .error
            .detail
            .contains("no longer has a name")
    );
}

#[tokio::test]
async fn a_removed_closed_file_is_only_stale() {
    let world = RestartFixture::new().await;
    let (ino, handle) = world.create("a").await;
    let released = world.run(FileOp::Release { handle }).await;
    assert_eq!(released, Ok(FileReply::Done));
    world.server.restart();
    let unlink = FileOp::Unlink {
        parent: InodeNo::ROOT,
        name: to_bytes("a"),
    };
    assert_eq!(world.run(unlink).await, Ok(FileReply::Done));
    let op = FileOp::ListXattr { ino };
    assert_eq!(world.run(op).await, Err(Errno(libc::ESTALE)));
    assert!(world.volume.health().loss().is_none());
}

#[tokio::test]
async fn an_unprovable_operation_ends_the_volume() {
    let mut world = RestartFixture::new().await;
    let (ino, _) = world.create("a").await;
    let flags = libc::XATTR_CREATE;
    world.server.set_fault(Fault::Restart { runs: true });
    let (name, value) = (to_bytes("user.x"), to_bytes("1"));
    let op = FileOp::SetXattr {
        ino,
        name,
        value,
        flags,
    };
    assert_eq!(world.run(op).await, Err(Errno(libc::EIO)));
    let loss = world.loss().await;
    assert_eq!(loss.error.code, ErrorCode::SessionUnknown);
    assert!(
        loss.error.detail.contains("it is unknown whether"),
        "{}",
        loss.error
    );
}

#[tokio::test]
async fn stale_home_files_cause_no_data_loss() {
    let world = RestartFixture::with_tree(TreeRef::Home("data".to_owned()), true).await;
    std::fs::write(world.path("a"), "mine").unwrap();
    std::fs::write(world.path("b"), "other").unwrap();
    let a = world.lookup(InodeNo::ROOT, "a").await.unwrap();
    world.server.restart();
    std::fs::remove_file(world.path("a")).unwrap();
    let op = FileOp::GetAttr {
        ino: a,
        handle: None,
    };
    assert_eq!(world.run(op).await, Err(Errno(libc::ESTALE)));
    assert!(world.lookup(InodeNo::ROOT, "b").await.is_ok());
    assert!(world.volume.health().loss().is_none());
}

#[tokio::test]
async fn concurrent_writers_survive_a_restart() {
    let world = Arc::new(RestartFixture::new().await);
    let mut tasks = Vec::new();
    for number in 0..20u64 {
        let world = world.clone();
        tasks.push(tokio::spawn(async move {
            let (_, handle) = world.create(&format!("f{number}")).await;
            for round in 0..30u64 {
                assert_eq!(
                    world.write(handle, round * 3, "ab\n", true).await,
                    written_reply(3)
                );
                if round % 7 == number % 7 {
                    let (one, other) = (format!("f{number}"), format!("g{number}"));
                    let op = rename(&one, &other, 0);
                    assert_eq!(world.run(op).await, Ok(FileReply::Done));
                    let op = rename(&other, &one, 0);
                    assert_eq!(world.run(op).await, Ok(FileReply::Done));
                }
            }
        }));
    }
    for round in 0..12 {
        tokio::time::sleep(Duration::from_millis(15)).await;
        let runs = round % 2 == 0;
        world.server.set_fault(Fault::Restart { runs });
    }
    for task in tasks {
        task.await.unwrap();
    }
    for number in 0..20 {
        assert_eq!(world.read_text(&format!("f{number}")), "ab\n".repeat(30));
    }
    assert!(world.volume.health().loss().is_none());
}
