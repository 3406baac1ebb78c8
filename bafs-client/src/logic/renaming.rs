//! When the one writer of a volume may be told that a file has another name before the server has
//! given it that: only for a file of one name and a name that is free.

use bafs_proto::file_op::{FileOp, FileReply, Name};
use bafs_proto::ids::InodeNo;
use nix::libc;

use super::delegation::{Asked, Decision, Delegation, NAME_BLOCKS, block_bytes};
use super::known::Known;
use super::log::Room;

impl Delegation {
    /// A file of one name gets another one that is free.
    pub(super) fn rename(
        &mut self,
        known: &mut Known,
        asked: Asked<'_>,
        ((parent, name), (new_parent, new_name)): ((InodeNo, &Name), (InodeNo, &Name)),
        flags: u32,
    ) -> Option<Decision> {
        // What the log makes under the old name is there when this runs.
        let in_log = self.log.name(parent, name);
        let is_there = in_log.or_else(|| self.image.has(parent, name));
        self.directory_in_log(parent, name)?;
        let directory = self.directory(new_parent, new_name)?;
        let ino = known.named(parent, name)?;
        let attr = self.image.about(ino)?;
        let cost = Room {
            bytes: NAME_BLOCKS * block_bytes(&directory),
            files: 0,
        };
        let is_sure = flags & !libc::RENAME_NOREPLACE == 0
            && is_there != Some(false)
            && self.image.has(new_parent, new_name) == Some(false)
            && attr.is_regular()
            && attr.nlink == 1
            && known.is_here(ino)
            && known.unseen(ino).is_none();
        if !is_sure || !self.has_room(cost) {
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
        let Ok(translated) = known.translate(&op) else {
            return Some(Decision::Provide);
        };
        self.image.unname(parent, name);
        self.image.name(new_parent, new_name);
        for directory in [parent, new_parent] {
            self.image.change(directory, |about| {
                (about.mtime, about.ctime) = (asked.now, asked.now);
            });
        }
        self.image.change(ino, |about| about.ctime = asked.now);
        let about = [Some(parent), Some(new_parent), Some(ino)];
        let asked = Asked { op: &op, ..asked };
        self.append(known, asked, translated, ((None, None), about, cost));
        Some(Decision::Answered(Ok(FileReply::Done)))
    }
}
