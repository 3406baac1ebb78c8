//! The tests of this crate from outside as one program, for each program is linked with all again.

mod differential;
mod delegation;
mod mount;
mod owners;
mod restarts;
mod serving;
mod mounted_volume;
mod trees;
