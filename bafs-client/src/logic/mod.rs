//! What the agent decides without waiting: no clock, no file, no network.

pub mod read_ahead_filter;
pub mod delegation;
pub mod manifest_tree;
pub mod metadata_cache;
pub mod inode_map;
pub mod attribute_updates;
pub mod operation_log;
pub mod mount_table;
mod delegated_opens;
pub mod page_set;
pub mod inflight_queries;
mod delegated_renames;
pub mod recovery_search;
