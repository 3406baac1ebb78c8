//! Sources as homes and volumes list them: files, directories and links. Lists none.

use serde::{Deserialize, Serialize};

use crate::hash::Digest;
use crate::ids::BlockIndex;
use crate::source_warning::SourceWarnings;

/// What a source file is; a change of any part makes it another file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SourceIdentity {
    /// Size in bytes.
    pub size: u64,
    /// Modification time in nanoseconds since the Unix epoch.
    pub mtime_ns: i64,
    /// When anything of a file changed last, its rights and names included, in the same measure:
    /// nobody can set it back. 0 where the home tells no such time, and for what is no file.
    pub ctime_ns: i64,
}

/// Kind of a source entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SourceKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link with its target.
    Symlink(Vec<u8>),
    /// A directory that the home may not read: what is in it is unknown.
    UnreadableDirectory,
}

/// A file, directory or link of a source tree. Its path is text as [`crate::path`] says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceEntry {
    /// Path below what was listed, without a leading slash; empty for that itself.
    pub path: String,
    /// What it is.
    pub kind: SourceKind,
    /// Size and time.
    pub identity: SourceIdentity,
    /// Permission bits.
    pub mode: u32,
}

/// Lists a home path with everything below it, in path order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListSource {
    /// Path below the export; may be a single file.
    pub path: String,
    /// Goes on after this entry's path; `None` starts.
    pub after: Option<String>,
}

/// A page of a listing. The listing ends with the first page whose `has_more` is false.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourcePage {
    /// Entries, in path order (bytewise, components compared one by one).
    pub entries: Vec<SourceEntry>,
    /// What of this part of the source is left out or cannot be read.
    pub warnings: SourceWarnings,
    /// Whether entries follow.
    pub has_more: bool,
}

/// Asks what a home says of blocks of files: a reader compares blocks from other nodes with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadDigests {
    /// What was listed: a path below the export.
    pub path: String,
    /// Size of a block in bytes.
    pub block_bytes: u32,
    /// The blocks that are needed; they fit a body.
    pub needed: SourceBlocks,
    /// Blocks that may be needed soon: the home answers what it knows without reading a file. All
    /// blocks together are at most [`crate::limits::DIGESTS_MAX`].
    pub welcome: Vec<SourceBlocks>,
}

/// Blocks of a file that follow each other, cut at the end of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceBlocks {
    /// Path below what was listed; empty for that itself.
    pub path: String,
    /// Which state of the file.
    pub identity: SourceIdentity,
    /// The first block.
    pub first: BlockIndex,
    /// Number of blocks.
    pub count: u32,
}

/// What a home says of blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceDigests {
    /// The digests of the needed blocks.
    pub needed: Vec<Digest>,
    /// Of each of the other ranges, in their order, the digests of as many blocks from its
    /// beginning on as the home knows.
    pub welcome: Vec<Vec<Digest>>,
}

/// Looks at one home path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatSource {
    /// Path below the export.
    pub path: String,
}
