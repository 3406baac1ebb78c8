//! What becomes possible after a fact: each family is asked in a fixed order, and what it decides
//! is committed.

use crate::policy::View;
use crate::state::scheduler_state::{Phase, State};

impl State {
    /// Does what has become possible.
    pub(crate) fn advance(&mut self) {
        if self.phase == Phase::Gathering {
            self.gather_nodes();
        }
        if self.phase == Phase::Running {
            self.make_sizes_up();
            self.reconsider_strategy();
            self.empty_leaving_nodes();
            if let Some(priority) = View::new(self).prioritise_critical_path() {
                self.commit(priority);
            }
            self.place_all();
            self.prefetch_ahead();
            self.resolve_deadlock();
            if self.graph.is_final() && self.extractions.is_final() && self.attempts.is_empty() {
                self.finish();
            }
        }
        if self.phase == Phase::Finishing {
            self.end_if_clean();
        }
    }
}
