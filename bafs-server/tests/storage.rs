//! Volumes over the wire: idempotency, restart, reservations, fill, replicas, extraction.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::test_nodes::{
    A, FaultyHome, HOME, NodeCluster, from_home, from_volume, populated_home, random_bytes, spec,
    tree,
};
use bafs_proto::ErrorCode;
use bafs_proto::bearer::Bearer;
use bafs_proto::ids::{ExtractionId, VolumeId};
use bafs_proto::message::{DeleteVolume, Done, ExtractFile, GetVolume, ListVolumes, SourceKind};
use bafs_proto::time::Deadline;
use bafs_proto::volume::{ReplacementPolicy, VolumeKind, VolumeSpec, VolumeState, VolumeStatus};

const B: &str = "b:1";

fn get_volume(id: u128) -> GetVolume {
    GetVolume {
        volume: VolumeId(id),
    }
}

fn delete_volume(id: u128) -> DeleteVolume {
    DeleteVolume {
        volume: VolumeId(id),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_creation_keeps_the_content() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let _node = world.node(A, world.config(store.path())).await;
    let first = world.create(A, spec(1, None)).await.expect("create");
    assert_eq!(first.state, VolumeState::Ready);
    let file = tree(store.path(), 1).join("f");
    std::fs::write(&file, b"x").expect("write");
    let again = world.create(A, spec(1, None)).await.expect("again");
    assert_eq!(again.state, VolumeState::Ready);
    assert!(file.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn creation_with_another_size_conflicts() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let _node = world.node(A, world.config(store.path())).await;
    world.create(A, spec(1, None)).await.expect("create");
    let other = VolumeSpec {
        size_bytes: 1,
        ..spec(1, None)
    };
    let refused = world.create(A, other).await.expect_err("other");
    assert_eq!(refused.code, ErrorCode::Conflict);
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_volumes_are_lost_for_ever() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let _node = world.node(A, world.config(store.path())).await;
    world.create(A, spec(1, None)).await.expect("create");
    for _ in 0..3 {
        world.call(A, delete_volume(1)).await.expect("delete");
    }
    assert!(!tree(store.path(), 1).exists());
    let dead = world.create(A, spec(1, None)).await.expect_err("dead");
    assert_eq!(dead.code, ErrorCode::VolumeLost);
    let gone = world.call(A, get_volume(1)).await.expect_err("gone");
    assert_eq!(gone.code, ErrorCode::VolumeLost);
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_overtakes_a_delayed_creation() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let _node = world.node(A, world.config(store.path())).await;
    world.call(A, delete_volume(2)).await.expect("never was");
    let delayed = world.create(A, spec(2, None)).await.expect_err("delayed");
    assert_eq!(delayed.code, ErrorCode::VolumeLost);
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_volumes_are_not_created() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let _node = world.node(A, world.config(store.path())).await;
    let zero = VolumeSpec {
        lifetime_ms: 0,
        ..spec(3, None)
    };
    let outside = spec(3, from_home("../x"));
    for (invalid, code) in [(zero, ErrorCode::Malformed), (outside, ErrorCode::BadPath)] {
        let refused = world.create(A, invalid).await.expect_err("bad");
        assert_eq!(refused.code, code);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_keeps_only_ready_volumes() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let home = Arc::new(FaultyHome::default());
    home.file("slow", b"slow", 0o644);
    home.delay_ms.store(60_000, Ordering::Relaxed);
    world.network.listen(HOME, home);
    let node = world.node(A, world.config(store.path())).await;
    let advert = node.advert();
    world.create(A, spec(1, None)).await.expect("create");
    std::fs::write(tree(store.path(), 1).join("f"), b"kept").expect("write");
    world.create(A, spec(2, None)).await.expect("create");
    world.call(A, delete_volume(2)).await.expect("delete");
    let call = bafs_proto::message::CreateVolume {
        server: None,
        spec: spec(3, from_home("slow")),
        base: None,
        source_token: world.token.clone(),
    };
    let half = world.call_for(A, call, 400).await.expect("status in time");
    assert_eq!(half.state, VolumeState::Creating);
    // A copy of the store at this moment is what a kill leaves behind.
    let after = tempfile::tempdir().expect("store");
    let copied = std::process::Command::new("cp")
        .arg("-a")
        .arg(format!("{}/.", store.path().display()))
        .arg(after.path())
        .status();
    assert!(copied.expect("cp").success());
    assert!(
        after
            .path()
            .join("making")
            .join(VolumeId(3).to_string())
            .exists()
    );
    let again = world.node(B, world.config(after.path())).await;
    assert_eq!(again.advert().id, advert.id);
    assert_eq!(
        world.call(B, get_volume(1)).await.expect("kept").state,
        VolumeState::Ready
    );
    assert_eq!(
        std::fs::read(tree(after.path(), 1).join("f")).expect("read"),
        b"kept"
    );
    assert_eq!(
        world.create(B, spec(2, None)).await.expect_err("dead").code,
        ErrorCode::VolumeLost
    );
    assert_eq!(
        world.call(B, get_volume(3)).await.expect_err("half").code,
        ErrorCode::VolumeLost
    );
    assert!(
        !after
            .path()
            .join("making")
            .join(VolumeId(3).to_string())
            .exists()
    );
    let advert = again.advert();
    assert_eq!(
        advert.free_bytes,
        advert.capacity_bytes - (8 << 20),
        "one volume is reserved"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_narrowed_token_is_refused_by_other_nodes() {
    let world = NodeCluster::new();
    let stores = [A, B].map(|_| tempfile::tempdir().expect("store"));
    for (address, store) in [A, B].into_iter().zip(&stores) {
        world.node(address, world.config(store.path())).await;
        let id = u128::from(address == B) + 1;
        world.create(address, spec(id, None)).await.expect("made");
    }
    let bearer = Bearer::new(world.token.clone(), world.authority.signer().verifier());
    let now = bafs_server::clock::now();
    let shown = bearer.token_for_call(A, &delete_volume(1).into(), now, 20_000);
    let shown = shown.expect("a token");
    let ask = async |address, id| {
        let deadline = Deadline::after_ms(20_000);
        let asked = world
            .pool
            .call(address, &shown, delete_volume(id), deadline)
            .await;
        asked.map_err(|error| error.code)
    };
    let refused = Err(ErrorCode::RightMissing);
    assert_eq!(ask(B, 1).await, refused, "the same volume at another node");
    assert_eq!(ask(B, 2).await, refused);
    assert_eq!(ask(A, 2).await, refused, "another volume");
    assert_eq!(ask(A, 1).await, Ok(Done));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_serves_one_node() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let _node = world.node(A, world.config(store.path())).await;
    let second =
        bafs_server::node::Node::open(world.config(store.path()), B.to_owned(), world.pool.clone());
    let refused = second.await.expect_err("in use").error;
    assert_eq!(refused.code, ErrorCode::Conflict);
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_creates_never_exceed_the_capacity() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let node = world.node(A, world.config(store.path())).await;
    let world = Arc::new(world);
    let creates: Vec<_> = (0..64u128)
        .map(|id| {
            let world = world.clone();
            tokio::spawn(async move { world.create(A, spec(id, None)).await })
        })
        .collect();
    let (mut made, mut refused) = (0, 0);
    for create in creates {
        match create.await.expect("task") {
            Ok(status) => {
                assert_eq!(status.state, VolumeState::Ready);
                made += 1;
            }
            Err(error) => {
                assert_eq!(error.code, ErrorCode::NoSpaceBytes);
                assert!(error.detail.contains("are free"), "{error}");
                refused += 1;
            }
        }
    }
    assert_eq!((made, refused), (8, 56));
    assert_eq!(node.advert().free_bytes, 0);
    let files = VolumeSpec {
        size_bytes: 0,
        size_files: 201,
        ..spec(99, None)
    };
    let error = world.create(A, files).await.expect_err("files");
    assert_eq!(error.code, ErrorCode::NoSpaceFiles);
    let listed = world
        .call(A, ListVolumes::default())
        .await
        .expect("list")
        .volumes;
    let first = listed[0].spec.id;
    world
        .call(A, DeleteVolume { volume: first })
        .await
        .expect("delete");
    world
        .create(A, spec(100, None))
        .await
        .expect("the space of a deleted volume is used again");
}

fn check_tree(root: &Path) {
    assert_eq!(
        std::fs::read(root.join("sub/small")).expect("small"),
        b"hello"
    );
    assert_eq!(
        std::fs::read(root.join("big")).expect("big"),
        random_bytes(3_500_000, 7)
    );
    assert_eq!(
        std::fs::read_link(root.join("link")).expect("link"),
        Path::new("sub/small")
    );
    assert_eq!(
        std::fs::read_link(root.join("out")).expect("link"),
        Path::new("/etc/passwd")
    );
    let big = std::fs::metadata(root.join("big")).expect("stat");
    assert_eq!(big.permissions().mode() & 0o7777, 0o755);
    for path in ["big", "sub", "sub/small", "empty", "."] {
        let stat = std::fs::metadata(root.join(path)).expect("stat");
        assert_eq!(
            (stat.mtime(), stat.mtime_nsec()),
            (1_234_567_890, 123_456_789),
            "{path}"
        );
    }
    let sparse = std::fs::metadata(root.join("sparse")).expect("stat");
    assert_eq!(sparse.len(), 2 << 20);
    assert!(sparse.blocks() * 512 <= 128 << 10, "holes stay holes");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_is_filled_from_home_and_replicated() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let _home = populated_home(&world);
    let _node = world.node(A, world.config(store.path())).await;
    let status = world
        .create(A, spec(1, from_home("in")))
        .await
        .expect("create");
    assert_eq!(
        (status.state, status.error.clone()),
        (VolumeState::Ready, None)
    );
    assert!(status.used_files >= 7, "{status:?}");
    check_tree(&tree(store.path(), 1));
    let single = world
        .create(A, spec(2, from_home("in/sub/small")))
        .await
        .expect("create");
    assert_eq!(single.state, VolumeState::Ready);
    assert_eq!(
        std::fs::read(tree(store.path(), 2).join("small")).expect("read"),
        b"hello"
    );

    let other = tempfile::tempdir().expect("store");
    let _replica = world.node(B, world.config(other.path())).await;
    let status = world
        .create(B, spec(11, from_volume(1)))
        .await
        .expect("replicate");
    assert_eq!(
        (status.state, status.error.clone()),
        (VolumeState::Ready, None)
    );
    check_tree(&tree(other.path(), 11));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_fill_reports_its_reason() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let home = populated_home(&world);
    let _node = world.node(A, world.config(store.path())).await;
    let cases = [
        (
            VolumeSpec {
                size_bytes: 1_000,
                ..spec(1, from_home("in"))
            },
            ErrorCode::TooLarge,
        ),
        (
            VolumeSpec {
                size_files: 3,
                ..spec(2, from_home("in"))
            },
            ErrorCode::TooLarge,
        ),
        (spec(3, from_home("nowhere")), ErrorCode::NotFound),
    ];
    let code = |status: &VolumeStatus| status.error.as_ref().map(|fault| fault.code);
    for (spec, why) in cases {
        let id = spec.id;
        let status = world.create(A, spec.clone()).await.expect("status");
        assert_eq!(status.state, VolumeState::Failed);
        assert_eq!(code(&status), Some(why), "{status:?}");
        assert!(!tree(store.path(), id.0).exists());
        let again = world.create(A, spec).await.expect("status");
        assert_eq!(again.error, status.error, "a failure is told again");
        world
            .call(A, DeleteVolume { volume: id })
            .await
            .expect("delete");
    }
    home.damaged_replies.store(2, Ordering::Relaxed);
    let status = world
        .create(A, spec(4, from_home("in/big")))
        .await
        .expect("status");
    assert_eq!(
        status.state,
        VolumeState::Ready,
        "damage on the way is repaired"
    );
    let content = std::fs::read(tree(store.path(), 4).join("big")).expect("read");
    assert_eq!(content, random_bytes(3_500_000, 7));
    home.damaged_replies.store(u32::MAX, Ordering::Relaxed);
    let status = world
        .create(A, spec(5, from_home("in/big")))
        .await
        .expect("status");
    assert_eq!(code(&status), Some(ErrorCode::DigestMismatch), "{status:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_source_cannot_escape_the_volume() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let outside = tempfile::tempdir().expect("outside");
    let home = Arc::new(FaultyHome::default());
    let target = outside.path().to_str().expect("path").as_bytes().to_vec();
    home.add("in", SourceKind::Directory);
    home.add("in/a", SourceKind::Symlink(target));
    home.file("in/a/stolen", b"x", 0o644);
    world.network.listen(HOME, home);
    let _node = world.node(A, world.config(store.path())).await;
    let status = world
        .create(A, spec(1, from_home("in")))
        .await
        .expect("status");
    assert_eq!(status.state, VolumeState::Failed);
    assert_eq!(std::fs::read_dir(outside.path()).expect("list").count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn deleting_a_volume_stops_its_fill() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let home = populated_home(&world);
    home.delay_ms.store(60_000, Ordering::Relaxed);
    let node = world.node(A, world.config(store.path())).await;
    let world = Arc::new(world);
    let (creator, call) = (world.clone(), spec(1, from_home("in")));
    let creating = tokio::spawn(async move { creator.create(A, call).await });
    while node.advert().free_bytes == node.advert().capacity_bytes {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    world.call(A, delete_volume(1)).await.expect("delete");
    let created = creating.await.expect("task");
    assert_eq!(created.expect_err("deleted").code, ErrorCode::VolumeLost);
    world
        .create(
            A,
            VolumeSpec {
                size_bytes: 64 << 20,
                ..spec(2, None)
            },
        )
        .await
        .expect("all is free");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_removes_unknown_cache_volumes() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    populated_home(&world);
    let Some(source) = from_home("in") else {
        unreachable!()
    };
    let kind = VolumeKind::Cache {
        source,
        cooperative: String::new(),
        replacement: ReplacementPolicy::Lru,
        block_bytes: 4096,
    };
    let spec = VolumeSpec {
        kind,
        ..spec(1, None)
    };
    let node = world.node(A, world.config(store.path())).await;
    world.create(A, spec).await.expect("create");
    let place = store.path().join("cache").join(VolumeId(1).to_string());
    assert!(place.is_dir());
    world.network.kill(A);
    drop(node);
    // As if the node had died between making the volume and writing its row.
    std::fs::remove_file(store.path().join("table.redb")).expect("remove");
    world.node(A, world.config(store.path())).await;
    assert!(!place.exists(), "its space would never be free again");
}

#[tokio::test(flavor = "multi_thread")]
async fn names_with_deceptive_characters_are_refused() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let _node = world.node(A, world.config(store.path())).await;
    for bad in ["ok\u{202e}gnp", "a\u{200b}", "a\u{1b}[31m", "\u{2066}x"] {
        let named = VolumeSpec {
            name: bad.to_owned(),
            ..spec(1, None)
        };
        let owned = VolumeSpec {
            owner: format!("me\n{bad}"),
            ..spec(1, None)
        };
        for spec in [named, owned] {
            let refused = world.create(A, spec).await.expect_err("refused");
            assert_eq!(refused.code, ErrorCode::BadPath, "{refused}");
            assert!(
                !refused.detail.contains(['\u{202e}', '\u{1b}']),
                "{refused}"
            );
        }
    }
    world.create(A, spec(1, None)).await.expect("create");
    let call = ExtractFile {
        volume: VolumeId(1),
        path: "f".to_owned(),
        selections: Vec::new(),
        extraction: ExtractionId(1),
        home_address: HOME.to_owned(),
        home_id: None,
        target_path: "out/\u{202e}x".to_owned(),
        home_token: world.token.clone(),
        fence: None,
    };
    let refused = world.call(A, call).await;
    assert_eq!(refused.expect_err("refused").code, ErrorCode::BadPath);
}
