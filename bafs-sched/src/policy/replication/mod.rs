//! When a scratch volume is copied to another node.

mod always;
pub(crate) mod copy_estimate;
mod copy_policy;
mod cost_benefit;
pub(crate) mod departures;
mod never;
pub(crate) mod obsolete_copies;
pub(crate) mod overdue;
pub(crate) mod reconsider;

pub(crate) use copy_policy::Replication;

/// All of them, the default first.
pub(crate) static REPLICATIONS: &[&dyn Replication] =
    &[&cost_benefit::CostBenefit, &always::Always, &never::Never];
