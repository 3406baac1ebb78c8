//! Follows the strategy that was chosen at the start. For comparison.

use super::{Policy, StrategyChanges};

/// Asks the model once.
#[derive(Debug)]
pub(super) struct Fixed;

impl Policy for Fixed {
    fn name(&self) -> &'static str {
        "fixed"
    }

    fn summary(&self) -> &'static str {
        "the strategy that was chosen at the start is kept to the end"
    }
}

impl StrategyChanges for Fixed {
    fn may_change(&self) -> bool {
        false
    }
}
