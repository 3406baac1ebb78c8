//! Files that the kernel reads by itself, because they lie wholly on this machine (passthrough).
//! Which these are, the volume says.
//!
//! All opens of one file must be of one kind, or the kernel answers EIO: what the first one got,
//! the others get too, until the last is closed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bafs_proto::file_op::FileReply;
use bafs_proto::ids::InodeNo;
use fuser::{BackingId, FileHandle, FopenFlags, ReplyOpen};

use super::completions::kernel_error;
use crate::tree::Completion;
use crate::volume::Volume;

/// The open files of a volume, and which of them the kernel reads by itself.
#[derive(Debug, Default)]
pub(super) struct PassthroughFiles {
    open: Mutex<BTreeMap<InodeNo, OpenedFile>>,
    /// The kernel does not let this process give it files.
    is_refused: AtomicBool,
}

#[derive(Debug)]
struct OpenedFile {
    count: u32,
    backing: Option<BackingId>,
}

/// Whether the kernel will never take a file of this process (it wants root of the machine), or of
/// this disk (it is itself on top of another).
fn is_permanent_refusal(error: &std::io::Error) -> bool {
    use nix::libc::{EINVAL, ELOOP, ENOTTY, EOPNOTSUPP, EPERM};
    let finals = [EINVAL, ELOOP, ENOTTY, EOPNOTSUPP, EPERM];
    error
        .raw_os_error()
        .is_some_and(|errno| finals.contains(&errno))
}

impl PassthroughFiles {
    /// Whether the kernel refused to take a file, so that to open one brings nothing.
    pub(super) fn is_refused(&self) -> bool {
        self.is_refused.load(Ordering::Relaxed)
    }

    /// Opens a file that needs no handle, as the kernel's own when that can be. May wait for the
    /// node.
    pub(super) fn open(
        &self,
        volume: &Arc<Volume>,
        ino: InodeNo,
        cached: FopenFlags,
        reply: ReplyOpen,
    ) {
        if volume.health().loss().is_some() {
            return reply.error(fuser::Errno::EIO);
        }
        self.send_open(volume, (ino, FileHandle(ino.0)), cached, reply);
    }

    /// Answers the open of a file that the tree has opened.
    pub(super) fn open_completion(
        self: &Arc<Self>,
        volume: &Arc<Volume>,
        cached: FopenFlags,
        reply: ReplyOpen,
    ) -> Completion {
        let (files, volume) = (Arc::clone(self), Arc::clone(volume));
        Box::new(move |result, _| match result {
            Ok(FileReply::Opened { handle, attr }) => {
                files.send_open(&volume, (attr.ino, FileHandle(handle.0)), cached, reply);
            }
            other => reply.error(kernel_error(other)),
        })
    }

    fn send_open(
        &self,
        volume: &Arc<Volume>,
        (ino, handle): (InodeNo, FileHandle),
        cached: FopenFlags,
        reply: ReplyOpen,
    ) {
        // Held while the node is asked: nobody else may open the same file in another way.
        let mut open = self.lock();
        let opened = open.entry(ino).or_insert_with(|| OpenedFile {
            count: 0,
            backing: self.register_backing(volume, ino, &reply),
        });
        opened.count += 1;
        match &opened.backing {
            Some(backing) => reply.opened_passthrough(handle, FopenFlags::empty(), backing),
            None => reply.opened(handle, cached),
        }
    }

    /// One open of a file is over.
    pub(super) fn release(&self, volume: &Arc<Volume>, ino: InodeNo) {
        let mut open = self.lock();
        let Some(opened) = open.get_mut(&ino) else {
            return;
        };
        opened.count -= 1;
        if opened.count > 0 {
            return;
        }
        if let Some(OpenedFile {
            backing: Some(backing),
            ..
        }) = open.remove(&ino)
        {
            // The kernel lets go of the file first, then the node may.
            drop(backing);
            volume.release_passthrough(ino);
        }
    }

    fn register_backing(
        &self,
        volume: &Arc<Volume>,
        ino: InodeNo,
        reply: &ReplyOpen,
    ) -> Option<BackingId> {
        let (file, size) = volume.open_passthrough(ino)?;
        match reply.open_backing(&file) {
            Ok(backing) => {
                volume.record_passthrough(ino, size);
                Some(backing)
            }
            Err(error) => {
                tracing::debug!(%error, "the kernel does not take a file; it asks for its bytes");
                if is_permanent_refusal(&error) {
                    self.is_refused.store(true, Ordering::Relaxed);
                }
                drop(file);
                volume.release_passthrough(ino);
                None
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<InodeNo, OpenedFile>> {
        // No holder leaves the map half-changed.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
