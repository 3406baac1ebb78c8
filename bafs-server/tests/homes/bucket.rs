//! Homes in an object store: s3s-fs.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bafs_proto::ErrorCode;
use bafs_proto::hash::Digest;

use super::foreign_servers::{ForeignServer, s3};
use super::proxy::DelayProxy;
use super::test_node::{HomesFixture, check_error};
use crate::test_nodes::random_bytes;

const HOME: &str = "s3://bucket";

const LOGIN: Option<(&str, &str)> = Some(("key", "secret"));

/// Without a key: the bucket is asked anonymously.
fn anonymous(port: u16) -> String {
    format!(
        "[[home]]\nurl = \"s3://bucket\"\nendpoint = \"http://127.0.0.1:{port}\"\n\
         region = \"us-east-1\"\n"
    )
}

fn settings(server: &ForeignServer, secret: &str) -> String {
    format!(
        "[[home]]\nurl = \"s3://bucket\"\nendpoint = \"http://127.0.0.1:{}\"\n\
         region = \"us-east-1\"\naccess_key_id = \"key\"\nsecret_access_key = \"{secret}\"\n",
        server.port
    )
}

fn store_object(root: &Path, path: &str, content: &[u8]) {
    let path = root.join("bucket").join(path);
    std::fs::create_dir_all(path.parent().expect("parent")).expect("directory");
    std::fs::write(path, content).expect("object");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_supports_fills_caches_and_results() {
    let root = tempfile::tempdir().expect("root");
    let (large, small) = (random_bytes(2_500_000, 2), random_bytes(1_000, 3));
    store_object(root.path(), "in/large", &large);
    store_object(root.path(), "in/sub-1/small", &small);
    store_object(root.path(), "in/sub/empty", b"");
    let test = "a_bucket_supports_fills_caches_and_results";
    let Some(server) = s3(test, root.path(), LOGIN) else {
        return;
    };
    let stage = HomesFixture::new(&settings(&server, "secret")).await;

    let tree = stage.fill_volume(1, HOME, "in").await.expect("fill");
    let file = |path: &str| std::fs::read(tree.join(path)).expect("file");
    assert_eq!(file("large"), large);
    assert_eq!(file("sub-1/small"), small);
    assert!(file("sub/empty").is_empty());

    stage.cache(2, HOME, "in").await.expect("cache");
    assert_eq!(stage.read(2, "large").await.expect("read"), large);
    store_object(root.path(), "in/sub-1/small", &random_bytes(1_001, 4));
    let changed = stage.read(2, "sub-1/small").await;
    assert_eq!(
        check_error(changed, &["sub-1/small"]).code,
        ErrorCode::SourceChanged
    );

    // More than one part, and none at all.
    let result = random_bytes(11_000_000, 5);
    stage.volume_with(3, "result", &result).await;
    let receipt = stage.extract(1, (3, "result"), (HOME, "out/result")).await;
    assert_eq!(receipt.expect("extract").digest, Digest::of(&result));
    stage.volume_with(4, "nothing", b"").await;
    let receipt = stage
        .extract(2, (4, "nothing"), (HOME, "out/nothing"))
        .await;
    assert_eq!(receipt.expect("extract").size, 0);
    let object = |path: &str| std::fs::read(root.path().join("bucket").join(path));
    assert!(object("out/result").expect("object") == result);
    assert!(object("out/nothing").expect("object").is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn bucket_errors_explain_the_cause() {
    let root = tempfile::tempdir().expect("root");
    store_object(root.path(), "a", b"a");
    let Some(server) = s3("bucket_errors_explain_the_cause", root.path(), LOGIN) else {
        return;
    };
    let stage = HomesFixture::new(&settings(&server, "wrong")).await;
    let refused = stage.fill_volume(1, HOME, "").await;
    let refused = check_error(refused, &["permission denied", "homes.toml"]);
    assert_eq!(refused.code, ErrorCode::RightMissing);
    let unknown = stage.fill_volume(2, "s3://other", "").await;
    let unknown = check_error(unknown, &["no credentials for s3://other"]);
    assert_eq!(unknown.code, ErrorCode::RightMissing);

    let stage = HomesFixture::new(&settings(&server, "secret")).await;
    let missing = stage.fill_volume(1, HOME, "nothing").await;
    assert_eq!(
        check_error(missing, &["'nothing'"]).code,
        ErrorCode::NotFound
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn anonymous_access_works_for_open_buckets_only() {
    let root = tempfile::tempdir().expect("root");
    let content = random_bytes(300_000, 6);
    store_object(root.path(), "in/a", &content);
    let test = "anonymous_access_works_for_open_buckets_only";
    let Some(open) = s3(test, root.path(), None) else {
        return;
    };
    let stage = HomesFixture::new(&anonymous(open.port)).await;
    let tree = stage.fill_volume(1, HOME, "in").await.expect("fill");
    assert_eq!(std::fs::read(tree.join("a")).expect("file"), content);
    stage.cache(2, HOME, "in").await.expect("cache");
    assert_eq!(stage.read(2, "a").await.expect("read"), content);
    let result = random_bytes(9_000_000, 7);
    stage.volume_with(3, "result", &result).await;
    let receipt = stage.extract(1, (3, "result"), (HOME, "out")).await;
    assert_eq!(receipt.expect("extract").digest, Digest::of(&result));

    let closed = s3(test, root.path(), LOGIN).expect("it is there");
    let stage = HomesFixture::new(&anonymous(closed.port)).await;
    let refused = stage.fill_volume(1, HOME, "in").await;
    let refused = check_error(refused, &["permission denied", "homes.toml"]);
    assert_eq!(refused.code, ErrorCode::RightMissing);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timed_out_upload_completes_on_retry() {
    let root = tempfile::tempdir().expect("root");
    std::fs::create_dir(root.path().join("bucket")).expect("bucket");
    let test = "a_timed_out_upload_completes_on_retry";
    let Some(server) = s3(test, root.path(), None) else {
        return;
    };
    let begun: Arc<AtomicU32> = Arc::default();
    let counted = begun.clone();
    let proxy = DelayProxy::in_front_of(server.port, move |_, piece| {
        let text = String::from_utf8_lossy(piece);
        let is_post = text.starts_with("POST ");
        if is_post && text.contains("uploads") {
            counted.fetch_add(1, Ordering::Relaxed);
        }
        let is_last = is_post && text.contains("uploadId=");
        Duration::from_secs(if is_last { 5 } else { 0 })
    });
    let proxy = proxy.await;
    let stage = HomesFixture::new(&anonymous(proxy.port)).await;
    let result = random_bytes(9_000_000, 7);
    stage.volume_with(1, "result", &result).await;
    let (from, to) = ((1, "result"), (HOME, "out"));
    let token = stage.world.token.clone();
    let late = stage.extract_for((&token, 3_000), 1, from, to).await;
    assert_eq!(check_error(late, &[]).code, ErrorCode::DeadlineExceeded);
    let receipt = stage.extract(1, from, to).await.expect("extract");
    assert_eq!(receipt.digest, Digest::of(&result));
    let object = std::fs::read(root.path().join("bucket/out"));
    assert!(object.expect("object") == result);
    assert_eq!(begun.load(Ordering::Relaxed), 1);
}
