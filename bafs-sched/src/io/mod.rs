//! What the scheduler does to the world: its journal, calls to servers. Decides nothing.

mod asking;
pub(crate) mod contact;
pub(crate) mod copying;
pub mod homes;
pub mod job_logs;
pub mod journal;
pub(crate) mod listing;
pub(crate) mod remote_io;
mod sending;
pub(crate) mod servers;
pub(crate) mod shares;
pub mod steer;
pub(crate) mod watch;
