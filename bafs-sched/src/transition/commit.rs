//! The one place where decisions take effect.

use crate::decision::Decision;
use crate::state::critical_path::Urgency;
use crate::state::scheduler_state::State;
use crate::strategy_selector::Selection;

impl State {
    /// Carries a decision out, and notes it.
    pub(crate) fn commit(&mut self, decision: Decision) {
        self.decisions.push(decision.clone());
        match decision {
            // Placement.
            Decision::Start {
                job,
                server,
                creates,
                borrows,
            } => self.begin_start(job, server, creates, borrows),

            // Admission.
            Decision::BeginRunning => self.begin_running(),
            Decision::RelaxLimits(relaxation) => self.apply_relaxation(relaxation),
            Decision::Preempt {
                victim,
                beneficiary,
            } => self.preempt(victim, beneficiary),
            Decision::Unprotect => self.unprotect(),
            Decision::GiveUp { reason } => {
                self.messages.push(reason);
                self.finish();
            }

            // Cache space.
            Decision::EvictCache { volume } => self.retire_all(volume),
            Decision::Prefetch { volume, parts } => self.begin_prefetch(volume, &parts),
            Decision::CompleteCache {
                volume,
                server,
                part,
            } => self.create(volume, Some(server), part),

            // Order.
            Decision::PrioritiseChains { from, is_final } => {
                let is_over = is_final || self.urgency.is_over;
                self.urgency = Urgency { from, is_over };
                self.requeue_all();
            }

            // Strategy.
            Decision::FollowStrategy {
                strategy,
                reason,
                rules,
                has_simulated_rules,
            } => self.follow_selection(Selection {
                strategy,
                reason,
                rules,
                has_simulated_rules,
            }),
        }
    }
}
