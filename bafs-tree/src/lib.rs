//! A volume's directory tree: POSIX operations on a local directory, with an exact limit.
//!
//! Knows no network, no token and no lease. Reading order: [`Tree`], [`Session`]. Apart from them:
//! [`SharedWords`], numbers that processes share, and [`BlockMap`] in them,
//! [`held_below`], [`remove_tree`] and [`private_directory`].

mod syscalls;

mod account;
mod file_reference;
mod attributes;
mod tree_scan;
mod block_map;
mod data;
mod descriptor_limits;
mod directory_stream;
mod errno;
mod handles;
mod inodes;
mod listing;
mod name_operations;
mod trusted_directory;
mod removal;
mod directory_change;
mod session;
mod shared_words;
mod tree;

pub use account::Limit;
pub use tree_scan::{TreeFingerprint, measure_use, tree_fingerprint};
pub use block_map::{BlockMap, BlockLayout};
pub use descriptor_limits::{JobDescriptorUse, ReservedDescriptors, reservable_descriptors};
pub use trusted_directory::private_directory;
pub use removal::remove_tree;
pub use session::Session;
pub use shared_words::{SHARED_WORDS_MAX, SharedAccess, SharedWords};
pub use tree::{ROOT_FREE_BYTES, Tree, TreeUse};
