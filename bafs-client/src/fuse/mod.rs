//! Between the kernel and a volume: each request becomes one operation, its answer one reply.
//! The only user of fuser; takes no decision of its own.

mod answers;
mod bridge;
mod collected;
mod convert;
mod ending;
mod handlers;
mod mount;
mod operations;
mod readers;
mod replies;
mod requests;
mod ring;
mod seats;
mod whole;

pub use ending::ConnectionEnd;
pub use mount::{MountError, MountKind, FuseMount, open_device};
