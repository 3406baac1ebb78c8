//! What a volume does not have as its source has it: each a path and a reason, for whoever uses the
//! volume. Reads no source.

use serde::{Deserialize, Serialize};

use crate::path;

/// Warnings of one volume that name their path; more are counted. They travel in headers.
pub const SOURCE_WARNINGS_MAX: usize = 16;

/// Longest text of a path in a warning, in bytes; of a longer one the middle is left out.
const WARNING_PATH_BYTES_MAX: usize = 256;

/// Something of a source that its volume has otherwise or not at all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceWarning {
    /// Path below the source, for people: bytes that are no text are numbers.
    pub path: String,
    /// Why.
    pub reason: WarningReason,
}

/// Why a volume does not have something as its source has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WarningReason {
    /// A directory that the home may not read: it is there, and nobody can open it.
    UnreadableDirectory,
    /// A file that the home may not read: it is there without its content, and may not be opened.
    UnreadableFile,
    /// A FIFO, a socket or a device: it has no content and is left out.
    SpecialFile,
    /// A path of more than 4,095 bytes: it is left out.
    PathTooLong,
    /// The home lists a name and says nothing more of it, as of a link that leads nowhere: it is
    /// left out.
    Unreachable,
}

impl WarningReason {
    /// What happened to the path, and what to do.
    fn explanation(self) -> &'static str {
        match self {
            Self::UnreadableDirectory => {
                "the home may not read it: the volume lists the directory, but opening it fails \
                 (EACCES)"
            }
            Self::UnreadableFile => {
                "the home may not read it: the volume lists the file, but opening it fails (EACCES)"
            }
            Self::SpecialFile => "it is a FIFO, socket or device; the volume omits it",
            Self::PathTooLong => "its path is longer than 4095 bytes; the volume omits it",
            Self::Unreachable => "the home cannot inspect it (a broken link?); the volume omits it",
        }
    }
}

/// The warnings of one volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceWarnings {
    /// The first of them.
    pub warnings: Vec<SourceWarning>,
    /// How many more there are.
    pub omitted_count: u64,
}

impl SourceWarnings {
    /// Adds one.
    pub fn add(&mut self, path: &str, reason: WarningReason) {
        if self.warnings.len() < SOURCE_WARNINGS_MAX {
            let path = shorten_middle(&path::printable(path));
            self.warnings.push(SourceWarning { path, reason });
        } else {
            self.omitted_count += 1;
        }
    }

    /// Adds those of another part of the same source.
    pub fn extend(&mut self, others: Self) {
        self.omitted_count = self.omitted_count.saturating_add(others.omitted_count);
        for other in others.warnings {
            self.add(&other.path, other.reason);
        }
    }

    /// Whether all is as the source has it.
    pub fn is_empty(&self) -> bool {
        self.warnings.is_empty() && self.omitted_count == 0
    }

    /// A sentence for each, about the volume of this name.
    pub fn sentences(&self, volume: &str) -> Vec<String> {
        let one = |warning: &SourceWarning| {
            let SourceWarning { path, reason } = warning;
            format!("volume '{volume}', '{path}': {}", reason.explanation())
        };
        let mut sentences: Vec<_> = self.warnings.iter().map(one).collect();
        if self.omitted_count > 0 {
            let more = self.omitted_count;
            sentences.push(format!("volume '{volume}': the same of {more} more paths"));
        }
        sentences
    }
}

/// A text of a path of bounded length, with its beginning and its end.
fn shorten_middle(path: &str) -> String {
    if path.len() <= WARNING_PATH_BYTES_MAX {
        return path.to_owned();
    }
    let head = path.floor_char_boundary(WARNING_PATH_BYTES_MAX / 2);
    let tail = path.ceil_char_boundary(path.len() - WARNING_PATH_BYTES_MAX / 2 + 3);
    format!("{}…{}", &path[..head], &path[tail..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_name_their_paths_and_count_the_rest() {
        let mut warnings = SourceWarnings::default();
        warnings.add(
            &path::from_bytes(b"a/\xe9"),
            WarningReason::UnreadableDirectory,
        );
        warnings.add(&"long/".repeat(1000), WarningReason::PathTooLong);
        let told = warnings.sentences("v");
        assert!(told[0].contains("'a/\\xE9'"), "{told:?}");
        assert!(told[1].len() < 400 && told[1].contains('…'), "{told:?}");
        for _ in 0..SOURCE_WARNINGS_MAX {
            warnings.add("x", WarningReason::SpecialFile);
        }
        assert_eq!(warnings.warnings.len(), SOURCE_WARNINGS_MAX);
        let told = warnings.sentences("v");
        assert!(told[SOURCE_WARNINGS_MAX].contains("2 more"), "{told:?}");
    }
}
