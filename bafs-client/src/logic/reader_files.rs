//! Attributes of small files that a session which only reads a volume may open without the server.
//! Opens nothing.

use std::collections::BTreeMap;

use bafs_proto::file_op::Attr;
use bafs_proto::ids::InodeNo;

use super::small_files::SmallFile;

/// What the server itself must be allowed to read a file.
const OWNER_READ: u32 = 0o400;

/// Attributes of small files that the kernel knows.
#[derive(Debug, Default)]
pub struct ReaderFiles(BTreeMap<InodeNo, Attr>);

impl ReaderFiles {
    /// The attributes of a small file that surely opens at the server.
    pub fn attr(&self, ino: InodeNo) -> Option<Attr> {
        self.0.get(&ino).copied()
    }

    /// The server told the attributes of a file.
    pub fn note(&mut self, attr: &Attr) {
        let is_readable = attr.nlink > 0 && attr.mode & OWNER_READ != 0;
        match SmallFile::from_attr(attr) {
            Some(_) if is_readable => self.0.insert(attr.ino, *attr),
            _ => self.0.remove(&attr.ino),
        };
    }

    /// The kernel does not know a file any more.
    pub fn forget(&mut self, ino: InodeNo) {
        self.0.remove(&ino);
    }
}
