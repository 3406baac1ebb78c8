//! The tests of this crate from outside as one program, for each program is linked with all again.

mod bench;
mod corners;
mod model;
mod operations;
mod space;
