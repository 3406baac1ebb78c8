//! Every operation on a real directory, its limits, and attempts to leave it.

mod bench;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::sync::Arc;

use bafs_proto::file_op::{AttrChange, BodyRange, Errno, FileOp, FileReply, FileTime, SetTime};
use bafs_proto::ids::{HandleId, InodeNo};
use bafs_tree::{Limit, Tree};
use bench::{Bench, CALLER, ROOT};
use nix::libc;

const BLOCK: u64 = 4096;
const ROOMY: Limit = Limit {
    bytes: 64 << 20,
    files: 10_000,
};

fn disk_bytes(bench: &Bench) -> u64 {
    fn sum(path: &std::path::Path, seen: &mut std::collections::BTreeSet<u64>) -> u64 {
        let mut bytes = 0;
        for entry in fs::read_dir(path).expect("directory") {
            let entry = entry.expect("entry");
            let found = entry.metadata().expect("metadata");
            if seen.insert(found.ino()) {
                bytes += found.blocks() * 512;
            }
            if found.is_dir() {
                bytes += sum(&entry.path(), seen);
            }
        }
        bytes
    }
    let root = fs::metadata(bench.path("")).expect("root").blocks() * 512;
    root.saturating_sub(BLOCK) + sum(&bench.path(""), &mut std::collections::BTreeSet::new())
}

#[test]
fn what_is_written_is_read_and_is_on_the_host() {
    let bench = Bench::new(Some(ROOMY));
    let (ino, handle) = bench.create(ROOT, "f", 0o640);
    assert_eq!(bench.write(handle, 0, b"hello world"), Ok(11));
    assert_eq!(bench.read(handle, 6, 100), Ok(b"world".to_vec()));
    assert_eq!(bench.read(handle, 11, 100), Ok(Vec::new()));
    assert_eq!(fs::read(bench.path("f")).expect("read"), b"hello world");
    let mode = fs::metadata(bench.path("f"))
        .expect("stat")
        .permissions()
        .mode();
    assert_eq!(mode & 0o7777, 0o640);
    let FileReply::Attr(attr) = bench.ok(FileOp::GetAttr { ino, handle: None }) else {
        panic!()
    };
    assert_eq!((attr.size, attr.ino), (11, ino));
    assert_eq!(
        bench.ok(FileOp::Fsync {
            handle,
            data_only: false
        }),
        FileReply::Done
    );
    assert_eq!(bench.ok(FileOp::Release { handle }), FileReply::Done);
    assert_eq!(bench.err(FileOp::Release { handle }), libc::EBADF);
}

#[test]
fn names_that_leave_the_directory_are_refused() {
    let bench = Bench::new(None);
    for name in ["", ".", "..", "a/b", "/etc", "../x", "a\0b"] {
        let name = name.as_bytes().to_vec();
        let lookup = FileOp::Lookup {
            parent: ROOT,
            name: name.clone(),
        };
        assert_eq!(bench.err(lookup), libc::EINVAL, "{name:?}");
        let make = FileOp::MakeDirectory {
            parent: ROOT,
            name,
            mode: 0o755,
        };
        assert_eq!(bench.err(make), libc::EINVAL);
    }
}

#[test]
fn links_that_lead_out_are_never_followed() {
    let bench = Bench::new(None);
    let outside = tempfile::tempdir().expect("directory");
    fs::write(outside.path().join("secret"), b"s").expect("write");
    symlink(outside.path(), bench.path("out")).expect("link");
    let out = bench.lookup(ROOT, "out").expect("the link itself").ino;
    let inside = FileOp::Lookup {
        parent: out,
        name: b"secret".to_vec(),
    };
    assert_eq!(bench.err(inside), libc::ENOTDIR);
    assert_eq!(
        bench.err(FileOp::Open {
            ino: out,
            flags: libc::O_RDONLY
        }),
        libc::ELOOP
    );
    assert_eq!(bench.err(FileOp::OpenDirectory { ino: out }), libc::ENOTDIR);
    let target = outside.path().to_str().expect("text").as_bytes().to_vec();
    assert_eq!(
        bench.ok(FileOp::ReadLink { ino: out }),
        FileReply::Bytes(target)
    );
    let chmod = AttrChange {
        mode: Some(0o777),
        ..AttrChange::default()
    };
    let change = FileOp::SetAttr {
        ino: out,
        handle: None,
        change: chmod,
    };
    assert_eq!(bench.err(change), libc::EOPNOTSUPP);
}

#[test]
fn name_lengths_are_those_of_the_host() {
    let bench = Bench::new(Some(ROOMY));
    bench.create(ROOT, &"n".repeat(255), 0o600);
    let name = vec![b'n'; 256];
    let create = FileOp::Create {
        parent: ROOT,
        name: name.clone(),
        mode: 0o600,
        flags: 0,
    };
    assert_eq!(bench.err(create), libc::ENAMETOOLONG);
    assert_eq!(
        bench.err(FileOp::Lookup { parent: ROOT, name }),
        libc::ENAMETOOLONG
    );
    assert_eq!(bench.tree.used().1, 1);
}

#[test]
fn unknown_numbers_are_stale_and_foreign_kinds_are_not_opened() {
    let bench = Bench::new(None);
    let ino = InodeNo(4711);
    assert_eq!(
        bench.err(FileOp::GetAttr { ino, handle: None }),
        libc::ESTALE
    );
    assert_eq!(
        bench.err(FileOp::Lookup {
            parent: ino,
            name: b"x".to_vec()
        }),
        libc::ESTALE
    );
    let fifo = FileOp::MakeNode {
        parent: ROOT,
        name: b"fifo".to_vec(),
        mode: libc::S_IFIFO | 0o600,
        rdev: 0,
    };
    let FileReply::Attr(attr) = bench.ok(fifo) else {
        panic!()
    };
    assert_eq!(
        bench.err(FileOp::Open {
            ino: attr.ino,
            flags: libc::O_RDWR
        }),
        libc::ENXIO
    );
    let strange = FileOp::MakeNode {
        parent: ROOT,
        name: b"x".to_vec(),
        mode: libc::S_IFDIR | 0o600,
        rdev: 0,
    };
    assert_eq!(bench.err(strange), libc::EINVAL);
}

#[test]
fn a_session_for_reading_changes_nothing() {
    let bench = Bench::new(None);
    fs::write(bench.path("f"), b"x").expect("write");
    let reader = bench.tree.session(false);
    let run = |op: FileOp| reader.run(CALLER, &op, b"", &mut Vec::new());
    let found = run(FileOp::Lookup {
        parent: ROOT,
        name: b"f".to_vec(),
    });
    let Ok(FileReply::Attr(attr)) = found else {
        panic!("{found:?}")
    };
    let read_only = Err(Errno(libc::EROFS));
    for flags in [libc::O_RDWR, libc::O_WRONLY, libc::O_RDONLY | libc::O_TRUNC] {
        assert_eq!(
            run(FileOp::Open {
                ino: attr.ino,
                flags
            }),
            read_only
        );
    }
    assert_eq!(
        run(FileOp::Unlink {
            parent: ROOT,
            name: b"f".to_vec()
        }),
        read_only
    );
    assert!(
        run(FileOp::Open {
            ino: attr.ino,
            flags: libc::O_RDONLY
        })
        .is_ok()
    );
}

#[test]
fn an_unlinked_file_lives_and_counts_until_it_is_closed() {
    let bench = Bench::new(Some(ROOMY));
    let (ino, handle) = bench.create(ROOT, "f", 0o600);
    bench.write(handle, 0, &[7; 10_000]).expect("write");
    let used = bench.tree.used();
    assert_eq!(used, (3 * BLOCK, 1));
    bench.ok(FileOp::Unlink {
        parent: ROOT,
        name: b"f".to_vec(),
    });
    assert_eq!(bench.tree.used(), used);
    assert_eq!(bench.read(handle, 9_999, 10), Ok(vec![7]));
    let FileReply::Attr(attr) = bench.ok(FileOp::GetAttr { ino, handle: None }) else {
        panic!()
    };
    assert_eq!(attr.nlink, 0);
    bench.ok(FileOp::Release { handle });
    assert_eq!(bench.tree.used(), (0, 0));
    // The number may be asked for until the agent forgets it, and never means another file.
    assert!(bench.run(FileOp::GetAttr { ino, handle: None }).is_ok());
    assert_eq!(
        bench.err(FileOp::Open {
            ino,
            flags: libc::O_RDONLY
        }),
        libc::ESTALE
    );
    for index in 0..50 {
        assert_ne!(bench.create(ROOT, &format!("g{index}"), 0o600).0, ino);
    }
}

#[test]
fn rename_replaces_an_open_file_and_gives_its_space_back() {
    let bench = Bench::new(Some(ROOMY));
    let (_, old) = bench.create(ROOT, "old", 0o600);
    let (_, new) = bench.create(ROOT, "new", 0o600);
    bench.write(old, 0, &[1; 8192]).expect("write");
    bench.write(new, 0, &[2; 4096]).expect("write");
    bench.rename(ROOT, "new", ROOT, "old", 0).expect("rename");
    assert_eq!(bench.read(old, 0, 1), Ok(vec![1]));
    assert_eq!(bench.tree.used(), (3 * BLOCK, 2));
    bench.ok(FileOp::Release { handle: old });
    assert_eq!(bench.tree.used(), (BLOCK, 1));
    assert_eq!(fs::read(bench.path("old")).expect("read"), [2; 4096]);
}

#[test]
fn rename_flags_are_those_of_the_host() {
    let bench = Bench::new(Some(ROOMY));
    let (a, _) = bench.create(ROOT, "a", 0o600);
    let (b, _) = bench.create(ROOT, "b", 0o600);
    let noreplace = bench.rename(ROOT, "a", ROOT, "b", libc::RENAME_NOREPLACE);
    assert_eq!(noreplace, Err(Errno(libc::EEXIST)));
    bench
        .rename(ROOT, "a", ROOT, "b", libc::RENAME_EXCHANGE)
        .expect("exchange");
    assert_eq!(bench.lookup(ROOT, "a").expect("a").ino, b);
    assert_eq!(bench.lookup(ROOT, "b").expect("b").ino, a);
    let missing = bench.rename(ROOT, "a", ROOT, "c", libc::RENAME_EXCHANGE);
    assert_eq!(missing, Err(Errno(libc::ENOENT)));
    for flags in [libc::RENAME_WHITEOUT, 8, u32::MAX] {
        assert_eq!(
            bench.rename(ROOT, "a", ROOT, "c", flags),
            Err(Errno(libc::EINVAL))
        );
    }
    assert_eq!(bench.tree.used().1, 2);
}

#[test]
fn hard_links_are_one_file_that_counts_once() {
    let bench = Bench::new(Some(ROOMY));
    let (ino, handle) = bench.create(ROOT, "a", 0o600);
    bench.write(handle, 0, b"x").expect("write");
    bench.ok(FileOp::Release { handle });
    let link = FileOp::MakeLink {
        ino,
        parent: ROOT,
        name: b"b".to_vec(),
    };
    let FileReply::Attr(attr) = bench.ok(link.clone()) else {
        panic!()
    };
    assert_eq!((attr.ino, attr.nlink), (ino, 2));
    assert_eq!(bench.err(link), libc::EEXIST);
    assert_eq!(bench.tree.used(), (BLOCK, 1));
    bench.ok(FileOp::Unlink {
        parent: ROOT,
        name: b"a".to_vec(),
    });
    assert_eq!(bench.tree.used(), (BLOCK, 1));
    bench.ok(FileOp::Unlink {
        parent: ROOT,
        name: b"b".to_vec(),
    });
    assert_eq!(bench.tree.used(), (0, 0));
    let again = Tree::open(&bench.path(""), Some(ROOMY)).expect("open");
    assert_eq!(again.used(), (0, 0));
}

#[test]
fn attributes_change_as_asked() {
    let bench = Bench::new(Some(ROOMY));
    let (ino, handle) = bench.create(ROOT, "f", 0o600);
    bench.write(handle, 0, &[1; 20_000]).expect("write");
    let time = FileTime {
        seconds: -5,
        nanoseconds: 123,
    };
    let change = AttrChange {
        mode: Some(0o4751),
        size: Some(5000),
        mtime: Some(SetTime::At(time)),
        ..AttrChange::default()
    };
    let set = FileOp::SetAttr {
        ino,
        handle: None,
        change,
    };
    let FileReply::Attr(attr) = bench.ok(set) else {
        panic!()
    };
    assert_eq!((attr.size, attr.mtime), (5000, time));
    assert_eq!(bench.tree.used().0, 2 * BLOCK);
    let change = AttrChange {
        size: Some(1 << 30),
        ..AttrChange::default()
    };
    bench.ok(FileOp::SetAttr {
        ino,
        handle: Some(handle),
        change,
    });
    assert_eq!(bench.tree.used().0, 2 * BLOCK);
    let bad = FileTime {
        seconds: 0,
        nanoseconds: 1_000_000_000,
    };
    let change = AttrChange {
        atime: Some(SetTime::At(bad)),
        ..AttrChange::default()
    };
    assert_eq!(
        bench.err(FileOp::SetAttr {
            ino,
            handle: None,
            change
        }),
        libc::EINVAL
    );
}

#[test]
fn extended_attributes_work_and_trusted_ones_do_not() {
    let bench = Bench::new(Some(ROOMY));
    let (ino, _) = bench.create(ROOT, "f", 0o600);
    let set = |name: &str, flags| FileOp::SetXattr {
        ino,
        name: name.as_bytes().to_vec(),
        value: vec![5; 300],
        flags,
    };
    bench.ok(set("user.a", 0));
    assert_eq!(bench.err(set("user.a", libc::XATTR_CREATE)), libc::EEXIST);
    assert_eq!(bench.err(set("user.b", libc::XATTR_REPLACE)), libc::ENODATA);
    assert_eq!(bench.err(set("trusted.a", 0)), libc::EOPNOTSUPP);
    let get = FileOp::GetXattr {
        ino,
        name: b"user.a".to_vec(),
    };
    assert_eq!(bench.ok(get.clone()), FileReply::Bytes(vec![5; 300]));
    assert_eq!(
        bench.ok(FileOp::ListXattr { ino }),
        FileReply::Bytes(b"user.a\0".to_vec())
    );
    assert_eq!(bench.tree.used().0, disk_bytes(&bench));
    bench.ok(FileOp::RemoveXattr {
        ino,
        name: b"user.a".to_vec(),
    });
    assert_eq!(bench.err(get), libc::ENODATA);
}

#[test]
fn sparse_files_count_what_they_take_and_holes_are_found() {
    let bench = Bench::new(Some(ROOMY));
    let (_, handle) = bench.create(ROOT, "f", 0o600);
    bench.write(handle, 1 << 30, b"x").expect("write");
    assert_eq!(bench.tree.used().0, BLOCK);
    let data = FileOp::Seek {
        handle,
        offset: 0,
        whence: libc::SEEK_DATA,
    };
    assert_eq!(bench.ok(data), FileReply::Position(1 << 30));
    let hole = FileOp::Seek {
        handle,
        offset: 5,
        whence: libc::SEEK_HOLE,
    };
    assert_eq!(bench.ok(hole), FileReply::Position(5));
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let punch = FileOp::Allocate {
        handle,
        mode: punch,
        offset: 1 << 30,
        length: BLOCK,
    };
    bench.ok(punch);
    assert_eq!(bench.tree.used().0, 0);
}

#[test]
fn copies_stay_within_the_limit() {
    let bench = Bench::new(Some(Limit {
        bytes: 12 * BLOCK,
        files: 9,
    }));
    let (_, source) = bench.create(ROOT, "a", 0o600);
    let (_, target) = bench.create(ROOT, "b", 0o600);
    bench.write(source, 0, &[9; 8 * 4096]).expect("write");
    let copy = |source_offset, target_offset| FileOp::CopyRange {
        source,
        source_offset,
        target,
        target_offset,
        length: u64::MAX,
    };
    assert_eq!(
        bench.ok(copy(0, 0)),
        FileReply::Written { length: 4 * BLOCK }
    );
    assert_eq!(
        bench.ok(copy(8 * BLOCK, 0)),
        FileReply::Written { length: 0 }
    );
    assert_eq!(bench.err(copy(0, 4 * BLOCK)), libc::ENOSPC);
    assert_eq!(bench.read(target, 4 * BLOCK - 1, 10), Ok(vec![9]));
    assert_eq!(bench.tree.used().0, 12 * BLOCK);
}

#[test]
fn bytes_end_exactly_at_the_limit() {
    let bench = Bench::new(Some(Limit {
        bytes: 5 * BLOCK,
        files: 10,
    }));
    let (ino, handle) = bench.create(ROOT, "f", 0o600);
    assert_eq!(bench.write(handle, 0, &[1; 7 * 4096]), Ok(5 * BLOCK));
    assert_eq!(
        bench.write(handle, 5 * BLOCK, b"x"),
        Err(Errno(libc::ENOSPC))
    );
    assert_eq!(bench.tree.stat().free_bytes, 0);
    // What has space already may be written again, and as much of the rest as fits.
    assert_eq!(bench.write(handle, 100, &[2; 3 * 4096]), Ok(3 * BLOCK));
    assert_eq!(
        bench.write(handle, 4 * BLOCK + 1, &[3; 8192]),
        Ok(BLOCK - 1)
    );
    let grow = |mode, offset, length| FileOp::Allocate {
        handle,
        mode,
        offset,
        length,
    };
    assert_eq!(bench.err(grow(0, 5 * BLOCK, 1)), libc::ENOSPC);
    bench.ok(grow(0, 0, 5 * BLOCK));
    let change = AttrChange {
        size: Some(4 * BLOCK),
        ..AttrChange::default()
    };
    bench.ok(FileOp::SetAttr {
        ino,
        handle: None,
        change,
    });
    // Space that was set aside is there when it is written.
    bench.ok(grow(libc::FALLOC_FL_KEEP_SIZE, 4 * BLOCK, 10));
    assert_eq!(bench.tree.stat().free_bytes, 0);
    assert_eq!(bench.write(handle, 4 * BLOCK, &[4; 4096]), Ok(BLOCK));
    assert_eq!(bench.tree.used().0, disk_bytes(&bench));
    // A full volume still takes names into directories that have room, and renames.
    bench.create(ROOT, "empty", 0o600);
    bench.rename(ROOT, "empty", ROOT, "f2", 0).expect("rename");
    let directory = FileOp::MakeDirectory {
        parent: ROOT,
        name: b"d".to_vec(),
        mode: 0o755,
    };
    assert_eq!(bench.err(directory), libc::ENOSPC);
    bench.ok(FileOp::Unlink {
        parent: ROOT,
        name: b"f".to_vec(),
    });
    bench.ok(FileOp::Release { handle });
    assert_eq!(bench.tree.used(), (0, 1));
}

#[test]
fn files_end_exactly_at_the_limit() {
    let bench = Bench::new(Some(Limit {
        bytes: 64 << 20,
        files: 3,
    }));
    bench.ok(FileOp::MakeDirectory {
        parent: ROOT,
        name: b"d".to_vec(),
        mode: 0o755,
    });
    let link = |name: &str| FileOp::MakeSymlink {
        parent: ROOT,
        name: name.as_bytes().to_vec(),
        target: b"t".to_vec(),
    };
    assert_eq!(bench.tree.used().1, 1);
    bench.ok(link("l"));
    assert_eq!(bench.tree.used(), (4096, 2));
    bench.create(ROOT, "f", 0o600);
    assert_eq!(bench.err(link("l2")), libc::ENOSPC);
    assert_eq!(bench.err(link("l")), libc::EEXIST);
    assert_eq!(bench.tree.stat().free_files, 0);
    bench.ok(FileOp::RemoveDirectory {
        parent: ROOT,
        name: b"d".to_vec(),
    });
    bench.ok(link("l2"));
    assert_eq!(bench.tree.used().1, 3);
}

#[test]
fn writers_at_once_never_pass_the_limit() {
    let limit = Limit {
        bytes: 100 * BLOCK,
        files: 40,
    };
    let bench = Bench::new(Some(limit));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let bench = &bench;
            scope.spawn(move || {
                let session = bench.tree.session(true);
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
                        let (bytes, files) = bench.tree.used();
                        assert!(
                            bytes <= limit.bytes && files <= limit.files,
                            "{bytes} {files}"
                        );
                    }
                }
            });
        }
    });
    assert_eq!(bench.tree.used().0, disk_bytes(&bench));
    assert!(
        bench.tree.used().0 > limit.bytes - 4 * BLOCK,
        "writers filled the volume"
    );
    let counted = Tree::open(&bench.path(""), Some(limit)).expect("open");
    assert_eq!(counted.used(), bench.tree.used());
}

#[test]
fn appends_at_once_lose_nothing() {
    for limit in [Some(ROOMY), None] {
        let bench = Arc::new(Bench::new(limit));
        let (_, handle) = bench.create(ROOT, "log", 0o600);
        std::thread::scope(|scope| {
            for thread in 0..2_u8 {
                let bench = bench.clone();
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
                        let wrote = bench.run_with(op, &[thread; 100]).0;
                        assert_eq!(wrote, Ok(FileReply::Written { length: 100 }));
                    }
                });
            }
        });
        let content = fs::read(bench.path("log")).expect("read");
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
fn a_listing_stays_whole_while_the_directory_changes() {
    let bench = Bench::new(None);
    for index in 0..2000 {
        fs::write(bench.path(&format!("stay{index}")), b"").expect("write");
    }
    let FileReply::Opened { handle, .. } = bench.ok(FileOp::OpenDirectory { ino: ROOT }) else {
        panic!()
    };
    let (mut cookie, mut seen, mut round) = (0, Vec::new(), 0);
    loop {
        let op = FileOp::ReadDirectory {
            handle,
            cookie,
            bytes_max: 2000,
            plus: round % 2 == 0,
        };
        let FileReply::Entries(entries) = bench.ok(op) else {
            panic!()
        };
        let Some(last) = entries.last() else { break };
        cookie = last.cookie;
        seen.extend(
            entries
                .iter()
                .map(|e| String::from_utf8(e.name.clone()).expect("text")),
        );
        round += 1;
        fs::write(bench.path(&format!("new{round}")), b"").expect("write");
        fs::remove_file(bench.path(&format!("new{round}"))).expect("remove");
    }
    let mut stay: Vec<_> = seen
        .iter()
        .filter(|name| name.starts_with("stay"))
        .collect();
    stay.sort();
    stay.dedup();
    assert_eq!(stay.len(), 2000, "each name that stayed is there");
    let repeated = seen.iter().filter(|name| name.starts_with("stay")).count();
    assert_eq!(repeated, 2000, "and once only");
    let again = FileOp::ReadDirectory {
        handle,
        cookie: 0,
        bytes_max: 100,
        plus: false,
    };
    assert!(matches!(bench.ok(again), FileReply::Entries(e) if !e.is_empty()));
    bench.ok(FileOp::ReleaseDirectory { handle });
}

#[test]
fn the_hidden_name_is_not_there() {
    let root = tempfile::tempdir().expect("directory");
    fs::create_dir(root.path().join("own")).expect("mkdir");
    let fd = fs::File::open(root.path()).expect("open").into();
    let tree = Tree::open_at(fd, None, Some(b"own")).expect("tree");
    let bench = Bench::over(root, tree);
    assert_eq!(bench.lookup(ROOT, "own"), Err(Errno(libc::ENOENT)));
    let make = FileOp::MakeDirectory {
        parent: ROOT,
        name: b"own".to_vec(),
        mode: 0o755,
    };
    assert_eq!(bench.err(make), libc::EACCES);
    bench.create(ROOT, "f", 0o600);
    assert_eq!(
        bench.rename(ROOT, "own", ROOT, "x", 0),
        Err(Errno(libc::ENOENT))
    );
    assert_eq!(
        bench.rename(ROOT, "f", ROOT, "own", 0),
        Err(Errno(libc::EACCES))
    );
    let names = bench.names(ROOT);
    assert_eq!(names, [".", "..", "f"]);
}

#[test]
fn new_files_belong_to_the_caller_when_the_server_may_do_that() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let bench = Bench::new(Some(ROOMY));
    let FileReply::Attr(plain) = bench.ok(FileOp::MakeDirectory {
        parent: ROOT,
        name: b"d".to_vec(),
        mode: 0o755,
    }) else {
        panic!()
    };
    assert_eq!((plain.uid, plain.gid), (CALLER.uid, CALLER.gid));
    let change = AttrChange {
        gid: Some(77),
        mode: Some(0o2775),
        ..AttrChange::default()
    };
    bench.ok(FileOp::SetAttr {
        ino: plain.ino,
        handle: None,
        change,
    });
    let (ino, _) = bench.create(plain.ino, "f", 0o664);
    let FileReply::Attr(attr) = bench.ok(FileOp::GetAttr { ino, handle: None }) else {
        panic!()
    };
    assert_eq!(
        (attr.uid, attr.gid, attr.mode & 0o7777),
        (CALLER.uid, 77, 0o664)
    );
    let below = FileOp::MakeDirectory {
        parent: plain.ino,
        name: b"e".to_vec(),
        mode: 0o755,
    };
    let FileReply::Attr(attr) = bench.ok(below) else {
        panic!()
    };
    assert_eq!((attr.gid, attr.mode & 0o7777), (77, 0o2755));
}

#[test]
fn garbage_in_requests_is_an_error_and_no_more() {
    let bench = Bench::new(Some(ROOMY));
    let (_, handle) = bench.create(ROOT, "f", 0o600);
    for (start, length) in [(0, 5), (5, 0), (u32::MAX, u32::MAX)] {
        let range = BodyRange { start, length };
        let op = FileOp::Write {
            handle,
            offset: 0,
            data: range,
            append: false,
        };
        assert_eq!(bench.run_with(op, b"1234").0, Err(Errno(libc::EINVAL)));
    }
    assert_eq!(bench.write(handle, u64::MAX, b"x"), Err(Errno(libc::EFBIG)));
    assert_eq!(
        bench.write(handle, i64::MAX as u64, b"x"),
        Err(Errno(libc::EFBIG))
    );
    assert_eq!(bench.read(handle, u64::MAX, 10), Err(Errno(libc::EINVAL)));
    assert_eq!(bench.read(handle, 0, u32::MAX), Err(Errno(libc::EINVAL)));
    assert_eq!(bench.read(HandleId(99), 0, 1), Err(Errno(libc::EBADF)));
    let allocate = FileOp::Allocate {
        handle,
        mode: -1,
        offset: 0,
        length: u64::MAX,
    };
    assert!(bench.run(allocate).is_err());
    let seek = FileOp::Seek {
        handle,
        offset: -1,
        whence: libc::SEEK_DATA,
    };
    assert_eq!(bench.err(seek), libc::ENXIO);
    assert_eq!(bench.tree.used().0, 0);
}
