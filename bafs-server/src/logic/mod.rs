//! Decisions of the servers as pure values: no clock, no file, no network, no randomness.

pub mod adverts;
pub(crate) mod blocks;
pub mod bucket;
pub(crate) mod rendezvous;
pub mod space;
pub mod volumes;
