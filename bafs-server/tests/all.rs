//! The tests of this crate from outside as one program, for each program is linked with all again.

mod cache;
mod catalog;
mod executor;
mod extraction;
mod fd_passing;
mod filling;
mod handoff;
mod home;
mod home_fences;
mod home_names;
mod home_reading;
mod home_refusals;
mod homes;
mod lifetimes;
mod node;
mod node_listing;
mod older_copies;
mod resizing;
mod set_extraction;
mod storage;
mod test_home;
mod test_nodes;
mod trees;
