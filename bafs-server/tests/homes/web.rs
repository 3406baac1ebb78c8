//! Homes behind a web server: nginx, and small ones with bad habits.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;

use bafs_proto::ErrorCode;

use super::foreign_servers::nginx;
use super::test_node::{HomesFixture, check_error};
use crate::test_nodes::random_bytes;

#[tokio::test(flavor = "multi_thread")]
async fn a_web_server_supports_fills_and_caches() {
    let root = tempfile::tempdir().expect("root");
    let (large, small) = (random_bytes(700_001, 1), random_bytes(1_000, 2));
    let put = |path: &str, content: &[u8]| {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().expect("parent")).expect("directory");
        std::fs::write(path, content).expect("file");
    };
    put("d/a file", &large);
    put("d/sub/small", &small);
    put("d/unlisted", b"x");
    put(
        "d/bafs.list",
        b"# what `find . -type f` says\n./a file\n./sub/small\n",
    );
    let nginx = nginx(root.path());
    let address = format!("http://127.0.0.1:{}", nginx.port);
    let stage = HomesFixture::new("").await;

    // One file, and those of a list.
    let tree = stage
        .fill_volume(1, &address, "d/a file")
        .await
        .expect("fill");
    assert!(std::fs::read(tree.join("a file")).expect("file") == large);
    let tree = stage.fill_volume(2, &address, "d").await.expect("fill");
    assert!(std::fs::read(tree.join("a file")).expect("file") == large);
    assert_eq!(std::fs::read(tree.join("sub/small")).expect("file"), small);
    assert_eq!(std::fs::read_dir(&tree).expect("directory").count(), 2);
    stage.cache(3, &address, "d").await.expect("cache");
    assert!(stage.read(3, "a file").await.expect("read") == large);

    put("d/sub/small", &random_bytes(1_000, 3));
    // The same size; nginx makes its ETag of the time in seconds and the size.
    let other = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
    let file = std::fs::File::options()
        .write(true)
        .open(root.path().join("d/sub/small"));
    file.expect("file").set_modified(other).expect("time");
    let changed = stage.read(3, "sub/small").await;
    assert_eq!(
        check_error(changed, &["sub/small"]).code,
        ErrorCode::SourceChanged
    );
    std::fs::remove_file(root.path().join("d/sub/small")).expect("file");
    let gone = stage.read(3, "sub/small").await;
    assert_eq!(
        check_error(gone, &["no longer exists"]).code,
        ErrorCode::SourceChanged
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn web_server_errors_explain_the_cause() {
    let root = tempfile::tempdir().expect("root");
    for directory in ["private", "d"] {
        std::fs::create_dir(root.path().join(directory)).expect("directory");
    }
    std::fs::write(root.path().join("private/a"), b"secret").expect("file");
    let nginx = nginx(root.path());
    let address = format!("http://127.0.0.1:{}", nginx.port);
    let login = |password: &str| {
        format!("[[home]]\nurl = \"{address}\"\nuser = \"me\"\npassword = \"{password}\"\n")
    };
    let stage = HomesFixture::new("").await;
    let missing = stage.fill_volume(1, &address, "d/nothing").await;
    let missing = check_error(missing, &["d/nothing", "no such file", "bafs.list"]);
    assert_eq!(missing.code, ErrorCode::NotFound);
    for (id, path) in [(2, "private/a"), (3, "closed/a")] {
        let refused = stage.fill_volume(id, &address, path).await;
        let refused = check_error(refused, &[path, "permission denied", "homes.toml"]);
        assert_eq!(refused.code, ErrorCode::RightMissing);
    }
    stage.volume_with(4, "a", b"a").await;
    let refused = stage.extract(1, (4, "a"), (&address, "d/a")).await;
    let refused = check_error(refused, &["is read-only", "sftp"]);
    assert_eq!(refused.code, ErrorCode::Unsupported);

    let stage = HomesFixture::new(&login("wrong")).await;
    let refused = stage.fill_volume(1, &address, "private/a").await;
    assert_eq!(
        check_error(refused, &["permission denied"]).code,
        ErrorCode::RightMissing
    );
    let stage = HomesFixture::new(&login("hush")).await;
    let tree = stage
        .fill_volume(1, &address, "private/a")
        .await
        .expect("fill");
    assert_eq!(std::fs::read(tree.join("a")).expect("file"), b"secret");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bearer_token_is_used_but_never_disclosed() {
    let root = tempfile::tempdir().expect("root");
    std::fs::create_dir(root.path().join("bearer")).expect("directory");
    let content = random_bytes(200_000, 8);
    std::fs::write(root.path().join("bearer/a"), &content).expect("file");
    let nginx = nginx(root.path());
    let address = format!("http://127.0.0.1:{}", nginx.port);
    let token = |token: &str| format!("[[home]]\nurl = \"{address}\"\ntoken = \"{token}\"\n");
    for settings in [String::new(), token("opensaysme")] {
        let stage = HomesFixture::new(&settings).await;
        let refused = stage.fill_volume(1, &address, "bearer/a").await;
        let refused = check_error(refused, &["bearer/a", "permission denied", "homes.toml"]);
        assert_eq!(refused.code, ErrorCode::RightMissing);
        assert!(!refused.detail.contains("opensaysme"), "{refused}");
    }
    let stage = HomesFixture::new(&token("sesame")).await;
    let tree = stage
        .fill_volume(1, &address, "bearer/a")
        .await
        .expect("fill");
    assert_eq!(std::fs::read(tree.join("a")).expect("file"), content);
    stage.cache(2, &address, "bearer/a").await.expect("cache");
    let (_, entries) = stage.manifest(2).await;
    assert_eq!(
        stage.read(2, &entries[0].path).await.expect("read"),
        content
    );
}

/// A web server that answers everything with `head` and 300,000 bytes.
fn careless_server(head: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("bound").port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut lines = BufReader::new(stream.try_clone().expect("stream")).lines();
            let request = lines.next().and_then(Result::ok).unwrap_or_default();
            while lines
                .next()
                .is_some_and(|line| line.is_ok_and(|line| !line.is_empty()))
            {}
            if request.contains("bafs.list") {
                let _ = stream.write_all(b"HTTP/1.1 404 no\r\ncontent-length: 0\r\n\r\n");
                continue;
            }
            let length = "content-length: 300000\r\nconnection: close\r\n";
            let _ = stream.write_all(format!("HTTP/1.1 200 OK\r\n{length}{head}\r\n").as_bytes());
            if !request.starts_with("HEAD") {
                let _ = stream.write_all(&vec![7; 300_000]);
            }
        }
    });
    port
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_without_etags_or_ranges_are_refused() {
    let stage = HomesFixture::new("").await;
    let address = format!("http://127.0.0.1:{}", careless_server(""));
    let unguarded = stage.fill_volume(1, &address, "a").await;
    let unguarded = check_error(unguarded, &["neither ETag nor Last-Modified"]);
    assert_eq!(unguarded.code, ErrorCode::Unsupported);

    let address = format!("http://127.0.0.1:{}", careless_server("etag: \"x\"\r\n"));
    stage.cache(2, &address, "a").await.expect("cache");
    let whole = stage.read(2, "a").await;
    let whole = check_error(whole, &["does not support ranges"]);
    assert_eq!(whole.code, ErrorCode::Unsupported);
}
