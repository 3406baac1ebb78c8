//! A home server over an in-memory network and a real directory.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use crate::test_home::{HomeFixture, begin, error_code, grant};
use bafs_proto::ErrorCode;
use bafs_proto::file_op::{BodyRange, Caller, FileOp, FileReply};
use bafs_proto::hash::Digest;
use bafs_proto::ids::{AgentId, ExtractionId, InodeNo};
use bafs_proto::message::{
    CloseTree, CommitPut, ListSource, OpenTree, ReadCounters, RunFileOps, SourceKind, StatSource,
    TreeRef,
};
use bafs_proto::token::{Right, Token};

#[tokio::test]
async fn a_listing_is_sorted_and_follows_no_links() {
    let world = HomeFixture::new();
    for path in ["a/b", "a.txt", "a/c/d", "B", "z"] {
        world.file(path, b"x");
    }
    symlink("/etc", world.root.path().join("a/out")).expect("link");
    nix::unistd::mkfifo(
        &world.root.path().join("fifo"),
        nix::sys::stat::Mode::S_IRUSR,
    )
    .expect("fifo");
    let expected = ["", "B", "a", "a/b", "a/c", "a/c/d", "a/out", "a.txt", "z"];
    assert_eq!(world.list("").await, expected);
    assert_eq!(world.list("a/b").await, [""]);
    assert_eq!(world.list("a").await, ["", "b", "c", "c/d", "out"]);
    let page = world
        .call(ListSource {
            path: "a".to_owned(),
            after: Some("c".to_owned()),
        })
        .await;
    let page = page.expect("page");
    assert_eq!(page.entries[0].path, "c/d");
    assert_eq!(page.entries[1].kind, SourceKind::Symlink(b"/etc".to_vec()));
    let missing = ListSource {
        path: "nothing".to_owned(),
        after: None,
    };
    assert_eq!(error_code(world.call(missing).await), ErrorCode::NotFound);
    assert!(world.counter("home_listed_bytes").await > 0);
}

#[tokio::test]
async fn a_long_listing_has_no_gaps_or_repetitions() {
    let world = HomeFixture::new();
    let mut expected = vec![String::new()];
    for directory in 0..3 {
        expected.push(format!("d{directory}"));
        for file in 0..1500 {
            let path = format!("d{directory}/{file:04}");
            world.file(&path, b"");
            expected.push(path);
        }
    }
    assert_eq!(world.list("").await, expected);
}

#[tokio::test]
async fn outside_and_private_paths_are_unreachable() {
    let world = HomeFixture::new();
    world.file("in/f", b"x");
    for (target, link) in [("/etc/passwd", "abs"), ("../..", "in/up"), (".", "loop")] {
        symlink(target, world.root.path().join(link)).expect("link");
    }
    symlink("f", world.root.path().join("in/ok")).expect("link");
    let stat = |path: &str| {
        world.call(StatSource {
            path: path.to_owned(),
        })
    };
    assert!(stat("in/ok").await.is_ok());
    for path in [
        "abs",
        "in/up",
        "in/up/x",
        "..",
        "/etc",
        "in//f",
        "in/../in/f",
        "a\0",
    ] {
        assert_eq!(error_code(stat(path).await), ErrorCode::BadPath, "{path}");
    }
    for path in [
        ".bafs-put",
        ".bafs-put/server-id",
        "loop/.bafs-put/server-id",
    ] {
        assert_eq!(error_code(stat(path).await), ErrorCode::NotFound, "{path}");
    }
    assert_eq!(
        error_code(world.put(8, ".bafs-put/x", b"x").await),
        ErrorCode::BadPath
    );
    for path in ["loop/.bafs-put/server-id", "loop/.bafs-put", "in/up/x"] {
        let put = world
            .put(path.len() as u128, path, b"x")
            .await
            .expect("put");
        let refused = error_code(world.call(put).await);
        assert!(
            matches!(refused, ErrorCode::BadPath | ErrorCode::NotFound),
            "{path}: {refused:?}"
        );
    }
    assert!(
        world
            .list("")
            .await
            .iter()
            .all(|path| !path.contains("bafs-put"))
    );
}

#[tokio::test]
async fn counters_require_the_right_to_the_catalog() {
    let world = HomeFixture::new();
    let refused = world.call(ReadCounters).await;
    assert_eq!(error_code(refused), ErrorCode::RightMissing);
    world.counter("home_reads").await;
}

#[tokio::test]
async fn a_token_must_cover_link_targets_too() {
    let world = HomeFixture::new();
    world.file("mine/f", b"x");
    world.file("other/g", b"y");
    symlink("../other/g", world.root.path().join("mine/g")).expect("link");
    let token = grant(&world.signer, "mine", &[Right::Read]);
    let stat = |path: &str| StatSource {
        path: path.to_owned(),
    };
    assert!(world.send(&token, stat("mine/f"), b"").await.is_ok());
    for path in ["other/g", "mine/g", ""] {
        let refused = world.send(&token, stat(path), b"").await;
        let refused = refused.expect_err("it is not granted");
        assert_eq!(refused.code, ErrorCode::RightMissing, "{path}");
        let leads = "'mine/g' is a symbolic link to 'other/g'";
        assert_eq!(
            refused.detail.contains(leads),
            path == "mine/g",
            "{refused}"
        );
    }
    assert_eq!(
        error_code(world.send(&token, begin(1, "mine/n"), b"").await),
        ErrorCode::RightMissing
    );
    symlink("../other", world.root.path().join("mine/way")).expect("link");
    let token = grant(&world.signer, "mine", &[Right::Read, Right::Write]);
    let commit = |id| CommitPut {
        extraction: ExtractionId(id),
        size: 0,
        digest: Digest::of(b""),
        fence: None,
    };
    for (id, path) in [(2, "mine/way/new"), (3, "mine/way/deep/er/new")] {
        let begun = world.send(&token, begin(id, path), b"").await;
        begun.expect("the path itself is granted");
        let refused = world.send(&token, commit(id), b"").await;
        assert_eq!(error_code(refused), ErrorCode::RightMissing, "{path}");
    }
    let open = OpenTree {
        tree: TreeRef::Home("mine/way/tree".to_owned()),
        agent: AgentId(1),
        writable: true,
        yields: false,
        resumed_incarnation: None,
    };
    assert_eq!(
        error_code(world.send(&token, open, b"").await),
        ErrorCode::RightMissing
    );
    let beside = fs::read_dir(world.root.path().join("other")).expect("list");
    assert_eq!(beside.count(), 1, "nothing was made there");
    let single = grant(&world.signer, "mine/deep/f", &[Right::Write]);
    let begun = world.send(&single, begin(4, "mine/deep/f"), b"").await;
    begun.expect("begin");
    let placed = world.send(&single, commit(4), b"").await;
    placed.expect("who may write a file may have the directories above it");
    let none = world.send(&Token::none(), stat("mine/f"), b"").await;
    assert_eq!(error_code(none), ErrorCode::TokenInvalid);
}

#[tokio::test]
async fn a_put_survives_restarts_and_happens_once() {
    let world = HomeFixture::new();
    let data: Vec<u8> = (0..100_000_u32).map(|n| (n / 7) as u8).collect();
    let target = world.root.path().join("out/deep/f");
    let extract = ExtractionId(5);
    let begin = begin(5, "out/deep/f");
    assert_eq!(
        world
            .call(begin.clone())
            .await
            .expect("begin")
            .received_bytes,
        0
    );
    world.put_range(5, 0, &data[..60_000]).await.expect("put");
    world.start(None);
    assert_eq!(
        world
            .call(begin.clone())
            .await
            .expect("resume")
            .received_bytes,
        60_000
    );
    assert_eq!(
        error_code(world.put_range(5, 9 << 20, b"x").await),
        ErrorCode::Conflict,
        "what comes before cannot be on its way"
    );
    let commit = CommitPut {
        extraction: extract,
        size: 100_000,
        digest: Digest::of(&data),
        fence: None,
    };
    assert_eq!(
        error_code(world.call(commit.clone()).await),
        ErrorCode::WrongState
    );
    world
        .put_range(5, 50_000, &data[50_000..])
        .await
        .expect("put");
    assert!(!target.exists(), "nothing is visible before the commit");
    let receipt = world.call(commit.clone()).await.expect("commit");
    assert_eq!(fs::read(&target).expect("read"), data);
    world.start(None);
    fs::write(&target, b"used since").expect("write");
    assert_eq!(world.call(commit).await.expect("again"), receipt);
    assert_eq!(
        world.call(begin).await.expect("again").receipt,
        Some(receipt)
    );
    assert_eq!(fs::read(&target).expect("read"), b"used since");
    assert_eq!(
        error_code(world.put(5, "elsewhere", b"x").await),
        ErrorCode::Conflict
    );
}

#[tokio::test]
async fn out_of_order_chunks_are_stored_in_order() {
    let world = HomeFixture::new();
    let data: Vec<u8> = (0..800_000_u32).map(|n| (n / 7) as u8).collect();
    world.call(begin(6, "f")).await.expect("begin");
    let mut pieces: Vec<_> = data.chunks(100_000).enumerate().collect();
    pieces.reverse();
    let sent = pieces
        .into_iter()
        .map(|(number, piece)| world.put_range(6, number as u64 * 100_000, piece));
    for received in futures_util::future::join_all(sent).await {
        received.expect("a piece waits for its turn");
    }
    let commit = CommitPut {
        extraction: ExtractionId(6),
        size: 800_000,
        digest: Digest::of(&data),
        fence: None,
    };
    world.call(commit).await.expect("commit");
    assert_eq!(fs::read(world.root.path().join("f")).expect("read"), data);
}

#[tokio::test]
async fn a_small_file_is_put_by_one_call() {
    let world = HomeFixture::new();
    let target = world.root.path().join("out/f");
    let put = world.put_small(1, "out/f", Digest::of(b"small"), b"small");
    put.await.expect("put");
    assert_eq!(fs::read(&target).expect("read"), b"small");
    let mode = fs::metadata(&target).expect("stat").permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
}

#[tokio::test]
async fn a_put_with_a_wrong_digest_fails() {
    let world = HomeFixture::new();
    let wrong = world.put_small(1, "out/f", Digest::of(b"other"), b"small");
    assert_eq!(error_code(wrong.await), ErrorCode::DigestMismatch);
    assert!(!world.root.path().join("out/f").exists());
}

#[tokio::test]
async fn a_repeated_put_returns_its_receipt() {
    let world = HomeFixture::new();
    let target = world.root.path().join("out/f");
    let put = || world.put_small(1, "out/f", Digest::of(b"small"), b"small");
    let receipt = put().await.expect("put");
    world.start(None);
    fs::write(&target, b"used since").expect("write");
    assert_eq!(put().await.expect("again"), receipt);
    let begun = world.call(begin(1, "out/f")).await.expect("begin");
    assert_eq!(begun.receipt, Some(receipt));
    assert_eq!(fs::read(&target).expect("read"), b"used since");
}

#[tokio::test]
async fn one_extraction_cannot_put_two_paths() {
    let world = HomeFixture::new();
    let put = world.put_small(1, "out/f", Digest::of(b"small"), b"small");
    put.await.expect("put");
    let elsewhere = world.put_small(1, "out/g", Digest::of(b"small"), b"small");
    assert_eq!(error_code(elsewhere.await), ErrorCode::Conflict);
}

#[tokio::test]
async fn one_call_finishes_a_begun_put() {
    let world = HomeFixture::new();
    world.put(2, "out/h", b"half of it").await.expect("begin");
    let finished = world.put_small(2, "out/h", Digest::of(b"whole"), b"whole");
    finished.await.expect("put");
    let target = world.root.path().join("out/h");
    assert_eq!(fs::read(target).expect("read"), b"whole");
}

#[tokio::test]
async fn a_put_needs_a_right_for_its_path() {
    let world = HomeFixture::new();
    let foreign = grant(&world.signer, "mine", &[Right::Write]);
    let refused = world.put_small_as(&foreign, 3, "out/i", Digest::of(b"x"), b"x");
    assert_eq!(error_code(refused.await), ErrorCode::RightMissing);
}

#[tokio::test]
async fn damaged_bytes_are_refused_and_last_commits_win() {
    let world = HomeFixture::new();
    let mut commit = world.put(1, "f", b"one").await.expect("put");
    commit.digest = Digest::of(b"two");
    assert_eq!(
        error_code(world.call(commit).await),
        ErrorCode::DigestMismatch
    );
    let first = world.put(1, "f", b"one").await.expect("put");
    let second = world.put(2, "f", b"two").await.expect("put");
    world.call(second).await.expect("commit");
    world.call(first).await.expect("commit");
    assert_eq!(fs::read(world.root.path().join("f")).expect("read"), b"one");
    let unknown = CommitPut {
        extraction: ExtractionId(3),
        size: 0,
        digest: Digest::of(b""),
        fence: None,
    };
    assert_eq!(error_code(world.call(unknown).await), ErrorCode::NotFound);
    world.file("directory/x", b"");
    let onto = world.put(4, "directory", b"x").await.expect("put");
    assert_eq!(error_code(world.call(onto).await), ErrorCode::WrongState);
}

#[tokio::test]
async fn remote_trees_support_reading_and_writing() {
    let world = HomeFixture::new();
    let tree = TreeRef::Home("new/tree".to_owned());
    let open = |writable| OpenTree {
        tree: tree.clone(),
        agent: AgentId(1),
        writable,
        yields: false,
        resumed_incarnation: None,
    };
    assert_eq!(
        error_code(world.call(open(false)).await),
        ErrorCode::NotFound
    );
    let epoch = world.call(open(true)).await.expect("open").epoch;
    assert!(world.root.path().join("new/tree").is_dir());
    let run = |sequence, op| {
        let (tree, caller) = (tree.clone(), Caller::default());
        RunFileOps {
            tree,
            epoch,
            sequence,
            after_sequence: None,
            caller,
            ops: vec![op],
            assigned_numbers: Vec::new(),
        }
    };
    let create = FileOp::Create {
        parent: InodeNo::ROOT,
        name: b"f".to_vec(),
        mode: 0o600,
        flags: 2,
    };
    let created = world.call(run(1, create.clone())).await.expect("create");
    let Ok(FileReply::Opened { handle, .. }) = created.results[0].clone() else {
        panic!()
    };
    let write = FileOp::Write {
        handle,
        offset: 0,
        data: BodyRange {
            start: 0,
            length: 5,
        },
        append: true,
    };
    let write = run(2, write);
    for _ in 0..2 {
        let wrote = world
            .send(&world.token, write.clone(), b"hello")
            .await
            .expect("write");
        assert_eq!(wrote.0.results, [Ok(FileReply::Written { length: 5 })]);
    }
    let (offset, length) = (0, 100);
    let read = FileOp::Read {
        handle,
        offset,
        length,
    };
    let read = run(3, read);
    let (_, body) = world.send(&world.token, read, b"").await.expect("read");
    assert_eq!(&body[..], b"hello", "the repeated append ran once");
    world.start(None);
    let again = world.call(open(true)).await.expect("open").epoch;
    assert!(again > epoch, "epochs grow over a restart");
    assert_eq!(
        error_code(world.call(run(5, FileOp::StatFs)).await),
        ErrorCode::SessionUnknown
    );
}

#[tokio::test]
async fn a_reader_cannot_use_a_writers_session() {
    let world = HomeFixture::new();
    let tree = TreeRef::Home("new/tree".to_owned());
    let open = OpenTree {
        tree: tree.clone(),
        agent: AgentId(1),
        writable: true,
        yields: false,
        resumed_incarnation: None,
    };
    let epoch = world.call(open).await.expect("open").epoch;
    let run = |op| RunFileOps {
        tree: tree.clone(),
        epoch,
        sequence: 1,
        after_sequence: None,
        caller: Caller::default(),
        ops: vec![op],
        assigned_numbers: Vec::new(),
    };
    let make = FileOp::MakeDirectory {
        parent: InodeNo::ROOT,
        name: b"d".to_vec(),
        mode: 0o700,
    };
    let reader = grant(&world.signer, "new", &[Right::Read]);
    // Not even to read: its batches would take numbers, and so answers, from the writer's.
    for op in [make, FileOp::StatFs] {
        let refused = world.send(&reader, run(op), b"").await;
        assert_eq!(error_code(refused), ErrorCode::RightMissing);
    }
    let close = CloseTree {
        tree: tree.clone(),
        epoch,
        lifetime_ms_min: 0,
    };
    let refused = world.send(&reader, close, b"").await;
    assert_eq!(error_code(refused), ErrorCode::RightMissing);
    assert!(world.call(run(FileOp::StatFs)).await.is_ok());
}
