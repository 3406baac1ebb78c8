//! BAFS servers: home, catalog, and node (storage and jobs). Mechanism only: they do what they
//! are told and report what happened; every policy is the scheduler's.

pub mod access;
pub mod clock;
pub mod counters;
pub mod serving;
