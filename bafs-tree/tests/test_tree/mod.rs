//! A tree on a temporary directory with a session to it, for tests.
#![allow(dead_code)] // each test target uses its own part

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

use bafs_proto::file_op::{Attr, BodyRange, Caller, Errno, FileOp, FileReply, FileResult};
use bafs_proto::ids::{HandleId, InodeNo};
use bafs_tree::{Limit, Session, Tree};
use tempfile::TempDir;

pub(crate) const ROOT: InodeNo = InodeNo::ROOT;
pub(crate) const CALLER: Caller = Caller {
    uid: 1234,
    gid: 5678,
    pid: 1,
};

pub(crate) struct TreeFixture {
    root: TempDir,
    pub(crate) tree: Arc<Tree>,
    pub(crate) session: Session,
}

impl TreeFixture {
    pub(crate) fn new(limit: Option<Limit>) -> Self {
        let root = tempfile::tempdir().expect("directory");
        let tree = Tree::open(root.path(), limit).expect("tree");
        Self::with_tree(root, tree)
    }

    pub(crate) fn with_tree(root: TempDir, tree: Arc<Tree>) -> Self {
        Self {
            root,
            session: Session::new(tree.clone(), true),
            tree,
        }
    }

    /// With a session from which all changes come, as an agent has it on the machine of the tree.
    pub(crate) fn without_btimes(limit: Option<Limit>) -> Self {
        let fixture = Self::new(limit);
        Self {
            session: fixture.session.without_btimes(),
            ..fixture
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    pub(crate) fn run_with(&self, op: FileOp, data: &[u8]) -> (FileResult, Vec<u8>) {
        let mut out = Vec::new();
        (self.session.run(CALLER, &op, data, &mut out), out)
    }

    pub(crate) fn run(&self, op: FileOp) -> FileResult {
        self.run_with(op, b"").0
    }

    pub(crate) fn ok(&self, op: FileOp) -> FileReply {
        self.run(op.clone())
            .unwrap_or_else(|error| panic!("{op:?}: {error:?}"))
    }

    pub(crate) fn err(&self, op: FileOp) -> i32 {
        match self.run(op.clone()) {
            Err(error) => error.0,
            Ok(reply) => panic!("{op:?} gave {reply:?}"),
        }
    }

    /// Bytes and files in use as statfs(2) tells: what has no name any more and is not open does
    /// not count.
    pub(crate) fn used(&self) -> (u64, u64) {
        match self.ok(FileOp::StatFs) {
            FileReply::StatFs(stat) => (
                stat.size_bytes - stat.free_bytes,
                stat.size_files - stat.free_files,
            ),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn create(&self, parent: InodeNo, name: &str, mode: u32) -> (InodeNo, HandleId) {
        let flags = nix::libc::O_RDWR | nix::libc::O_EXCL;
        let op = FileOp::Create {
            parent,
            name: name.as_bytes().to_vec(),
            mode,
            flags,
        };
        match self.ok(op) {
            FileReply::Opened { handle, attr } => (attr.ino, handle),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn lookup(&self, parent: InodeNo, name: &str) -> Result<Attr, Errno> {
        match self.run(FileOp::Lookup {
            parent,
            name: name.as_bytes().to_vec(),
        })? {
            FileReply::Attr(attr) => Ok(attr),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn write(&self, handle: HandleId, offset: u64, data: &[u8]) -> Result<u64, Errno> {
        let range = BodyRange {
            start: 0,
            length: data.len() as u32,
        };
        let op = FileOp::Write {
            handle,
            offset,
            data: range,
            append: false,
        };
        match self.run_with(op, data).0? {
            FileReply::Written { length } => Ok(length),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn read(
        &self,
        handle: HandleId,
        offset: u64,
        length: u32,
    ) -> Result<Vec<u8>, Errno> {
        let (result, out) = self.run_with(
            FileOp::Read {
                handle,
                offset,
                length,
            },
            b"",
        );
        result.map(|reply| {
            assert_eq!(
                reply,
                FileReply::Read {
                    length: out.len() as u32
                }
            );
            out
        })
    }

    pub(crate) fn rename(
        &self,
        parent: InodeNo,
        name: &str,
        new_parent: InodeNo,
        new_name: &str,
        flags: u32,
    ) -> FileResult {
        let (name, new_name) = (name.as_bytes().to_vec(), new_name.as_bytes().to_vec());
        self.run(FileOp::Rename {
            parent,
            name,
            new_parent,
            new_name,
            flags,
        })
    }

    pub(crate) fn names(&self, ino: InodeNo) -> Vec<String> {
        let FileReply::Opened { handle, .. } = self.ok(FileOp::OpenDirectory { ino }) else {
            panic!("not opened")
        };
        let (mut cookie, mut names) = (0, Vec::new());
        loop {
            let op = FileOp::ReadDirectory {
                handle,
                cookie,
                bytes_max: 4096,
                plus: false,
            };
            let FileReply::Entries(entries) = self.ok(op) else {
                panic!("no entries")
            };
            let Some(last) = entries.last() else { break };
            cookie = last.cookie;
            names.extend(
                entries
                    .into_iter()
                    .map(|e| String::from_utf8(e.name).expect("text")),
            );
        }
        self.ok(FileOp::ReleaseDirectory { handle });
        names.sort();
        names
    }
}

pub(crate) const BLOCK: u64 = 4096;
pub(crate) const ROOMY: Limit = Limit {
    bytes: 64 << 20,
    files: 10_000,
};

pub(crate) fn disk_bytes(fixture: &TreeFixture) -> u64 {
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
    let root = fs::metadata(fixture.path("")).expect("root").blocks() * 512;
    root.saturating_sub(BLOCK) + sum(&fixture.path(""), &mut std::collections::BTreeSet::new())
}

/// Says that a test did not run for real here, also to who runs many.
pub(crate) fn skip(test: &str, reason: &str) {
    use std::io::Write as _;
    let line = format!("SKIPPED: {test}: {reason}\n");
    eprint!("{line}");
    if let Some(log) = std::env::var_os("BAFS_SKIP_LOG") {
        let log = fs::File::options().append(true).create(true).open(log);
        let _ = log.and_then(|mut log| log.write_all(line.as_bytes()));
    }
}
