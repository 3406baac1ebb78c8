//! Look-ups of names by the writer of a volume, from what is known of their directories.

use bafs_proto::file_op::{ByName, Errno, FileReply};
use bafs_proto::ids::InodeNo;
use bafs_proto::limits::NAME_BYTES_MAX;
use nix::libc;

use super::delegation::{Decision, Delegation};
use super::inode_map::InodeMap;

impl Delegation {
    /// Finds a name. With `may_list` it may ask for all names of the directory first.
    pub(super) fn lookup(
        &mut self,
        inodes: &mut InodeMap,
        parent: InodeNo,
        name: &ByName,
        may_list: bool,
    ) -> Decision {
        if may_list && self.sibling_directories.is_inflight(parent) {
            return Decision::AwaitFetch;
        }
        self.note_directory_use(inodes, parent);
        let absent = || Decision::Answer(Err(Errno(libc::ENOENT)));
        let in_log = self.log.pending_name(parent, name);
        if in_log == Some(false) {
            return absent();
        }
        let is_there = in_log.or_else(|| self.metadata.has_name(parent, name));
        let renamed = self.log.pending_rename(parent, name);
        let ino = renamed.or_else(|| inodes.inode_by_name(parent, name));
        if let Some(ino) = ino.filter(|_| is_there != Some(false))
            && let Some(attr) = self.metadata.attr(ino)
        {
            // The reference of a listing becomes the kernel's.
            if !self.metadata.take_listed(ino) {
                inodes.count_lookup(ino);
            }
            return Decision::Answer(Ok(FileReply::Attr(attr)));
        }
        let is_fit = name.len() <= NAME_BYTES_MAX && !matches!(&name[..], b"" | b"." | b"..");
        match is_there {
            Some(false) if is_fit => absent(),
            None if is_fit && may_list && self.is_listable(parent) => {
                Decision::ListDirectory(parent)
            }
            _ => match ino {
                Some(ino) => self.query_about(&[parent, ino]),
                None => self.query_about(&[parent]),
            },
        }
    }

    fn is_listable(&self, directory: InodeNo) -> bool {
        let about = self.metadata.approximate_attr(directory);
        about.is_some_and(|attr| attr.is_directory()) && self.metadata.is_worth_listing(directory)
    }
}
