//! How much of each cache a node holds, and when caches come and go.

pub(crate) mod keeping;
pub(crate) mod partition;
mod partitioning;
pub(crate) mod prefetch;
pub(crate) mod reclaim;
pub(crate) mod refetch;
mod reserving;
mod single_copy;

pub(crate) use partitioning::{CachePartitioning, CachePlanning};

/// All of them, the default first.
pub(crate) static PARTITIONINGS: &[&dyn CachePartitioning] =
    &[&reserving::Reserving, &single_copy::SingleCopy];
