//! A volume's directory tree: POSIX operations on a local directory, with an exact limit.
//!
//! Knows no network, no token and no lease. Reading order: [`Tree`], [`Session`]. Apart from them:
//! [`SharedWords`], numbers that processes share, and [`BlockMap`] in them,
//! [`measure_use`], [`remove_tree`] and [`private_directory`].

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
mod inodes;
mod listing;
mod name_operations;
mod operation_kind;
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
pub use trusted_directory::private_directory;
