//! Which ready job goes first, and how nodes are shared among runs.

mod critical_path;
pub(crate) mod declared_levels;
pub mod fair_share;
mod least_need;
pub(crate) mod node_demand;
mod ready_order;
pub(crate) mod urgency;

pub(crate) use ready_order::ReadyOrder;

/// All of them, the default first.
pub(crate) static ORDERS: &[&dyn ReadyOrder] = &[
    &least_need::LeastNeed,
    &critical_path::CriticalPath,
    &declared_levels::BreadthFirst,
    &declared_levels::DepthFirst,
];
