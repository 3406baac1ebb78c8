//! The files of a volume that belong to a set. Sends nothing.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use bafs_proto::file_set::{FileSelection, MANIFEST_NAME, SET_FILES_MAX, has_wildcard};
use bafs_proto::message::{SourceEntry, SourceIdentity, SourceKind};
use bafs_proto::path::{check_relative, check_result_path};
use bafs_proto::{Error, ErrorCode, Result};
use glob::{MatchOptions, Pattern};

use super::confined_directory::ConfinedDirectory;
use super::extraction::open_error;
use crate::source::file_identity;

/// As in a shell: a wildcard matches within one name, and no dot at its beginning.
const MATCH_OPTIONS: MatchOptions = MatchOptions {
    case_sensitive: true,
    require_literal_separator: true,
    require_literal_leading_dot: true,
};

/// A file of a set, as it was when it was looked at.
#[derive(Debug, Clone)]
pub(super) struct SetFile {
    /// Path in the volume.
    pub(super) source: String,
    /// A symbolic link has the identity of the file that it leads to.
    entry: SourceEntry,
}

impl PartialEq for SetFile {
    /// Whether two looks found the same content. The time of the last change of attributes does
    /// not count: a file that its owner may not read is opened with other bits.
    fn eq(&self, other: &Self) -> bool {
        let (one, two) = (&self.entry, &other.entry);
        self.source == other.source
            && one.kind == two.kind
            && one.identity.size == two.identity.size
            && one.identity.mtime_ns == two.identity.mtime_ns
    }
}

/// Files by their paths below the directory at home.
pub(super) type FileSet = BTreeMap<String, SetFile>;

/// Finds the files of a set in the tree at `root`. Blocks.
///
/// # Errors
/// `NotFound` naming the first part without files, `BadPath` for what no set can have (a link that
/// leads to no file of the volume, for instance), `VolumeLost` when the tree is gone.
pub(super) fn find_files(root: &Path, selections: &[FileSelection]) -> Result<FileSet> {
    let tree = ConfinedDirectory::open(root).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::new(ErrorCode::VolumeLost, "the volume is gone"),
        _ => read_error("", &error),
    })?;
    let mut search = FileSearch {
        tree,
        files: FileSet::new(),
    };
    for selection in selections {
        check_relative(selection.path())?;
        let found = match selection {
            FileSelection::File(path) => search.add_file(path)?,
            FileSelection::Directory(path) => search.add_directory(path)?,
            FileSelection::Pattern(pattern) => search.add_matches(pattern)?,
        };
        if found == 0 {
            let text = format!("no file is at '{}'", selection.to_word());
            return Err(Error::new(ErrorCode::NotFound, text));
        }
    }
    Ok(search.files)
}

struct FileSearch {
    tree: ConfinedDirectory,
    files: FileSet,
}

impl FileSearch {
    fn add_file(&mut self, path: &str) -> Result<usize> {
        let name = path.rsplit('/').next().unwrap_or(path);
        match self.find_entry(path)? {
            Some(entry) if entry.kind == SourceKind::Directory => {
                let text = format!("'{path}' is a directory; write '{path}/' to send its files");
                Err(Error::new(ErrorCode::BadPath, text))
            }
            Some(entry) => self.add(name.to_owned(), path.to_owned(), entry),
            None => Ok(0),
        }
    }

    /// Adds what is below a directory, to any depth.
    fn add_directory(&mut self, top: &str) -> Result<usize> {
        let (mut found, mut directories) = (0, vec![String::new()]);
        while let Some(below) = directories.pop() {
            for name in self.list(&join(top, &below))? {
                let inner = join(&below, &name);
                let path = join(top, &inner);
                match self.find_entry(&path)? {
                    Some(entry) if entry.kind == SourceKind::Directory => directories.push(inner),
                    Some(entry) => found += self.add(inner, path, entry)?,
                    // It was there a moment ago.
                    None => return Err(changed_error(&path)),
                }
            }
        }
        Ok(found)
    }

    /// Adds the files that match a pattern, level by level.
    fn add_matches(&mut self, pattern: &str) -> Result<usize> {
        let names: Vec<&str> = pattern.split('/').collect();
        let first = names.iter().position(|name| has_wildcard(name));
        let (fixed, wild) = names.split_at(first.unwrap_or(names.len()));
        let top = fixed.join("/");
        let mut paths = vec![String::new()];
        for name in wild {
            let wanted = Pattern::new(name).map_err(|error| {
                let text = format!("'{pattern}' is no pattern: {}", error.msg);
                Error::new(ErrorCode::BadPath, text)
            })?;
            let mut matches = Vec::new();
            for above in &paths {
                let named = self.list(&join(&top, above))?.into_iter();
                let named = named.filter(|name| wanted.matches_with(name, MATCH_OPTIONS));
                matches.extend(named.map(|name| join(above, &name)));
            }
            paths = matches;
        }
        let mut found = 0;
        for inner in paths {
            let path = join(&top, &inner);
            match self.find_entry(&path)? {
                Some(entry) if entry.kind == SourceKind::Directory => {}
                Some(entry) => found += self.add(inner, path, entry)?,
                None => return Err(changed_error(&path)),
            }
        }
        Ok(found)
    }

    fn add(&mut self, target: String, source: String, mut entry: SourceEntry) -> Result<usize> {
        check_result_path(&target)?;
        if matches!(entry.kind, SourceKind::Symlink(_)) {
            entry.identity = self.identify_link_target(&source)?;
        }
        if target == MANIFEST_NAME {
            let text = format!("'{source}' has the name of the manifest; rename it");
            return Err(Error::new(ErrorCode::BadPath, text));
        }
        let file = SetFile { source, entry };
        if self.files.get(&target).is_some_and(|other| *other != file) {
            let text = format!(
                "'{}' and another file would both be '{target}' at home",
                file.source
            );
            return Err(Error::new(ErrorCode::BadPath, text));
        }
        self.files.insert(target, file);
        if self.files.len() > SET_FILES_MAX {
            let text = format!("the set has more than {SET_FILES_MAX} files; send an archive");
            return Err(Error::new(ErrorCode::BadPath, text));
        }
        Ok(1)
    }

    /// What a symbolic link leads to. One that leads to no file of the volume spoils the set, and
    /// is found before anything of the set goes home.
    fn identify_link_target(&self, path: &str) -> Result<SourceIdentity> {
        let opened = self.tree.open_file(path);
        let identity = opened.and_then(|file| file_identity(&file));
        identity.map_err(|error| {
            let error = open_error(&self.tree, path, &error);
            error.context(format!("cannot extract '{path}'"))
        })
    }

    /// What is at a path; `None` where nothing is.
    fn find_entry(&self, path: &str) -> Result<Option<SourceEntry>> {
        match self.tree.find_entry(path) {
            Ok(Some(found)) => Ok(Some(found.entry)),
            Ok(None) => {
                let text = format!("'{path}' is no regular file");
                Err(Error::new(ErrorCode::BadPath, text))
            }
            Err(error) if is_missing(&error) => Ok(None),
            Err(error) => Err(read_error(path, &error)),
        }
    }

    /// Names in a directory; none where no directory is.
    fn list(&self, path: &str) -> Result<Vec<String>> {
        match self.tree.sorted_names(path) {
            Err(error) if is_missing(&error) => Ok(Vec::new()),
            names => names.map_err(|error| read_error(path, &error)),
        }
    }
}

fn is_missing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

fn join(above: &str, below: &str) -> String {
    match (above, below) {
        ("", path) | (path, "") => path.to_owned(),
        _ => format!("{above}/{below}"),
    }
}

fn changed_error(path: &str) -> Error {
    let text = format!("'{path}' vanished during the extraction");
    Error::new(ErrorCode::WrongState, text)
}

fn read_error(path: &str, error: &io::Error) -> Error {
    if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) {
        let text = format!("'{path}' is reached by a symbolic link; name the directory itself");
        return Error::new(ErrorCode::BadPath, text);
    }
    Error::new(ErrorCode::ServerFault, format!("read '{path}': {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(root: &Path, words: &[&str]) -> Result<Vec<(String, String)>> {
        let selections: Vec<_> = words.iter().map(|it| FileSelection::of_word(it)).collect();
        let found = find_files(root, &selections)?;
        Ok(found.into_iter().map(|(to, it)| (to, it.source)).collect())
    }

    fn sample_tree() -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("directory");
        std::fs::create_dir_all(root.path().join("r/s1/deep")).expect("mkdir");
        std::fs::create_dir_all(root.path().join("r/s2")).expect("mkdir");
        std::fs::create_dir_all(root.path().join("empty")).expect("mkdir");
        let files = [
            "a.bam",
            "b.bam",
            "c.bai",
            ".d.bam",
            "r/s1/x",
            "r/s2/x",
            "r/s1/deep/y",
        ];
        for name in files {
            std::fs::write(root.path().join(name), name).expect("write");
        }
        root
    }

    #[test]
    fn selections_name_files_as_home_shall() {
        let root = sample_tree();
        let pairs = |pairs: &[(&str, &str)]| {
            let own = pairs
                .iter()
                .map(|(a, b)| ((*a).to_owned(), (*b).to_owned()));
            Ok(own.collect::<Vec<_>>())
        };
        let same = pairs(&[("a.bam", "a.bam"), ("b.bam", "b.bam")]);
        assert_eq!(find(root.path(), &["*.bam"]), same);
        assert_eq!(find(root.path(), &["*.bam", "a.bam"]), same, "each once");
        let tree = [
            ("s1/deep/y", "r/s1/deep/y"),
            ("s1/x", "r/s1/x"),
            ("s2/x", "r/s2/x"),
        ];
        assert_eq!(find(root.path(), &["r/"]), pairs(&tree));
        let named = [("s1/x", "r/s1/x"), ("s2/x", "r/s2/x")];
        assert_eq!(find(root.path(), &["r/*/x"]), pairs(&named));
        assert_eq!(find(root.path(), &["r/s1/x"]), pairs(&[("x", "r/s1/x")]));
        assert_eq!(find(root.path(), &["./"]).expect("all").len(), 7);
    }

    #[test]
    fn parts_without_files_are_missing() {
        let root = sample_tree();
        for words in [["*.sam"], ["empty/"], ["nothing/"], ["r/*/z"], ["r/s3/x"]] {
            let missing = find(root.path(), &words).expect_err("nothing");
            assert_eq!(missing.code, ErrorCode::NotFound, "{words:?}");
        }
        let missing = find(root.path(), &["*.bam", "*.sam"]).expect_err("one");
        assert!(missing.detail.contains("'*.sam'"), "{missing}");
    }

    #[test]
    fn links_lead_to_files_of_the_volume() {
        let root = sample_tree();
        let link = |to: &str, name: &str| {
            std::os::unix::fs::symlink(to, root.path().join(name)).expect("link");
        };
        link("a.bam", "l.bam");
        let words = &["*.bam"];
        assert_eq!(find(root.path(), words).expect("files").len(), 3);
        for to in ["nowhere", "/etc/hostname", "r"] {
            link(to, "z.bam");
            let refused = find(root.path(), words).expect_err("it leads to no file");
            assert_eq!(refused.code, ErrorCode::BadPath, "{to}");
            for part in ["'z.bam'", format!("symbolic link to '{to}'").as_str()] {
                assert!(refused.detail.contains(part), "{refused}");
            }
            std::fs::remove_file(root.path().join("z.bam")).expect("remove");
        }
    }

    #[test]
    fn changed_link_target_is_noticed() {
        let root = sample_tree();
        std::os::unix::fs::symlink("c.bai", root.path().join("l.bam")).expect("link");
        let look = || find_files(root.path(), &[FileSelection::of_word("*.bam")]).expect("files");
        let before = look();
        assert_eq!(look(), before);
        std::fs::write(root.path().join("c.bai"), "another content").expect("write");
        assert_ne!(look(), before);
    }

    #[test]
    fn sets_have_no_two_files_of_one_name() {
        let root = sample_tree();
        std::fs::write(root.path().join("r").join(MANIFEST_NAME), "x").expect("write");
        for words in [
            &["r/s1/x", "r/s2/x"][..],
            &["r/"],
            &["r"],
            &["r/[", "a.bam"],
        ] {
            let refused = find(root.path(), words).expect_err("refused");
            assert_eq!(refused.code, ErrorCode::BadPath, "{words:?}");
        }
    }
}
