//! Operations that take space: exactly to the limit, also with many at once.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::test_tree::{BLOCK, CALLER, ROOMY, ROOT, TreeFixture, disk_bytes};
use bafs_proto::file_op::{AttrChange, BodyRange, Errno, FileOp, FileReply};
use bafs_tree::{Limit, Session, Tree};
use nix::libc;

#[test]
fn sparse_files_count_only_allocated_blocks() {
    let fixture = TreeFixture::new(Some(ROOMY));
    let (_, handle) = fixture.create(ROOT, "f", 0o600);
    fixture.write(handle, 1 << 30, b"x").expect("write");
    assert_eq!(fixture.tree.used().0, BLOCK);
    let data = FileOp::Seek {
        handle,
        offset: 0,
        whence: libc::SEEK_DATA,
    };
    assert_eq!(fixture.ok(data), FileReply::Position(1 << 30));
    let hole = FileOp::Seek {
        handle,
        offset: 5,
        whence: libc::SEEK_HOLE,
    };
    assert_eq!(fixture.ok(hole), FileReply::Position(5));
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let punch = FileOp::Allocate {
        handle,
        mode: punch,
        offset: 1 << 30,
        length: BLOCK,
    };
    fixture.ok(punch);
    assert_eq!(fixture.tree.used().0, 0);
}

#[test]
fn copies_stay_within_the_limit() {
    let fixture = TreeFixture::new(Some(Limit {
        bytes: 12 * BLOCK,
        files: 9,
    }));
    let (_, source) = fixture.create(ROOT, "a", 0o600);
    let (_, target) = fixture.create(ROOT, "b", 0o600);
    fixture.write(source, 0, &[9; 8 * 4096]).expect("write");
    let copy = |source_offset, target_offset| FileOp::CopyRange {
        source,
        source_offset,
        target,
        target_offset,
        length: u64::MAX,
    };
    assert_eq!(
        fixture.ok(copy(0, 0)),
        FileReply::Written { length: 4 * BLOCK }
    );
    assert_eq!(
        fixture.ok(copy(8 * BLOCK, 0)),
        FileReply::Written { length: 0 }
    );
    assert_eq!(fixture.err(copy(0, 4 * BLOCK)), libc::ENOSPC);
    assert_eq!(fixture.read(target, 4 * BLOCK - 1, 10), Ok(vec![9]));
    assert_eq!(fixture.tree.used().0, 12 * BLOCK);
}

#[test]
fn the_byte_limit_is_exact() {
    let fixture = TreeFixture::new(Some(Limit {
        bytes: 5 * BLOCK,
        files: 10,
    }));
    let (ino, handle) = fixture.create(ROOT, "f", 0o600);
    assert_eq!(fixture.write(handle, 0, &[1; 7 * 4096]), Ok(5 * BLOCK));
    assert_eq!(
        fixture.write(handle, 5 * BLOCK, b"x"),
        Err(Errno(libc::ENOSPC))
    );
    assert_eq!(fixture.tree.stat().free_bytes, 0);
    // What has space already may be written again, and as much of the rest as fits.
    assert_eq!(fixture.write(handle, 100, &[2; 3 * 4096]), Ok(3 * BLOCK));
    assert_eq!(
        fixture.write(handle, 4 * BLOCK + 1, &[3; 8192]),
        Ok(BLOCK - 1)
    );
    let grow = |mode, offset, length| FileOp::Allocate {
        handle,
        mode,
        offset,
        length,
    };
    assert_eq!(fixture.err(grow(0, 5 * BLOCK, 1)), libc::ENOSPC);
    fixture.ok(grow(0, 0, 5 * BLOCK));
    let change = AttrChange {
        size: Some(4 * BLOCK),
        ..AttrChange::default()
    };
    fixture.ok(FileOp::SetAttr {
        ino,
        handle: None,
        change,
    });
    // Space that was set aside is there when it is written.
    fixture.ok(grow(libc::FALLOC_FL_KEEP_SIZE, 4 * BLOCK, 10));
    assert_eq!(fixture.tree.stat().free_bytes, 0);
    assert_eq!(fixture.write(handle, 4 * BLOCK, &[4; 4096]), Ok(BLOCK));
    assert_eq!(fixture.tree.used().0, disk_bytes(&fixture));
    // A full volume still takes names into directories that have room, and renames.
    fixture.create(ROOT, "empty", 0o600);
    fixture
        .rename(ROOT, "empty", ROOT, "f2", 0)
        .expect("rename");
    let directory = FileOp::MakeDirectory {
        parent: ROOT,
        name: b"d".to_vec(),
        mode: 0o755,
    };
    assert_eq!(fixture.err(directory), libc::ENOSPC);
    fixture.ok(FileOp::Unlink {
        parent: ROOT,
        name: b"f".to_vec(),
    });
    fixture.ok(FileOp::Release { handle });
    assert_eq!(fixture.used(), (0, 1));
}

#[test]
fn the_file_limit_is_exact() {
    let fixture = TreeFixture::new(Some(Limit {
        bytes: 64 << 20,
        files: 3,
    }));
    fixture.ok(FileOp::MakeDirectory {
        parent: ROOT,
        name: b"d".to_vec(),
        mode: 0o755,
    });
    let link = |name: &str| FileOp::MakeSymlink {
        parent: ROOT,
        name: name.as_bytes().to_vec(),
        target: b"t".to_vec(),
    };
    assert_eq!(fixture.tree.used().1, 1);
    fixture.ok(link("l"));
    assert_eq!(fixture.tree.used(), (4096, 2));
    fixture.create(ROOT, "f", 0o600);
    assert_eq!(fixture.err(link("l2")), libc::ENOSPC);
    assert_eq!(fixture.err(link("l")), libc::EEXIST);
    assert_eq!(fixture.tree.stat().free_files, 0);
    fixture.ok(FileOp::RemoveDirectory {
        parent: ROOT,
        name: b"d".to_vec(),
    });
    fixture.ok(link("l2"));
    assert_eq!(fixture.tree.used().1, 3);
}

#[test]
fn concurrent_writers_never_exceed_the_limit() {
    let limit = Limit {
        bytes: 100 * BLOCK,
        files: 40,
    };
    let fixture = TreeFixture::new(Some(limit));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let fixture = &fixture;
            scope.spawn(move || {
                let session = Session::new(fixture.tree.clone(), true);
                for index in 0..20_u64 {
                    let create = FileOp::Create {
                        parent: ROOT,
                        name: format!("{thread}-{index}").into_bytes(),
                        mode: 0o600,
                        flags: libc::O_RDWR,
                    };
                    let created = session.run(CALLER, &create, b"", &mut Vec::new());
                    let Ok(FileReply::Opened { handle, .. }) = created else {
                        continue;
                    };
                    let data = vec![1; 30_000];
                    for step in 0..5 {
                        let range = BodyRange {
                            start: 0,
                            length: 30_000,
                        };
                        let offset = step * 17_000;
                        let write = FileOp::Write {
                            handle,
                            offset,
                            data: range,
                            append: false,
                        };
                        let _ = session.run(CALLER, &write, &data, &mut Vec::new());
                        let (bytes, files) = fixture.tree.used();
                        assert!(
                            bytes <= limit.bytes && files <= limit.files,
                            "{bytes} {files}"
                        );
                    }
                }
            });
        }
    });
    assert_eq!(fixture.tree.used().0, disk_bytes(&fixture));
    assert!(
        fixture.tree.used().0 > limit.bytes - 4 * BLOCK,
        "writers filled the volume"
    );
    let counted = Tree::open(&fixture.path(""), Some(limit)).expect("open");
    assert_eq!(counted.used(), fixture.tree.used());
}

/// Whoever writes reserves as if nothing had space yet, while there seems to be enough.
#[test]
fn fitting_writes_succeed_beside_large_reservations() {
    let (piece, writers) = (12 * BLOCK, 3);
    // One of them finds room to reserve a piece, and leaves none.
    let limit = Limit {
        bytes: (writers + 1) * piece,
        files: 100,
    };
    let fixture = TreeFixture::new(Some(limit));
    let full = vec![1; usize::try_from(piece).expect("it is small")];
    let overwritten: Vec<_> = (0..writers)
        .map(|at| fixture.create(ROOT, &format!("big{at}"), 0o600).1)
        .inspect(|big| assert_eq!(fixture.write(*big, 0, &full), Ok(piece)))
        .collect();
    let (_, handle) = fixture.create(ROOT, "new", 0o600);
    let empty = FileOp::Allocate {
        handle,
        mode: libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
        offset: 0,
        length: piece,
    };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for big in overwritten {
            let (fixture, full, is_over) = (&fixture, &full, &is_over);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    assert_eq!(fixture.write(big, 0, full), Ok(piece), "nothing is needed");
                }
            });
        }
        let writing = scope.spawn(|| {
            for _ in 0..500 {
                assert_eq!(fixture.write(handle, 0, &full), Ok(piece), "it fits");
                fixture.ok(empty.clone());
            }
        });
        let written = writing.join();
        is_over.store(true, Ordering::Relaxed);
        written.expect("all of it fits");
    });
    assert_eq!(fixture.tree.used().0, disk_bytes(&fixture));
}

#[test]
fn a_full_tmpfs_volume_is_overwritten_in_place() {
    let root = tempfile::tempdir_in("/dev/shm").ok();
    let is_in_memory = |root: &tempfile::TempDir| {
        rustix::fs::statfs(root.path()).is_ok_and(|stat| stat.f_type == 0x0102_1994)
    };
    let Some(root) = root.filter(is_in_memory) else {
        return crate::test_tree::skip("space::a_full_volume_in_memory", "/dev/shm is no tmpfs");
    };
    let limit = Limit {
        bytes: 8 * BLOCK,
        files: 9,
    };
    let tree = Tree::open(root.path(), Some(limit)).expect("tree");
    let fixture = TreeFixture::with_tree(root, tree);
    let (_, file) = fixture.create(ROOT, "f", 0o600);
    let (ino, sparse) = fixture.create(ROOT, "sparse", 0o600);
    let change = AttrChange {
        size: Some(4 * BLOCK),
        ..AttrChange::default()
    };
    fixture.ok(FileOp::SetAttr {
        ino,
        handle: None,
        change,
    });
    // A hole, and an end within a block.
    fixture
        .write(file, 4 * BLOCK, &[1; 3 * BLOCK as usize + 9])
        .expect("it fits");
    fixture
        .write(file, 0, &[1; 4 * BLOCK as usize])
        .expect("up to the limit");
    let full = Err(Errno(libc::ENOSPC));
    assert_eq!(fixture.write(file, 9 * BLOCK, b"x"), full);
    for at in 0..8 {
        assert_eq!(
            fixture.write(file, at * BLOCK + 5, b"again"),
            Ok(5),
            "block {at}"
        );
    }
    assert_eq!(
        fixture.write(sparse, BLOCK, b"x"),
        full,
        "a hole takes space"
    );
}

#[test]
fn concurrent_appends_lose_nothing() {
    for limit in [Some(ROOMY), None] {
        let fixture = Arc::new(TreeFixture::new(limit));
        let (_, handle) = fixture.create(ROOT, "log", 0o600);
        std::thread::scope(|scope| {
            for thread in 0..2_u8 {
                let fixture = fixture.clone();
                scope.spawn(move || {
                    for _ in 0..300 {
                        let range = BodyRange {
                            start: 0,
                            length: 100,
                        };
                        let op = FileOp::Write {
                            handle,
                            offset: 0,
                            data: range,
                            append: true,
                        };
                        let wrote = fixture.run_with(op, &[thread; 100]).0;
                        assert_eq!(wrote, Ok(FileReply::Written { length: 100 }));
                    }
                });
            }
        });
        let content = fs::read(fixture.path("log")).expect("read");
        assert_eq!(content.len(), 60_000);
        for record in content.chunks(100) {
            assert!(
                record.iter().all(|byte| *byte == record[0]),
                "a record is torn"
            );
        }
    }
}

#[test]
fn an_unlinked_read_only_file_counts_until_closed() {
    let fixture = TreeFixture::new(Some(ROOMY));
    let (ino, handle) = fixture.create(ROOT, "f", 0o600);
    fixture.write(handle, 0, &[7; 10_000]).expect("write");
    fixture.ok(FileOp::Release { handle });
    let flags = libc::O_RDONLY;
    let opened = fixture.ok(FileOp::Open { ino, flags });
    let FileReply::Opened { handle, .. } = opened else {
        panic!("it opens")
    };
    fixture.ok(FileOp::Unlink {
        parent: ROOT,
        name: b"f".to_vec(),
    });
    assert_eq!(fixture.read(handle, 9_999, 10), Ok(vec![7]));
    assert_eq!(fixture.used(), (3 * BLOCK, 1));
    fixture.ok(FileOp::Release { handle });
    assert_eq!(fixture.used(), (0, 0));
}

#[test]
fn an_unlinked_file_stays_and_counts_until_closed() {
    let fixture = TreeFixture::new(Some(ROOMY));
    let (ino, handle) = fixture.create(ROOT, "f", 0o600);
    fixture.write(handle, 0, &[7; 10_000]).expect("write");
    let used = fixture.tree.used();
    assert_eq!(used, (3 * BLOCK, 1));
    fixture.ok(FileOp::Unlink {
        parent: ROOT,
        name: b"f".to_vec(),
    });
    assert_eq!(fixture.tree.used(), used);
    assert_eq!(fixture.read(handle, 9_999, 10), Ok(vec![7]));
    let FileReply::Attr(attr) = fixture.ok(FileOp::GetAttr { ino, handle: None }) else {
        panic!()
    };
    assert_eq!(attr.nlink, 0);
    fixture.ok(FileOp::Release { handle });
    assert_eq!(fixture.used(), (0, 0));
    // Who found it before its name went may still open it, until the agent forgets the number,
    // which never means another file.
    let open = || FileOp::Open {
        ino,
        flags: libc::O_RDONLY,
    };
    let FileReply::Opened { handle, .. } = fixture.ok(open()) else {
        panic!("it opens")
    };
    assert_eq!(fixture.read(handle, 9_999, 10), Ok(vec![7]));
    assert_eq!(fixture.used(), used);
    fixture.ok(FileOp::Release { handle });
    assert!(fixture.run(FileOp::GetAttr { ino, handle: None }).is_ok());
    for index in 0..50 {
        assert_ne!(fixture.create(ROOT, &format!("g{index}"), 0o600).0, ino);
    }
    fixture.ok(FileOp::Forget { ino, count: 1 });
    assert_eq!(fixture.err(open()), libc::ESTALE);
    assert_eq!(fixture.tree.used(), (0, 50));
}

#[test]
fn space_of_unnamed_files_is_reclaimed_on_demand() {
    let fixture = TreeFixture::new(Some(Limit {
        bytes: 8 * BLOCK,
        files: 2,
    }));
    let remove = |name: &str| FileOp::Unlink {
        parent: ROOT,
        name: name.as_bytes().to_vec(),
    };
    let fill = |name: &str| {
        let (ino, handle) = fixture.create(ROOT, name, 0o600);
        assert_eq!(fixture.write(handle, 0, &[1; 32 << 10]), Ok(8 * BLOCK));
        (ino, handle)
    };
    let (first, handle) = fill("first");
    fixture.ok(FileOp::Release { handle });
    fixture.ok(remove("first"));
    // By writing: as much as there was.
    let (_, handle) = fill("second");
    assert_eq!(fixture.tree.used(), (8 * BLOCK, 1));
    let open = FileOp::Open {
        ino: first,
        flags: libc::O_RDONLY,
    };
    assert_eq!(fixture.err(open), libc::ESTALE);
    // While it is open it counts, and another name finds no space; then no file.
    fixture.ok(remove("second"));
    let (_, other) = fixture.create(ROOT, "third", 0o600);
    assert_eq!(fixture.write(other, 0, &[1]), Err(Errno(libc::ENOSPC)));
    fixture.ok(FileOp::Release { handle });
    assert_eq!(fixture.write(other, 0, &[1]), Ok(1));
    fixture.create(ROOT, "fourth", 0o600);
    assert_eq!(fixture.tree.used(), (BLOCK, 2));
}

#[test]
fn replacing_an_open_file_frees_space_on_close() {
    let fixture = TreeFixture::new(Some(ROOMY));
    let (_, old) = fixture.create(ROOT, "old", 0o600);
    let (_, new) = fixture.create(ROOT, "new", 0o600);
    fixture.write(old, 0, &[1; 8192]).expect("write");
    fixture.write(new, 0, &[2; 4096]).expect("write");
    fixture.rename(ROOT, "new", ROOT, "old", 0).expect("rename");
    assert_eq!(fixture.read(old, 0, 1), Ok(vec![1]));
    assert_eq!(fixture.tree.used(), (3 * BLOCK, 2));
    fixture.ok(FileOp::Release { handle: old });
    assert_eq!(fixture.used(), (BLOCK, 1));
    assert_eq!(fs::read(fixture.path("old")).expect("read"), [2; 4096]);
}

/// Says most when it runs without privilege: to root no directory is closed.
#[test]
fn closed_directories_are_counted_and_stay_closed() {
    let fixture = TreeFixture::new(Some(ROOMY));
    let closed = fixture.path("closed");
    fs::create_dir_all(closed.join("inner")).expect("mkdir");
    fs::write(closed.join("inner/f"), b"x").expect("write");
    for (mode, path) in [(0o000, closed.join("inner")), (0o400, closed.clone())] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("chmod");
    }
    let tree = Tree::open(&fixture.path(""), Some(ROOMY)).expect("open");
    assert_eq!(tree.used().1, 3);
    let mode = |path| fs::metadata(path).expect("stat").permissions().mode() & 0o777;
    assert_eq!(mode(closed.clone()), 0o400);
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).expect("chmod");
    assert_eq!(mode(closed.join("inner")), 0o000);
    fs::set_permissions(closed.join("inner"), fs::Permissions::from_mode(0o700)).expect("chmod");
}

#[test]
fn full_volumes_report_and_replace_existing_names() {
    for fixture in [
        TreeFixture::new(Some(Limit {
            bytes: 8 * BLOCK,
            files: 2,
        })),
        TreeFixture::without_btimes(Some(Limit {
            bytes: 8 * BLOCK,
            files: 2,
        })),
    ] {
        let (_, handle) = fixture.create(ROOT, "full", 0o600);
        fixture.create(ROOT, "empty", 0o600);
        assert_eq!(fixture.write(handle, 0, &[1; 32 << 10]), Ok(8 * BLOCK));
        let make = |name: &str| FileOp::MakeDirectory {
            parent: ROOT,
            name: name.as_bytes().to_vec(),
            mode: 0o700,
        };
        assert_eq!(fixture.err(make("full")), libc::EEXIST);
        assert_eq!(fixture.err(make("other")), libc::ENOSPC);
        let rename = |from, to| {
            fixture
                .rename(ROOT, from, ROOT, to, 0)
                .map_err(|error| error.0)
        };
        assert_eq!(rename("absent", "full"), Err(libc::ENOENT));
        assert_eq!(rename("absent", "other"), Err(libc::ENOENT));
        assert!(rename("full", "full").is_ok());
        assert!(rename("empty", "full").is_ok());
        assert_eq!(fixture.names(ROOT), [".", "..", "full"]);
        // What was replaced is open: it still counts, and no longer when it is closed.
        assert_eq!(fixture.tree.used(), (8 * BLOCK, 2));
        fixture.ok(FileOp::Release { handle });
        assert_eq!(fixture.used(), (0, 1));
    }
}
