//! Reads of small files by a volume's one writer: from what was read ahead, or whole by one call,
//! without a handle of the server.

use std::collections::BTreeMap;

use bafs_proto::ids::{HandleId, InodeNo};
use bafs_proto::limits::IO_BYTES_MAX;
use bytes::Bytes;

use super::delegation::{Decision, Delegation};
use super::inflight_queries::InflightQuery;
use super::inode_map::{InodeMap, OpenParameters};
use super::small_files::{FilesToRead, SmallFile};

impl Delegation {
    /// Answers a read of a small file if its content is here; with `may_fetch` it may ask for the
    /// whole file first.
    pub(super) fn read(
        &mut self,
        inodes: &InodeMap,
        handle: HandleId,
        (offset, length): (u64, u32),
        may_fetch: bool,
    ) -> Decision {
        let Some(OpenParameters { ino, .. }) = inodes.open_parameters(handle) else {
            return self.query_after_log();
        };
        if let Some(data) = self.small_files.take(ino, offset, length) {
            let files = FilesToRead {
                demanded: None,
                ahead: self.choose_ahead(inodes, ino, IO_BYTES_MAX),
            };
            return Decision::AnswerRead(data, files);
        }
        if may_fetch && self.small_files.is_inflight(ino) {
            return Decision::AwaitFetch;
        }
        // A handle that the server has is not worth another way to read.
        if may_fetch
            && offset == 0
            && inodes.is_deferred(handle)
            && let Some(file) = self.readable_file(inodes, ino)
        {
            self.small_files.note_read(ino);
            return Decision::ReadFiles(FilesToRead {
                demanded: Some(file),
                ahead: self.choose_ahead(inodes, ino, IO_BYTES_MAX - file.bytes),
            });
        }
        self.query_about(&[ino])
    }

    fn choose_ahead(&mut self, inodes: &InodeMap, ino: InodeNo, bytes_max: u32) -> Vec<SmallFile> {
        let mut small_files = std::mem::take(&mut self.small_files);
        let find = |ino| self.readable_file(inodes, ino);
        let chosen = small_files.choose_ahead(ino, bytes_max, find);
        self.small_files = small_files;
        chosen
    }

    /// A file that is small, and of which the server knows all.
    fn readable_file(&self, inodes: &InodeMap, ino: InodeNo) -> Option<SmallFile> {
        let is_settled = self.log.last_position_of(ino).is_none() && inodes.is_present(ino);
        let attr = self.metadata.attr(ino).filter(|_| is_settled)?;
        SmallFile::from_attr(&attr)
    }

    /// At most so many bytes of small files are kept from now on.
    pub fn limit_small_files(&mut self, bytes_max: usize) {
        self.small_files.set_bytes_max(bytes_max);
    }

    /// The kernel does not know a file or directory any more.
    pub fn forget_siblings(&mut self, ino: InodeNo) {
        self.small_files.forget(ino);
        self.sibling_directories.forget(ino);
    }

    /// The server is asked for the content of files.
    pub fn begin_reads(&mut self) -> InflightQuery {
        self.queries.begin_query(Vec::new(), false)
    }

    /// The files of which the server knows all, also now.
    pub fn settled_files<'a>(
        &'a self,
        files: &'a FilesToRead,
    ) -> impl Iterator<Item = SmallFile> + 'a {
        let is_settled = move |file: &&SmallFile| self.log.last_position_of(file.ino).is_none();
        files.iter().filter(is_settled).copied()
    }

    /// The server has answered. The content of a file counts unless the file changed meanwhile.
    pub fn end_reads(
        &mut self,
        query: InflightQuery,
        files: &FilesToRead,
        contents: Vec<(InodeNo, Bytes)>,
    ) {
        let is_current = |(ino, data): &(InodeNo, Bytes)| {
            let attr = self.metadata.attr(*ino);
            attr.is_some_and(|attr| attr.size == data.len() as u64)
                && self.log.last_position_of(*ino).is_none()
                && self.queries.is_current(&query, *ino)
        };
        let mut contents: BTreeMap<_, _> = contents.into_iter().filter(is_current).collect();
        if let Some(demanded) = files.demanded
            && let Some(data) = contents.remove(&demanded.ino)
        {
            self.small_files.insert(demanded.ino, data);
        }
        self.small_files.end_reads(&files.ahead, contents);
        self.queries.end_query(query, Vec::new());
    }
}
