//! The rules of the scheduler by family. Table of contents only.

pub(crate) mod admission;
pub(crate) mod cache_space;
pub(crate) mod failure;
pub mod order;
pub(crate) mod placement;
pub(crate) mod replication;
pub(crate) mod strategy;
