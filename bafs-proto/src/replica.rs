//! What is asked of a scratch volume to make a copy of it: its tree, ranges of its files, many
//! small files at once, and where large ones have data. Small files of a home come so, too.

use serde::{Deserialize, Serialize};

use crate::hash::Digest;
use crate::ids::VolumeId;
use crate::message::{SourceIdentity, SourcePage};

/// Lists a scratch volume with everything in it, in path order; how replicas are filled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListVolumeTree {
    /// Which.
    pub volume: VolumeId,
    /// Goes on after this entry's path; `None` starts.
    pub after: Option<String>,
}

/// A page of the tree of a scratch volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreePage {
    /// Its entries, each name of a file for itself.
    pub page: SourcePage,
    /// Those of them that are files with several names, by their places in the page, in order.
    pub links: Vec<LinkedEntry>,
}

/// A name of a file that has others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkedEntry {
    /// The place of the name in its page.
    pub entry_index: u32,
    /// The same for all names of one file, on whatever pages they are.
    pub file_id: u64,
}

impl TreePage {
    /// Which file the entry at this place is, if it has other names too.
    pub fn file_id_at(&self, place: usize) -> Option<u64> {
        let found = (self.links).binary_search_by_key(&place, |link| link.entry_index as usize);
        found.ok().map(|at| self.links[at].file_id)
    }
}

/// Reads a range of a file of a scratch volume. The reply has the digests of all its pieces; its
/// body has those pieces that the caller does not know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadVolumeFile {
    /// Which volume.
    pub volume: VolumeId,
    /// Path in it.
    pub path: String,
    /// What the file must still be; otherwise `SourceChanged`.
    pub identity: SourceIdentity,
    /// First byte.
    pub offset: u64,
    /// Number of bytes, cut at the end of the file.
    pub length: u32,
    /// Digests of pieces at the same places that the caller has already; perhaps fewer than there
    /// are.
    pub known_digests: Vec<Digest>,
}

/// A file of a scratch volume or of a home, as a listing showed it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedFile {
    /// Path below what was listed; empty for that itself.
    pub path: String,
    /// What the file must still be; otherwise `SourceChanged`.
    pub identity: SourceIdentity,
}

/// Reads small files of a scratch volume whole. The digests of their pieces follow each other in
/// the reply; its body has those pieces that the caller does not know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadVolumeFiles {
    /// Which volume.
    pub volume: VolumeId,
    /// Which files; together at most a body.
    pub files: Vec<ListedFile>,
    /// Of each file, digests of pieces that the caller has already; of files that are not listed
    /// none.
    pub known_digests: Vec<Vec<Digest>>,
}

/// Reads small files of a home whole; they follow each other in the body of the reply, and the
/// digests of their pieces in its header.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadSources {
    /// What was listed: a path below the export.
    pub path: String,
    /// Which files; together at most a body.
    pub files: Vec<ListedFile>,
    /// The digests of the reply cover pieces of this many bytes of each.
    pub block_bytes: u32,
}

/// Asks where a file of a scratch volume has data: the holes of a sparse one need not travel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapVolumeFile {
    /// Which volume.
    pub volume: VolumeId,
    /// Which file.
    pub file: ListedFile,
    /// From this byte on.
    pub start_offset: u64,
}

/// Bytes of a file that follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataRange {
    /// The first.
    pub offset: u64,
    /// How many.
    pub length: u64,
}

impl DataRange {
    /// Whether it lies within `bounds`.
    pub fn is_within(&self, bounds: std::ops::Range<u64>) -> bool {
        let end = self.offset.checked_add(self.length);
        self.offset >= bounds.start && end.is_some_and(|end| end <= bounds.end)
    }

    /// The same bytes as ranges of at most `bytes_max`.
    pub fn split(self, bytes_max: u32) -> impl Iterator<Item = Self> {
        let (step, end) = (
            u64::from(bytes_max),
            self.offset.saturating_add(self.length),
        );
        let starts = std::iter::successors(Some(self.offset), move |at| at.checked_add(step));
        starts
            .take_while(move |at| *at < end)
            .map(move |offset| Self {
                offset,
                length: step.min(end - offset),
            })
    }
}

/// Where a file has data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileMap {
    /// In order; what lies between reads as zeros.
    pub ranges: Vec<DataRange>,
    /// Where to ask on; `None` when no data follow.
    pub next: Option<u64>,
}
