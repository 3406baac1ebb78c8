//! Trees of the two sides: what is there before, and how they compare.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Files that an earlier job left: what the writer knows of them comes from listings.
pub(super) fn make_earlier_files(root: &Path) {
    let directory = root.join("c");
    std::fs::create_dir(&directory).unwrap();
    for (name, bytes) in [("a", 10), ("b", 9_000), ("d", 5_000), ("e", 70_000)] {
        std::fs::write(directory.join(name), vec![b'x'; bytes]).unwrap();
    }
}

/// Every path with mode, links, size and content.
pub(super) fn describe_tree(root: &Path) -> BTreeMap<String, (u32, u64, Vec<u8>)> {
    let mut all = BTreeMap::new();
    let mut pending = vec![root.to_owned()];
    while let Some(directory) = pending.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let metadata = std::fs::symlink_metadata(&path).unwrap();
            let content = if metadata.is_dir() {
                pending.push(path.clone());
                Vec::new()
            } else {
                std::fs::read(&path).unwrap()
            };
            let name = path
                .strip_prefix(root)
                .unwrap()
                .to_str()
                .unwrap()
                .to_owned();
            all.insert(name, (metadata.mode(), metadata.nlink(), content));
        }
    }
    all
}
