//! Listings of directories, with the attributes of what is listed if these are asked for.

use std::ffi::CStr;

use bafs_proto::file_op::{Attr, DirectoryEntry, END_COOKIE, FileReply, FileResult, S_IFMT};
use bafs_proto::ids::{HandleId, InodeNo};
use bafs_proto::limits::DIRECTORY_PAGE_BYTES_MAX;
use rustix::fs::{AtFlags, FileType, OFlags, statat};

use crate::directory_stream::DirectoryStream;
use crate::errno::{self, Outcome};
use crate::file_reference::FileReference;
use crate::host_file::{host_file_id, to_attr};
use crate::session::{Session, lock};

/// About the encoded size of a directory entry without its name and attributes, in bytes; the
/// kernel's own form has the same.
const ENTRY_BYTES: usize = 24;

/// About the encoded size of the attributes of an entry, in bytes.
const ENTRY_ATTR_BYTES: usize = 128;

impl Session {
    pub(crate) fn read_directory(
        &self,
        handle: HandleId,
        cookie: u64,
        bytes_max: u32,
        plus: bool,
    ) -> FileResult {
        let directory = self.handles().directory(handle)?;
        let mut stream = lock(&directory.stream);
        stream.seek_to(cookie)?;
        let listed = (directory.ino, &*directory.file_reference);
        let entries = self.read_entries(listed, &mut stream, bytes_max, plus)?;
        Ok(FileReply::Entries(entries))
    }

    /// A page of a directory that is open only meanwhile, with attributes.
    pub(crate) fn list_directory(&self, ino: InodeNo, cookie: u64, bytes_max: u32) -> FileResult {
        let file_reference = self.file_reference(ino)?;
        if file_reference.kind() != FileType::Directory {
            return Err(errno::NOTDIR);
        }
        let fd = file_reference.open(OFlags::RDONLY | OFlags::DIRECTORY)?;
        let mut stream = DirectoryStream::new(fd);
        stream.seek_to(cookie)?;
        let listed = (ino, &*file_reference);
        let mut entries = self.read_entries(listed, &mut stream, bytes_max, true)?;
        // A failure shows with the next page.
        if let (Some(last), Ok(None)) = (entries.last_mut(), stream.peek()) {
            last.cookie = END_COOKIE;
        }
        Ok(FileReply::Entries(entries))
    }

    /// The next entries of a stream.
    fn read_entries(
        &self,
        (directory, file_reference): (InodeNo, &FileReference),
        stream: &mut DirectoryStream,
        bytes_max: u32,
        plus: bool,
    ) -> Outcome<Vec<DirectoryEntry>> {
        let bytes_max = bytes_max.min(DIRECTORY_PAGE_BYTES_MAX) as usize;
        let is_root = directory == InodeNo::ROOT;
        let hidden = self.tree().hidden().filter(|_| is_root);
        let (mut entries, mut bytes) = (Vec::new(), 0);
        while let Some(raw) = stream.peek()? {
            let attr_bytes = if plus { ENTRY_ATTR_BYTES } else { 0 };
            let size = ENTRY_BYTES + raw.name.len().next_multiple_of(8) + attr_bytes;
            if !entries.is_empty() && bytes + size > bytes_max {
                break;
            }
            if hidden != Some(&raw.name[..]) {
                bytes += size;
                let dots = matches!(&raw.name[..], b"." | b"..");
                // What is above the root is nobody's business.
                let ino = match &raw.name[..] {
                    b".." if is_root => InodeNo::ROOT,
                    b"." => directory,
                    _ => self.inodes().number_of((self.tree().root_id().0, raw.ino)),
                };
                let mut entry = DirectoryEntry {
                    name: raw.name.clone(),
                    ino,
                    mode: raw.kind.as_raw_mode(),
                    cookie: raw.cookie,
                    attr: None,
                };
                if plus && !dots {
                    match self.fill_attributes(file_reference, &mut entry, raw.ino) {
                        // The entries before it hold references: the reply must tell of them.
                        Err(_) if !entries.is_empty() => break,
                        described => described?,
                    }
                }
                entries.push(entry);
            }
            stream.advance();
        }
        Ok(entries)
    }

    /// Looks an entry up; one that is gone by now stays without attributes.
    fn fill_attributes(
        &self,
        directory: &FileReference,
        entry: &mut DirectoryEntry,
        ino: u64,
    ) -> Outcome<()> {
        let name = errno::checked_name(&entry.name)?;
        match self.refer_listed(directory, &name, ino) {
            Ok(attr) => {
                (entry.ino, entry.mode) = (attr.ino, attr.mode & S_IFMT);
                entry.attr = Some(attr);
                Ok(())
            }
            Err(errno::NOENT | errno::STALE) => Ok(()),
            // To leave it out would pass a part of the directory off as the whole.
            Err(error) => Err(error),
        }
    }

    /// Counts a reference to the file of a name, and describes it. One that the agent refers to,
    /// as the number in the listing promises, is not opened once more.
    fn refer_listed(&self, directory: &FileReference, name: &CStr, ino: u64) -> Outcome<Attr> {
        let promised = (self.tree().root_id().0, ino);
        if !self.reports_btimes() && self.find_referred(promised).is_some() {
            let stat = statat(
                directory.path_descriptor()?,
                name,
                AtFlags::SYMLINK_NOFOLLOW,
            );
            let stat = stat.map_err(errno::from_host)?;
            // Another file may have the name by now.
            let again = self.inodes().add_reference_if_known(host_file_id(&stat));
            if let Some(ino) = again {
                return Ok(to_attr(ino, &stat));
            }
        }
        let (file_reference, stat) = FileReference::find(directory, name)?;
        Ok(self.refer_with_attr(file_reference, &stat))
    }
}
