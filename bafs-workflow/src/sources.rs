//! What a workflow takes from outside of its text, as its caller gives it. Reads nothing itself.

use super::limits::STATEMENTS_MAX;
use super::url::Url;

/// Texts and listings that a workflow names. The same answers give the same workflow.
pub trait Sources {
    /// The text of a file of at most `bytes_max` bytes, a whole number of MiB, or why there is
    /// none. `path` is as the workflow writes it, with the directory of the file that names it in
    /// front unless it is absolute.
    ///
    /// # Errors
    /// Why it cannot be read, as a person is told.
    fn read(&self, path: &str, bytes_max: usize) -> Result<String, String>;

    /// What is below a directory, down to `depth_max` levels, in the directories below it that
    /// `enters` names; more than that may come, too, and in any order. `directory` is a URL of a
    /// home, or a path like that of `read`; empty for the working directory.
    ///
    /// # Errors
    /// Why it cannot be listed, as a person is told.
    fn list(
        &self,
        directory: &str,
        depth_max: usize,
        enters: &dyn Fn(&str) -> bool,
    ) -> Result<Vec<ListedEntry>, String>;

    /// Statements that the loops of a workflow may make, at most. Each takes up to 1.5 KB.
    fn statements_max(&self) -> u64 {
        STATEMENTS_MAX
    }

    /// Where nodes find a file of this machine. `path` is one like that of [`Self::read`].
    ///
    /// # Errors
    /// There is no such file, or nodes cannot reach it: why, as a person is told.
    fn locate(&self, path: &str) -> Result<LocatedFile, String> {
        Err(format!("no home has {path}"))
    }
}

/// A file of this machine as nodes reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocatedFile {
    /// Its place at a home.
    pub url: Url,
    /// Its size in bytes.
    pub bytes: u64,
}

/// A file or directory of a listing.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ListedEntry {
    /// The path below the listed directory, without a leading slash.
    pub path: String,
    /// Whether it is a directory; a link counts as what it leads to.
    pub is_directory: bool,
}

/// Description files by a function, and nothing else.
pub(super) struct DescriptionSource<'r>(pub(super) &'r dyn Fn(&str) -> Result<String, String>);

impl Sources for DescriptionSource<'_> {
    fn read(&self, path: &str, _bytes_max: usize) -> Result<String, String> {
        (self.0)(path)
    }

    fn list(
        &self,
        _directory: &str,
        _depth_max: usize,
        _enters: &dyn Fn(&str) -> bool,
    ) -> Result<Vec<ListedEntry>, String> {
        Err("listings are not available here".to_owned())
    }
}

/// The directory of a path with its trailing slash, or nothing.
pub(super) fn directory_of(path: &str) -> &str {
    &path[..path.rfind('/').map_or(0, |slash| slash + 1)]
}

/// A path as `Sources` takes it, of one that a file in `directory` names.
pub(super) fn resolve_path(directory: &str, path: &str) -> String {
    if path.starts_with('/') || path.contains("://") {
        path.to_owned()
    } else {
        format!("{directory}{path}")
    }
}
