//! How much of each cache a node holds, and when caches come and go. Table of contents only.

pub(crate) mod load_imbalance;
pub(crate) mod partition;
pub(crate) mod prefetch;
pub(crate) mod reclaim;
pub(crate) mod refetch;
