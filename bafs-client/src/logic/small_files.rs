//! Small files that a volume's one writer reads whole before its programs ask for them: which ones
//! to read, and what was read. Reads nothing itself.

use std::collections::{BTreeMap, VecDeque};

use bafs_proto::file_op::Attr;
use bafs_proto::ids::InodeNo;
use bytes::Bytes;

use super::sibling_read_ahead::{Choice, Fetched, SiblingReadAhead};
use crate::limits::{BATCH_OPS_MAX, BLOCK_BUFFER_BYTES, SMALL_FILE_BYTES_MAX};

/// Files that are read ahead by one call, beside one that a program waits for.
const AHEAD_MAX: usize = BATCH_OPS_MAX - 1;

/// A file to read whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SmallFile {
    /// The kernel's number.
    pub ino: InodeNo,
    /// Its size in bytes.
    pub bytes: u32,
}

impl SmallFile {
    /// The file of these attributes, if it is small, and not empty.
    pub fn from_attr(attr: &Attr) -> Option<Self> {
        let bytes = u32::try_from(attr.size).ok()?;
        let is_small = attr.is_regular() && (1..=SMALL_FILE_BYTES_MAX).contains(&bytes);
        is_small.then_some(Self {
            ino: attr.ino,
            bytes,
        })
    }
}

/// Small files that were listed, and what was read of them.
#[derive(Debug)]
pub struct SmallFiles {
    siblings: SiblingReadAhead,
    contents: BTreeMap<InodeNo, FileContent>,
    /// The files of `contents`, and others that have left it, oldest first.
    oldest: VecDeque<InodeNo>,
    /// Bytes of all contents,
    bytes: usize,
    /// and how many there may be.
    bytes_max: usize,
}

#[derive(Debug)]
struct FileContent {
    data: Bytes,
    /// Bytes that the kernel has not got yet.
    bytes_left: usize,
}

impl Default for SmallFiles {
    fn default() -> Self {
        Self {
            siblings: SiblingReadAhead::default(),
            contents: BTreeMap::new(),
            oldest: VecDeque::new(),
            bytes: 0,
            bytes_max: BLOCK_BUFFER_BYTES,
        }
    }
}

impl SmallFiles {
    /// Keeps at most so many bytes from now on.
    pub fn set_bytes_max(&mut self, bytes_max: usize) {
        self.bytes_max = bytes_max;
    }

    /// A listing of a directory showed a file.
    pub fn note_listed(&mut self, directory: InodeNo, attr: &Attr) {
        if SmallFile::from_attr(attr).is_some() {
            self.siblings.note_listed(directory, attr.ino);
        }
    }

    /// Bytes of a file from an offset on, if its content is here.
    pub fn take(&mut self, ino: InodeNo, offset: u64, length: u32) -> Option<Bytes> {
        let content = self.contents.get_mut(&ino)?;
        let size = content.data.len();
        let start = usize::try_from(offset).map_or(size, |offset| offset.min(size));
        let end = start.saturating_add(length as usize).min(size);
        let data = content.data.slice(start..end);
        content.bytes_left = content.bytes_left.saturating_sub(data.len());
        if content.bytes_left == 0 {
            // From now on the kernel has it.
            self.remove_content(ino);
        }
        self.siblings.note_read(ino);
        Some(data)
    }

    /// A program reads a file whose content is not here.
    pub fn note_read(&mut self, ino: InodeNo) {
        self.siblings.note_read(ino);
    }

    /// Whether a file is being read ahead.
    pub fn is_inflight(&self, ino: InodeNo) -> bool {
        self.siblings.is_inflight(ino)
    }

    /// The files to read ahead, now that a program has read this one. `find` gives a file if it may
    /// be read; they have at most `bytes_max` bytes together.
    pub fn choose_ahead(
        &mut self,
        ino: InodeNo,
        bytes_max: u32,
        find: impl Fn(InodeNo) -> Option<SmallFile>,
    ) -> Vec<SmallFile> {
        let (mut files, mut bytes) = (Vec::new(), 0);
        self.siblings.choose(ino, |other| match find(other) {
            Some(file) if bytes + file.bytes > bytes_max || files.len() == AHEAD_MAX => {
                Choice::Stop
            }
            Some(file) => {
                bytes += file.bytes;
                files.push(file);
                Choice::Take
            }
            None => Choice::Skip,
        });
        files
    }

    /// What [`Self::choose_ahead`] gave was read, or could not be.
    pub fn end_reads(&mut self, chosen: &[SmallFile], mut contents: BTreeMap<InodeNo, Bytes>) {
        for file in chosen {
            let fetched = match contents.remove(&file.ino) {
                Some(data) => {
                    self.insert(file.ino, data);
                    Fetched::Yes
                }
                None => Fetched::No,
            };
            self.siblings.end_fetch([(file.ino, fetched)]);
        }
    }

    /// A file was read.
    pub fn insert(&mut self, ino: InodeNo, data: Bytes) {
        self.remove_content(ino);
        self.bytes += data.len();
        let bytes_left = data.len();
        self.contents.insert(ino, FileContent { data, bytes_left });
        self.oldest.push_back(ino);
        while self.bytes > self.bytes_max
            && let Some(oldest) = self.oldest.pop_front()
        {
            self.remove_content(oldest);
        }
        // Those that were read have left the contents, but not the queue.
        if self.oldest.len() > 2 * self.contents.len() + 1 {
            let contents = &self.contents;
            self.oldest.retain(|ino| contents.contains_key(ino));
        }
    }

    fn remove_content(&mut self, ino: InodeNo) {
        if let Some(content) = self.contents.remove(&ino) {
            self.bytes -= content.data.len();
        }
    }

    /// A file changes, or may do so.
    pub fn discard(&mut self, ino: InodeNo) {
        self.remove_content(ino);
        self.siblings.discard(ino);
    }

    /// Some file changes, and nobody knows which.
    pub fn discard_all(&mut self) {
        self.contents.clear();
        self.oldest.clear();
        self.bytes = 0;
    }

    /// The kernel does not know a file or directory any more.
    pub fn forget(&mut self, ino: InodeNo) {
        self.remove_content(ino);
        self.siblings.forget(ino);
    }
}

/// Files that are read by one call: one that a program waits for, and others.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct FilesToRead {
    /// The file whose reader waits.
    pub demanded: Option<SmallFile>,
    /// Files that programs will probably read next.
    pub ahead: Vec<SmallFile>,
}

impl FilesToRead {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.demanded.is_none() && self.ahead.is_empty()
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &SmallFile> {
        self.demanded.iter().chain(&self.ahead)
    }
}

/// What to fetch before a program asks for it.
#[derive(Debug)]
pub enum FetchAhead {
    /// The content of these files.
    Files(FilesToRead),
    /// The names in these directories.
    Directories(Vec<InodeNo>),
}

impl FetchAhead {
    /// Whether that is nothing.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Files(files) => files.is_empty(),
            Self::Directories(directories) => directories.is_empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::file_op::{FileTime, S_IFREG};

    use super::*;

    const BYTES: usize = 100;

    fn content() -> Bytes {
        Bytes::from(vec![7; BYTES])
    }

    fn files_with_content(inos: &[u64]) -> SmallFiles {
        let mut files = SmallFiles::default();
        files.set_bytes_max(2 * BYTES + 50);
        for ino in inos {
            files.insert(InodeNo(*ino), content());
        }
        files
    }

    #[test]
    fn changed_and_forgotten_files_have_no_content() {
        let mut files = files_with_content(&[11, 12]);
        files.discard(InodeNo(11));
        files.forget(InodeNo(12));
        let held = [11, 12].map(|ino| files.take(InodeNo(ino), 0, 9));
        assert_eq!((held, files.bytes), ([None, None], 0));
        files.insert(InodeNo(13), content());
        files.discard_all();
        assert_eq!((files.take(InodeNo(13), 0, 9), files.bytes), (None, 0));
    }

    #[test]
    fn a_content_stays_until_all_was_taken() {
        let mut files = files_with_content(&[11]);
        let mut take = |offset, length| {
            let data = files.take(InodeNo(11), offset, length);
            data.map(|data| data.len())
        };
        assert_eq!(take(90, 50), Some(10));
        assert_eq!(take(200, 50), Some(0), "behind its end");
        assert_eq!(take(0, 90), Some(90));
        assert_eq!(take(0, 90), None);
    }

    #[test]
    fn the_oldest_contents_make_room() {
        let mut files = files_with_content(&[10, 11, 12]);
        let held = [10, 11, 12].map(|ino| files.take(InodeNo(ino), 0, 100).is_some());
        assert_eq!(held, [false, true, true]);
        assert_eq!(files.bytes, 0);
    }

    #[test]
    fn large_and_empty_files_are_not_small() {
        let attr = |size| Attr {
            ino: InodeNo(1),
            size,
            blocks: 0,
            atime: FileTime::default(),
            mtime: FileTime::default(),
            ctime: FileTime::default(),
            mode: S_IFREG,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            block_size: 4096,
            btime_ns: 0,
        };
        let is_small = |size| SmallFile::from_attr(&attr(size)).is_some();
        assert_eq!(
            [0, 1, 65_536, 65_537].map(is_small),
            [false, true, true, false]
        );
    }
}
