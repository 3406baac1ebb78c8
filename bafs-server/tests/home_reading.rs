//! What a home server gives of its files and when it gives nothing; what it takes in packs.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::test_home::{BLOCK, HomeFixture, begin, error_code, grant, read};
use bafs_proto::ErrorCode;
use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, ExtractionId};
use bafs_proto::message::{PutFile, PutFiles, ReadDigests, SourceBlocks, StatSource};
use bafs_proto::replica::{ListedFile, ReadSources};
use bafs_proto::token::{Right, Token};
use bafs_server::home_server::HomeServer;

#[tokio::test]
async fn range_reads_carry_digests_and_detect_changes() {
    let world = HomeFixture::new();
    let content: Vec<u8> = (0..10_000_u32).map(|n| n as u8).collect();
    world.file("d/f", &content);
    let identity = world.identity("d/f").await;
    let (data, body) = world
        .send(&world.token, read("d/f", identity, 4096, 1 << 20), b"")
        .await
        .expect("read");
    assert_eq!(body, content[4096..]);
    let digests: Vec<_> = content[4096..].chunks(4096).map(Digest::of).collect();
    assert_eq!(data.digests, digests);
    assert_eq!(world.counter("home_read_bytes").await, 10_000 - 4096);
    world.file("d/f", b"changed");
    assert_eq!(
        error_code(world.call(read("d/f", identity, 0, 10)).await),
        ErrorCode::SourceChanged
    );
    fs::remove_file(world.root.path().join("d/f")).expect("remove");
    assert_eq!(
        error_code(world.call(read("d/f", identity, 0, 10)).await),
        ErrorCode::SourceChanged
    );
}

/// `cp -p`, `rsync -t` and `tar` do so, with files that were given one fixed time.
#[tokio::test]
async fn a_same_size_same_time_replacement_is_detected() {
    type Replace = fn(&Path, SystemTime);
    let over: Replace = |path, time| {
        let other = path.with_extension("new");
        fs::write(&other, [2; 9_000]).expect("write");
        let file = fs::File::options().write(true).open(&other).expect("open");
        file.set_modified(time).expect("time");
        fs::rename(&other, path).expect("rename");
    };
    let within: Replace = |path, time| {
        fs::write(path, [2; 9_000]).expect("write");
        let file = fs::File::options().write(true).open(path).expect("open");
        file.set_modified(time).expect("time");
    };
    for (name, replace) in [("d/over", over), ("d/within", within)] {
        let world = HomeFixture::new();
        world.file(name, &[1; 9_000]);
        let identity = world.identity(name).await;
        let (_, body) = world
            .send(&world.token, read(name, identity, 0, 4096), b"")
            .await
            .expect("read");
        assert_eq!(body, [1; 4096][..]);
        let path = world.root.path().join(name);
        let found = fs::metadata(&path).expect("file");
        // Time passes, as far as the file system can tell.
        while fs::metadata(&path).expect("file").ctime_nsec() == found.ctime_nsec() {
            replace(&path, found.modified().expect("time"));
        }
        let now = fs::metadata(&path).expect("file");
        assert_eq!(
            (now.len(), now.mtime_nsec()),
            (found.len(), found.mtime_nsec())
        );
        assert_eq!(
            error_code(world.call(read(name, identity, 4096, 4096)).await),
            ErrorCode::SourceChanged,
            "{name}"
        );
        let listed = world.identity(name).await;
        assert_ne!(listed, identity, "{name}");
    }
}

#[tokio::test]
async fn packed_reads_check_identities_and_the_token() {
    let world = HomeFixture::new();
    for (path, content) in [
        ("d/a", &[1; 5_000][..]),
        ("d/b", b""),
        ("d/c", b"c"),
        ("e", b"e"),
    ] {
        world.file(path, content);
    }
    symlink("../e", world.root.path().join("d/out")).expect("link");
    let mut files = Vec::new();
    for name in ["a", "b", "c", "out"] {
        let path = name.to_owned();
        let identity = world.identity(&format!("d/{name}")).await;
        files.push(ListedFile { path, identity });
    }
    let call = |files: &[ListedFile]| ReadSources {
        path: "d".to_owned(),
        files: files.to_vec(),
        block_bytes: BLOCK,
    };
    let token = grant(&world.signer, "d", &[Right::Read]);
    let read = world.send(&token, call(&files[..3]), b"").await;
    let (data, body) = read.expect("read");
    assert_eq!(body, [&[1; 5_000][..], b"c"].concat());
    let pieces = [&[1; 4_096][..], &[1; 904], b"c"].map(Digest::of);
    assert_eq!(data.digests, pieces);
    // A link leads out of what the token grants.
    let out = world.send(&token, call(&files), b"").await;
    assert_eq!(error_code(out), ErrorCode::RightMissing);
    let up = ListedFile {
        path: "../e".to_owned(),
        ..files[2].clone()
    };
    assert_eq!(
        error_code(world.call(call(&[up])).await),
        ErrorCode::BadPath
    );
    let mut too_large = files[0].clone();
    too_large.identity.size = 5 << 20;
    let too_large = world.call(call(&[too_large])).await;
    assert_eq!(error_code(too_large), ErrorCode::Malformed);
    world.file("d/c", b"changed");
    let changed = world.call(call(&files[..3])).await;
    assert_eq!(error_code(changed), ErrorCode::SourceChanged);
}

#[tokio::test]
async fn homes_vouch_for_blocks_they_sent() {
    let world = HomeFixture::new();
    let content: Vec<u8> = (0..20_000_u32).map(|n| (n / 7) as u8).collect();
    world.file("d/f", &content);
    world.file("e", b"e");
    symlink("../e", world.root.path().join("d/out")).expect("link");
    let identity = world.identity("d/f").await;
    let blocks = |path: &str, first, count| SourceBlocks {
        path: path.to_owned(),
        identity,
        first: BlockIndex(first),
        count,
    };
    let call = |needed: SourceBlocks, welcome: &[SourceBlocks]| ReadDigests {
        path: "d".to_owned(),
        block_bytes: BLOCK,
        needed,
        welcome: welcome.to_vec(),
    };
    let digests: Vec<_> = content.chunks(BLOCK as usize).map(Digest::of).collect();
    // What is needed is read, and what is welcome is not.
    let rest = [blocks("f", 2, 9)];
    let said = world.call(call(blocks("f", 0, 2), &rest)).await;
    let said = said.expect("digests");
    assert_eq!(
        (&said.needed[..], &said.welcome[0][..]),
        (&digests[..2], &[][..])
    );
    world
        .send(&world.token, read("d/f", identity, 8_192, 1 << 20), b"")
        .await
        .expect("read");
    let said = world.call(call(blocks("f", 1, 1), &rest)).await;
    let said = said.expect("digests");
    assert_eq!(
        (&said.needed[..], &said.welcome[0][..]),
        (&digests[1..2], &digests[2..])
    );
    assert_eq!(world.counter("home_read_bytes").await, 20_000 - 8_192);
    // Readers of a state that is over still have what was read of it.
    world.file("d/f", b"changed");
    let said = world.call(call(blocks("f", 0, 5), &[])).await;
    assert_eq!(said.expect("digests").needed, digests);
    let mut later = blocks("f", 0, 1);
    later.identity = world.identity("d/f").await;
    world.file("d/f", b"changed again");
    let said = world.call(call(later, &[])).await;
    assert_eq!(error_code(said), ErrorCode::SourceChanged);
    // It says nothing of what the token does not grant.
    let token = grant(&world.signer, "d", &[Right::Read]);
    let mut out = blocks("out", 0, 1);
    out.identity = world.identity("e").await;
    let said = world.send(&token, call(out, &[]), b"").await;
    assert_eq!(error_code(said), ErrorCode::RightMissing);
    let said = world.call(call(blocks("../e", 0, 1), &[])).await;
    assert_eq!(error_code(said), ErrorCode::BadPath);
    let other = grant(&world.signer, "e", &[Right::Read]);
    let said = world.send(&other, call(blocks("f", 0, 1), &[]), b"").await;
    assert_eq!(error_code(said), ErrorCode::RightMissing);
    let said = world.call(call(blocks("f", 0, 5_000), &[])).await;
    assert_eq!(error_code(said), ErrorCode::Malformed);
}

/// Of the state that it sent, although the file is another one by now. What it read at once after a
/// change is not kept: a further change may look the same.
#[tokio::test]
async fn restarted_home_vouches_for_blocks_it_sent() {
    let world = HomeFixture::new();
    let content: Vec<u8> = (0..20_000_u32).map(|n| (n / 7) as u8).collect();
    world.file("settled", &content);
    std::thread::sleep(Duration::from_millis(3_200));
    world.file("fresh", &content);
    let digests: Vec<_> = content.chunks(BLOCK as usize).map(Digest::of).collect();
    let mut states = Vec::new();
    for name in ["settled", "fresh"] {
        let identity = world.identity(name).await;
        let sent = world.send(&world.token, read(name, identity, 0, 1 << 20), b"");
        assert_eq!(sent.await.expect("read").0.digests, digests);
        states.push((name, identity));
        world.file(name, b"changed");
    }
    world.start(None);
    let mut said = Vec::new();
    for (name, identity) in states {
        let needed = SourceBlocks {
            path: name.to_owned(),
            identity,
            first: BlockIndex(0),
            count: 5,
        };
        let call = ReadDigests {
            path: String::new(),
            block_bytes: BLOCK,
            needed,
            welcome: Vec::new(),
        };
        let answer = world.call(call).await;
        said.push(answer.map(|said| said.needed).map_err(|error| error.code));
    }
    assert_eq!(said, [Ok(digests), Err(ErrorCode::SourceChanged)]);
}

#[tokio::test]
async fn a_vanished_home_directory_is_reported_not_recreated() {
    let mut world = HomeFixture::new();
    let outer = std::mem::replace(&mut world.root, tempfile::tempdir().expect("directory"));
    let root = outer.path().join("home");
    let home = |root: &Path| HomeServer::open(root, world.signer.verifier(), None);
    fs::create_dir(&root).expect("mkdir");
    fs::write(root.join("f"), b"x").expect("write");
    world.network.listen("home", home(&root).expect("home"));
    world.put(1, "before", b"x").await.expect("put");
    let begun = begin(2, "later");
    world.call(begun.clone()).await.expect("begin");
    let stat = || {
        world.call(StatSource {
            path: "f".to_owned(),
        })
    };
    let put = || async {
        let put = world.put_small(3, "res/new", Digest::of(b"x"), b"x");
        put.await.map(|_| ())
    };
    let gone = |error: bafs_proto::Error| {
        assert!(error.is_transient(), "{error}");
        let text = format!(
            "the exported directory {} is gone; put it back",
            root.display()
        );
        assert!(error.detail.starts_with(&text), "{error}");
    };

    let away = outer.path().join("home.away");
    fs::rename(&root, &away).expect("rename");
    gone(stat().await.expect_err("it is gone"));
    gone(put().await.expect_err("it is gone"));
    gone(world.call(begun.clone()).await.expect_err("it is gone"));
    assert!(!root.exists(), "the server made the directory again");

    // Another directory at its place is not it.
    fs::create_dir(&root).expect("mkdir");
    gone(stat().await.expect_err("another is there"));
    gone(put().await.expect_err("another is there"));
    assert_eq!(fs::read_dir(&root).expect("list").count(), 0);
    fs::remove_dir(&root).expect("rmdir");

    fs::rename(&away, &root).expect("rename");
    stat().await.expect("it is back");
    put().await.expect("it is back");
    assert_eq!(fs::read(root.join("res/new")).expect("read"), b"x");
}

const PACKED_CONTENTS: [&[u8]; 4] = [b"one", b"two", b"three", b""];

/// Puts four files below `out`, the second one with the token `of_second`, the third one with the
/// digest of `content_of_third`.
fn pack(world: &HomeFixture, of_second: &Token, content_of_third: &[u8]) -> PutFiles {
    let paths = ["out/a", "out/b", "out/c", "out/d"];
    let files = paths.iter().zip(PACKED_CONTENTS).enumerate();
    let files = files.map(|(number, (path, content))| PutFile {
        extraction: ExtractionId(number as u128 + 1),
        path: (*path).to_owned(),
        mode: 0o600,
        size: content.len() as u32,
        digest: match number {
            2 => Digest::of(content_of_third),
            _ => Digest::of(content),
        },
        token: match number {
            1 => of_second.clone(),
            _ => world.token.clone(),
        },
        fence: None,
    });
    PutFiles {
        files: files.collect(),
    }
}

fn read_packed(world: &HomeFixture, name: &str) -> Option<Vec<u8>> {
    fs::read(world.root.path().join("out").join(name)).ok()
}

#[tokio::test]
async fn a_truncated_pack_puts_no_file() {
    let world = HomeFixture::new();
    let body = PACKED_CONTENTS.concat();
    let call = pack(&world, &world.token, b"three");
    let short = world.send(&world.token, call, &body[1..]).await;
    assert_eq!(error_code(short), ErrorCode::Malformed);
    assert!(!world.root.path().join("out").exists());
}

/// The token of the call itself gives no right: each file has its own.
#[tokio::test]
async fn packed_files_have_individual_rights_and_results() {
    let world = HomeFixture::new();
    let elsewhere = grant(&world.signer, "elsewhere", &[Right::Read, Right::Write]);
    let body = PACKED_CONTENTS.concat();
    let call = pack(&world, &elsewhere, b"other");
    let (answer, _) = world.send(&elsewhere, call, &body).await.expect("answer");
    let results = answer.results.iter();
    let sizes = results.map(|it| it.as_ref().map(|receipt| receipt.size).map_err(|e| e.code));
    let expected = [
        Ok(3),
        Err(ErrorCode::RightMissing),
        Err(ErrorCode::DigestMismatch),
        Ok(0),
    ];
    assert_eq!(sizes.collect::<Vec<_>>(), expected);
    assert_eq!(read_packed(&world, "a").as_deref(), Some(&b"one"[..]));
    assert_eq!(read_packed(&world, "b"), None);
    assert_eq!(read_packed(&world, "c"), None);
    assert_eq!(read_packed(&world, "d").as_deref(), Some(&b""[..]));
}

#[tokio::test]
async fn a_repeated_pack_puts_only_failed_files() {
    let world = HomeFixture::new();
    let body = PACKED_CONTENTS.concat();
    let call = pack(&world, &world.token, b"other");
    let (first, _) = world.send(&world.token, call, &body).await.expect("answer");
    fs::write(world.root.path().join("out/a"), b"used since").expect("write");
    let call = pack(&world, &world.token, b"three");
    let (again, _) = world.send(&world.token, call, &body).await.expect("again");
    assert_eq!(again.results[0], first.results[0]);
    assert_eq!(again.results[2].as_ref().map(|it| it.size), Ok(5));
    let kept = read_packed(&world, "a");
    assert_eq!(kept.as_deref(), Some(&b"used since"[..]));
    let put = read_packed(&world, "c");
    assert_eq!(put.as_deref(), Some(&b"three"[..]));
}
