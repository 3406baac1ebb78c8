//! Homes behind SSH: OpenSSH.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bafs_proto::ErrorCode;
use bafs_proto::hash::Digest;
use bafs_proto::path::from_bytes;
use bafs_proto::source_warning::WarningReason;

use super::foreign_servers::sshd;
use super::proxy::DelayProxy;
use super::test_node::{HomesFixture, check_error};
use crate::test_nodes::random_bytes;

fn path(root: &Path, below: &str) -> String {
    let path = root.join(below).display().to_string();
    path.trim_start_matches('/').to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn sftp_reads_and_writes_non_utf8_names() {
    let (ssh, root) = (sshd(), tempfile::tempdir().expect("root"));
    let root = root.path();
    let at = |path: &[u8]| root.join(OsStr::from_bytes(path));
    std::fs::create_dir_all(at(b"in/d\xe9")).expect("directory");
    std::fs::create_dir(at(b"in/empty")).expect("directory");
    std::fs::write(at(b"in/d\xe9/\xff"), b"bytes").expect("file");
    nix::unistd::mkfifo(&at(b"in/fifo"), nix::sys::stat::Mode::S_IRUSR).expect("fifo");
    let address = format!("sftp://127.0.0.1:{}", ssh.server.port);
    let stage = HomesFixture::new(&ssh.settings("key")).await;
    let tree = stage.fill_volume(1, &address, &path(root, "in")).await;
    let tree = tree.expect("fill");
    let filled = tree.join(OsStr::from_bytes(b"d\xe9/\xff"));
    assert_eq!(std::fs::read(filled).expect("file"), b"bytes");
    assert!(tree.join("empty").is_dir());
    let told = stage.warnings(1).await;
    let told: Vec<_> = told
        .iter()
        .map(|it| (it.path.as_str(), it.reason))
        .collect();
    assert_eq!(told, [("fifo", WarningReason::SpecialFile)]);
    stage
        .cache(2, &address, &path(root, "in"))
        .await
        .expect("cache");
    let file = from_bytes(b"d\xe9/\xff");
    assert_eq!(stage.read(2, &file).await.expect("read"), b"bytes");
    stage.volume_with(3, "result", b"r").await;
    let target = format!("{}/{file}", path(root, "out"));
    let sent = stage.extract(1, (3, "result"), (&address, &target)).await;
    sent.expect("extract");
    assert_eq!(std::fs::read(at(b"out/d\xe9/\xff")).expect("file"), b"r");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ssh_host_supports_fills_caches_and_results() {
    let (ssh, root) = (sshd(), tempfile::tempdir().expect("root"));
    let root = root.path();
    let (large, small) = (random_bytes(3_000_000, 2), random_bytes(1_000, 3));
    std::fs::create_dir_all(root.join("in/sub")).expect("directory");
    std::fs::write(root.join("in/large"), &large).expect("file");
    std::fs::write(root.join("in/sub/small"), &small).expect("file");
    std::fs::write(root.join("in/sub/empty"), b"").expect("file");
    std::os::unix::fs::symlink("sub/small", root.join("in/link")).expect("link");
    let address = format!("sftp://127.0.0.1:{}", ssh.server.port);
    let stage = HomesFixture::new(&ssh.settings("key")).await;

    let tree = stage.fill_volume(1, &address, &path(root, "in")).await;
    let tree = tree.expect("fill");
    let file = |path: &str| std::fs::read(tree.join(path)).expect("file");
    assert!(file("large") == large);
    assert_eq!(file("link"), small);
    assert!(file("sub/empty").is_empty());

    let source = path(root, "in");
    stage.cache(2, &address, &source).await.expect("cache");
    assert!(stage.read(2, "large").await.expect("read") == large);
    std::fs::write(root.join("in/sub/small"), random_bytes(1_001, 4)).expect("file");
    let changed = stage.read(2, "sub/small").await;
    assert_eq!(
        check_error(changed, &["sub/small"]).code,
        ErrorCode::SourceChanged
    );
    std::fs::remove_file(root.join("in/sub/small")).expect("file");
    let gone = stage.read(2, "sub/small").await;
    assert_eq!(
        check_error(gone, &["no longer exists"]).code,
        ErrorCode::SourceChanged
    );

    let result = random_bytes(2_500_000, 5);
    stage.volume_with(3, "result", &result).await;
    let target = path(root, "out/deep/result");
    for extract in [1, 2] {
        // The second one replaces the first.
        let receipt = stage
            .extract(extract, (3, "result"), (&address, &target))
            .await;
        assert_eq!(receipt.expect("extract").digest, Digest::of(&result));
    }
    let out = root.join("out/deep");
    assert!(std::fs::read(out.join("result")).expect("result") == result);
    assert_eq!(std::fs::read_dir(&out).expect("directory").count(), 1);
    let mode = std::fs::metadata(out.join("result"))
        .expect("result")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o644);
    let at = format!("{}/", path(root, "in"));
    stage
        .check_resumption(&address, (&root.join("in"), &at))
        .await;
    stage
        .check_changed_target(&address, (&root.join("in"), &at))
        .await;
    stage.volume_with(4, "nothing", b"").await;
    let target = path(root, "out/nothing");
    let receipt = stage.extract(3, (4, "nothing"), (&address, &target)).await;
    assert_eq!(receipt.expect("extract").size, 0);
    assert_eq!(
        std::fs::metadata(root.join("out/nothing"))
            .expect("file")
            .len(),
        0
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn ssh_errors_explain_the_cause() {
    let (ssh, root) = (sshd(), tempfile::tempdir().expect("root"));
    let address = format!("sftp://127.0.0.1:{}", ssh.server.port);
    let stage = HomesFixture::new(&ssh.settings("other")).await;
    let refused = stage.fill_volume(1, &address, "etc").await;
    let refused = check_error(refused, &[&address, "Permission denied", "homes.toml"]);
    assert_eq!(refused.code, ErrorCode::RightMissing);
    let unknown = stage.fill_volume(2, "sftp://elsewhere", "etc").await;
    check_error(unknown, &["no credentials for sftp://elsewhere"]);

    let stage = HomesFixture::new(&ssh.settings("key")).await;
    let missing = stage
        .fill_volume(1, &address, &path(root.path(), "nothing"))
        .await;
    assert_eq!(
        check_error(missing, &["no such file"]).code,
        ErrorCode::NotFound
    );
    stage.volume_with(2, "a", b"a").await;
    let target = stage.extract(1, (2, "a"), (&address, "proc/a")).await;
    check_error(target, &["proc/a"]);
}

/// Files below `root` that anybody has open.
fn open_files(root: &Path) -> usize {
    let processes = std::fs::read_dir("/proc").expect("proc").flatten();
    let files = processes.filter_map(|process| std::fs::read_dir(process.path().join("fd")).ok());
    let targets = files.flatten().flatten();
    let targets = targets.filter_map(|file| std::fs::read_link(file.path()).ok());
    targets.filter(|target| target.starts_with(root)).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn abandoned_calls_leave_no_open_ssh_files() {
    let (ssh, root) = (sshd(), tempfile::tempdir().expect("root"));
    let is_slow: Arc<AtomicBool> = Arc::default();
    let slow = is_slow.clone();
    let proxy = DelayProxy::in_front_of(ssh.server.port, move |_, _| {
        Duration::from_millis(if slow.load(Ordering::Relaxed) { 100 } else { 0 })
    });
    let proxy = proxy.await;
    let address = format!("sftp://127.0.0.1:{}", proxy.port);
    let stage = HomesFixture::new(&ssh.settings_at(proxy.port, "key")).await;
    stage
        .volume_with(1, "result", &random_bytes(300_000, 1))
        .await;
    let token = stage.world.token.clone();
    let target = path(root.path(), "result");
    let to = (address.as_str(), target.as_str());
    stage.extract(1, (1, "result"), to).await.expect("extract");

    is_slow.store(true, Ordering::Relaxed);
    // It is opened to be written and opened to be read back: some end between that and its close.
    for step in 1..10 {
        let until = (&token, 150 * step);
        let extract = 1 + u128::from(step);
        let _ = stage.extract_for(until, extract, (1, "result"), to).await;
    }
    is_slow.store(false, Ordering::Relaxed);
    for _ in 0..100 {
        if open_files(root.path()) == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("{} files are still open", open_files(root.path()));
}
