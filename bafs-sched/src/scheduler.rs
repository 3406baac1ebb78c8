//! The one entrance of the core, [`Scheduler::step`]: apply a fact, ask the policies, commit what
//! they decide.

use std::ops::Deref;

use bafs_proto::ids::{RunId, ServerId};
use bafs_proto::time::Time;
use bafs_workflow::Workflow;

use crate::decision::Decision;
use crate::policy::View;
use crate::policy::order::node_demand::NodeDemand;
use crate::state::scheduler_state::{Phase, State};
use crate::strategy_selector::{NullSelector, StrategySelector};
use crate::{Action, Event, Settings};

/// Decides what a workflow needs done next. Deterministic: equal facts give equal decisions.
#[derive(Debug, Clone, PartialEq)]
pub struct Scheduler {
    pub(crate) state: State,
    keeps_decisions: bool,
}

impl Scheduler {
    /// A scheduler of a workflow of which nothing is done yet, without a strategy selector: it
    /// follows the limits of the settings, or none.
    pub fn new(run: RunId, workflow: Workflow, settings: Settings) -> Self {
        Self::with_strategy_selector(run, workflow, settings, &NullSelector)
    }

    /// The same with a selector, which is asked when the settings configure one. Recovery needs the
    /// same selector: with another one the same facts lead to other decisions.
    pub fn with_strategy_selector(
        run: RunId,
        workflow: Workflow,
        settings: Settings,
        selector: &dyn StrategySelector,
    ) -> Self {
        let state = State::new(run, workflow, settings, selector);
        Self {
            state,
            keeps_decisions: false,
        }
    }

    /// Applies one fact. Never waits, never fails; what must be done is added to `actions`.
    pub fn step(&mut self, now: Time, event: Event, actions: &mut Vec<Action>) {
        if self.state.phase == Phase::Over {
            return;
        }
        self.state.pass_time(now, &event);
        self.state.apply(event);
        if !self.state.has_time_stopped() {
            self.state.advance();
        }
        actions.append(&mut self.state.out);
        if !self.keeps_decisions {
            self.state.decisions.clear();
        }
    }

    /// What was decided since this was asked last, while decisions are kept.
    pub fn take_decisions(&mut self) -> Vec<Decision> {
        std::mem::take(&mut self.state.decisions)
    }

    /// Keeps what is decided from now on for [`Self::take_decisions`]. Without that it is
    /// forgotten after each step.
    pub fn keep_decisions(&mut self) {
        self.keeps_decisions = true;
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
