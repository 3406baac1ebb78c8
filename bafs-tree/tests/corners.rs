//! What an agent asks seldom: directories that are gone, attributes that are none of its business.

mod bench;

use bafs_proto::file_op::{FileOp, FileReply};
use bench::{Bench, ROOT};
use nix::libc;

#[test]
fn a_removed_directory_opens_and_closes() {
    let bench = Bench::new(None);
    let name = b"d".to_vec();
    bench.ok(FileOp::MakeDirectory {
        parent: ROOT,
        name: name.clone(),
        mode: 0o755,
    });
    // The kernel of a program whose working directory it is still knows its number.
    let ino = bench.lookup(ROOT, "d").expect("it is there").ino;
    bench.ok(FileOp::RemoveDirectory { parent: ROOT, name });
    let reply = bench.ok(FileOp::OpenDirectory { ino });
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
    assert_eq!(bench.err(list), libc::EBADF);
    bench.ok(FileOp::ReleaseDirectory { handle });
    assert_eq!(bench.err(FileOp::ReleaseDirectory { handle }), libc::EBADF);
}

#[test]
fn access_control_lists_are_refused_and_hidden() {
    let bench = Bench::new(None);
    let (ino, _) = bench.create(ROOT, "a", 0o644);
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
        assert_eq!(bench.err(set(name)), libc::EOPNOTSUPP, "{name}");
        let name = name.as_bytes().to_vec();
        assert_eq!(bench.err(FileOp::GetXattr { ino, name }), libc::EOPNOTSUPP);
    }
    bench.ok(set("user.x"));
    // As root the host itself may keep one.
    let hidden = rustix::fs::setxattr(
        bench.path("a"),
        "trusted.hidden",
        b"1",
        rustix::fs::XattrFlags::empty(),
    );
    assert!(hidden.is_ok() || !nix::unistd::geteuid().is_root());
    let listed = bench.ok(FileOp::ListXattr { ino });
    assert_eq!(listed, FileReply::Bytes(b"user.x\0".to_vec()));
}
