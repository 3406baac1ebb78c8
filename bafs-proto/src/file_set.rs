//! Sets of files that go home together: which files of a volume they are, and the manifest that
//! says at home what belongs to the set. Reads no file.

use serde::{Deserialize, Serialize};

/// Name of the manifest, at the top of the set's directory at home.
pub const MANIFEST_NAME: &str = "bafs-manifest.json";

/// Form of the manifest.
pub const MANIFEST_VERSION: u32 = 1;

/// Most files of a set. Their manifest has about 20 MB then.
pub const SET_FILES_MAX: usize = 100_000;

/// Most parts of one set.
pub const SELECTIONS_MAX: usize = 64;

/// A part of a set. All paths are relative to the top of the volume.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum FileSelection {
    /// One file; at home it has its own name.
    File(String),
    /// All files below a directory, the volume itself for an empty path; at home they have their
    /// paths below that directory.
    Directory(String),
    /// The files that match a pattern of a shell; at home they have their paths from the first
    /// name with a wildcard on.
    Pattern(String),
}

impl FileSelection {
    /// What a word of a statement or command selects: a directory if it ends with `/`, files that
    /// match if it has a wildcard, else one file.
    pub fn of_word(word: &str) -> Self {
        let directory = word.strip_suffix('/');
        match directory {
            Some("." | "") => Self::Directory(String::new()),
            _ if has_wildcard(word) => Self::Pattern(word.to_owned()),
            Some(directory) => Self::Directory(directory.trim_end_matches('/').to_owned()),
            None => Self::File(word.to_owned()),
        }
    }

    /// The path or pattern.
    pub fn path(&self) -> &str {
        match self {
            Self::File(path) | Self::Directory(path) | Self::Pattern(path) => path,
        }
    }

    /// The selection as a statement has it.
    pub fn to_word(&self) -> String {
        match self {
            Self::File(path) | Self::Pattern(path) => path.clone(),
            Self::Directory(path) if path.is_empty() => "./".to_owned(),
            Self::Directory(path) => format!("{path}/"),
        }
    }
}

/// Whether a name or path has a character that stands for others in a pattern.
pub fn has_wildcard(text: &str) -> bool {
    text.contains(['*', '?', '['])
}

/// What belongs to a set at home. It is written before the first file and again after the last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetManifest {
    /// [`MANIFEST_VERSION`] of the writer.
    pub version: u32,
    /// Whether all files of the set are in place. While it is false, files may be those of an
    /// older set.
    pub complete: bool,
    /// The extraction that wrote it.
    pub extraction: String,
    /// Bytes of all files.
    pub bytes: u64,
    /// The files, in the order of their paths; none before the set is complete.
    pub files: Vec<ManifestFile>,
}

/// A file of a set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestFile {
    /// Path below the directory of the manifest.
    pub path: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// Its BLAKE3 digest, in hexadecimal digits.
    pub blake3: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_select_files_directories_or_patterns() {
        let directory = |path: &str| FileSelection::Directory(path.to_owned());
        let file = |path: &str| FileSelection::File(path.to_owned());
        let pattern = |path: &str| FileSelection::Pattern(path.to_owned());
        for (word, selection) in [
            ("a/b", file("a/b")),
            ("a/b/", directory("a/b")),
            ("./", directory("")),
            ("*.bam", pattern("*.bam")),
            ("a?/[xy]", pattern("a?/[xy]")),
        ] {
            assert_eq!(FileSelection::of_word(word), selection);
            assert_eq!(selection.to_word(), word);
        }
    }
}
