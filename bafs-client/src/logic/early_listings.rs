//! Directories that programs of a volume's one writer read from what is known, without the server.
//!
//! An early listing shows the names that were there when the directory was opened, or rewound.
//! Each of their files keeps a reference, so that all are known until the listing is closed. Names
//! that are removed meanwhile are left out.

use bafs_proto::file_op::{Attr, ByName, DirectoryEntry, FileOp, FileReply, S_IFDIR, S_IFMT};
use bafs_proto::ids::{HandleId, InodeNo};

use super::delegation::{Decision, Delegation};
use super::inode_map::InodeMap;

/// What the server itself must be allowed to read a directory.
const OWNER_READ_EXECUTE: u32 = 0o500;

/// About the size of an entry without its name, and of its attributes, in bytes: as a server counts
/// them.
const ENTRY_BYTES: usize = 24;
const ENTRY_ATTR_BYTES: usize = 128;

/// Entries `.` and `..`.
const DOTS: usize = 2;

/// Handles of early listings count from here: the kernel keeps nothing of these directories, as
/// only they know what their cookies mean.
const EARLY_LISTING_FIRST: u64 = 1 << 60;

/// Whether a handle is an early listing.
pub fn is_early_listing(handle: HandleId) -> bool {
    handle.0 >= EARLY_LISTING_FIRST
}

/// A directory that a program reads.
#[derive(Debug)]
pub(super) struct EarlyListing {
    directory: InodeNo,
    /// The first two are the directory and its parent.
    entries: Vec<ListedName>,
    is_begun: bool,
    /// What the server said of a file whose attributes were not known.
    server_attr: Option<(InodeNo, Option<Attr>)>,
}

#[derive(Debug)]
struct ListedName {
    name: ByName,
    ino: InodeNo,
    mode: u32,
}

/// A page of a listing, as the kernel asks for it.
#[derive(Debug, Clone, Copy)]
pub(super) struct PageRequest {
    pub(super) handle: HandleId,
    pub(super) cookie: u64,
    pub(super) bytes_max: u32,
    pub(super) plus: bool,
}

impl Delegation {
    /// Opens a directory if all in it is known; with `may_fetch` it may ask for that first.
    pub(super) fn open_directory(
        &mut self,
        inodes: &mut InodeMap,
        directory: InodeNo,
        may_fetch: bool,
    ) -> Decision {
        if may_fetch && self.sibling_directories.is_inflight(directory) {
            return Decision::AwaitFetch;
        }
        self.note_directory_use(inodes, directory);
        let is_open = |attr: &Attr| {
            let bits = attr.mode & OWNER_READ_EXECUTE;
            attr.is_directory() && attr.nlink > 0 && bits == OWNER_READ_EXECUTE
        };
        let about = self.metadata.approximate_attr(directory);
        if !about.as_ref().is_some_and(is_open) {
            return self.query_about(&[directory]);
        }
        let Some(attr) = self.metadata.attr(directory) else {
            return Decision::LearnAttr(directory);
        };
        if let Some(entries) = self.list_known(inodes, directory) {
            self.early_listing_count += 1;
            let handle = HandleId(EARLY_LISTING_FIRST + self.early_listing_count);
            let listing = EarlyListing {
                directory,
                entries,
                is_begun: false,
                server_attr: None,
            };
            self.early_listings.insert(handle, listing);
            return Decision::Answer(Ok(FileReply::Opened { handle, attr }));
        }
        match may_fetch && !self.metadata.is_oversized(directory) {
            true => Decision::ListDirectory(directory),
            false => self.query_about(&[directory]),
        }
    }

    /// All entries of a directory, if all is known of them. Each file gets a reference.
    fn list_known(&self, inodes: &mut InodeMap, directory: InodeNo) -> Option<Vec<ListedName>> {
        let parent = inodes.parent_of(directory).unwrap_or(InodeNo::ROOT);
        let dots = [(b".".to_vec(), directory), (b"..".to_vec(), parent)];
        let mut entries: Vec<_> = dots
            .into_iter()
            .map(|(name, ino)| ListedName {
                name,
                ino,
                mode: S_IFDIR,
            })
            .collect();
        for name in self.metadata.names(directory)? {
            if matches!(&name[..], b"." | b"..") {
                continue;
            }
            let ino = self.resolve_name(inodes, directory, name)?;
            let attr = self.metadata.approximate_attr(ino)?;
            entries.push(ListedName {
                name: name.clone(),
                ino,
                mode: attr.mode & S_IFMT,
            });
        }
        for entry in &entries[DOTS..] {
            inodes.count_lookup(entry.ino);
        }
        Some(entries)
    }

    /// The file that a name leads to, with all that is in the log.
    fn resolve_name(
        &self,
        inodes: &InodeMap,
        directory: InodeNo,
        name: &ByName,
    ) -> Option<InodeNo> {
        let in_log = self.log.pending_name(directory, name);
        let is_there = in_log.or_else(|| self.metadata.has_name(directory, name));
        let renamed = self.log.pending_rename(directory, name);
        let ino = renamed.or_else(|| inodes.inode_by_name(directory, name));
        ino.filter(|_| is_there != Some(false))
    }

    /// Answers a page of an early listing; `None` where the handle is none.
    pub(super) fn read_early_listing(
        &mut self,
        inodes: &mut InodeMap,
        page: PageRequest,
        may_fetch: bool,
    ) -> Option<Decision> {
        let mut listing = self.early_listings.remove(&page.handle)?;
        if page.cookie == 0 && std::mem::replace(&mut listing.is_begun, true) {
            match self.list_known(inodes, listing.directory) {
                Some(entries) => {
                    let before = std::mem::replace(&mut listing.entries, entries);
                    self.drop_references(&before);
                }
                None if may_fetch && !self.metadata.is_oversized(listing.directory) => {
                    let directory = listing.directory;
                    self.early_listings.insert(page.handle, listing);
                    return Some(Decision::ListDirectory(directory));
                }
                // There are more names by now than an agent keeps: the former are shown.
                None => {}
            }
        }
        let decision = self.read_page(inodes, &mut listing, page);
        self.early_listings.insert(page.handle, listing);
        Some(decision)
    }

    fn read_page(
        &mut self,
        inodes: &mut InodeMap,
        listing: &mut EarlyListing,
        page: PageRequest,
    ) -> Decision {
        let (mut entries, mut bytes) = (Vec::new(), 0);
        let first = usize::try_from(page.cookie).unwrap_or(usize::MAX);
        let attr_bytes = if page.plus { ENTRY_ATTR_BYTES } else { 0 };
        for (place, listed) in listing.entries.iter().enumerate().skip(first) {
            let size = ENTRY_BYTES + listed.name.len().next_multiple_of(8) + attr_bytes;
            if !entries.is_empty() && bytes + size > page.bytes_max as usize {
                break;
            }
            let mut entry = DirectoryEntry {
                name: listed.name.clone(),
                ino: listed.ino,
                mode: listed.mode,
                cookie: place as u64 + 1,
                attr: None,
            };
            if place >= DOTS {
                match self.resolve_name(inodes, listing.directory, &listed.name) {
                    Some(ino) => entry.ino = ino,
                    None => continue,
                }
            }
            if page.plus && place >= DOTS {
                let told = listing.server_attr.filter(|(ino, _)| *ino == entry.ino);
                match (self.metadata.attr(entry.ino), told) {
                    (Some(attr), _) | (None, Some((_, Some(attr)))) => {
                        entry.mode = attr.mode & S_IFMT;
                        entry.attr = Some(attr);
                    }
                    // The server does not have it any more.
                    (None, Some((_, None))) => continue,
                    (None, None) if entries.is_empty() => return Decision::LearnAttr(entry.ino),
                    (None, None) => break,
                }
            }
            bytes += size;
            entries.push(entry);
        }
        listing.server_attr = None;
        for attr in entries.iter().filter_map(|entry| entry.attr.as_ref()) {
            // The reference of the server's listing becomes the kernel's.
            if !self.metadata.take_listed(attr.ino) {
                inodes.count_lookup(attr.ino);
            }
        }
        Decision::Answer(Ok(FileReply::Entries(entries)))
    }

    /// The server told the attributes of a file that an early listing lacked, or has no such file.
    pub fn set_listed_attr(&mut self, op: &FileOp, ino: InodeNo, attr: Option<Attr>) {
        if let FileOp::ReadDirectory { handle, .. } = op
            && let Some(listing) = self.early_listings.get_mut(handle)
        {
            listing.server_attr = Some((ino, attr));
        }
    }

    /// Closes an early listing; whether the handle is one.
    pub(super) fn close_early_listing(&mut self, handle: HandleId) -> bool {
        let Some(listing) = self.early_listings.remove(&handle) else {
            return false;
        };
        self.drop_references(&listing.entries);
        true
    }

    fn drop_references(&mut self, entries: &[ListedName]) {
        let files = entries.iter().skip(DOTS).map(|entry| entry.ino);
        self.dropped_references.extend(files);
    }

    /// Files of which early listings have dropped a reference each.
    pub fn take_dropped_references(&mut self) -> Vec<InodeNo> {
        std::mem::take(&mut self.dropped_references)
    }
}
