//! Which ready job goes first, and how nodes are shared among runs. Table of contents only.

pub(crate) mod critical_path;
pub mod fair_share;
pub(crate) mod node_demand;
