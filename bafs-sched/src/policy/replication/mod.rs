//! When a scratch volume is copied to another node. Table of contents only.

pub(crate) mod copies;
pub(crate) mod cost_benefit;
pub(crate) mod overdue;
pub(crate) mod reconsider;
