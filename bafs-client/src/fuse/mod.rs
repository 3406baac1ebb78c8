//! Between the kernel and a volume: each request becomes one operation, its answer one reply.
//! The only user of fuser; takes no decision of its own.

mod reply_traits;
mod file_system;
mod write_back;
mod convert;
mod connection_end;
mod handlers;
mod mount;
mod operations;
mod shared_readers;
mod completions;
mod requests;
mod ring;
mod reader_slots;
mod passthrough;

pub use connection_end::ConnectionEnd;
pub use mount::{MountError, MountKind, FuseMount, open_device};
