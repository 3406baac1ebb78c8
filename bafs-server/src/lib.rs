//! BAFS servers: home, catalog, and node (storage and jobs). Mechanism only: they do what they
//! are told and report what happened; every policy is the scheduler's.

pub mod access;
pub mod cache;
pub mod catalog;
pub mod clock;
pub mod counters;
mod errors;
pub mod executor;
pub mod fd_passing;
mod full_disk;
pub mod home_clients;
pub mod home_server;
mod incarnation;
pub mod logic;
pub mod node;
pub mod serving;
mod source;
pub mod storage;
pub mod tree_sessions;
