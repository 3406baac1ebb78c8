//! Every operation on a real directory, and attempts to leave it.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use crate::test_tree::{BLOCK, CALLER, ROOMY, ROOT, TreeFixture, disk_bytes};
use bafs_proto::file_op::{AttrChange, BodyRange, Errno, FileOp, FileReply, FileTime, SetTime};
use bafs_proto::ids::{HandleId, InodeNo};
use bafs_tree::{Session, Tree};
use nix::libc;

#[test]
fn written_data_is_readable_and_on_the_host() {
    let fixture = TreeFixture::new(Some(ROOMY));
    let (ino, handle) = fixture.create(ROOT, "f", 0o640);
    assert_eq!(fixture.write(handle, 0, b"hello world"), Ok(11));
    assert_eq!(fixture.read(handle, 6, 100), Ok(b"world".to_vec()));
    assert_eq!(fixture.read(handle, 11, 100), Ok(Vec::new()));
    assert_eq!(fs::read(fixture.path("f")).expect("read"), b"hello world");
    let mode = fs::metadata(fixture.path("f"))
        .expect("stat")
        .permissions()
        .mode();
    assert_eq!(mode & 0o7777, 0o640);
    let FileReply::Attr(attr) = fixture.ok(FileOp::GetAttr { ino, handle: None }) else {
        panic!()
    };
    assert_eq!((attr.size, attr.ino), (11, ino));
    assert_eq!(
        fixture.ok(FileOp::Fsync {
            handle,
            data_only: false
        }),
        FileReply::Done
    );
    assert_eq!(fixture.ok(FileOp::Release { handle }), FileReply::Done);
    assert_eq!(fixture.err(FileOp::Release { handle }), libc::EBADF);
}

#[test]
fn names_that_leave_the_directory_are_refused() {
    let fixture = TreeFixture::new(None);
    for name in ["", ".", "..", "a/b", "/etc", "../x", "a\0b"] {
        let name = name.as_bytes().to_vec();
        let lookup = FileOp::Lookup {
            parent: ROOT,
            name: name.clone(),
        };
        assert_eq!(fixture.err(lookup), libc::EINVAL, "{name:?}");
        let make = FileOp::MakeDirectory {
            parent: ROOT,
            name,
            mode: 0o755,
        };
        assert_eq!(fixture.err(make), libc::EINVAL);
    }
}

#[test]
fn links_that_lead_out_are_never_followed() {
    let fixture = TreeFixture::new(None);
    let outside = tempfile::tempdir().expect("directory");
    fs::write(outside.path().join("secret"), b"s").expect("write");
    symlink(outside.path(), fixture.path("out")).expect("link");
    let out = fixture.lookup(ROOT, "out").expect("the link itself").ino;
    let inside = FileOp::Lookup {
        parent: out,
        name: b"secret".to_vec(),
    };
    assert_eq!(fixture.err(inside), libc::ENOTDIR);
    assert_eq!(
        fixture.err(FileOp::Open {
            ino: out,
            flags: libc::O_RDONLY
        }),
        libc::ELOOP
    );
    assert_eq!(
        fixture.err(FileOp::OpenDirectory { ino: out }),
        libc::ENOTDIR
    );
    let target = outside.path().to_str().expect("text").as_bytes().to_vec();
    assert_eq!(
        fixture.ok(FileOp::ReadLink { ino: out }),
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
    assert_eq!(fixture.err(change), libc::EOPNOTSUPP);
}

#[test]
fn name_length_limits_match_the_host() {
    let fixture = TreeFixture::new(Some(ROOMY));
    fixture.create(ROOT, &"n".repeat(255), 0o600);
    let name = vec![b'n'; 256];
    let create = FileOp::Create {
        parent: ROOT,
        name: name.clone(),
        mode: 0o600,
        flags: 0,
    };
    assert_eq!(fixture.err(create), libc::ENAMETOOLONG);
    assert_eq!(
        fixture.err(FileOp::Lookup { parent: ROOT, name }),
        libc::ENAMETOOLONG
    );
    assert_eq!(fixture.tree.used().1, 1);
}

#[test]
fn unknown_inodes_are_stale_and_fifos_not_opened() {
    let fixture = TreeFixture::new(None);
    let ino = InodeNo(4711);
    assert_eq!(
        fixture.err(FileOp::GetAttr { ino, handle: None }),
        libc::ESTALE
    );
    assert_eq!(
        fixture.err(FileOp::Lookup {
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
    let FileReply::Attr(attr) = fixture.ok(fifo) else {
        panic!()
    };
    assert_eq!(
        fixture.err(FileOp::Open {
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
    assert_eq!(fixture.err(strange), libc::EINVAL);
}

#[test]
fn a_read_only_session_changes_nothing() {
    let fixture = TreeFixture::new(None);
    fs::write(fixture.path("f"), b"x").expect("write");
    let reader = Session::new(fixture.tree.clone(), false);
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
fn rename_flags_behave_as_on_the_host() {
    let fixture = TreeFixture::new(Some(ROOMY));
    let (a, _) = fixture.create(ROOT, "a", 0o600);
    let (b, _) = fixture.create(ROOT, "b", 0o600);
    let noreplace = fixture.rename(ROOT, "a", ROOT, "b", libc::RENAME_NOREPLACE);
    assert_eq!(noreplace, Err(Errno(libc::EEXIST)));
    fixture
        .rename(ROOT, "a", ROOT, "b", libc::RENAME_EXCHANGE)
        .expect("exchange");
    assert_eq!(fixture.lookup(ROOT, "a").expect("a").ino, b);
    assert_eq!(fixture.lookup(ROOT, "b").expect("b").ino, a);
    let missing = fixture.rename(ROOT, "a", ROOT, "c", libc::RENAME_EXCHANGE);
    assert_eq!(missing, Err(Errno(libc::ENOENT)));
    for flags in [libc::RENAME_WHITEOUT, 8, u32::MAX] {
        assert_eq!(
            fixture.rename(ROOT, "a", ROOT, "c", flags),
            Err(Errno(libc::EINVAL))
        );
    }
    assert_eq!(fixture.tree.used().1, 2);
}

#[test]
fn hard_links_count_as_one_file() {
    let fixture = TreeFixture::new(Some(ROOMY));
    let (ino, handle) = fixture.create(ROOT, "a", 0o600);
    fixture.write(handle, 0, b"x").expect("write");
    fixture.ok(FileOp::Release { handle });
    let link = FileOp::MakeLink {
        ino,
        parent: ROOT,
        name: b"b".to_vec(),
    };
    let FileReply::Attr(attr) = fixture.ok(link.clone()) else {
        panic!()
    };
    assert_eq!((attr.ino, attr.nlink), (ino, 2));
    assert_eq!(fixture.err(link), libc::EEXIST);
    assert_eq!(fixture.tree.used(), (BLOCK, 1));
    fixture.ok(FileOp::Unlink {
        parent: ROOT,
        name: b"a".to_vec(),
    });
    assert_eq!(fixture.tree.used(), (BLOCK, 1));
    fixture.ok(FileOp::Unlink {
        parent: ROOT,
        name: b"b".to_vec(),
    });
    assert_eq!(fixture.used(), (0, 0));
    let again = Tree::open(&fixture.path(""), Some(ROOMY)).expect("open");
    assert_eq!(again.used(), (0, 0));
}

#[test]
fn attributes_change_as_asked() {
    let fixture = TreeFixture::new(Some(ROOMY));
    let (ino, handle) = fixture.create(ROOT, "f", 0o600);
    fixture.write(handle, 0, &[1; 20_000]).expect("write");
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
    let FileReply::Attr(attr) = fixture.ok(set) else {
        panic!()
    };
    assert_eq!((attr.size, attr.mtime), (5000, time));
    assert_eq!(fixture.tree.used().0, 2 * BLOCK);
    let change = AttrChange {
        size: Some(1 << 30),
        ..AttrChange::default()
    };
    fixture.ok(FileOp::SetAttr {
        ino,
        handle: Some(handle),
        change,
    });
    assert_eq!(fixture.tree.used().0, 2 * BLOCK);
    let bad = FileTime {
        seconds: 0,
        nanoseconds: 1_000_000_000,
    };
    let change = AttrChange {
        atime: Some(SetTime::At(bad)),
        ..AttrChange::default()
    };
    assert_eq!(
        fixture.err(FileOp::SetAttr {
            ino,
            handle: None,
            change
        }),
        libc::EINVAL
    );
}

#[test]
fn user_xattrs_work_and_trusted_ones_are_refused() {
    let fixture = TreeFixture::new(Some(ROOMY));
    let (ino, _) = fixture.create(ROOT, "f", 0o600);
    let set = |name: &str, flags| FileOp::SetXattr {
        ino,
        name: name.as_bytes().to_vec(),
        value: vec![5; 300],
        flags,
    };
    fixture.ok(set("user.a", 0));
    assert_eq!(fixture.err(set("user.a", libc::XATTR_CREATE)), libc::EEXIST);
    assert_eq!(
        fixture.err(set("user.b", libc::XATTR_REPLACE)),
        libc::ENODATA
    );
    assert_eq!(fixture.err(set("trusted.a", 0)), libc::EOPNOTSUPP);
    let get = FileOp::GetXattr {
        ino,
        name: b"user.a".to_vec(),
    };
    assert_eq!(fixture.ok(get.clone()), FileReply::Bytes(vec![5; 300]));
    assert_eq!(
        fixture.ok(FileOp::ListXattr { ino }),
        FileReply::Bytes(b"user.a\0".to_vec())
    );
    assert_eq!(fixture.tree.used().0, disk_bytes(&fixture));
    fixture.ok(FileOp::RemoveXattr {
        ino,
        name: b"user.a".to_vec(),
    });
    assert_eq!(fixture.err(get), libc::ENODATA);
}

#[test]
fn a_listing_stays_whole_while_the_directory_changes() {
    let fixture = TreeFixture::new(None);
    for index in 0..2000 {
        fs::write(fixture.path(&format!("stay{index}")), b"").expect("write");
    }
    let FileReply::Opened { handle, .. } = fixture.ok(FileOp::OpenDirectory { ino: ROOT }) else {
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
        let FileReply::Entries(entries) = fixture.ok(op) else {
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
        fs::write(fixture.path(&format!("new{round}")), b"").expect("write");
        fs::remove_file(fixture.path(&format!("new{round}"))).expect("remove");
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
    assert!(matches!(fixture.ok(again), FileReply::Entries(e) if !e.is_empty()));
    fixture.ok(FileOp::ReleaseDirectory { handle });
}

#[test]
fn the_hidden_name_is_inaccessible() {
    let root = tempfile::tempdir().expect("directory");
    fs::create_dir(root.path().join("own")).expect("mkdir");
    let fd = fs::File::open(root.path()).expect("open").into();
    let tree = Tree::open_at(fd, None, Some(b"own")).expect("tree");
    let fixture = TreeFixture::with_tree(root, tree);
    assert_eq!(fixture.lookup(ROOT, "own"), Err(Errno(libc::ENOENT)));
    let make = FileOp::MakeDirectory {
        parent: ROOT,
        name: b"own".to_vec(),
        mode: 0o755,
    };
    assert_eq!(fixture.err(make), libc::EACCES);
    fixture.create(ROOT, "f", 0o600);
    assert_eq!(
        fixture.rename(ROOT, "own", ROOT, "x", 0),
        Err(Errno(libc::ENOENT))
    );
    assert_eq!(
        fixture.rename(ROOT, "f", ROOT, "own", 0),
        Err(Errno(libc::EACCES))
    );
    let names = fixture.names(ROOT);
    assert_eq!(names, [".", "..", "f"]);
}

#[test]
fn a_privileged_server_gives_files_to_the_caller() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let fixture = TreeFixture::new(Some(ROOMY));
    let FileReply::Attr(plain) = fixture.ok(FileOp::MakeDirectory {
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
    fixture.ok(FileOp::SetAttr {
        ino: plain.ino,
        handle: None,
        change,
    });
    let (ino, _) = fixture.create(plain.ino, "f", 0o664);
    let FileReply::Attr(attr) = fixture.ok(FileOp::GetAttr { ino, handle: None }) else {
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
    let FileReply::Attr(attr) = fixture.ok(below) else {
        panic!()
    };
    assert_eq!((attr.gid, attr.mode & 0o7777), (77, 0o2755));
}

#[test]
fn malformed_requests_return_errors_without_side_effects() {
    let fixture = TreeFixture::new(Some(ROOMY));
    let (_, handle) = fixture.create(ROOT, "f", 0o600);
    for (start, length) in [(0, 5), (5, 0), (u32::MAX, u32::MAX)] {
        let range = BodyRange { start, length };
        let op = FileOp::Write {
            handle,
            offset: 0,
            data: range,
            append: false,
        };
        assert_eq!(fixture.run_with(op, b"1234").0, Err(Errno(libc::EINVAL)));
    }
    assert_eq!(
        fixture.write(handle, u64::MAX, b"x"),
        Err(Errno(libc::EFBIG))
    );
    assert_eq!(
        fixture.write(handle, i64::MAX as u64, b"x"),
        Err(Errno(libc::EFBIG))
    );
    assert_eq!(fixture.read(handle, u64::MAX, 10), Err(Errno(libc::EINVAL)));
    assert_eq!(fixture.read(handle, 0, u32::MAX), Err(Errno(libc::EINVAL)));
    assert_eq!(fixture.read(HandleId(99), 0, 1), Err(Errno(libc::EBADF)));
    let allocate = FileOp::Allocate {
        handle,
        mode: -1,
        offset: 0,
        length: u64::MAX,
    };
    assert!(fixture.run(allocate).is_err());
    let seek = FileOp::Seek {
        handle,
        offset: -1,
        whence: libc::SEEK_DATA,
    };
    assert_eq!(fixture.err(seek), libc::ENXIO);
    assert_eq!(fixture.tree.used().0, 0);
}
