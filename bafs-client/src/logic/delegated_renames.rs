//! When the one writer of a volume may be told that a file has another name before the server has
//! given it that: only for a file of one name and a name that is free.

use bafs_proto::file_op::{ByName, FileOp, FileReply};
use bafs_proto::ids::InodeNo;
use nix::libc;

use super::delegation::{
    BLOCKS_PER_NAME, Decision, DelegatedRequest, Delegation, clamped_block_bytes,
};
use super::inode_map::InodeMap;
use super::operation_log::Space;

impl Delegation {
    /// A file of one name gets another one that is free.
    pub(super) fn rename_early(
        &mut self,
        inodes: &mut InodeMap,
        request: DelegatedRequest<'_>,
        ((parent, name), (new_parent, new_name)): ((InodeNo, &ByName), (InodeNo, &ByName)),
        flags: u32,
    ) -> Option<Decision> {
        // What the log makes under the old name is there when this runs.
        let in_log = self.log.pending_name(parent, name);
        let is_there = in_log.or_else(|| self.metadata.has_name(parent, name));
        self.writable_directory(parent, name)?;
        let directory = self.unchanged_directory(new_parent, new_name)?;
        let ino = inodes.inode_by_name(parent, name)?;
        let attr = self.metadata.approximate_attr(ino)?;
        let cost = Space {
            bytes: BLOCKS_PER_NAME * clamped_block_bytes(&directory),
            files: 0,
        };
        let is_sure = flags & !libc::RENAME_NOREPLACE == 0
            && is_there != Some(false)
            && self.metadata.has_name(new_parent, new_name) == Some(false)
            && attr.is_regular()
            && attr.nlink == 1
            && inodes.is_present(ino)
            && inodes.missing_handle(ino).is_none();
        if !is_sure || !self.has_space(cost) {
            return None;
        }
        // The name is free, so the flag says nothing, and not every file system knows it.
        let op = FileOp::Rename {
            parent,
            name: name.clone(),
            new_parent,
            new_name: new_name.clone(),
            flags: 0,
        };
        let Ok(translated) = inodes.translate(&op) else {
            return Some(Decision::ProvideObjects);
        };
        self.metadata.remove_name(parent, name);
        self.metadata.add_name(new_parent, new_name);
        for directory in [parent, new_parent] {
            self.metadata.update_attr(directory, |about| {
                (about.mtime, about.ctime) = (request.now, request.now);
            });
        }
        self.metadata
            .update_attr(ino, |about| about.ctime = request.now);
        let about = [Some(parent), Some(new_parent), Some(ino)];
        let asked = DelegatedRequest { op: &op, ..request };
        self.append(inodes, asked, translated, ((None, None), about, cost));
        Some(Decision::Answer(Ok(FileReply::Done)))
    }
}
