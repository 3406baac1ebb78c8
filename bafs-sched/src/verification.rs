//! Decides again with the events of a journal, to see where this program would decide otherwise.

use serde::Serialize;

use crate::io::journal::History;
use crate::{Action, Event, StrategySelector};

/// A step after which this program decides other than the one that wrote the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DecisionDifference {
    /// When, in milliseconds since the run's first fact.
    pub at_ms: u64,
    /// The fact.
    pub event: Event,
    /// What the journal says was to be done.
    pub recorded: Vec<Action>,
    /// What this program would do.
    pub decided: Vec<Action>,
}

/// Decides again with the events of a journal, and answers the first step at which that differs:
/// what comes later follows from it. With the selector of the run.
pub fn verify_decisions(
    history: &History,
    selector: &dyn StrategySelector,
) -> Option<DecisionDifference> {
    let fresh = || {
        let mut scheduler = history.header.new_scheduler(selector);
        scheduler.start_recording();
        scheduler
    };
    let mut scheduler = fresh();
    for step in &history.steps {
        // Another scheduler took up the run, with what was kept.
        if matches!(step.event, Event::SchedulerResumed { .. }) {
            let mut resumed = fresh();
            resumed.redo(&scheduler.snapshot());
            resumed.finish_redo();
            scheduler = resumed;
        }
        let mut decided = Vec::new();
        scheduler.step(step.at, step.event.clone(), &mut decided);
        if decided != step.actions {
            return Some(DecisionDifference {
                at_ms: step.at.ms_since(history.began_at()),
                event: step.event.clone(),
                recorded: step.actions.clone(),
                decided,
            });
        }
    }
    None
}
