//! What the one writer of a volume knows of its tree without asking: attributes of files, and the
//! names in directories that were seen whole. Nobody else changes the tree, so it stays true.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::file_op::{Attr, ByName, FileTime};
use bafs_proto::ids::InodeNo;

use crate::limits::CACHED_NAMES_MAX;

/// Unit of [`Attr::blocks`], in bytes.
const STAT_BLOCK_BYTES: u64 = 512;

/// Attributes and names, by the kernel's numbers.
#[derive(Debug)]
pub struct MetadataCache {
    files: BTreeMap<InodeNo, CachedFile>,
    /// Every name in these directories.
    complete_directories: BTreeMap<InodeNo, BTreeSet<ByName>>,
    /// Names in all of them,
    name_count: usize,
    /// and how many there may be.
    names_max: usize,
    /// Directories with too many names to know.
    oversized_directories: BTreeSet<InodeNo>,
    /// Directories that are being listed.
    inflight_listings: BTreeMap<InodeNo, DirectoryListings>,
    /// Files that a listing gave a reference which the kernel does not have, by their directories,
    listed_files: BTreeMap<InodeNo, BTreeSet<InodeNo>>,
    /// and their directories.
    listing_directories: BTreeMap<InodeNo, InodeNo>,
    /// Files without capabilities, for which the kernel asks before each write.
    files_without_capabilities: BTreeSet<InodeNo>,
}

/// Listings of one directory that are under way.
#[derive(Debug, Default)]
struct DirectoryListings {
    inflight: u32,
    /// Counts changes of its names meanwhile,
    change_count: u64,
    /// of these.
    changed_names: BTreeSet<ByName>,
}

#[derive(Debug)]
struct CachedFile {
    attr: Attr,
    /// Whether its allocated space follows from its size.
    is_dense: bool,
    /// Whether the attributes are what the server would say.
    is_exact: bool,
    /// Whether the program was told a time of change that the server does not know yet.
    has_pending_times: bool,
}

impl Default for MetadataCache {
    fn default() -> Self {
        Self {
            files: BTreeMap::new(),
            complete_directories: BTreeMap::new(),
            name_count: 0,
            names_max: CACHED_NAMES_MAX,
            oversized_directories: BTreeSet::new(),
            inflight_listings: BTreeMap::new(),
            listed_files: BTreeMap::new(),
            listing_directories: BTreeMap::new(),
            files_without_capabilities: BTreeSet::new(),
        }
    }
}

impl MetadataCache {
    /// The attributes of a file, if they are known exactly.
    pub fn attr(&self, ino: InodeNo) -> Option<Attr> {
        let file = self.files.get(&ino)?;
        file.is_exact.then_some(file.attr)
    }

    /// The attributes of a file as far as they are known: space, size, times and links may have
    /// changed.
    pub fn approximate_attr(&self, ino: InodeNo) -> Option<Attr> {
        self.files.get(&ino).map(|file| file.attr)
    }

    /// Where the program was told a time of change that the server does not know yet, that stays.
    pub fn apply_pending_times(&self, attr: &mut Attr) {
        let owing = self
            .files
            .get(&attr.ino)
            .filter(|file| file.has_pending_times);
        if let Some(file) = owing {
            (attr.mtime, attr.ctime) = (file.attr.mtime, file.attr.ctime);
        }
    }

    /// The server told attributes, of which times were kept.
    pub fn store_attr(&mut self, attr: &Attr) {
        let known = self.files.get(&attr.ino);
        let owing = known.filter(|file| file.has_pending_times && file.attr.mtime == attr.mtime);
        let file = CachedFile {
            attr: *attr,
            is_dense: false,
            is_exact: true,
            has_pending_times: owing.is_some(),
        };
        self.files.insert(attr.ino, file);
    }

    /// A file was made.
    pub fn record_creation(&mut self, attr: &Attr) {
        self.store_attr(attr);
        self.files_without_capabilities.insert(attr.ino);
        if let Some(file) = self.files.get_mut(&attr.ino) {
            file.is_dense = attr.is_regular() && attr.size == 0;
            file.has_pending_times = attr.is_regular();
        }
        if attr.is_directory() {
            self.complete_directories.insert(attr.ino, BTreeSet::new());
        }
    }

    /// A file was written.
    pub fn record_write(&mut self, ino: InodeNo, offset: u64, length: u64, now: FileTime) {
        let Some(file) = self.files.get_mut(&ino) else {
            return;
        };
        file.is_dense &= offset <= file.attr.size;
        file.is_exact &= file.is_dense;
        file.has_pending_times = true;
        file.attr.size = file.attr.size.max(offset + length);
        if file.is_dense {
            let block_bytes = u64::from(file.attr.block_size).max(STAT_BLOCK_BYTES);
            let bytes = file.attr.size.next_multiple_of(block_bytes);
            file.attr.blocks = bytes / STAT_BLOCK_BYTES;
        }
        (file.attr.mtime, file.attr.ctime) = (now, now);
    }

    /// Attributes that do not touch the content were changed.
    pub fn update_attr(&mut self, ino: InodeNo, change: impl FnOnce(&mut Attr)) {
        if let Some(file) = self.files.get_mut(&ino) {
            change(&mut file.attr);
        }
    }

    /// The time of change that the server is to be told, once.
    pub fn take_pending_time(&mut self, ino: InodeNo) -> Option<FileTime> {
        let file = self.files.get_mut(&ino)?;
        std::mem::take(&mut file.has_pending_times).then_some(file.attr.mtime)
    }

    /// The server is told the times by something else.
    pub fn clear_pending_times(&mut self, ino: InodeNo) {
        self.take_pending_time(ino);
    }

    /// Something was done to a file whose effect on its attributes only the server knows.
    pub fn invalidate(&mut self, ino: InodeNo) {
        self.files.remove(&ino);
    }

    /// The same was done to some file with several names.
    pub fn invalidate_linked(&mut self) {
        let one_name = |file: &CachedFile| file.attr.is_directory() || file.attr.nlink <= 1;
        self.files.retain(|_, file| one_name(file));
    }

    /// A name in a directory was changed, which leaves its mode, and more or less its links.
    pub fn mark_inexact(&mut self, directory: InodeNo) {
        if let Some(file) = self.files.get_mut(&directory) {
            file.is_exact = false;
        }
    }

    /// Whether a file surely has no capabilities.
    pub fn has_no_capabilities(&self, ino: InodeNo) -> bool {
        self.files_without_capabilities.contains(&ino)
    }

    /// A file has no capabilities, or may have some.
    pub fn set_no_capabilities(&mut self, ino: InodeNo, is_plain: bool) {
        if is_plain {
            self.files_without_capabilities.insert(ino);
        } else {
            self.files_without_capabilities.remove(&ino);
        }
    }

    /// The kernel does not know the file any more.
    pub fn forget(&mut self, ino: InodeNo) {
        self.files.remove(&ino);
        self.files_without_capabilities.remove(&ino);
        self.oversized_directories.remove(&ino);
        self.forget_names(ino);
    }

    fn forget_names(&mut self, directory: InodeNo) {
        let names = self.complete_directories.remove(&directory);
        self.name_count -= names.map_or(0, |names| names.len());
    }

    /// Whether a directory has a name; `None` if that is not known.
    pub fn has_name(&self, directory: InodeNo, name: &ByName) -> Option<bool> {
        self.complete_directories
            .get(&directory)
            .map(|names| names.contains(name))
    }

    /// All names of a directory, if they are known.
    pub fn names(&self, directory: InodeNo) -> Option<&BTreeSet<ByName>> {
        self.complete_directories.get(&directory)
    }

    /// Whether a directory has too many names to know.
    pub fn is_oversized(&self, directory: InodeNo) -> bool {
        self.oversized_directories.contains(&directory)
    }

    /// Whether a directory surely has no names.
    pub fn is_known_empty(&self, directory: InodeNo) -> bool {
        let names = self.complete_directories.get(&directory);
        let is_own = |name: &ByName| matches!(&name[..], b"." | b"..");
        names.is_some_and(|names| names.iter().all(is_own))
    }

    /// How many files have a reference of a listing.
    pub fn listed_count(&self) -> usize {
        self.listing_directories.len()
    }

    /// A listing of a directory gave a file a reference. Whether it had none of a listing before.
    pub fn add_listed(&mut self, directory: InodeNo, ino: InodeNo) -> bool {
        if self.listing_directories.contains_key(&ino) {
            return false;
        }
        self.listing_directories.insert(ino, directory);
        self.listed_files.entry(directory).or_default().insert(ino)
    }

    /// The kernel gets the reference that a file has of a listing, if it has one.
    pub fn take_listed(&mut self, ino: InodeNo) -> bool {
        let Some(directory) = self.listing_directories.remove(&ino) else {
            return false;
        };
        if let Some(files) = self.listed_files.get_mut(&directory) {
            files.remove(&ino);
            if files.is_empty() {
                self.listed_files.remove(&directory);
            }
        }
        true
    }

    /// The files in a directory that have a reference of a listing; they lose it.
    pub fn take_all_listed(&mut self, directory: InodeNo) -> BTreeSet<InodeNo> {
        let files = self.listed_files.remove(&directory).unwrap_or_default();
        for ino in &files {
            self.listing_directories.remove(ino);
        }
        files
    }

    /// Whether it is worth to look at all names of a directory.
    pub fn is_worth_listing(&self, directory: InodeNo) -> bool {
        !self.complete_directories.contains_key(&directory)
            && !self.oversized_directories.contains(&directory)
    }

    /// A listing of a directory begins. What it gives is told to [`Self::end_listing`].
    pub fn begin_listing(&mut self, directory: InodeNo) -> u64 {
        let listings = self.inflight_listings.entry(directory).or_default();
        listings.inflight += 1;
        listings.change_count
    }

    /// A listing of a directory is given up.
    pub fn cancel_listing(&mut self, directory: InodeNo) {
        if let Some(listings) = self.inflight_listings.get_mut(&directory) {
            listings.inflight -= 1;
            if listings.inflight == 0 {
                self.inflight_listings.remove(&directory);
            }
        }
    }

    /// A directory was listed whole, or has too many names for that. They count if none of them
    /// changed since the listing began.
    pub fn end_listing(&mut self, directory: InodeNo, begun: u64, names: Option<BTreeSet<ByName>>) {
        let mut changes = begun;
        if let Some(listings) = self.inflight_listings.get_mut(&directory) {
            changes = listings.change_count;
        }
        self.cancel_listing(directory);
        match names {
            Some(names) if self.name_count + names.len() <= self.names_max => {
                if changes == begun && !self.complete_directories.contains_key(&directory) {
                    self.name_count += names.len();
                    self.complete_directories.insert(directory, names);
                }
            }
            _ => {
                self.oversized_directories.insert(directory);
            }
        }
    }

    /// Whether a name was made or removed since a listing of its directory began that is under way.
    pub fn has_changed_name(&self, directory: InodeNo, name: &ByName) -> bool {
        let listings = self.inflight_listings.get(&directory);
        listings.is_some_and(|listings| listings.changed_names.contains(name))
    }

    fn count_name_change(&mut self, directory: InodeNo, name: &ByName) {
        if let Some(listings) = self.inflight_listings.get_mut(&directory) {
            listings.change_count += 1;
            listings.changed_names.insert(name.clone());
        }
    }

    /// A name was made.
    pub fn add_name(&mut self, directory: InodeNo, name: &ByName) {
        self.count_name_change(directory, name);
        if let Some(names) = self.complete_directories.get_mut(&directory)
            && names.insert(name.clone())
        {
            self.name_count += 1;
        }
        if self.name_count > self.names_max {
            // From now on the server is asked.
            self.forget_names(directory);
            self.oversized_directories.insert(directory);
        }
    }

    /// A name was removed.
    pub fn remove_name(&mut self, directory: InodeNo, name: &ByName) {
        self.count_name_change(directory, name);
        if let Some(names) = self.complete_directories.get_mut(&directory)
            && names.remove(name)
        {
            self.name_count -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::file_op::{S_IFDIR, S_IFREG};

    use super::*;

    fn attr(ino: u64, mode: u32) -> Attr {
        Attr {
            ino: InodeNo(ino),
            size: 0,
            blocks: 0,
            atime: FileTime::default(),
            mtime: FileTime::default(),
            ctime: FileTime::default(),
            mode,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            block_size: 4096,
            btime_ns: 0,
        }
    }

    fn now(seconds: i64) -> FileTime {
        FileTime {
            seconds,
            nanoseconds: 0,
        }
    }

    #[test]
    fn block_counts_are_known_until_a_sparse_write() {
        let mut image = MetadataCache::default();
        let ino = InodeNo(5);
        image.record_creation(&attr(5, S_IFREG));
        image.record_write(ino, 0, 5000, now(1));
        image.record_write(ino, 100, 100, now(2));
        let known = image.attr(ino).expect("known");
        assert_eq!((known.size, known.blocks, known.mtime), (5000, 16, now(2)));
        image.record_write(ino, 9000, 1, now(3));
        assert_eq!(image.attr(ino), None);
        assert_eq!(
            image.approximate_attr(ino).map(|attr| attr.size),
            Some(9001)
        );
        assert_eq!(image.take_pending_time(ino), Some(now(3)));
        assert_eq!(image.take_pending_time(ino), None);
    }

    #[test]
    fn the_number_of_cached_names_is_bounded() {
        let mut image = MetadataCache {
            names_max: 3,
            ..MetadataCache::default()
        };
        image.record_creation(&attr(5, S_IFDIR));
        for name in ["a", "b", "c"] {
            image.add_name(InodeNo(5), &name.into());
        }
        assert_eq!(image.has_name(InodeNo(5), &b"d".to_vec()), Some(false));
        image.add_name(InodeNo(5), &b"d".to_vec());
        assert_eq!(
            (image.has_name(InodeNo(5), &b"d".to_vec()), image.name_count),
            (None, 0)
        );
        assert!(!image.is_worth_listing(InodeNo(5)));
    }

    #[test]
    fn a_listing_is_cached_unless_its_directory_changed() {
        let mut image = MetadataCache::default();
        let (root, other, a) = (InodeNo::ROOT, InodeNo(9), b"a".to_vec());
        let names = BTreeSet::from([a.clone()]);
        let begun = image.begin_listing(root);
        image.remove_name(root, &a);
        image.end_listing(root, begun, Some(names.clone()));
        assert_eq!(image.has_name(root, &a), None);
        let begun = image.begin_listing(root);
        let beside = image.begin_listing(root);
        image.add_name(other, &a);
        image.end_listing(root, begun, Some(names.clone()));
        assert_eq!(
            image.has_name(root, &a),
            Some(true),
            "another directory changed"
        );
        image.end_listing(root, beside, Some(BTreeSet::new()));
        assert_eq!(image.has_name(root, &a), Some(true));
        image.add_name(root, &b"b".to_vec());
        image.names_max = 2;
        let begun = image.begin_listing(other);
        image.end_listing(other, begun, Some(names));
        assert!(!image.is_worth_listing(other));
        image.forget(root);
        assert_eq!((image.has_name(root, &a), image.name_count), (None, 0));
        assert!(image.inflight_listings.is_empty());
    }
}
