//! Small files and directories that are read as a whole, without a handle.

use std::fs;

use bafs_proto::file_op::{END_COOKIE, FileOp, FileReply};
use bafs_proto::ids::InodeNo;
use nix::libc;

use crate::test_tree::{ROOT, TreeFixture};

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
