//! What the one writer of a volume may answer before the server has run it: only what is sure to
//! succeed there. Decides with what is known of the tree ([`Image`]), of numbers ([`Known`]) and of
//! free space; what it answers goes to the [`Log`].

use std::collections::BTreeSet;

use bafs_proto::file_op::{
    Attr, AttrChange, Caller, Errno, FileOp, FileReply, FileResult, FileTime, Name, S_IFMT, SetTime,
};
use bafs_proto::ids::{Epoch, HandleId, InodeNo};
use bafs_proto::limits::NAME_BYTES_MAX;
use bytes::Bytes;
use nix::libc;

use super::image::Image;
use super::known::{Known, Opening};
use super::log::{Entry, Log, NO_SESSION, Room};
use super::questions::Questions;

const SET_UID_GID: u32 = 0o6000;
const SET_GID: u32 = 0o2000;

/// What the server itself must be allowed to change names in a directory, and to open files: to the
/// kernel it is their owner, unless it may do all.
const NAMES_CHANGE: u32 = 0o300;
const OPENS_ALL: u32 = 0o600;

/// Blocks that a new name may cost its directory, and a new directory itself.
pub(super) const NAME_BLOCKS: u64 = 4;

/// Blocks that a write may cost beyond its own bytes: at both ends, and for the file's index.
const WRITE_BLOCKS: u64 = 4;

/// Nearer to the volume's limit every operation is left to the server, which counts exactly.
const MARGIN: Room = Room {
    bytes: 1 << 20,
    files: 16,
};

/// Links of a directory from which the server decides whether there may be more.
const LINKS_MAX: u32 = 30_000;

/// The kernel asks for this attribute before each write.
pub(super) const CAPABILITY: &[u8] = b"security.capability";

/// Where a file may end that surely fits the server's file system.
const END_MAX: u64 = 1 << 40;

/// What an operation makes, which files it is about, and what it may cost.
type Effect = (
    (Option<InodeNo>, Option<HandleId>),
    [Option<InodeNo>; 3],
    Room,
);

/// What becomes of an operation.
#[derive(Debug)]
pub enum Decision {
    /// This is the answer, and all that the server must be told is in the log.
    Answered(FileResult),
    /// The server answers, once it has run what is before this position of the log.
    AskAfter(u64),
    /// The names of the directory should be known first; otherwise the server answers.
    List(InodeNo),
    /// The session must be given what the operation names first.
    Provide,
}

/// All that the writer of a volume needs to answer by itself.
#[derive(Debug, Default)]
pub struct Delegation {
    /// What is known of files and names.
    pub image: Image,
    /// What the server has not run yet.
    pub log: Log,
    /// Free space when the server last told it; what is in the log may still come off.
    pub(super) free: Room,
    /// What operations that the server is asked itself may take at this moment.
    pub(super) asking: Room,
    /// Counts those of them that took space and have been answered.
    pub(super) spent: u64,
    /// What the server is asked itself.
    pub(super) questions: Questions,
    /// Callers to whom the server gives what they make.
    pub(super) makers: BTreeSet<(u32, u32)>,
    /// How a new file and a new directory look.
    pub(super) new_file: Option<Attr>,
    pub(super) new_directory: Option<Attr>,
}

/// An operation and all that a decision about it needs.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// On whose behalf.
    pub caller: Caller,
    /// In the kernel's numbers.
    pub op: &'a FileOp,
    /// What a write writes.
    pub data: &'a [u8],
    /// The time of day.
    pub now: FileTime,
}

impl Delegation {
    /// Answers an operation if that is safe. With `may_list` it may ask for a listing first.
    pub fn decide(&mut self, known: &mut Known, asked: Asked<'_>, may_list: bool) -> Decision {
        match asked.op {
            FileOp::Lookup { parent, name } => self.lookup(known, *parent, name, may_list),
            FileOp::GetAttr { ino, .. } => match self.image.attr(*ino) {
                Some(attr) => Decision::Answered(Ok(FileReply::Attr(attr))),
                None => {
                    self.tell_times(known, asked, *ino);
                    self.ask_about(&[*ino])
                }
            },
            FileOp::Create {
                parent,
                name,
                mode,
                flags,
            } => {
                let parent = (*parent, name);
                let made = self.make(known, asked, parent, *mode, Some(*flags));
                made.unwrap_or_else(|| self.ask_after_all())
            }
            FileOp::MakeDirectory { parent, name, mode } => {
                let made = self.make(known, asked, (*parent, name), *mode, None);
                made.unwrap_or_else(|| self.ask_after_all())
            }
            FileOp::Unlink { parent, name } => {
                let removed = self.unlink(known, asked, *parent, name);
                removed.unwrap_or_else(|| self.ask_after_all())
            }
            FileOp::Rename {
                parent,
                name,
                new_parent,
                new_name,
                flags,
            } => {
                let names = ((*parent, name), (*new_parent, new_name));
                let renamed = self.rename(known, asked, names, *flags);
                renamed.unwrap_or_else(|| self.ask_after_all())
            }
            FileOp::SetAttr { ino, change, .. } => {
                let changed = self.set_attr(known, asked, *ino, change);
                changed.unwrap_or_else(|| self.ask_after_all())
            }
            FileOp::Write {
                handle,
                offset,
                append,
                ..
            } => {
                let written = self.write(known, asked, *handle, (*offset, *append));
                written.unwrap_or_else(|| self.ask_after_all())
            }
            FileOp::Open { ino, flags } => {
                let opened = self.open(known, asked, *ino, *flags);
                opened.unwrap_or_else(|| self.ask_after_all())
            }
            FileOp::Release { handle } => self.release(known, asked, *handle),
            FileOp::GetXattr { ino, name } if name == CAPABILITY && self.image.is_plain(*ino) => {
                Decision::Answered(Err(Errno(libc::ENODATA)))
            }
            FileOp::ReadLink { ino }
            | FileOp::GetXattr { ino, .. }
            | FileOp::ListXattr { ino }
            | FileOp::OpenDirectory { ino } => self.ask_about(&[*ino]),
            FileOp::Read { handle, .. } => match known.opening(*handle) {
                Some(Opening { ino, .. }) => self.ask_about(&[ino]),
                None => self.ask_after_all(),
            },
            _ => self.ask_after_all(),
        }
    }

    pub(super) fn ask_after_all(&self) -> Decision {
        Decision::AskAfter(self.log.end())
    }

    /// The server is asked as soon as it knows all about these files.
    fn ask_about(&self, files: &[InodeNo]) -> Decision {
        let busy = files.iter().filter_map(|ino| self.log.busy(*ino)).max();
        Decision::AskAfter(busy.unwrap_or(0))
    }

    fn lookup(
        &mut self,
        known: &mut Known,
        parent: InodeNo,
        name: &Name,
        may_list: bool,
    ) -> Decision {
        let absent = || Decision::Answered(Err(Errno(libc::ENOENT)));
        let in_log = self.log.name(parent, name);
        if in_log == Some(false) {
            return absent();
        }
        let is_there = in_log.or_else(|| self.image.has(parent, name));
        let renamed = self.log.renamed(parent, name);
        let ino = renamed.or_else(|| known.named(parent, name));
        if let Some(ino) = ino.filter(|_| is_there != Some(false))
            && let Some(attr) = self.image.attr(ino)
        {
            known.meet_again(ino);
            return Decision::Answered(Ok(FileReply::Attr(attr)));
        }
        let is_fit = name.len() <= NAME_BYTES_MAX && !matches!(&name[..], b"" | b"." | b"..");
        match is_there {
            Some(false) if is_fit => absent(),
            None if is_fit && may_list && self.can_be_listed(parent) => Decision::List(parent),
            _ => match ino {
                Some(ino) => self.ask_about(&[parent, ino]),
                None => self.ask_about(&[parent]),
            },
        }
    }

    fn can_be_listed(&self, directory: InodeNo) -> bool {
        let about = self.image.about(directory);
        about.is_some_and(|attr| attr.is_directory()) && self.image.may_be_listed(directory)
    }

    /// Whether space is sure for an operation beside all that is in the log.
    pub(super) fn has_room(&self, cost: Room) -> bool {
        let promised = self.log.promised();
        let bytes = promised.bytes + self.asking.bytes + cost.bytes + MARGIN.bytes;
        let files = promised.files + self.asking.files + cost.files + MARGIN.files;
        cost == Room::default() || (bytes <= self.free.bytes && files <= self.free.files)
    }

    /// Whether an operation on this name is sure to find its directory as it is known here, and the
    /// name as it was before the log.
    pub(super) fn directory(&self, parent: InodeNo, name: &Name) -> Option<Attr> {
        let is_as_before = self.log.name(parent, name).is_none();
        self.directory_in_log(parent, name).filter(|_| is_as_before)
    }

    /// The same, whatever the log does to the name.
    pub(super) fn directory_in_log(&self, parent: InodeNo, name: &Name) -> Option<Attr> {
        let is_fit = name.len() <= NAME_BYTES_MAX && !matches!(&name[..], b"" | b"." | b"..");
        let attr = self.image.about(parent).filter(Attr::is_directory)?;
        let is_alive = attr.nlink >= 2 && attr.nlink < LINKS_MAX;
        let is_open_to_server = attr.mode & NAMES_CHANGE == NAMES_CHANGE;
        (is_fit && is_alive && is_open_to_server).then_some(attr)
    }

    /// A new file, open with these flags, or a new directory.
    fn make(
        &mut self,
        known: &mut Known,
        asked: Asked<'_>,
        (parent, name): (InodeNo, &Name),
        mode: u32,
        flags: Option<i32>,
    ) -> Option<Decision> {
        let Caller { uid, gid, .. } = asked.caller;
        let directory = self.directory(parent, name)?;
        let is_sure = self.image.has(parent, name) == Some(false)
            && directory.mode & SET_GID == 0
            && self.makers.contains(&(uid, gid));
        let (pattern, kept) = match flags {
            Some(_) => (self.new_file?, 0o7777),
            None => (self.new_directory?, 0o1777),
        };
        let cost = Room {
            bytes: NAME_BLOCKS * block_bytes(&directory),
            files: 1,
        };
        let opens = flags.is_none() || known.opens_surely();
        if !is_sure || !opens || !self.has_room(cost) || mode & SET_UID_GID != 0 {
            return None;
        }
        let Ok(translated) = known.translate(asked.op) else {
            return Some(Decision::Provide);
        };
        let ino = known.make(parent, name);
        let attr = Attr {
            ino,
            mode: pattern.mode & S_IFMT | mode & kept,
            uid,
            gid,
            atime: asked.now,
            mtime: asked.now,
            ctime: asked.now,
            born_ns: 0,
            ..pattern
        };
        self.image.make(&attr);
        self.image.name(parent, name);
        let is_directory = flags.is_none();
        self.image.change(parent, |about| {
            (about.mtime, about.ctime) = (asked.now, asked.now);
            about.nlink += u32::from(is_directory);
        });
        let opened = flags.map(|flags| {
            let opening = Opening {
                ino,
                flags,
                is_directory: false,
            };
            known.open_given(opening)
        });
        let made = (Some(ino), opened.map(|(_, given)| given));
        self.append(
            known,
            asked,
            translated,
            (made, [Some(parent), Some(ino), None], cost),
        );
        Some(Decision::Answered(Ok(match opened {
            Some((handle, _)) => FileReply::Opened { handle, attr },
            None => FileReply::Attr(attr),
        })))
    }

    fn unlink(
        &mut self,
        known: &mut Known,
        asked: Asked<'_>,
        parent: InodeNo,
        name: &Name,
    ) -> Option<Decision> {
        self.directory(parent, name)?;
        let ino = known.named(parent, name)?;
        let attr = self.image.about(ino)?;
        let is_sure = self.image.has(parent, name) != Some(false);
        // Once it has no name nobody could find it for those who need its number, nor open it for
        // those who think that they have.
        let is_held = known.is_here(ino) && known.unseen(ino).is_none();
        if !is_sure || attr.is_directory() || !is_held {
            return None;
        }
        let Ok(translated) = known.translate(asked.op) else {
            return Some(Decision::Provide);
        };
        self.image.unname(parent, name);
        self.image.change(parent, |about| {
            (about.mtime, about.ctime) = (asked.now, asked.now);
        });
        self.image.change(ino, |about| {
            about.nlink = about.nlink.saturating_sub(1);
            about.ctime = asked.now;
        });
        let about = [Some(parent), Some(ino), None];
        self.append(
            known,
            asked,
            translated,
            ((None, None), about, Room::default()),
        );
        Some(Decision::Answered(Ok(FileReply::Done)))
    }

    fn set_attr(
        &mut self,
        known: &mut Known,
        asked: Asked<'_>,
        ino: InodeNo,
        change: &AttrChange,
    ) -> Option<Decision> {
        let attr = self.image.attr(ino)?;
        let is_plain = attr.is_regular() || attr.is_directory();
        let bits = change.mode.unwrap_or(0) | attr.mode;
        let touches_more = change.size.is_some() || change.uid.is_some() || change.gid.is_some();
        if !is_plain || touches_more || bits & SET_UID_GID != 0 || attr.nlink == 0 {
            return None;
        }
        if shuts(change) && known.unseen(ino).is_some() {
            return None;
        }
        let settled = |time: Option<SetTime>| {
            time.map(|time| match time {
                SetTime::Now => asked.now,
                SetTime::At(time) => time,
            })
        };
        let (atime, mtime) = (settled(change.atime), settled(change.mtime));
        // The store's file system may move others to the next that it can keep.
        let is_kept = |time: i64| (0..=i64::from(i32::MAX)).contains(&time);
        if ![atime, mtime]
            .iter()
            .flatten()
            .all(|time| is_kept(time.seconds))
        {
            return None;
        }
        let op = FileOp::SetAttr {
            ino,
            handle: None,
            change: AttrChange {
                atime: atime.map(SetTime::At),
                mtime: mtime.map(SetTime::At),
                ..*change
            },
        };
        let Ok(translated) = known.translate(&op) else {
            return Some(Decision::Provide);
        };
        if mtime.is_some() {
            self.image.owes_nothing(ino);
        }
        self.image.change(ino, |about| {
            about.mode = change
                .mode
                .map_or(about.mode, |mode| about.mode & S_IFMT | mode);
            about.atime = atime.unwrap_or(about.atime);
            about.mtime = mtime.unwrap_or(about.mtime);
            about.ctime = asked.now;
        });
        let asked = Asked { op: &op, ..asked };
        let about = [Some(ino), None, None];
        self.append(
            known,
            asked,
            translated,
            ((None, None), about, Room::default()),
        );
        let attr = self.image.attr(ino)?;
        Some(Decision::Answered(Ok(FileReply::Attr(attr))))
    }

    fn write(
        &mut self,
        known: &mut Known,
        asked: Asked<'_>,
        handle: HandleId,
        (offset, append): (u64, bool),
    ) -> Option<Decision> {
        let Opening { ino, flags, .. } = known.opening(handle)?;
        let attr = self.image.about(ino)?;
        let offset = if append {
            self.image.attr(ino)?.size
        } else {
            offset
        };
        let length = asked.data.len() as u64;
        let end = offset.checked_add(length).filter(|end| *end < END_MAX)?;
        let is_sure = attr.is_regular() && attr.mode & SET_UID_GID == 0 && end > offset;
        let block_bytes = block_bytes(&attr);
        let cost = Room {
            bytes: length.next_multiple_of(block_bytes) + WRITE_BLOCKS * block_bytes,
            files: 0,
        };
        if !is_sure || flags & (libc::O_SYNC | libc::O_DSYNC) != 0 || !self.has_room(cost) {
            return None;
        }
        let FileOp::Write { data, .. } = asked.op else {
            return None;
        };
        let op = FileOp::Write {
            handle,
            offset,
            data: *data,
            append: false,
        };
        let Ok(translated) = known.translate(&op) else {
            return Some(Decision::Provide);
        };
        self.image.write(ino, offset, length, asked.now);
        let asked = Asked { op: &op, ..asked };
        self.append(
            known,
            asked,
            translated,
            ((None, None), [Some(ino), None, None], cost),
        );
        Some(Decision::Answered(Ok(FileReply::Written { length })))
    }

    pub(super) fn append(
        &mut self,
        known: &Known,
        asked: Asked<'_>,
        translated: FileOp,
        effect: Effect,
    ) {
        self.append_as((known.epoch(), translated), asked, effect);
    }

    /// Appends what the present session lacks something for: it is given that when it is sent.
    pub(super) fn append_untranslated(&mut self, asked: Asked<'_>, effect: Effect) {
        self.append_as((NO_SESSION, asked.op.clone()), asked, effect);
    }

    fn append_as(
        &mut self,
        translated: (Epoch, FileOp),
        asked: Asked<'_>,
        (made, about, cost): Effect,
    ) {
        for ino in about.iter().flatten() {
            self.questions.change(*ino);
        }
        self.log.append(Entry {
            caller: asked.caller,
            op: asked.op.clone(),
            asked: translated,
            data: match asked.op {
                FileOp::Write { .. } => Bytes::copy_from_slice(asked.data),
                _ => Bytes::new(),
            },
            made,
            about,
            cost,
        });
    }

    /// The oldest entry of the log has run.
    pub fn settle(&mut self, known: &mut Known, reply: Option<&FileReply>) {
        let Some(entry) = self.log.settle() else {
            return;
        };
        if let ((Some(ino), _), Some(FileReply::Attr(attr) | FileReply::Opened { attr, .. })) =
            (entry.made, reply)
        {
            known.born(ino, attr.born_ns);
        }
        match &entry.op {
            FileOp::Unlink { parent, name } => known.unname(*parent, name),
            FileOp::Rename {
                parent,
                name,
                new_parent,
                new_name,
                ..
            } => known.rename((*parent, name), (*new_parent, new_name), false),
            FileOp::Release { handle } => known.close(*handle),
            _ => {}
        }
        self.spend(entry.cost);
    }

    /// Counts the operations that took space without the log: what the server tells together with
    /// a batch includes those that this counted when the batch was sent.
    pub fn spent(&self) -> u64 {
        self.spent
    }

    /// The server told what is free, after all that is settled now; `spent` is the count when it
    /// was asked.
    pub fn has_free(&mut self, told: Room, spent: u64) {
        self.free = if spent == self.spent {
            told
        } else {
            Room {
                bytes: told.bytes.min(self.free.bytes),
                files: told.files.min(self.free.files),
            }
        };
    }
}

/// Whether a file may be closed to the server by a change of its permission bits, so that what
/// programs have open must be open there before.
pub fn shuts(change: &AttrChange) -> bool {
    change
        .mode
        .is_some_and(|mode| mode & OPENS_ALL != OPENS_ALL)
}

pub(super) fn block_bytes(attr: &Attr) -> u64 {
    u64::from(attr.block_size).clamp(4096, 1 << 20)
}
