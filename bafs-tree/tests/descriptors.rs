//! More files than the process has descriptors.

mod bench;

use bafs_proto::file_op::{FileOp, FileReply};
use bafs_proto::ids::{HandleId, InodeNo};
use bench::{Bench, ROOMY, ROOT};
use nix::libc;
use rustix::process::{Resource, Rlimit, geteuid, setrlimit};

const DESCRIPTORS: u64 = 64;

const FILES: u64 = 500;

fn name(number: u64) -> Vec<u8> {
    format!("file-{number}").into_bytes()
}

fn size(bench: &Bench, ino: InodeNo) -> u64 {
    match bench.ok(FileOp::GetAttr { ino, handle: None }) {
        FileReply::Attr(attr) => attr.size,
        other => panic!("{other:?}"),
    }
}

fn limit_descriptors() {
    let (current, maximum) = (Some(DESCRIPTORS), Some(DESCRIPTORS));
    setrlimit(Resource::Nofile, Rlimit { current, maximum }).expect("a limit may be lowered");
}

#[test]
fn an_agent_may_refer_to_more_files_than_there_are_descriptors() {
    if !geteuid().is_root() {
        // Without the privilege files cannot be opened again by their handles.
        return;
    }
    limit_descriptors();
    let bench = Bench::new(Some(ROOMY));
    let mut files = Vec::new();
    for number in 0..FILES {
        let (ino, handle) = bench.create(ROOT, &format!("file-{number}"), 0o644);
        let content = vec![b'x'; number as usize];
        assert_eq!(bench.write(handle, 0, &content), Ok(number));
        bench.ok(FileOp::Release { handle });
        files.push(ino);
    }
    // The first ones are found again by their numbers, also below another name or none.
    for number in 0..FILES / 2 {
        bench.ok(FileOp::Rename {
            parent: ROOT,
            name: name(number),
            new_parent: ROOT,
            new_name: name(FILES + number),
            flags: 0,
        });
    }
    for (number, ino) in files.iter().enumerate() {
        assert_eq!(size(&bench, *ino), number as u64, "file {number}");
    }
    let open = |ino: InodeNo| match bench.ok(FileOp::Open {
        ino,
        flags: libc::O_RDWR,
    }) {
        FileReply::Opened { handle, .. } => handle,
        other => panic!("{other:?}"),
    };
    let held: Vec<(u64, HandleId)> = (1..9).map(|at| (at, open(files[at as usize]))).collect();
    for number in 0..FILES / 2 {
        let (parent, name) = (ROOT, name(FILES + number));
        bench.ok(FileOp::Unlink { parent, name });
    }
    for (number, ino) in files.iter().enumerate().skip(FILES as usize / 2) {
        assert_eq!(size(&bench, *ino), number as u64, "file {number}");
    }
    // What was open when its last name went is there until it is closed.
    for (number, handle) in held {
        let ino = files[number as usize];
        assert_eq!(size(&bench, ino), number);
        assert_eq!(bench.read(handle, 0, 4096), Ok(vec![b'x'; number as usize]));
        bench.ok(FileOp::Release { handle });
    }
    let (_, used) = bench.used();
    assert_eq!(used, FILES / 2);
}

#[test]
fn a_listing_without_descriptors_fails_and_leaves_nothing_out() {
    limit_descriptors();
    let bench = Bench::new(None);
    for number in 0..40 {
        std::fs::write(bench.path(&format!("file-{number}")), "").expect("write");
    }
    let FileReply::Opened { handle, .. } = bench.ok(FileOp::OpenDirectory { ino: ROOT }) else {
        panic!("a directory opens")
    };
    let list = |cookie| {
        bench.run(FileOp::ReadDirectory {
            handle,
            cookie,
            bytes_max: 4096,
            plus: true,
        })
    };
    let mut taken = Vec::new();
    while let Ok(fd) = rustix::io::dup(bench.tree.directory()) {
        taken.push(fd);
    }
    assert_eq!(list(0).err().map(|errno| errno.0), Some(libc::ENFILE));
    drop(taken);
    let Ok(FileReply::Entries(entries)) = list(0) else {
        panic!("a listing with descriptors")
    };
    let found = entries.iter().filter(|entry| entry.attr.is_some());
    assert!(found.count() > 10);
}
