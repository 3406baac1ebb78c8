//! What the one writer of a volume knows of its tree without asking: attributes of files, and the
//! names in directories that were seen whole. Nobody else changes the tree, so it stays true.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::file_op::{Attr, FileTime, Name};
use bafs_proto::ids::InodeNo;

use crate::limits::NAMES_KNOWN_MAX;

/// Unit of [`Attr::blocks`], in bytes.
const STAT_BLOCK_BYTES: u64 = 512;

/// Attributes and names, by the kernel's numbers.
#[derive(Debug)]
pub struct Image {
    files: BTreeMap<InodeNo, File>,
    /// Every name in these directories.
    whole: BTreeMap<InodeNo, BTreeSet<Name>>,
    /// Names in all of them,
    names: usize,
    /// and how many there may be.
    names_max: usize,
    /// Directories with too many names to know.
    large: BTreeSet<InodeNo>,
    /// Directories that are being listed.
    listings: BTreeMap<InodeNo, Listings>,
    /// Files without capabilities, for which the kernel asks before each write.
    plain: BTreeSet<InodeNo>,
}

/// Listings of one directory that are under way.
#[derive(Debug, Default)]
struct Listings {
    under_way: u32,
    /// Counts changes of its names meanwhile.
    changes: u64,
}

#[derive(Debug)]
struct File {
    attr: Attr,
    /// Whether its allocated space follows from its size.
    is_dense: bool,
    /// Whether the attributes are what the server would say.
    is_exact: bool,
    /// Whether the program was told a time of change that the server does not know yet.
    owes_times: bool,
}

impl Default for Image {
    fn default() -> Self {
        Self {
            files: BTreeMap::new(),
            whole: BTreeMap::new(),
            names: 0,
            names_max: NAMES_KNOWN_MAX,
            large: BTreeSet::new(),
            listings: BTreeMap::new(),
            plain: BTreeSet::new(),
        }
    }
}

impl Image {
    /// The attributes of a file, if they are known exactly.
    pub fn attr(&self, ino: InodeNo) -> Option<Attr> {
        let file = self.files.get(&ino)?;
        file.is_exact.then_some(file.attr)
    }

    /// The attributes of a file as far as they are known: space, size, times and links may have
    /// changed.
    pub fn about(&self, ino: InodeNo) -> Option<Attr> {
        self.files.get(&ino).map(|file| file.attr)
    }

    /// Where the program was told a time of change that the server does not know yet, that stays.
    pub fn keep_times(&self, attr: &mut Attr) {
        let owing = self.files.get(&attr.ino).filter(|file| file.owes_times);
        if let Some(file) = owing {
            (attr.mtime, attr.ctime) = (file.attr.mtime, file.attr.ctime);
        }
    }

    /// The server told attributes, of which times [were kept](Self::keep_times).
    pub fn see(&mut self, attr: &Attr) {
        let known = self.files.get(&attr.ino);
        let owing = known.filter(|file| file.owes_times && file.attr.mtime == attr.mtime);
        let file = File {
            attr: *attr,
            is_dense: false,
            is_exact: true,
            owes_times: owing.is_some(),
        };
        self.files.insert(attr.ino, file);
    }

    /// A file was made.
    pub fn make(&mut self, attr: &Attr) {
        self.see(attr);
        self.plain.insert(attr.ino);
        if let Some(file) = self.files.get_mut(&attr.ino) {
            file.is_dense = attr.is_regular() && attr.size == 0;
            file.owes_times = attr.is_regular();
        }
        if attr.is_directory() {
            self.whole.insert(attr.ino, BTreeSet::new());
        }
    }

    /// A file was written.
    pub fn write(&mut self, ino: InodeNo, offset: u64, length: u64, now: FileTime) {
        let Some(file) = self.files.get_mut(&ino) else {
            return;
        };
        file.is_dense &= offset <= file.attr.size;
        file.is_exact &= file.is_dense;
        file.owes_times = true;
        file.attr.size = file.attr.size.max(offset + length);
        if file.is_dense {
            let block_bytes = u64::from(file.attr.block_size).max(STAT_BLOCK_BYTES);
            let bytes = file.attr.size.next_multiple_of(block_bytes);
            file.attr.blocks = bytes / STAT_BLOCK_BYTES;
        }
        (file.attr.mtime, file.attr.ctime) = (now, now);
    }

    /// Attributes that do not touch the content were changed.
    pub fn change(&mut self, ino: InodeNo, change: impl FnOnce(&mut Attr)) {
        if let Some(file) = self.files.get_mut(&ino) {
            change(&mut file.attr);
        }
    }

    /// The time of change that the server is to be told, once.
    pub fn take_owed_time(&mut self, ino: InodeNo) -> Option<FileTime> {
        let file = self.files.get_mut(&ino)?;
        std::mem::take(&mut file.owes_times).then_some(file.attr.mtime)
    }

    /// The server is told the times by something else.
    pub fn owes_nothing(&mut self, ino: InodeNo) {
        self.take_owed_time(ino);
    }

    /// Something was done to a file whose effect on its attributes only the server knows.
    pub fn doubt(&mut self, ino: InodeNo) {
        self.files.remove(&ino);
    }

    /// The same was done to some file with several names.
    pub fn doubt_linked(&mut self) {
        let one_name = |file: &File| file.attr.is_directory() || file.attr.nlink <= 1;
        self.files.retain(|_, file| one_name(file));
    }

    /// A name in a directory was changed, which leaves its mode, and more or less its links.
    pub fn blur(&mut self, directory: InodeNo) {
        if let Some(file) = self.files.get_mut(&directory) {
            file.is_exact = false;
        }
    }

    /// Whether a file surely has no capabilities.
    pub fn is_plain(&self, ino: InodeNo) -> bool {
        self.plain.contains(&ino)
    }

    /// A file has no capabilities, or may have some.
    pub fn set_plain(&mut self, ino: InodeNo, is_plain: bool) {
        if is_plain {
            self.plain.insert(ino);
        } else {
            self.plain.remove(&ino);
        }
    }

    /// The kernel does not know the file any more.
    pub fn forget(&mut self, ino: InodeNo) {
        self.files.remove(&ino);
        self.plain.remove(&ino);
        self.large.remove(&ino);
        self.close(ino);
    }

    fn close(&mut self, directory: InodeNo) {
        let names = self.whole.remove(&directory);
        self.names -= names.map_or(0, |names| names.len());
    }

    /// Whether a directory has a name; `None` if that is not known.
    pub fn has(&self, directory: InodeNo, name: &Name) -> Option<bool> {
        self.whole.get(&directory).map(|names| names.contains(name))
    }

    /// Whether it is worth to look at all names of a directory.
    pub fn may_be_listed(&self, directory: InodeNo) -> bool {
        !self.whole.contains_key(&directory) && !self.large.contains(&directory)
    }

    /// A listing of a directory begins. What it gives is told to [`Self::end_listing`].
    pub fn begin_listing(&mut self, directory: InodeNo) -> u64 {
        let listings = self.listings.entry(directory).or_default();
        listings.under_way += 1;
        listings.changes
    }

    /// A directory was listed whole, or has too many names for that. They count if none of them
    /// changed since the listing began.
    pub fn end_listing(&mut self, directory: InodeNo, begun: u64, names: Option<BTreeSet<Name>>) {
        let mut changes = begun;
        if let Some(listings) = self.listings.get_mut(&directory) {
            changes = listings.changes;
            listings.under_way -= 1;
            if listings.under_way == 0 {
                self.listings.remove(&directory);
            }
        }
        match names {
            Some(names) if self.names + names.len() <= self.names_max => {
                if changes == begun && !self.whole.contains_key(&directory) {
                    self.names += names.len();
                    self.whole.insert(directory, names);
                }
            }
            _ => {
                self.large.insert(directory);
            }
        }
    }

    fn change_names(&mut self, directory: InodeNo) {
        if let Some(listings) = self.listings.get_mut(&directory) {
            listings.changes += 1;
        }
    }

    /// A name was made.
    pub fn name(&mut self, directory: InodeNo, name: &Name) {
        self.change_names(directory);
        if let Some(names) = self.whole.get_mut(&directory)
            && names.insert(name.clone())
        {
            self.names += 1;
        }
        if self.names > self.names_max {
            // From now on the server is asked.
            self.close(directory);
            self.large.insert(directory);
        }
    }

    /// A name was removed.
    pub fn unname(&mut self, directory: InodeNo, name: &Name) {
        self.change_names(directory);
        if let Some(names) = self.whole.get_mut(&directory)
            && names.remove(name)
        {
            self.names -= 1;
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
            born_ns: 0,
        }
    }

    fn now(seconds: i64) -> FileTime {
        FileTime {
            seconds,
            nanoseconds: 0,
        }
    }

    #[test]
    fn space_is_known_until_a_write_leaves_a_hole() {
        let mut image = Image::default();
        let ino = InodeNo(5);
        image.make(&attr(5, S_IFREG));
        image.write(ino, 0, 5000, now(1));
        image.write(ino, 100, 100, now(2));
        let known = image.attr(ino).expect("known");
        assert_eq!((known.size, known.blocks, known.mtime), (5000, 16, now(2)));
        image.write(ino, 9000, 1, now(3));
        assert_eq!(image.attr(ino), None);
        assert_eq!(image.about(ino).map(|attr| attr.size), Some(9001));
        assert_eq!(image.take_owed_time(ino), Some(now(3)));
        assert_eq!(image.take_owed_time(ino), None);
    }

    #[test]
    fn no_more_names_are_known_than_may_be() {
        let mut image = Image {
            names_max: 3,
            ..Image::default()
        };
        image.make(&attr(5, S_IFDIR));
        for name in ["a", "b", "c"] {
            image.name(InodeNo(5), &name.into());
        }
        assert_eq!(image.has(InodeNo(5), &b"d".to_vec()), Some(false));
        image.name(InodeNo(5), &b"d".to_vec());
        assert_eq!(
            (image.has(InodeNo(5), &b"d".to_vec()), image.names),
            (None, 0)
        );
        assert!(!image.may_be_listed(InodeNo(5)));
    }

    #[test]
    fn a_listing_counts_unless_its_directory_changed_meanwhile() {
        let mut image = Image::default();
        let (root, other, a) = (InodeNo::ROOT, InodeNo(9), b"a".to_vec());
        let names = BTreeSet::from([a.clone()]);
        let begun = image.begin_listing(root);
        image.unname(root, &a);
        image.end_listing(root, begun, Some(names.clone()));
        assert_eq!(image.has(root, &a), None);
        let begun = image.begin_listing(root);
        let beside = image.begin_listing(root);
        image.name(other, &a);
        image.end_listing(root, begun, Some(names.clone()));
        assert_eq!(image.has(root, &a), Some(true), "another directory changed");
        image.end_listing(root, beside, Some(BTreeSet::new()));
        assert_eq!(image.has(root, &a), Some(true));
        image.name(root, &b"b".to_vec());
        image.names_max = 2;
        let begun = image.begin_listing(other);
        image.end_listing(other, begun, Some(names));
        assert!(!image.may_be_listed(other));
        image.forget(root);
        assert_eq!((image.has(root, &a), image.names), (None, 0));
        assert!(image.listings.is_empty());
    }
}
