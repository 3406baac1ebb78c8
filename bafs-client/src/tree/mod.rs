//! The trees behind a volume: one interface to run an operation, five ways to do it.
//!
//! [`Tree::run`] takes the caller, an operation and the data of a write. It calls a [`Completion`]
//! once, with the result and the data of a read. Operations name files by inode number and open
//! files by handle.
//!
//! | Tree | Serves | How an operation runs |
//! |---|---|---|
//! | [`RemoteTree`] | a scratch volume of another node, or a home | a call to the server |
//! | [`CacheTree`] | a cache volume | names from memory, data from blocks |
//! | [`InlineTree`] | a scratch volume of this machine | in this process, on its directory |
//! | [`LocalTree`] | a directory, without a server | in this process |
//! | [`BindMountTree`] | a watched volume of this machine | by the kernel alone |
//!
//! [`take_handoff`] turns a remote tree into an inline tree or a bind mount, if the server is on
//! this machine. [`MountLocation`] says whether a job or the host sees the volume.
//!
//! The rest of [`Tree`] tells the FUSE side what the tree can do: passthrough, read-ahead, and
//! whether operations end in the calling thread.
//!
//! **Errors.** A result is an errno. A failure of the server is reported to
//! [`crate::volume_health::VolumeHealth`], which loses the volume. Its readers and writers get
//! errors until the job is killed.
//!
//! **Concurrency.** `run` may be called from any thread. It never waits for the network: an
//! operation that must wait is given to the runtime, and completes there. Operations on local disks
//! wait in the calling thread, except the long ones (`blocking_operations.rs`).
//!
//! Each tree keeps its own state. [`Tree::close`] ends the session with the server. It waits until
//! delegated operations have run.

mod bind_mount;
mod blocking_operations;
mod cache;
mod completion;
mod data_path;
mod disk_watch;
mod inline;
mod local;
mod read_watch;
mod remote;
mod server;
mod tree_handoff;

use std::os::fd::OwnedFd;
use std::path::Path;

use bafs_proto::file_op::{Caller, FileOp, FileReply, TreeStat};
use bafs_proto::ids::InodeNo;
use bafs_proto::job_report::ObservedInputs;
use bafs_proto::message::TreeRef;

pub use bind_mount::BindMountTree;
pub use cache::CacheTree;
pub use completion::Completion;
pub use data_path::DataPath;
pub use inline::InlineTree;
pub use local::LocalTree;
pub use remote::{Durability, RemoteTree};
pub use server::Server;
pub use tree_handoff::{MountLocation, take_handoff};

use crate::limits::{READ_AHEAD_KIB, REMOTE_READ_AHEAD_KIB};
use crate::sandbox::{Access, is_root_of_machine};
use crate::volume_mode::FileReads;

/// A tree of files: runs the operations of one volume.
#[derive(Debug)]
pub enum Tree {
    /// Behind a server: each operation is a call.
    Remote(RemoteTree),
    /// A read-only view: names are in memory, data come in blocks.
    Cache(CacheTree),
    /// In this process.
    Local(LocalTree),
    /// In this process, on a directory that a server on this machine handed over.
    Inline(InlineTree),
    /// A directory of this machine that the kernel shows by itself; no operation comes here.
    BindMount(BindMountTree),
}

impl Tree {
    /// Runs an operation; `data` is what a write writes. What needs no waiting is answered before
    /// this returns, by the calling thread: handing it over would cost more than doing it.
    pub fn run(&self, caller: Caller, op: FileOp, data: &[u8], done: Completion) {
        match self {
            Self::Remote(tree) => tree.run(caller, op, data, done),
            Self::Cache(tree) => tree.run(op, done),
            Self::Local(tree) => tree.run(caller, &op, data, done),
            Self::Inline(tree) => tree.run(caller, op, data, done),
            Self::BindMount(tree) => tree.run(&op, done),
        }
    }

    /// Whether the close of a file has something to wait for.
    pub fn has_blocking_close(&self) -> bool {
        match self {
            Self::Remote(tree) => tree.has_blocking_close(),
            Self::Cache(_) | Self::Local(_) | Self::Inline(_) | Self::BindMount(_) => false,
        }
    }

    /// A program closes a file: answers when what it did with it is as safe as was promised.
    pub fn close_file(&self, ino: InodeNo, done: Completion) {
        match self {
            Self::Remote(tree) => tree.close_file(ino, done),
            Self::Cache(_) | Self::Local(_) | Self::Inline(_) | Self::BindMount(_) => {
                done(Ok(FileReply::Done), &[]);
            }
        }
    }

    /// Whether changes were answered that have not reached the server.
    pub(crate) fn has_unsent_changes(&self) -> bool {
        match self {
            Self::Remote(tree) => tree.has_unsent_changes(),
            Self::Cache(_) | Self::Local(_) | Self::Inline(_) | Self::BindMount(_) => false,
        }
    }

    /// What the tree held, and its disk, when the latest of its operations was told, if they are
    /// told later than they are answered.
    pub(crate) fn latest_stat(&self) -> Option<TreeStat> {
        match self {
            Self::Remote(tree) => tree.latest_stat(),
            Self::Cache(_) | Self::Local(_) | Self::Inline(_) | Self::BindMount(_) => None,
        }
    }

    /// Bytes that an operation keeps in this process until it is over: a write's data once, a
    /// read's as they come and as they are put together.
    pub(crate) fn copied_bytes(&self, op: &FileOp, data: &[u8]) -> usize {
        match (self, op) {
            (Self::Inline(tree), op) if tree.is_copying_data(op) => data.len(),
            (Self::Local(_) | Self::Inline(_) | Self::BindMount(_), _) => 0,
            (_, FileOp::Read { length, .. }) => 2 * *length as usize,
            _ => data.len(),
        }
    }

    /// The directory that is shown as it is, if the kernel does all by itself.
    pub fn directory(&self) -> Option<&Path> {
        match self {
            Self::BindMount(tree) => Some(tree.directory()),
            Self::Remote(_) | Self::Cache(_) | Self::Local(_) | Self::Inline(_) => None,
        }
    }

    /// Whether anything in a directory that is shown as it is differs from what it was, or nobody
    /// knows; nothing where operations are counted.
    pub(crate) async fn is_changed(&self, access: Access) -> Option<bool> {
        match self {
            Self::BindMount(tree) => Some(access == Access::ReadWrite && tree.is_changed().await),
            Self::Remote(_) | Self::Cache(_) | Self::Local(_) | Self::Inline(_) => None,
        }
    }

    /// Path of the first file that was read of a directory that is shown as it is, if known.
    pub(crate) fn first_read(&self) -> Option<String> {
        match self {
            Self::BindMount(tree) => tree.first_read(),
            Self::Remote(_) | Self::Cache(_) | Self::Local(_) | Self::Inline(_) => None,
        }
    }

    /// The job is over: who reads from here on does so for us.
    pub(crate) fn stop_watching_reads(&self) {
        if let Self::BindMount(tree) = self {
            tree.stop_watching_reads();
        }
    }

    /// Path and size of a file, if the tree knows them by itself.
    pub fn describe(&self, ino: InodeNo) -> Option<(String, u64)> {
        match self {
            Self::Cache(tree) => tree.describe(ino),
            Self::Remote(_) | Self::Local(_) | Self::Inline(_) | Self::BindMount(_) => None,
        }
    }

    /// What a job saw of the source that the tree shows, if that is known exactly.
    pub(crate) fn observed_inputs(&self) -> Option<ObservedInputs> {
        match self {
            Self::Cache(tree) => tree.observed_inputs(),
            Self::Remote(_) | Self::Local(_) | Self::Inline(_) | Self::BindMount(_) => None,
        }
    }

    /// The name of the file that is all of the tree, if it is known to be but one file.
    pub fn only_file(&self) -> Option<String> {
        match self {
            Self::Cache(tree) => tree.only_file(),
            Self::Remote(_) | Self::Local(_) | Self::Inline(_) | Self::BindMount(_) => None,
        }
    }

    /// Whether the tree holds one single file instead of being a directory that somebody listed.
    pub fn is_single_file(&self) -> bool {
        match self {
            Self::Cache(tree) => tree.is_single_file(),
            Self::Remote(_) | Self::Local(_) | Self::Inline(_) | Self::BindMount(_) => false,
        }
    }

    /// Who can read files for the kernel, and why.
    pub fn passthrough_support(&self) -> (FileReads, String) {
        match self {
            Self::Cache(tree) => tree.passthrough_support(),
            // A later writer of a file that the kernel has would map it and pass by the account.
            // The kernel takes files of root only.
            Self::Inline(tree) if tree.is_read_only() && is_root_of_machine() => {
                let text = "the kernel reads large files directly, if it supports them";
                (FileReads::Passthrough, text.to_owned())
            }
            Self::Remote(_) | Self::Local(_) | Self::Inline(_) | Self::BindMount(_) => (
                FileReads::Agent,
                "neither a cache volume nor one to read on this machine".to_owned(),
            ),
        }
    }

    /// The open file of a file that stays wholly on this machine until
    /// [`Self::release_passthrough`], with its size in bytes; `None` when there is none. May wait
    /// for the node; not to be called by a thread of the runtime.
    pub fn open_passthrough(&self, ino: InodeNo) -> Option<(OwnedFd, u64)> {
        match self {
            Self::Cache(tree) => tree.open_passthrough(ino),
            Self::Inline(tree) => tree.open_passthrough(ino),
            Self::Remote(_) | Self::Local(_) | Self::BindMount(_) => None,
        }
    }

    /// Undoes [`Self::open_passthrough`].
    pub fn release_passthrough(&self, ino: InodeNo) {
        match self {
            Self::Cache(tree) => tree.release_passthrough(ino),
            Self::Remote(_) | Self::Local(_) | Self::Inline(_) | Self::BindMount(_) => {}
        }
    }

    /// The path of its operations.
    pub fn data_path(&self) -> DataPath {
        match self {
            Self::Local(_) | Self::Inline(_) => DataPath::Inline,
            Self::Remote(_) => DataPath::Remote,
            Self::Cache(_) => DataPath::Cached,
            Self::BindMount(_) => DataPath::BindMounted,
        }
    }

    /// Whether a read through the page cache is the kernel's guess at what a program will want,
    /// and not worth fetching: it may be refused, as the kernel then reads what is needed.
    pub fn is_speculative_read(&self, ino: InodeNo, offset: u64, length: u32) -> bool {
        match self {
            Self::Cache(tree) => tree.is_speculative_read(ino, offset, length),
            Self::Remote(_) | Self::Local(_) | Self::Inline(_) | Self::BindMount(_) => false,
        }
    }

    /// Bytes that the kernel should read ahead of a sequential reader, in KiB.
    pub fn read_ahead_kib(&self) -> u32 {
        match self {
            // Of a home only mapped memory is read ahead, and its link is shared by everybody.
            Self::Remote(tree) if matches!(tree.tree(), TreeRef::Home(_)) => READ_AHEAD_KIB,
            Self::Remote(_) => REMOTE_READ_AHEAD_KIB,
            Self::Cache(_) | Self::Local(_) | Self::Inline(_) | Self::BindMount(_) => {
                READ_AHEAD_KIB
            }
        }
    }

    /// The kernel reads so many bytes ahead, and around pages of mapped memory.
    pub fn set_read_ahead_bytes(&self, bytes: u64) {
        if let Self::Cache(tree) = self {
            tree.set_read_ahead_bytes(bytes);
        }
    }

    /// Has operations that wait for a server fail, as nobody needs their answers any more.
    pub fn stop_waiting(&self) {
        if let Self::Inline(tree) = self {
            tree.stop_waiting();
        }
    }

    /// Ends the session with the server, if there is one, and asks it to keep what was written so
    /// long, in milliseconds.
    pub async fn close(&self, keep_ms: u64) {
        match self {
            Self::Remote(tree) => tree.close(keep_ms).await,
            Self::Inline(tree) => tree.close(keep_ms).await,
            Self::BindMount(tree) => tree.close(keep_ms).await,
            Self::Cache(_) | Self::Local(_) => {}
        }
    }
}
