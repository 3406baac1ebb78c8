//! What the scheduler does to the world: its journal, calls to servers. Decides nothing.

pub(crate) mod connectivity;
mod file_extraction;
pub(crate) mod home_aliases;
pub mod homes;
pub mod job_logs;
pub(crate) mod job_watch;
pub mod journal;
pub(crate) mod listing_tracker;
mod node_probe;
pub(crate) mod node_quotas;
pub(crate) mod remote_io;
pub(crate) mod servers;
pub mod user_commands;
pub(crate) mod volume_copy;
