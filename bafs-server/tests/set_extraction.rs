//! Sets of files go home with a manifest that says when they are whole.

use std::path::Path;

use bafs_proto::ErrorCode;
use bafs_proto::file_set::{FileSelection, MANIFEST_NAME, SetManifest};
use bafs_proto::hash::Digest;
use bafs_proto::ids::{ExtractionId, VolumeId};
use bafs_proto::message::{DeleteVolume, ExtractFile};
use bafs_server::home_server;

use crate::test_nodes::{A, HOME, NodeCluster, random_bytes, spec, tree};

const B: &str = "b:1";

fn extract_set(id: u128, words: &[&str], world: &NodeCluster) -> ExtractFile {
    ExtractFile {
        volume: VolumeId(1),
        path: words.join(" "),
        selections: words.iter().map(|it| FileSelection::of_word(it)).collect(),
        extraction: ExtractionId(id),
        home_address: HOME.to_owned(),
        home_id: None,
        target_path: "out/set".to_owned(),
        home_token: world.token.clone(),
        fence: None,
    }
}

fn start_home(world: &NodeCluster, store: &Path, root: &Path) {
    let verifier = world.config(store).identity.verifier;
    let home = home_server::HomeServer::open(root, verifier, None).expect("home");
    world.network.listen(HOME, home);
}

fn read_manifest(root: &Path) -> SetManifest {
    let text = std::fs::read(root.join("out/set").join(MANIFEST_NAME)).expect("a manifest");
    serde_json::from_slice(&text).expect("a manifest")
}

/// Each file of the manifest is at home as it says.
fn check_files(root: &Path, manifest: &SetManifest) {
    assert!(manifest.complete);
    let mut bytes = 0;
    for file in &manifest.files {
        let content = std::fs::read(root.join("out/set").join(&file.path)).expect("a file");
        assert_eq!(content.len() as u64, file.bytes, "{}", file.path);
        assert_eq!(
            Digest::of(&content).to_string(),
            file.blake3,
            "{}",
            file.path
        );
        bytes += file.bytes;
    }
    assert_eq!(bytes, manifest.bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_goes_home_with_its_manifest() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let root = tempfile::tempdir().expect("root");
    start_home(&world, store.path(), root.path());
    let node = world.node(A, world.config(store.path())).await;
    world.create(A, spec(1, None)).await.expect("create");
    let volume = tree(store.path(), 1);
    std::fs::create_dir_all(volume.join("res/deep/empty")).expect("mkdir");
    for number in 0..150 {
        let content = random_bytes(number * 7, number as u64);
        std::fs::write(volume.join(format!("res/{number}")), content).expect("write");
    }
    std::fs::write(volume.join("res/deep/big"), random_bytes(2_500_000, 3)).expect("write");
    std::os::unix::fs::symlink("../0", volume.join("res/deep/link")).expect("link");
    let call = extract_set(1, &["res/"], &world);
    let receipt = world.call(A, call.clone()).await.expect("receipt");
    let manifest = read_manifest(root.path());
    check_files(root.path(), &manifest);
    assert_eq!(manifest.files.len(), 152);
    assert_eq!(receipt.size, manifest.bytes);
    assert_eq!(receipt.path, format!("out/set/{MANIFEST_NAME}"));
    let paths: Vec<_> = manifest.files.iter().map(|file| &*file.path).collect();
    assert!(paths.is_sorted() && paths.contains(&"deep/big") && paths.contains(&"deep/link"));
    // The proof outlives the volume.
    let volume = VolumeId(1);
    let deleted = world.call(A, DeleteVolume { volume }).await;
    deleted.expect("delete");
    world.network.kill(A);
    drop(node);
    let _node = world.node(B, world.config(store.path())).await;
    assert_eq!(world.call(B, call).await, Ok(receipt));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_set_replaces_the_older_one() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let root = tempfile::tempdir().expect("root");
    start_home(&world, store.path(), root.path());
    let _node = world.node(A, world.config(store.path())).await;
    world.create(A, spec(1, None)).await.expect("create");
    let volume = tree(store.path(), 1);
    let write = |name: &str, text: &str| std::fs::write(volume.join(name), text).expect("write");
    write("a.bam", "old");
    write("b.bam", "old");
    let sent = world.call(A, extract_set(1, &["*.bam"], &world)).await;
    sent.expect("first");
    write("a.bam", "newer");
    std::fs::remove_file(volume.join("b.bam")).expect("remove");
    write("c.bam", "newer");
    let sent = world.call(A, extract_set(2, &["*.bam"], &world)).await;
    sent.expect("second");
    let manifest = read_manifest(root.path());
    check_files(root.path(), &manifest);
    let paths: Vec<_> = manifest.files.iter().map(|file| &*file.path).collect();
    assert_eq!(
        paths,
        ["a.bam", "c.bam"],
        "the older set's file is none of it"
    );
    assert_eq!(manifest.extraction, ExtractionId(2).to_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_set_is_marked_incomplete() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let root = tempfile::tempdir().expect("root");
    start_home(&world, store.path(), root.path());
    let _node = world.node(A, world.config(store.path())).await;
    world.create(A, spec(1, None)).await.expect("create");
    let volume = tree(store.path(), 1);
    std::fs::write(volume.join("a"), "old").expect("write");
    std::fs::write(volume.join("b"), "old").expect("write");
    let sent = world.call(A, extract_set(1, &["a", "b"], &world)).await;
    sent.expect("first");
    // The second file of the new set has no place at home.
    std::fs::write(volume.join("a"), random_bytes(100_000, 5)).expect("write");
    std::fs::remove_file(root.path().join("out/set/b")).expect("remove");
    std::fs::create_dir(root.path().join("out/set/b")).expect("mkdir");
    let sent = world.call(A, extract_set(2, &["a", "b"], &world)).await;
    sent.expect_err("a directory is in its place");
    let manifest = read_manifest(root.path());
    assert!(!manifest.complete && manifest.files.is_empty());
    // What is at home already is not sent again.
    let before = world.counter(HOME, "home_written_bytes").await;
    std::fs::remove_dir(root.path().join("out/set/b")).expect("rmdir");
    let sent = world.call(A, extract_set(2, &["a", "b"], &world)).await;
    sent.expect("the same set goes on");
    let written = world.counter(HOME, "home_written_bytes").await - before;
    assert!(written < 10_000, "{written} bytes");
    check_files(root.path(), &read_manifest(root.path()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_set_leaves_the_older_one_whole() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let root = tempfile::tempdir().expect("root");
    start_home(&world, store.path(), root.path());
    let _node = world.node(A, world.config(store.path())).await;
    world.create(A, spec(1, None)).await.expect("create");
    let volume = tree(store.path(), 1);
    std::fs::write(volume.join("a.bam"), "old").expect("write");
    let sent = world.call(A, extract_set(1, &["*.bam"], &world)).await;
    sent.expect("first");
    std::fs::write(volume.join("a.bam"), "newer").expect("write");
    std::os::unix::fs::symlink("nowhere", volume.join("z.bam")).expect("link");
    let sent = world.call(A, extract_set(2, &["*.bam"], &world)).await;
    let refused = sent.expect_err("a link leads nowhere");
    assert_eq!(refused.code, ErrorCode::BadPath, "{refused}");
    assert!(refused.detail.contains("'z.bam'"), "{refused}");
    let manifest = read_manifest(root.path());
    check_files(root.path(), &manifest);
    assert_eq!(manifest.extraction, ExtractionId(1).to_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn empty_sets_are_missing_files() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let root = tempfile::tempdir().expect("root");
    start_home(&world, store.path(), root.path());
    let _node = world.node(A, world.config(store.path())).await;
    world.create(A, spec(1, None)).await.expect("create");
    std::fs::write(tree(store.path(), 1).join("a"), "x").expect("write");
    let sent = world.call(A, extract_set(1, &["a", "*.bam"], &world)).await;
    let missing = sent.expect_err("one pattern finds nothing");
    assert_eq!(missing.code, ErrorCode::NotFound);
    assert!(missing.detail.contains("'*.bam'"), "{missing}");
    assert!(!root.path().join("out").exists(), "nothing was sent");
}
