//! More files than the process has descriptors.

mod test_tree;

use std::sync::{Mutex, MutexGuard, PoisonError};

use bafs_proto::file_op::{FileOp, FileReply};
use bafs_proto::ids::{HandleId, InodeNo};
use nix::libc;
use rustix::process::{Resource, Rlimit, geteuid, setrlimit};
use test_tree::{CALLER, ROOMY, ROOT, TreeFixture};

const DESCRIPTORS: u64 = 64;

const FILES: u64 = 500;

fn name(number: u64) -> Vec<u8> {
    format!("file-{number}").into_bytes()
}

fn size(fixture: &TreeFixture, ino: InodeNo) -> u64 {
    match fixture.ok(FileOp::GetAttr { ino, handle: None }) {
        FileReply::Attr(attr) => attr.size,
        other => panic!("{other:?}"),
    }
}

/// The limit is of the process, and one of the tests takes all descriptors that there are.
fn serialise_tests() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn limit_descriptors() {
    let (current, maximum) = (Some(DESCRIPTORS), Some(DESCRIPTORS));
    setrlimit(Resource::Nofile, Rlimit { current, maximum }).expect("a limit may be lowered");
}

#[test]
fn an_agent_may_use_more_files_than_descriptors() {
    let _alone = serialise_tests();
    if !geteuid().is_root() {
        let test = "an_agent_may_use_more_files_than_descriptors";
        test_tree::skip(test, "only root may open files again by their handles");
        return;
    }
    limit_descriptors();
    let fixture = TreeFixture::new(Some(ROOMY));
    let mut files = Vec::new();
    for number in 0..FILES {
        let (ino, handle) = fixture.create(ROOT, &format!("file-{number}"), 0o644);
        let content = vec![b'x'; number as usize];
        assert_eq!(fixture.write(handle, 0, &content), Ok(number));
        fixture.ok(FileOp::Release { handle });
        files.push(ino);
    }
    // The first ones are found again by their numbers, also below another name or none.
    for number in 0..FILES / 2 {
        fixture.ok(FileOp::Rename {
            parent: ROOT,
            name: name(number),
            new_parent: ROOT,
            new_name: name(FILES + number),
            flags: 0,
        });
    }
    for (number, ino) in files.iter().enumerate() {
        assert_eq!(size(&fixture, *ino), number as u64, "file {number}");
    }
    let open = |ino: InodeNo| match fixture.ok(FileOp::Open {
        ino,
        flags: libc::O_RDWR,
    }) {
        FileReply::Opened { handle, .. } => handle,
        other => panic!("{other:?}"),
    };
    let held: Vec<(u64, HandleId)> = (1..9).map(|at| (at, open(files[at as usize]))).collect();
    for number in 0..FILES / 2 {
        let (parent, name) = (ROOT, name(FILES + number));
        fixture.ok(FileOp::Unlink { parent, name });
    }
    for (number, ino) in files.iter().enumerate().skip(FILES as usize / 2) {
        assert_eq!(size(&fixture, *ino), number as u64, "file {number}");
    }
    // What was open when its last name went is there until it is closed.
    for (number, handle) in held {
        let ino = files[number as usize];
        assert_eq!(size(&fixture, ino), number);
        assert_eq!(
            fixture.read(handle, 0, 4096),
            Ok(vec![b'x'; number as usize])
        );
        fixture.ok(FileOp::Release { handle });
    }
    let (_, used) = fixture.used();
    assert_eq!(used, FILES / 2);
}

#[test]
fn synchronous_opens_leave_descriptors_for_early_opens() {
    const KEPT: u32 = 20;
    let _alone = serialise_tests();
    limit_descriptors();
    let given = |number: u64| (None, Some(HandleId((1 << 61) + number)));
    let mut fixture = TreeFixture::new(Some(ROOMY));
    let (ino, first) = fixture.create(ROOT, "file", 0o644);
    let open = FileOp::Open {
        ino,
        flags: libc::O_RDONLY,
    };
    fixture.session.reserve_descriptors(KEPT);
    let mut in_time = vec![first];
    let refused = loop {
        match fixture.run(open.clone()) {
            Ok(FileReply::Opened { handle, .. }) => in_time.push(handle),
            other => break other,
        }
    };
    assert_eq!(refused.expect_err("kept").0, libc::EMFILE);
    let create = FileOp::Create {
        parent: ROOT,
        name: b"other".to_vec(),
        mode: 0o644,
        flags: libc::O_RDWR,
    };
    assert_eq!(fixture.err(create), libc::EMFILE);
    assert!(
        !fixture.path("other").exists(),
        "refused before it was made"
    );
    assert_eq!(
        fixture.err(FileOp::OpenDirectory { ino: ROOT }),
        libc::EMFILE
    );
    for number in 0..u64::from(KEPT) {
        let (op, mut out) = ((CALLER, &open, &b""[..]), Vec::new());
        let opened = fixture.session.run_numbered(op, given(number), &mut out);
        assert!(opened.is_ok(), "promise {number}: {opened:?}");
    }
    // Nobody is promised more by taking numbers.
    let (op, mut out) = ((CALLER, &open, &b""[..]), Vec::new());
    let more = given(u64::from(KEPT));
    let refused = fixture.session.run_numbered(op, more, &mut out);
    assert_eq!(refused.expect_err("not promised").0, libc::EMFILE);
    // One that is closed makes room for one.
    let handle = in_time.pop().expect("some were opened");
    fixture.ok(FileOp::Release { handle });
    fixture.ok(open.clone());
    assert_eq!(fixture.err(open.clone()), libc::EMFILE);
    // Where nothing is promised there are more.
    fixture.session.reserve_descriptors(0);
    fixture.ok(open);
}

#[test]
fn a_listing_without_descriptors_fails_without_omissions() {
    const LISTED: usize = 40;
    let _alone = serialise_tests();
    limit_descriptors();
    let fixture = TreeFixture::new(None);
    for number in 0..LISTED {
        std::fs::write(fixture.path(&format!("file-{number}")), "").expect("write");
    }
    let FileReply::Opened { handle, .. } = fixture.ok(FileOp::OpenDirectory { ino: ROOT }) else {
        panic!("a directory opens")
    };
    // Files until the end, or until a listing failed, and why.
    let list = || {
        let (mut cookie, mut files) = (0, 0);
        loop {
            let (bytes_max, plus) = (4096, true);
            match fixture.run(FileOp::ReadDirectory {
                handle,
                cookie,
                bytes_max,
                plus,
            }) {
                Ok(FileReply::Entries(entries)) => {
                    let Some(last) = entries.last() else {
                        return (files, None);
                    };
                    cookie = last.cookie;
                    let is_file = |name: &[u8]| name != b"." && name != b"..";
                    files += entries.iter().filter(|it| is_file(&it.name)).count();
                }
                Ok(other) => panic!("{other:?}"),
                Err(errno) => return (files, Some(errno.0)),
            }
        }
    };
    let mut taken = Vec::new();
    while let Ok(fd) = rustix::io::dup(fixture.tree.directory()) {
        taken.push(fd);
    }
    // `.` and `..`, which need none, may have come first.
    assert_eq!(list(), (0, Some(libc::ENFILE)));
    drop(taken);
    assert_eq!(list(), (LISTED, None));
}

#[test]
fn failed_creation_without_descriptors_leaves_nothing() {
    let _alone = serialise_tests();
    limit_descriptors();
    let fixture = TreeFixture::new(Some(ROOMY));
    let (parent, name) = (ROOT, b"new".to_vec());
    let make = [
        FileOp::Create {
            parent,
            name: name.clone(),
            mode: 0o644,
            flags: libc::O_RDWR,
        },
        FileOp::MakeDirectory {
            parent,
            name,
            mode: 0o755,
        },
    ];
    for op in make {
        let (before, mut taken) = (fixture.used(), Vec::new());
        while let Ok(fd) = rustix::io::dup(fixture.tree.directory()) {
            taken.push(fd);
        }
        // With none at all, and with so many that the last step fails.
        for _ in 0..3 {
            if fixture.run(op.clone()).is_ok() {
                break;
            }
            assert!(!fixture.path("new").exists(), "{op:?} failed and left it");
            assert_eq!(fixture.used(), before, "{op:?} failed and counts");
            taken.pop();
        }
        drop(taken);
        let (parent, name) = (ROOT, b"new".to_vec());
        if fixture.path("new").is_file() {
            fixture.ok(FileOp::Unlink { parent, name });
        }
    }
}
