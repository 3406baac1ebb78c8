//! Small files of a scratch volume that a session only reads: opened without the server, and read
//! whole by one call. Nothing is kept, so what another session writes meanwhile is seen.

use bafs_proto::file_op::{FileOp, FileReply, FileResult};
use bytes::Bytes;
use nix::libc;

use super::{RemoteSession, lock};
use crate::logic::inode_map::OpenParameters;
use crate::logic::small_files::SmallFile;

impl RemoteSession {
    /// Opens a small file that surely opens at the server, which then is not told of it.
    pub(super) fn open_small_file(&self, op: &FileOp) -> Option<FileReply> {
        let FileOp::Open { ino, flags } = *op else {
            return None;
        };
        let attr = lock(self.reader_files.as_ref()?).attr(ino)?;
        if flags & libc::O_ACCMODE != libc::O_RDONLY {
            return None;
        }
        let opening = OpenParameters {
            ino,
            flags,
            is_directory: false,
        };
        let handle = self.inode_map().open_deferred(opening);
        Some(FileReply::Opened { handle, attr })
    }

    /// Reads a small file that was opened so, if all of it is wanted. Otherwise, and where it has
    /// become longer, the server opens it.
    pub(super) async fn read_small_file(&self, op: &FileOp) -> Option<(FileResult, Bytes)> {
        let FileOp::Read {
            handle,
            offset: 0,
            length,
        } = *op
        else {
            return None;
        };
        let files = self.reader_files.as_ref()?;
        let opening = {
            let known = self.inode_map();
            let opening = known.open_parameters(handle)?;
            known.is_deferred(handle).then_some(opening)?
        };
        let file = SmallFile::from_attr(&lock(files).attr(opening.ino)?)?;
        if file.bytes > length {
            return None;
        }
        let (_, data) = self.read_contents(&[file]).await.pop()?;
        let length = u32::try_from(data.len()).ok()?;
        Some((Ok(FileReply::Read { length }), data))
    }

    /// Takes note of small files in an answer.
    pub(super) fn note_small_files(&self, op: &FileOp, result: &FileResult) {
        let Some(files) = &self.reader_files else {
            return;
        };
        match (op, result) {
            (FileOp::Lookup { .. } | FileOp::GetAttr { .. }, Ok(FileReply::Attr(attr))) => {
                lock(files).note(attr);
            }
            (FileOp::ReadDirectory { .. }, Ok(FileReply::Entries(entries))) => {
                let attrs = entries.iter().filter_map(|entry| entry.attr.as_ref());
                attrs.for_each(|attr| lock(files).note(attr));
            }
            _ => {}
        }
    }
}
