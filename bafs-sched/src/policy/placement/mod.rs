//! Where a job and its volumes go. Table of contents only.

pub(crate) mod capacity;
pub(crate) mod remote_data;
