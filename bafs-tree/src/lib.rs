//! A volume's directory tree: POSIX operations on a local directory, with an exact limit.
//!
//! Knows no network, no token and no lease. Reading order: [`Tree`], [`Session`]. Apart from them:
//! [`SharedWords`], numbers that processes share, and [`BlockMap`] in them,
//! [`held_below`], [`remove_tree`] and [`private_directory`].

mod kernel;

mod account;
mod anchor;
mod attributes;
mod below;
mod block_map;
mod data;
mod descriptors;
mod directory;
mod errno;
mod handles;
mod inodes;
mod listing;
mod names;
mod private;
mod removal;
mod room;
mod session;
mod shared;
mod tree;

pub use account::Limit;
pub use below::{TreeFingerprint, measure_use, tree_fingerprint};
pub use block_map::{BlockMap, BlockLayout};
pub use descriptors::{JobDescriptorUse, ReservedDescriptors, reservable_descriptors};
pub use private::private_directory;
pub use removal::remove_tree;
pub use session::Session;
pub use shared::{SHARED_WORDS_MAX, SharedAccess, SharedWords};
pub use tree::{ROOT_FREE_BYTES, Tree, TreeUse};
