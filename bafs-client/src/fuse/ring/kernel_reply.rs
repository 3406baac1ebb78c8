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

use super::super::reply_traits::{
    AttrReply, CreateReply, DataReply, DirectoryPlusReply, DirectoryReply, EmptyReply, EntryReply,
    ErrorReply, OpenReply, STAT_BLOCK_BYTES, SeekReply, StatReply, WriteReply, XattrReply,
};
use super::outbox::{Outbox, ReadyReply};
use crate::kernel::RingBuffers;

/// Bytes of `struct fuse_out_header`.
const OUT_HEADER_BYTES: usize = 16;

/// Bits of `st_mode` above the type.
const TYPE_SHIFT: u32 = 12;

/// The answer to one request; it can be given by any thread, once. Not given, it is an error.
#[derive(Debug)]
pub(in super::super) struct KernelReply {
    route: ReplyRoute,
    is_sent: bool,
}

/// The way that an answer goes.
#[derive(Debug)]
enum ReplyRoute {
    Ring {
        outbox: Arc<Outbox>,
        index: usize,
        /// Where data go without a copy more, for requests that have none themselves.
        buffers: Option<Box<RingBuffers>>,
    },
    Device {
        device: Arc<OwnedFd>,
        /// The number of the request.
        unique: u64,
    },
}

impl KernelReply {
    pub(super) fn new(
        outbox: Arc<Outbox>,
        index: usize,
        buffers: Option<Box<RingBuffers>>,
    ) -> Self {
        let route = ReplyRoute::Ring {
            outbox,
            index,
            buffers,
        };
        Self {
            route,
            is_sent: false,
        }
    }

    /// The answer to the request with this number, by the device that it came from.
    pub(in super::super) fn through_device(device: Arc<OwnedFd>, unique: u64) -> Self {
        Self {
            route: ReplyRoute::Device { device, unique },
            is_sent: false,
        }
    }

    fn send_body(mut self, body: Vec<u8>) {
        self.send(0, body, 0);
    }

    fn send(&mut self, error: i32, body: Vec<u8>, in_place: usize) {
        self.is_sent = true;
        match &mut self.route {
            ReplyRoute::Ring {
                outbox,
                index,
                buffers,
            } => outbox.push(ReadyReply {
                index: *index,
                error,
                body,
                in_place,
                buffers: buffers.take(),
            }),
            ReplyRoute::Device { device, unique } => write_reply(device, *unique, error, &body),
        }
    }

    fn send_bytes(&mut self, data: &[u8]) {
        match &mut self.route {
            ReplyRoute::Device { device, unique } => {
                self.is_sent = true;
                write_reply(device, *unique, 0, data);
            }
            ReplyRoute::Ring { buffers, .. } => {
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
fn write_reply(device: &OwnedFd, unique: u64, error: i32, body: &[u8]) {
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

impl Drop for KernelReply {
    fn drop(&mut self) {
        if !self.is_sent {
            self.send(Errno::EIO.code(), Vec::new(), 0);
        }
    }
}

/// A structure of `fuse.h` that is being written, field by field.
#[derive(Debug, Default)]
struct StructWriter(Vec<u8>);

impl StructWriter {
    fn new() -> Self {
        // The largest answer with a form of its own: a file that was made.
        Self(Vec::with_capacity(144))
    }

    fn write_u32(mut self, value: u32) -> Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    fn write_u64(mut self, value: u64) -> Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    fn write_zeroes(mut self, bytes: usize) -> Self {
        self.0.resize(self.0.len() + bytes, 0);
        self
    }

    /// `struct fuse_attr`.
    fn write_attr(self, attr: &Attr) -> Self {
        let (atime, mtime, ctime) = (attr.atime, attr.mtime, attr.ctime);
        self.write_u64(attr.ino.0)
            .write_u64(attr.size)
            .write_u64(attr.blocks)
            .write_u64(atime.seconds as u64)
            .write_u64(mtime.seconds as u64)
            .write_u64(ctime.seconds as u64)
            .write_u32(atime.nanoseconds)
            .write_u32(mtime.nanoseconds)
            .write_u32(ctime.nanoseconds)
            .write_u32(attr.mode)
            .write_u32(attr.nlink)
            .write_u32(attr.uid)
            .write_u32(attr.gid)
            .write_u32(attr.rdev)
            .write_u32(attr.block_size)
            .write_u32(0)
    }

    /// The head of `struct fuse_entry_out`. Inode numbers are never used again within a session,
    /// so there is one generation.
    fn write_entry_head(self, ino: u64, ttl: Duration) -> Self {
        let (seconds, nanoseconds) = (ttl.as_secs(), ttl.subsec_nanos());
        self.write_u64(ino)
            .write_u64(0)
            .write_u64(seconds)
            .write_u64(seconds)
            .write_u32(nanoseconds)
            .write_u32(nanoseconds)
    }

    /// `struct fuse_entry_out`.
    fn write_entry(self, ttl: Duration, attr: &Attr) -> Self {
        self.write_entry_head(attr.ino.0, ttl).write_attr(attr)
    }

    /// `struct fuse_open_out`.
    fn write_open(self, handle: HandleId, flags: FopenFlags) -> Self {
        self.write_u64(handle.0)
            .write_u32(flags.bits())
            .write_u32(0)
    }

    /// `struct fuse_dirent`, in whole steps of eight bytes.
    fn write_directory_entry(mut self, entry: &DirectoryEntry) -> Self {
        self = self
            .write_u64(entry.ino.0)
            .write_u64(entry.cookie)
            .write_u32(entry.name.len() as u32)
            .write_u32((entry.mode >> TYPE_SHIFT) & 0o17);
        self.0.extend_from_slice(&entry.name);
        let end = self.0.len().next_multiple_of(8);
        let missing = end - self.0.len();
        self.write_zeroes(missing)
    }
}

/// Bytes of `struct fuse_attr`.
const ATTR_BYTES: usize = 88;

impl ErrorReply for KernelReply {
    fn send_error(mut self, errno: Errno) {
        self.send(errno.code(), Vec::new(), 0);
    }
}

impl EntryReply for KernelReply {
    fn send_entry(self, ttl: Duration, attr: &Attr) {
        self.send_body(StructWriter::new().write_entry(ttl, attr).0);
    }

    fn send_absent(self, ttl: Duration) {
        self.send_body(
            StructWriter::new()
                .write_entry_head(0, ttl)
                .write_zeroes(ATTR_BYTES)
                .0,
        );
    }
}

impl AttrReply for KernelReply {
    fn send_attr(self, ttl: Duration, attr: &Attr) {
        let (seconds, nanoseconds) = (ttl.as_secs(), ttl.subsec_nanos());
        let head = StructWriter::new()
            .write_u64(seconds)
            .write_u32(nanoseconds)
            .write_u32(0);
        self.send_body(head.write_attr(attr).0);
    }
}

impl EmptyReply for KernelReply {
    fn send_done(self) {
        self.send_body(Vec::new());
    }
}

impl DataReply for KernelReply {
    fn send_data(mut self, data: &[u8]) {
        self.send_bytes(data);
    }
}

impl OpenReply for KernelReply {
    fn send_handle(self, handle: HandleId, flags: FopenFlags) {
        self.send_body(StructWriter::new().write_open(handle, flags).0);
    }
}

impl CreateReply for KernelReply {
    fn send_created(self, ttl: Duration, attr: &Attr, handle: HandleId, flags: FopenFlags) {
        self.send_body(
            StructWriter::new()
                .write_entry(ttl, attr)
                .write_open(handle, flags)
                .0,
        );
    }
}

impl WriteReply for KernelReply {
    fn send_count(self, bytes: u32) {
        self.send_body(StructWriter::new().write_u32(bytes).write_u32(0).0);
    }
}

impl SeekReply for KernelReply {
    fn send_position(self, at: i64) {
        self.send_body(StructWriter::new().write_u64(at as u64).0);
    }
}

impl XattrReply for KernelReply {
    fn send_length(self, bytes: u32) {
        self.send_body(StructWriter::new().write_u32(bytes).write_u32(0).0);
    }

    fn send_value(self, data: &[u8]) {
        self.send_data(data);
    }
}

impl StatReply for KernelReply {
    fn send_stat(self, stat: TreeStat) {
        let block = u64::from(STAT_BLOCK_BYTES);
        let free = stat.free_bytes / block;
        let fields = StructWriter::new()
            .write_u64(stat.size_bytes.div_ceil(block))
            .write_u64(free)
            .write_u64(free)
            .write_u64(stat.size_files)
            .write_u64(stat.free_files)
            .write_u32(STAT_BLOCK_BYTES)
            .write_u32(NAME_BYTES_MAX as u32)
            .write_u32(STAT_BLOCK_BYTES)
            .write_zeroes(28);
        self.send_body(fields.0);
    }
}

/// A listing that is being put together, up to the room that the kernel has for it.
#[derive(Debug)]
pub(super) struct DirectoryListing {
    reply: KernelReply,
    bytes: Vec<u8>,
    bytes_max: usize,
}

impl DirectoryListing {
    pub(super) fn new(answer: KernelReply, bytes_max: usize) -> Self {
        Self {
            reply: answer,
            bytes: Vec::new(),
            bytes_max,
        }
    }

    fn add(&mut self, entry: &StructWriter) -> bool {
        let fits = self.bytes.len() + entry.0.len() <= self.bytes_max;
        if fits {
            self.bytes.extend_from_slice(&entry.0);
        }
        fits
    }
}

impl ErrorReply for DirectoryListing {
    fn send_error(self, errno: Errno) {
        self.reply.send_error(errno);
    }
}

impl DirectoryReply for DirectoryListing {
    fn add_entry(&mut self, entry: &DirectoryEntry) -> bool {
        self.add(&StructWriter::new().write_directory_entry(entry))
    }

    fn send_entries(self) {
        self.reply.send_body(self.bytes);
    }
}

impl DirectoryPlusReply for DirectoryListing {
    fn add_entry(&mut self, entry: &DirectoryEntry, ttl: Duration) -> bool {
        let fields = match &entry.attr {
            Some(attr) => StructWriter::new().write_entry(ttl, attr),
            // The kernel takes only number and type, from the name.
            None => StructWriter::new()
                .write_entry_head(entry.ino.0, Duration::ZERO)
                .write_zeroes(ATTR_BYTES),
        };
        self.add(&fields.write_directory_entry(entry))
    }

    fn send_entries(self) {
        self.reply.send_body(self.bytes);
    }
}
