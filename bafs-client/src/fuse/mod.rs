//! Between the kernel and a volume: each request becomes one operation, its answer one reply.
//! The only user of fuser; takes no decision of its own.

mod completions;
mod connection_end;
mod convert;
mod file_system;
mod handlers;
mod mount;
mod mount_error;
mod operations;
mod passthrough;
mod reader_slots;
mod reply_traits;
mod requests;
mod ring;
mod shared_readers;
mod write_back;

pub use connection_end::ConnectionEnd;
pub use mount::{FuseMount, MountKind, open_device};
pub use mount_error::MountError;
