//! What a home server lists under which names, and what it says that it leaves out.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;

use crate::test_home::{HomeFixture, begin, error_code, grant};
use bafs_proto::ErrorCode;
use bafs_proto::hash::Digest;
use bafs_proto::message::{ListSource, StatSource};
use bafs_proto::path::from_bytes;
use bafs_proto::source_warning::WarningReason;
use bafs_proto::token::Right;

#[tokio::test]
async fn absolute_links_inside_the_home_are_followed() {
    let world = HomeFixture::new();
    world.file("in/f", b"x");
    let inside = world.root.path().join("in");
    symlink(&inside, world.root.path().join("way")).expect("link");
    assert_eq!(world.list("way").await, ["", "f"]);
    // The token must grant where it leads, as with any link.
    let token = grant(&world.signer, "way", &[Right::Read]);
    let stat = StatSource {
        path: "way/f".to_owned(),
    };
    let refused = world.send(&token, stat, b"").await;
    let refused = refused.expect_err("it is not granted");
    assert_eq!(refused.code, ErrorCode::RightMissing);
    assert!(refused.detail.contains("is a symbolic link to 'in/f'"));
    let new = world.put(1, "way/new", b"y").await.expect("put");
    world.call(new).await.expect("it is put");
    assert_eq!(fs::read(inside.join("new")).expect("read"), b"y");
}

#[tokio::test]
async fn non_utf8_names_are_listed_and_put() {
    let world = HomeFixture::new();
    let bytes = |path: &[u8]| world.root.path().join(OsStr::from_bytes(path));
    fs::create_dir(bytes(b"d\xe9")).expect("mkdir");
    fs::write(bytes(b"d\xe9/\xff"), b"x").expect("write");
    let (directory, file) = (from_bytes(b"d\xe9"), from_bytes(b"d\xe9/\xff"));
    assert_eq!(world.list("").await, ["", &directory, &file]);
    assert_eq!(world.list(&directory).await, ["", &from_bytes(b"\xff")]);
    let other = from_bytes(b"d\xe9/\xfe");
    let new = world.put(1, &other, b"y").await.expect("put");
    world.call(new).await.expect("it is put");
    assert_eq!(fs::read(bytes(b"d\xe9/\xfe")).expect("read"), b"y");
    // A token for one name is for no other, and none is written in two ways.
    let token = grant(&world.signer, &file, &[Right::Read]);
    let stat = |path: &str| StatSource {
        path: path.to_owned(),
    };
    assert!(world.send(&token, stat(&file), b"").await.is_ok());
    let refused = world.send(&token, stat(&other), b"").await;
    assert_eq!(error_code(refused), ErrorCode::RightMissing);
    world.file("é", b"z");
    let twice = world.call(stat("\u{efc3}\u{efa9}")).await;
    assert_eq!(error_code(twice), ErrorCode::BadPath);
}

#[tokio::test]
async fn a_listing_reports_each_omission_once() {
    let world = HomeFixture::new();
    let mut made = Vec::new();
    for number in 0..3_000 {
        world.file(&format!("{number:04}"), b"");
        if number % 1_000 == 999 {
            let name = format!("{number:04}-fifo");
            let path = world.root.path().join(&name);
            nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRUSR).expect("fifo");
            made.push(name);
        }
    }
    let (mut told, mut after, mut pages) = (Vec::new(), None, 0);
    loop {
        let call = ListSource {
            path: String::new(),
            after,
        };
        let page = world.call(call).await.expect("page");
        told.extend(page.warnings.warnings);
        pages += 1;
        if !page.has_more {
            break;
        }
        after = page.entries.last().map(|entry| entry.path.clone());
    }
    assert!(pages > 1);
    let paths: Vec<_> = told.iter().map(|warning| &warning.path).collect();
    assert_eq!(paths, made.iter().collect::<Vec<_>>());
    assert!(
        told.iter()
            .all(|it| it.reason == WarningReason::SpecialFile)
    );
}

#[tokio::test]
async fn result_paths_with_control_characters_are_refused() {
    let world = HomeFixture::new();
    for path in ["results/nl\n\u{1b}[31mx", "out/ok\u{202e}gnp", "\u{7}/f"] {
        assert_eq!(
            error_code(world.call(begin(77, path)).await),
            ErrorCode::BadPath,
            "{path:?}"
        );
        let refused = world.put(9, path, b"x").await;
        assert_eq!(error_code(refused), ErrorCode::BadPath, "{path:?}");
        let refused = world.put_small(78, path, Digest::of(b"x"), b"x").await;
        assert_eq!(error_code(refused), ErrorCode::BadPath, "{path:?}");
    }
    assert!(
        world
            .list("")
            .await
            .iter()
            .all(|path| !path.contains("gnp"))
    );
}
