//! Homes behind FTP: pyftpdlib with the newer commands, vsftpd without.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bafs_proto::ErrorCode;
use bafs_proto::hash::Digest;
use bafs_proto::message::SourceKind;
use bafs_proto::path::from_bytes;
use bafs_proto::source_warning::WarningReason;

use super::foreign_servers::{
    ServerCertificate, pyftpdlib, pyftpdlib_with_tls, pyftpdlib_without_restart, vsftpd,
    vsftpd_with_tls,
};
use super::proxy::DelayProxy;
use super::test_node::{HomesFixture, check_error};
use crate::test_nodes::random_bytes;

/// Fills `root`, which the server of `address` shows, and tries all that reads.
async fn check_reads(stage: &HomesFixture, root: &Path, address: &str) {
    let (large, small) = (random_bytes(3_000_000, 2), random_bytes(1_000, 3));
    std::fs::create_dir_all(root.join("in/a dir")).expect("directory");
    std::fs::write(root.join("in/large"), &large).expect("file");
    std::fs::write(root.join("in/a dir/.small one"), &small).expect("file");
    std::fs::write(root.join("in/a dir/empty"), b"").expect("file");
    std::os::unix::fs::symlink("large", root.join("in/link")).expect("link");

    let tree = stage.fill_volume(1, address, "in").await.expect("fill");
    let file = |path: &str| std::fs::read(tree.join(path)).expect("file");
    assert!(file("large") == large);
    assert!(file("link") == large);
    assert_eq!(file("a dir/.small one"), small);
    assert!(file("a dir/empty").is_empty());
    let tree = stage
        .fill_volume(2, address, "in/large")
        .await
        .expect("fill");
    assert!(std::fs::read(tree.join("large")).expect("file") == large);

    stage.cache(3, address, "").await.expect("cache");
    assert!(stage.read(3, "in/large").await.expect("read") == large);
    std::fs::write(root.join("in/a dir/.small one"), random_bytes(1_001, 4)).expect("file");
    let changed = stage.read(3, "in/a dir/.small one").await;
    assert_eq!(
        check_error(changed, &["small one"]).code,
        ErrorCode::SourceChanged
    );
    std::fs::remove_file(root.join("in/a dir/.small one")).expect("file");
    let gone = stage.read(3, "in/a dir/.small one").await;
    assert_eq!(
        check_error(gone, &["no longer exists"]).code,
        ErrorCode::SourceChanged
    );
    let missing = stage.fill_volume(4, address, "nothing").await;
    assert_eq!(
        check_error(missing, &[address, "nothing"]).code,
        ErrorCode::NotFound
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn modern_ftp_servers_are_read_and_written() {
    let root = tempfile::tempdir().expect("root");
    let server = pyftpdlib(root.path());
    let address = format!("ftp://127.0.0.1:{}", server.port);
    let login = |password: &str| {
        format!("[[home]]\nurl = \"{address}\"\nuser = \"me\"\npassword = \"{password}\"\n")
    };
    let stage = HomesFixture::new(&login("hush")).await;
    check_reads(&stage, root.path(), &address).await;

    let result = random_bytes(2_500_000, 5);
    stage.volume_with(11, "result", &result).await;
    for extract in [1, 2] {
        // The second one replaces the first.
        let target = (address.as_str(), "out/deep/result");
        let receipt = stage.extract(extract, (11, "result"), target).await;
        assert_eq!(receipt.expect("extract").digest, Digest::of(&result));
    }
    let out = root.path().join("out/deep");
    assert!(std::fs::read(out.join("result")).expect("result") == result);
    assert_eq!(std::fs::read_dir(&out).expect("directory").count(), 1);
    stage.check_resumption(&address, (root.path(), "")).await;
    stage
        .check_changed_target(&address, (root.path(), ""))
        .await;
    stage.volume_with(12, "nothing", b"").await;
    let target = (address.as_str(), "nothing");
    let receipt = stage.extract(3, (12, "nothing"), target).await;
    assert_eq!(receipt.expect("extract").size, 0);
    assert_eq!(
        std::fs::metadata(root.path().join("nothing"))
            .expect("file")
            .len(),
        0
    );

    let stage = HomesFixture::new(&login("wrong")).await;
    let refused = stage.fill_volume(1, &address, "in").await;
    let refused = check_error(refused, &["rejects the login of 'me'", "homes.toml"]);
    assert_eq!(refused.code, ErrorCode::RightMissing);
    assert!(!refused.detail.contains("wrong"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn basic_ftp_servers_are_read() {
    let root = tempfile::tempdir().expect("root");
    let all = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(root.path(), all).expect("mode");
    let server = vsftpd(root.path());
    let address = format!("ftp://127.0.0.1:{}", server.port);
    let stage = HomesFixture::new("").await;
    check_reads(&stage, root.path(), &address).await;

    stage.volume_with(11, "result", b"a").await;
    let target = (address.as_str(), "result");
    let refused = stage.extract(1, (11, "result"), target).await;
    let refused = check_error(refused, &["ermission"]);
    assert_eq!(refused.code, ErrorCode::RightMissing);
}

#[tokio::test(flavor = "multi_thread")]
async fn ftp_lists_non_utf8_names_and_closed_directories() {
    let root = tempfile::tempdir().expect("root");
    let mode = |path: &Path, bits| {
        let bits = std::os::unix::fs::PermissionsExt::from_mode(bits);
        std::fs::set_permissions(path, bits).expect("mode");
    };
    mode(root.path(), 0o755);
    let at = |path: &[u8]| root.path().join(OsStr::from_bytes(path));
    for directory in [&b"in"[..], b"in/d\xe9", b"in/entered", b"in/closed"] {
        std::fs::create_dir(at(directory)).expect("directory");
    }
    std::fs::write(at(b"in/d\xe9/\xff\xe9"), b"bytes").expect("file");
    std::fs::write(at(b"in/entered/f"), b"x").expect("file");
    std::os::unix::fs::symlink("nowhere", at(b"in/broken")).expect("link");
    nix::unistd::mkfifo(&at(b"in/fifo"), nix::sys::stat::Mode::S_IRUSR).expect("fifo");
    // The server is another user.
    mode(&at(b"in/entered"), 0o711);
    mode(&at(b"in/closed"), 0o700);
    let server = vsftpd(root.path());
    let address = format!("ftp://127.0.0.1:{}", server.port);
    let stage = HomesFixture::new("").await;
    stage.cache(1, &address, "in").await.expect("cache");
    let (directory, file) = (from_bytes(b"d\xe9"), from_bytes(b"d\xe9/\xff\xe9"));
    assert_eq!(stage.read(1, &file).await.expect("read"), b"bytes");
    let (_, entries) = stage.manifest(1).await;
    let kinds = entries
        .iter()
        .map(|entry| (entry.path.as_str(), entry.kind.clone()));
    let expected = [
        ("closed", SourceKind::UnreadableDirectory),
        (&directory, SourceKind::Directory),
        (&file, SourceKind::File),
        ("entered", SourceKind::UnreadableDirectory),
    ];
    assert_eq!(kinds.collect::<Vec<_>>(), expected);
    let told = stage.warnings(1).await;
    let told = told.iter().map(|it| (it.path.as_str(), it.reason));
    let mut told: Vec<_> = told.collect();
    told.sort_unstable();
    let expected = [
        ("broken", WarningReason::Unreachable),
        ("closed", WarningReason::UnreadableDirectory),
        ("entered", WarningReason::UnreadableDirectory),
        ("fifo", WarningReason::SpecialFile),
    ];
    assert_eq!(told, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silently_dead_connection_is_replaced() {
    let root = tempfile::tempdir().expect("root");
    std::fs::write(root.path().join("a"), random_bytes(1_000, 1)).expect("file");
    let server = pyftpdlib(root.path());
    let seen: Arc<[AtomicUsize; 2]> = Arc::default();
    let shared = seen.clone();
    // Connections before some number lead nowhere any more.
    let proxy = DelayProxy::in_front_of(server.port, move |number, _| {
        let [connections, dead] = &*shared;
        connections.fetch_max(number + 1, Ordering::Relaxed);
        let is_dead = number < dead.load(Ordering::Relaxed);
        Duration::from_secs(if is_dead { 3_600 } else { 0 })
    });
    let proxy = proxy.await;
    let address = format!("ftp://127.0.0.1:{}", proxy.port);
    let login = format!("[[home]]\nurl = \"{address}\"\nuser = \"me\"\npassword = \"hush\"\n");
    let stage = HomesFixture::new(&login).await;
    stage.fill_volume(1, &address, "a").await.expect("fill");
    let [connections, dead] = &*seen;
    dead.store(connections.load(Ordering::Relaxed), Ordering::Relaxed);
    let tree = stage.fill_volume(2, &address, "a").await.expect("fill");
    assert!(std::fs::read(tree.join("a")).expect("file") == random_bytes(1_000, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_without_upload_restart_are_written_to() {
    let root = tempfile::tempdir().expect("root");
    let server = pyftpdlib_without_restart(root.path());
    let address = format!("ftp://127.0.0.1:{}", server.port);
    let login = format!("[[home]]\nurl = \"{address}\"\nuser = \"me\"\npassword = \"hush\"\n");
    let stage = HomesFixture::new(&login).await;
    stage.check_resumption(&address, (root.path(), "")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ftps_servers_are_read_and_written() {
    let root = tempfile::tempdir().expect("root");
    let certificate = ServerCertificate::new();
    let server = pyftpdlib_with_tls(root.path(), &certificate);
    let address = format!("ftps://127.0.0.1:{}", server.port);
    let login = format!("[[home]]\nurl = \"{address}\"\nuser = \"me\"\npassword = \"hush\"\n");
    let trusted = format!(
        "authorities = \"{}\"\n",
        certificate.certificate().display()
    );
    let stage = HomesFixture::new(&(login.clone() + &trusted)).await;
    check_reads(&stage, root.path(), &address).await;
    let result = random_bytes(2_500_000, 5);
    stage.volume_with(11, "result", &result).await;
    let target = (address.as_str(), "out/result");
    let receipt = stage.extract(1, (11, "result"), target).await;
    assert_eq!(receipt.expect("extract").digest, Digest::of(&result));
    assert!(std::fs::read(root.path().join("out/result")).expect("result") == result);

    // Nobody vouches for this server.
    let stage = HomesFixture::new(&login).await;
    let refused = stage.fill_volume(1, &address, "in").await;
    let refused = check_error(refused, &["cannot be trusted", "homes.toml"]);
    assert_eq!(refused.code, ErrorCode::RightMissing);
}

#[tokio::test(flavor = "multi_thread")]
async fn data_connections_resume_the_tls_session() {
    let root = tempfile::tempdir().expect("root");
    let all = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(root.path(), all).expect("mode");
    let certificate = ServerCertificate::new();
    let server = vsftpd_with_tls(root.path(), &certificate);
    let address = format!("ftps://127.0.0.1:{}", server.port);
    let settings = format!(
        "[[home]]\nurl = \"{address}\"\nauthorities = \"{}\"\n",
        certificate.certificate().display()
    );
    let stage = HomesFixture::new(&settings).await;
    check_reads(&stage, root.path(), &address).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ftp_server_without_tls_is_refused() {
    let root = tempfile::tempdir().expect("root");
    let server = pyftpdlib(root.path());
    let address = format!("ftps://127.0.0.1:{}", server.port);
    let stage = HomesFixture::new("").await;
    let refused = stage.fill_volume(1, &address, "in").await;
    check_error(refused, &["offers no TLS", "ftp://"]);
}
