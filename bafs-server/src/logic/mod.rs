//! Decisions of the servers as pure values: no clock, no file, no network, no randomness.

pub mod adverts;
pub(crate) mod ahead;
pub mod allotments;
pub(crate) mod blocks;
pub mod bucket;
pub(crate) mod claims;
pub(crate) mod placement;
pub(crate) mod rendezvous;
pub mod space;
pub mod volumes;
