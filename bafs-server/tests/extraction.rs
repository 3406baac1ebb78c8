//! Results go home exactly once, whatever breaks on the way.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::test_nodes::{
    A, HOME, NodeCluster, from_home, populated_home, random_bytes, spec, tree,
};
use bafs_proto::ErrorCode;
use bafs_proto::hash::Digest;
use bafs_proto::ids::{ExtractionId, ServerId, VolumeId};
use bafs_proto::message::{CreateVolume, DeleteVolume, ExtractFile, PutReceipt};
use bafs_proto::net::Service;
use bafs_proto::volume::{VolumeSource, VolumeSpec, VolumeState};
use bafs_server::home_server;

const B: &str = "b:1";

fn extract(id: u128, volume: u128, path: &str, target: &str, world: &NodeCluster) -> ExtractFile {
    ExtractFile {
        volume: VolumeId(volume),
        path: path.to_owned(),
        selections: Vec::new(),
        extraction: ExtractionId(id),
        home_address: HOME.to_owned(),
        home_id: None,
        target_path: target.to_owned(),
        home_token: world.token.clone(),
        fence: None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_leaving_the_volume_is_not_sent() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let _home = populated_home(&world);
    let _node = world.node(A, world.config(store.path())).await;
    world
        .create(A, spec(1, from_home("in")))
        .await
        .expect("create");
    // Whoever reads it sees where the link leads, and what to do.
    let link = tree(store.path(), 1).join("outwards");
    std::os::unix::fs::symlink("/scratch/big", &link).expect("symlink");
    let refused = world
        .call(A, extract(3, 1, "outwards", "out/y", &world))
        .await;
    let refused = refused.expect_err("it leads out");
    assert_eq!(refused.code, ErrorCode::BadPath);
    for part in ["'/scratch/big'", "out of the volume", "a relative path"] {
        assert!(refused.detail.contains(part), "{refused}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_sent_home_exactly_once() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let home = populated_home(&world);
    let node = world.node(A, world.config(store.path())).await;
    world
        .create(A, spec(1, from_home("in")))
        .await
        .expect("create");
    // Pieces whose replies get lost: the upload resumes, and sends nothing twice.
    home.lost_replies.store(3, Ordering::Relaxed);
    let world = Arc::new(world);
    let same: Vec<_> = (0..8)
        .map(|_| {
            let (world, call) = (world.clone(), extract(1, 1, "big", "out/big", &world));
            tokio::spawn(async move { world.call(A, call).await })
        })
        .collect();
    let digest = Digest::of(&random_bytes(3_500_000, 7));
    let expected = PutReceipt {
        extraction: ExtractionId(1),
        path: "out/big".to_owned(),
        size: 3_500_000,
        digest,
    };
    for call in same {
        assert_eq!(call.await.expect("task"), Ok(expected.clone()));
    }
    assert_eq!(home.chunks.load(Ordering::Relaxed), 4);
    assert_eq!(home.commits.load(Ordering::Relaxed), 1);
    assert_eq!(
        home.files.lock().expect("lock")["out/big"],
        random_bytes(3_500_000, 7)
    );
    home.lost_replies.store(2, Ordering::Relaxed);
    let empty = world
        .call(A, extract(9, 1, "empty", "out/empty", &world))
        .await
        .expect("empty");
    assert_eq!(empty.size, 0);
    home.lost_replies.store(0, Ordering::Relaxed);

    let other = world
        .call(A, extract(1, 1, "empty", "out/big", &world))
        .await;
    assert_eq!(other.expect_err("reused").code, ErrorCode::Conflict);
    let missing = world
        .call(A, extract(2, 1, "nix", "out/x", &world))
        .await
        .expect_err("missing");
    assert_eq!(missing.code, ErrorCode::NotFound);
    assert!(missing.detail.contains("nix") && missing.detail.contains(&VolumeId(1).to_string()));
    for (path, code) in [("out", ErrorCode::BadPath), ("../x", ErrorCode::BadPath)] {
        let refused = world.call(A, extract(3, 1, path, "out/y", &world)).await;
        assert_eq!(refused.expect_err(path).code, code);
    }

    // The receipt outlives the volume and the node.
    world
        .call(
            A,
            DeleteVolume {
                volume: VolumeId(1),
            },
        )
        .await
        .expect("delete");
    world.network.kill(A);
    world.network.kill(HOME);
    drop(node);
    let _node = world.node(B, world.config(store.path())).await;
    let again = world.call(B, extract(1, 1, "big", "out/big", &world)).await;
    assert_eq!(again, Ok(expected));
    let gone = world.call(B, extract(4, 1, "big", "out/z", &world)).await;
    assert_eq!(gone.expect_err("gone").code, ErrorCode::VolumeLost);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_large_files_are_sent_in_parallel_chunks() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let home = populated_home(&world);
    let _node = world.node(A, world.config(store.path())).await;
    let made = world.create(A, spec(1, from_home("in"))).await;
    made.expect("create");
    home.chunks_awaited.store(3, Ordering::Relaxed);
    let large = extract(1, 1, "big", "out/big", &world);
    world.call(A, large).await.expect("large");
    let sent = home.files.lock().expect("lock")["out/big"].clone();
    assert_eq!(sent, random_bytes(3_500_000, 7));
    let begun = home.begins.load(Ordering::Relaxed);
    let small = extract(2, 1, "sub/small", "out/small", &world);
    let receipt = world.call(A, small).await.expect("small");
    assert_eq!(receipt.digest, Digest::of(b"hello"));
    assert_eq!(
        home.begins.load(Ordering::Relaxed),
        begun,
        "one call is enough"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn many_small_files_go_home_in_packs() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let root = tempfile::tempdir().expect("root");
    let verifier = world.config(store.path()).identity.verifier;
    // A slow link: what comes while a pack is on it goes together.
    let home = home_server::HomeServer::open(root.path(), verifier, Some(100_000)).expect("home");
    world.network.listen(HOME, home);
    let _node = world.node(A, world.config(store.path())).await;
    let many = VolumeSpec {
        size_files: 400,
        ..spec(1, None)
    };
    world.create(A, many).await.expect("create");
    let content = |number: usize| random_bytes(number * 10, number as u64);
    for number in 0..200 {
        let path = tree(store.path(), 1).join(format!("{number:03}"));
        std::fs::write(path, content(number)).expect("write");
    }
    let world = Arc::new(world);
    let sent: Vec<_> = (0..200)
        .map(|number| {
            let (world, path) = (world.clone(), format!("{number:03}"));
            let target = format!("out/{}/{path}", number % 3);
            let call = extract(number as u128 + 1, 1, &path, &target, &world);
            tokio::spawn(async move { world.call(A, call).await })
        })
        .collect();
    for (number, sent) in sent.into_iter().enumerate() {
        let receipt = sent.await.expect("task").expect("receipt");
        assert_eq!(receipt.digest, Digest::of(&content(number)), "{number}");
        let found = std::fs::read(root.path().join(&receipt.path)).expect("read");
        assert!(found == content(number), "{number}");
    }
    let packs = world.counter(HOME, "calls.PutFiles").await;
    let calls = world.counter(HOME, "home_requests").await;
    // The first few find nobody to go with.
    assert!(packs <= 100, "{packs} packs for 200 files");
    assert!(calls <= packs + 5, "{calls} calls for {packs} packs");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_extraction_waits_for_an_unreachable_home() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let home = populated_home(&world);
    let _node = world.node(A, world.config(store.path())).await;
    world
        .create(A, spec(1, from_home("in/sub")))
        .await
        .expect("create");
    world.network.kill(HOME);
    let late = world
        .call_for(A, extract(1, 1, "small", "t", &world), 500)
        .await;
    assert!(late.expect_err("away").is_transient());
    let network = world.network.clone();
    tokio::spawn(async move {
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        network.listen(HOME, home);
    });
    let receipt = world
        .call(A, extract(1, 1, "small", "t", &world))
        .await
        .expect("receipt");
    assert_eq!(receipt.digest, Digest::of(b"hello"));
}

/// Neither reads nor writes go to whoever took the address of the home that is meant.
#[tokio::test(flavor = "multi_thread")]
async fn a_different_home_at_the_address_is_rejected() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let root = tempfile::tempdir().expect("root");
    let verifier = world.config(store.path()).identity.verifier;
    let home = home_server::HomeServer::open(root.path(), verifier, None).expect("home");
    let id = Service::server(&*home);
    std::fs::create_dir(root.path().join("in")).expect("directory");
    std::fs::write(root.path().join("in/f"), b"hello").expect("file");
    world.network.listen(HOME, home);
    let _node = world.node(A, world.config(store.path())).await;
    let fill = |id| {
        Some(VolumeSource::Home {
            address: HOME.to_owned(),
            path: "in".to_owned(),
            id,
        })
    };
    let other = Some(ServerId(id.expect("it has one").0 ^ 1));
    let create = CreateVolume {
        server: None,
        spec: spec(2, fill(other)),
        base: None,
        source_token: world.token.clone(),
    };
    let status = world.call_for(A, create, 1_000).await.expect("status");
    assert_eq!(status.state, VolumeState::Creating, "it waits for its home");
    world.create(A, spec(1, fill(id))).await.expect("create");
    std::fs::write(tree(store.path(), 1).join("big"), random_bytes(3 << 20, 7)).expect("write");
    for (number, path) in [(1, "f"), (3, "big")] {
        let call = |number, home_id, home: &str| ExtractFile {
            home_id,
            home_address: home.to_owned(),
            ..extract(number, 1, path, path, &world)
        };
        let lost = world.call_for(A, call(number, other, HOME), 1_000).await;
        let error = lost.expect_err("another home is there");
        assert!(error.is_transient(), "{error}");
        assert!(!root.path().join(path).exists(), "it went to another home");
        let sent = world.call(A, call(number + 1, id, HOME)).await;
        sent.expect("receipt");
        assert!(root.path().join(path).exists());
        // Who asks again may have heard that it moved.
        let again = world.call(A, call(number + 1, id, "h:2")).await;
        again.expect("the same receipt");
    }
}

/// Pieces travel together; those behind the refused one must not hide why it was refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_home_is_reported_with_its_space() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let root = tempfile::tempdir().expect("root");
    let verifier = world.config(store.path()).identity.verifier;
    let home = home_server::HomeServer::open(root.path(), verifier, None).expect("home");
    world.network.listen(HOME, home);
    let _node = world.node(A, world.config(store.path())).await;
    world.create(A, spec(1, None)).await.expect("create");
    let path = tree(store.path(), 1).join("big");
    std::fs::write(path, random_bytes(6 << 20, 7)).expect("write");
    for number in 1..=8 {
        let data = root.path().join(home_server::OWN_DIRECTORY).join("data");
        let data = data.join(ExtractionId(number).to_string());
        std::os::unix::fs::symlink("/dev/full", data).expect("link");
        let call = extract(number, 1, "big", &format!("out{number}"), &world);
        let error = world.call(A, call).await.expect_err("it is full");
        assert_eq!(error.code, ErrorCode::NoSpaceBytes, "{error}");
        let export = root.path().to_string_lossy();
        for part in ["no space at home", "free at", &*export] {
            assert!(error.detail.contains(part), "{error}");
        }
    }
}

/// Who hears `NotFound` believes that the job did not write the file.
#[tokio::test(flavor = "multi_thread")]
async fn a_missing_home_directory_is_no_missing_file() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let home = populated_home(&world);
    let _node = world.node(A, world.config(store.path())).await;
    world
        .create(A, spec(1, from_home("in/sub")))
        .await
        .expect("create");
    home.misplaced_uploads.store(u32::MAX, Ordering::Relaxed);
    let refused = world.call(A, extract(1, 1, "small", "t", &world)).await;
    let error = refused.expect_err("home has no place for it");
    assert_eq!(error.code, ErrorCode::WrongState, "{error}");
    assert!(error.detail.contains("no such directory"), "{error}");
    home.misplaced_uploads.store(1, Ordering::Relaxed);
    let receipt = world.call(A, extract(1, 1, "small", "t", &world)).await;
    assert_eq!(receipt.expect("it came back").digest, Digest::of(b"hello"));
}
