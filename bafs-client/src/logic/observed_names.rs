//! Which names of a cache volume a job looked at, so that it is known what of the source it depends
//! on. Knows no sources.

use std::collections::BTreeSet;

use bafs_proto::file_op::ByName;
use bafs_proto::hash::Digest;
use bafs_proto::ids::InodeNo;
use bafs_proto::job_report::{ObservedInputs, directory_digest, unreadable_directory_digest};
use bafs_proto::message::SourceKind;

use crate::logic::manifest_tree::ManifestTree;

/// Names that are kept of one volume: a job that looks at more depends on all of the source.
const NAMES_MAX: usize = 256;

/// The names that were looked at so far.
#[derive(Debug, Default)]
pub struct ObservedNames {
    found: BTreeSet<InodeNo>,
    listed: BTreeSet<InodeNo>,
    missing: BTreeSet<(InodeNo, ByName)>,
    has_more: bool,
}

impl ObservedNames {
    /// A name led to this file or directory.
    pub fn note_found(&mut self, ino: InodeNo) {
        if !self.has_more && self.found.insert(ino) {
            self.limit();
        }
    }

    /// A directory has no such name.
    pub fn note_missing(&mut self, parent: InodeNo, name: &ByName) {
        if !self.has_more && self.missing.insert((parent, name.clone())) {
            self.limit();
        }
    }

    /// A directory was listed, or a part of it.
    pub fn note_listed(&mut self, directory: InodeNo) {
        if !self.has_more && self.listed.insert(directory) {
            self.limit();
        }
    }

    fn limit(&mut self) {
        if self.found.len() + self.listed.len() + self.missing.len() > NAMES_MAX {
            *self = Self {
                has_more: true,
                ..Self::default()
            };
        }
    }

    /// What was seen of the source that `tree` shows; nothing when it was too much to tell.
    pub fn inputs(&self, tree: &ManifestTree) -> Option<ObservedInputs> {
        if self.has_more {
            return None;
        }
        let (mut inputs, mut unreadable) = (ObservedInputs::default(), Vec::new());
        for entry in self.found.iter().filter_map(|ino| tree.source_entry(*ino)) {
            match entry.kind {
                SourceKind::File | SourceKind::Symlink(_) => {
                    inputs.files.push((entry.path, entry.identity));
                }
                SourceKind::Directory => inputs.directories.push(entry.path),
                SourceKind::UnreadableDirectory => unreadable.push(entry.path),
            }
        }
        // The volume is that one file: its directory is none of the source.
        if tree.is_single_file() {
            inputs.directories.clear();
            return Some(inputs);
        }
        let digest = |ino: &InodeNo| -> Option<(String, Digest)> {
            let entries = tree.source_entries(*ino);
            Some((
                tree.path(*ino)?.to_owned(),
                directory_digest(entries.iter()),
            ))
        };
        inputs.listed = self.listed.iter().filter_map(digest).collect();
        // Whoever looked into one saw no name, whether it listed it or not.
        let is_readable = |(path, _): &(String, Digest)| !unreadable.contains(path);
        inputs.listed.retain(is_readable);
        let closed = unreadable.iter().cloned();
        let closed = closed.map(|path| (path, unreadable_directory_digest()));
        inputs.listed.extend(closed);
        inputs.directories.extend(unreadable);
        let missing = self.missing.iter().filter_map(|(parent, name)| {
            let (parent, name) = (tree.path(*parent)?, bafs_proto::path::from_bytes(name));
            Some(bafs_proto::path::join(parent, &name))
        });
        inputs.missing = missing.collect();
        Some(inputs)
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::message::{SourceEntry, SourceIdentity};

    use super::*;
    use crate::logic::manifest_tree::Owner;

    fn entry(path: &str, kind: SourceKind, size: u64) -> SourceEntry {
        SourceEntry {
            path: path.to_owned(),
            kind,
            identity: SourceIdentity {
                size,
                mtime_ns: 5,
                ctime_ns: 7,
            },
            mode: 0o644,
        }
    }

    fn tree() -> ManifestTree {
        let top = entry("", SourceKind::Directory, 0);
        let entries = vec![
            entry("d", SourceKind::Directory, 0),
            entry("d/a", SourceKind::File, 10),
            entry("d/b", SourceKind::File, 20),
            entry("e", SourceKind::File, 30),
            entry("u", SourceKind::UnreadableDirectory, 0),
        ];
        ManifestTree::build(&top, entries, Owner::default(), 65_536).expect("a tree")
    }

    fn ino(tree: &ManifestTree, path: &str) -> InodeNo {
        let names = path.split('/');
        names.fold(InodeNo::ROOT, |at, name| {
            tree.lookup(at, name.as_bytes()).expect("it is there").ino
        })
    }

    #[test]
    fn inputs_are_names_that_were_looked_at() {
        let tree = tree();
        let mut names = ObservedNames::default();
        names.note_found(ino(&tree, "d"));
        names.note_found(ino(&tree, "d/a"));
        names.note_missing(ino(&tree, "d"), &b"c".to_vec());
        names.note_missing(InodeNo::ROOT, &b"x".to_vec());
        names.note_listed(ino(&tree, "d"));
        let inputs = names.inputs(&tree).expect("few names");
        let paths: Vec<&str> = inputs.files.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(paths, ["d/a"]);
        assert_eq!(inputs.files[0].1.ctime_ns, 7);
        assert_eq!(inputs.directories, ["d"]);
        assert_eq!(inputs.missing, ["x", "d/c"]);
        let listed = [
            entry("d/b", SourceKind::File, 20),
            entry("d/a", SourceKind::File, 10),
        ];
        let digest = directory_digest(listed.iter());
        assert_eq!(inputs.listed, [("d".to_owned(), digest)]);
    }

    #[test]
    fn unreadable_directory_is_told_apart() {
        let tree = tree();
        let mut names = ObservedNames::default();
        names.note_found(ino(&tree, "u"));
        let inputs = names.inputs(&tree).expect("few names");
        assert_eq!(inputs.directories, ["u"]);
        let closed = unreadable_directory_digest();
        assert_eq!(inputs.listed, [("u".to_owned(), closed)]);
        assert_ne!(closed, directory_digest([].into_iter()));
    }

    #[test]
    fn too_many_names_are_not_told() {
        let tree = tree();
        let mut names = ObservedNames::default();
        for number in 0..=NAMES_MAX {
            names.note_missing(InodeNo::ROOT, &format!("x{number}").into_bytes());
        }
        assert_eq!(names.inputs(&tree), None);
    }
}
