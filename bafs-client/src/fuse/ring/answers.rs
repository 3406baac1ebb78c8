//! Answers in the kernel's own form (`fuse.h`), as they go by the ring, or by the device for
//! volumes that share their readers. Decides nothing.

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bafs_proto::file_op::{Attr, DirectoryEntry, TreeStat};
use bafs_proto::ids::HandleId;
use bafs_proto::limits::NAME_BYTES_MAX;
use fuser::{Errno, FopenFlags};

use super::super::answers::{
    AnswerAttr, AnswerCreate, AnswerData, AnswerEmpty, AnswerEntries, AnswerEntriesPlus,
    AnswerEntry, AnswerOpen, AnswerPosition, AnswerStat, AnswerWrite, AnswerXattr, Refuse,
    STAT_BLOCK_BYTES,
};
use super::outbox::{Answered, Outbox};
use crate::kernel::Buffers;

/// Bytes of `struct fuse_out_header`.
const OUT_HEADER_BYTES: usize = 16;

/// Bits of `st_mode` above the type.
const TYPE_SHIFT: u32 = 12;

/// The answer to one request; it can be given by any thread, once. Not given, it is an error.
#[derive(Debug)]
pub(in super::super) struct Answer {
    route: Route,
    is_given: bool,
}

/// The way that an answer goes.
#[derive(Debug)]
enum Route {
    Ring {
        outbox: Arc<Outbox>,
        index: usize,
        /// Where data go without a copy more, for requests that have none themselves.
        buffers: Option<Box<Buffers>>,
    },
    Device {
        device: Arc<OwnedFd>,
        /// The number of the request.
        unique: u64,
    },
}

impl Answer {
    pub(super) fn new(outbox: Arc<Outbox>, index: usize, buffers: Option<Box<Buffers>>) -> Self {
        let route = Route::Ring {
            outbox,
            index,
            buffers,
        };
        Self {
            route,
            is_given: false,
        }
    }

    /// The answer to the request with this number, by the device that it came from.
    pub(in super::super) fn by_device(device: Arc<OwnedFd>, unique: u64) -> Self {
        Self {
            route: Route::Device { device, unique },
            is_given: false,
        }
    }

    fn give(mut self, body: Vec<u8>) {
        self.send(0, body, 0);
    }

    fn send(&mut self, error: i32, body: Vec<u8>, in_place: usize) {
        self.is_given = true;
        match &mut self.route {
            Route::Ring {
                outbox,
                index,
                buffers,
            } => outbox.put(Answered {
                index: *index,
                error,
                body,
                in_place,
                buffers: buffers.take(),
            }),
            Route::Device { device, unique } => write_answer(device, *unique, error, &body),
        }
    }

    fn send_bytes(&mut self, data: &[u8]) {
        match &mut self.route {
            Route::Device { device, unique } => {
                self.is_given = true;
                write_answer(device, *unique, 0, data);
            }
            Route::Ring { buffers, .. } => {
                let place = buffers.as_mut();
                match place.and_then(|buffers| buffers.payload_mut().get_mut(..data.len())) {
                    Some(place) => {
                        place.copy_from_slice(data);
                        self.send(0, Vec::new(), data.len());
                    }
                    None => self.send(0, data.to_vec(), 0),
                }
            }
        }
    }
}

/// Writes `struct fuse_out_header` and what follows.
fn write_answer(device: &OwnedFd, unique: u64, error: i32, body: &[u8]) {
    let body = if error == 0 { body } else { &[] };
    let mut header = [0; OUT_HEADER_BYTES];
    let length = (OUT_HEADER_BYTES + body.len()) as u32;
    header[0..4].copy_from_slice(&length.to_ne_bytes());
    header[4..8].copy_from_slice(&(-error).to_ne_bytes());
    header[8..16].copy_from_slice(&unique.to_ne_bytes());
    let parts = [IoSlice::new(&header), IoSlice::new(body)];
    // Nobody waits for the answer any more (ENOENT), or the mount is gone.
    if let Err(error) = rustix::io::writev(device, &parts) {
        tracing::debug!(%error, "an answer is not wanted");
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.is_given {
            self.send(Errno::EIO.code(), Vec::new(), 0);
        }
    }
}

/// A structure of `fuse.h` that is being written, field by field.
#[derive(Debug, Default)]
struct Fields(Vec<u8>);

impl Fields {
    fn new() -> Self {
        // The largest answer with a form of its own: a file that was made.
        Self(Vec::with_capacity(144))
    }

    fn u32(mut self, value: u32) -> Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    fn zeroes(mut self, bytes: usize) -> Self {
        self.0.resize(self.0.len() + bytes, 0);
        self
    }

    /// `struct fuse_attr`.
    fn attr(self, attr: &Attr) -> Self {
        let (atime, mtime, ctime) = (attr.atime, attr.mtime, attr.ctime);
        self.u64(attr.ino.0)
            .u64(attr.size)
            .u64(attr.blocks)
            .u64(atime.seconds as u64)
            .u64(mtime.seconds as u64)
            .u64(ctime.seconds as u64)
            .u32(atime.nanoseconds)
            .u32(mtime.nanoseconds)
            .u32(ctime.nanoseconds)
            .u32(attr.mode)
            .u32(attr.nlink)
            .u32(attr.uid)
            .u32(attr.gid)
            .u32(attr.rdev)
            .u32(attr.block_size)
            .u32(0)
    }

    /// The head of `struct fuse_entry_out`. Inode numbers are never used again within a session,
    /// so there is one generation.
    fn believed(self, ino: u64, believe: Duration) -> Self {
        let (seconds, nanoseconds) = (believe.as_secs(), believe.subsec_nanos());
        self.u64(ino)
            .u64(0)
            .u64(seconds)
            .u64(seconds)
            .u32(nanoseconds)
            .u32(nanoseconds)
    }

    /// `struct fuse_entry_out`.
    fn entry(self, believe: Duration, attr: &Attr) -> Self {
        self.believed(attr.ino.0, believe).attr(attr)
    }

    /// `struct fuse_open_out`.
    fn open(self, handle: HandleId, flags: FopenFlags) -> Self {
        self.u64(handle.0).u32(flags.bits()).u32(0)
    }

    /// `struct fuse_dirent`, in whole steps of eight bytes.
    fn name(mut self, entry: &DirectoryEntry) -> Self {
        self = self
            .u64(entry.ino.0)
            .u64(entry.cookie)
            .u32(entry.name.len() as u32)
            .u32((entry.mode >> TYPE_SHIFT) & 0o17);
        self.0.extend_from_slice(&entry.name);
        let end = self.0.len().next_multiple_of(8);
        let missing = end - self.0.len();
        self.zeroes(missing)
    }
}

/// Bytes of `struct fuse_attr`.
const ATTR_BYTES: usize = 88;

impl Refuse for Answer {
    fn refuse(mut self, errno: Errno) {
        self.send(errno.code(), Vec::new(), 0);
    }
}

impl AnswerEntry for Answer {
    fn entry(self, believe: Duration, attr: &Attr) {
        self.give(Fields::new().entry(believe, attr).0);
    }

    fn absent(self, believe: Duration) {
        self.give(Fields::new().believed(0, believe).zeroes(ATTR_BYTES).0);
    }
}

impl AnswerAttr for Answer {
    fn attr(self, believe: Duration, attr: &Attr) {
        let (seconds, nanoseconds) = (believe.as_secs(), believe.subsec_nanos());
        let head = Fields::new().u64(seconds).u32(nanoseconds).u32(0);
        self.give(head.attr(attr).0);
    }
}

impl AnswerEmpty for Answer {
    fn done(self) {
        self.give(Vec::new());
    }
}

impl AnswerData for Answer {
    fn bytes(mut self, data: &[u8]) {
        self.send_bytes(data);
    }
}

impl AnswerOpen for Answer {
    fn handle(self, handle: HandleId, flags: FopenFlags) {
        self.give(Fields::new().open(handle, flags).0);
    }
}

impl AnswerCreate for Answer {
    fn made(self, believe: Duration, attr: &Attr, handle: HandleId, flags: FopenFlags) {
        self.give(Fields::new().entry(believe, attr).open(handle, flags).0);
    }
}

impl AnswerWrite for Answer {
    fn count(self, bytes: u32) {
        self.give(Fields::new().u32(bytes).u32(0).0);
    }
}

impl AnswerPosition for Answer {
    fn position(self, at: i64) {
        self.give(Fields::new().u64(at as u64).0);
    }
}

impl AnswerXattr for Answer {
    fn length(self, bytes: u32) {
        self.give(Fields::new().u32(bytes).u32(0).0);
    }

    fn value(self, data: &[u8]) {
        self.bytes(data);
    }
}

impl AnswerStat for Answer {
    fn stat(self, stat: TreeStat) {
        let block = u64::from(STAT_BLOCK_BYTES);
        let free = stat.free_bytes / block;
        let fields = Fields::new()
            .u64(stat.size_bytes.div_ceil(block))
            .u64(free)
            .u64(free)
            .u64(stat.size_files)
            .u64(stat.free_files)
            .u32(STAT_BLOCK_BYTES)
            .u32(NAME_BYTES_MAX as u32)
            .u32(STAT_BLOCK_BYTES)
            .zeroes(28);
        self.give(fields.0);
    }
}

/// A listing that is being put together, up to the room that the kernel has for it.
#[derive(Debug)]
pub(super) struct Listing {
    answer: Answer,
    bytes: Vec<u8>,
    room: usize,
}

impl Listing {
    pub(super) fn new(answer: Answer, room: usize) -> Self {
        Self {
            answer,
            bytes: Vec::new(),
            room,
        }
    }

    fn add(&mut self, entry: &Fields) -> bool {
        let fits = self.bytes.len() + entry.0.len() <= self.room;
        if fits {
            self.bytes.extend_from_slice(&entry.0);
        }
        fits
    }
}

impl Refuse for Listing {
    fn refuse(self, errno: Errno) {
        self.answer.refuse(errno);
    }
}

impl AnswerEntries for Listing {
    fn list(&mut self, entry: &DirectoryEntry) -> bool {
        self.add(&Fields::new().name(entry))
    }

    fn listed(self) {
        self.answer.give(self.bytes);
    }
}

impl AnswerEntriesPlus for Listing {
    fn list(&mut self, entry: &DirectoryEntry, believe: Duration) -> bool {
        let fields = match &entry.attr {
            Some(attr) => Fields::new().entry(believe, attr),
            // The kernel takes only number and type, from the name.
            None => Fields::new()
                .believed(entry.ino.0, Duration::ZERO)
                .zeroes(ATTR_BYTES),
        };
        self.add(&fields.name(entry))
    }

    fn listed(self) {
        self.answer.give(self.bytes);
    }
}
