//! Small files and directories that are read as a whole, without a handle.

use std::fs::{self, File};

use bafs_proto::file_op::{END_COOKIE, FileOp, FileReply};
use bafs_proto::ids::InodeNo;
use nix::libc;
use rustix::fs::{Advice, fadvise};

use crate::test_tree::{ROOT, TreeFixture, skip};

#[test]
fn small_files_are_read_without_a_handle() {
    let fixture = TreeFixture::new(None);
    fs::write(fixture.path("f"), b"hello").expect("write");
    fs::create_dir(fixture.path("d")).expect("make");
    std::os::unix::fs::symlink("f", fixture.path("l")).expect("link");
    let ino = |name| fixture.lookup(ROOT, name).expect("it is there").ino;
    let read = |name, bytes_max| {
        let ino = ino(name);
        fixture.run_with(FileOp::ReadFile { ino, bytes_max }, &[])
    };
    let whole = (Ok(FileReply::Read { length: 5 }), b"hello".to_vec());
    assert_eq!([read("f", 5), read("f", 64 << 10)], [whole.clone(), whole]);
    let refused = |name, bytes_max| read(name, bytes_max).0.expect_err("it is refused").0;
    assert_eq!(refused("f", 4), libc::EFBIG);
    assert_eq!(refused("f", u32::MAX), libc::EINVAL);
    assert_eq!(refused("d", 5), libc::EISDIR);
    assert_eq!(refused("l", 5), libc::EINVAL);
    let ino = InodeNo(99);
    let unknown = FileOp::ReadFile { ino, bytes_max: 5 };
    assert_eq!(fixture.err(unknown), libc::ESTALE);
}

/// Bytes that this thread has had read from disks.
fn disk_bytes_read() -> u64 {
    let told = fs::read_to_string("/proc/thread-self/io").expect("the kernel counts");
    let line = told
        .lines()
        .find_map(|line| line.strip_prefix("read_bytes: "));
    line.expect("a line").parse().expect("a number")
}

#[test]
fn files_of_a_batch_are_read_together() {
    const PAGE_BYTES: u64 = 4096;
    let fixture = TreeFixture::new(None);
    let mut ops = Vec::new();
    for number in 0..4 {
        let name = number.to_string();
        fs::write(fixture.path(&name), b"hello").expect("write");
        let ino = fixture.lookup(ROOT, &name).expect("it is there").ino;
        ops.push(FileOp::ReadFile { ino, bytes_max: 64 });
        let file = File::open(fixture.path(&name)).expect("open");
        file.sync_all().expect("sync");
        fadvise(&file, 0, None, Advice::DontNeed).expect("drop");
    }
    let start = disk_bytes_read();
    fixture.run_with(ops[0].clone(), &[]).0.expect("read");
    if disk_bytes_read() == start {
        let test = "files_of_a_batch_are_read_together";
        return skip(test, "the file system keeps its pages");
    }
    let before = disk_bytes_read();
    fixture.session.begin_reads(&ops);
    let begun = disk_bytes_read();
    assert!(begun - before >= 3 * PAGE_BYTES, "{before} {begun}");
    for op in ops {
        let read = fixture.run_with(op, &[]);
        assert_eq!(read, (Ok(FileReply::Read { length: 5 }), b"hello".to_vec()));
    }
    assert_eq!(disk_bytes_read(), begun, "nothing is read twice");
}

#[test]
fn directories_are_listed_without_a_handle() {
    let fixture = TreeFixture::new(None);
    for number in 0..9 {
        fs::write(fixture.path(&number.to_string()), b"").expect("write");
    }
    // Four entries with attributes in each page, about.
    let (mut names, mut cookie, mut pages) = (Vec::new(), 0, 0);
    while cookie != END_COOKIE {
        let reply = fixture.ok(FileOp::ListDirectory {
            ino: ROOT,
            cookie,
            bytes_max: 640,
        });
        let FileReply::Entries(entries) = reply else {
            panic!("{reply:?}")
        };
        cookie = entries.last().expect("more").cookie;
        names.extend(entries.into_iter().map(|entry| entry.name));
        pages += 1;
    }
    names.sort();
    let expected = [".", "..", "0", "1", "2", "3", "4", "5", "6", "7", "8"];
    assert_eq!((names, pages), (expected.map(Vec::from).to_vec(), 3));
    fs::write(fixture.path("f"), b"").expect("write");
    let ino = fixture.lookup(ROOT, "f").expect("it is there").ino;
    let file = FileOp::ListDirectory {
        ino,
        cookie: 0,
        bytes_max: 640,
    };
    assert_eq!(fixture.err(file), libc::ENOTDIR);
}
