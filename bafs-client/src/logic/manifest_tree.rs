//! The tree of names of a cache volume, built once from its manifest. Reads no data.

use std::collections::BTreeMap;

use bafs_proto::file_op::{
    Attr, ByName, DirectoryEntry, FileTime, S_IFDIR, S_IFLNK, S_IFREG, TreeStat,
};
use bafs_proto::ids::{FileIndex, InodeNo};
use bafs_proto::message::{SourceEntry, SourceIdentity, SourceKind};
use bafs_proto::path::check_relative;
use bafs_proto::path::to_bytes;
use bafs_proto::{Error, ErrorCode, Result};

const NANOSECONDS: i64 = 1_000_000_000;

/// Whoever holds the volume's token may read it: the owner's bits must not say otherwise.
const DIRECTORY_OWNER_MODE: u32 = 0o500;

/// Name under which a volume that is one single file appears in its tree.
pub const SINGLE_FILE_NAME: &str = "file";

/// Who owns all files of the tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Owner {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// A tree of names in memory that never changes.
#[derive(Debug)]
pub struct ManifestTree {
    /// In order of inode numbers, from the root's on.
    nodes: Vec<ManifestNode>,
    owner: Owner,
    block_bytes: u32,
    total_bytes: u64,
    is_single_file: bool,
}

#[derive(Debug)]
struct ManifestNode {
    parent: usize,
    path: String,
    mode: u32,
    size: u64,
    mtime_ns: i64,
    ctime_ns: i64,
    links: u32,
    content: NodeContent,
}

#[derive(Debug)]
enum NodeContent {
    Directory(BTreeMap<ByName, usize>),
    /// A directory that the home may not read.
    Unreadable,
    File(FileIndex),
    Symlink(Vec<u8>),
}

/// A regular file of the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ManifestFile {
    /// Its place in the manifest.
    pub index: FileIndex,
    /// Its size in bytes.
    pub size: u64,
}

impl ManifestTree {
    /// Builds the tree from the manifest's `top`, which is a directory, and its entries in order.
    /// Directories that the manifest leaves out are added.
    ///
    /// # Errors
    /// `BadPath` or `Malformed` when the entries are no tree.
    pub fn build(
        top: &SourceEntry,
        entries: Vec<SourceEntry>,
        owner: Owner,
        block_bytes: u32,
    ) -> Result<Self> {
        let root = ManifestNode {
            parent: 0,
            path: String::new(),
            mode: S_IFDIR | (top.mode & 0o777) | DIRECTORY_OWNER_MODE,
            size: 0,
            mtime_ns: top.identity.mtime_ns,
            ctime_ns: 0,
            links: 2,
            content: NodeContent::Directory(BTreeMap::new()),
        };
        let mut tree = Self {
            nodes: vec![root],
            owner,
            block_bytes,
            total_bytes: 0,
            is_single_file: false,
        };
        for (index, entry) in entries.into_iter().enumerate() {
            let index = u32::try_from(index)
                .map_err(|_| Error::new(ErrorCode::Malformed, "the manifest is too long"))?;
            tree.insert(FileIndex(index), entry)?;
        }
        Ok(tree)
    }

    /// Whether the source is one file instead of a directory; it appears as
    /// [`SINGLE_FILE_NAME`].
    pub fn is_single_file(&self) -> bool {
        self.is_single_file
    }

    /// Whether this is a directory that cannot be opened, as the home may not read it.
    pub fn is_unreadable(&self, ino: InodeNo) -> bool {
        let at = self.index_of(ino);
        at.is_some_and(|at| matches!(self.nodes[at].content, NodeContent::Unreadable))
    }

    /// Finds a name in a directory; `None` when `parent` is none or the name is not there.
    pub fn lookup(&self, parent: InodeNo, name: &[u8]) -> Option<Attr> {
        let parent_at = self.index_of(parent)?;
        let NodeContent::Directory(children) = &self.nodes[parent_at].content else {
            return None;
        };
        let found = match name {
            b"." => parent_at,
            b".." => self.nodes[parent_at].parent,
            _ => *children.get(name)?,
        };
        Some(self.attr_at(found))
    }

    /// Attributes of a file.
    pub fn attr(&self, ino: InodeNo) -> Option<Attr> {
        self.index_of(ino).map(|at| self.attr_at(at))
    }

    /// The regular file of this number.
    pub fn file(&self, ino: InodeNo) -> Option<ManifestFile> {
        let node = &self.nodes[self.index_of(ino)?];
        match node.content {
            NodeContent::File(index) => Some(ManifestFile {
                index,
                size: node.size,
            }),
            _ => None,
        }
    }

    /// Target of a symbolic link.
    pub fn symlink(&self, ino: InodeNo) -> Option<&[u8]> {
        match &self.nodes[self.index_of(ino)?].content {
            NodeContent::Symlink(target) => Some(target),
            _ => None,
        }
    }

    /// Path of a file within the volume.
    pub fn path(&self, ino: InodeNo) -> Option<&str> {
        self.index_of(ino).map(|at| self.nodes[at].path.as_str())
    }

    /// What the source has at this place: its path is below the source, and empty where the volume
    /// is that one file.
    pub fn source_entry(&self, ino: InodeNo) -> Option<SourceEntry> {
        self.index_of(ino).map(|at| self.source_entry_at(at))
    }

    /// What the source has directly in a directory; nothing for what is none.
    pub fn source_entries(&self, ino: InodeNo) -> Vec<SourceEntry> {
        let content = self.index_of(ino).map(|at| &self.nodes[at].content);
        match content {
            Some(NodeContent::Directory(children)) => {
                let children = children.values();
                children.map(|at| self.source_entry_at(*at)).collect()
            }
            _ => Vec::new(),
        }
    }

    fn source_entry_at(&self, at: usize) -> SourceEntry {
        let node = &self.nodes[at];
        let kind = match &node.content {
            NodeContent::Directory(_) => SourceKind::Directory,
            NodeContent::Unreadable => SourceKind::UnreadableDirectory,
            NodeContent::File(_) => SourceKind::File,
            NodeContent::Symlink(target) => SourceKind::Symlink(target.clone()),
        };
        // A link has no size in a source.
        let size = match kind {
            SourceKind::File => node.size,
            _ => 0,
        };
        SourceEntry {
            path: match self.is_single_file {
                true => String::new(),
                false => node.path.clone(),
            },
            kind,
            identity: SourceIdentity {
                size,
                mtime_ns: node.mtime_ns,
                ctime_ns: node.ctime_ns,
            },
            mode: node.mode & 0o7777,
        }
    }

    /// Entries of a directory after `cookie` (0 = from the start), with attributes, for as long as
    /// `take` wants more; `None` when `ino` is no directory. Cookies count entries.
    pub fn read_entries(
        &self,
        ino: InodeNo,
        cookie: u64,
        mut take: impl FnMut(DirectoryEntry) -> bool,
    ) -> Option<()> {
        let at = self.index_of(ino)?;
        let NodeContent::Directory(children) = &self.nodes[at].content else {
            return None;
        };
        let dots = [(&b"."[..], at), (&b".."[..], self.nodes[at].parent)];
        let named = children
            .iter()
            .map(|(name, child)| (name.as_slice(), *child));
        let skip = usize::try_from(cookie).unwrap_or(usize::MAX);
        for (number, (name, child)) in dots.into_iter().chain(named).enumerate().skip(skip) {
            let attr = self.attr_at(child);
            let entry = DirectoryEntry {
                name: name.to_vec(),
                ino: attr.ino,
                mode: attr.mode,
                cookie: number as u64 + 1,
                attr: Some(attr),
            };
            if !take(entry) {
                break;
            }
        }
        Some(())
    }

    /// Number of regular files, and their bytes.
    pub fn files_and_bytes(&self) -> (u64, u64) {
        let is_file = |node: &&ManifestNode| matches!(node.content, NodeContent::File(_));
        let files = self.nodes.iter().filter(is_file);
        files.fold((0, 0), |(count, bytes), node| {
            (count + 1, bytes + node.size)
        })
    }

    /// Size of the whole tree; nothing is free, as nothing can be added.
    pub fn stat(&self) -> TreeStat {
        TreeStat {
            size_bytes: self.total_bytes,
            free_bytes: 0,
            size_files: self.nodes.len() as u64,
            free_files: 0,
            disk_free_bytes: None,
            disk_free_files: None,
        }
    }

    fn insert(&mut self, index: FileIndex, entry: SourceEntry) -> Result<()> {
        check_relative(&entry.path)?;
        let SourceEntry {
            path,
            kind,
            identity,
            mode,
        } = entry;
        let (kind_bits, content) = match kind {
            SourceKind::Directory => (S_IFDIR, NodeContent::Directory(BTreeMap::new())),
            SourceKind::UnreadableDirectory => (S_IFDIR, NodeContent::Unreadable),
            SourceKind::File => (S_IFREG, NodeContent::File(index)),
            SourceKind::Symlink(target) => (S_IFLNK, NodeContent::Symlink(target)),
        };
        let readable = match &content {
            NodeContent::Directory(_) => DIRECTORY_OWNER_MODE,
            NodeContent::Unreadable => 0,
            NodeContent::File(_) | NodeContent::Symlink(_) => 0o400,
        };
        let mode = kind_bits | (mode & 0o777) | readable;
        let path = match (path.is_empty(), &content) {
            (true, NodeContent::Directory(_)) => {
                (self.nodes[0].mode, self.nodes[0].mtime_ns) = (mode, identity.mtime_ns);
                return Ok(());
            }
            (true, _) => {
                self.is_single_file = true;
                SINGLE_FILE_NAME.to_owned()
            }
            (false, _) => path,
        };
        let size = match &content {
            NodeContent::Directory(_) | NodeContent::Unreadable => 0,
            NodeContent::File(_) => identity.size,
            NodeContent::Symlink(target) => target.len() as u64,
        };
        self.total_bytes = self.total_bytes.saturating_add(size);
        let times = (identity.mtime_ns, identity.ctime_ns);
        self.add(path, mode, size, times, content)
    }

    fn add(
        &mut self,
        path: String,
        mode: u32,
        size: u64,
        (mtime_ns, ctime_ns): (i64, i64),
        content: NodeContent,
    ) -> Result<()> {
        let (parent_path, name) = path.rsplit_once('/').unwrap_or(("", &path));
        let parent = self.find_or_add_directory(parent_path)?;
        let name = to_bytes(name).into_owned();
        let number = self.nodes.len();
        let is_directory = matches!(content, NodeContent::Directory(_) | NodeContent::Unreadable);
        let NodeContent::Directory(children) = &mut self.nodes[parent].content else {
            return Err(not_a_tree(&path));
        };
        if let Some(&there) = children.get(&name) {
            // A directory that was added for its first child is described later; nothing else
            // may come twice.
            if is_directory && matches!(self.nodes[there].content, NodeContent::Directory(_)) {
                (self.nodes[there].mode, self.nodes[there].mtime_ns) = (mode, mtime_ns);
                return Ok(());
            }
            return Err(not_a_tree(&path));
        }
        children.insert(name, number);
        if is_directory {
            self.nodes[parent].links += 1;
        }
        let links = if is_directory { 2 } else { 1 };
        self.nodes.push(ManifestNode {
            parent,
            path,
            mode,
            size,
            mtime_ns,
            ctime_ns,
            links,
            content,
        });
        Ok(())
    }

    /// The directory at `path`, made when the manifest left it out.
    fn find_or_add_directory(&mut self, path: &str) -> Result<usize> {
        let mut at = 0;
        let mut done = 0;
        for name in path.split('/').filter(|name| !name.is_empty()) {
            done += name.len() + 1;
            let NodeContent::Directory(children) = &self.nodes[at].content else {
                return Err(not_a_tree(path));
            };
            let found = children.get(&*to_bytes(name)).copied();
            at = match found {
                Some(child) => child,
                None => {
                    let made = self.nodes.len();
                    let content = NodeContent::Directory(BTreeMap::new());
                    let path = path[..done - 1].to_owned();
                    self.add(path, S_IFDIR | 0o755, 0, (0, 0), content)?;
                    made
                }
            };
        }
        Ok(at)
    }

    fn index_of(&self, ino: InodeNo) -> Option<usize> {
        let at = usize::try_from(ino.0.checked_sub(InodeNo::ROOT.0)?).ok()?;
        (at < self.nodes.len()).then_some(at)
    }

    fn attr_at(&self, at: usize) -> Attr {
        let node = &self.nodes[at];
        let time = FileTime {
            seconds: node.mtime_ns.div_euclid(NANOSECONDS),
            nanoseconds: u32::try_from(node.mtime_ns.rem_euclid(NANOSECONDS)).unwrap_or(0),
        };
        Attr {
            ino: InodeNo(InodeNo::ROOT.0 + at as u64),
            size: node.size,
            blocks: node.size.div_ceil(512),
            atime: time,
            mtime: time,
            ctime: time,
            mode: node.mode,
            nlink: node.links,
            uid: self.owner.uid,
            gid: self.owner.gid,
            rdev: 0,
            block_size: self.block_bytes,
            btime_ns: 0,
        }
    }
}

fn not_a_tree(path: &str) -> Error {
    Error::new(
        ErrorCode::Malformed,
        format!("the manifest has '{path}' twice or below a file"),
    )
}

#[cfg(test)]
mod tests {
    use bafs_proto::message::SourceIdentity;

    use super::*;

    fn entry(path: &str, kind: SourceKind, size: u64) -> SourceEntry {
        let identity = SourceIdentity {
            size,
            mtime_ns: -1,
            ctime_ns: 0,
        };
        SourceEntry {
            path: path.into(),
            kind,
            identity,
            mode: 0o644,
        }
    }

    fn build(entries: Vec<SourceEntry>) -> Result<ManifestTree> {
        let top = entry("", SourceKind::Directory, 0);
        ManifestTree::build(&top, entries, Owner { uid: 7, gid: 8 }, 65_536)
    }

    fn names(tree: &ManifestTree, ino: InodeNo, cookie: u64) -> Vec<String> {
        let mut names = Vec::new();
        tree.read_entries(ino, cookie, |entry| {
            names.push(String::from_utf8(entry.name).unwrap());
            true
        })
        .unwrap();
        names
    }

    fn sample_tree() -> ManifestTree {
        build(vec![
            entry("", SourceKind::Directory, 4096),
            entry("db", SourceKind::Directory, 4096),
            entry("db/a.phr", SourceKind::File, 10),
            entry("db/link", SourceKind::Symlink(b"a.phr".to_vec()), 5),
            entry("q/deep/1.fa", SourceKind::File, 5000),
        ])
        .unwrap()
    }

    #[test]
    fn listing_continues_after_its_cookie() {
        let tree = sample_tree();
        assert_eq!(names(&tree, InodeNo::ROOT, 0), [".", "..", "db", "q"]);
        assert_eq!(names(&tree, InodeNo::ROOT, 3), ["q"]);
        assert_eq!(names(&tree, InodeNo::ROOT, 4), Vec::<String>::new());
    }

    #[test]
    fn entries_have_the_attributes_of_the_manifest() {
        let tree = sample_tree();
        let db = tree.lookup(InodeNo::ROOT, b"db").unwrap();
        assert_eq!(
            (db.mode, db.nlink, db.uid, db.gid),
            (S_IFDIR | 0o744, 2, 7, 8)
        );
        let file = tree.lookup(db.ino, b"a.phr").unwrap();
        assert_eq!((file.mode, file.size, file.nlink), (S_IFREG | 0o644, 10, 1));
        let mtime = FileTime {
            seconds: -1,
            nanoseconds: 999_999_999,
        };
        assert_eq!(file.mtime, mtime);
        assert_eq!(tree.stat().size_bytes, 5015);
    }

    #[test]
    fn inodes_lead_back_to_manifest_entries() {
        let tree = sample_tree();
        let db = tree.lookup(InodeNo::ROOT, b"db").unwrap();
        let file = tree.lookup(db.ino, b"a.phr").unwrap();
        let expected = ManifestFile {
            index: FileIndex(2),
            size: 10,
        };
        assert_eq!(tree.file(file.ino), Some(expected));
        assert_eq!(tree.path(file.ino), Some("db/a.phr"));
        let link = tree.lookup(db.ino, b"link").unwrap();
        assert_eq!(tree.symlink(link.ino), Some(&b"a.phr"[..]));
    }

    #[test]
    fn missing_directories_are_added_and_counted() {
        let tree = sample_tree();
        let parent = tree.lookup(InodeNo::ROOT, b"q").unwrap();
        let deep = tree.lookup(parent.ino, b"deep").unwrap();
        assert_eq!(tree.lookup(deep.ino, b"..").unwrap().nlink, 3);
        assert_eq!(tree.attr(InodeNo::ROOT).unwrap().nlink, 4);
    }

    #[test]
    fn unknown_names_and_inodes_are_not_found() {
        let tree = sample_tree();
        let db = tree.lookup(InodeNo::ROOT, b"db").unwrap();
        let file = tree.lookup(db.ino, b"a.phr").unwrap();
        assert_eq!(tree.lookup(InodeNo::ROOT, b"none"), None);
        assert_eq!(tree.lookup(file.ino, b"x"), None);
        assert_eq!(tree.attr(InodeNo(0)), None);
        assert_eq!(tree.attr(InodeNo(99)), None);
    }

    #[test]
    fn a_single_file_forms_a_tree() {
        let tree = build(vec![entry("", SourceKind::File, 3)]).unwrap();
        assert!(tree.is_single_file());
        let file = tree
            .lookup(InodeNo::ROOT, SINGLE_FILE_NAME.as_bytes())
            .unwrap();
        assert_eq!(
            tree.file(file.ino),
            Some(ManifestFile {
                index: FileIndex(0),
                size: 3
            })
        );
    }

    #[test]
    fn inconsistent_manifests_are_refused() {
        for bad in ["/a", "a/../b", "a//b", "."] {
            let error = build(vec![entry(bad, SourceKind::File, 1)]).unwrap_err();
            assert_eq!(error.code, ErrorCode::BadPath, "{bad}");
        }
        let twice = vec![
            entry("a", SourceKind::File, 1),
            entry("a", SourceKind::File, 1),
        ];
        let below = vec![
            entry("a", SourceKind::File, 1),
            entry("a/b", SourceKind::File, 1),
        ];
        let both = vec![
            entry("a/b", SourceKind::File, 1),
            entry("a", SourceKind::File, 1),
        ];
        for bad in [twice, below, both] {
            assert_eq!(build(bad).unwrap_err().code, ErrorCode::Malformed);
        }
        // A directory may be described after its first child.
        let late = vec![
            entry("a/b", SourceKind::File, 1),
            entry("a", SourceKind::Directory, 1),
        ];
        assert!(build(late).is_ok());
    }
}
