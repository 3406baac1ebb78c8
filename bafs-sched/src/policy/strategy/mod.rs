//! Which allocation strategy is followed. Table of contents only.

pub(crate) mod compute_time;
pub(crate) mod expected_nodes;
pub(crate) mod selector;
