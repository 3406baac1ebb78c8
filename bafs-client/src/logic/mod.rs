//! What the agent decides without waiting: no clock, no file, no network.

pub mod attribute_updates;
mod delegated_directories;
mod delegated_lookups;
mod delegated_opens;
pub mod delegated_reads;
mod delegated_renames;
mod delegated_space;
pub mod delegation;
pub mod early_listings;
pub mod inflight_queries;
pub mod inode_map;
pub mod manifest_tree;
pub mod metadata_cache;
pub mod mount_table;
pub mod observed_names;
pub mod operation_log;
pub mod page_set;
pub mod read_ahead_filter;
pub mod reader_files;
pub mod recovery_search;
pub mod sibling_read_ahead;
pub mod small_files;
