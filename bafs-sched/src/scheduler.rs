//! The one entrance of the core, [`Scheduler::step`]: apply a fact, ask the policies, commit what
//! they decide.

use std::ops::Deref;
use std::sync::Arc;

use bafs_proto::ids::{RunId, ServerId};
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_workflow::Workflow;

use crate::decision::Decision;
use crate::policy::View;
use crate::policy::order::node_demand::NodeDemand;
use crate::policy_names::PolicyPositions;
use crate::recorded_step::RecordedStep;
use crate::state::kept_state::{StateChanges, StateRows};
use crate::state::recorded::Kept;
use crate::state::scheduler_state::{Phase, State};
use crate::strategy_selector::{NullSelector, StrategySelector};
use crate::{Action, Event, Settings};

/// Decides what a workflow needs done next. Deterministic: equal facts give equal decisions.
#[derive(Debug, Clone)]
pub struct Scheduler {
    pub(crate) state: State,
    /// Where steps are recorded.
    recorder: Option<Box<Recorder>>,
    /// Of the last step.
    decisions: Vec<Decision>,
}

/// What a scheduler needs to tell what its steps write.
#[derive(Debug, Clone, Default)]
struct Recorder {
    /// Single values as they were last told.
    last: StateRows,
    /// Where the rows of a step are written, so that each step need not find memory anew.
    buffer: Vec<u8>,
}

/// What was recorded of it, and what its last step decided, say nothing of a scheduler.
impl PartialEq for Scheduler {
    fn eq(&self, other: &Self) -> bool {
        self.state == other.state
    }
}

impl Scheduler {
    /// A scheduler of a workflow of which nothing is done yet, without a strategy selector: it
    /// follows the limits of the settings, or none.
    pub fn new(run: RunId, workflow: impl Into<Arc<Workflow>>, settings: Settings) -> Self {
        Self::with_strategy_selector(run, workflow, settings, &NullSelector)
    }

    /// The same with a selector, which is asked when the settings configure one. With another one
    /// the same facts may lead to other decisions; recovery decides nothing.
    pub fn with_strategy_selector(
        run: RunId,
        workflow: impl Into<Arc<Workflow>>,
        settings: Settings,
        selector: &dyn StrategySelector,
    ) -> Self {
        let policies = PolicyPositions::of(&settings.policies);
        let state = State::new(run, workflow.into(), settings, policies, selector);
        Self {
            state,
            recorder: None,
            decisions: Vec::new(),
        }
    }

    /// Applies one fact. Never waits, never fails; what must be done is added to `actions`.
    pub fn step(&mut self, now: Time, event: Event, actions: &mut Vec<Action>) {
        self.step_event(now, &event, actions);
    }

    fn step_event(&mut self, now: Time, event: &Event, actions: &mut Vec<Action>) {
        self.decisions.clear();
        if self.state.phase == Phase::Over {
            return;
        }
        self.state.pass_time(now, event);
        self.state.apply(event);
        if !self.state.has_time_stopped() {
            self.state.advance();
        }
        actions.append(&mut self.state.out);
        self.decisions.append(&mut self.state.decisions);
    }

    /// What the last step decided, in this order.
    pub fn last_decisions(&self) -> &[Decision] {
        &self.decisions
    }

    /// Notes from now on what steps write: [`Self::record_step`] needs it, and whoever takes
    /// snapshots.
    pub fn start_recording(&mut self) {
        self.state.start_recording();
        self.recorder = Some(Box::default());
    }

    /// A step, with all that a journal keeps of it.
    pub fn record_step(&mut self, now: Time, event: Event) -> RecordedStep {
        let mut actions = Vec::new();
        self.step_event(now, &event, &mut actions);
        let changes = match self.recorder.as_deref_mut() {
            Some(Recorder { last, buffer }) => self.state.take_changes(last, buffer),
            None => StateChanges::default(),
        };
        RecordedStep {
            at: now,
            event,
            decisions: std::mem::take(&mut self.decisions),
            actions,
            changes,
        }
    }

    /// All that differs from a new scheduler. Only of one that records since it was new.
    pub fn snapshot(&self) -> StateChanges {
        self.state.all_changes()
    }

    /// Takes what a recorded step wrote, or a snapshot, without deciding anything. Before it steps
    /// again, or answers why jobs wait, [`Self::finish_redo`] is called.
    ///
    /// # Panics
    /// When the changes are of another version: those of a journal were checked when it was read.
    pub fn redo(&mut self, changes: &StateChanges) {
        let rows = changes.decode();
        self.state
            .put_back(rows.expect("changes were checked when they were read"));
    }

    /// The same for changes of a journal that were not checked when they were read.
    ///
    /// # Errors
    /// `Malformed`: the changes are of an unknown form.
    pub fn try_redo(&mut self, changes: &StateChanges) -> Result<()> {
        let rows = changes.decode().map_err(|error| {
            let text = format!("rows of the journal do not decode ({error})");
            Error::new(ErrorCode::Malformed, text)
        })?;
        self.state.put_back(rows);
        Ok(())
    }

    /// Rebuilds what is not kept after the last of what was recorded.
    pub fn finish_redo(&mut self) {
        self.state.rebuild();
        if self.recorder.is_some() {
            // What was put back is in the journal.
            self.start_recording();
        }
    }

    /// What the run could use of a live node, and needs of it; nothing of others.
    pub fn node_demand(&self, server: ServerId) -> Option<NodeDemand> {
        let view = View::new(&self.state);
        view.node_demand(server, || view.least_to_end(server))
    }
}

impl Deref for Scheduler {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}
