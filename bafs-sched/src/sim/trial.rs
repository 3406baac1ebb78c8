//! A workflow under each policy, one after the other: how workloads are planned of which no
//! equation knows the shape. It does not say what is allocated; the planner does.

use super::engine::Simulation;
use super::load::Load;
use super::policy::{Policy, Scenario};
use super::record::{Run, Stuck};
use crate::planner::{Environment, Shape, Strategy};
use crate::workflow::Workflow;

/// One simulated run of a workflow.
#[derive(Debug, Clone, PartialEq)]
pub struct Trial {
    /// What the scheduler followed.
    pub policy: Policy,
    /// How it went.
    pub run: Run,
}

/// Simulates a workflow without a plan, and under every strategy that its bottleneck allows, but
/// for remote I/O, which is the user's to choose.
///
/// # Errors
/// When a simulated run does not come to an end: a defect.
pub fn trials(
    workflow: &Workflow,
    shape: &Shape,
    environment: &Environment,
    load: &Load,
    seed: u64,
) -> Result<Vec<Trial>, Stuck> {
    let possible = Strategy::EACH
        .into_iter()
        .filter(|strategy| strategy.allocate(shape, environment).is_planned());
    let policies = std::iter::once(Policy::Need).chain(possible.map(Policy::Strategy));
    let trial = |policy| {
        let scenario = Scenario::new(environment.clone(), policy, load.clone(), seed);
        let run = Simulation::new(workflow.clone(), scenario).run()?;
        Ok(Trial { policy, run })
    };
    policies.map(trial).collect()
}
