//! Follows another strategy when the model predicts that it ends sooner.

use super::{Policy, StrategyChanges};

/// Asks the model again while the run goes on.
#[derive(Debug)]
pub(super) struct Adaptive;

impl Policy for Adaptive {
    fn name(&self) -> &'static str {
        "adaptive"
    }

    fn summary(&self) -> &'static str {
        "the strategy changes when the model predicts that the rest of the run ends sooner"
    }
}

impl StrategyChanges for Adaptive {
    fn may_change(&self) -> bool {
        true
    }
}
