//! Decisions of the servers as pure values: no clock, no file, no network, no randomness.

pub mod adverts;
pub mod bucket;
pub(crate) mod blocks;
pub(crate) mod rendezvous;
pub mod space;
pub mod volumes;
