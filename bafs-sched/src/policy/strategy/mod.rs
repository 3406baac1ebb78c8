//! Which allocation strategy is followed.

mod adaptive;
pub(crate) mod compute_time;
pub(crate) mod expected_nodes;
mod fixed;
pub(crate) mod selector;

use super::Policy;

/// Decides whether a run leaves the allocation strategy with which it began.
pub(crate) trait StrategyChanges: Policy {
    /// Whether the model is asked again when nodes, sizes or run times turn out otherwise.
    fn may_change(&self) -> bool;
}

/// All of them, the default first.
pub(crate) static STRATEGY_CHANGES: &[&dyn StrategyChanges] = &[&adaptive::Adaptive, &fixed::Fixed];
