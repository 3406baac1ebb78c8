//! The tests of this crate from outside as one program, for each program is linked with all again.

mod delegated_messages;
mod delegation;
mod differential;
mod early_listings;
mod mount;
mod mounted_volume;
mod owners;
mod restarts;
mod small_files;
mod test_server;
mod trees;
