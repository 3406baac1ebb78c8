//! BAFS servers: home, catalog, and node (storage and jobs). Mechanism only: they do what they
//! are told and report what happened; every policy is the scheduler's.

pub mod access;
pub mod cache;
pub mod catalog;
pub mod clock;
pub mod counters;
pub mod fd_passing;
pub mod executor;
mod errors;
mod full_disk;
pub mod home_server;
pub mod home_clients;
mod incarnation;
pub mod logic;
pub mod node;
pub mod serving;
mod source;
pub mod storage;
pub mod tree_sessions;
