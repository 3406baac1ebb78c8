//! What the writer of a volume learns from listings of its programs, and the directories that it
//! removes before the server does.

use std::collections::BTreeSet;

use bafs_proto::file_op::{ByName, DirectoryEntry, FileReply};
use bafs_proto::ids::{HandleId, InodeNo};

use super::delegation::{Decision, DelegatedRequest, Delegation};
use super::inflight_queries::InflightQuery;
use super::inode_map::{InodeMap, OpenParameters};
use super::operation_log::Space;
use super::sibling_read_ahead::{Choice, Fetched};
use crate::limits::{BATCH_OPS_MAX, LISTED_FILES_MAX, STREAM_NAMES_MAX};

/// A directory that a program reads, from its start to where it is now.
#[derive(Debug)]
pub(super) struct DirectoryStream {
    directory: InodeNo,
    /// What [`super::metadata_cache::MetadataCache::begin_listing`] gave.
    begun: u64,
    names: BTreeSet<ByName>,
    next_cookie: u64,
}

impl Delegation {
    /// A program read a page of a directory. One that it reads whole is known whole.
    pub(super) fn learn_page(
        &mut self,
        inodes: &InodeMap,
        query: &InflightQuery,
        (handle, cookie): (HandleId, u64),
        entries: &[DirectoryEntry],
    ) {
        if cookie == 0 {
            self.end_stream(handle);
            self.begin_stream(inodes, query, handle);
        }
        let Some(stream) = self.streams.get_mut(&handle) else {
            return;
        };
        let is_next = cookie == stream.next_cookie;
        let Some(last) = entries.last().filter(|_| is_next) else {
            let whole = self.streams.remove(&handle).filter(|_| is_next);
            match whole {
                Some(stream) => {
                    let names = Some(stream.names);
                    self.metadata
                        .end_listing(stream.directory, stream.begun, names);
                }
                None => self.end_stream(handle),
            }
            return;
        };
        stream.next_cookie = last.cookie;
        let names = entries.iter().map(|entry| entry.name.clone());
        stream.names.extend(names);
        if stream.names.len() > STREAM_NAMES_MAX {
            self.end_stream(handle);
        }
    }

    fn begin_stream(&mut self, inodes: &InodeMap, query: &InflightQuery, handle: HandleId) {
        let Some(OpenParameters { ino, .. }) = inodes.open_parameters(handle) else {
            return;
        };
        if self.metadata.is_worth_listing(ino) && self.queries.is_current(query, ino) {
            let stream = DirectoryStream {
                directory: ino,
                begun: self.metadata.begin_listing(ino),
                names: BTreeSet::new(),
                next_cookie: 0,
            };
            self.streams.insert(handle, stream);
        }
    }

    /// A program looks into a directory. The first time, those beside it are likely to follow.
    pub(super) fn note_directory_use(&mut self, inodes: &InodeMap, directory: InodeNo) {
        let is_first = self.sibling_directories.note_read(directory);
        if !is_first || self.metadata.listed_count() >= LISTED_FILES_MAX {
            return;
        }
        let mut siblings = std::mem::take(&mut self.sibling_directories);
        let mut count = 0;
        let chosen = siblings.choose(directory, |other| {
            let about = self.metadata.approximate_attr(other);
            let is_fit = about.is_some_and(|attr| attr.is_directory())
                && self.metadata.is_worth_listing(other)
                && self.log.last_position_of(other).is_none()
                && inodes.is_present(other);
            count += usize::from(is_fit);
            match is_fit {
                true if count > BATCH_OPS_MAX => Choice::Stop,
                true => Choice::Take,
                false => Choice::Skip,
            }
        });
        self.sibling_directories = siblings;
        self.directories_to_list.extend(chosen);
    }

    /// The directories that should be listed now, before a program looks into them.
    pub fn take_directories_to_list(&mut self) -> Vec<InodeNo> {
        std::mem::take(&mut self.directories_to_list)
    }

    /// They were listed, or could not be.
    pub fn end_directories(&mut self, results: Vec<(InodeNo, Fetched)>) {
        self.sibling_directories.end_fetch(results);
    }

    /// A program reads a directory no further.
    pub(super) fn end_stream(&mut self, handle: HandleId) {
        if let Some(stream) = self.streams.remove(&handle) {
            self.metadata.cancel_listing(stream.directory);
        }
    }

    /// Removes a directory, if it surely is empty.
    pub(super) fn remove_directory(
        &mut self,
        inodes: &InodeMap,
        request: DelegatedRequest<'_>,
        parent: InodeNo,
        name: &ByName,
    ) -> Option<Decision> {
        self.unchanged_directory(parent, name)?;
        let ino = inodes.inode_by_name(parent, name)?;
        let attr = self.metadata.approximate_attr(ino)?;
        let is_sure = self.metadata.has_name(parent, name) != Some(false)
            && attr.is_directory()
            && self.metadata.is_known_empty(ino);
        // As of a file: once it has no name nobody could find it or open it.
        let is_held = inodes.is_present(ino) && inodes.missing_handle(ino).is_none();
        if !is_sure || !is_held {
            return None;
        }
        let Ok(translated) = inodes.translate(request.op) else {
            return Some(Decision::ProvideObjects);
        };
        self.metadata.remove_name(parent, name);
        self.metadata.update_attr(parent, |about| {
            (about.mtime, about.ctime) = (request.now, request.now);
            about.nlink = about.nlink.saturating_sub(1);
        });
        self.metadata.update_attr(ino, |about| {
            about.nlink = 0;
            about.ctime = request.now;
        });
        let about = [Some(parent), Some(ino), None];
        let effect = ((None, None), about, Space::default());
        self.append(inodes, request, translated, effect);
        Some(Decision::Answer(Ok(FileReply::Done)))
    }
}
