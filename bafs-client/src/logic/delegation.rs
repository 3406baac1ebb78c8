//! Decides which operations an agent may answer before the server has run them.
//!
//! A scratch volume has one writer, so its agent sees every change. The rule: an answer is given
//! early only if the operation is certain to succeed at the server. Pure: the time and all results
//! are arguments.
//!
//! [`Delegation::decide`] takes a [`DelegatedRequest`] and returns a [`Decision`]: answer now, ask
//! the server after a position of the log, list a directory first, read whole files first, or
//! provide a missing object first. It works with four tables:
//!
//! * [`MetadataCache`]: attributes, and the names of directories that were made or listed here.
//! * [`InodeMap`]: numbers of files and handles. The agent numbers what it creates, so later
//!   operations can name it before the server has made it.
//! * [`SmallFiles`]: small files that were read whole, ahead of the programs.
//! * [`OperationLog`]: the operations that were answered and have not run yet, in order.
//!   `log_shipping` sends them, and [`Delegation::acknowledge`] removes each one that has run.
//!
//! | Operation | Answered early if |
//! |---|---|
//! | look-up, attributes | the attributes are known, or the name is known to be free |
//! | create, make directory | the name is known to be free, and the caller owns what it makes |
//! | write | the file is regular, without set-id bits |
//! | unlink | the session holds the file, and the log has not touched the name |
//! | remove directory | the same, and all names in it are known, which are none |
//! | rename | the file has one name, and the new name is free |
//! | change of mode or times | size, owner and set-id bits stay |
//! | read | the file is small, and was read whole |
//! | open | the mode permits it, and a descriptor is left |
//! | list a directory | all names in it are known, and the attributes of their files |
//! | close of a file | always |
//! | any other | never: it waits for the log, or for the last entry about its files |
//!
//! **Space.** The server reports its free space with each batch. An operation is answered early
//! only if the worst case of the whole log still fits, with 1 MiB and 16 files to spare. Nearer to
//! the limit the server decides, so `ENOSPC` is exact.
//!
//! **Recovery.** No two entries of the log make or remove the same name, renames apart. So after a
//! restart of the server the names on disk show how many entries have run.
//!
//! **Errors.** An early answer that the server cannot keep means a broken disk or server. Then the
//! volume is lost, which the shipping side detects. The owner of all this state is the remote
//! session, behind one mutex. Limits of the log (32 MiB, 4,096 operations) are enforced there too.
//!
//! The choice is recorded in `docs/decisions/0018-write-delegation.md`.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::buffer::Buffer;
use bafs_proto::file_op::{
    Attr, AttrChange, ByName, Caller, Errno, FileOp, FileReply, FileResult, FileTime, S_IFMT,
    SetTime,
};
use bafs_proto::ids::{Epoch, HandleId, InodeNo};
use bafs_proto::limits::NAME_BYTES_MAX;
use bytes::Bytes;
use nix::libc;

use super::delegated_directories::DirectoryStream;
use super::early_listings::{EarlyListing, PageRequest};
use super::inflight_queries::InflightQueries;
use super::inode_map::{InodeMap, OpenParameters};
use super::metadata_cache::MetadataCache;
use super::operation_log::{LogEntry, NO_SESSION, OperationLog, Space};
use super::sibling_read_ahead::SiblingReadAhead;
use super::small_files::{FilesToRead, SmallFiles};

const SET_ID_BITS: u32 = 0o6000;
const SET_GID_BIT: u32 = 0o2000;

/// What the server itself must be allowed to change names in a directory, and to open files: to the
/// kernel it is their owner, unless it may do all.
const OWNER_WRITE_EXECUTE: u32 = 0o300;
const OWNER_READ_WRITE: u32 = 0o600;

/// Blocks that a new name may cost its directory, and a new directory itself.
pub(super) const BLOCKS_PER_NAME: u64 = 4;

/// Blocks that a write may cost beyond its own bytes: at both ends, and for the file's index.
const BLOCKS_PER_WRITE: u64 = 4;

/// Links of a directory from which the server decides whether there may be more.
const LINKS_MAX: u32 = 30_000;

/// The kernel asks for this attribute before each write.
pub(super) const CAPABILITY_XATTR: &[u8] = b"security.capability";

/// Where a file may end that surely fits the server's file system.
const FILE_END_MAX: u64 = 1 << 40;

/// What an operation makes, which files it is about, and what it may cost.
type OperationEffect = (
    (Option<InodeNo>, Option<HandleId>),
    [Option<InodeNo>; 3],
    Space,
);

/// How an operation is answered.
#[derive(Debug)]
pub enum Decision {
    /// This is the answer, and all that the server must be told is in the log.
    Answer(FileResult),
    /// These are the data of a read. The files should be read meanwhile.
    AnswerRead(Bytes, FilesToRead),
    /// The files should be read whole first; otherwise the server answers.
    ReadFiles(FilesToRead),
    /// The file is being read ahead, or the directory is being listed.
    AwaitFetch,
    /// The server answers, once it has run what is before this position of the log.
    QueryAfter(u64),
    /// The names of the directory should be known first; otherwise the server answers.
    ListDirectory(InodeNo),
    /// The attributes of a file that a listing shows must be asked for first.
    LearnAttr(InodeNo),
    /// The session must be given what the operation names first.
    ProvideObjects,
}

/// State by which the agent of a volume's writer decides what it may answer by itself.
#[derive(Debug, Default)]
pub struct Delegation {
    /// What is known of files and names.
    pub metadata: MetadataCache,
    /// What the server has not run yet.
    pub log: OperationLog,
    /// Files that were read ahead, or may be.
    pub(super) small_files: SmallFiles,
    /// Free space when the server last told it; what is in the log may still come off.
    pub(super) free_space: Space,
    /// What operations that the server is asked itself may take at this moment.
    pub(super) query_space: Space,
    /// Counts those of them that took space and have been answered.
    pub(super) query_count: u64,
    /// What the server is asked itself.
    pub(super) queries: InflightQueries,
    /// Callers to whom the server gives what they make.
    pub(super) owning_callers: BTreeSet<(u32, u32)>,
    /// How a new file and a new directory look.
    pub(super) new_file_attr: Option<Attr>,
    pub(super) new_directory_attr: Option<Attr>,
    /// Directories that programs read without the server.
    pub(super) early_listings: BTreeMap<HandleId, EarlyListing>,
    /// How many there have been.
    pub(super) early_listing_count: u64,
    /// Directories that were listed ahead, or may be,
    pub(super) sibling_directories: SiblingReadAhead,
    /// and those to list now.
    pub(super) directories_to_list: Vec<InodeNo>,
    /// Files of which they have dropped a reference.
    pub(super) dropped_references: Vec<InodeNo>,
    /// Directories that programs read from the start, as far as they have come.
    pub(super) streams: BTreeMap<HandleId, DirectoryStream>,
}

/// An operation and all that a decision about it needs.
#[derive(Debug, Clone, Copy)]
pub struct DelegatedRequest<'a> {
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
    /// Answers an operation if that is safe. With `may_fetch` it may ask for a listing, or for
    /// whole files, first.
    pub fn decide(
        &mut self,
        inodes: &mut InodeMap,
        request: DelegatedRequest<'_>,
        may_fetch: bool,
    ) -> Decision {
        match request.op {
            FileOp::Lookup { parent, name } => self.lookup(inodes, *parent, name, may_fetch),
            FileOp::GetAttr { ino, .. } => match self.metadata.attr(*ino) {
                Some(attr) => Decision::Answer(Ok(FileReply::Attr(attr))),
                None => {
                    self.append_pending_times(inodes, request, *ino);
                    self.query_about(&[*ino])
                }
            },
            FileOp::Release { handle } => self.release_early(inodes, request, *handle),
            FileOp::GetXattr { ino, name }
                if name == CAPABILITY_XATTR && self.metadata.has_no_capabilities(*ino) =>
            {
                Decision::Answer(Err(Errno(libc::ENODATA)))
            }
            FileOp::ReadLink { ino } | FileOp::GetXattr { ino, .. } | FileOp::ListXattr { ino } => {
                self.query_about(&[*ino])
            }
            FileOp::OpenDirectory { ino } => self.open_directory(inodes, *ino, may_fetch),
            FileOp::ReleaseDirectory { handle } if self.close_early_listing(*handle) => {
                Decision::Answer(Ok(FileReply::Done))
            }
            FileOp::ReleaseDirectory { handle } => {
                self.end_stream(*handle);
                self.query_after_log()
            }
            FileOp::Read {
                handle,
                offset,
                length,
            } => self.read(inodes, *handle, (*offset, *length), may_fetch),
            FileOp::ReadDirectory {
                handle,
                cookie,
                bytes_max,
                plus,
            } => {
                let page = PageRequest {
                    handle: *handle,
                    cookie: *cookie,
                    bytes_max: *bytes_max,
                    plus: *plus,
                };
                let early = self.read_early_listing(inodes, page, may_fetch);
                early.unwrap_or_else(|| match inodes.open_parameters(*handle) {
                    // Attributes of files are true when all that was written has run.
                    Some(OpenParameters { ino, .. }) if !*plus => self.query_about(&[ino]),
                    _ => self.query_after_log(),
                })
            }
            _ => {
                let changed = self.change_early(inodes, request);
                changed.unwrap_or_else(|| self.query_after_log())
            }
        }
    }

    /// Answers a change, or what opens a file, if that is safe before the server has it.
    fn change_early(
        &mut self,
        inodes: &mut InodeMap,
        request: DelegatedRequest<'_>,
    ) -> Option<Decision> {
        match request.op {
            FileOp::Create {
                parent,
                name,
                mode,
                flags,
            } => self.create(inodes, request, (*parent, name), *mode, Some(*flags)),
            FileOp::MakeDirectory { parent, name, mode } => {
                self.create(inodes, request, (*parent, name), *mode, None)
            }
            FileOp::Unlink { parent, name } => self.unlink(inodes, request, *parent, name),
            FileOp::RemoveDirectory { parent, name } => {
                self.remove_directory(inodes, request, *parent, name)
            }
            FileOp::Rename {
                parent,
                name,
                new_parent,
                new_name,
                flags,
            } => {
                let names = ((*parent, name), (*new_parent, new_name));
                self.rename_early(inodes, request, names, *flags)
            }
            FileOp::SetAttr { ino, change, .. } => self.set_attr(inodes, request, *ino, change),
            FileOp::Write {
                handle,
                offset,
                append,
                ..
            } => self.write(inodes, request, *handle, (*offset, *append)),
            FileOp::Open { ino, flags } => self.open_early(inodes, request, *ino, *flags),
            _ => None,
        }
    }

    pub(super) fn query_after_log(&self) -> Decision {
        Decision::QueryAfter(self.log.end_position())
    }

    /// The server is asked as soon as it knows all about these files.
    pub(super) fn query_about(&self, files: &[InodeNo]) -> Decision {
        let busy = files
            .iter()
            .filter_map(|ino| self.log.last_position_of(*ino))
            .max();
        Decision::QueryAfter(busy.unwrap_or(0))
    }

    /// Whether an operation on this name is sure to find its directory as it is known here, and the
    /// name as it was before the log.
    pub(super) fn unchanged_directory(&self, parent: InodeNo, name: &ByName) -> Option<Attr> {
        let is_as_before = self.log.pending_name(parent, name).is_none();
        self.writable_directory(parent, name)
            .filter(|_| is_as_before)
    }

    /// The same, whatever the log does to the name.
    pub(super) fn writable_directory(&self, parent: InodeNo, name: &ByName) -> Option<Attr> {
        let is_fit = name.len() <= NAME_BYTES_MAX && !matches!(&name[..], b"" | b"." | b"..");
        let attr = self
            .metadata
            .approximate_attr(parent)
            .filter(Attr::is_directory)?;
        let is_alive = attr.nlink >= 2 && attr.nlink < LINKS_MAX;
        let is_open_to_server = attr.mode & OWNER_WRITE_EXECUTE == OWNER_WRITE_EXECUTE;
        (is_fit && is_alive && is_open_to_server).then_some(attr)
    }

    /// A new file, open with these flags, or a new directory.
    fn create(
        &mut self,
        inodes: &mut InodeMap,
        request: DelegatedRequest<'_>,
        (parent, name): (InodeNo, &ByName),
        mode: u32,
        flags: Option<i32>,
    ) -> Option<Decision> {
        let Caller { uid, gid, .. } = request.caller;
        let directory = self.unchanged_directory(parent, name)?;
        let is_sure = self.metadata.has_name(parent, name) == Some(false)
            && directory.mode & SET_GID_BIT == 0
            && self.owning_callers.contains(&(uid, gid));
        let (pattern, kept) = match flags {
            Some(_) => (self.new_file_attr?, 0o7777),
            None => (self.new_directory_attr?, 0o1777),
        };
        let cost = Space {
            bytes: BLOCKS_PER_NAME * clamped_block_bytes(&directory),
            files: 1,
        };
        let opens = flags.is_none() || inodes.has_early_handle();
        if !is_sure || !opens || !self.has_space(cost) || mode & SET_ID_BITS != 0 {
            return None;
        }
        let Ok(translated) = inodes.translate(request.op) else {
            return Some(Decision::ProvideObjects);
        };
        let ino = inodes.create_inode(parent, name);
        let attr = Attr {
            ino,
            mode: pattern.mode & S_IFMT | mode & kept,
            uid,
            gid,
            atime: request.now,
            mtime: request.now,
            ctime: request.now,
            btime_ns: 0,
            ..pattern
        };
        self.metadata.record_creation(&attr);
        self.metadata.add_name(parent, name);
        let is_directory = flags.is_none();
        self.metadata.update_attr(parent, |about| {
            (about.mtime, about.ctime) = (request.now, request.now);
            about.nlink += u32::from(is_directory);
        });
        let opened = flags.map(|flags| {
            let opening = OpenParameters {
                ino,
                flags,
                is_directory: false,
            };
            inodes.open_numbered(opening)
        });
        let made = (Some(ino), opened.map(|(_, given)| given));
        self.append(
            inodes,
            request,
            translated,
            (made, [Some(parent), Some(ino), None], cost),
        );
        Some(Decision::Answer(Ok(match opened {
            Some((handle, _)) => FileReply::Opened { handle, attr },
            None => FileReply::Attr(attr),
        })))
    }

    fn unlink(
        &mut self,
        inodes: &mut InodeMap,
        request: DelegatedRequest<'_>,
        parent: InodeNo,
        name: &ByName,
    ) -> Option<Decision> {
        self.unchanged_directory(parent, name)?;
        let ino = inodes.inode_by_name(parent, name)?;
        let attr = self.metadata.approximate_attr(ino)?;
        let is_sure = self.metadata.has_name(parent, name) != Some(false);
        // Once it has no name nobody could find it for those who need its number, nor open it for
        // those who think that they have.
        let is_held = inodes.is_present(ino) && inodes.missing_handle(ino).is_none();
        if !is_sure || attr.is_directory() || !is_held {
            return None;
        }
        let Ok(translated) = inodes.translate(request.op) else {
            return Some(Decision::ProvideObjects);
        };
        self.metadata.remove_name(parent, name);
        self.metadata.update_attr(parent, |about| {
            (about.mtime, about.ctime) = (request.now, request.now);
        });
        self.metadata.update_attr(ino, |about| {
            about.nlink = about.nlink.saturating_sub(1);
            about.ctime = request.now;
        });
        let about = [Some(parent), Some(ino), None];
        self.append(
            inodes,
            request,
            translated,
            ((None, None), about, Space::default()),
        );
        Some(Decision::Answer(Ok(FileReply::Done)))
    }

    fn set_attr(
        &mut self,
        inodes: &mut InodeMap,
        request: DelegatedRequest<'_>,
        ino: InodeNo,
        change: &AttrChange,
    ) -> Option<Decision> {
        let attr = self.metadata.attr(ino)?;
        let is_plain = attr.is_regular() || attr.is_directory();
        let bits = change.mode.unwrap_or(0) | attr.mode;
        let touches_more = change.size.is_some() || change.uid.is_some() || change.gid.is_some();
        if !is_plain || touches_more || bits & SET_ID_BITS != 0 || attr.nlink == 0 {
            return None;
        }
        if can_block_opens(change) && inodes.missing_handle(ino).is_some() {
            return None;
        }
        let settled = |time: Option<SetTime>| {
            time.map(|time| match time {
                SetTime::Now => request.now,
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
        let Ok(translated) = inodes.translate(&op) else {
            return Some(Decision::ProvideObjects);
        };
        if mtime.is_some() {
            self.metadata.clear_pending_times(ino);
        }
        self.metadata.update_attr(ino, |about| {
            about.mode = change
                .mode
                .map_or(about.mode, |mode| about.mode & S_IFMT | mode);
            about.atime = atime.unwrap_or(about.atime);
            about.mtime = mtime.unwrap_or(about.mtime);
            about.ctime = request.now;
        });
        let asked = DelegatedRequest { op: &op, ..request };
        let about = [Some(ino), None, None];
        self.append(
            inodes,
            asked,
            translated,
            ((None, None), about, Space::default()),
        );
        let attr = self.metadata.attr(ino)?;
        Some(Decision::Answer(Ok(FileReply::Attr(attr))))
    }

    fn write(
        &mut self,
        inodes: &mut InodeMap,
        request: DelegatedRequest<'_>,
        handle: HandleId,
        (offset, append): (u64, bool),
    ) -> Option<Decision> {
        let OpenParameters { ino, flags, .. } = inodes.open_parameters(handle)?;
        let attr = self.metadata.approximate_attr(ino)?;
        let offset = if append {
            self.metadata.attr(ino)?.size
        } else {
            offset
        };
        let length = request.data.len() as u64;
        let end = offset
            .checked_add(length)
            .filter(|end| *end < FILE_END_MAX)?;
        let is_sure = attr.is_regular() && attr.mode & SET_ID_BITS == 0 && end > offset;
        let block_bytes = clamped_block_bytes(&attr);
        let cost = Space {
            bytes: length.next_multiple_of(block_bytes) + BLOCKS_PER_WRITE * block_bytes,
            files: 0,
        };
        if !is_sure || flags & (libc::O_SYNC | libc::O_DSYNC) != 0 || !self.has_space(cost) {
            return None;
        }
        let FileOp::Write { data, .. } = request.op else {
            return None;
        };
        let op = FileOp::Write {
            handle,
            offset,
            data: *data,
            append: false,
        };
        let Ok(translated) = inodes.translate(&op) else {
            return Some(Decision::ProvideObjects);
        };
        self.metadata.record_write(ino, offset, length, request.now);
        let asked = DelegatedRequest { op: &op, ..request };
        self.append(
            inodes,
            asked,
            translated,
            ((None, None), [Some(ino), None, None], cost),
        );
        Some(Decision::Answer(Ok(FileReply::Written { length })))
    }

    pub(super) fn append(
        &mut self,
        inodes: &InodeMap,
        request: DelegatedRequest<'_>,
        translated: FileOp,
        effect: OperationEffect,
    ) {
        self.append_translated((inodes.epoch(), translated), request, effect);
    }

    /// Appends what the present session lacks something for: it is given that when it is sent.
    pub(super) fn append_untranslated(
        &mut self,
        request: DelegatedRequest<'_>,
        effect: OperationEffect,
    ) {
        self.append_translated((NO_SESSION, request.op.clone()), request, effect);
    }

    fn append_translated(
        &mut self,
        translated: (Epoch, FileOp),
        request: DelegatedRequest<'_>,
        (made, about, cost): OperationEffect,
    ) {
        for ino in about.iter().flatten() {
            self.queries.record_change(*ino);
            self.small_files.discard(*ino);
        }
        self.log.append(LogEntry {
            caller: request.caller,
            op: request.op.clone(),
            translated,
            data: match request.op {
                // Fresh memory would cost more than the copy.
                FileOp::Write { .. } => Buffer::from_slice(request.data).freeze(),
                _ => Bytes::new(),
            },
            created: made,
            files: about,
            cost,
        });
    }

    /// The oldest entry of the log has run.
    pub fn acknowledge(&mut self, inodes: &mut InodeMap, reply: Option<&FileReply>) {
        let Some(entry) = self.log.acknowledge() else {
            return;
        };
        if let ((Some(ino), _), Some(FileReply::Attr(attr) | FileReply::Opened { attr, .. })) =
            (entry.created, reply)
        {
            inodes.set_birth(ino, attr.btime_ns);
        }
        match &entry.op {
            FileOp::Unlink { parent, name } | FileOp::RemoveDirectory { parent, name } => {
                inodes.remove_name(*parent, name)
            }
            FileOp::Rename {
                parent,
                name,
                new_parent,
                new_name,
                ..
            } => inodes.rename((*parent, name), (*new_parent, new_name), false),
            FileOp::Release { handle } => inodes.close(*handle),
            _ => {}
        }
        self.spend_space(entry.cost);
    }
}

/// Whether a file may be closed to the server by a change of its permission bits, so that what
/// programs have open must be open there before.
pub fn can_block_opens(change: &AttrChange) -> bool {
    change
        .mode
        .is_some_and(|mode| mode & OWNER_READ_WRITE != OWNER_READ_WRITE)
}

pub(super) fn clamped_block_bytes(attr: &Attr) -> u64 {
    u64::from(attr.block_size).clamp(4096, 1 << 20)
}
