//! POSIX operations on a local directory, with an exact limit of space.
//!
//! A volume is a directory on a disk of the node. This crate runs file operations in it, for the
//! server of the volume or for an agent to which the server handed the directory over. It knows no
//! network, no token and no lease.
//!
//! ```text
//!  FileOp ──▶ Session ──▶ Tree ──▶ system calls on the directory
//!               │           └─ Account: bytes and files against the limit
//!               └─ inode numbers and open handles of one agent
//! ```
//!
//! * [`Tree`] is the directory with its limit. All sessions share it. A tree without a limit counts
//!   nothing, which home servers use.
//! * [`Session`] is the view of one agent: its inode numbers, its handles, and whether it may
//!   write. [`Session::run`] takes one operation and returns its result.
//! * The account charges each file what it takes on disk (`st_blocks`). It reserves the worst case
//!   before a write, so use never exceeds the limit.
//! * [`BlockMap`] says in shared memory ([`SharedWords`]) which blocks of a cache volume can be
//!   read.
//! * [`measure_use`], [`tree_fingerprint`], [`remove_tree`] and [`private_directory`] work on whole
//!   directories.
//!
//! **Errors.** A failed operation returns the errno that the same system call returns on the host
//! (errno(3)). The tree adds `ENOSPC` at its limit, `EROFS` in a session that may not write, and
//! `ESTALE` for an unknown number.
//!
//! **Concurrency.** All operations block, and many threads run them at once. Exactly one process
//! accounts for a tree: nobody else may change it meanwhile. The caller guarantees that by a lock
//! file.
//!
//! **Limits.** A session takes file descriptors of its process. `descriptor_limits.rs` divides them
//! among jobs, and names what happens when none is left (`EMFILE`, `ENFILE`).
//!
//! No lookup leaves the tree: names are single components, and no operation follows a symbolic
//! link.

mod kernel;

mod account;
mod attributes;
mod block_map;
mod data;
mod descriptor_limits;
mod directory_change;
mod directory_stream;
mod errno;
mod file_reference;
mod handles;
mod host_file;
mod inodes;
mod listing;
mod name_operations;
mod operation_kind;
mod operations;
mod removal;
mod session;
mod shared_words;
mod tree;
mod tree_scan;
mod trusted_directory;

pub use account::Limit;
pub use block_map::{BlockLayout, BlockMap};
pub use descriptor_limits::{JobDescriptorUse, ReservedDescriptors, reservable_descriptors};
pub use removal::remove_tree;
pub use session::Session;
pub use shared_words::{SHARED_WORDS_MAX, SharedAccess, SharedWords};
pub use tree::{ROOT_FREE_BYTES, Tree, TreeUse};
pub use tree_scan::{TreeFingerprint, measure_use, tree_fingerprint};
pub use trusted_directory::{private_directory, replacement_objection};
