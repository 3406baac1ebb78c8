//! What an agent asks seldom: directories that are gone, attributes that are none of its business
//! or in a full tree, reads into room of any size; and two sessions of one tree.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use crate::test_tree::{BLOCK, CALLER, ROOMY, ROOT, TreeFixture, disk_bytes, skip};
use bafs_proto::file_op::{Attr, AttrChange, BodyRange, Caller, Errno, FileOp, FileReply};
use bafs_proto::ids::{HandleId, InodeNo};
use bafs_tree::{Limit, Session};
use nix::libc;
use nix::unistd::{Uid, geteuid};

#[test]
fn a_removed_directory_opens_and_closes() {
    let fixture = TreeFixture::new(None);
    let name = b"d".to_vec();
    fixture.ok(FileOp::MakeDirectory {
        parent: ROOT,
        name: name.clone(),
        mode: 0o755,
    });
    // The kernel of a program whose working directory it is still knows its number.
    let ino = fixture.lookup(ROOT, "d").expect("it is there").ino;
    fixture.ok(FileOp::RemoveDirectory { parent: ROOT, name });
    let reply = fixture.ok(FileOp::OpenDirectory { ino });
    let FileReply::Opened { handle, attr } = reply else {
        panic!("{reply:?}")
    };
    assert_eq!((attr.ino, attr.nlink), (ino, 0));
    let plus = false;
    let (cookie, bytes_max) = (0, 4096);
    let list = FileOp::ReadDirectory {
        handle,
        cookie,
        bytes_max,
        plus,
    };
    assert_eq!(fixture.err(list), libc::ENOENT);
    fixture.ok(FileOp::ReleaseDirectory { handle });
    assert_eq!(
        fixture.err(FileOp::ReleaseDirectory { handle }),
        libc::EBADF
    );
}

#[test]
fn access_control_lists_are_refused_and_hidden() {
    let fixture = TreeFixture::new(None);
    let (ino, _) = fixture.create(ROOT, "a", 0o644);
    let set = |name: &str| FileOp::SetXattr {
        ino,
        name: name.as_bytes().to_vec(),
        value: b"v".to_vec(),
        flags: 0,
    };
    for name in [
        "system.posix_acl_access",
        "system.posix_acl_default",
        "trusted.x",
    ] {
        assert_eq!(fixture.err(set(name)), libc::EOPNOTSUPP, "{name}");
        let name = name.as_bytes().to_vec();
        assert_eq!(
            fixture.err(FileOp::GetXattr { ino, name }),
            libc::EOPNOTSUPP
        );
    }
    fixture.ok(set("user.x"));
    // As root the host itself may keep one.
    let hidden = rustix::fs::setxattr(
        fixture.path("a"),
        "trusted.hidden",
        b"1",
        rustix::fs::XattrFlags::empty(),
    );
    assert!(hidden.is_ok() || !geteuid().is_root());
    let listed = fixture.ok(FileOp::ListXattr { ino });
    assert_eq!(listed, FileReply::Bytes(b"user.x\0".to_vec()));
}

#[test]
fn client_numbers_apply_only_to_created_objects() {
    const GIVEN: u64 = 1 << 61;
    let fixture = TreeFixture::new(Some(ROOMY));
    let (ino, handle) = fixture.create(ROOT, "f", 0o640);
    let name = |text: &str| text.as_bytes().to_vec();
    let make = |text: &str| FileOp::MakeDirectory {
        parent: ROOT,
        name: name(text),
        mode: 0o755,
    };
    let create = |text: &str| FileOp::Create {
        parent: ROOT,
        name: name(text),
        mode: 0o644,
        flags: libc::O_RDWR,
    };
    let lookup = FileOp::Lookup {
        parent: ROOT,
        name: name("f"),
    };
    let root = FileOp::GetAttr {
        ino: ROOT,
        handle: None,
    };
    let (file, open) = (Some(InodeNo(GIVEN)), Some(HandleId(GIVEN)));
    let given = |op: &FileOp, numbers| {
        let mut out = Vec::new();
        let ran = fixture
            .session
            .run_numbered((CALLER, op, &[]), numbers, &mut out);
        ran.map_err(|errno| errno.0)
    };
    // What is there keeps its number, and the root above all.
    for op in [&lookup, &root, &FileOp::Open { ino, flags: 0 }] {
        assert_eq!(given(op, (file, None)), Err(libc::EINVAL), "{op:?}");
    }
    for op in [&make("d"), &lookup, &FileOp::Release { handle }] {
        assert_eq!(given(op, (None, open)), Err(libc::EINVAL), "{op:?}");
    }
    assert_eq!(given(&create("f"), (file, open)), Err(libc::EEXIST));
    // Refused numbers leave nothing behind.
    for number in [0, 1, ino.0, 1 << 62] {
        let numbers = (Some(InodeNo(number)), None);
        assert_eq!(given(&make("d"), numbers), Err(libc::EINVAL), "{number}");
    }
    let numbers = (file, Some(handle));
    assert_eq!(given(&create("g"), numbers), Err(libc::EINVAL));
    let names = fs::read_dir(fixture.path("")).expect("list").count();
    assert_eq!(names, 1, "refused operations made something");
    assert!(given(&create("g"), (file, open)).is_ok());
    assert_eq!(given(&make("d"), (file, None)), Err(libc::EINVAL), "taken");
    assert!(given(&make("d"), (Some(InodeNo(GIVEN + 1)), None)).is_ok());
    let reopened = given(
        &FileOp::Open { ino, flags: 0 },
        (None, Some(HandleId(GIVEN + 1))),
    );
    assert!(reopened.is_ok());
}

#[test]
fn a_resuming_session_reopens_files_despite_their_modes() {
    let fixture = TreeFixture::new(Some(ROOMY));
    let (ino, handle) = fixture.create(ROOT, "object", 0o644);
    assert_eq!(fixture.write(handle, 0, b"hello"), Ok(5));
    fs::set_permissions(fixture.path("object"), fs::Permissions::from_mode(0o444)).expect("chmod");
    // As a server without privilege, which is the owner of its files; in this thread only.
    let user = Uid::from_raw(1234);
    if geteuid().is_root() {
        for name in [".", "object"] {
            chown(fixture.path(name), Some(1234), None).expect("chown");
        }
        nix::unistd::setfsuid(user);
    }
    let flags = libc::O_RDWR;
    let open = FileOp::Open { ino, flags };
    assert_eq!(fixture.err(open), libc::EACCES, "a program may not");
    let resumed = Session::new(fixture.tree.clone(), true).resumed();
    let run = |op: FileOp, data: &[u8]| resumed.run(CALLER, &op, data, &mut Vec::new());
    let name = b"object".to_vec();
    let parent = ROOT;
    let found = run(FileOp::Lookup { parent, name }, b"").expect("lookup");
    let FileReply::Attr(attr) = found else {
        panic!("{found:?}")
    };
    let ino = attr.ino;
    let opened = run(FileOp::Open { ino, flags }, b"").expect("it was open before");
    let FileReply::Opened { handle, .. } = opened else {
        panic!("{opened:?}")
    };
    let data = BodyRange {
        start: 0,
        length: 5,
    };
    let write = FileOp::Write {
        handle,
        offset: 5,
        data,
        append: false,
    };
    run(write, b"world").expect("write");
    if geteuid().is_root() {
        nix::unistd::setfsuid(Uid::from_raw(0));
    }
    assert_eq!(
        fs::read(fixture.path("object")).expect("read"),
        b"helloworld"
    );
    let mode = fs::metadata(fixture.path("object")).expect("stat").mode();
    assert_eq!(mode & 0o7777, 0o444, "it is shut again");
}

#[test]
fn an_open_directory_without_permission_is_synced() {
    let fixture = TreeFixture::new(Some(ROOMY));
    let op = FileOp::MakeDirectory {
        parent: ROOT,
        name: b"d".to_vec(),
        mode: 0o700,
    };
    let FileReply::Attr(Attr { ino, .. }) = fixture.ok(op) else {
        panic!("not made")
    };
    let FileReply::Opened { handle, .. } = fixture.ok(FileOp::OpenDirectory { ino }) else {
        panic!("not opened")
    };
    fs::set_permissions(fixture.path("d"), fs::Permissions::from_mode(0o100)).expect("chmod");
    // As a server without privilege, which is the owner of its files; in this thread only.
    let is_root = geteuid().is_root();
    if is_root {
        for name in [".", "d"] {
            chown(fixture.path(name), Some(1234), None).expect("chown");
        }
        nix::unistd::setfsuid(Uid::from_raw(1234));
    }
    let synced = fixture.run(FileOp::FsyncDirectory { ino });
    fixture.ok(FileOp::ReleaseDirectory { handle });
    let closed = fixture.run(FileOp::FsyncDirectory { ino });
    let again = fixture.run(FileOp::OpenDirectory { ino });
    let resumed = Session::new(fixture.tree.clone(), true).resumed();
    let run = |op: FileOp| resumed.run(CALLER, &op, b"", &mut Vec::new());
    let (parent, name) = (ROOT, b"d".to_vec());
    let found = run(FileOp::Lookup { parent, name });
    let reopened = match &found {
        Ok(FileReply::Attr(attr)) => run(FileOp::OpenDirectory { ino: attr.ino }),
        other => other.clone(),
    };
    if is_root {
        nix::unistd::setfsuid(Uid::from_raw(0));
    }
    assert_eq!(synced, Ok(FileReply::Done));
    let refused = Err(Errno(libc::EACCES));
    assert_eq!((closed, again), (refused.clone(), refused));
    assert!(matches!(reopened, Ok(FileReply::Opened { .. })));
    let mode = fs::metadata(fixture.path("d")).expect("stat").mode();
    assert_eq!(mode & 0o7777, 0o100, "it is shut again");
}

/// Lists a directory in pieces and calls `between` after the first; the entries with their numbers.
fn listed(
    fixture: &TreeFixture,
    between: impl FnOnce(&[String]),
) -> Vec<(String, Option<InodeNo>)> {
    let FileReply::Opened { handle, .. } = fixture.ok(FileOp::OpenDirectory { ino: ROOT }) else {
        panic!("not opened")
    };
    let (mut cookie, mut seen, mut between) = (0, Vec::new(), Some(between));
    loop {
        let op = FileOp::ReadDirectory {
            handle,
            cookie,
            bytes_max: 2000,
            plus: true,
        };
        let FileReply::Entries(entries) = fixture.ok(op) else {
            panic!("no entries")
        };
        let Some(last) = entries.last() else { break };
        cookie = last.cookie;
        for entry in entries {
            let name = String::from_utf8(entry.name).expect("text");
            seen.push((name, entry.attr.map(|attr| attr.ino)));
        }
        if let Some(between) = between.take() {
            let names: Vec<_> = seen.iter().map(|(name, _)| name.clone()).collect();
            between(&names);
        }
    }
    fixture.ok(FileOp::ReleaseDirectory { handle });
    seen
}

#[test]
fn a_listing_shows_current_files_after_renames() {
    for fixture in [
        TreeFixture::new(Some(ROOMY)),
        TreeFixture::without_btimes(Some(ROOMY)),
    ] {
        let name = |number: usize| format!("file-{number:03}");
        for number in 0..200 {
            let (_, handle) = fixture.create(ROOT, &name(number), 0o600);
            fixture.ok(FileOp::Release { handle });
        }
        let (mut gone, mut replaced) = (String::new(), String::new());
        let seen = listed(&fixture, |seen| {
            let mut unseen = (0..200).map(name).filter(|name| !seen.contains(name));
            gone = unseen.next().expect("a name that is still to come");
            replaced = unseen.next().expect("another one");
            fixture
                .rename(ROOT, &gone, ROOT, &replaced, 0)
                .expect("renamed");
        });
        let shown = |wanted: &str| {
            seen.iter()
                .find(|(name, _)| name == wanted)
                .expect(wanted)
                .1
        };
        assert_eq!(shown(&gone), None, "a name that is gone has no attributes");
        for (name, ino) in &seen {
            let now = fixture.lookup(ROOT, name).ok().map(|attr| attr.ino);
            assert!(
                name.starts_with('.') || *ino == now,
                "{name}: {ino:?}, {now:?}"
            );
        }
        // Made, listed, looked up: each counts once.
        let ino = shown(&replaced).expect("attributes");
        fixture.ok(FileOp::Forget { ino, count: 2 });
        fixture.ok(FileOp::GetAttr { ino, handle: None });
        fixture.ok(FileOp::Forget { ino, count: 1 });
        assert_eq!(
            fixture.err(FileOp::GetAttr { ino, handle: None }),
            libc::ESTALE
        );
    }
}

#[test]
fn an_invalid_owner_id_is_refused() {
    let fixture = TreeFixture::new(Some(ROOMY));
    let (ino, _) = fixture.create(ROOT, "f", 0o600);
    for (uid, gid) in [(Some(u32::MAX), None), (None, Some(u32::MAX))] {
        let change = AttrChange {
            uid,
            gid,
            ..AttrChange::default()
        };
        let set = FileOp::SetAttr {
            ino,
            handle: None,
            change,
        };
        assert_eq!(fixture.err(set), libc::EINVAL);
    }
    let nobody = Caller {
        uid: u32::MAX,
        ..CALLER
    };
    let make = FileOp::MakeDirectory {
        parent: ROOT,
        name: b"d".to_vec(),
        mode: 0o755,
    };
    let made = fixture.session.run(nobody, &make, &[], &mut Vec::new());
    assert_eq!(made, Err(Errno(libc::EINVAL)));
    assert!(fixture.lookup(ROOT, "d").is_err(), "nothing is left of it");
}

#[test]
fn a_new_capability_on_a_file_is_visible() {
    let fixture = TreeFixture::new(Some(ROOMY));
    let (ino, _) = fixture.create(ROOT, "f", 0o755);
    let name = b"security.capability".to_vec();
    let get = FileOp::GetXattr {
        ino,
        name: name.clone(),
    };
    assert_eq!(fixture.err(get.clone()), libc::ENODATA);
    // `struct vfs_cap_data` of version 2, with CAP_NET_RAW permitted.
    let mut value = [0x0200_0000_u32, 1 << 13, 0, 0, 0]
        .map(u32::to_le_bytes)
        .concat();
    value[0] = 1;
    let set = FileOp::SetXattr {
        ino,
        name,
        value: value.clone(),
        flags: 0,
    };
    match fixture.run(set) {
        Ok(_) => assert_eq!(fixture.ok(get), FileReply::Bytes(value)),
        // It takes a privilege.
        Err(error) => assert_eq!(error, Errno(libc::EPERM)),
    }
}

#[test]
fn a_read_appends_regardless_of_buffer_capacity() {
    let fixture = TreeFixture::new(None);
    let (_, handle) = fixture.create(ROOT, "f", 0o600);
    let content: Vec<u8> = (0..200).collect();
    assert_eq!(fixture.write(handle, 0, &content), Ok(200));
    let (offset, length) = (20, 50);
    let op = FileOp::Read {
        handle,
        offset,
        length,
    };
    for room in [53, 100, 0] {
        let mut out = Vec::with_capacity(room);
        out.extend_from_slice(b"abc");
        let read = fixture.session.run(CALLER, &op, b"", &mut out);
        assert_eq!(read, Ok(FileReply::Read { length: 50 }));
        assert_eq!(out, [b"abc", &content[20..70]].concat(), "room {room}");
    }
    // At the end of the file there is less.
    let offset = 190;
    let op = FileOp::Read {
        handle,
        offset,
        length,
    };
    for room in [50, 100] {
        let mut out = Vec::with_capacity(room);
        let read = fixture.session.run(CALLER, &op, b"", &mut out);
        assert_eq!(read, Ok(FileReply::Read { length: 10 }));
        assert_eq!(out, content[190..], "room {room}");
    }
}

/// A writer promises its program the space that it is told is free.
#[test]
fn files_held_by_other_sessions_occupy_space() {
    let fixture = TreeFixture::new(Some(Limit {
        bytes: 8 * BLOCK,
        files: 10,
    }));
    let (_, handle) = fixture.create(ROOT, "f", 0o600);
    assert_eq!(fixture.write(handle, 0, &[1; 4 * 4096]), Ok(4 * BLOCK));
    fixture.ok(FileOp::Release { handle });
    let (parent, name) = (ROOT, b"f".to_vec());
    let reader = Session::new(fixture.tree.clone(), false);
    let lookup = FileOp::Lookup {
        parent,
        name: name.clone(),
    };
    let met = reader.run(CALLER, &lookup, b"", &mut Vec::new());
    assert!(met.is_ok(), "{met:?}");
    fixture.ok(FileOp::Unlink { parent, name });
    let (_, handle) = fixture.create(ROOT, "g", 0o600);
    assert_eq!(fixture.used(), (4 * BLOCK, 2));
    assert_eq!(fixture.write(handle, 0, &[2; 8 * 4096]), Ok(4 * BLOCK));
    drop(reader);
    assert_eq!(fixture.used(), (4 * BLOCK, 1));
    assert_eq!(
        fixture.write(handle, 4 * BLOCK, &[2; 4 * 4096]),
        Ok(4 * BLOCK)
    );
}

#[test]
fn full_volumes_accept_attributes_of_equal_length() {
    let fixture = TreeFixture::new(Some(Limit {
        bytes: 4 * BLOCK,
        files: 3,
    }));
    if !rustix::fs::statfs(fixture.path("")).is_ok_and(|stat| stat.f_type == 0xef53) {
        let test = "full_volumes_accept_attributes_of_equal_length";
        return skip(test, "not on ext4");
    }
    let (ino, handle) = fixture.create(ROOT, "f", 0o600);
    let set = |name: &str, value: Vec<u8>, flags| FileOp::SetXattr {
        ino,
        name: name.as_bytes().to_vec(),
        value,
        flags,
    };
    // One in the inode, one in the block beside it.
    fixture.ok(set("user.short", vec![1; 8], 0));
    fixture.ok(set("user.long", vec![1; 900], 0));
    let free = 4 * BLOCK - fixture.tree.used().0;
    assert_eq!(
        fixture.write(handle, 0, &vec![1; free as usize]),
        Ok(free),
        "it is full now"
    );
    for (name, length) in [("user.short", 8), ("user.long", 900), ("user.long", 800)] {
        let value = vec![2; length];
        fixture.ok(set(name, value.clone(), 0));
        let (name, is) = (name.as_bytes().to_vec(), FileReply::Bytes(value));
        assert_eq!(fixture.ok(FileOp::GetXattr { ino, name }), is);
    }
    let longer = set("user.short", vec![3; 9], 0);
    assert_eq!(fixture.err(longer), libc::ENOSPC);
    assert_eq!(fixture.err(set("user.new", vec![3], 0)), libc::ENOSPC);
    let again = set("user.short", vec![3], libc::XATTR_CREATE);
    assert_eq!(fixture.err(again), libc::EEXIST);
    // It fits the inode, and the block is free.
    fixture.ok(set("user.long", vec![4; 7], 0));
    assert_eq!(fixture.tree.used().0, disk_bytes(&fixture));
}
