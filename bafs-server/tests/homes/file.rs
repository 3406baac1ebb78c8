//! Homes in directories of the node's machine.

use std::os::unix::fs::symlink;

use bafs_proto::ErrorCode;
use bafs_proto::ids::{ExtractionId, VolumeId};
use bafs_proto::message::{ExtractFile, IssueUploadEpoch, UploadFence};
use bafs_proto::time::Time;
use bafs_proto::token::{Resource, Right};

use super::test_node::{HomesFixture, NODE, check_error};
use crate::test_nodes::random_bytes;

const HOME: &str = "file://";

#[tokio::test(flavor = "multi_thread")]
async fn a_permitted_directory_serves_as_a_home() {
    let root = tempfile::tempdir().expect("root");
    let root = root.path().canonicalize().expect("root");
    let content = random_bytes(300_000, 1);
    std::fs::create_dir(root.join("in")).expect("directory");
    std::fs::write(root.join("in/a"), &content).expect("file");
    let settings = format!("[[home]]\nurl = \"file://{}\"\n", root.display());
    let stage = HomesFixture::new(&settings).await;
    let at = |path: &str| {
        format!("{}/{path}", root.display())
            .trim_start_matches('/')
            .to_owned()
    };

    let tree = stage.fill_volume(1, HOME, &at("in")).await.expect("fill");
    assert_eq!(std::fs::read(tree.join("a")).expect("file"), content);
    stage.cache(2, HOME, &at("in")).await.expect("cache");
    assert_eq!(stage.read(2, "a").await.expect("read"), content);
    stage.volume_with(3, "result", &content).await;
    let receipt = stage
        .extract(1, (3, "result"), (HOME, &at("out/result")))
        .await;
    assert_eq!(receipt.expect("extract").path, at("out/result"));
    assert_eq!(
        std::fs::read(root.join("out/result")).expect("result"),
        content
    );

    let outside = stage.fill_volume(4, HOME, "etc").await;
    let outside = check_error(outside, &["may not use file:///etc", "homes.toml"]);
    assert_eq!(outside.code, ErrorCode::RightMissing);
    let beside = stage
        .fill_volume(5, HOME, &format!("{}x", at("")).replace("/x", "x"))
        .await;
    assert_eq!(
        check_error(beside, &["may not use"]).code,
        ErrorCode::RightMissing
    );
    let kind = stage.fill_volume(6, "gopher://h", "a").await;
    let kind = check_error(kind, &["unknown scheme 'gopher'"]);
    assert_eq!(kind.code, ErrorCode::Unsupported);
}

#[tokio::test(flavor = "multi_thread")]
async fn late_uploads_to_directories_are_refused() {
    let root = tempfile::tempdir().expect("root");
    let root = root.path().canonicalize().expect("root");
    let settings = format!("[[home]]\nurl = \"file://{}\"\n", root.display());
    let stage = HomesFixture::new(&settings).await;
    let target = format!("{}/r", root.display());
    let target = target.trim_start_matches('/');
    let issue = async || {
        let call = IssueUploadEpoch {
            home_address: Some(HOME.to_owned()),
            home_id: None,
            path: target.to_owned(),
        };
        let epoch = stage.world.call(NODE, call).await.expect("an epoch").epoch;
        Some(UploadFence { epoch, order: 0 })
    };
    let (old, new) = (issue().await, issue().await);
    for (id, word) in [(1, "old"), (2, "new")] {
        stage.volume_with(id, "result", word.as_bytes()).await;
    }
    let extract = |id: u128, fence| ExtractFile {
        volume: VolumeId(id),
        path: "result".to_owned(),
        selections: Vec::new(),
        extraction: ExtractionId(id),
        home_address: HOME.to_owned(),
        home_id: None,
        target_path: target.to_owned(),
        home_token: stage.world.token.clone(),
        fence,
    };
    let sent = stage.world.call(NODE, extract(2, new)).await;
    sent.expect("it is the latest");
    let late = stage.world.call(NODE, extract(1, old)).await;
    let late = check_error(late, &["a later upload"]);
    assert_eq!(late.code, ErrorCode::UploadFenced);
    assert_eq!(std::fs::read(root.join("r")).expect("read"), b"new");
}

/// The directory that a node may use is of all; Alice has a token for a part of it.
#[tokio::test(flavor = "multi_thread")]
async fn links_cannot_leave_the_token_scope() {
    let root = tempfile::tempdir().expect("root");
    let root = root.path().canonicalize().expect("root");
    for path in ["alice", "bob"] {
        std::fs::create_dir(root.join(path)).expect("directory");
    }
    symlink("../bob", root.join("alice/x")).expect("link");
    symlink("alice", root.join("a")).expect("link");
    let settings = format!("[[home]]\nurl = \"file://{}\"\n", root.display());
    let stage = HomesFixture::new(&settings).await;
    let at = |path: &str| {
        let path = format!("{}/{path}", root.display());
        path.trim_start_matches('/').to_owned()
    };
    let granted = ["alice", "a"].map(|path| Resource::Home(at(path)));
    let signer = stage.world.authority.signer();
    let rights = [Right::Read, Right::Write];
    let token = signer.grant(&granted, &rights, Time(u64::MAX >> 1));
    let token = token.expect("token");
    stage.volume_with(1, "result", b"hers").await;
    let put = async |extract, target: &str| {
        let target = at(target);
        stage
            .extract_for((&token, 20_000), extract, (1, "result"), (HOME, &target))
            .await
    };
    put(1, "alice/own").await.expect("her own");
    put(2, "a/by-link").await.expect("her own, by a link");
    assert!(root.join("alice/by-link").exists());
    let beside = check_error(put(3, "alice/x/beside").await, &["symbolic link", "bob"]);
    assert_eq!(beside.code, ErrorCode::RightMissing);
    assert!(!root.join("bob/beside").exists());
}

/// Whoever writes where a shared file system was mounted before writes to a local disk.
#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_home_directory_receives_no_results() {
    let base = tempfile::tempdir().expect("base");
    let base = base.path().canonicalize().expect("base");
    let (root, away) = (base.join("shared"), base.join("away"));
    std::fs::create_dir(&root).expect("directory");
    let settings = format!("[[home]]\nurl = \"file://{}\"\n", root.display());
    let stage = HomesFixture::new(&settings).await;
    let target = |name: &str| {
        let path = format!("{}/{name}", root.display());
        path.trim_start_matches('/').to_owned()
    };
    stage.volume_with(1, "result", b"hers").await;
    let wait = (&stage.world.token, 2_000);
    let put = async |extract, name: &str| {
        stage
            .extract_for(wait, extract, (1, "result"), (HOME, &target(name)))
            .await
    };
    put(1, "one").await.expect("there");
    std::fs::rename(&root, &away).expect("rename");
    std::fs::create_dir(&root).expect("directory");
    let gone = check_error(put(2, "two").await, &["is gone", "put it back"]);
    assert_eq!(gone.code, ErrorCode::ServerFault);
    assert!(!root.join("two").exists() && !away.join("two").exists());
    std::fs::remove_dir(&root).expect("remove");
    std::fs::rename(&away, &root).expect("rename");
    put(3, "three").await.expect("there again");
    assert!(root.join("three").exists());
}
