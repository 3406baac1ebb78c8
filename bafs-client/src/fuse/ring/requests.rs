//! Requests in the kernel's own form (`fuse.h`), by a ring or by the device, each as a call of its
//! handler. Takes no decision of its own.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use bafs_proto::file_op::{AttrChange, Caller, FileTime, SetTime};
use bafs_proto::ids;
use fuser::{Errno, FileHandle, INodeNo, OpenFlags, RenameFlags, WriteFlags};

use super::super::file_system::VolumeFileSystem;
use super::super::handlers::FilePosition;
use super::super::operations;
use super::super::reply_traits::ErrorReply;
use super::kernel_reply::{DirectoryListing, KernelReply};
use crate::kernel::HEADER_BYTES;

/// Bytes of the structure that comes first in most requests, and where it is in the header.
const FIELDS_BYTES: usize = 128;
const FIELDS_OFFSET: usize = 128;

/// Where `struct fuse_uring_ent_in_out` is in the header: how to name the request in the answer,
/// and how long its payload is.
const COMMIT_OFFSET: usize = 264;
pub(super) const PAYLOAD_OFFSET: usize = 272;

/// `enum fuse_opcode`, as far as it is answered.
mod opcode {
    pub(super) const LOOKUP: u32 = 1;
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const SETATTR: u32 = 4;
    pub(super) const READLINK: u32 = 5;
    pub(super) const SYMLINK: u32 = 6;
    pub(super) const MKNOD: u32 = 8;
    pub(super) const MKDIR: u32 = 9;
    pub(super) const UNLINK: u32 = 10;
    pub(super) const RMDIR: u32 = 11;
    pub(super) const RENAME: u32 = 12;
    pub(super) const LINK: u32 = 13;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const SETXATTR: u32 = 21;
    pub(super) const GETXATTR: u32 = 22;
    pub(super) const LISTXATTR: u32 = 23;
    pub(super) const REMOVEXATTR: u32 = 24;
    pub(super) const FLUSH: u32 = 25;
    pub(super) const OPENDIR: u32 = 27;
    pub(super) const READDIR: u32 = 28;
    pub(super) const RELEASEDIR: u32 = 29;
    pub(super) const FSYNCDIR: u32 = 30;
    pub(super) const CREATE: u32 = 35;
    pub(super) const IOCTL: u32 = 39;
    pub(super) const BATCH_FORGET: u32 = 42;
    pub(super) const FALLOCATE: u32 = 43;
    pub(super) const READDIRPLUS: u32 = 44;
    pub(super) const RENAME2: u32 = 45;
    pub(super) const LSEEK: u32 = 46;
    pub(super) const COPY_FILE_RANGE: u32 = 47;
}

/// Bytes of `struct fuse_in_header`.
const DEVICE_HEADER_BYTES: usize = 40;

/// Bytes of the structure that a request begins with, by its device; `FUSE_SETXATTR_EXT` is never
/// agreed to.
fn structure_bytes(opcode: u32) -> usize {
    match opcode {
        opcode::FORGET
        | opcode::MKDIR
        | opcode::RENAME
        | opcode::LINK
        | opcode::OPEN
        | opcode::OPENDIR
        | opcode::SETXATTR
        | opcode::GETXATTR
        | opcode::LISTXATTR
        | opcode::BATCH_FORGET => 8,
        opcode::GETATTR
        | opcode::MKNOD
        | opcode::FSYNC
        | opcode::FSYNCDIR
        | opcode::CREATE
        | opcode::RENAME2 => 16,
        opcode::RELEASE | opcode::RELEASEDIR | opcode::FLUSH | opcode::LSEEK => 24,
        opcode::FALLOCATE => 32,
        opcode::READ | opcode::WRITE | opcode::READDIR | opcode::READDIRPLUS => 40,
        opcode::COPY_FILE_RANGE => 56,
        opcode::SETATTR => 88,
        // Names alone, nothing, or refused whatever it says.
        _ => 0,
    }
}

/// What the kernel forgets by a request, and how often; `None` for any other request. It wants no
/// answer.
pub(in super::super) fn parse_forgets(
    head: &FuseRequestHead,
    payload: &[u8],
) -> Option<Vec<(ids::InodeNo, u64)>> {
    match head.opcode {
        opcode::FORGET => Some(vec![(ids::InodeNo(head.ino.0), head.u64(0))]),
        opcode::BATCH_FORGET => {
            let all = payload.chunks_exact(16).take(head.u32(0) as usize);
            Some(
                all.map(|one| (ids::InodeNo(u64_at(one, 0)), u64_at(one, 8)))
                    .collect(),
            )
        }
        _ => None,
    }
}

/// Bits of `fuse_setattr_in.valid`.
mod valid {
    pub(super) const MODE: u32 = 1 << 0;
    pub(super) const UID: u32 = 1 << 1;
    pub(super) const GID: u32 = 1 << 2;
    pub(super) const SIZE: u32 = 1 << 3;
    pub(super) const ATIME: u32 = 1 << 4;
    pub(super) const MTIME: u32 = 1 << 5;
    pub(super) const HANDLE: u32 = 1 << 6;
    pub(super) const ATIME_NOW: u32 = 1 << 7;
    pub(super) const MTIME_NOW: u32 = 1 << 8;
}

/// `FUSE_GETATTR_FH`: the request names an open file.
const GETATTR_HANDLE: u32 = 1;

/// `FUSE_FSYNC_FDATASYNC`.
const FSYNC_DATA_ONLY: u32 = 1;

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let field = bytes.get(at..).and_then(|rest| rest.first_chunk());
    field.map_or(0, |field| u32::from_ne_bytes(*field))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let field = bytes.get(at..).and_then(|rest| rest.first_chunk());
    field.map_or(0, |field| u64::from_ne_bytes(*field))
}

/// What surrounds a request.
#[derive(Debug)]
pub(in super::super) struct FuseRequestHead {
    opcode: u32,
    pub(in super::super) unique: u64,
    /// By which number the kernel knows the request when it is answered.
    pub(super) commit_id: u64,
    pub(super) payload_bytes: usize,
    ino: INodeNo,
    caller: Caller,
    fields: [u8; FIELDS_BYTES],
}

impl FuseRequestHead {
    pub(super) fn parse_ring(header: &[u8; HEADER_BYTES]) -> Self {
        let mut fields = [0; FIELDS_BYTES];
        fields.copy_from_slice(&header[FIELDS_OFFSET..FIELDS_OFFSET + FIELDS_BYTES]);
        Self {
            opcode: u32_at(header, 4),
            unique: u64_at(header, 8),
            commit_id: u64_at(header, COMMIT_OFFSET),
            payload_bytes: u32_at(header, PAYLOAD_OFFSET) as usize,
            ino: INodeNo(u64_at(header, 16)),
            caller: Caller {
                uid: u32_at(header, 24),
                gid: u32_at(header, 28),
                pid: u32_at(header, 32),
            },
            fields,
        }
    }

    /// Takes a request apart as the kernel writes it by its device: `struct fuse_in_header`, the
    /// structure of the request, and what follows.
    pub(in super::super) fn parse_device(request: &[u8]) -> Option<(Self, &[u8])> {
        let (header, rest) = request.split_at_checked(DEVICE_HEADER_BYTES)?;
        let opcode = u32_at(header, 4);
        let (structure, payload) = rest.split_at_checked(structure_bytes(opcode))?;
        let mut fields = [0; FIELDS_BYTES];
        fields[..structure.len()].copy_from_slice(structure);
        let unique = u64_at(header, 8);
        let head = Self {
            opcode,
            unique,
            commit_id: unique,
            payload_bytes: payload.len(),
            ino: INodeNo(u64_at(header, 16)),
            caller: Caller {
                uid: u32_at(header, 24),
                gid: u32_at(header, 28),
                pid: u32_at(header, 32),
            },
            fields,
        };
        Some((head, payload))
    }

    /// Whether the answer is data for which the request itself needs no room.
    pub(super) fn is_data_request(&self) -> bool {
        self.opcode == opcode::READ
    }

    fn u32(&self, at: usize) -> u32 {
        u32_at(&self.fields, at)
    }

    fn u64(&self, at: usize) -> u64 {
        u64_at(&self.fields, at)
    }

    /// The open file that most structures begin with.
    fn handle(&self) -> FileHandle {
        FileHandle(self.u64(0))
    }

    /// The open file, and the offset that follows it.
    fn file_position(&self) -> FilePosition {
        FilePosition {
            ino: self.ino,
            handle: self.handle(),
            offset: self.u64(8),
        }
    }
}

/// Takes a name off the front, with the zero that ends it.
fn take_name<'a>(payload: &mut &'a [u8]) -> &'a OsStr {
    let whole = *payload;
    let end = whole.iter().position(|byte| *byte == 0);
    let end = end.unwrap_or(whole.len());
    *payload = whole.get(end + 1..).unwrap_or_default();
    OsStr::from_bytes(&whole[..end])
}

/// Has a request handled: `payload` is what follows its structure.
pub(in super::super) fn dispatch(
    bridge: &VolumeFileSystem,
    head: &FuseRequestHead,
    payload: &[u8],
    answer: KernelReply,
) {
    match head.opcode {
        opcode::LOOKUP
        | opcode::SYMLINK
        | opcode::MKNOD
        | opcode::MKDIR
        | opcode::UNLINK
        | opcode::RMDIR
        | opcode::RENAME
        | opcode::RENAME2
        | opcode::LINK
        | opcode::CREATE => dispatch_name_request(bridge, head, payload, answer),
        opcode::GETATTR
        | opcode::SETATTR
        | opcode::READLINK
        | opcode::STATFS
        | opcode::SETXATTR
        | opcode::GETXATTR
        | opcode::LISTXATTR
        | opcode::REMOVEXATTR => dispatch_attribute_request(bridge, head, payload, answer),
        opcode::OPENDIR
        | opcode::READDIR
        | opcode::READDIRPLUS
        | opcode::RELEASEDIR
        | opcode::FSYNCDIR => dispatch_directory_request(bridge, head, answer),
        _ => dispatch_file_request(bridge, head, payload, answer),
    }
}

fn dispatch_name_request(
    bridge: &VolumeFileSystem,
    head: &FuseRequestHead,
    mut payload: &[u8],
    answer: KernelReply,
) {
    let (caller, ino) = (head.caller, head.ino);
    let at = take_name(&mut payload);
    let op = match head.opcode {
        opcode::LOOKUP => operations::lookup(ino, at),
        opcode::SYMLINK => operations::make_symlink(ino, at, Path::new(take_name(&mut payload))),
        opcode::MKNOD => operations::make_node(ino, at, head.u32(0), head.u32(4)),
        opcode::MKDIR => operations::make_directory(ino, at, head.u32(0)),
        opcode::LINK => operations::make_link(INodeNo(head.u64(0)), ino, at),
        opcode::CREATE => {
            let (flags, mode) = (head.u32(0) as i32, head.u32(4));
            return bridge.create_file(caller, (ino, at), mode, flags, answer);
        }
        opcode::UNLINK => {
            return bridge.run_empty_operation(caller, operations::unlink(ino, at), answer);
        }
        opcode::RMDIR => {
            return bridge.run_empty_operation(
                caller,
                operations::remove_directory(ino, at),
                answer,
            );
        }
        opcode::RENAME | opcode::RENAME2 => {
            let flags = match head.opcode {
                opcode::RENAME2 => RenameFlags::from_bits_retain(head.u32(8)),
                _ => RenameFlags::empty(),
            };
            let to = (INodeNo(head.u64(0)), take_name(&mut payload));
            return bridge.run_empty_operation(
                caller,
                operations::rename((ino, at), to, flags),
                answer,
            );
        }
        _ => return answer.send_error(Errno::ENOSYS),
    };
    bridge.run_entry_operation(caller, op, answer);
}

fn dispatch_attribute_request(
    bridge: &VolumeFileSystem,
    head: &FuseRequestHead,
    mut payload: &[u8],
    answer: KernelReply,
) {
    let (caller, ino) = (head.caller, head.ino);
    match head.opcode {
        opcode::GETATTR => {
            let handle = (head.u32(0) & GETATTR_HANDLE != 0).then(|| FileHandle(head.u64(8)));
            bridge.get_attr(caller, ino, handle, answer);
        }
        opcode::SETATTR => {
            let handle = (head.u32(0) & valid::HANDLE != 0).then(|| FileHandle(head.u64(8)));
            bridge.set_attr(caller, ino, handle, attr_change(head), answer);
        }
        opcode::READLINK => bridge.read_link(caller, ino, answer),
        opcode::SETXATTR => {
            let (size, flags) = (head.u32(0) as usize, head.u32(4) as i32);
            let at = take_name(&mut payload);
            let value = payload.get(..size).unwrap_or(payload);
            bridge.run_empty_operation(
                caller,
                operations::set_xattr(ino, at, value, flags),
                answer,
            );
        }
        opcode::GETXATTR => {
            let op = operations::get_xattr(ino, take_name(&mut payload));
            bridge.read_xattr(caller, op, head.u32(0), answer);
        }
        opcode::LISTXATTR => {
            bridge.read_xattr(caller, operations::list_xattr(ino), head.u32(0), answer);
        }
        opcode::REMOVEXATTR => {
            let op = operations::remove_xattr(ino, take_name(&mut payload));
            bridge.run_empty_operation(caller, op, answer);
        }
        opcode::STATFS => bridge.stat_file_system(caller, answer),
        _ => answer.send_error(Errno::ENOSYS),
    }
}

/// `struct fuse_setattr_in`.
fn attr_change(head: &FuseRequestHead) -> AttrChange {
    let valid = head.u32(0);
    let given = |bit: u32, at: usize| (valid & bit != 0).then(|| head.u32(at));
    let time = |bit: u32, now: u32, seconds: usize, nanoseconds: usize| {
        (valid & bit != 0).then(|| match valid & now {
            0 => SetTime::At(FileTime {
                seconds: head.u64(seconds) as i64,
                nanoseconds: head.u32(nanoseconds),
            }),
            _ => SetTime::Now,
        })
    };
    AttrChange {
        mode: given(valid::MODE, 68),
        uid: given(valid::UID, 76),
        gid: given(valid::GID, 80),
        size: (valid & valid::SIZE != 0).then(|| head.u64(16)),
        atime: time(valid::ATIME, valid::ATIME_NOW, 32, 56),
        mtime: time(valid::MTIME, valid::MTIME_NOW, 40, 60),
    }
}

fn dispatch_directory_request(
    bridge: &VolumeFileSystem,
    head: &FuseRequestHead,
    answer: KernelReply,
) {
    let (caller, ino) = (head.caller, head.ino);
    match head.opcode {
        opcode::OPENDIR => bridge.open_directory(caller, ino, answer),
        opcode::READDIR => {
            let listing = DirectoryListing::new(answer, head.u32(16) as usize);
            bridge.list_directory(caller, head.file_position(), listing);
        }
        opcode::READDIRPLUS => {
            let listing = DirectoryListing::new(answer, head.u32(16) as usize);
            bridge.list_directory_plus(caller, head.file_position(), listing);
        }
        opcode::RELEASEDIR => bridge.release_directory(caller, (ino, head.handle()), answer),
        opcode::FSYNCDIR => {
            bridge.run_empty_operation(caller, operations::sync_directory(ino), answer)
        }
        _ => answer.send_error(Errno::ENOSYS),
    }
}

fn dispatch_file_request(
    bridge: &VolumeFileSystem,
    head: &FuseRequestHead,
    payload: &[u8],
    answer: KernelReply,
) {
    let (caller, ino) = (head.caller, head.ino);
    match head.opcode {
        opcode::OPEN => {
            let flags = OpenFlags(head.u32(0) as i32);
            bridge.open_file(caller, ino, flags, answer);
        }
        opcode::READ => {
            let flags = OpenFlags(head.u32(32) as i32);
            bridge.read_file(caller, head.file_position(), (head.u32(16), flags), answer);
        }
        opcode::WRITE => {
            let data = payload.get(..head.u32(16) as usize).unwrap_or(payload);
            let write_flags = WriteFlags::from_bits_retain(head.u32(20));
            let flags = (write_flags, OpenFlags(head.u32(32) as i32));
            bridge.write_file(caller, head.file_position(), data, flags, answer);
        }
        opcode::RELEASE => bridge.release_file(caller, ino, head.handle(), answer),
        opcode::FLUSH => bridge.close_file(ino, answer),
        opcode::FSYNC => {
            let data_only = head.u32(8) & FSYNC_DATA_ONLY != 0;
            bridge.sync_file(caller, (ino, head.handle()), data_only, answer);
        }
        opcode::FALLOCATE => {
            let (length, mode) = (head.u64(16), head.u32(24) as i32);
            bridge.allocate_range(caller, head.file_position(), length, mode, answer);
        }
        opcode::LSEEK => {
            let (offset, whence) = (head.u64(8) as i64, head.u32(16) as i32);
            bridge.seek_file(caller, (ino, head.handle()), offset, whence, answer);
        }
        opcode::COPY_FILE_RANGE => {
            let target = FilePosition {
                ino: INodeNo(head.u64(16)),
                handle: FileHandle(head.u64(24)),
                offset: head.u64(32),
            };
            bridge.copy_range(caller, head.file_position(), target, head.u64(40), answer);
        }
        // Many programs ask any file whether it is a terminal.
        opcode::IOCTL => answer.send_error(Errno::ENOTTY),
        // The kernel then does without.
        _ => answer.send_error(Errno::ENOSYS),
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};
    use std::sync::Arc;

    use super::super::super::file_system::ReaderMode;
    use super::super::outbox::{Outbox, OutboxCommand, ReadyReply};
    use super::*;
    use crate::kernel::RingBuffers;
    use crate::sandbox::Access;
    use crate::tree::{LocalTree, Tree};
    use crate::usage::VolumeUsage;
    use crate::volume::{Ownership, Volume, VolumeMode};
    use crate::volume_health::VolumeHealth;

    const ROOT: u64 = 1;

    /// A volume of 1 MB, and what answers its requests.
    struct RequestFixture {
        bridge: VolumeFileSystem,
        outbox: Arc<Outbox>,
        _store: tempfile::TempDir,
    }

    impl RequestFixture {
        fn new() -> Self {
            let store = tempfile::tempdir().unwrap();
            let limit = bafs_tree::Limit {
                bytes: 1_000_000,
                files: 100,
            };
            let tree = bafs_tree::Tree::open(store.path(), Some(limit)).unwrap();
            let session = bafs_tree::Session::new(tree, true);
            let run =
                move |caller, op: &_, data: &[u8], out: &mut _| session.run(caller, op, data, out);
            let (losses, _) = tokio::sync::mpsc::unbounded_channel();
            let volume = Volume::new(
                "v",
                Tree::Local(LocalTree::new(run)),
                VolumeMode::scratch(Access::ReadWrite),
                Ownership::AsStored,
                VolumeHealth::new("v", losses),
                VolumeUsage::new(),
            );
            let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
            Self {
                bridge: VolumeFileSystem::new(Arc::new(volume), ReaderMode::OwnThreads),
                outbox: Arc::new(Outbox::new(waker)),
                _store: store,
            }
        }

        /// The one answer to a request.
        fn ask(&self, header: &[u8; HEADER_BYTES], payload: &[u8]) -> ReadyReply {
            let head = FuseRequestHead::parse_ring(header);
            let buffers = head.is_data_request().then(|| RingBuffers::new(8 << 10));
            let answer = KernelReply::new(Arc::clone(&self.outbox), 3, buffers);
            dispatch(&self.bridge, &head, payload, answer);
            match self.outbox.take_command() {
                Some(OutboxCommand::Commit(mut all)) if all.len() == 1 => all.remove(0),
                other => panic!("{head:?} is answered by {other:?}"),
            }
        }

        /// The answer to a request that must succeed.
        fn expect_body(&self, header: &[u8; HEADER_BYTES], payload: &[u8]) -> Vec<u8> {
            let answered = self.ask(header, payload);
            assert_eq!((answered.error, answered.index), (0, 3));
            match answered.in_place {
                0 => answered.body,
                count => answered.buffers.unwrap().payload()[..count].to_vec(),
            }
        }
    }

    /// A request as the kernel writes it, with the first fields of its structure.
    fn header(opcode: u32, ino: u64, fields: &[u8]) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[4..8].copy_from_slice(&opcode.to_ne_bytes());
        header[16..24].copy_from_slice(&ino.to_ne_bytes());
        header[FIELDS_OFFSET..FIELDS_OFFSET + fields.len()].copy_from_slice(fields);
        header
    }

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    /// Creates `file` with the content `hello`; returns its inode and handle.
    fn create_hello_file(served: &RequestFixture) -> (u64, u64) {
        let create = words(&[0o2, 0o644, 0, 0]);
        let made = served.expect_body(&header(opcode::CREATE, ROOT, &create), b"file\0");
        assert_eq!(made.len(), 128 + 16, "an entry and an open file");
        let (ino, handle) = (u64_at(&made, 0), u64_at(&made, 128));
        assert_eq!(
            (u64_at(&made, 40), u32_at(&made, 40 + 60)),
            (ino, 0o100_644)
        );
        let write = header(opcode::WRITE, ino, &position(handle, 5));
        let wrote = served.expect_body(&write, b"hello, and no more");
        assert_eq!((wrote.len(), u32_at(&wrote, 0)), (8, 5));
        (ino, handle)
    }

    /// Fields of a request at offset 0 of an open file or directory.
    fn position(handle: u64, size: u32) -> Vec<u8> {
        [&handle.to_ne_bytes()[..], &[0; 8], &words(&[size])].concat()
    }

    #[test]
    fn written_bytes_are_read_through_a_ring() {
        let served = RequestFixture::new();
        let (ino, handle) = create_hello_file(&served);
        let read = header(opcode::READ, ino, &position(handle, 4096));
        assert_eq!(served.expect_body(&read, b""), b"hello");
    }

    #[test]
    fn absent_names_get_a_cacheable_entry() {
        let served = RequestFixture::new();
        let (ino, _) = create_hello_file(&served);
        let found = served.expect_body(&header(opcode::LOOKUP, ROOT, b""), b"file\0");
        assert_eq!(
            (found.len(), u64_at(&found, 0), u64_at(&found, 48)),
            (128, ino, 5)
        );
        let absent = served.expect_body(&header(opcode::LOOKUP, ROOT, b""), b"none\0");
        assert_eq!((absent.len(), u64_at(&absent, 0)), (128, 0));
    }

    #[test]
    fn attribute_answers_match_the_kernel_formats() {
        let served = RequestFixture::new();
        let (ino, _) = create_hello_file(&served);
        let attr = served.expect_body(&header(opcode::GETATTR, ino, b""), b"");
        assert_eq!(
            (attr.len(), u64_at(&attr, 16), u64_at(&attr, 24)),
            (16 + 88, ino, 5)
        );
        let stat = served.expect_body(&header(opcode::STATFS, ROOT, b""), b"");
        assert_eq!(stat.len(), 80);
    }

    #[test]
    fn seeking_a_hole_finds_the_end() {
        const SEEK_HOLE: u32 = 4;
        let served = RequestFixture::new();
        let (ino, handle) = create_hello_file(&served);
        let seek = header(opcode::LSEEK, ino, &position(handle, SEEK_HOLE));
        let hole = served.expect_body(&seek, b"");
        assert_eq!((hole.len(), u64_at(&hole, 0)), (8, 5));
    }

    #[test]
    fn listings_end_before_the_buffer_does() {
        let served = RequestFixture::new();
        create_hello_file(&served);
        let opened = served.expect_body(&header(opcode::OPENDIR, ROOT, b""), b"");
        let directory = u64_at(&opened, 0);
        for (opcode, head) in [(opcode::READDIR, 24), (opcode::READDIRPLUS, 128 + 24)] {
            let fields = |size| position(directory, size);
            let listed = served.expect_body(&header(opcode, ROOT, &fields(4096)), b"");
            assert_eq!(listed.len() % 8, 0);
            assert!(
                listed.len() >= 3 * (head + 8),
                "the file and two directories"
            );
            let little = served.expect_body(&header(opcode, ROOT, &fields(head as u32 + 8)), b"");
            assert_eq!(little.len(), head + 8, "one fits");
        }
    }

    #[test]
    fn release_and_unlink_have_empty_answers() {
        let served = RequestFixture::new();
        let (ino, handle) = create_hello_file(&served);
        let release = header(opcode::RELEASE, ino, &handle.to_ne_bytes());
        assert!(served.expect_body(&release, b"").is_empty());
        let unlink = header(opcode::UNLINK, ROOT, b"");
        assert!(served.expect_body(&unlink, b"file\0").is_empty());
    }

    #[test]
    fn every_request_is_answered_exactly_once() {
        let served = RequestFixture::new();
        // A generator with a full period: the same garbage in every run.
        let mut state = 2026_u64;
        let mut next = move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as u32
        };
        let mut answered_well = 0;
        for _ in 0..20_000 {
            let mut header = [0; HEADER_BYTES];
            // Small numbers name files and handles that there are; large ones are out of bounds.
            for at in (0..HEADER_BYTES).step_by(4) {
                let word = match next() % 4 {
                    0 => next() % 8,
                    1 => next(),
                    2 => u32::MAX - next() % 8,
                    _ => 0,
                };
                header[at..at + 4].copy_from_slice(&word.to_ne_bytes());
            }
            header[4..8].copy_from_slice(&(next() % 60).to_ne_bytes());
            if next() % 2 == 0 {
                header[16..24].copy_from_slice(&ROOT.to_ne_bytes());
            }
            let length = next() % 40;
            let payload: Vec<u8> = (0..length)
                .map(|_| b"ab\0/.\xff"[next() as usize % 6])
                .collect();
            let answered = served.ask(&header, &payload);
            assert!(answered.error == 0 || answered.body.is_empty());
            assert!(answered.error >= 0, "{}", answered.error);
            answered_well += u32::from(answered.error == 0);
        }
        assert!(
            answered_well > 100,
            "{answered_well}: hardly anything was tried"
        );
    }

    #[test]
    fn an_unanswered_request_fails_with_eio() {
        let served = RequestFixture::new();
        drop(KernelReply::new(Arc::clone(&served.outbox), 7, None));
        let Some(OutboxCommand::Commit(all)) = served.outbox.take_command() else {
            panic!("no answer");
        };
        assert_eq!((all[0].index, all[0].error), (7, Errno::EIO.code()));
    }
}
