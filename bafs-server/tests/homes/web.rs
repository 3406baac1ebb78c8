//! Homes behind a web server: nginx.

use bafs_proto::ErrorCode;

use crate::servers::nginx;
use crate::stage::{Stage, says};
use crate::storage_world::noise;

#[tokio::test(flavor = "multi_thread")]
async fn a_file_of_a_web_server_fills_volumes_and_is_cached() {
    let root = tempfile::tempdir().expect("root");
    let content = noise(700_001, 1);
    std::fs::create_dir(root.path().join("d")).expect("directory");
    std::fs::write(root.path().join("d/a file"), &content).expect("file");
    let nginx = nginx(root.path());
    let address = format!("http://127.0.0.1:{}", nginx.port);
    let stage = Stage::new("").await;

    let tree = stage.fill(1, &address, "d/a file").await.expect("fill");
    assert_eq!(std::fs::read(tree.join("a file")).expect("file"), content);
    stage.cache(2, &address, "d/a file").await.expect("cache");
    assert_eq!(stage.read(2, "a file").await.expect("read"), content);

    let missing = stage.fill(3, &address, "d/nothing").await;
    assert_eq!(
        says(missing, &["d/nothing", "no such file", "bafs.list"]).code,
        ErrorCode::NotFound
    );
}
