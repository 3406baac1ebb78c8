//! The tests of this crate from outside as one program, for each program is linked with all again.

mod cache;
mod catalog;
mod door;
mod executor;
mod extraction;
mod filling;
mod hand_over;
mod home;
mod home_names;
mod home_reading;
mod home_world;
mod homes;
mod lifetimes;
mod node;
mod node_listing;
mod older_copies;
mod storage;
mod storage_world;
mod trees;
