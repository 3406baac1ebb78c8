//! Serves the kernel: each FUSE request becomes one operation of a volume, and its result one
//! reply.
//!
//! ```text
//!  kernel ─▶ /dev/fuse ─▶ requests.rs (fuser) ─────┐
//!         ─▶ ring of a processor ─▶ ring/ ─────────┤
//!         ─▶ /dev/fuse ─▶ shared_readers.rs ───────┤
//!                                                  ▼
//!                    handlers.rs, operations.rs ─▶ Volume::run ─▶ Tree
//!                                                  │
//!  kernel ◀─ completions.rs, reply_traits.rs ◀─────┘ result, and data of a read
//! ```
//!
//! * [`FuseMount`] mounts a volume, serves it in threads of its own, and unmounts it. [`MountKind`]
//!   says whether by mount(2) or by `fusermount3`. `connection_end.rs` tells an unmount from an
//!   abort.
//! * Three ways bring requests, and handlers are the same for all. FUSE over io_uring has one ring
//!   for each processor. Otherwise threads of the volume read the device. From the ninth volume of
//!   an agent on, volumes share threads.
//! * As root, the kernel itself reads files that lie wholly on this machine (`passthrough.rs`).
//! * A kernel may collect writes and send them later, if the mount allows it (`write_back.rs`).
//!   They are at the volume before it is unmounted.
//!
//! **Errors.** The program gets the errno of the operation. [`MountError`] is for the caller of a
//! mount: it names what is missing and what to do. A lost volume fails every request at once.
//!
//! **Concurrency.** A reply may come from another thread than the one that read the request.
//! Operations that wait for a server are answered by the runtime, while the threads of the mount go
//! on.
//!
//! **Limits.** A request reads or writes at most 1 MiB (256 KiB writes where threads are shared).
//! The first eight volumes have 32 threads together, the others share 32.
//!
//! This is the only user of `fuser`. The protocol is described in fuse(4) and in the kernel's
//! `Documentation/filesystems/fuse*`. See `docs/decisions/0022-fuse-over-io-uring.md` and
//! `0023-fuse-passthrough-for-read-only-volumes.md`.

mod completions;
mod convert;
mod file_system;
mod handlers;
pub(crate) mod mirror;
mod mount;
mod mount_error;
mod operations;
mod passthrough;
mod reader_slots;
mod reply_traits;
mod requests;
mod ring;
mod serving;
mod shared_readers;
mod write_back;

pub use mount::{FuseMount, MountKind, open_device};
pub use mount_error::MountError;
pub use ring::enable_rings;
