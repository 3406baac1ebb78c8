//! What the scheduler does to the world: its journal, calls to servers. Decides nothing.

mod node_probe;
pub(crate) mod connectivity;
pub(crate) mod volume_copy;
pub mod homes;
pub mod job_logs;
pub mod journal;
pub(crate) mod listing_tracker;
pub(crate) mod remote_io;
mod file_extraction;
pub(crate) mod servers;
pub(crate) mod node_quotas;
pub mod user_commands;
pub(crate) mod job_watch;
