//! Decisions of the servers as pure values: no clock, no file, no network, no randomness.

pub mod adverts;
pub(crate) mod block_claims;
pub(crate) mod blocks;
pub(crate) mod digest_memory;
pub mod node_quota;
pub(crate) mod placement;
pub(crate) mod read_ahead;
pub(crate) mod rendezvous;
pub mod space;
pub mod token_bucket;
pub(crate) mod turn_queue;
pub mod volumes;
