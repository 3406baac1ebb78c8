//! Homes in directories of the node's machine.

use bafs_proto::ErrorCode;

use super::stage::{Stage, says};
use crate::storage_world::noise;

const HOME: &str = "file://";

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_is_a_home_as_far_as_it_is_permitted() {
    let root = tempfile::tempdir().expect("root");
    let root = root.path().canonicalize().expect("root");
    let content = noise(300_000, 1);
    std::fs::create_dir(root.join("in")).expect("directory");
    std::fs::write(root.join("in/a"), &content).expect("file");
    let settings = format!("[[home]]\nurl = \"file://{}\"\n", root.display());
    let stage = Stage::new(&settings).await;
    let at = |path: &str| {
        format!("{}/{path}", root.display())
            .trim_start_matches('/')
            .to_owned()
    };

    let tree = stage.fill(1, HOME, &at("in")).await.expect("fill");
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

    let outside = stage.fill(4, HOME, "etc").await;
    let outside = says(outside, &["may not use file:///etc", "homes.toml"]);
    assert_eq!(outside.code, ErrorCode::RightMissing);
    let beside = stage
        .fill(5, HOME, &format!("{}x", at("")).replace("/x", "x"))
        .await;
    assert_eq!(says(beside, &["may not use"]).code, ErrorCode::RightMissing);
    let kind = stage.fill(6, "gopher://h", "a").await;
    let kind = says(kind, &["'gopher' is no kind of home"]);
    assert_eq!(kind.code, ErrorCode::Unsupported);
}
