//! BAFS servers: home, catalog, and node (storage and jobs). Mechanism only: they do what they
//! are told and report what happened; every policy is the scheduler's.

pub mod access;
pub mod cache;
pub mod catalog;
pub mod clock;
pub mod counters;
pub mod door;
pub mod executor;
mod fault;
mod full_disk;
pub mod home;
pub mod homes;
mod lives;
pub mod logic;
pub mod node;
pub mod serving;
mod source;
pub mod storage;
pub mod trees;
