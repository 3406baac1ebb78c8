//! The files of a mirror that the kernel knows: numbers and paths. Touches no file.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fuser::INodeNo;

/// What a handle of the kernel stands for.
#[derive(Debug, Clone)]
pub(super) enum OpenObject {
    /// A file, and its number.
    File(Arc<File>, INodeNo),
    /// The names of a directory when it was opened, with their kinds.
    Directory(Arc<Vec<(std::ffi::OsString, fuser::FileType)>>),
}

/// Numbers, relative paths and open files.
#[derive(Debug)]
pub(super) struct FileTable {
    paths: HashMap<u64, PathBuf>,
    numbers: BTreeMap<PathBuf, u64>,
    open: HashMap<u64, OpenObject>,
    next: u64,
}

impl Default for FileTable {
    fn default() -> Self {
        let root = (INodeNo::ROOT.0, PathBuf::new());
        Self {
            numbers: BTreeMap::from([(root.1.clone(), root.0)]),
            paths: HashMap::from([root]),
            open: HashMap::new(),
            next: INodeNo::ROOT.0 + 1,
        }
    }
}

impl FileTable {
    /// The path of a file below the mirror's directory. One that was removed has none.
    pub(super) fn path(&self, ino: INodeNo) -> Option<&Path> {
        self.paths.get(&ino.0).map(PathBuf::as_path)
    }

    pub(super) fn child(&self, parent: INodeNo, name: &OsStr) -> Option<PathBuf> {
        self.path(parent).map(|path| path.join(name))
    }

    /// The number of what is at a path.
    pub(super) fn number(&mut self, path: &Path) -> INodeNo {
        if let Some(number) = self.numbers.get(path) {
            return INodeNo(*number);
        }
        let number = self.next;
        self.next += 1;
        self.numbers.insert(path.to_owned(), number);
        self.paths.insert(number, path.to_owned());
        INodeNo(number)
    }

    pub(super) fn remove(&mut self, path: &Path) {
        if let Some(number) = self.numbers.remove(path) {
            self.paths.remove(&number);
        }
    }

    /// What is at a path, and below it, is elsewhere now.
    pub(super) fn rename(&mut self, source: &Path, target: &Path) {
        self.remove(target);
        let below = self.numbers.range(source.to_owned()..);
        let moved = below.take_while(|(path, _)| path.starts_with(source));
        let moved: Vec<(PathBuf, u64)> = moved.map(|(path, ino)| (path.clone(), *ino)).collect();
        for (path, number) in moved {
            let rest = path.strip_prefix(source).unwrap_or_else(|_| Path::new(""));
            let new_path = match rest.as_os_str().is_empty() {
                true => target.to_owned(),
                false => target.join(rest),
            };
            self.numbers.remove(&path);
            self.numbers.insert(new_path.clone(), number);
            self.paths.insert(number, new_path);
        }
    }

    pub(super) fn insert_open(&mut self, handle: u64, object: OpenObject) {
        self.open.insert(handle, object);
    }

    pub(super) fn open_object(&self, handle: u64) -> Option<OpenObject> {
        self.open.get(&handle).cloned()
    }

    /// An open file of a number whose path may be gone.
    pub(super) fn open_file_of(&self, ino: INodeNo) -> Option<Arc<File>> {
        self.open.values().find_map(|object| match object {
            OpenObject::File(file, number) if *number == ino => Some(Arc::clone(file)),
            _ => None,
        })
    }

    pub(super) fn close(&mut self, handle: u64) {
        self.open.remove(&handle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renames_move_what_is_below() {
        let mut table = FileTable::default();
        let file = table.number(Path::new("a/b/c"));
        let directory = table.number(Path::new("a/b"));
        let other = table.number(Path::new("a/bc"));
        let replaced = table.number(Path::new("z"));
        table.rename(Path::new("a/b"), Path::new("z"));
        assert_eq!(table.path(directory), Some(Path::new("z")));
        assert_eq!(table.path(file), Some(Path::new("z/c")));
        assert_eq!(table.path(other), Some(Path::new("a/bc")));
        assert_eq!(table.path(replaced), None);
    }
}
