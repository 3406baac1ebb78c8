//! What the writer of a volume learns from answers that it did not give itself, and what it must
//! not count on while the server is asked.

use bafs_proto::file_op::{Attr, Caller, Errno, FileOp, FileReply, FileResult, Name};
use bafs_proto::ids::{HandleId, InodeNo};
use nix::libc;

use super::delegation::{CAPABILITY, Delegation};
use super::image::{is_directory, is_regular};
use super::known::Known;
use super::log::{Room, name_of};

impl Delegation {
    /// The server is asked something itself: until it answers nobody counts on what that changes.
    pub fn begin_asking(&mut self, known: &Known, op: &FileOp) {
        self.doubt(known, op);
        let cost = cost_of(op);
        self.asking.bytes += cost.bytes;
        self.asking.files += cost.files;
    }

    /// The server has answered it.
    pub fn end_asking(&mut self, known: &Known, caller: Caller, op: &FileOp, result: &FileResult) {
        let cost = cost_of(op);
        self.asking.bytes -= cost.bytes;
        self.asking.files -= cost.files;
        self.spend(cost);
        self.doubt(known, op);
        self.learn(caller, op, result);
    }

    /// What was free before may be taken now, until the server tells.
    pub(super) fn spend(&mut self, cost: Room) {
        self.free.bytes = self.free.bytes.saturating_sub(cost.bytes);
        self.free.files = self.free.files.saturating_sub(cost.files);
    }

    /// Takes in what the server answered to an operation that it was asked itself.
    fn learn(&mut self, caller: Caller, op: &FileOp, result: &FileResult) {
        if let (FileOp::GetXattr { ino, name }, Err(Errno(libc::ENODATA))) = (op, result)
            && name == CAPABILITY
        {
            self.image.set_plain(*ino, true);
        }
        let Ok(reply) = result else {
            return;
        };
        self.learn_names(op);
        match (op, reply) {
            (
                FileOp::Lookup { .. }
                | FileOp::GetAttr { .. }
                | FileOp::SetAttr { .. }
                | FileOp::Open { .. },
                FileReply::Attr(attr) | FileReply::Opened { attr, .. },
            ) => self.learn_attr(attr),
            (
                FileOp::Create { mode, .. } | FileOp::MakeDirectory { mode, .. },
                FileReply::Attr(attr) | FileReply::Opened { attr, .. },
            ) => {
                let kept = if is_directory(attr) { 0o1777 } else { 0o7777 };
                let is_new = attr.nlink == 1 + u32::from(is_directory(attr));
                let given = (attr.uid, attr.gid) == (caller.uid, caller.gid);
                if attr.mode & 0o7777 == mode & kept && given && is_new {
                    self.makers.insert((caller.uid, caller.gid));
                }
                let is_empty_file = is_regular(attr) && attr.size == 0 && attr.blocks == 0;
                if is_empty_file {
                    self.new_file.get_or_insert(*attr);
                } else if is_directory(attr) {
                    self.new_directory.get_or_insert(*attr);
                }
                self.image.see(attr);
            }
            (FileOp::ReadDirectory { .. }, FileReply::Entries(entries)) => {
                for attr in entries.iter().filter_map(|entry| entry.attr.as_ref()) {
                    self.learn_attr(attr);
                }
            }
            _ => {}
        }
    }

    /// What was asked before something was appended to the log is out of date.
    fn learn_attr(&mut self, attr: &Attr) {
        if self.log.busy(attr.ino).is_none() {
            self.image.see(attr);
        }
    }

    fn learn_names(&mut self, op: &FileOp) {
        match op {
            FileOp::MakeNode { parent, name, .. }
            | FileOp::MakeSymlink { parent, name, .. }
            | FileOp::MakeLink { parent, name, .. } => self.image.name(*parent, name),
            FileOp::RemoveDirectory { parent, name } => self.image.unname(*parent, name),
            FileOp::Rename {
                parent,
                name,
                new_parent,
                new_name,
                flags,
            } => {
                if flags & libc::RENAME_EXCHANGE == 0 {
                    self.image.unname(*parent, name);
                }
                self.image.name(*new_parent, new_name);
            }
            op => match name_of(op) {
                Some((parent, name, true)) => self.image.name(parent, name),
                Some((parent, name, false)) => self.image.unname(parent, name),
                None => {}
            },
        }
    }

    /// Forgets what the server may change by an operation.
    fn doubt(&mut self, known: &Known, op: &FileOp) {
        let mut changed = Vec::new();
        let named = |parent: &InodeNo, name: &Name| known.named(*parent, name);
        let opened = |handle: &HandleId| known.opening(*handle).map(|opening| opening.ino);
        if let FileOp::SetXattr { ino, .. } = op {
            self.image.set_plain(*ino, false);
        }
        match op {
            FileOp::SetAttr { ino, .. }
            | FileOp::SetXattr { ino, .. }
            | FileOp::RemoveXattr { ino, .. } => changed.push(Some(*ino)),
            FileOp::MakeLink { ino, parent, .. } => {
                changed.push(Some(*ino));
                self.image.blur(*parent);
            }
            FileOp::Create { parent, name, .. }
            | FileOp::MakeNode { parent, name, .. }
            | FileOp::MakeDirectory { parent, name, .. }
            | FileOp::MakeSymlink { parent, name, .. }
            | FileOp::Unlink { parent, name }
            | FileOp::RemoveDirectory { parent, name } => {
                changed.push(named(parent, name));
                self.image.blur(*parent);
            }
            FileOp::Rename {
                parent,
                name,
                new_parent,
                new_name,
                ..
            } => {
                changed.extend([named(parent, name), named(new_parent, new_name)]);
                self.image.blur(*parent);
                self.image.blur(*new_parent);
            }
            FileOp::Write { handle, .. }
            | FileOp::Allocate { handle, .. }
            | FileOp::CopyRange { target: handle, .. } => changed.push(opened(handle)),
            FileOp::Open { ino, flags } if flags & libc::O_TRUNC != 0 => changed.push(Some(*ino)),
            _ => {}
        }
        for ino in changed.into_iter().flatten() {
            self.image.doubt(ino);
        }
    }
}

/// The most space that an operation can take, other than by what is in the log.
fn cost_of(op: &FileOp) -> Room {
    /// Larger than what a name, a link's target or an attribute costs on any file system.
    const SOME_BYTES: u64 = 128 << 10;
    let bytes = match op {
        FileOp::Write { data, .. } => u64::from(data.length) + SOME_BYTES,
        FileOp::Allocate { length, .. } | FileOp::CopyRange { length, .. } => {
            length.saturating_add(SOME_BYTES).min(u64::MAX >> 8)
        }
        op if changes(op) => SOME_BYTES,
        _ => 0,
    };
    let files = u64::from(changes(op));
    Room { bytes, files }
}

/// Whether an operation may change names, attributes or space.
pub fn changes(op: &FileOp) -> bool {
    match op {
        FileOp::Open { flags, .. } => flags & libc::O_TRUNC != 0,
        op => matches!(
            op,
            FileOp::Write { .. }
                | FileOp::Allocate { .. }
                | FileOp::CopyRange { .. }
                | FileOp::SetXattr { .. }
                | FileOp::RemoveXattr { .. }
                | FileOp::SetAttr { .. }
                | FileOp::Create { .. }
                | FileOp::MakeNode { .. }
                | FileOp::MakeDirectory { .. }
                | FileOp::MakeSymlink { .. }
                | FileOp::MakeLink { .. }
                | FileOp::Unlink { .. }
                | FileOp::RemoveDirectory { .. }
                | FileOp::Rename { .. }
        ),
    }
}
