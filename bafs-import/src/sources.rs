//! What readers ask of the world around a file, and how they refuse.

use std::fmt;

/// Files beside the imported one. Paths are relative to its directory, or absolute.
pub trait Sources {
    /// The text of a file.
    ///
    /// # Errors
    /// Why it cannot be read, for a person.
    fn read(&self, path: &str) -> Result<String, String>;

    /// The bytes of a file or directory; nothing if it is not there.
    fn size(&self, path: &str) -> Option<u64>;

    /// Whether it is a directory.
    fn is_directory(&self, path: &str) -> bool;
}

/// Why a file is no workflow of BAFS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportError {
    /// The line, from 1 on, if one is the cause.
    pub line: Option<usize>,
    /// What is wrong and, if useful, what to do.
    pub message: String,
}

impl ImportError {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self {
            line: None,
            message: message.into(),
        }
    }

    pub(crate) fn at(line: usize, message: impl Into<String>) -> Self {
        Self {
            line: Some(line),
            message: message.into(),
        }
    }
}

impl fmt::Display for ImportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        f.write_str(&self.message)
    }
}

impl std::error::Error for ImportError {}
